"""Fits the few constants of devices, clusters and frameworks to a table of measured runs.

The fit minimises the mean of min(|ln(predicted / measured)|, cap) over the rows: the logarithm
weighs a step that is twice too long like one that is twice too short, and the cap keeps runs that
something unusual slowed down from pulling the constants. It is a search along one constant at a
time, all of them together, the same on every run. A constant that changes no price of the table's
rows is not fitted.
"""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from planner.cost.pattern_search import pattern_search
from planner.errors import PlannerError
from planner.framework.constants import KEYS, PROFILES_OWN, Constants, Owner
from planner.hardware.mixed import parse_parts
from planner.hardware.profiles import load_cluster
from planner.progress import ProgressCallback, timed_phase
from planner.units import GIB
from planner.validation.fitting.calibration import Calibration, PairErrors
from planner.validation.pricing.case_price import CasePricer
from planner.validation.pricing.cases import AnyCase, case_of, unpriced_because
from planner.validation.reading.table import RunTable, refuse_wrong_rows
from planner.validation.types import LoggedRun, Run, Unpriced

START: Mapping[Owner, Mapping[str, float]] = {
    "device": {"training_fraction_of_sustained": 0.8},
    "cluster": {"outer_bandwidth_share": 0.9},
    "framework": {"host_dispatch_us": 40.0, "gradient_overlap": 0.5, "step_us": 20000.0},
}
"""What is fitted, and from where."""

MOST = {"training_fraction_of_sustained": 1.0, "gradient_overlap": 1.0}
"""Largest values of constants that are shares."""

RESERVE = "reserve_gib"
"""Fitted by itself, to the memory."""

_CAP = 0.5


class Constant(NamedTuple):
    """One number, and what it belongs to."""

    owner: Owner
    """Device, cluster or framework."""
    name: str
    """Of its profile."""
    key: str
    """One of ``planner.framework.constants.KEYS``."""


def calibrate_runs(
    table: RunTable, *, keep_going: bool, progress: ProgressCallback | None
) -> Calibration:
    """Fit the constants of every device, cluster and framework in a table.

    Args:
        table: Measured runs; those without a step time are left out.
        keep_going: Leave out rows of unknown accelerators instead of raising.
        progress: Called when a phase begins and ends.

    Raises:
        RequestError: A row names an unknown accelerator.
    """
    pricer = CasePricer()
    with timed_phase(progress, "price"):
        answers = [_priceable(run, pricer) for run in table.runs]
    left_out = tuple(each for each in answers if isinstance(each, Unpriced))
    if not keep_going:
        refuse_wrong_rows(left_out, name=table.name)
    cases = [each for each in answers if not isinstance(each, Unpriced) and each.run.step_time_s]
    values: dict[Constant, float] = {}
    if cases:
        with timed_phase(progress, "fit"):
            values = fit_constants(cases, _start(cases, pricer), pricer=pricer)
            values |= centred_reserves(cases, values, pricer=pricer)
    constants = constants_of(values)
    return Calibration(
        constants=constants,
        errors=_errors(cases, constants, pricer),
        at_bound=frozenset(
            each.key for each, value in values.items() if value >= MOST.get(each.key, math.inf)
        ),
        left_out=left_out,
    )


def _priceable(run: Run | LoggedRun, pricer: CasePricer) -> AnyCase | Unpriced:
    try:
        case = case_of(run)
        pricer.price(case)
    except PlannerError as error:
        return unpriced_because(run, error)
    return case


def owners_of(case: AnyCase) -> Mapping[Owner, tuple[str, ...]]:
    """Names of what a run's constants belong to; a run may use several kinds of device."""
    names = [name for name, _ in parse_parts(case.cluster)] or [case.cluster]
    clusters = [load_cluster(name, gpus=1) for name in names]
    return {
        "device": tuple(cluster.device.name for cluster in clusters),
        "cluster": tuple(cluster.name for cluster in clusters),
        "framework": (case.framework.name,),
    }


