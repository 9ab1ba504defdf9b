"""The whole search: known answers, monotony, and the plan priced again from scratch."""

from dataclasses import replace
from pathlib import Path

import pytest
from searches import request_for, search_for

import planner
from planner.errors import CodegenError, InfeasiblePlanError, RequestError
from planner.framework.profiles import load_framework
from planner.framework.script import SCRIPT
from planner.graph.loading.load import load_model
from planner.graph.sizes.family import trace_family
from planner.hardware.profiles import load_cluster
from planner.pricing.reprice import reprice_s
from planner.search.space import LayoutSpace
from planner.search.stage_ilp import solve_stages
from planner.search.stage_problem import stage_problem
from planner.solver import Effort, NoSolutionError

TESTS = Path(__file__).parents[1]
T5 = TESTS / "graph" / "zoo" / "t5.py"


def scaled_links(cluster, factor):
    links = tuple(
        replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * factor)
        for link in cluster.links
    )
    return replace(cluster, links=links)


def scaled_memory(cluster, factor):
    device = replace(cluster.device, memory_bytes=int(cluster.device.memory_bytes * factor))
    return replace(cluster, device=device)


@pytest.fixture(scope="module")
def h100():
    return load_cluster("h100-sxm", gpus=8)


@pytest.fixture(scope="module")
def outcome(big_gpt, h100):
    return search_for(big_gpt, h100)


def test_the_best_is_proven_and_first(outcome):
    assert outcome.solver.status == "optimal"
    assert outcome.solver.gap < 1e-6
    times = [plan.costs.step_time_s for plan in outcome.candidates]
    assert times == sorted(times)
    assert outcome.best == outcome.candidates[0]
    assert outcome.best.costs.step_time_s == pytest.approx(outcome.solver.objective_s, rel=1e-6)


def test_pricing_a_plan_from_scratch_gives_the_objective(outcome, big_gpt, h100):
    for plan in outcome.candidates:
        assert reprice_s(plan, big_gpt, h100, load_framework(SCRIPT)) == pytest.approx(
            plan.costs.step_time_s, rel=1e-6
        )
    assert reprice_s(outcome.best, big_gpt, h100, load_framework(SCRIPT)) == pytest.approx(
        outcome.solver.objective_s, rel=1e-6
    )


def test_every_plan_is_complete_and_fits(outcome, h100):
    for plan in (*outcome.candidates, outcome.rule_of_thumb):
        assert plan.degrees.world_size == 8
        assert plan.microbatch_size * plan.num_microbatches * plan.degrees.dp == 64
        assert plan.stages[0].first_unit == 0
        assert plan.stages[-1].end_unit == len(plan.units)
        for before, after in zip(plan.stages[:-1], plan.stages[1:], strict=True):
            assert before.end_unit == after.first_unit
        assert len(plan.memory_by_rank) == plan.degrees.pp
        assert plan.peak_memory_bytes <= h100.device.memory_bytes


def test_the_rule_of_thumb_is_no_faster(outcome):
    assert outcome.rule_of_thumb.costs.step_time_s >= outcome.best.costs.step_time_s
    assert outcome.rule_of_thumb.degrees.tp == 1
    assert outcome.rule_of_thumb.degrees.pp == 1


def test_without_a_pipeline_there_is_no_bubble(outcome):
    for plan in outcome.candidates:
        if plan.degrees.pp == 1:
            assert plan.costs.bubble_s == 0
            assert plan.costs.pp_comm_s == 0
        else:
            assert plan.costs.bubble_s > 0


@pytest.mark.parametrize("factor", [0.03, 3.0])
def test_more_bandwidth_is_never_slower(big_gpt, h100, outcome, factor):
    other = search_for(big_gpt, scaled_links(h100, factor)).best.costs.step_time_s
    same = outcome.best.costs.step_time_s
    assert (other <= same * (1 + 1e-9)) == (factor > 1) or other == pytest.approx(same)


@pytest.mark.parametrize("factor", [0.15, 3.0])
def test_more_memory_is_never_slower(big_gpt, h100, outcome, factor):
    other = search_for(big_gpt, scaled_memory(h100, factor)).best.costs.step_time_s
    same = outcome.best.costs.step_time_s
    assert (other <= same * (1 + 1e-9)) == (factor > 1) or other == pytest.approx(same)


