"""How far predictions are from measurements: step time, memory, verdicts on what fits.

``error`` is (predicted - measured) / measured. A row counts where both are known.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

QUANTILE = 0.9
"""Share of the rows whose error is below ``p90_ape``."""

FALSE_ALARM_SHARE = 0.01
"""Share of the measured runs that ``caught_at_1pct`` would refuse."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """A table's measurements beside their predictions, one element per row; NaN is unknown."""

    measured_s: Floats
    """Measured step time."""
    measured_gib: Floats
    """Measured peak memory."""
    predicted_s: Floats
    """Predicted step time."""
    predicted_gib: Floats
    """Predicted peak memory."""
    fits: Flags
    """Whether the row is predicted to fit; true where nothing is predicted."""

    @property
    def timed(self) -> Flags:
        """Rows with a measured step time."""
        return self.measured_s > 0

    @property
    def priced(self) -> Flags:
        """Rows with a predicted step time."""
        return self.predicted_s > 0

    @property
    def judged(self) -> Flags:
        """Rows of which something is predicted."""
        return self.priced | (self.predicted_gib > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCounts:
    """How many rows the figures stand on."""

    measured: int
    """Rows of the table."""
    with_step_time: int
    """Rows with a measured step time."""
    predicted: int
    """Rows with a measured and a predicted one."""
    missing: int
    """Rows with a measured one only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeErrors:
    """Errors of the step time; None without a row."""

    mape: float | None
    """Mean of the absolute error."""
    median_ape: float | None
    """Median of the absolute error."""
    bias: float | None
    """Median of the signed error: below 0 is optimistic."""
    p90_ape: float | None
    """Nine in ten rows have a smaller absolute error."""
    best_scale: float | None
    """The one factor on all predictions that makes their MAPE least."""
    scaled_mape: float | None
    """MAPE after it: what is left is the error in shape."""
    scaled_median_ape: float | None
    """Median of the absolute error after it."""
    spread: float | None
    """exp(median |ln r - median ln r|) - 1 for r = predicted / measured: the typical error in
    shape, whatever a few far rows do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryErrors:
    """Errors of the peak memory; None without a row."""

    rows_measured: int
    """Rows with a measured peak."""
    rows_predicted: int
    """Rows with a measured and a predicted one."""
    mape: float | None
    """Mean of the absolute error."""
    median_ape: float | None
    """Median of the absolute error."""
    bias: float | None
    """Median of the signed error: below 0 promises more room than there is."""
    p90_ape: float | None
    """Nine in ten rows have a smaller absolute error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OomScores:
    """Verdicts on what fits, held to runs that ran and runs that failed."""

    capacity_gib: float | None
    """Memory of a device as given on top of the predictions' own verdict."""
    ok_rows_judged: int
    """Rows that ran, of which something is predicted."""
    false_alarms: float | None
    """Share of them that is predicted not to fit."""
    failed_rows: int | None
    """Rows that failed; None without their table, as are all below."""
    failed_rows_judged: int | None
    """Those of which something is predicted."""
    caught: float | None
    """Share of them that is predicted not to fit."""
    balanced_accuracy: float | None
    """Mean of the shares of both kinds that are judged rightly."""
    auc: float | None
    """Chance that a failed run's predicted memory is above that of one that ran, ties half."""
    caught_at_1pct: float | None
    """Share of failed runs above the capacity at which 1% of those that ran would be."""


def make_sample(
    measured: pd.DataFrame, predictions: pd.DataFrame, *, capacity_gib: float | None = None
) -> Sample:
    """Put measurements and predictions side by side.

    Args:
        measured: ``step_time_s`` and, where it is known, ``peak_mem_gib``.
        predictions: Columns row (0-based, each at most once), step_time_s, peak_mem_gib, feasible.
        capacity_gib: Rows predicted to need more do not fit either.
    """
    rows = predictions.set_index("row").reindex(range(len(measured)))
    predicted_gib = _floats(rows, "peak_mem_gib")
    fits = np.array([pd.isna(value) or bool(value) for value in rows["feasible"]], dtype=bool)
    if capacity_gib is not None:
        fits &= ~(predicted_gib > capacity_gib)
    return Sample(
        measured_s=_floats(measured, "step_time_s"),
        measured_gib=_floats(measured, "peak_mem_gib"),
        predicted_s=_floats(rows, "step_time_s"),
        predicted_gib=predicted_gib,
        fits=fits,
    )


def row_counts(sample: Sample) -> RowCounts:
    """Count the rows that the errors of the step time stand on."""
    return RowCounts(
        measured=len(sample.measured_s),
        with_step_time=int(sample.timed.sum()),
        predicted=int((sample.timed & sample.priced).sum()),
        missing=int((sample.timed & ~sample.priced).sum()),
    )


def time_errors(sample: Sample) -> TimeErrors:
    """Compare step times."""
    both = sample.timed & sample.priced
    ratio = sample.predicted_s[both] / sample.measured_s[both]
    if not len(ratio):
        return TimeErrors(
            **_error_figures(ratio),
            **dict.fromkeys(("best_scale", "scaled_mape", "scaled_median_ape", "spread")),
        )
    scale = best_scale(ratio)
    scaled = _error_figures(scale * ratio)
    deviation = np.abs(np.log(ratio) - np.median(np.log(ratio)))
    return TimeErrors(
        **_error_figures(ratio),
        best_scale=scale,
        scaled_mape=scaled["mape"],
        scaled_median_ape=scaled["median_ape"],
        spread=float(np.expm1(np.median(deviation))),
    )


def memory_errors(sample: Sample) -> MemoryErrors:
    """Compare peak memories."""
    measured = sample.measured_gib > 0
    both = measured & (sample.predicted_gib > 0)
    ratio = sample.predicted_gib[both] / sample.measured_gib[both]
    return MemoryErrors(
        rows_measured=int(measured.sum()), rows_predicted=len(ratio), **_error_figures(ratio)
    )


def oom_scores(
    ran: Sample, failed: Sample | None, *, capacity_gib: float | None = None
) -> OomScores | None:
    """Judge the verdicts on what fits.

    Args:
        ran: Runs that ran.
        failed: Runs that did not, None where they are not known.
        capacity_gib: As given to ``make_sample``.

    Returns:
        The scores; None where there are neither failed runs nor a capacity.
    """
    if failed is None and capacity_gib is None:
        return None
    judged = ran.timed & ran.judged
    alarms = _share(~ran.fits[judged])
    if failed is None:
        names = ("failed_rows", "failed_rows_judged", "caught", "balanced_accuracy")
        missing = dict.fromkeys((*names, "auc", "caught_at_1pct"))
        return OomScores(
            capacity_gib=capacity_gib,
            ok_rows_judged=int(judged.sum()),
            false_alarms=alarms,
            **missing,
        )
    caught = _share(~failed.fits[failed.judged])
    ran_gib = ran.predicted_gib[ran.timed & (ran.predicted_gib > 0)]
    failed_gib = failed.predicted_gib[failed.predicted_gib > 0]
    comparable = len(ran_gib) > 0 and len(failed_gib) > 0
    return OomScores(
        capacity_gib=capacity_gib,
        ok_rows_judged=int(judged.sum()),
        false_alarms=alarms,
        failed_rows=len(failed.measured_s),
        failed_rows_judged=int(failed.judged.sum()),
        caught=caught,
        balanced_accuracy=None if caught is None or alarms is None else (1 - alarms + caught) / 2,
        auc=area_under_curve(failed_gib, ran_gib) if comparable else None,
        caught_at_1pct=_share(failed_gib > np.quantile(ran_gib, 1 - FALSE_ALARM_SHARE))
        if comparable
        else None,
    )


def best_scale(ratio: Floats) -> float:
    """Find the factor s that makes the mean of |s * ratio - 1| least.

    The mean is that of |s - 1 / ratio| weighted by ratio: s is a weighted median of 1 / ratio.

    Args:
        ratio: Predicted over measured, not empty.
    """
    factors = 1 / ratio
    order = np.argsort(factors)
    weights = np.cumsum(ratio[order])
    return float(factors[order][np.searchsorted(weights, weights[-1] / 2)])


def rank_correlation(predicted: Floats, measured: Floats) -> float:
    """Spearman's rank correlation with average ranks for ties; 0 where all of one are equal."""
    ranks = np.array([_ranks(predicted), _ranks(measured)])
    if not np.ptp(ranks, axis=1).all():
        return 0.0
    return float(np.corrcoef(ranks)[0, 1])


def area_under_curve(above: Floats, below: Floats) -> float:
    """Chance that an element of the first is larger than one of the second, ties half.

    The Mann-Whitney statistic over the number of pairs; neither is empty.
    """
    ranks = _ranks(np.concatenate([above, below]))[: len(above)]
    least = len(above) * (len(above) + 1) / 2
    return float((ranks.sum() - least) / (len(above) * len(below)))


def _error_figures(ratio: Floats) -> dict[str, float | None]:
    """Mean, median and quantile of the absolute error, median of the signed one."""
    if not len(ratio):
        return dict.fromkeys(("mape", "median_ape", "bias", "p90_ape"))
    error = ratio - 1
    size = np.abs(error)
    return {
        "mape": float(size.mean()),
        "median_ape": float(np.median(size)),
        "bias": float(np.median(error)),
        "p90_ape": float(np.quantile(size, QUANTILE)),
    }


def _ranks(values: Floats) -> Floats:
    """Rank from 1 up; equal ones share the average."""
    return np.asarray(pd.Series(values).rank(), dtype=np.float64)


def _share(flags: Flags) -> float | None:
    return float(flags.mean()) if len(flags) else None


def _floats(frame: pd.DataFrame, column: str) -> Floats:
    if column not in frame:
        return np.full(len(frame), np.nan)
    return pd.to_numeric(frame[column], errors="coerce").to_numpy(dtype=float)
