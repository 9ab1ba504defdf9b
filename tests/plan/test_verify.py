"""Mutations of plans that a search found are caught, each by its own rule; the plans are not."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from searches import EXAMPLES, big_gpt, gpt, llama, mlp, search_for

import planner
from planner.cli.main import run
from planner.codegen.files import script_files
from planner.errors import VerificationError
from planner.framework.profiles import load_framework
from planner.framework.script import SCRIPT
from planner.graph.loading.load import load_model
from planner.graph.operator_graph import ModuleOutput
from planner.graph.sizes.family import trace_family
from planner.hardware.mixed import joined
from planner.hardware.profiles import load_cluster
from planner.plan import layout_rules, model_rules, price_rules, verify
from planner.plan.serialize import dump_json, load_plan
from planner.plan.verify import verify_layout, verify_outcome, verify_plan
from planner.pricing.reprice import verify_price
from planner.report.document import plan_json
from planner.result import PlanResult
from planner.search.run import Search
from planner.strategy.sharding import SplitParameter
from planner.vocabulary import MESH_ORDER

__all__ = ["big_gpt", "gpt", "llama", "mlp"]

FRAMEWORK = load_framework(SCRIPT)
UNET = Path(__file__).parents[1] / "graph" / "zoo" / "unet.py"

FULL = {"activation_checkpointing": "full", "microbatch_size": 1}

CASES = {
    "flat": ("gpt", {"tp": 1, "pp": 1}),
    "pipelined": ("gpt", {"tp": 1, "pp": 2, "schedule": "1F1B"}),
    "interleaved": ("gpt", {"tp": 1, "pp": 2, "schedule": "Interleaved1F1B"}),
    "tensor": ("big_gpt", {"tp": 2, "pp": 1, "sequence_parallel": True}),
    "both": ("llama", {"tp": 2, "pp": 2, "schedule": "1F1B"}),
    "mixed": ("big_gpt", {"tp": 1, "pp": 1, "dp_shard": 8, "microbatch_size": 4}),
    "uneven": ("mlp", {"tp": 1, "pp": 4}),
    "carrying": ("unet", {"tp": 1, "pp": 4, "schedule": "1F1B"}),
    "offloaded": ("gpt", {"tp": 1, "dp_shard": 8, "cpu_offload": True, "microbatch_size": 1}),
    "inputs on hosts": ("gpt", {**FULL, "dp_shard": 8, "activation_offload": True}),
    "chunked": ("gpt", {"tp": 1, "pp": 1, "loss_chunks": 4, "microbatch_size": 1}),
    "two kinds": ("big_gpt", {"tp": 2, "pp": 4, "schedule": "1F1B"}),
    "free": ("gpt", {}),
}
"""Searches by name: the model, and what is fixed."""


@pytest.fixture(scope="module")
def h100():
    return load_cluster("h100-sxm", gpus=8)


@pytest.fixture(scope="session")
def unet():
    return trace_family(load_model(str(UNET), seq_len=None), dtype="bfloat16")


@pytest.fixture(scope="module")
def searched(request, h100):
    """Gives the outcome, the cluster and the model of a case; each is searched once."""
    known = {}

    def of_case(case):
        if case not in known:
            name, fixed = CASES[case]
            graphs = request.getfixturevalue(name)
            device = h100.device
            small = replace(device, memory_bytes=int(device.memory_bytes * 0.15))
            cluster = replace(h100, device=small) if case == "mixed" else h100
            if case == "carrying":  # what stages hand on is little beside what they compute
                cluster = replace(h100, device=slowed(device, 50))
            if case == "two kinds":
                kinds = ("h100-sxm", "a100-80gb-sxm")
                cluster = joined([load_cluster(kind, gpus=4) for kind in kinds])
            known[case] = (search_for(graphs, cluster, **fixed), cluster, graphs)
        return known[case]

    return of_case


def slowed(device, times):
    """A device that computes so many times as long."""
    peaks = {dtype: peak / times for dtype, peak in device.peak_flop_per_s.items()}
    bandwidth = device.memory_bandwidth_bytes_per_s / times
    return replace(device, peak_flop_per_s=peaks, memory_bandwidth_bytes_per_s=bandwidth)


# -- plans as they are found ----------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_what_a_search_finds_verifies(searched, case):
    outcome, cluster, graphs = searched(case)
    verify_outcome(outcome, cluster, graphs=graphs, is_open=case == "free")
    for plan in outcome.candidates:
        verify_price(plan, graphs, cluster, FRAMEWORK)
    if outcome.rule_of_thumb is not None:
        verify_price(outcome.rule_of_thumb, graphs, cluster, FRAMEWORK)


def test_the_cases_are_what_their_names_say(searched):
    plans = {case: searched(case)[0].best for case in CASES}
    assert plans["interleaved"].virtual_stages > 1
    assert plans["tensor"].sequence_parallel
    styles = {module.style for group in plans["tensor"].shardings for module in group.modules}
    assert {"column", "row", "vocab_embedding", "on_part"} <= styles
    assert plans["tensor"].tied_parameters
    assert plans["both"].degrees.tp == plans["both"].degrees.pp == 2
    policies = set(plans["mixed"].stages[0].activation_checkpointing[1:-1])
    assert len(policies) > 1
    lengths = [stage.end_unit - stage.first_unit for stage in plans["two kinds"].stages]
    fast = plans["two kinds"].device_order.index("h100-sxm")
    assert sum(lengths[2 * fast : 2 * fast + 2]) > sum(lengths[2 - 2 * fast : 4 - 2 * fast])
    assert any(stage.carried for stage in plans["carrying"].stages)
    assert any(stage.stream_output for stage in plans["carrying"].stages)


# -- mutations of one plan ------------------------------------------------------------------------


def change(**changes):
    return lambda plan: replace(plan, **changes)


def change_degrees(**changes):
    return lambda plan: replace(plan, degrees=replace(plan.degrees, **changes))


def change_costs(**changes):
    return lambda plan: replace(plan, costs=replace(plan.costs, **changes))


def replaced(items, position, **changes):
    """A tuple with some fields of one item changed."""
    position %= len(items)
    return tuple(
        replace(item, **changes) if place == position else item for place, item in enumerate(items)
    )


def change_stage(position, **changes):
    return lambda plan: replace(plan, stages=replaced(plan.stages, position, **changes))


def change_rank(position, **changes):
    return lambda plan: replace(
        plan, memory_by_rank=replaced(plan.memory_by_rank, position, **changes)
    )


def change_both_memories(**changes):
    """Change the memory of a plan's only rank and of its only stage."""
    return lambda plan: change_stage(0, memory=replace(plan.stages[0].memory, **changes))(
        change_rank(0, **changes)(plan)
    )