def test_parameters_per_rank_fall_with_dp_shard(big_gpt, h100):
    sizes = [
        search_for(big_gpt, h100, dp_shard=shards, tp=1, pp=1).best.memory_by_rank[0].params_bytes
        for shards in (1, 2, 4, 8)
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == pytest.approx(8 * sizes[3], rel=1e-6)


def test_fixed_values_are_kept(big_gpt, h100):
    fixed = {
        "tp": 2,
        "pp": 2,
        "schedule": "Interleaved1F1B",
        "microbatch_size": 2,
        "activation_checkpointing": "full",
    }
    for plan in search_for(big_gpt, h100, **fixed).candidates:
        assert (plan.degrees.tp, plan.degrees.pp) == (2, 2)
        assert plan.schedule == "Interleaved1F1B"
        assert plan.microbatch_size == 2
        for stage in plan.stages:
            blocks = [
                kind
                for unit, kind in zip(
                    range(stage.first_unit, stage.end_unit),
                    stage.activation_checkpointing,
                    strict=True,
                )
                if 0 < unit < len(plan.units) - 1
            ]
            assert set(blocks) <= {"full"}


def test_the_bubble_of_even_stages_has_its_closed_form(big_gpt, h100):
    """(p - 1) / m of a rank's work: Narayanan et al. 2021."""
    plan = search_for(big_gpt, h100, pp=2, tp=1, schedule="1F1B", microbatch_size=1).best
    work_s = plan.num_microbatches * max(s.forward_s + s.backward_s for s in plan.stages)
    assert plan.costs.bubble_s == pytest.approx(work_s / plan.num_microbatches, rel=0.1)


def test_less_memory_brings_recomputation(big_gpt, h100):
    small = scaled_memory(h100, 0.15)
    fixed = {"tp": 1, "pp": 1, "dp_shard": 8, "microbatch_size": 4}
    roomy, plan = (search_for(big_gpt, cluster, **fixed).best for cluster in (h100, small))
    assert {*roomy.stages[0].activation_checkpointing} == {"none"}
    assert {*plan.stages[0].activation_checkpointing} & {"selective", "full"}
    assert plan.costs.recompute_s > 0 == roomy.costs.recompute_s
    assert plan.peak_memory_bytes <= small.device.memory_bytes


def test_nothing_fits_says_by_how_much_and_what_would(big_gpt, h100):
    tiny = scaled_memory(h100, 0.06)
    with pytest.raises(InfeasiblePlanError) as error:
        search_for(big_gpt, tiny, cpu_offload=False)
    message = str(error.value)
    assert "short by" in message
    assert "on stage" in message
    assert "the largest part" in message
    assert error.value.shortfall_bytes_by_stage
    assert "fits" in error.value.hint


def test_where_nothing_fits_states_lie_in_host_memory(big_gpt, h100):
    tiny = scaled_memory(h100, 0.06)
    outcome = search_for(big_gpt, tiny)
    assert outcome.solver.status == "optimal"
    for plan in outcome.candidates:
        assert plan.cpu_offload
        assert max(plan.host_bytes_by_rank) <= tiny.host.memory_bytes
        assert reprice_s(plan, big_gpt, tiny, load_framework(SCRIPT)) == pytest.approx(
            plan.costs.step_time_s, rel=1e-6
        )
    same = search_for(big_gpt, tiny, cpu_offload=True)
    assert same.best == outcome.best


INPUTS = {"dp_shard": 8, "microbatch_size": 8, "reshard_after_forward": True, "loss_chunks": 16}


def short_of_memory(big_gpt, h100):
    """A cluster that takes no microbatch of ``INPUTS`` unless their inputs lie elsewhere."""
    needed, less = (
        search_for(
            big_gpt, h100, activation_checkpointing="full", activation_offload=offloads, **INPUTS
        ).best.memory_by_rank[0]
        for offloads in (False, True)
    )
    middle = (needed.total_bytes + less.total_bytes) // 2
    assert less.total_bytes < middle < needed.total_bytes
    return replace(h100, device=replace(h100.device, memory_bytes=middle))


def test_where_nothing_fits_inputs_lie_in_host_memory_before_states(big_gpt, h100):
    small = short_of_memory(big_gpt, h100)
    outcome = search_for(big_gpt, small, **INPUTS)
    assert outcome.solver.status == "optimal"
    for plan in outcome.candidates:
        assert plan.keeps_inputs_on_host
        assert not plan.cpu_offload
        assert reprice_s(plan, big_gpt, small, load_framework(SCRIPT)) == pytest.approx(
            plan.costs.step_time_s, rel=1e-6
        )
    same = search_for(big_gpt, small, activation_offload=True, **INPUTS)
    assert same.best == outcome.best
    with pytest.raises(InfeasiblePlanError, match="short by"):
        search_for(big_gpt, small, activation_offload=False, cpu_offload=False, **INPUTS)


def test_inputs_that_no_host_holds_are_refused(big_gpt, h100):
    small = short_of_memory(big_gpt, h100)
    poor = replace(small, host=replace(h100.host, memory_bytes=2**20))
    with pytest.raises(InfeasiblePlanError) as error:
        search_for(big_gpt, poor, cpu_offload=False, **INPUTS)
    assert "with activation_offload=true: the hosts of 8 x h100-sxm" in error.value.hint


def test_copies_to_the_host_and_back_count_as_recomputation(big_gpt, h100):
    full = {"activation_checkpointing": "full", **INPUTS}
    here, there = (
        search_for(big_gpt, h100, activation_offload=offloads, **full).best
        for offloads in (False, True)
    )
    graph = big_gpt.at(8)
    (stream,) = {graph.values[cut.values[0]].size_bytes for cut in graph.cuts}
    blocks = len(there.units) - 2
    copies_s = there.num_microbatches * blocks * 2 * stream / h100.host.link_bytes_per_s
    assert there.costs.recompute_s - here.costs.recompute_s == pytest.approx(copies_s, rel=1e-6)
    assert there.host_bytes_by_rank == (blocks * stream,)  # a power of two
    assert there.memory_by_rank[0].activations_bytes < here.memory_by_rank[0].activations_bytes


@pytest.mark.parametrize(
    ("fixed", "words"),
    [({"pp": 2}, "pp can be 1"), ({"compile": True}, "one of them can be false")],
)
def test_inputs_that_others_hold_stay_on_devices(fixed, words, big_gpt, h100):
    with pytest.raises(RequestError, match=words):
        search_for(big_gpt, h100, activation_offload=True, **fixed)


def test_what_several_blocks_read_is_not_copied_for_each(h100):
    t5 = trace_family(load_model(str(T5), seq_len=None), dtype="bfloat16")
    with pytest.raises(RequestError, match="an encoder's output"):
        search_for(t5, h100, activation_offload=True)


@pytest.mark.parametrize("offload", [False, True])
def test_what_stands_for_several_bounds_each_of_them(offload, big_gpt, h100):
    """Also where hosts add up gradients in each microbatch, and replicas send them once."""
    fixed = {"tp": 1, "pp": 1, "reshard_after_forward": True, "microbatch_size": 4}
    request = request_for(h100, batch=1024, cpu_offload=offload, **fixed)
    space = LayoutSpace(big_gpt, h100, request)
    legal, _ = space.legal()
    bounded = [each for prospect in space.prospects(legal) for each in prospect.searches()]
    seen = [configuration for search in bounded for configuration in search.stands_for]
    assert {each.degrees.dp_replicate for each in seen} == {1, 2, 4, 8}
    for search in bounded:
        for configuration in search.stands_for:
            (alone,) = space.searches(configuration)
            assert search.bound_s <= alone.bound_s * (1 + 1e-9), configuration.degrees


def test_states_lie_on_devices_where_they_fit(big_gpt, outcome, h100):
    assert not outcome.best.cpu_offload
    offloaded = search_for(big_gpt, h100, cpu_offload=True)
    assert offloaded.best.cpu_offload
    assert offloaded.best.costs.step_time_s > outcome.best.costs.step_time_s


def test_states_that_no_host_holds_are_refused(big_gpt, h100):
    poor = replace(scaled_memory(h100, 0.06), host=replace(h100.host, memory_bytes=2**30))
    with pytest.raises(InfeasiblePlanError, match="short by") as error:
        search_for(big_gpt, poor)
    assert "Nor does it fit with cpu_offload=true: the hosts of 8 x h100-sxm" in error.value.hint
    with pytest.raises(InfeasiblePlanError, match=r"a rank needs .* GiB at the least, and has 1"):
        search_for(big_gpt, poor, cpu_offload=True)


def test_what_one_host_does_not_hold_is_refused_by_that_rule(big_gpt, h100):
    poor = replace(h100, host=replace(h100.host, memory_bytes=3 * 2**30))
    outcome = search_for(big_gpt, poor, cpu_offload=True)
    refused = [each for each in outcome.rejections if each.rule == "host memory"]
    assert refused
    assert max(max(plan.host_bytes_by_rank) for plan in outcome.candidates) <= 3 * 2**30
    assert "of the host of each rank, more than its share of 3.0 GiB" in refused[0].why().detail


@pytest.mark.parametrize(
    ("fixed", "words"),
    [
        ({"schedule": "Interleaved1F1B"}, "schedule can be 1F1B"),
        ({"virtual_stages": 2}, "one stage on each rank"),
    ],
)
def test_shared_ranks_are_not_offloaded(fixed, words, big_gpt, h100):
    with pytest.raises(RequestError, match=words):
        search_for(big_gpt, h100, cpu_offload=True, pp=2, **fixed)


def test_an_unknown_host_and_a_cpu_hold_no_states(big_gpt, h100):
    with pytest.raises(RequestError, match=r"says nothing of its hosts.*\[host\]"):
        search_for(big_gpt, replace(h100, host=None), cpu_offload=True)
    with pytest.raises(RequestError, match="lies in host memory"):
        search_for(big_gpt, replace(h100, host_time_factor=0.0), cpu_offload=True)


def test_no_legal_layout_names_every_rule(llama):
    seven = load_cluster("h100-sxm", gpus=7, gpus_per_node=7)
    with pytest.raises(RequestError, match="global_batch_size 8"):
        search_for(llama, seven, batch=8, pp=1)


def test_what_is_left_names_axes_that_are_not_tried_unasked(llama, h100):
    with pytest.raises(RequestError, match="ep 4 gives each rank some") as error:
        search_for(llama, h100, cp=2, tp=2, ep=4)
    assert "dp_replicate, dp_shard, cp, tp, pp (" in error.value.hint


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("graph/zoo/moe.py", "add of (1, 32, 64), (1, 32, 64) whole in layers.1 runs on parts"),
        ("run/listed_experts.py", "slice of (1, 16, 32) in blocks.1"),
    ],
)
def test_the_op_is_named_that_runs_on_no_part_of_a_sequence(model, words):
    with pytest.raises(CodegenError, match="no rule says how") as caught:
        planner.plan(str(TESTS / model), gpus=2, fix={"cp": 2}, global_batch_size=16)
    assert words in str(caught.value)


