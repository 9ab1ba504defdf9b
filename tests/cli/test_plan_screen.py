import io
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from plan_factory import make_cluster, make_costs, make_memory, make_outcome, make_plan, make_record
from rich.console import Console

from planner.cli.plan_screen import print_result
from planner.hardware.spec import MeasuredError
from planner.plan.record import ModuleRow
from planner.plan.types import Reason, Rejection, SolverReport
from planner.strategy.mesh import ParallelDegrees
from planner.units import GIB, MIB
from planner.vocabulary import WorkKind

FILES = [Path("plans/gpt") / name for name in ("plan.json", "train.py", "runtime")]


def screen(record, *, width=80, files=FILES, verbose=False, **console):
    stream = io.StringIO()
    print_result(
        Console(file=stream, width=width, highlight=False, **console),
        record,
        files=files,
        verbose=verbose,
    )
    return stream.getvalue()


def squeezed(text):
    return " ".join(text.split())


@pytest.fixture
def pipelined():
    plan = make_plan(
        ParallelDegrees(dp_shard=4, tp=2, pp=4),
        costs=make_costs(bubble_s=0.030, pp_comm_s=0.004),
    )
    return make_record(make_outcome(plan))


@pytest.mark.parametrize("width", [80, 120])
def test_every_line_fits_and_ends_without_blanks(pipelined, width):
    lines = screen(pipelined, width=width).splitlines()
    for line in lines:
        assert line == line.rstrip()
        assert line.isascii(), "no box drawing"
        assert len(line) <= width or line.startswith("Run")


def test_the_header_marks_what_was_defaulted():
    text = squeezed(screen(make_record(global_batch_size=64)))
    assert "examples/gpt.py" in text
    assert "124 M parameters" in text
    assert "sequence 1024 (default)" in text
    assert "global batch 64," in text
    assert "bfloat16 compute (default)" in text
    assert "8 x h100-sxm of 79.1 GiB, 1 node of 8 (cluster h100-sxm)" in text


def test_a_last_node_that_is_not_full_is_said_and_started():
    record = replace(make_record(), cluster=make_cluster(20, gpus_per_node=8))
    text = screen(record, files=[Path("run/train.py")])
    assert "2 nodes of 8 and one of 4" in text
    assert (
        "torchrun --nnodes 3 --nproc-per-node 8 --node-rank RANK --master-addr HOST "
        "--master-port 29500 run/train.py" in text
    )
    assert "node 2: --nproc-per-node 4" in text


def test_verbose_shows_the_pattern_of_blocks():
    record = make_record()
    record = replace(record, model=replace(record.model, block_pattern="3 A + 58 B"))
    assert "blocks 3 A + 58 B" in screen(record, verbose=True)
    assert "3 A + 58 B" not in screen(record)
    assert "blocks" not in screen(make_record(), verbose=True).split("Cluster")[0]


def with_errors(*errors, uncalibrated_error=0.14):
    record = make_record()
    cluster = replace(
        record.cluster, step_time_errors=errors, uncalibrated_error=uncalibrated_error
    )
    return squeezed(screen(replace(record, cluster=cluster)))


PRODUCTS = (WorkKind.PRODUCTS, WorkKind.ATTENTION)


def runs(*axes, error=0.05, **kind):
    known = {
        "num_runs": 38,
        "least_gpus": 8,
        "most_gpus": 64,
        "least_step_s": 0.4,
        "most_step_s": 90.0,
        "work": PRODUCTS,
    }
    return MeasuredError(axes=axes, error=error, **(known | kind))


def test_the_recommendation_and_its_rates():
    text = with_errors(runs("tp"), runs(error=0.02))
    assert "Plan dp_shard 4, tp 2 step 412 ms +-5% 19.9 k tokens/s/GPU MFU 1.5%" in text
    assert (
        "Error of the step time: 5% on average over 38 measured runs on such devices, with tp, "
        "8 to 64 GPUs, steps of 400 ms to 90 s, models of matrix products and fused attention"
        in text
    )
    assert "each of 4 data-parallel ranks takes 8 microbatches of 2 per step" in text


def test_an_unknown_error_is_said_to_be_unknown():
    text = with_errors(uncalibrated_error=None)
    assert "step 412 ms (error not measured) 19.9 k" in text
    assert "Error of the step time: not known with constants of your own" in text


def test_the_error_of_other_plans_is_not_measured():
    text = with_errors()
    assert "step 412 ms (error not measured) 19.9 k" in text
    assert "not measured for plans of this kind (there are no runs on such devices)" in text
    assert "clusters left out of the fit it is 14% on average over all kinds" in text
    text = with_errors(runs(), runs("tp", least_gpus=64))
    assert "step 412 ms (error not measured) 19.9 k" in text
    assert (
        "not measured for plans of this kind (runs on such devices were data-parallel alone, 8 to "
        "64 GPUs, steps of 400 ms to 90 s, models of matrix products and fused attention; with tp, "
        "64 GPUs, steps of" in text
    )