def weight(**fields):
    return SplitParameter(name="weight", dim=0, **fields)


def change_module(style, /, **changes):
    """Change the first instruction of a style."""

    def mutate(plan):
        for group, sharding in enumerate(plan.shardings):
            for place, module in enumerate(sharding.modules):
                if module.style == style:
                    modules = replaced(sharding.modules, place, **changes)
                    return replace(plan, shardings=replaced(plan.shardings, group, modules=modules))
        raise AssertionError(f"no module of style {style}")

    return mutate


def block_group(plan):
    return next(i for i, s in enumerate(plan.shardings) if set(s.units) <= set(plan_blocks(plan)))


def plan_blocks(plan):
    return range(1, len(plan.units) - 1)


def change_group(**changes_of):
    """Change the instructions of the blocks; each value is a function of the old one."""

    def mutate(plan):
        group = block_group(plan)
        old = plan.shardings[group]
        changes = {name: function(getattr(old, name)) for name, function in changes_of.items()}
        return replace(plan, shardings=replaced(plan.shardings, group, **changes))

    return mutate


def move_cut(plan):
    """Let the second stage begin one unit later than the first ends."""
    return change_stage(1, first_unit=plan.stages[1].first_unit + 1)(plan)


def overlap_stages(plan):
    return change_stage(1, first_unit=plan.stages[1].first_unit - 1)(plan)


def empty_stage(plan):
    first = plan.stages[0]
    emptied = change_stage(0, end_unit=0, activation_checkpointing=())(plan)
    policies = first.activation_checkpointing + plan.stages[1].activation_checkpointing
    return change_stage(1, first_unit=0, activation_checkpointing=policies)(emptied)


