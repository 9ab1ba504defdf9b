"""Draws the graphs of split blocks that a plan compiles, without data, before its script is."""

import warnings
from collections.abc import Sequence
from contextlib import ExitStack

from torch import nn

from planner.codegen.splits import block_positions, splits_stream
from planner.errors import CodegenError
from planner.plan.types import Plan
from planner.runtime.dry_run import DryRun
from planner.runtime.failures import DryRunError
from planner.runtime.known_data import KnownData
from planner.runtime.layout import SplitAxis
from planner.runtime.module_edge import AxisShardings, ModuleSharding
from planner.runtime.split_compiled import graph_drawn
from planner.runtime.trees import Tree
from planner.vocabulary import Axis

_OF_META_ALONE = "allow_non_fake_inputs"
"""Torch says it of an index that is a list: on the meta device it makes a real tensor of that."""


def draw_graphs(plan: Plan, dry_run: DryRun) -> None:
    """Draw the graph of one block of each kind, forward and backward.

    Nothing is recomputed: attention, whose kernel selective recomputation keeps, has none here.

    Args:
        plan: Its blocks are split and compiled.
        dry_run: Of its model.

    Raises:
        CodegenError: A block cannot be drawn, or changes its buffers.
    """
    if changed := _changed_in_blocks(plan, dry_run.anatomy.blocks):
        raise CodegenError(
            f"the forward of a block changes its buffer {changed}: the graph of a split block is "
            "handed its buffers and gives none back",
            hint="plan without --fix compile=true, or with blocks that are not split (--fix tp=1)",
        )
    axes = [_axis_shardings(plan, axis) for axis in plan.degrees.split_axes]
    blocks = sorted(block_positions(plan).values(), reverse=True)
    kinds = {tuple(id(each.of_block(block)) for each in axes): block for block in blocks}
    for block in sorted(kinds.values()):
        _draw(dry_run, block, axes)


def _changed_in_blocks(plan: Plan, blocks: Sequence[str]) -> str:
    """Name of a buffer that a block's forward changes, "" where none does."""
    inside = tuple(f"{block}." for block in blocks)
    return next((name for name in plan.model.changed_buffers if name.startswith(inside)), "")


def _draw(dry_run: DryRun, block: int, axes: Sequence[AxisShardings]) -> None:
    with ExitStack() as drawn:

        def prepare(module: nn.Module, known: KnownData) -> None:
            drawn.enter_context(graph_drawn(module))
            by_graph = module.forward

            def forward(*args: Tree, **kwargs: Tree) -> Tree:
                with known.set_aside(), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    return by_graph(*args, **kwargs)

            module.forward = forward

        try:
            dry_run.block(block, axes, prepare=prepare)
        except DryRunError as error:
            path, cause = dry_run.anatomy.blocks[block], _first_cause(error)
            if _OF_META_ALONE in cause:
                return
            raise CodegenError(
                f"torch draws no graph of {path} as it is split: {cause}",
                hint="plan without --fix compile=true, or write the line that is named in "
                "another way",
            ) from error


def _first_cause(error: BaseException) -> str:
    """First line of what the error comes of: torch says where it was, at length."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return str(error).partition("\n")[0] or type(error).__name__


def _axis_shardings(plan: Plan, axis: Axis) -> AxisShardings:
    """How modules of blocks run over an axis, as the script says it."""
    positions = block_positions(plan)
    blocks = [
        (
            [positions[unit] for unit in sharding.units if unit in positions],
            [
                ModuleSharding(
                    module.module,
                    module.style,
                    tuple((each.name, each.dim, each.fused) for each in module.split),
                    module.input_layout,
                    module.output_layout,
                )
                for module in sharding.modules
            ],
        )
        for sharding in plan.shardings
        if sharding.axis == axis
    ]
    size = int(getattr(plan.degrees, axis))
    dim = plan.sequence_dim if splits_stream(plan, axis) else None
    return AxisShardings(SplitAxis(str(axis), size), dim, blocks)
