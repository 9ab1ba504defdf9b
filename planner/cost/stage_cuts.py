"""How frameworks divide a model's units over pipeline stages."""

from collections.abc import Sequence
from itertools import accumulate

from planner.framework.spec import StageCuts

Bounds = tuple[tuple[int, int], ...]
"""First unit and one past the last unit of every stage; an empty stage has equal ones."""


def stage_bounds(
    matmul_flop: Sequence[int], *, epilogue_units: int, stages: int, cuts: StageCuts
) -> Bounds:
    """Divide a model.

    Args:
        matmul_flop: FLOPs of each unit's products with parameters: prologue, blocks, epilogue.
        epilogue_units: Units of the epilogue.
        stages: Stages in all, virtual ones counted.
        cuts: The framework's rule.
    """
    if cuts == "by_flop":
        counts = _by_flop(matmul_flop, stages)
    else:
        blocks = len(matmul_flop) - 1 - epilogue_units
        counts = _even(blocks, stages, epilogue_units, cuts)
    ends = list(accumulate(counts))
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def _even(blocks: int, stages: int, epilogue_units: int, cuts: StageCuts) -> list[int]:
    """Units per stage, with as many blocks in each, or the ends of the model counted as blocks."""
    if cuts == "even_with_ends" and (blocks + 2) % stages == 0:
        counts = [(blocks + 2) // stages] * stages
        counts[-1] += epilogue_units - 1
        return counts
    share, rest = divmod(blocks, stages)
    counts = [share + (1 if stage < rest else 0) for stage in range(stages)]
    counts[0] += 1
    counts[-1] += epilogue_units
    return counts


def _by_flop(flop: Sequence[int], stages: int) -> list[int]:
    """Units per stage: a stage ends with the unit that exceeds its share of the FLOPs."""
    counts = [0] * stages
    for stage in _stages_of(flop, stages):
        counts[min(stage, stages - 1)] += 1
    return counts


def _stages_of(flop: Sequence[int], stages: int) -> list[int]:
    """The stage of each unit."""
    total, stage = sum(flop), 0
    found = []
    for reached in accumulate(flop):
        found.append(stage)
        if reached * stages > total * (stage + 1):
            stage += 1
    return found


def leaves_ranks_empty(matmul_flop: Sequence[int], stages: int, cuts: StageCuts) -> bool:
    """Whether some rank gets no unit at all; such jobs fail when they start.

    The conversion of the logits counts as a unit of its own here.
    """
    if cuts != "by_flop":
        return False
    return _stages_of([*matmul_flop, 0], stages)[-1] < stages - 1