def swap_stages(plan):
    first, second, *rest = plan.stages
    return replace(plan, stages=(second, first, *rest))


def drop_last_unit(plan):
    last = plan.stages[-1]
    return change_stage(
        -1, end_unit=last.end_unit - 1, activation_checkpointing=last.activation_checkpointing[:-1]
    )(plan)


def policy_of_unit(unit, policy):
    """Change the recomputation of a unit of the first stage."""

    def mutate(plan):
        policies = list(plan.stages[0].activation_checkpointing)
        policies[unit] = policy
        return change_stage(0, activation_checkpointing=tuple(policies))(plan)

    return mutate


def recompute_last_unit(plan):
    last = plan.stages[-1].activation_checkpointing
    return change_stage(-1, activation_checkpointing=(*last[:-1], "full"))(plan)


def all_units_in_one_group(plan):
    group = block_group(plan)
    units = (0, *plan.shardings[group].units)
    others = tuple(s for s in plan.shardings if set(s.units) != {0})
    outside = replace(plan, shardings=others)
    return replace(
        outside, shardings=replaced(outside.shardings, block_group(outside), units=units)
    )


def repeat_module(modules):
    return (*modules, modules[0])


def move_between_stages(plan):
    """Cut one unit later than the plan does, where the model has blocks alike."""
    first, second = plan.stages[0], plan.stages[1]
    moved = second.activation_checkpointing[0]
    plan = change_stage(
        0,
        end_unit=first.end_unit + 1,
        activation_checkpointing=(*first.activation_checkpointing, moved),
    )(plan)
    return change_stage(
        1,
        first_unit=second.first_unit + 1,
        activation_checkpointing=second.activation_checkpointing[1:],
    )(plan)


def receive(position, *outputs, **changes):
    return change_stage(position, carried=tuple(ModuleOutput(**o) for o in outputs), **changes)


def receive_own_block(plan):
    stage = plan.stages[2]
    output = ModuleOutput(module=plan.units[stage.first_unit], index=0)
    return change_stage(2, carried=(output,))(plan)


def receive_twice(plan):
    stage = next(stage for stage in plan.stages if stage.carried)
    return change_stage(stage.index, carried=(stage.carried[0], *stage.carried))(plan)


def forget_carried(plan):
    stage = next(stage for stage in plan.stages if stage.carried)
    return change_stage(stage.index, carried=stage.carried[:-1])(plan)


def forget_stream_output(plan):
    stage = next(stage for stage in plan.stages if stage.stream_output)
    return change_stage(stage.index, stream_output=None)(plan)


def half_the_microbatches(plan):
    return replace(
        plan,
        microbatch_size=plan.global_batch_size // plan.degrees.dp,
        num_microbatches=1,
    )


def tie_to_itself(plan):
    return replace(plan, tied_parameters=(plan.tied_parameters[0][:1],))


def tie_in_two_groups(plan):
    return replace(plan, tied_parameters=plan.tied_parameters * 2)


def split_head_otherwise(plan):
    """Hold the head's weight whole while the embedding that shares it is split by rows."""
    head, last = "lm_head", len(plan.units) - 1
    group = next(i for i, s in enumerate(plan.shardings) if s.units == (last,))
    modules = tuple(
        replace(m, style="replicate", output_layout="Replicate", split=())
        if m.module == head
        else m
        for m in plan.shardings[group].modules
    )
    return replace(plan, shardings=replaced(plan.shardings, group, modules=modules))


def slower_stage(plan):
    return change_stage(0, backward_s=plan.stages[0].backward_s * 3)(plan)


def longer_bubble(plan):
    m = plan.num_microbatches
    return change_costs(bubble_s=m * sum(s.forward_s + s.backward_s for s in plan.stages))(plan)


def thousandth_of_the_time(plan):
    """Scale every time down, so that only the rates are impossible."""
    parts = {name: getattr(plan.costs, name) / 1e3 for name in plan.costs.__slots__}
    plan = replace(plan, costs=replace(plan.costs, **parts))
    return replace(
        plan,
        stages=tuple(
            replace(s, forward_s=s.forward_s / 1e3, backward_s=s.backward_s / 1e3)
            for s in plan.stages
        ),
    )