@pytest.mark.parametrize(
    "kind",
    [{"least_gpus": 9}, {"most_gpus": 7}, {"least_step_s": 0.5}, {"most_step_s": 0.4}],
)
def test_the_error_of_other_sizes_is_not_measured(kind):
    assert "step 412 ms +-5%" in with_errors(runs("tp"))
    assert "step 412 ms (error not measured)" in with_errors(runs("tp", **kind))


@pytest.mark.parametrize(
    ("work", "is_known"),
    [(PRODUCTS, True), ((WorkKind.PRODUCTS,), True), ((*PRODUCTS, WorkKind.GROUPED), False)],
)
def test_the_error_of_models_of_other_ops_is_not_measured(work, is_known):
    record = make_record()
    best = record.outcome.best
    best = replace(best, model=replace(best.model, work=work))
    cluster = replace(record.cluster, step_time_errors=(runs("tp"),))
    outcome = replace(record.outcome, best=best)
    text = squeezed(screen(replace(record, cluster=cluster, outcome=outcome)))
    assert ("step 412 ms +-5%" in text) == is_known


def test_samples_are_not_called_tokens():
    record = make_record()
    record = replace(record, model=replace(record.model, seq_len=None))
    text = screen(record)
    assert "samples/s/GPU" in text
    assert "sequence 1024" not in text


def test_memory_stands_by_component_against_capacity(pipelined):
    lines = screen(pipelined).splitlines()
    title = lines.index("Memory per device by pipeline rank, GiB of 79.1")
    assert lines[title + 1].split() == (
        ["rank", "params", "grads", "optim", "activ", "buffers", "temp", "reserve", "peak"]
    )
    assert lines[title + 2].split()[:9] == (
        ["0", "3.7", "3.7", "7.5", "34.2", "2.1", "0.9", "5.0", "57.1"]
    )
    assert lines[title + 2].endswith("#########---  72%")


def test_small_models_are_shown_in_mib():
    small = make_memory(**dict.fromkeys(make_memory().__slots__, 3 * MIB))
    plan = make_plan(memory_by_rank=(small,))
    assert "Memory per device, MiB of" in screen(make_record(make_outcome(plan)))


def test_of_many_ranks_the_first_the_fullest_and_the_last_are_shown():
    plan = make_plan(ParallelDegrees(pp=32))
    memory = list(plan.memory_by_rank)
    memory[17] = make_memory(activations_gib=50.0)
    record = make_record(make_outcome(replace(plan, memory_by_rank=tuple(memory))))
    text = screen(record)
    assert "23 ranks that need no more are in memory.csv (-v shows all)" in text
    assert "\n  17    3.7" in text
    assert "ranks that need no more" not in screen(record, verbose=True)


def test_stage_cuts_are_named(pipelined):
    text = squeezed(screen(pipelined))
    assert "0 0 prologue, layers.0 - layers.2 none 15.6 ms 31.2 ms" in text
    assert "3 3 layers.9 - layers.11, epilogue none" in text
    assert "Stages" not in screen(make_record())


def test_the_step_is_broken_down(pipelined):
    text = squeezed(screen(pipelined))
    assert "Where the 446 ms of a step go" in text
    assert "pipeline bubble 30 ms" in text
    assert "recomputation" not in text.partition("Other layouts")[0]


def test_losers_are_compared_with_reasons():
    text = squeezed(screen(make_record(), width=140))
    assert (
        "Runner-up dp_shard 8 57.1 GiB 449 ms +9.0% 68 ms more exposed parameter and gradient "
        "traffic" in text
    )
    assert "No. 3 dp_shard 4, pp 2, 1F1B 57.1 GiB 451 ms +9.5% 60 ms more pipeline bubble" in text
    assert "Rule of thumb dp_shard 8 57.1 GiB 476 ms +15.5% 95 ms more recomputation" in text


def test_the_margin_and_the_safer_choice_are_named():
    record = make_record()
    lean = tuple(replace(each, activations_bytes=0) for each in record.outcome.best.memory_by_rank)
    runner_up = record.outcome.candidates[1]
    outcome = replace(
        record.outcome,
        candidates=(record.outcome.best, replace(runner_up, memory_by_rank=lean)),
        rule_of_thumb=None,
    )
    device = record.cluster.device.with_margin(0.05)
    cluster = replace(record.cluster, device=device, step_time_errors=(), uncalibrated_error=0.1)
    text = squeezed(screen(make_record(outcome, cluster=cluster)))
    assert "Memory per device, GiB of 79.1, 5% kept free" in text
    assert "Safer choice: dp_shard 8, microbatch 2 x 4" in text
    assert "holds 22.9 GiB, 34.2 GiB less" in text


