"""Fits the few constants of a framework on a cluster to measured runs.

The fit minimises the mean of min(|ln(predicted / measured)|, cap) over the rows: the logarithm
weighs a step that is twice too long like one that is twice too short, and the cap keeps runs that
something unusual slowed down from pulling the constants. It is a pattern search over the
constants that the framework's profile lists for the cluster, the same on every run.
"""

import math
import statistics
from collections.abc import Mapping, Sequence

from planner.cost.pattern_search import pattern_search
from planner.errors import PlannerError
from planner.progress import ProgressCallback, timed_phase
from planner.units import GIB
from planner.validation.calibration import Calibration, FittedConstants, FrameworkOnCluster
from planner.validation.cases import Case, case_of
from planner.validation.pricing import CasePricer
from planner.validation.types import Run

MOST = {
    "sustained_fraction_of_peak": 1.0,
    "pointwise_fraction_of_bandwidth": 1.0,
    "gradient_overlap": 1.0,
    "tp_overlap": 0.99,
}
"""Largest values of constants that are shares."""

START = {
    "sustained_fraction_of_peak": 0.6,
    "host_dispatch_us": 20.0,
    "gradient_overlap": 0.5,
    "step_us": 10000.0,
}
"""What is fitted, and from where, for a cluster that the framework's profile does not list."""

RESERVE = "reserve_gib"
"""Fitted by itself, to the memory."""

_CAP = 0.5


def calibrate_runs(runs: Sequence[Run], *, progress: ProgressCallback | None) -> Calibration:
    """Fit the constants of every framework and cluster among some runs.

    Args:
        runs: Measured runs; those without a step time, or that cannot be priced, are left out.
        progress: Called when a phase begins and ends.
    """
    by_pair: dict[FrameworkOnCluster, list[Case]] = {}
    for run in runs:
        try:
            case = case_of(run)
        except PlannerError:
            continue
        if run.step_time_s:
            by_pair.setdefault((case.framework.name, case.cluster), []).append(case)
    fitted = {}
    for (framework, cluster), cases in by_pair.items():
        with timed_phase(progress, f"fit {framework} on {cluster}"):
            fitted[framework, cluster] = fit_constants(cases)
    return Calibration(fitted=fitted)


def fit_constants(cases: Sequence[Case], *, fixed: Sequence[str] = ()) -> FittedConstants:
    """Fit the constants of one framework on one cluster.

    Args:
        cases: Measured runs of both.
        fixed: Keys that keep their values.
    """
    pricer = CasePricer()
    before = cases[0].framework.tuned.get(cases[0].cluster, {})
    start = {key: value for key, value in (before or START).items() if key != RESERVE}

    def loss(values: Mapping[str, float]) -> float:
        errors = [abs(math.log(ratio)) for ratio in _ratios(pricer, cases, values)]
        return statistics.fmean(min(error, _CAP) for error in errors)

    held = [*fixed, *(key for key, value in start.items() if value <= 0)]
    values = pattern_search(loss, start, fixed=held, most=MOST)
    values |= _reserve(pricer, cases, values)
    return FittedConstants(
        values=values,
        num_rows=len(cases),
        error_before=_mean_error(_ratios(pricer, cases, before)),
        error_after=_mean_error(_ratios(pricer, cases, values)),
    )


def _ratios(pricer: CasePricer, cases: Sequence[Case], values: Mapping[str, float]) -> list[float]:
    """Predicted over measured step times."""
    return [
        pricer.price(case, values).costs.step_time_s / case.run.step_time_s
        for case in cases
        if case.run.step_time_s
    ]


def _mean_error(ratios: Sequence[float]) -> float:
    return statistics.fmean(abs(ratio - 1) for ratio in ratios)


def _reserve(
    pricer: CasePricer, cases: Sequence[Case], values: Mapping[str, float]
) -> dict[str, float]:
    """The constant that centres the memory; nothing where no row states memory."""
    missing = [
        case.run.peak_mem_bytes - pricer.price(case, {**values, RESERVE: 0.0}).memory.total_bytes
        for case in cases
        if case.run.peak_mem_bytes
    ]
    return {RESERVE: statistics.median(missing) / GIB} if missing else {}