def more_parameters_of_stage(plan):
    """Move bytes between the parts of a stage that shares its rank."""
    memory = plan.stages[0].memory
    moved = replace(
        memory,
        params_bytes=memory.params_bytes + 2**20,
        activations_bytes=memory.activations_bytes - 2**20,
    )
    return change_stage(0, memory=moved)(plan)


MUTATIONS = {
    "a unit has no name": ("flat", "units", lambda p: replace(p, units=("", *p.units[1:]))),
    "two units have one name": (
        "flat",
        "units",
        lambda p: replace(p, units=(p.units[0], p.units[2], *p.units[2:])),
    ),
    "the prologue stands last": ("flat", "units", lambda p: replace(p, units=p.units[::-1])),
    "a degree is 0": ("flat", "degrees", change_degrees(dp_replicate=0)),
    "a degree is negative": ("both", "degrees", change_degrees(tp=-2, pp=-2)),
    "cp beside tp without split modules": ("tensor", "split modules", change_degrees(cp=2)),
    "ep without the ranks of tp and cp": ("tensor", "degrees", change_degrees(cp=2, ep=2)),
    "ep does not divide dp_shard": ("flat", "degrees", change_degrees(ep=5)),
    "ep without experts": ("flat", "split modules", change_degrees(ep=2)),
    "cp without split modules": ("flat", "split modules", change_degrees(cp=2)),
    "an axis is missing": ("flat", "mesh", change(mesh_order=MESH_ORDER[:-1])),
    "tp is outermost": (
        "tensor", "mesh", change(mesh_order=("tp", *MESH_ORDER[1:]))
    ),
    "another global batch": ("flat", "batch", change(global_batch_size=63)),
    "another microbatch size": ("pipelined", "batch", change(microbatch_size=3)),
    "no microbatches": ("flat", "batch", change(num_microbatches=0)),
    "another dp": ("flat", "batch", change_degrees(dp_shard=16)),
    "a schedule without a pipeline": ("flat", "schedule", change(schedule="1F1B")),
    "a pipeline without a schedule": ("pipelined", "schedule", change(schedule="none")),
    "an unknown schedule": ("pipelined", "schedule", change(schedule="DualPipe")),
    "virtual stages without interleaving": ("pipelined", "schedule", change(virtual_stages=2)),
    "interleaving without virtual stages": ("interleaved", "schedule", change(virtual_stages=1)),
    "fewer microbatches than ranks": ("pipelined", "schedule", half_the_microbatches),
    "more stages than said": ("interleaved", "stages", lambda p: replace(p, virtual_stages=8)),
    "a stage is missing": ("pipelined", "stages", lambda p: replace(p, stages=p.stages[:1])),
    "another index": ("pipelined", "stages", change_stage(1, index=0)),
    "stages in another order": ("pipelined", "stages", swap_stages),
    "a gap between stages": ("pipelined", "stages", move_cut),
    "an overlap of stages": ("pipelined", "stages", overlap_stages),
    "an empty stage": ("pipelined", "stages", empty_stage),
    "the last unit is left over": ("pipelined", "stages", drop_last_unit),
    "another pipeline rank": ("pipelined", "pipeline ranks", change_stage(1, pp_rank=0)),
    "stages of a rank side by side": ("interleaved", "pipeline ranks", change_stage(1, pp_rank=0)),
    "an unknown policy": ("mixed", "recomputation", policy_of_unit(1, "everything")),
    "a policy too few": ("flat", "recomputation", change_stage(0, activation_checkpointing=())),
    "no host memory": ("offloaded", "offload", change(host_bytes_by_rank=())),
    "host memory of nothing": ("flat", "offload", change(host_bytes_by_rank=(1,))),
    "plain tensors offloaded": ("offloaded", "offload", change(state_form="plain")),
    "states on the device": ("offloaded", "offload", change_rank(0, optimizer_bytes=1)),
    "too much for the host": (
        "offloaded", "host memory", change(host_bytes_by_rank=(2**50,))
    ),
    "float8 in float32": ("flat", "float8", change(float8=True, dtype="float32")),
    "no chunks": ("flat", "loss", change(loss_chunks=0)),
    "chunks of nothing": ("flat", "loss", change(loss_chunks=4)),
    "a module of whole logits": ("flat", "loss", change(loss_module="lm_head")),
    "chunks of another module": ("chunked", "model's loss", change(loss_module="output")),
    "chunks that do not divide": ("chunked", "model's loss", change(loss_chunks=7)),
    "a recomputed prologue": ("mixed", "recomputation", policy_of_unit(0, "full")),
    "a recomputed epilogue": ("pipelined", "recomputation", recompute_last_unit),
    "a split sequence without tp": ("flat", "split modules", change(sequence_parallel=True)),
    "tp without split modules": ("tensor", "split modules", change(shardings=())),
    "another sequence dim": ("tensor", "whole modules", change(sequence_dim=2)),
    "a unit that is not there": (
        "tensor", "sharded units", change_group(units=lambda units: (*units[:-1], 99))
    ),
    "a unit twice": ("tensor", "sharded units", change_group(units=lambda units: units * 2)),
    "no units": ("tensor", "sharded units", change_group(units=lambda _: ())),
    "blocks with the prologue": ("tensor", "sharded units", all_units_in_one_group),
    "a module twice": ("tensor", "sharded modules", change_group(modules=repeat_module)),
    "a module that is no path": ("tensor", "sharded modules", change_module("row", module="a..b")),
    "an unknown style": ("tensor", "layouts", change_module("row", style="diagonal")),
    "a layout that torch does not know": (
        "tensor", "layouts", change_module("row", output_layout="Shard[1]")
    ),
    "rows of a whole input": ("tensor", "layouts", change_module("row", input_layout="Replicate")),
    "columns of a split input": (
        "tensor", "layouts", change_module("column", input_layout="Shard(-1)")
    ),
    "the batch is split": ("tensor", "layouts", change_module("row", output_layout="Shard(0)")),
    "a module on a part of the whole": (
        "tensor", "layouts", change_module("on_part", input_layout="Replicate")
    ),
    "a sequence module without a split sequence": (
        "tensor", "layouts", change(sequence_parallel=False)
    ),
    "no projections": (
        "tensor", "fused projections", change_module("column", split=(weight(fused=0),))
    ),
    "fused projections of rows": (
        "tensor", "fused projections", change_module("row", split=(weight(fused=3),))
    ),
    "a parameter tied to nothing": ("flat", "tied parameters", tie_to_itself),
    "a parameter in two groups": ("flat", "tied parameters", tie_in_two_groups),
    "tied weights split in two ways": ("tensor", "tied parameters", split_head_otherwise),
    "the first stage receives": (
        "carrying", "crossings", receive(0, {"module": "time", "index": 0})
    ),
    "what is made later": ("carrying", "crossings", receive_own_block),
    "one output twice": ("carrying", "crossings", receive_twice),
    "a negative output": ("carrying", "crossings", receive(1, {"module": "time", "index": -1})),
    "a negative time": ("flat", "numbers", change_costs(optimizer_s=-1e-6)),
    "a time that is no number": ("flat", "numbers", change_costs(compute_s=math.nan)),
    "an endless stage": ("pipelined", "numbers", change_stage(0, forward_s=math.inf)),
    "a negative stage": ("pipelined", "numbers", change_stage(0, backward_s=-1.0)),
    "negative memory": ("flat", "numbers", change_rank(0, activations_bytes=-1)),
    "no tokens": ("flat", "numbers", change(tokens_per_step=0)),
    "collectives without tp": ("flat", "idle parts", change_costs(tp_comm_s=1e-5)),
    "a bubble without a pipeline": ("flat", "idle parts", change_costs(bubble_s=1e-5)),
    "transfers without a pipeline": ("flat", "idle parts", change_costs(pp_comm_s=1e-5)),
    "nothing recomputed takes time": ("flat", "idle parts", change_costs(recompute_s=1e-5)),
    "a slower stage": ("pipelined", "busy time", slower_stage),
    "more work than its stages": ("both", "busy time", change_costs(compute_s=10.0)),
    "no bubble": ("uneven", "bubble", change_costs(bubble_s=0.0)),
    "a bubble longer than no overlap": ("interleaved", "bubble", longer_bubble),
    "a rank without memory": (
        "pipelined", "rank memories", lambda p: replace(p, memory_by_rank=p.memory_by_rank[:1])
    ),
    "a rank below its stage": ("pipelined", "rank memories", change_rank(0, activations_bytes=0)),
    "a rank above its stages": (
        "interleaved", "rank memories", change_rank(0, temporary_bytes=2**35)
    ),
    "parameters of a stage": ("interleaved", "rank memories", more_parameters_of_stage),
    "a rank with less in reserve": ("pipelined", "rank memories", change_rank(1, reserve_bytes=0)),
    "a rank with more in reserve": (
        "pipelined", "reserve", lambda p: change_rank(
            1, reserve_bytes=p.memory_by_rank[1].reserve_bytes + 2**20
        )(p),
    ),
    "more devices": (
        "flat",
        "devices",
        lambda p: replace(
            p,
            degrees=replace(p.degrees, dp_shard=p.degrees.dp_shard * 2),
            global_batch_size=p.global_batch_size * 2,
            tokens_per_step=p.tokens_per_step * 2,
        ),
    ),
    "kinds of device forgotten": ("two kinds", "kinds of device", change(device_order=())),
    "a kind of device that is not there": (
        "two kinds", "kinds of device", change(device_order=("h100-sxm", "h200-sxm"))
    ),
    "more memory than there is": ("mixed", "memory", change_both_memories(activations_bytes=2**37)),
    "faster than the devices": ("mixed", "MFU", thousandth_of_the_time),
    "other units than the model": (
        "flat", "model's units", lambda p: replace(p, units=(*p.units[:-2], "other", p.units[-1]))
    ),
    "no ties": ("pipelined", "model's ties", change(tied_parameters=())),
    "carried tensors forgotten": ("carrying", "model's cuts", forget_carried),
    "the stream's maker forgotten": ("carrying", "model's cuts", forget_stream_output),
    "another cut": ("carrying", "model's cuts", move_between_stages),
    "a module that is not there": (
        "tensor", "model's modules", change_module("row", module="mlp.c_nowhere")
    ),
    "more tokens": ("flat", "model's work", change(tokens_per_step=2**20)),
    "fewer FLOPs": ("flat", "model's work", change(flop_per_step=1)),
}  # fmt: skip
"""Case, rule that must catch it, mutation."""


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_is_caught_by_its_rule(searched, mutation):
    case, rule, mutate = MUTATIONS[mutation]
    outcome, cluster, graphs = searched(case)
    mutated = mutate(outcome.best)
    assert mutated != outcome.best
    with pytest.raises(VerificationError) as caught:
        verify_plan(mutated, cluster, graphs=graphs)
    assert caught.value.rule == rule, str(caught.value)
    assert f"the plan breaks the rule {rule!r}: " in str(caught.value)
    assert "report it" in caught.value.hint
    assert caught.value.exit_code == 8