def test_what_is_split_and_what_stays_whole_is_listed():
    units = ("layers.0", "layers.1", "layers.2")
    rows = [("wq", "column", ""), ("wo", "row", ""), ("gate", "whole", "3 x 5 does not divide")]
    listed = tuple(
        ModuleRow(units=units, module=module, how=how, reason=reason)
        for module, how, reason in rows
    )
    text = squeezed(screen(replace(make_record(), module_rows=listed)))
    assert "Split over 2 ranks of tp" in text
    assert "layers.0 - layers.2 wq by columns; wo by rows; gate whole (3 x 5 does not" in text
    assert "Split over" not in screen(make_record())


def test_top_limits_the_layouts_shown():
    text = screen(make_record(top=2))
    assert "Runner-up" in text
    assert "No. 3" not in text


def test_a_rule_of_thumb_that_is_as_good_or_does_not_fit_is_said_so():
    outcome = make_outcome()
    same = replace(outcome, rule_of_thumb=outcome.best)
    assert "gives the same plan" in screen(make_record(same), width=120)
    none = replace(outcome, rule_of_thumb=None)
    assert "gives no layout that fits" in squeezed(screen(make_record(none)))


def test_an_estimate_has_nothing_to_compare_with():
    outcome = make_outcome()
    alone = replace(outcome, candidates=(outcome.best,), rule_of_thumb=None, rejections=())
    text = screen(make_record(alone), files=[])
    assert "Other layouts" not in text
    assert "Considered" not in text
    assert "Wrote" not in text
    assert "torchrun" not in text


def test_refusals_are_counted_and_explained_on_demand():
    assert "Considered 8 layouts, refused 5: 3 memory, 2 kv_heads % tp" in screen(make_record())
    text = screen(make_record(), verbose=True)
    assert "2 x  kv_heads 4 is not divisible by tp 8; tp 1, 2, 4 would work" in text


def test_layouts_that_the_bound_rules_out_are_not_called_refused():
    outcome = make_outcome()
    slower = tuple(
        Rejection(
            degrees=outcome.best.degrees,
            rule="slower",
            why=partial(Reason, detail=f"{number} s"),
        )
        for number in range(40)
    )
    record = make_record(replace(outcome, rejections=(*outcome.rejections, *slower)))
    text = squeezed(screen(record))
    assert "Considered 48 layouts, refused 5: 3 memory, 2 kv_heads % tp; set aside 40:" in text
    assert "39 s" not in screen(record, verbose=True)


def test_the_proof_and_its_limits():
    outcome = make_outcome()
    text = squeezed(screen(make_record(outcome)))
    assert "Solver: optimal" in text
    assert "Not modelled: host RAM" in text
    cut_short = SolverReport(status="time limit", objective_s=0.412, bound_s=0.400)
    text = squeezed(screen(make_record(replace(outcome, solver=cut_short))))
    assert "Solver: time limit" in text
    assert "(gap 2.91%)" in text


def test_what_was_written_and_how_to_run_it():
    text = screen(make_record())
    assert "plans/gpt/: plan.json  train.py  runtime" in text
    assert "torchrun --standalone --nproc-per-node 8 plans/gpt/train.py\n" in text


def test_several_nodes_are_launched_on_each(pipelined):
    text = screen(pipelined)
    assert (
        "torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d "
        "--rdzv-endpoint HOST:29500 plans/gpt/train.py\n"
    ) in text
    assert "on every node" in text
    assert "plans/gpt/launch/" not in text


def test_launch_files_are_named_where_they_were_written(pipelined):
    folder = Path("plans/gpt")
    text = screen(pipelined, files=(folder / "plan.json", folder / "launch"))
    assert text.endswith("plans/gpt/launch/: to start it with Slurm, Kubernetes, SkyPilot\n")


def test_brackets_in_names_are_no_markup():
    record = make_record()
    name = "zoo.py:[bold]model[/bold]"
    record = replace(record, model=replace(record.model, name=name))
    assert name in screen(record)


def test_colour_only_where_it_is_wanted(pipelined):
    assert "\x1b[" not in screen(pipelined)
    assert "\x1b[" in screen(pipelined, force_terminal=True, color_system="standard")


def test_a_full_device_stands_out():
    cluster = make_cluster()
    device = replace(cluster.device, memory_bytes=58 * GIB)
    record = make_record(cluster=replace(cluster, device=device))
    assert "\x1b[31m###" in screen(record, force_terminal=True, color_system="standard")
