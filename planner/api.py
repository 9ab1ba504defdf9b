"""The library: ``planner.plan`` and ``planner.estimate``."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from planner.errors import InfeasiblePlanError
from planner.graph.analysis.patterns import block_pattern
from planner.graph.analysis.trace_warnings import trace_warnings
from planner.graph.loading.hints import make_hints
from planner.model_argument import ModelObject, load_argument, model_argument, model_words
from planner.plan.record import ModelSummary, PlanRecord
from planner.plan.types import ModelRef
from planner.progress import ProgressCallback, timed_phase
from planner.request import PlanRequest
from planner.request_rules import (
    SAMPLES_PER_GPU,
    check_request,
    estimated_layout,
    fix_warnings,
    resolve_dtype,
    resolve_margin,
)
from planner.result import PlanResult

if TYPE_CHECKING:
    from torch import Tensor, nn

    from planner.framework.spec import FrameworkSpec
    from planner.graph.loading.loaded_model import LoadedModel
    from planner.graph.operator_graph import OperatorGraph
    from planner.graph.sizes.family import GraphFamily
    from planner.hardware.spec import ClusterSpec
    from planner.plan.types import SearchOutcome
    from planner.search.space import SearchRequest
    from planner.strategy.rules import FixedValues


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
        cluster: Name of a cluster profile or path of a TOML file.
        gpus_per_node: Devices per node, None for the profile's.
        calibration: Path of a file that ``plan calibrate`` wrote, None for the constants that
            ship.
        global_batch_size: Samples per optimiser step, None for 8 * gpus.
        seq_len: Tokens per sample, None for the model's own.
        dtype: Compute dtype "bfloat16", "float32" or "float64"; None for the best of the first
            two that the device has.
        memory_margin: Share of each device's memory to keep free, None for 0.05.
        fix: Values to keep, by name: degrees (dp_replicate, dp_shard, tp, pp), schedule,
            virtual_stages, microbatch_size, activation_checkpointing, reshard_after_forward,
            sequence_parallel, compile (run blocks by torch.compile).
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
        cluster: Name of a cluster profile or path of a TOML file.
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
    record = _search_outcome(request, model_object, estimate_only=estimate_only, progress=progress)
    warnings = (*record.warnings, *fix_warnings(request, record.outcome.best))
    if request.framework is not None:
        warnings += (f"priced as {request.framework} runs it; no script is written for it",)
    return PlanResult(replace(record, warnings=warnings))


def _search_outcome(
    request: PlanRequest,
    model_object: ModelObject | None,
    *,
    estimate_only: bool,
    progress: ProgressCallback | None,
) -> PlanRecord:
    """Load, trace, search: the way from a checked request to the record of the run.

    An estimate that fits without the margin alone has a cluster without it, and a warning.
    """
    notes: tuple[str, ...] = ()
    framework, cluster = _machine(request, request.gpus)
    dtype = resolve_dtype(request, cluster.device)
    fixed = estimated_layout(request) if estimate_only else dict(request.fixed)
    with timed_phase(progress, "load"):
        hints = make_hints(request.hints)
        loaded = load_argument(request.model, model_object, seq_len=request.seq_len, hints=hints)
    with timed_phase(progress, "trace"):
        from planner.graph.sizes.family import trace_family

        graphs = trace_family(loaded, dtype=dtype)
        graph = graphs.at(1)
    with timed_phase(progress, "search"):
        size = graph.num_parameters
        asked = _search_request(
            request, loaded, framework, num_parameters=size, dtype=dtype, fixed=fixed
        )
        try:
            outcome, rows = _searched(request, graphs, cluster, asked, is_open=not fixed)
        except InfeasiblePlanError:
            if not (estimate_only and cluster.device.margin_bytes):
                raise
            missed = cluster.device.margin_words
            cluster = _with_margin(cluster, 0.0)
            filled = replace(request, memory_margin=0.0)
            outcome, rows = _searched(filled, graphs, cluster, asked, is_open=not fixed)
            notes = (f"the layout fits the device, but not with {missed}",)
    return PlanRecord(
        request=request,
        model=_model_summary(loaded, graph),
        cluster=cluster,
        outcome=outcome,
        **rows,
        warnings=(*trace_warnings(graph), *notes),
    )


def _model_summary(loaded: "LoadedModel", graph: "OperatorGraph") -> ModelSummary:
    tokens = graph.tokens_per_sample
    return ModelSummary(
        name=loaded.description,
        num_parameters=graph.num_parameters,
        seq_len=tokens if tokens > 1 else None,
        block_pattern=str(block_pattern(graph)),
    )


def _searched(
    request: PlanRequest,
    graphs: "GraphFamily",
    cluster: "ClusterSpec",
    asked: "SearchRequest",
    *,
    is_open: bool,
) -> "tuple[SearchOutcome, dict[str, Any]]":
    """Search, verify what was found, and list what the best plan consists of, by field."""
    from planner.plan.verify import verify_outcome
    from planner.pricing.reprice import verify_price
    from planner.search.framework_estimate import FrameworkEstimate
    from planner.search.run import Search

    search = (
        FrameworkEstimate(graphs, cluster, asked)
        if request.framework is not None
        else Search(graphs, cluster, asked, resize=lambda gpus: _machine(request, gpus)[1])
    )
    outcome = search.run()
    if request.framework is None:
        # Another framework's cuts and schedules are its own, and no plan of ours.
        outcome = _with_data_reads(outcome, graphs)
        verify_outcome(outcome, cluster, graphs=graphs, is_open=is_open)
        verify_price(outcome.best, graphs, cluster, asked.framework)
    rows = {
        "op_rows": search.op_rows(outcome.best),
        "module_rows": search.module_rows(outcome.best),
        "traffic_rows": search.traffic_rows(outcome.best),
    }
    return outcome, rows


def _with_data_reads(outcome: "SearchOutcome", graphs: "GraphFamily") -> "SearchOutcome":
    """Tell the best plan, wherever it stands, what its script is to answer for missing data."""
    best = outcome.best
    told = replace(best, data_reads=graphs.data_reads(best.microbatch_size))
    if told == best:
        return outcome
    return replace(
        outcome,
        best=told,
        candidates=tuple(told if plan == best else plan for plan in outcome.candidates),
        rule_of_thumb=told if outcome.rule_of_thumb == best else outcome.rule_of_thumb,
    )


def _machine(request: PlanRequest, gpus: int) -> tuple["FrameworkSpec", "ClusterSpec"]:
    """What runs the plan, and the request's cluster with a number of devices."""
    from planner.framework.script import SCRIPT, framework_on_cluster

    framework, cluster = framework_on_cluster(
        request.framework or SCRIPT,
        request.cluster,
        gpus=gpus,
        gpus_per_node=request.gpus_per_node,
        calibration=request.calibration,
    )
    return framework, _with_margin(cluster, resolve_margin(request))