def test_degrees_that_do_not_divide_the_model_are_caught(searched):
    """Sixteen devices share a sample; the heads are as they are."""
    outcome, _, graphs = searched("both")
    best = outcome.best
    wide = replace(
        best, degrees=replace(best.degrees, cp=16, tp=1, pp=1, dp_shard=1, dp_replicate=1)
    )
    broken = list(model_rules.MODEL_RULES["model's sizes"](wide, graphs))
    assert broken
    assert "% cp 16" in broken[0]


# -- mutations of a search's answer ---------------------------------------------------------------


def scaled(plan, factor):
    parts = {name: getattr(plan.costs, name) * factor for name in plan.costs.__slots__}
    stages = tuple(
        replace(s, forward_s=s.forward_s * factor, backward_s=s.backward_s * factor)
        for s in plan.stages
    )
    return replace(plan, costs=replace(plan.costs, **parts), stages=stages)


def change_solver(**changes):
    return lambda outcome: replace(outcome, solver=replace(outcome.solver, **changes))


def swap_best(outcome):
    return replace(outcome, best=outcome.candidates[-1])


def faster_candidate(outcome):
    second = scaled(outcome.candidates[1], 0.5)
    return replace(outcome, candidates=(outcome.best, second, *outcome.candidates[2:]))


