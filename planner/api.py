"""The library: ``planner.plan`` and ``planner.estimate``."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from planner.model_argument import ModelObject, model_argument, model_words
from planner.planning import plan_record
from planner.progress import ProgressCallback
from planner.request import PlanRequest
from planner.request_rules import check_request, fix_warnings
from planner.result import PlanResult

if TYPE_CHECKING:
    from torch import Tensor, nn


def plan(
    model: "str | nn.Module | Callable[[], nn.Module]",
    *,
    gpus: int,
    cluster: str = "h100-sxm",
    gpus_per_node: int | None = None,
    calibration: str | None = None,
    global_batch_size: int | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    memory_margin: float | None = None,
    fix: Mapping[str, object] | None = None,
    top: int = 5,
    time_limit_s: float | None = None,
    example_batch: Callable[..., Any] | None = None,
    loss_fn: "Callable[[Any, Any], Tensor] | None" = None,
    hints: Mapping[str, bool | int | float] | None = None,
    progress: ProgressCallback | None = None,
) -> PlanResult:
    """Find the fastest way to train a model that fits, and prove it.

    Args:
        model: MODEL as on the command line ("model.py", "model.py:build_model",
            "package.module:factory"), a module (meta or real), or a function that builds one.
        gpus: Devices in all.
        cluster: Name of a cluster profile or path of a TOML file; of several kinds of device each
            with its number: "h100-sxm:16,a100-80gb-sxm:16".
        gpus_per_node: Devices per node, None for the profile's.
        calibration: Path of a file that ``plan calibrate`` wrote, None for the constants that
            ship.
        global_batch_size: Samples per optimiser step, None for 8 * gpus.
        seq_len: Tokens per sample, None for the model's own.
        dtype: Compute dtype "bfloat16", "float32" or "float64"; None for the best of the first
            two that the device has.
        memory_margin: Share of each device's memory to keep free, None for 0.05.
        fix: Values to keep, by name: degrees (dp_replicate, dp_shard, cp, tp, pp, ep), schedule,
            virtual_stages, microbatch_size, activation_checkpointing, reshard_after_forward,
            sequence_parallel, compile (run blocks by torch.compile), cpu_offload (optimiser
            states in host memory), activation_offload (inputs of blocks that are recomputed in
            full there), loss_chunks (parts of a microbatch whose loss is taken one after
            the other).
        top: Layouts to show.
        time_limit_s: Seconds after which the search proves no more and shows the gap; None for a
            limit of work, which is the same on every machine.
        example_batch: For a module or a factory: ``example_batch(microbatch_size)`` returns
            (inputs, targets), as in a model file.
        loss_fn: For a module or a factory: ``loss_fn(output, targets)`` returns a scalar; None
            where the model returns its loss.
        hints: What lines of the model's code read from tensors that have data in training only,
            by line: ``{"model.py:57": True}``. A truth value or a number; where a line chooses
            elements by a mask, how many of them (an integer) or which share (a float).
        progress: Called when a phase begins and ends, None for silence.

    Returns:
        The plan and all that it was compared with.

    Raises:
        RequestError: The request is impossible or contradicts itself.
        ProfileError: There is no such cluster, or its profile is wrong.
        ModelError: The model cannot be loaded or traced.
        InfeasiblePlanError: Nothing fits into the memory.
        SolverError: The solver found nothing within the limit.
        VerificationError: What was found breaks a rule: a bug of the planner.
    """
    request = PlanRequest(
        model=model_words(model),
        gpus=gpus,
        cluster=cluster,
        gpus_per_node=gpus_per_node,
        calibration=calibration,
        global_batch_size=global_batch_size,
        seq_len=seq_len,
        dtype=dtype,
        memory_margin=memory_margin,
        fixed=_fixed_settings(fix),
        hints=tuple((hints or {}).items()),
        top=top,
        time_limit_s=time_limit_s,
    )
    model_object = model_argument(model, example_batch, loss_fn)
    return run_request(request, model_object=model_object, progress=progress)


def estimate(
    model: "str | nn.Module | Callable[[], nn.Module]",
    *,
    gpus: int,
    cluster: str = "h100-sxm",
    gpus_per_node: int | None = None,
    calibration: str | None = None,
    global_batch_size: int | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    memory_margin: float | None = None,
    framework: str | None = None,
    fix: Mapping[str, object] | None = None,
    example_batch: Callable[..., Any] | None = None,
    loss_fn: "Callable[[Any, Any], Tensor] | None" = None,
    hints: Mapping[str, bool | int | float] | None = None,
    progress: ProgressCallback | None = None,
) -> PlanResult:
    """Price one layout, without a search.

    Degrees that are not fixed are 1, and dp_shard takes the devices that are left over. Another
    framework than the emitted script cuts stages by its own rule; where its ranks hold their
    parameters whole, dp_shard divides the optimiser's states alone (ZeRO-1), and dp_replicate
    nothing (DDP).

    Args:
        model: As for ``plan``.
        gpus: Devices in all.
        cluster: Name of a cluster profile or path of a TOML file; of several kinds of device each
            with its number: "h100-sxm:16,a100-80gb-sxm:16".
        gpus_per_node: Devices per node, None for the profile's.
        calibration: Path of a file that ``plan calibrate`` wrote, None for the constants that
            ship.
        global_batch_size: Samples per optimiser step, None for 8 * gpus.
        seq_len: Tokens per sample, None for the model's own.
        dtype: Compute dtype, as for ``plan``.
        memory_margin: As for ``plan``; a layout that fits without it alone is priced, with a
            warning.
        framework: Name of a framework profile, "nanotron"; None for the emitted script.
        fix: The layout, as for ``plan``.
        example_batch: As for ``plan``.
        loss_fn: As for ``plan``.
        hints: As for ``plan``.
        progress: Called when a phase begins and ends, None for silence.

    Returns:
        The priced layout as ``best``.

    Raises:
        RequestError: The request is impossible or contradicts itself.
        ProfileError: There is no such cluster, or its profile is wrong.
        ModelError: The model cannot be loaded or traced.
        InfeasiblePlanError: The layout does not fit into the memory.
        VerificationError: The price breaks a rule: a bug of the planner.
    """
    request = PlanRequest(
        model=model_words(model),
        gpus=gpus,
        cluster=cluster,
        gpus_per_node=gpus_per_node,
        calibration=calibration,
        global_batch_size=global_batch_size,
        seq_len=seq_len,
        dtype=dtype,
        memory_margin=memory_margin,
        framework=framework,
        fixed=_fixed_settings(fix),
        hints=tuple((hints or {}).items()),
    )
    model_object = model_argument(model, example_batch, loss_fn)
    return run_request(request, model_object=model_object, estimate_only=True, progress=progress)


def run_request(
    request: PlanRequest,
    *,
    model_object: ModelObject | None = None,
    estimate_only: bool = False,
    progress: ProgressCallback | None = None,
) -> PlanResult:
    """Check a request and carry it out.

    Args:
        request: What is asked.
        model_object: The model, where ``request.model`` only describes it.
        estimate_only: Price the one layout that the request fixes.
        progress: Called when a phase begins and ends.

    Raises:
        PlannerError: As ``plan``.
    """
    request = check_request(request)
    record = plan_record(request, model_object, estimate_only=estimate_only, progress=progress)
    warnings = (*record.warnings, *fix_warnings(request, record.outcome.best))
    if request.framework is not None:
        warnings += (f"priced as {request.framework} runs it; no script is written for it",)
    return PlanResult(replace(record, warnings=warnings))


def _fixed_settings(fix: Mapping[str, object] | None) -> tuple[tuple[str, str], ...]:
    """Spell fixed values as ``--fix`` does."""
    return tuple((name, str(value)) for name, value in (fix or {}).items())
