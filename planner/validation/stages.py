"""How frameworks divide a model's blocks over pipeline stages."""

from itertools import accumulate

from planner.framework.spec import StageCuts
from planner.validation.models import ModelShape


def stage_bounds(shape: ModelShape, stages: int, cuts: StageCuts) -> tuple[tuple[int, int], ...]:
    """First unit and one past the last unit of every stage.

    Unit 0 is the embedding, units 1 to ``layers`` are the blocks, then come head and loss.

    Args:
        shape: The model.
        stages: Stages in all, virtual ones counted.
        cuts: The framework's rule.
    """
    counts = _by_flop(shape, stages) if cuts == "by_flop" else _even(shape, stages, cuts)
    ends = list(accumulate(counts))
    return tuple(zip([0, *ends[:-1]], ends, strict=True))


def _even(shape: ModelShape, stages: int, cuts: StageCuts) -> list[int]:
    """Units per stage, with as many blocks in each, or embedding and head counted as blocks."""
    if cuts == "even_with_ends" and (shape.layers + 2) % stages == 0:
        counts = [(shape.layers + 2) // stages] * stages
    else:
        share, rest = divmod(shape.layers, stages)
        counts = [share + (1 if stage < rest else 0) for stage in range(stages)]
        counts[0] += 1
        counts[-1] += 1
    counts[-1] += 1
    return counts


def _by_flop(shape: ModelShape, stages: int) -> list[int]:
    """Units per stage: a stage ends with the unit that exceeds its share of the FLOPs.

    A rank that is left without a unit passes on what it gets.
    """
    matrices = 3 if shape.gated else 2
    block = (4 * shape.hidden + matrices * shape.ffn) * shape.hidden
    costs = [0, *[block] * shape.layers, shape.vocab_size * shape.hidden, 0]
    total = sum(costs)
    counts = [0] * stages
    stage = 0
    for reached, _ in zip(accumulate(costs), costs, strict=True):
        counts[stage] += 1
        if reached * stages > total * (stage + 1):
            stage += 1
    return counts