def slower_best(outcome):
    best = scaled(outcome.best, 3.0)
    return replace(outcome, best=best, candidates=(best,), rule_of_thumb=None)


def other_dtype(outcome):
    return replace(outcome, rule_of_thumb=replace(outcome.rule_of_thumb, dtype="float32"))


def faster_thumb(outcome):
    return replace(outcome, rule_of_thumb=scaled(outcome.best, 0.9))


def loose_bound(outcome):
    return change_solver(bound_s=outcome.solver.objective_s * 0.9)(outcome)


def high_bound(outcome):
    return change_solver(bound_s=outcome.solver.objective_s * 1.01)(outcome)


OUTCOME_MUTATIONS = {
    "the best is another": ("fastest first", swap_best),
    "a candidate is faster": ("fastest first", faster_candidate),
    "another dtype": ("same training", other_dtype),
    "another objective": ("objective", slower_best),
    "a bound above the objective": ("bound", high_bound),
    "a bound that is no number": ("bound", change_solver(bound_s=math.nan)),
    "an unknown status": ("status", change_solver(status="surely")),
    "optimal with a gap": ("status", loose_bound),
    "the rule of thumb below the bound": ("baseline", faster_thumb),
}


@pytest.mark.parametrize("mutation", OUTCOME_MUTATIONS)
def test_a_mutated_answer_is_caught_by_its_rule(searched, mutation):
    rule, mutate = OUTCOME_MUTATIONS[mutation]
    outcome, cluster, graphs = searched("free")
    with pytest.raises(VerificationError) as caught:
        verify_outcome(mutate(outcome), cluster, graphs=graphs, is_open=True)
    assert caught.value.rule == rule, str(caught.value)