def _with_margin(cluster: "ClusterSpec", margin: float) -> "ClusterSpec":
    return replace(cluster, device=cluster.device.with_margin(margin))


def _search_request(
    request: PlanRequest,
    loaded: "LoadedModel",
    framework: "FrameworkSpec",
    *,
    num_parameters: int,
    dtype: str,
    fixed: Mapping[str, str],
) -> "SearchRequest":
    """Resolve what the request leaves open."""
    from planner.search.space import SearchRequest

    return SearchRequest(
        model=ModelRef(
            file=loaded.file,
            module=loaded.module,
            factory=loaded.factory,
            seq_len=loaded.seq_len,
            num_parameters=num_parameters,
        ),
        global_batch_size=request.global_batch_size or SAMPLES_PER_GPU * request.gpus,
        dtype=dtype,
        fixed=_fixed_values(fixed),
        top=request.top,
        time_limit_s=request.time_limit_s,
        framework=framework,
    )


def _fixed_values(fixed: Mapping[str, str]) -> "FixedValues":
    """Turn checked ``--fix`` values into their types."""
    from planner.strategy.rules import FixedValues

    names = {field.name for field in fields(FixedValues)}
    types: Mapping[str, Callable[[str], object]] = {
        "schedule": str,
        "activation_checkpointing": str,
        "reshard_after_forward": lambda value: value == "true",
        "sequence_parallel": lambda value: value == "true",
        "compile": lambda value: value == "true",
    }
    chosen: Any = {
        name: types.get(name, int)(value) for name, value in fixed.items() if name in names
    }
    return FixedValues(**chosen)


def _fixed_settings(fix: Mapping[str, object] | None) -> tuple[tuple[str, str], ...]:
    """Spell fixed values as ``--fix`` does."""
    return tuple((name, str(value)) for name, value in (fix or {}).items())
