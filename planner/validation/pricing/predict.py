"""Prices measured runs with the cost model of the search."""

from collections.abc import Sequence
from pathlib import Path

from planner.errors import PlannerError
from planner.framework.calibration import load_calibration
from planner.framework.constants import PROFILES_OWN, Constants
from planner.progress import ProgressCallback, timed_phase
from planner.validation.pricing.case_price import CasePricer
from planner.validation.pricing.cases import case_of, unpriced_because
from planner.validation.types import LoggedRun, Prediction, Run, Unpriced


def predict_runs(
    runs: Sequence[Run | LoggedRun], *, calibration: Path | None, progress: ProgressCallback | None
) -> list[Prediction | Unpriced]:
    """Price some runs.

    Args:
        runs: What was measured.
        calibration: File of constants that replace those of the profiles; None for none.
        progress: Called when a phase begins and ends.

    Returns:
        One answer per run, in order.

    Raises:
        ProfileError: The calibration file is wrong.
    """
    constants = PROFILES_OWN if calibration is None else load_calibration(calibration)
    pricer = CasePricer()
    with timed_phase(progress, "price"):
        return [predict_run(run, pricer, constants) for run in runs]


def predict_run(
    run: Run | LoggedRun, pricer: CasePricer, constants: Constants = PROFILES_OWN
) -> Prediction | Unpriced:
    """Price one run, or say why it cannot be priced."""
    try:
        case = case_of(run)
        price = pricer.price(case, constants)
    except PlannerError as error:
        return unpriced_because(run, error)
    return Prediction(
        row=run.row,
        step_time_s=price.costs.step_time_s,
        peak_mem_bytes=price.memory.total_bytes,
        feasible=price.fits,
        costs=price.costs,
        memory=price.memory,
        assumptions=case.assumptions,
    )
