"""A validation in rows of words and numbers, as a screen shows it."""

from collections.abc import Callable, Iterable, Sequence

import pandas as pd

from planner.units import GIB, format_s
from planner.validation.reading.table import row_words
from planner.validation.scoring.metrics import MemoryErrors, OomScores, TimeErrors
from planner.validation.scoring.ranking import GroupScores, RankingScores, Summary
from planner.validation.types import Unpriced
from planner.validation.validate import PricedTable, ValidationResult

UNKNOWN = "-"
"""Stands where there is no figure."""

ERROR_HEAD = ("", "rows", "MAPE", "median", "bias", "p90")
REGRET_HEAD = ("", "mean", "median", "max")
GROUP_HEAD = ("model", "GPUs", "batch", "seq", "rows", "MAPE", "bias", "rho", "top-1", "top-3")
REASON_HEAD = ("rows", "reason", "first of them")

RUN_HEAD = ("model", "GPUs", "step time", "measured", "error", "memory", "measured", "error")

MOST_RUNS = 8
"""Runs that are listed one by one; larger tables are shown by their errors alone."""

MOST_GROUPS = 5
"""Groups that are listed without -v."""

MOST_REASONS = 8
"""Reasons that are listed without -v."""

MOST_EXAMPLES = 3
"""Rows that stand for a reason."""

UNIT_FACTOR = 200.0
"""Factor between predicted and measured step times that units explain better than anything."""


def table_words(priced: PricedTable) -> str:
    """Say how much of a table is priced: "1,013 rows, 1,000 priced, 13 not"."""
    total, done = len(priced.table.frame), len(priced.priced)
    rows = "1 row" if total == 1 else f"{total:,} rows"
    rest = f", {total - done:,} not" if total > done else ""
    return f"{rows}, {done:,} priced{rest}"


def error_rows(result: ValidationResult) -> list[tuple[str, ...]]:
    """Errors of the step time, the same after the best single factor, of the memory."""
    time, memory = result.metrics.time, result.metrics.memory
    predicted = f"{result.metrics.rows.predicted:,}"
    rows = [("step time", predicted, *_error_cells(time))]
    if time.best_scale is not None:
        scaled = (percent(time.scaled_mape), percent(time.scaled_median_ape))
        rows.append((f"  x {time.best_scale:.3g}", predicted, *scaled, "", ""))
    if memory.rows_measured:
        rows.append(("memory", f"{memory.rows_predicted:,}", *_error_cells(memory)))
    return rows


def error_notes(result: ValidationResult) -> list[str]:
    """What the rows of ``error_rows`` mean."""
    time = result.metrics.time
    if time.best_scale is None or time.spread is None:
        return ["no row has a measured and a predicted step time"]
    notes = [
        f"x {time.best_scale:.3g}: after the one factor that fits best; "
        f"spread {percent(time.spread)}: typical error in shape"
    ]
    points = result.plotted_points
    ratio = points["predicted_s"] / points["measured_s"]
    far = points[(ratio > UNIT_FACTOR) | (ratio < 1 / UNIT_FACTOR)]
    if len(far):
        row = int(far.index[0])
        measured_s, predicted_s = far.loc[row, ["measured_s", "predicted_s"]]
        rows = "1 row is" if len(far) == 1 else f"{len(far):,} rows are"
        notes.append(
            f"units? {rows} off by more than {UNIT_FACTOR:g} times, first {row_words(row)}: "
            f"step_time_s {measured_s:g}, predicted {predicted_s:.3g} s"
        )
    return notes


def run_rows(result: ValidationResult) -> list[tuple[str, ...]]:
    """Predicted beside measured, run by run; nothing where there are too many to read."""
    frame, priced = result.runs.measured, result.runs.priced
    if len(frame) > MOST_RUNS:
        return []
    rows: list[tuple[str, ...]] = []
    for each in priced:
        measured = frame.loc[each.row]
        names = (str(measured["model"]), f"{measured['num_gpus']:g}")
        time = _beside(each.step_time_s, measured["step_time_s"], format_s)
        memory = _beside(
            each.peak_mem_bytes / GIB, measured.get("peak_mem_gib"), lambda gib: f"{gib:.2f} GiB"
        )
        rows.append((*names, *time, *memory))
    return rows


def run_notes(result: ValidationResult) -> list[str]:
    """What the runs of ``run_rows`` leave open, or what was taken of a log."""
    if len(result.runs.measured) > MOST_RUNS:
        return []
    return list(dict.fromkeys(note for each in result.runs.priced for note in each.assumptions))


