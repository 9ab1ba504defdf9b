"""All figures of a table of runs and its predictions."""

from dataclasses import dataclass

import pandas as pd

from planner.validation.scoring.metrics import (
    MemoryErrors,
    OomScores,
    RowCounts,
    TimeErrors,
    make_sample,
    memory_errors,
    oom_scores,
    row_counts,
    time_errors,
)
from planner.validation.scoring.ranking import (
    GroupScores,
    RankingScores,
    group_keys,
    group_scores,
    ranking_scores,
)

MIN_GROUP = 5
"""Measured rows that a group needs, unless another number is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Figures of one table."""

    rows: RowCounts
    """What they stand on."""
    time: TimeErrors
    """How far the step times are off."""
    ranking: RankingScores
    """What choosing by them costs."""
    memory: MemoryErrors
    """How far the peak memories are off."""
    oom: OomScores | None
    """How right the verdicts on what fits are; None without failed runs and a capacity."""


def score_runs(
    measured: pd.DataFrame,
    predictions: pd.DataFrame,
    *,
    failed: pd.DataFrame | None = None,
    failed_predictions: pd.DataFrame | None = None,
    capacity_gib: float | None = None,
    min_group: int = MIN_GROUP,
) -> tuple[Scores, tuple[GroupScores, ...]]:
    """Score predictions against measured runs, and runs that failed.

    Args:
        measured: Columns model, num_gpus, global_batch, seq_len, step_time_s and, where it is
            known, peak_mem_gib.
        predictions: Columns row (0-based position in ``measured``, each at most once),
            step_time_s, peak_mem_gib, feasible. What is empty is not predicted.
        failed: Configurations that were tried and did not run, columns as ``measured``.
        failed_predictions: Their predictions, given with ``failed``.
        capacity_gib: Memory of a device: rows predicted to need more do not fit, on top of what
            ``feasible`` says.
        min_group: Measured rows that a group needs.

    Returns:
        The figures, and those of each group in the order of its first row.
    """
    sample = make_sample(measured, predictions, capacity_gib=capacity_gib)
    failed_sample = None
    if failed is not None:
        assert failed_predictions is not None
        failed_sample = make_sample(failed, failed_predictions, capacity_gib=capacity_gib)
    groups = group_scores(
        group_keys(measured),
        sample,
        failed_keys=[] if failed is None else group_keys(failed),
        failed=failed_sample,
        min_group=min_group,
    )
    scores = Scores(
        rows=row_counts(sample),
        time=time_errors(sample),
        ranking=ranking_scores(groups, with_failed=failed is not None),
        memory=memory_errors(sample),
        oom=oom_scores(sample, failed_sample, capacity_gib=capacity_gib),
    )
    return scores, groups
