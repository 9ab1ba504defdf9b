"""The library: ``planner.sweep`` and ``planner.explain``."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.model_argument import model_argument, model_words
from planner.plan.serialize import load_saved_plan
from planner.progress import ProgressCallback
from planner.questions.explain import Explanation, WhyNot, explain_plan, why_not
from planner.questions.sweep import SweepRequest, run_sweep, sweep_points
from planner.questions.sweep_result import SweepResult
from planner.questions.values import whole_numbers
from planner.request import PlanRequest
from planner.request_rules import parse_fix

if TYPE_CHECKING:
    from torch import Tensor, nn


def sweep(
    model: "str | nn.Module | Callable[[], nn.Module]",
    *,
    gpus: str | int | Iterable[int],
    cluster: str | Iterable[str] = "h100-sxm",
    gpus_per_node: int | None = None,
    calibration: str | None = None,
    global_batch_size: str | int | Iterable[int] | None = None,
    seq_len: str | int | Iterable[int] | None = None,
    dtype: str | None = None,
    memory_margin: float | None = None,
    fix: Mapping[str, object] | None = None,
    time_limit_s: float | None = None,
    price_per_gpu_hour: float | Mapping[str, float] | None = None,
    tokens: float | None = None,
    objective: str = "step",
    within: float = 0.0,
    example_batch: Callable[..., Any] | None = None,
    loss_fn: "Callable[[Any, Any], Tensor] | None" = None,
    hints: Mapping[str, bool | int | float] | None = None,
    progress: ProgressCallback | None = None,
) -> SweepResult:
    """Plan a model at many points, and say how it scales and what it costs.

    Each point is what ``plan`` finds for it. The model is traced once for each sequence length.

    Args:
        model: As for ``plan``.
        gpus: Numbers of devices: [8, 16, 32], "8..1024" (doubled) or "8..64:8" (in steps of 8).
        cluster: One or several clusters, as for ``plan``.
        gpus_per_node: Devices per node, None for each profile's.
        calibration: As for ``plan``.
        global_batch_size: One or several, as ``gpus``; None for 8 * the most GPUs, at all points.
        seq_len: One or several, as ``gpus``; None for the model's own.
        dtype: As for ``plan``.
        memory_margin: As for ``plan``.
        fix: As for ``plan``.
        time_limit_s: As for ``plan``, for each point.
        price_per_gpu_hour: Of one device, in any currency: one price, or one by cluster.
        tokens: Tokens (samples of a model without a sequence) to be trained on, for days and cost.
        objective: What is picked: "step" (most tokens per second), "gpus" (fewest that hold the
            model) or "cost" (least per token; GPU hours where there is no price).
        within: Share of the objective that may be given up: for fewer GPUs where it is the step,
            for speed else.
        example_batch: As for ``plan``.
        loss_fn: As for ``plan``.
        hints: As for ``plan``.
        progress: Called when a point begins, None for silence.

    Returns:
        Every point with its plan, or why it has none.

    Raises:
        RequestError: A value has no such form, or the request contradicts itself.
        ProfileError: There is no such cluster, or its profile is wrong.
        ModelError: The model cannot be loaded or traced.
        VerificationError: What was found breaks a rule: a bug of the planner.
    """
    clusters = (cluster,) if isinstance(cluster, str) else tuple(cluster)
    counts = _numbers("gpus", gpus)
    base = PlanRequest(
        model=model_words(model),
        gpus=counts[0],
        gpus_per_node=gpus_per_node,
        calibration=calibration,
        dtype=dtype,
        memory_margin=memory_margin,
        fixed=tuple((name, str(value)) for name, value in (fix or {}).items()),
        hints=tuple((hints or {}).items()),
        time_limit_s=time_limit_s,
    )
    given = price_per_gpu_hour
    if given is not None and not isinstance(given, Mapping):
        given = dict.fromkeys(clusters, float(given))
    request = SweepRequest(
        points=sweep_points(
            base,
            gpus=counts,
            clusters=clusters,
            seq_lens=(None,) if seq_len is None else _numbers("seq_len", seq_len),
            global_batch_sizes=None
            if global_batch_size is None
            else _numbers("global_batch_size", global_batch_size),
        ),
        prices_per_gpu_hour=given or {},
        tokens=tokens,
        objective=objective,
        within=within,
    )
    model_object = model_argument(model, example_batch, loss_fn)
    return SweepResult(run_sweep(request, model_object, progress=progress))


def explain(plan: str | Path, *, progress: ProgressCallback | None = None) -> Explanation:
    """Say what a plan is bound by: its request is solved again on machines with more.

    Args:
        plan: A plan.json, or its folder.
        progress: Called when a search begins, None for silence.

    Raises:
        PlannerError: The plan, its model or its profile cannot be read.
    """
    return explain_plan(load_saved_plan(plan), progress=progress)


def explain_why_not(
    plan: str | Path,
    restriction: str | Mapping[str, object],
    *,
    progress: ProgressCallback | None = None,
) -> WhyNot:
    """Find the best plan under a restriction, or the rule that it breaks.

    Args:
        plan: A plan.json, or its folder.
        restriction: "tp=8,pp=2", or {"tp": 8, "pp": 2}: settings as ``plan`` takes them in ``fix``.
            They take the place of what the plan's request fixes.
        progress: Called when the search begins and ends, None for silence.

    Raises:
        RequestError: A setting has no such name or value.
        PlannerError: The plan, its model or its profile cannot be read.
    """
    if isinstance(restriction, str):
        settings = parse_fix(restriction.split(","))
    else:
        settings = {name: str(value) for name, value in restriction.items()}
    return why_not(load_saved_plan(plan), settings, progress=progress)


def _numbers(name: str, values: str | int | Iterable[int]) -> tuple[int, ...]:
    if isinstance(values, str | int):
        return whole_numbers(f"--{name.replace('_', '-')}", str(values))
    return whole_numbers(f"--{name.replace('_', '-')}", ",".join(map(str, values)))
