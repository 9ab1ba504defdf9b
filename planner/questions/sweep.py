"""How a model scales: the best plan at each of many points, of one trace for all that share it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product

from planner.errors import (
    CodegenError,
    InfeasiblePlanError,
    ModelError,
    PlannerError,
    RequestError,
    SolverError,
)
from planner.model_argument import ModelObject
from planner.plan.record import PlanRecord
from planner.plan.types import Plan
from planner.planning import Machine, TracedModel
from planner.progress import PhaseEvent, ProgressCallback
from planner.questions.objectives import OBJECTIVES
from planner.request import PlanRequest
from planner.request_rules import SAMPLES_PER_GPU, bad_share, check_request

SECONDS_PER_HOUR = 3600.0
SECONDS_PER_DAY = 86400.0

REFUSALS = (RequestError, InfeasiblePlanError, SolverError, CodegenError)
"""Errors that say that a request has no plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest:
    """The points, and what is asked of them."""

    points: tuple[PlanRequest, ...]
    """Requests on one model, in the order of the answer."""
    prices_per_gpu_hour: Mapping[str, float] = field(default_factory=dict, hash=False)
    """By cluster, in any currency; empty where nothing is known."""
    tokens: float | None = None
    """Tokens (samples) that are to be trained on."""
    objective: str = "step"
    """As in OBJECTIVES."""
    within: float = 0.0
    """Share of the objective that may be given up: for fewer devices where it is the step, for
    speed else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One point: its plan, or why it has none."""

    request: PlanRequest
    """What ``planner.plan`` takes to find the same."""
    record: PlanRecord | None
    """What it found."""
    refusal: PlannerError | None
    """What it raised."""
    price_per_gpu_hour: float | None
    """Of its cluster."""
    tokens: float | None
    """Tokens (samples) that are to be trained on."""

    @property
    def plan(self) -> Plan | None:
        """Its plan."""
        return None if self.record is None else self.record.outcome.best

    @property
    def tokens_per_s(self) -> float:
        """Tokens (samples) per second on all devices; 0 where it has no plan."""
        plan = self.plan
        return 0.0 if plan is None else plan.tokens_per_step / plan.costs.step_time_s

    @property
    def gpu_s_per_token(self) -> float | None:
        """Time of one device that a token (sample) takes."""
        return self.request.gpus / self.tokens_per_s if self.plan else None

    @property
    def cost_per_token(self) -> float | None:
        """Its price, in the currency of ``price_per_gpu_hour``."""
        gpu_s, price = self.gpu_s_per_token, self.price_per_gpu_hour
        return None if gpu_s is None or price is None else gpu_s / SECONDS_PER_HOUR * price

    @property
    def duration_s(self) -> float | None:
        """Time for all tokens that are to be trained on."""
        return self.tokens / self.tokens_per_s if self.plan and self.tokens else None

    @property
    def cost(self) -> float | None:
        """Price of all tokens that are to be trained on."""
        per_token = self.cost_per_token
        return per_token * self.tokens if per_token and self.tokens else None

    @property
    def series(self) -> tuple[object, ...]:
        """What points that differ in the number of devices alone share."""
        request = self.request
        return request.cluster, request.seq_len, request.global_batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """All points."""

    request: SweepRequest
    """What was asked."""
    points: tuple[SweepPoint, ...]
    """Those that were reached, in the order asked for."""
    interrupted: bool = False
    """Ctrl-C came before all were reached."""

    @property
    def planned(self) -> tuple[SweepPoint, ...]:
        """Points that have a plan."""
        return tuple(point for point in self.points if point.plan is not None)

    @property
    def pick(self) -> SweepPoint | None:
        """The point that the objective chooses; None where no point has a plan.

        Among those within a share of the best it is the one with the fewest devices where the
        objective is the step, else the fastest.
        """
        if not self.planned:
            return None
        objective = _OBJECTIVES[self.request.objective]
        best = min(map(objective, self.planned))
        near = [point for point in self.planned if objective(point) <= best * self._allowed]
        if self.request.objective == "step":
            return min(near, key=lambda point: (point.request.gpus, -point.tokens_per_s))
        return max(near, key=lambda point: point.tokens_per_s)

    @property
    def _allowed(self) -> float:
        """Factor on the least value of the objective; rates have times as their values."""
        return 1.0 + self.request.within + 1e-9

    def scaling(self, point: SweepPoint) -> float | None:
        """Tokens per second and device over those of the first plan with the fewest devices.

        Of the same cluster, sequence length and batch; None without a plan.
        """
        if point.plan is None:
            return None
        alike = [each for each in self.planned if each.series == point.series]
        first = min(alike, key=lambda each: each.request.gpus)
        return first.tokens_per_s and (point.tokens_per_s / point.request.gpus) / (
            first.tokens_per_s / first.request.gpus
        )


