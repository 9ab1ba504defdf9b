"""Rules of a plan's layout: what its script is made of.

A rule yields a sentence, with its numbers, for each place where it is broken. Each may take for
granted that those before it in its table hold.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from planner.plan.types import Plan
from planner.strategy.facts import SEQUENCE_DIM
from planner.strategy.schedules import divided_rule, rank_of_stage, schedule_rule
from planner.strategy.sharding import ModuleSharding, UnitSharding
from planner.vocabulary import (
    MESH_ORDER,
    PLANNED_SCHEDULES,
    RECOMPUTATIONS,
    SHARED_SCHEDULES,
    SPLIT_STYLES,
    Axis,
    Recomputation,
    Schedule,
    Style,
    split_styles,
)

_REPLICATE, _LAST, _ROWS = "Replicate", "Shard(-1)", "Shard(0)"
_STREAM = "stream"
"""Stands in ``_STYLES`` for the layout of the stream."""
_PART = "part"
"""Stands in ``_STYLES`` for any dim that is split."""

_STYLES: Mapping[str, tuple[frozenset[str], frozenset[str]]] = {
    Style.COLUMN: (frozenset({_REPLICATE}), frozenset({_LAST, _REPLICATE})),
    Style.ROW: (frozenset({_LAST}), frozenset({_REPLICATE, _STREAM})),
    Style.INNER: (frozenset({_REPLICATE}), frozenset({_REPLICATE, _STREAM})),
    Style.VOCAB_EMBEDDING: (frozenset({_REPLICATE}), frozenset({_REPLICATE, _STREAM})),
    Style.REPLICATE: (frozenset({_REPLICATE}), frozenset({_REPLICATE, _STREAM})),
    Style.ON_PART: (frozenset({_PART}), frozenset({_PART, _REPLICATE})),
    Style.EXPERTS: (frozenset({_REPLICATE, _ROWS}), frozenset({_REPLICATE, _ROWS})),
}
"""Legal input and output layouts of each style."""

_LAYOUT = re.compile(r"Replicate|Shard\((-?\d+)\)")
_OUTER = ("prologue", "epilogue")


def blocks(plan: Plan) -> range:
    """Positions of the units that are blocks."""
    return range(1, len(plan.units) - 1)


def _units(plan: Plan) -> Iterator[str]:
    """Prologue, blocks, epilogue; "model" alone without blocks; no name twice."""
    names = plan.units
    if names != ("model",) and (len(names) < 3 or (names[0], names[-1]) != _OUTER):
        yield f"units are {', '.join(names)}, not prologue, blocks, epilogue"
    for name, count in Counter(names).items():
        if count > 1 or not name or (name in _OUTER and name not in (names[0], names[-1])):
            yield f"{count} units have the name {name!r}"


def _degrees(plan: Plan) -> Iterator[str]:
    """Every degree is 1 or more; ep divides dp_shard x cp x tp, and holds the latter two."""
    degrees = plan.degrees
    for axis in (*MESH_ORDER, Axis.EP):
        if getattr(degrees, axis) < 1:
            yield f"{axis} is {getattr(degrees, axis)}"
    if degrees.ep == 1:
        return
    inside = " x ".join(f"{axis} {getattr(degrees, axis)}" for axis in degrees.sample_axes)
    if degrees.dp_shard * degrees.sample_ranks % degrees.ep:
        lenders = " x ".join(filter(None, (f"dp_shard {degrees.dp_shard}", inside)))
        yield f"ep is {degrees.ep}, but does not divide {lenders}"
    elif degrees.ep % degrees.sample_ranks:
        yield f"ep is {degrees.ep}, but no multiple of {inside}"


def _mesh(plan: Plan) -> Iterator[str]:
    """Each axis once, in any order."""
    if sorted(plan.mesh_order) != sorted(MESH_ORDER):
        found, wanted = (" x ".join(axes) for axes in (plan.mesh_order, MESH_ORDER))
        yield f"the mesh has the axes {found}, not those of {wanted}"


def _batch(plan: Plan) -> Iterator[str]:
    """microbatch_size * num_microbatches * data-parallel ranks is the global batch."""
    factors = (plan.microbatch_size, plan.num_microbatches, plan.degrees.dp)
    size, number, dp = factors
    if min(factors) < 1 or size * number * dp != plan.global_batch_size:
        yield (
            f"microbatch_size {size} x num_microbatches {number} x data-parallel ranks {dp} = "
            f"{size * number * dp}, but global_batch_size is {plan.global_batch_size}"
        )


def _schedule(plan: Plan) -> Iterator[str]:
    """No schedule exactly where pp is 1; virtual stages exactly where stages interleave."""
    pp, stages = plan.degrees.pp, plan.virtual_stages
    known = (Schedule.NONE,) if pp == 1 else PLANNED_SCHEDULES
    if plan.schedule not in known:
        yield f"schedule is {plan.schedule!r} with pp {pp}, not one of {', '.join(known)}"
    if (stages > 1) != (plan.schedule in SHARED_SCHEDULES) or stages < 1:
        yield f"schedule {plan.schedule} has {stages} stages per pipeline rank"
    policies = {policy for stage in plan.stages for policy in stage.activation_checkpointing}
    for policy in sorted(policies):
        reason = divided_rule(
            plan.schedule,
            recompute=policy,
            reshard_after_forward=plan.reshard_after_forward,
            whole="compile" if plan.compile else "float8" if plan.float8 else "",
        )
        if reason:
            yield reason
    reason = schedule_rule(
        plan.schedule, pp=pp, virtual_stages=stages, num_microbatches=plan.num_microbatches
    )
    if reason:
        yield reason


def _stages(plan: Plan) -> Iterator[str]:
    """In number pp * virtual_stages, and in order; they divide the units without a gap."""
    stages = plan.stages
    if len(stages) != plan.degrees.pp * plan.virtual_stages:
        yield (
            f"{len(stages)} stages for pp {plan.degrees.pp} x virtual_stages {plan.virtual_stages}"
        )
    begin = 0
    for position, stage in enumerate(stages):
        if stage.index != position:
            yield f"the stage at position {position} has index {stage.index}"
        if stage.first_unit != begin or stage.end_unit <= begin:
            yield (
                f"stage {position} holds units [{stage.first_unit}, {stage.end_unit}), but units "
                f"from {begin} on are left"
            )
        begin = stage.end_unit
    if begin != len(plan.units):
        yield f"the last stage ends at unit {begin} of {len(plan.units)}"


def _pipeline_ranks(plan: Plan) -> Iterator[str]:
    """Stages go round the pipeline ranks, or along them and back, as the schedule has it."""
    for stage in plan.stages:
        wanted = rank_of_stage(plan.schedule, stage.index, plan.degrees.pp)
        if stage.pp_rank != wanted:
            yield f"stage {stage.index} is on pipeline rank {stage.pp_rank}, not {wanted}"


def _recomputation(plan: Plan) -> Iterator[str]:
    """One known policy per unit; only blocks are recomputed."""
    for stage in plan.stages:
        policies = stage.activation_checkpointing
        if len(policies) != stage.end_unit - stage.first_unit:
            yield f"stage {stage.index} has {len(policies)} policies for its units"
        for unit, policy in enumerate(policies, stage.first_unit):
            if policy not in RECOMPUTATIONS:
                yield f"{plan.units[unit]} has the unknown policy {policy!r}"
            elif policy != Recomputation.NONE and unit not in blocks(plan):
                yield f"{plan.units[unit]} is no block, but is recomputed ({policy})"


def _split_modules(plan: Plan) -> Iterator[str]:
    """Modules are split exactly where tp, cp or ep is above 1, as it splits them."""
    degrees = plan.degrees
    if not degrees.splits_modules and (plan.shardings or plan.sequence_parallel):
        yield "tp, cp and ep are 1, but modules or the sequence are split"
    for axis in degrees.split_axes:
        styles = _styles(plan, axis)
        if styles.isdisjoint(split_styles(axis)):
            yield f"{axis} is {getattr(degrees, axis)}, but no module is split over it"
        if axis is not Axis.TP and not styles.isdisjoint(SPLIT_STYLES):
            yield f"{axis} is {getattr(degrees, axis)}, but parameters are split as over tp"
    for name in {sharding.axis for sharding in plan.shardings}.difference(degrees.split_axes):
        yield f"modules are split over {name}, which is no axis over which this plan splits them"
    if degrees.tp == 1 and plan.sequence_parallel:
        yield "tp is 1, but the stream is split over it"
    if degrees.ep > 1 and Style.EXPERTS not in _styles(plan, degrees.split_axis):
        yield f"ep is {degrees.ep}, but no module's experts are shared"


def _whole_modules(plan: Plan) -> Iterator[str]:
    """Compiled blocks have all of their experts."""
    if plan.degrees.ep > 1 and plan.compile:
        yield f"ep is {plan.degrees.ep}, but blocks are compiled"
    if plan.sequence_dim != SEQUENCE_DIM:
        yield f"sequence_dim is {plan.sequence_dim}, not {SEQUENCE_DIM}"


def _styles(plan: Plan, axis: str) -> set[str]:
    """How modules run over an axis."""
    return {m.style for each in plan.shardings if each.axis == axis for m in each.modules}


def _sharded_units(plan: Plan) -> Iterator[str]:
    """Groups of existing units, over an axis no unit in two, blocks apart from what is around."""
    by_axis: dict[str, set[int]] = {}
    for sharding in plan.shardings:
        seen = by_axis.setdefault(sharding.axis, set())
        units = set(sharding.units)
        if not units or not (sharding.modules or sharding.whole):
            yield f"units {sharding.units} have {len(sharding.modules)} sharded modules"
        if len(units) < len(sharding.units) or units & seen:
            yield f"units {sharding.units} are named twice"
        if not units <= set(range(len(plan.units))):
            yield f"units {sharding.units} are not all among the {len(plan.units)}"
        if units & set(blocks(plan)) and units - set(blocks(plan)):
            yield f"units {sharding.units} are blocks and others"
        seen.update(units)


def _sharded_modules(plan: Plan) -> Iterator[str]:
    """Each module once in its group, as a path; "" is the block itself."""
    for sharding in plan.shardings:
        for name, count in Counter(module.module for module in sharding.modules).items():
            parts = name.split(".") if name else []
            is_path = all(parts) and (bool(name) or set(sharding.units) <= set(blocks(plan)))
            if count > 1 or not is_path:
                yield f"module {name!r} of units {sharding.units} occurs {count} times"


def instructions(plan: Plan) -> Iterator[tuple[UnitSharding, ModuleSharding]]:
    """How modules are split, each with the units that it holds for."""
    for sharding in plan.shardings:
        yield from ((sharding, module) for module in sharding.modules)


def _layouts(plan: Plan) -> Iterator[str]:
    """Spelled "Replicate" or "Shard(dim)", as the style allows."""
    for sharding, module in instructions(plan):
        if module.style not in _STYLES:
            yield f"{module.module} has the unknown style {module.style!r}"
            continue
        sides = zip(("input", "output"), _STYLES[module.style], strict=True)
        for side, allowed in sides:
            layout = getattr(module, f"{side}_layout")
            if not _LAYOUT.fullmatch(layout):
                yield f"the {side} layout of {module.module} is spelled {layout!r}"
            elif _PART in allowed and layout != _REPLICATE:
                continue
            elif layout not in _spelled(plan, sharding, allowed):
                yield f"the {side} layout of {module.module}, style {module.style}, is {layout}"


def _spelled(plan: Plan, sharding: UnitSharding, allowed: frozenset[str]) -> frozenset[str]:
    """Write out what the stream is; its last dim may be the sequence in tensors of two dims."""
    in_blocks = set(sharding.units) <= set(blocks(plan))
    is_context = sharding.axis == Axis.CP
    split = (plan.sequence_parallel and in_blocks) or is_context
    stream = {f"Shard({plan.sequence_dim})", _LAST} if split and _STREAM in allowed else set()
    if stream and (is_context or plan.degrees.ep > 1):
        stream.add(_ROWS)  # of tensors whose first dim has samples and sequence
    return (allowed - {_STREAM}) | stream


def _fused_projections(plan: Plan) -> Iterator[str]:
    """Several projections only where they stay split until they are apart."""
    for _, module in instructions(plan):
        is_column = module.style == Style.COLUMN and module.output_layout == _LAST
        may_fuse = is_column or module.style == Style.INNER
        for each in module.split:
            if each.fused < 1 or (each.fused > 1 and not may_fuse):
                yield (
                    f"{each.name} of {module.module}, style {module.style}, holds {each.fused} "
                    "projections"
                )


def _tied_parameters(plan: Plan) -> Iterator[str]:
    """Groups of names, none in two; all modules of a group split the weight alike."""
    for name, count in Counter(name for group in plan.tied_parameters for name in group).items():
        if count > 1 or not name:
            yield f"the name {name!r} is tied {count} times"
    split_of = {
        path: module
        for sharding, module in instructions(plan)
        if sharding.axis == plan.degrees.split_axis
        for path in paths(plan, sharding, module)
    }
    for group in plan.tied_parameters:
        if len(group) < 2:
            yield f"{', '.join(group)} is tied to nothing"
        splits = {
            name: _split(split_of[name.rpartition(".")[0]], name)
            for name in group
            if name.rpartition(".")[0] in split_of
        }
        if len(set(splits.values())) > 1:
            yield "one parameter is split in several ways: " + ", ".join(
                f"{name} {split}" for name, split in splits.items()
            )


def paths(plan: Plan, sharding: UnitSharding, module: ModuleSharding) -> Iterator[str]:
    """Paths in the model of what an instruction names."""
    for unit in sharding.units:
        prefix = f"{plan.units[unit]}." if unit in blocks(plan) else ""
        yield f"{prefix}{module.module}".removesuffix(".")


def _split(module: ModuleSharding, parameter: str) -> str:
    """Say how a module splits one of its parameters."""
    name = parameter.rpartition(".")[2]
    parts = [each for each in module.split if each.name == name]
    return f"along dim {parts[0].dim} ({parts[0].fused})" if parts else "whole"


def _crossings(plan: Plan) -> Iterator[str]:
    """What a stage receives beside the stream was made before it; none with a split stream."""
    first_unit = {name: unit for unit, name in enumerate(plan.units) if unit in blocks(plan)}
    for stage in plan.stages:
        beside = [*stage.carried, *([stage.stream_output] if stage.stream_output else [])]
        if beside and (stage.index == 0 or plan.splits_stream):
            yield f"stage {stage.index} receives {beside[0].module} beside the stream"
        for output in beside:
            late = first_unit.get(output.module, 0) >= stage.first_unit
            if late or output.index < 0 or not output.module or beside.count(output) > 1:
                yield f"stage {stage.index} receives output {output.index} of {output.module!r}"


def _loss(plan: Plan) -> Iterator[str]:
    """At least one chunk; of several it is named what makes the logits."""
    if plan.loss_chunks < 1 or (plan.loss_chunks > 1) != bool(plan.loss_module):
        yield f"the loss is taken in {plan.loss_chunks} chunks of what {plan.loss_module!r} returns"


def _offload(plan: Plan) -> Iterator[str]:
    """The state lies in host memory as a whole, one stage on each rank, or on devices.

    Inputs of blocks do on ranks that have all of the model.
    """
    uses_hosts = plan.cpu_offload or plan.activation_offload
    if len(plan.host_bytes_by_rank) != uses_hosts * plan.degrees.pp:
        yield f"{len(plan.host_bytes_by_rank)} ranks have something in host memory"
    if plan.activation_offload and (plan.degrees.pp > 1 or plan.compile):
        yield "inputs of blocks of a pipeline, or of compiled ones, lie in host memory"
    if not plan.cpu_offload:
        return
    if plan.state_form != "fsdp" or plan.virtual_stages > 1:
        yield f"{plan.virtual_stages} stages of a rank, form {plan.state_form}, are offloaded"
    for rank, memory in enumerate(plan.memory_by_rank):
        held = memory.params_bytes + memory.optimizer_bytes
        adds_up_late = plan.degrees.dp_replicate > 1 < plan.num_microbatches
        held += memory.grads_bytes * (not adds_up_late)
        if held:
            yield f"rank {rank} has {held} bytes of offloaded states on its device"


LAYOUT_RULES: Mapping[str, Callable[[Plan], Iterator[str]]] = {
    "units": _units,
    "degrees": _degrees,
    "mesh": _mesh,
    "batch": _batch,
    "schedule": _schedule,
    "stages": _stages,
    "pipeline ranks": _pipeline_ranks,
    "recomputation": _recomputation,
    "split modules": _split_modules,
    "whole modules": _whole_modules,
    "sharded units": _sharded_units,
    "sharded modules": _sharded_modules,
    "layouts": _layouts,
    "fused projections": _fused_projections,
    "tied parameters": _tied_parameters,
    "crossings": _crossings,
    "loss": _loss,
    "offload": _offload,
}
"""Rules of a plan by itself."""