def _beside(predicted: float, cell: object, words: Callable[[float], str]) -> tuple[str, str, str]:
    """A prediction, what was measured, and the relative error."""
    measured = float(pd.to_numeric(pd.Series([cell]), errors="coerce").iloc[0])
    if not measured > 0:
        return (words(predicted), UNKNOWN, UNKNOWN)
    return (words(predicted), words(measured), percent(predicted / measured - 1, signed=True))


def regret_rows(ranking: RankingScores) -> list[tuple[str, ...]]:
    """Regret of the first pick and of the best of the first three."""
    return [
        ("top-1 regret", *_summary_cells(ranking.top1_regret)),
        ("top-3 regret", *_summary_cells(ranking.top3_regret)),
    ]


def ranking_notes(ranking: RankingScores) -> list[str]:
    """On what the ranking stands, and how it does among failed layouts."""
    if not ranking.groups:
        return ["no group of rows is large enough to choose in (--min-group)"]
    groups = "1 group" if ranking.groups == 1 else f"{ranking.groups:,} groups"
    notes = [
        f"{groups} (model, GPUs, batch, length) of {ranking.rows_in_groups:,} rows; "
        f"rank correlation {decimal(ranking.spearman_mean)}"
    ]
    if ranking.groups_unpredicted:
        notes.append(f"{ranking.groups_unpredicted} without a prediction, not ranked")
    if ranking.groups_none_fit:
        notes.append(f"{ranking.groups_none_fit} in which nothing is predicted to fit")
    failed = ranking.with_failed
    if failed is not None and failed.groups:
        notes.append(
            f"among failed layouts too: first pick failed {percent(failed.top1_failed)}, first "
            f"three all failed {percent(failed.top3_all_failed)}, "
            f"{decimal(failed.tries_to_first_run)} tries until one ran"
        )
    return notes


def oom_rows(oom: OomScores) -> list[tuple[str, str]]:
    """Verdicts on what fits, a name and what belongs to it."""
    rows = [("false alarms", f"{percent(oom.false_alarms)} of {oom.ok_rows_judged:,} that ran")]
    if oom.failed_rows is None:
        return rows
    return [
        ("caught", f"{percent(oom.caught)} of {oom.failed_rows_judged:,} that failed"),
        *rows,
        ("balanced accuracy", percent(oom.balanced_accuracy)),
        ("by memory alone", f"area under the curve {decimal(oom.auc)}"),
        ("", f"{percent(oom.caught_at_1pct)} caught at 1% false alarms"),
    ]


def group_rows(groups: Sequence[GroupScores], *, verbose: bool) -> list[tuple[str, ...]]:
    """Groups, those with the largest regret first, then with the largest error."""
    ordered = sorted(groups, key=lambda each: (-(each.top1_regret or 0.0), -(each.mape or 0.0)))
    return [
        (
            *(group.model, _size(group.num_gpus), _size(group.global_batch), _size(group.seq_len)),
            *(f"{group.predicted}", percent(group.mape), percent(group.bias, signed=True)),
            *(decimal(group.spearman), percent(group.top1_regret), percent(group.top3_regret)),
        )
        for group in (ordered if verbose else ordered[:MOST_GROUPS])
    ]


def reason_rows(unpriced: Iterable[Unpriced]) -> list[tuple[str, str, str]]:
    """Reasons for which rows are not priced, the most frequent first."""
    rows: dict[str, list[int]] = {}
    for each in unpriced:
        rows.setdefault(each.words, []).append(each.row)
    ordered = sorted(rows.items(), key=lambda item: (-len(item[1]), item[1][0]))
    return [
        (f"{len(found):,}", reason, ", ".join(row_words(row) for row in found[:MOST_EXAMPLES]))
        for reason, found in ordered
    ]


def percent(value: float | None, *, signed: bool = False) -> str:
    """Show a share or an error: "8.1%", "+8.1%"."""
    if value is None:
        return UNKNOWN
    return f"{value:+.1%}" if signed else f"{value:.1%}"


def decimal(value: float | None) -> str:
    """Show a plain figure with three decimals."""
    return UNKNOWN if value is None else f"{value:.3f}"


def _error_cells(errors: TimeErrors | MemoryErrors) -> tuple[str, ...]:
    return (
        percent(errors.mape),
        percent(errors.median_ape),
        percent(errors.bias, signed=True),
        percent(errors.p90_ape),
    )


def _summary_cells(summary: Summary) -> tuple[str, ...]:
    return (percent(summary.mean), percent(summary.median), percent(summary.max))


def _size(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:g}" if value < 1e6 else f"{value:.0f}"