def test_a_gap_is_allowed_where_time_ran_out(searched):
    outcome, cluster, _ = searched("free")
    verify_outcome(change_solver(status="time limit")(loose_bound(outcome)), cluster)


def test_what_is_fixed_may_be_slower_than_the_rule_of_thumb(searched):
    outcome, cluster, _ = searched("free")
    verify_outcome(faster_thumb(outcome), cluster)


def test_a_broken_candidate_or_rule_of_thumb_is_named(searched):
    outcome, cluster, _ = searched("free")
    mutate = change(schedule="DualPipe")
    second = replace(outcome, candidates=(outcome.best, mutate(outcome.candidates[1])))
    with pytest.raises(VerificationError, match=r"^candidate 1 breaks the rule 'schedule'"):
        verify_outcome(second, cluster)
    thumb = replace(outcome, rule_of_thumb=mutate(outcome.rule_of_thumb))
    with pytest.raises(VerificationError, match=r"^the rule of thumb breaks the rule 'schedule'"):
        verify_outcome(thumb, cluster)


def test_another_price_is_caught(searched):
    outcome, cluster, graphs = searched("both")
    with pytest.raises(VerificationError, match="when it is priced again") as caught:
        verify_price(scaled(outcome.best, 1.001), graphs, cluster, FRAMEWORK)
    assert caught.value.rule == "price"


def test_every_rule_is_documented_and_has_a_mutation():
    tables = (
        layout_rules.LAYOUT_RULES,
        price_rules.PRICE_RULES,
        price_rules.CLUSTER_RULES,
        model_rules.MODEL_RULES,
        price_rules.OUTCOME_RULES,
        price_rules.PROOF_RULES,
        price_rules.OPEN_RULES,
    )
    rules = {rule for table in tables for rule in table}
    assert sum(map(len, tables)) == len(rules)
    words = " ".join(verify.__doc__.split())
    assert [rule for rule in rules if rule not in words] == []
    mutated = {rule for _, rule, _ in MUTATIONS.values()}
    mutated |= {rule for rule, _ in OUTCOME_MUTATIONS.values()}
    assert rules - mutated == {"model's sizes"}  # has a test of its own


# -- where plans are verified ---------------------------------------------------------------------


@pytest.fixture
def broken_search(monkeypatch):
    """Makes every search return a mutation of what it found."""

    def break_with(mutate):
        found = Search.run
        monkeypatch.setattr(Search, "run", lambda search: mutate(found(search)))

    return break_with


def wrong_rank(outcome):
    best = change_rank(0, buffers_bytes=2**40)(outcome.best)
    return replace(outcome, best=best, candidates=(best, *outcome.candidates[1:]))