def test_modules_that_are_faster_whole_are_said_to_be(mlp):
    """Links so slow that nothing is worth a collective."""
    cluster = load_cluster("h100-sxm", gpus=2)
    links = [replace(link, base_latency_s=1.0) for link in cluster.links]
    with pytest.raises(RequestError, match="tp 2 each module is faster whole") as error:
        search_for(mlp, replace(cluster, links=tuple(links)), tp=2)
    assert "tp" not in error.value.hint.split("(")[0].split(": ")[1].split(", ")


def test_uneven_stages_follow_uneven_blocks(mlp, h100):
    plan = search_for(mlp, h100, pp=2, dp_replicate=1).best
    lengths = [stage.end_unit - stage.first_unit for stage in plan.stages]
    assert sum(lengths) == len(plan.units)


def test_the_search_equals_one_ilp_for_every_configuration(big_gpt):
    """Bounds, cut-offs and incumbents leave nothing out that is better."""
    cluster = scaled_memory(load_cluster("h100-sxm", gpus=4), 0.3)
    best = search_for(big_gpt, cluster, batch=8).best
    space = LayoutSpace(big_gpt, cluster, request_for(cluster, batch=8))
    best_s = best.costs.step_time_s
    least = float("inf")
    for configuration in space.legal()[0]:
        for search in space.searches(configuration):
            problem = stage_problem(search, best_s)
            if problem is None:
                continue
            try:
                solution = solve_stages([problem], scale_s=best_s, effort=Effort(), cutoff_s=best_s)
            except NoSolutionError:
                continue
            least = min(least, solution.objective_s)
    assert best_s == pytest.approx(least, rel=1e-6)


