"""Rules of a plan's layout beside the model that it trains.

A rule yields a sentence, with its numbers, for each place where it is broken. All rules of the
layout by itself hold (``planner.plan.layout_rules``).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from planner.graph.analysis.loss_rows import loss_rows
from planner.graph.operator_graph import OperatorGraph
from planner.plan.layout_rules import instructions, paths
from planner.plan.types import Plan
from planner.strategy.facts import ModelFacts, model_facts
from planner.strategy.rules import broken_rule
from planner.vocabulary import Axis

if TYPE_CHECKING:
    from planner.graph.sizes.family import GraphFamily


def _model_units(plan: Plan, graphs: "GraphFamily") -> Iterator[str]:
    """The plan's units are the model's."""
    names = tuple(unit.name for unit in graphs.at(plan.microbatch_size).units)
    if plan.units != names:
        yield f"the plan has {len(plan.units)} units, other than the model's {len(names)}"


def _model_ties(plan: Plan, graphs: "GraphFamily") -> Iterator[str]:
    """The plan's tied parameters are the model's."""
    parameters = graphs.at(plan.microbatch_size).parameters
    tied = {each.names for each in parameters if len(each.names) > 1}
    for group in tied.symmetric_difference(plan.tied_parameters):
        yield f"{', '.join(group)} are tied in one of plan and model only"


def _model_cuts(plan: Plan, graphs: "GraphFamily") -> Iterator[str]:
    """Stages begin at legal cuts and receive what crosses them."""
    cuts = {cut.after_unit + 1: cut for cut in graphs.at(plan.microbatch_size).cuts}
    for stage in plan.stages[1:]:
        cut = cuts.get(stage.first_unit)
        if cut is None:
            yield f"the model cannot be cut before unit {stage.first_unit}"
        elif (stage.carried, stage.stream_output) != (cut.carried, cut.stream_output):
            yield f"what stage {stage.index} receives is not what crosses the cut before it"


def _model_modules(plan: Plan, graphs: "GraphFamily") -> Iterator[str]:
    """Instructions name modules with parameters, and units that compute the same."""
    graph = graphs.at(plan.microbatch_size)
    owners = {name.rpartition(".")[0] for each in graph.parameters for name in each.names}
    for sharding in plan.shardings:
        if len({graph.units[unit].structure for unit in sharding.units}) > 1:
            yield f"units {sharding.units} do not compute the same"
    for sharding, module in instructions(plan):
        for path in paths(plan, sharding, module):
            if path not in owners:
                yield f"the model has no module {path!r} with parameters"


@lru_cache(maxsize=1)
def _facts(graphs: "GraphFamily") -> ModelFacts:
    """Sizes of a model, read once for all plans of a search."""
    return model_facts(graphs.smallest)


def _model_sizes(plan: Plan, graphs: "GraphFamily") -> Iterator[str]:
    """Degrees divide the model's sizes; no recomputation reads what is overwritten."""
    facts = _facts(graphs)
    broken = broken_rule(plan.degrees, facts, plan.global_batch_size)
    if broken:
        yield broken.detail
    axes = [axis for axis in plan.degrees.split_axes if axis is Axis.CP or plan.sequence_parallel]
    if (facts.sequence or 1) % math.prod(getattr(plan.degrees, axis) for axis in axes):
        split = " and ".join(f"{axis} {getattr(plan.degrees, axis)}" for axis in axes)
        yield f"a sequence of {facts.sequence} is split over {split}"
    for policy, reason in facts.recompute_refusals.items():
        if any(policy in stage.activation_checkpointing for stage in plan.stages):
            yield f"blocks are recomputed ({policy}), but {reason}"


def _model_work(plan: Plan, graphs: "GraphFamily") -> Iterator[str]:
    """Tokens and FLOPs of a step are those of its samples."""
    graph: OperatorGraph = graphs.at(plan.microbatch_size)
    tokens = plan.global_batch_size * graph.tokens_per_sample
    flop = graph.forward_flop + graph.backward_flop
    flop *= plan.global_batch_size // plan.microbatch_size
    if plan.tokens_per_step != tokens:
        yield f"{plan.tokens_per_step} tokens per step, but {tokens} are in its samples"
    if not math.isclose(plan.flop_per_step, flop, rel_tol=1e-9):
        yield f"{plan.flop_per_step} FLOPs per step, but its samples take {flop}"


def _model_loss(plan: Plan, graphs: "GraphFamily") -> Iterator[str]:
    """Chunks of a loss divide a rank's rows of the module that makes its logits."""
    if plan.loss_chunks == 1:
        return
    rows = loss_rows(graphs.at(plan.microbatch_size))
    if isinstance(rows, str):
        yield f"the loss is taken in {plan.loss_chunks} chunks, but {rows}"
    elif rows.module != plan.loss_module or rows.rows % (plan.loss_chunks * plan.degrees.cp):
        yield (
            f"the loss is taken in {plan.loss_chunks} chunks of what {plan.loss_module} returns, "
            f"but {rows.module} returns {rows.rows} rows"
        )


MODEL_RULES: "Mapping[str, Callable[[Plan, GraphFamily], Iterator[str]]]" = {
    "model's units": _model_units,
    "model's ties": _model_ties,
    "model's cuts": _model_cuts,
    "model's modules": _model_modules,
    "model's sizes": _model_sizes,
    "model's work": _model_work,
    "model's loss": _model_loss,
}
"""Rules of a plan beside the model that it trains."""