def _cost(point: SweepPoint) -> float:
    cost = point.cost_per_token
    value = point.gpu_s_per_token if cost is None else cost
    assert value is not None
    return value


_OBJECTIVES: Mapping[str, Callable[[SweepPoint], float]] = {
    "step": lambda point: 1.0 / point.tokens_per_s,
    "gpus": lambda point: point.request.gpus,
    "cost": _cost,
}
"""What each objective makes least, of points with a plan."""


def sweep_points(
    base: PlanRequest,
    *,
    gpus: tuple[int, ...],
    clusters: tuple[str, ...],
    seq_lens: tuple[int | None, ...],
    global_batch_sizes: tuple[int, ...] | None,
) -> tuple[PlanRequest, ...]:
    """Combine the values of all dimensions; the numbers of devices vary fastest.

    Args:
        base: What all points share.
        gpus: Numbers of devices.
        clusters: Names or paths of clusters.
        seq_lens: Tokens per sample, None for the model's own.
        global_batch_sizes: Samples per step; None for 8 per device of the largest point, at all
            points: a batch that changes with the devices is another training run.
    """
    batches = global_batch_sizes or (SAMPLES_PER_GPU * max(gpus),)
    return tuple(
        replace(base, gpus=count, cluster=cluster, seq_len=seq_len, global_batch_size=batch)
        for cluster, seq_len, batch, count in product(clusters, seq_lens, batches, gpus)
    )


def check_sweep(request: SweepRequest) -> None:
    """Check what needs neither a model nor a profile.

    Raises:
        RequestError: The objective is none, or its terms are not given.
    """
    if request.objective not in OBJECTIVES:
        raise RequestError(
            f"--objective {request.objective}: there is no such objective",
            hint=f"Choices: {', '.join(OBJECTIVES)}.",
        )
    if not 0 <= request.within < 1:
        raise bad_share("--within", request.within)
    clusters = {point.cluster for point in request.points}
    missing = sorted(clusters.difference(request.prices_per_gpu_hour))
    if missing and len(clusters) > 1 and request.objective == "cost":
        raise RequestError(
            f"--objective cost over {len(clusters)} clusters: there is no price of "
            f"{', '.join(missing)}",
            hint=f"Give it: --price {missing[0]}=2.5.",
        )


def run_sweep(
    request: SweepRequest,
    model_object: ModelObject | None = None,
    *,
    progress: ProgressCallback | None = None,
) -> Sweep:
    """Plan every point.

    Args:
        request: What is asked.
        model_object: The model, where the points only describe it.
        progress: Called when a point begins and ends.

    Raises:
        RequestError: The request breaks a rule.
        PlannerError: The model cannot be traced at any of the points, a profile cannot be read, or
            a plan breaks a rule.
        KeyboardInterrupt: Before any point was planned.
    """
    check_sweep(request)
    tracing = _Tracing(model_object, progress)
    points: list[SweepPoint] = []
    for number, asked in enumerate(request.points, start=1):
        tracing.tell(f"{asked.gpus} GPUs", (number - 1) / len(request.points))
        try:
            points.append(_planned(asked, request, tracing))
        except KeyboardInterrupt:
            if not points:
                raise
            return Sweep(request=request, points=tuple(points), interrupted=True)
    refusals = [point.refusal for point in points]
    if all(isinstance(each, ModelError) for each in refusals):
        assert refusals[0] is not None
        raise refusals[0]
    return Sweep(request=request, points=tuple(points))


class _Tracing:
    """The traces of a sweep, each made once."""

    def __init__(self, model_object: ModelObject | None, progress: ProgressCallback | None) -> None:
        self._model_object = model_object
        self._progress = progress
        self._known: dict[tuple[int | None, str], TracedModel | ModelError] = {}

    def of(self, request: PlanRequest, dtype: str) -> TracedModel:
        key = (request.seq_len, dtype)
        if key not in self._known:
            try:
                self._known[key] = TracedModel.of_request(request, self._model_object)
            except ModelError as error:  # it may run at other lengths
                self._known[key] = error
        found = self._known[key]
        if isinstance(found, ModelError):
            raise found
        return found

    def tell(self, detail: str, fraction: float) -> None:
        if self._progress is not None:
            event = PhaseEvent(phase="sweep", elapsed_s=None, fraction=fraction, detail=detail)
            self._progress(event)


def _planned(asked: PlanRequest, request: SweepRequest, tracing: _Tracing) -> SweepPoint:
    record, refusal = None, None
    try:
        checked = check_request(asked)
        machine = Machine.of(checked)
        traced = tracing.of(checked, machine.dtype_of(checked))
        record = traced.record(checked, machine=machine)
    except (*REFUSALS, ModelError) as error:
        refusal = error
    return SweepPoint(
        request=asked,
        record=record,
        refusal=refusal,
        price_per_gpu_hour=request.prices_per_gpu_hour.get(asked.cluster),
        tokens=request.tokens,
    )
