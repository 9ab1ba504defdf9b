"""Fits constants to half of the runs by ``plan calibrate``'s own function, and tries the others."""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
from measure import CLUSTERS, MeasuredRun

from planner.framework.constants import PROFILES_OWN, Constants
from planner.hardware.profiles import load_cluster
from planner.plan.serialize import load_saved_plan
from planner.validation.fitting.calibration import Calibration
from planner.validation.fitting.fit import calibrate_runs
from planner.validation.pricing.case_price import CasePricer
from planner.validation.pricing.cases import case_of
from planner.validation.reading.table import RunTable
from planner.validation.types import LoggedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A fit, and what it is worth on runs that it has not seen."""

    calibration: Calibration
    step_before: float
    """Median errors of the other half."""
    step_after: float
    memory_after: float


def try_half(work: Path, runs: Sequence[MeasuredRun], *, seed: int = 0) -> Tried:
    """Fit to one half, drawn at random, and price the other."""
    chosen = [run for run in runs if run.why != "again"]
    random.Random(seed).shuffle(chosen)
    logged = [logged_run(work, run, row) for row, run in enumerate(chosen)]
    half = len(logged) // 2
    table = RunTable(name="emulated", frame=pd.DataFrame(), runs=tuple(logged[:half]), problems=())
    fitted = calibrate_runs(table, keep_going=False, progress=None)
    pricer = CasePricer()

    def errors(constants: Constants) -> tuple[float, float]:
        prices = [pricer.price(case_of(run), constants) for run in logged[half:]]
        pairs = list(zip(prices, logged[half:], strict=True))
        step = [abs(price.costs.step_time_s / run.step_time_s - 1) for price, run in pairs]
        memory = [abs(price.memory.total_bytes / run.peak_mem_bytes - 1) for price, run in pairs]
        return statistics.median(step), statistics.median(memory)

    before, _ = errors(PROFILES_OWN)
    after, memory_after = errors(fitted.constants)
    return Tried(
        calibration=fitted, step_before=before, step_after=after, memory_after=memory_after
    )


def logged_run(work: Path, run: MeasuredRun, row: int) -> LoggedRun:
    """A run as its log would be read, had its plan been made for the measured cluster."""
    saved = load_saved_plan(work / run.folder)
    network = CLUSTERS[run.cluster]
    path = str(work / "clusters" / f"{run.cluster}.toml")
    per_host = network.ranks_per_host
    return LoggedRun(
        row=row,
        saved=replace(
            saved,
            request=replace(saved.request, cluster=path, gpus_per_node=per_host),
            cluster=load_cluster(path, gpus=network.num_ranks, gpus_per_node=per_host),
        ),
        step_time_s=run.step_time_s,
        peak_mem_bytes=max(run.memory_bytes),
        is_allocated=False,
        notes=(),
    )