SQUARED = """
from llama import build_model, example_batch
from torch.nn import functional

__all__ = ["build_model", "example_batch", "loss_fn"]


def loss_fn(output, targets):
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten()).square()
"""


def test_a_loss_that_does_not_run_in_chunks_is_taken_whole(tmp_path, monkeypatch):
    """A square of a sum over ranks is no such sum, so that logits are gathered first."""
    monkeypatch.setattr("planner.strategy.rules.CHUNK_BYTES", 1024)
    monkeypatch.syspath_prepend(TESTS.parent / "examples")
    (tmp_path / "squared.py").write_text(SQUARED)
    model, cluster = str(tmp_path / "squared.py"), "h100-sxm"
    for fix, in_chunks in (({"dp_shard": 2}, True), ({"cp": 2}, False)):
        plan = planner.plan(model, gpus=2, cluster=cluster, fix=fix).best
        assert (plan.loss_chunks > 1) == in_chunks
        assert plan.degrees.cp == fix.get("cp", 1)


def test_what_is_fixed_may_leave_no_degrees_that_are_tried(llama, h100):
    """They would need cp, which nobody asked for."""
    with pytest.raises(RequestError, match="cp above 1 is tried where it is fixed, for"):
        search_for(llama, h100, dp_shard=2, dp_replicate=1, tp=2, pp=1)
