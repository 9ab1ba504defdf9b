"""What a choice by predicted time costs: rank correlation and regret, group by group.

A group is what a user chooses in: one model on so many devices with one batch and length.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from planner.validation.scoring.metrics import (
    Flags,
    Floats,
    Sample,
    rank_correlation,
)

GROUP_COLUMNS = ("model", "num_gpus", "global_batch", "seq_len")
"""Columns whose values a group shares."""

LEAST_RANKED = 3
"""Rows that a rank correlation needs."""

TIE = 1e-9
"""Relative difference up to which predictions tie."""

Rows = npt.NDArray[np.intp]
Key = tuple[str, float | None, float | None, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of many groups in three; None without a group."""

    mean: float | None
    """Their mean."""
    median: float | None
    """Their median."""
    max: float | None
    """The largest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupScores:
    """How well the predictions choose within one group.

    What its rows share is None where the cells hold no number.
    """

    model: str
    """Name of the model."""
    num_gpus: float | None
    """Ranks in all."""
    global_batch: float | None
    """Sequences per step."""
    seq_len: float | None
    """Tokens per sequence."""
    rows: int
    """Rows with a measured step time."""
    predicted: int
    """Those with a predicted one."""
    mape: float | None
    """Mean absolute error of the step time, None where none is predicted."""
    bias: float | None
    """Median signed error, None where none is predicted."""
    spearman: float | None
    """Rank correlation, None with fewer than three predicted rows."""
    none_fits: bool
    """Nothing that is predicted is predicted to fit: all of it is in the running."""
    top1_regret: float | None
    """Measured time of the first pick over the best measured one, minus one; None where nothing
    is predicted."""
    top3_regret: float | None
    """The same for the best of the first three picks."""
    failed_rows: int | None
    """Failed rows of the group that are predicted to fit; None without a table of them."""
    top1_failed: float | None
    """Chance that the first pick among all of the group's layouts failed; None where nothing is
    predicted to fit."""
    top3_all_failed: float | None
    """Chance that the first three all failed."""
    tries_to_first_run: float | None
    """Mean number of picks until one ran; None where none of those predicted to fit did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedScores:
    """Choosing among all layouts of a group, those that failed included."""

    groups: int
    """Groups in which something is predicted to fit."""
    top1_failed: float | None
    """Mean chance that the first pick failed."""
    top3_all_failed: float | None
    """Mean chance that the first three all did."""
    tries_to_first_run: float | None
    """Mean number of picks until one ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingScores:
    """How well the predictions choose, over all groups."""

    groups: int
    """Groups with enough measured rows."""
    rows_in_groups: int
    """Their measured rows."""
    groups_unpredicted: int
    """Groups without a prediction: they have no regret."""
    groups_none_fit: int
    """Groups in which nothing is predicted to fit."""
    groups_without_rho: int
    """Groups with too few predicted rows for a rank correlation."""
    none_ran: int
    """Groups in which everything that is predicted to fit failed."""
    spearman_mean: float | None
    """Mean rank correlation."""
    top1_regret: Summary
    """Regret of the first pick."""
    top3_regret: Summary
    """Regret of the best of the first three."""
    with_failed: FailedScores | None
    """Choosing among failed layouts too; None without a table of them."""


def group_keys(frame: pd.DataFrame) -> list[Key]:
    """Give the group of each row; numbers are equal however they are written."""
    num_gpus, global_batch, seq_len = (_numbers(frame, name) for name in GROUP_COLUMNS[1:])
    models = frame[GROUP_COLUMNS[0]].astype(str)
    return list(zip(models, num_gpus, global_batch, seq_len, strict=True))


def group_scores(
    keys: Sequence[Key],
    sample: Sample,
    *,
    failed_keys: Sequence[Key] = (),
    failed: Sample | None = None,
    min_group: int = 5,
) -> tuple[GroupScores, ...]:
    """Score each group.

    Args:
        keys: Group of each measured row.
        sample: Measured rows.
        failed_keys: Group of each failed row.
        failed: Failed rows, None where they are not known.
        min_group: Rows with a measured step time that a group needs.
    """
    members = _members(keys, sample.timed)
    runnable = failed.priced & failed.fits if failed is not None else np.zeros(0, dtype=bool)
    failures = _members(failed_keys, runnable)
    none = np.zeros(0, dtype=np.intp)
    return tuple(
        _score_group(key, rows, sample, failed, failures.get(key, none))
        for key, rows in members.items()
        if len(rows) >= min_group
    )


def ranking_scores(groups: Sequence[GroupScores], *, with_failed: bool) -> RankingScores:
    """Sum up the groups.

    Args:
        groups: Scores of each.
        with_failed: Whether they were scored with a table of failed runs.
    """
    judged = [group for group in groups if group.top1_failed is not None]
    return RankingScores(
        groups=len(groups),
        rows_in_groups=sum(group.rows for group in groups),
        groups_unpredicted=sum(group.predicted == 0 for group in groups),
        groups_none_fit=sum(group.none_fits for group in groups),
        groups_without_rho=sum(group.spearman is None for group in groups),
        none_ran=sum(group.tries_to_first_run is None for group in judged),
        spearman_mean=_mean([group.spearman for group in groups]),
        top1_regret=_summary([group.top1_regret for group in groups]),
        top3_regret=_summary([group.top3_regret for group in groups]),
        with_failed=FailedScores(
            groups=len(judged),
            top1_failed=_mean([group.top1_failed for group in judged]),
            top3_all_failed=_mean([group.top3_all_failed for group in judged]),
            tries_to_first_run=_mean([group.tries_to_first_run for group in judged]),
        )
        if with_failed
        else None,
    )


def expected_best(predicted: Floats, measured: Floats, picks: int) -> float:
    """Mean over the order of ties of the best measured time among the first picks.

    Args:
        predicted: Predicted times; the lowest are picked first.
        measured: Measured times.
        picks: How many are picked.
    """
    best, left = math.inf, picks
    for tied in _ties(predicted):
        times = np.sort(measured[tied])
        if len(times) > left:
            # The lowest of `left` out of n is the i-th where the others lie behind it.
            ways = [math.comb(len(times) - 1 - i, left - 1) for i in range(len(times))]
            lowest = np.minimum(times, best)
            return float(np.dot(lowest, ways) / math.comb(len(times), left))
        best, left = min(best, float(times[0])), left - len(times)
        if not left:
            break
    return best


def chance_all_failed(predicted: Floats, failed: Flags, picks: int) -> float:
    """Chance over the order of ties that the first picks all failed."""
    left = picks
    for tied in _ties(predicted):
        bad, drawn = int(failed[tied].sum()), min(left, len(tied))
        if bad < len(tied):
            return math.comb(bad, drawn) / math.comb(len(tied), drawn)
        left -= drawn
        if not left:
            break
    return 1.0


def expected_tries(predicted: Floats, failed: Flags) -> float | None:
    """Mean over the order of ties of the picks until one ran; None where all failed."""
    tries = 0
    for tied in _ties(predicted):
        good = len(tied) - int(failed[tied].sum())
        if good:
            return tries + (len(tied) + 1) / (good + 1)
        tries += len(tied)
    return None


def _score_group(
    key: Key, rows: Rows, sample: Sample, failed: Sample | None, failures: Rows
) -> GroupScores:
    known = rows[sample.priced[rows]]
    fitting = known[sample.fits[known]]
    times, predicted = sample.measured_s, sample.predicted_s
    running = fitting if len(fitting) else known
    error = predicted[known] / times[known] - 1
    regrets = [
        expected_best(predicted[running], times[running], picks) / float(times[rows].min()) - 1
        if len(known)
        else None
        for picks in (1, 3)
    ]
    chances: dict[str, float | None] = dict.fromkeys(
        ("top1_failed", "top3_all_failed", "tries_to_first_run")
    )
    # As for the regret, a group without a prediction of what ran is not judged.
    if failed is not None and len(known) and len(fitting) + len(failures):
        candidates = np.concatenate([predicted[fitting], failed.predicted_s[failures]])
        bad = np.arange(len(candidates)) >= len(fitting)
        chances = {
            "top1_failed": chance_all_failed(candidates, bad, 1),
            "top3_all_failed": chance_all_failed(candidates, bad, 3),
            "tries_to_first_run": expected_tries(candidates, bad),
        }
    model, num_gpus, global_batch, seq_len = key
    return GroupScores(
        model=model,
        num_gpus=num_gpus,
        global_batch=global_batch,
        seq_len=seq_len,
        rows=len(rows),
        predicted=len(known),
        mape=float(np.abs(error).mean()) if len(known) else None,
        bias=float(np.median(error)) if len(known) else None,
        spearman=rank_correlation(predicted[known], times[known])
        if len(known) >= LEAST_RANKED
        else None,
        none_fits=len(known) > 0 and not len(fitting),
        top1_regret=regrets[0],
        top3_regret=regrets[1],
        failed_rows=None if failed is None else len(failures),
        **chances,
    )


def _numbers(frame: pd.DataFrame, name: str) -> list[float | None]:
    """Numbers of a column, whole ones as such; None where a cell holds none."""
    values = [float(value) for value in pd.to_numeric(frame[name], errors="coerce")]
    return [
        None if math.isnan(value) else int(value) if value.is_integer() else value
        for value in values
    ]


def _members(keys: Sequence[Key], chosen: Flags) -> Mapping[Key, Rows]:
    """Chosen rows of each group, in order."""
    rows: dict[Key, list[int]] = {}
    for row, key in enumerate(keys):
        if chosen[row]:
            rows.setdefault(key, []).append(row)
    return {key: np.array(each, dtype=np.intp) for key, each in rows.items()}


def _ties(predicted: Floats) -> Iterator[Rows]:
    """Yield the rows from the lowest prediction up, those that tie together."""
    order = np.argsort(predicted, kind="stable")
    start = 0
    while start < len(order):
        lowest = predicted[order[start]]
        end = start + int(
            np.searchsorted(predicted[order[start:]], lowest * (1 + TIE), side="right")
        )
        yield order[start:end]
        start = end


def _summary(values: Sequence[float | None]) -> Summary:
    known = [value for value in values if value is not None]
    if not known:
        return Summary(mean=None, median=None, max=None)
    return Summary(mean=float(np.mean(known)), median=float(np.median(known)), max=max(known))


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