def _start(cases: Sequence[AnyCase], pricer: CasePricer) -> dict[Constant, float]:
    """What the runs can tell: constants that change some price of theirs."""
    found: dict[Constant, float] = {}
    for case in cases:
        names = owners_of(case)
        for owner in KEYS:
            for name, (key, value) in product(names[owner], START[owner].items()):
                constant = Constant(owner, name, key)
                if constant not in found and _matters(case, constant, value, pricer):
                    found[constant] = value
    return found


def _matters(case: AnyCase, constant: Constant, value: float, pricer: CasePricer) -> bool:
    prices = [
        pricer.price(case, constants_of({constant: each})).costs.step_time_s
        for each in (value, value / 2)
    ]
    return prices[0] != prices[1]


def fit_constants(
    cases: Sequence[AnyCase],
    start: Mapping[Constant, float],
    *,
    held: Mapping[Constant, float] = {},
    pricer: CasePricer,
) -> dict[Constant, float]:
    """Fit constants to runs.

    Args:
        cases: Measured runs.
        start: First values; one that is 0 keeps that value.
        held: Constants that are not fitted and take the place of the profiles'.
        pricer: Prices the cases.
    """
    timed = [case for case in cases if case.run.step_time_s]
    names = {"/".join(constant): constant for constant in start}

    def errors(values: Mapping[str, float]) -> list[float]:
        put = {names[name]: value for name, value in values.items()}
        constants = constants_of({**held, **put})
        return [abs(math.log(_ratio(pricer, case, constants))) for case in timed]

    first = {name: start[constant] for name, constant in names.items()}
    # Where all rows are far off at first, a cap below them would show no way to go.
    cap = max(_CAP, 2 * statistics.median(errors(first)))

    def loss(values: Mapping[str, float]) -> float:
        return statistics.fmean(min(error, cap) for error in errors(values))

    fixed = [name for name, value in first.items() if value <= 0]
    most = {name: MOST[names[name].key] for name in names if names[name].key in MOST}
    found = pattern_search(loss, first, fixed=fixed, most=most)
    return {names[name]: value for name, value in found.items()}


def constants_of(values: Mapping[Constant, float]) -> Constants:
    """Numbers by their owners."""
    found: dict[Owner, dict[str, dict[str, float]]] = {owner: {} for owner in KEYS}
    for constant, value in values.items():
        found[constant.owner].setdefault(constant.name, {})[constant.key] = value
    return Constants(device=found["device"], cluster=found["cluster"], framework=found["framework"])


def mean_error(
    cases: Iterable[AnyCase], constants: Constants = PROFILES_OWN, *, pricer: CasePricer
) -> float:
    """Mean absolute error of the step times of some cases."""
    return statistics.fmean(
        abs(_ratio(pricer, case, constants) - 1) for case in cases if case.run.step_time_s
    )


def _ratio(pricer: CasePricer, case: AnyCase, constants: Constants) -> float:
    """Predicted over measured step time."""
    assert case.run.step_time_s
    return pricer.price(case, constants).costs.step_time_s / case.run.step_time_s


def centred_reserves(
    cases: Sequence[AnyCase], values: Mapping[Constant, float], *, pricer: CasePricer
) -> dict[Constant, float]:
    """By framework, the constant that centres the memory; none where no row states memory."""
    missing: dict[Constant, list[float]] = {}
    for case in cases:
        if case.run.peak_mem_bytes and case.tells_reserve:
            constant = Constant("framework", case.framework.name, RESERVE)
            counted = pricer.price(case, constants_of({**values, constant: 0.0})).memory
            missing.setdefault(constant, []).append(case.run.peak_mem_bytes - counted.total_bytes)
    return {constant: statistics.median(sizes) / GIB for constant, sizes in missing.items()}


def _errors(
    cases: Sequence[AnyCase], constants: Constants, pricer: CasePricer
) -> dict[tuple[str, str], PairErrors]:
    by_pair: dict[tuple[str, str], list[AnyCase]] = {}
    for case in cases:
        by_pair.setdefault((case.framework.name, case.cluster), []).append(case)
    return {
        pair: PairErrors(
            num_rows=len(own),
            before=mean_error(own, pricer=pricer),
            after=mean_error(own, constants, pricer=pricer),
        )
        for pair, own in by_pair.items()
    }
