"""How frameworks divide a model's blocks over pipeline stages."""

from itertools import accumulate

from planner.framework.spec import StageCuts
from planner.validation.pricing.models import ModelShape


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
    """Units per stage: a stage ends with the unit that exceeds its share of the FLOPs."""
    costs = _unit_costs(shape)
    counts = [0] * stages
    for stage in _stages_of(costs, stages):
        counts[min(stage, stages - 1)] += 1
    return counts


def _unit_costs(shape: ModelShape) -> list[int]:
    """Multiplications per token of embedding, blocks, head and loss."""
    matrices = 3 if shape.gated else 2
    block = (4 * shape.hidden + matrices * shape.ffn) * shape.hidden
    return [0, *[block] * shape.layers, shape.vocab_size * shape.hidden, 0]


def _stages_of(costs: list[int], stages: int) -> list[int]:
    """The stage of each unit."""
    total, stage = sum(costs), 0
    found = []
    for reached in accumulate(costs):
        found.append(stage)
        if reached * stages > total * (stage + 1):
            stage += 1
    return found


def leaves_ranks_empty(shape: ModelShape, stages: int, cuts: StageCuts) -> bool:
    """Whether some rank gets no unit at all; such jobs fail when they start.

    The conversion of the logits counts as a unit of its own here.
    """
    if cuts != "by_flop":
        return False
    return _stages_of([*_unit_costs(shape), 0], stages)[-1] < stages - 1