def repriced(outcome):
    best = scaled(outcome.best, 0.999)
    solver = replace(
        outcome.solver, objective_s=best.costs.step_time_s, bound_s=best.costs.step_time_s
    )
    return replace(outcome, best=best, candidates=(best,), rule_of_thumb=None, solver=solver)


@pytest.mark.parametrize(("mutate", "rule"), [(wrong_rank, "rank memories"), (repriced, "price")])
def test_a_plan_is_verified_after_the_search(broken_search, mutate, rule):
    broken_search(mutate)
    for call in (planner.plan, planner.estimate):
        with pytest.raises(VerificationError) as caught:
            call(str(EXAMPLES / "mlp.py"), gpus=2, fix={"pp": 1, "tp": 1})
        assert caught.value.rule == rule


def test_the_command_says_that_it_is_a_bug_and_writes_nothing(
    broken_search, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    broken_search(wrong_rank)
    arguments = [str(EXAMPLES / "mlp.py"), "--gpus", "2", "--fix", "pp=1", "--fix", "tp=1"]
    for more in ((), ("--json",), ("--out", "run1")):
        assert run([*arguments, *more]) == 8
        out, err = capsys.readouterr()
        assert out == ""
        assert "breaks the rule 'rank memories'" in err
        assert "bug of the planner" in err
        assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def planned():
    return planner.plan(str(EXAMPLES / "mlp.py"), gpus=2, fix={"pp": 2, "schedule": "1F1B"})


def test_nothing_is_written_of_a_mutated_plan(planned, tmp_path):
    record = planned.record
    result = PlanResult(replace(record, outcome=wrong_rank(record.outcome)))
    with pytest.raises(VerificationError):
        result.save(tmp_path / "run1")
    with pytest.raises(VerificationError):
        result.to_json()
    assert list(tmp_path.iterdir()) == []


def test_no_script_is_made_of_a_mutated_layout(planned):
    script_files(planned.best)
    with pytest.raises(VerificationError, match="'pipeline ranks'"):
        script_files(change_stage(1, pp_rank=0)(planned.best))
    verify_layout(change_rank(0, buffers_bytes=2**40)(planned.best))


def unverified_json(record, monkeypatch):
    """The text of a plan.json whose plan breaks a rule."""
    monkeypatch.setattr("planner.report.document.verify_outcome", lambda *_: None)
    return plan_json(record)


@pytest.mark.parametrize(
    ("mutate", "words"),
    [
        (change_rank(0, buffers_bytes=2**40), "best breaks the rule 'rank memories'"),
        (change_costs(bubble_s=100.0), "best breaks the rule 'bubble'"),
        (lambda plan: scaled(plan, 2.0), "solver breaks the rule 'objective'"),
    ],
)
def test_a_mutated_file_is_refused(planned, tmp_path, monkeypatch, mutate, words):
    outcome = planned.outcome
    record = replace(planned.record, outcome=replace(outcome, best=mutate(outcome.best)))
    file = tmp_path / "plan.json"
    file.write_text(unverified_json(record, monkeypatch))
    with pytest.raises(VerificationError) as caught:
        load_plan(file)
    assert f"{file}: {words}" in str(caught.value)
    assert "Write the file again" in caught.value.hint


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda d: d["cluster"]["device"].update(memory_bytes=2**20), "profile_hash"),
        (lambda d: d["cluster"].update(num_gpus=4), "num_nodes"),
        (lambda d: d["solver"].update(bound_s=0.0), "gap"),
        (lambda d: d.pop("cluster"), "cluster must be an object"),
        (lambda d: d["cluster"]["numbers"].clear() or d["cluster"].update(numbers=3), "an object"),
    ],
)
def test_what_a_plan_is_held_to_is_read_as_strictly(planned, tmp_path, edit, words):
    document = json.loads(planned.to_json())
    edit(document)
    file = tmp_path / "plan.json"
    file.write_text(dump_json(document))
    with pytest.raises(planner.RequestError, match=words):
        load_plan(file)


def test_a_plan_that_was_written_is_read(planned, tmp_path):
    planned.save(tmp_path / "run1")
    assert load_plan(tmp_path / "run1") == planned.best
