"""What several targets ask of a plan."""

from collections import Counter

from planner.errors import CodegenError
from planner.plan.types import Plan
from planner.vocabulary import SPLIT_STYLES, Axis, Recomputation


def block_positions(plan: Plan) -> tuple[int, ...]:
    """Positions of the blocks in ``Plan.units``, in execution order."""
    outer = ("prologue", "epilogue", "model")
    return tuple(at for at, name in enumerate(plan.units) if name not in outer)


def block_lists(plan: Plan) -> tuple[str, ...]:
    """The module lists that hold the blocks: ("model.layers",), an encoder's and a decoder's."""
    parents = (plan.units[at].rpartition(".")[0] for at in block_positions(plan))
    return tuple(dict.fromkeys(parents))


def blocks_per_stage(plan: Plan) -> tuple[int, ...]:
    """Blocks of each stage, in model order."""
    blocks = block_positions(plan)
    return tuple(
        sum(stage.first_unit <= at < stage.end_unit for at in blocks) for stage in plan.stages
    )


def recomputed_per_stage(plan: Plan) -> tuple[int, ...]:
    """Blocks of each stage that backward computes again in some way."""
    return tuple(
        sum(mode != Recomputation.NONE for mode in stage.activation_checkpointing)
        for stage in plan.stages
    )


def recompute_modes(plan: Plan) -> Counter[str]:
    """Number of blocks by what of them is recomputed."""
    blocks = set(block_positions(plan))
    return Counter(
        mode
        for stage in plan.stages
        for at, mode in enumerate(stage.activation_checkpointing, start=stage.first_unit)
        if at in blocks
    )


def recompute_words(plan: Plan) -> str:
    """Name what is recomputed: "12 of 32 blocks in full, 4 selectively"."""
    modes = recompute_modes(plan)
    words = {Recomputation.FULL: "in full", Recomputation.SELECTIVE: "selectively"}
    parts = [f"{modes[mode]} {word}" for mode, word in words.items() if modes[mode]]
    return f"of {sum(modes.values())} blocks {' and '.join(parts) or 'none'}"


def whole_blocks(plan: Plan) -> int:
    """Blocks that tensor-parallel ranks hold whole, though tp is above 1."""
    split = {
        unit
        for sharding in plan.shardings
        if any(module.style in SPLIT_STYLES for module in sharding.modules)
        for unit in sharding.units
    }
    return 0 if plan.degrees.tp == 1 else len(set(block_positions(plan)) - split)


def spread(numbers: tuple[int, ...]) -> str:
    """Write numbers with repeats counted: "9, 8 x 2, 7"."""
    parts: list[tuple[int, int]] = []
    for number in numbers:
        if parts and parts[-1][0] == number:
            parts[-1] = (number, parts[-1][1] + 1)
        else:
            parts.append((number, 1))
    return ", ".join(f"{number} x {times}" if times > 1 else f"{number}" for number, times in parts)


def refuse_other_axes(plan: Plan, version: str) -> None:
    """Refuse a plan whose sequences or experts are split.

    Raises:
        CodegenError: With what would work.
    """
    for axis, words in ((Axis.CP, "context"), (Axis.EP, "expert")):
        degree = getattr(plan.degrees, axis)
        if degree > 1:
            raise CodegenError(
                f"the plan has {degree} {words}-parallel ranks, which no file of {version} asks "
                "for",
                hint=f"plan with --fix {axis}=1, or export --to megatron or torchtitan",
            )
