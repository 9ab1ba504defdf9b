"""Fits the few constants of a framework on a cluster to measured runs.

The fit minimises the mean of min(|ln(predicted / measured)|, cap) over the rows: the logarithm
weighs a step that is twice too long like one that is twice too short, and the cap keeps runs that
something unusual slowed down from pulling the constants. It is a search along one constant at a
time, over those that the framework's profile lists for the cluster, the same on every run.
"""

import math
import statistics
from collections.abc import Mapping, Sequence

from planner.cost.pattern_search import pattern_search
from planner.errors import PlannerError
from planner.framework.calibration import FrameworkOnCluster
from planner.progress import ProgressCallback, timed_phase
from planner.units import GIB
from planner.validation.fitting.calibration import Calibration, FittedConstants
from planner.validation.pricing.cases import Case, case_of, unpriced_because
from planner.validation.pricing.pricing import CasePricer
from planner.validation.reading.table import RunTable, refuse_wrong_rows
from planner.validation.types import Run, Unpriced

MOST = {
    "sustained_fraction_of_peak": 1.0,
    "attention_forward_fraction_of_peak": 1.0,
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


def calibrate_runs(
    table: RunTable, *, keep_going: bool, progress: ProgressCallback | None
) -> Calibration:
    """Fit the constants of every framework and cluster in a table.

    Args:
        table: Measured runs; those without a step time are left out.
        keep_going: Leave out rows of unknown frameworks and accelerators instead of raising.
        progress: Called when a phase begins and ends.

    Raises:
        RequestError: A row names an unknown framework or accelerator.
    """
    pricer = CasePricer()
    with timed_phase(progress, "price"):
        answers = [_priceable(run, pricer) for run in table.runs]
    left_out = tuple(each for each in answers if isinstance(each, Unpriced))
    if not keep_going:
        refuse_wrong_rows(left_out, name=table.name)
    by_pair: dict[FrameworkOnCluster, list[Case]] = {}
    for case in answers:
        if isinstance(case, Case) and case.run.step_time_s:
            by_pair.setdefault((case.framework.name, case.cluster), []).append(case)
    fitted = {}
    for (framework, cluster), cases in by_pair.items():
        with timed_phase(progress, f"fit {framework} on {cluster}"):
            fitted[framework, cluster] = _calibrated(cases, pricer)
    return Calibration(fitted=fitted, left_out=left_out)


def _priceable(run: Run, pricer: CasePricer) -> Case | Unpriced:
    try:
        case = case_of(run)
        pricer.price(case)
    except PlannerError as error:
        return unpriced_because(run, error)
    return case


def _calibrated(cases: Sequence[Case], pricer: CasePricer) -> FittedConstants:
    """All constants of a framework on a cluster that its profile lists, or the usual ones."""
    before = cases[0].framework.tuned.get(cases[0].cluster, {})
    start = {key: value for key, value in (before or START).items() if key != RESERVE}
    values = fit_constants(cases, start, pricer=pricer)
    values |= centred_reserve(pricer, cases, values)
    return FittedConstants(
        values=values,
        num_rows=len(cases),
        error_before=mean_error(cases, before, pricer=pricer),
        error_after=mean_error(cases, values, pricer=pricer),
        at_bound=tuple(key for key, value in values.items() if value >= MOST.get(key, math.inf)),
    )


def fit_constants(
    cases: Sequence[Case],
    start: Mapping[str, float],
    *,
    own: Mapping[str, Mapping[str, float]] = {},
    pricer: CasePricer,
) -> dict[str, float]:
    """Fit constants that some runs on one cluster share.

    Args:
        cases: Measured runs.
        start: Constants by their keys in ``planner.framework.tuning.SETTINGS``; one that is 0
            keeps that value.
        own: Constants that are not fitted, by the name of the framework that has them.
        pricer: Prices the cases.
    """
    timed = [case for case in cases if case.run.step_time_s]

    def errors(values: Mapping[str, float]) -> list[float]:
        return [
            abs(math.log(_ratio(pricer, case, {**own.get(case.framework.name, {}), **values})))
            for case in timed
        ]

    # Where all rows are far off at first, a cap below them would show no way to go.
    cap = max(_CAP, 2 * statistics.median(errors(start)))

    def loss(values: Mapping[str, float]) -> float:
        return statistics.fmean(min(error, cap) for error in errors(values))

    held = [key for key, value in start.items() if value <= 0]
    return pattern_search(loss, start, fixed=held, most=MOST, pairs=False)


def mean_error(cases: Sequence[Case], values: Mapping[str, float], *, pricer: CasePricer) -> float:
    """Mean absolute error of the step times of some cases."""
    return statistics.fmean(
        abs(_ratio(pricer, case, values) - 1) for case in cases if case.run.step_time_s
    )


def _ratio(pricer: CasePricer, case: Case, values: Mapping[str, float]) -> float:
    """Predicted over measured step time."""
    assert case.run.step_time_s
    return pricer.price(case, values).costs.step_time_s / case.run.step_time_s


def centred_reserve(
    pricer: CasePricer, cases: Sequence[Case], values: Mapping[str, float]
) -> dict[str, float]:
    """The constant that centres the memory; nothing where no row states memory."""
    missing = [
        case.run.peak_mem_bytes - pricer.price(case, {**values, RESERVE: 0.0}).memory.total_bytes
        for case in cases
        if case.run.peak_mem_bytes
    ]
    return {RESERVE: statistics.median(missing) / GIB} if missing else {}
