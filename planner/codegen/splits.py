"""What the script says of modules that are split over axes."""

from dataclasses import dataclass

from planner.codegen.source import call_of, quote, range_of, tuple_of
from planner.plan.types import Plan
from planner.strategy.sharding import ModuleSharding
from planner.vocabulary import Axis


@dataclass(frozen=True, slots=True, kw_only=True)
class _BlockGroup:
    """Tensor-parallel instructions of blocks of one structure, as source text."""

    blocks: str
    modules: tuple[str, ...]


def split_source(plan: Plan) -> dict[str, object]:
    """What the script says of modules that are split over an axis."""
    axes = plan.degrees.split_axes
    return {
        "is_split": bool(axes),
        "splits": [_axis_split(plan, axis) for axis in axes],
        "ep": plan.degrees.ep,
        "lenders": " and ".join((Axis.DP_SHARD, *plan.degrees.sample_axes)),
        "sequence_dim": plan.sequence_dim if plan.splits_stream else None,
        "stream_axes": " and ".join(axis for axis in axes if splits_stream(plan, axis)),
        "stream_parts": " * ".join(f'MESH["{axis}"]' for axis in axes if splits_stream(plan, axis)),
    }


def splits_stream(plan: Plan, axis: Axis) -> bool:
    """Whether an axis splits the sequence of what flows between blocks."""
    return axis is Axis.CP or (axis is Axis.TP and plan.sequence_parallel)


def _axis_split(plan: Plan, axis: Axis) -> dict[str, object]:
    """What the script says of modules that are split over one axis.

    Those of cp around tp have names of their own.
    """
    is_around = axis is not plan.degrees.split_axis
    mesh = {Axis.EP: "experts", Axis.TP: "merged" if plan.degrees.cp > 1 else "mesh"}
    shares = plan.degrees.ep > 1 and axis is not Axis.EP
    size = "EXPERT_RANKS" if axis is Axis.EP else f'MESH["{axis}"]'
    return {
        "axis": str(axis),
        "names": "CONTEXT_" if is_around else "",
        "mesh": f"{mesh.get(axis, 'mesh')}[{quote(axis)}]",
        "over": f"SplitAxis({quote(axis)}, {size}{', EXPERT_RANKS' * shares})",
        "shares": shares,
        "sequence": "SEQUENCE_DIM" if splits_stream(plan, axis) else "None",
        "block_groups": _block_groups(plan, axis),
        "outer_modules": _outer_modules(plan, axis),
    }


def _block_groups(plan: Plan, axis: Axis) -> list[_BlockGroup]:
    positions = block_positions(plan)
    groups = []
    for sharding in (each for each in plan.shardings if each.axis == axis):
        blocks = [positions[unit] for unit in sharding.units if unit in positions]
        if blocks and sharding.modules:
            modules = tuple(_module_source(module, indent=12) for module in sharding.modules)
            groups.append(_BlockGroup(blocks=range_of(blocks), modules=modules))
    return groups


def _outer_modules(plan: Plan, axis: Axis) -> list[str]:
    positions = block_positions(plan)
    return [
        _module_source(module, indent=4)
        for sharding in plan.shardings
        if sharding.axis == axis and any(unit not in positions for unit in sharding.units)
        for module in sharding.modules
    ]


def _module_source(module: ModuleSharding, *, indent: int) -> str:
    """Write one instruction; what is the default of the runtime's own class is left out."""
    arguments = [quote(module.module), quote(module.style)]
    if module.split:
        parts = [f"({quote(each.name)}, {each.dim}, {each.fused})" for each in module.split]
        arguments.append(f"split={tuple_of(parts)}")
    if module.input_layout != "Replicate":
        arguments.append(f"input_layout={quote(module.input_layout)}")
    if module.output_layout != "Replicate":
        arguments.append(f"output_layout={quote(module.output_layout)}")
    return call_of("ModuleSharding", arguments, indent=indent)


def block_positions(plan: Plan) -> dict[int, int]:
    """Map the position of a unit to the position of its block."""
    units = [i for i, unit in enumerate(plan.units) if unit not in ("prologue", "epilogue")]
    return {} if plan.units == ("model",) else {unit: block for block, unit in enumerate(units)}
