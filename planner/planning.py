"""From a checked request to the record of a run: load, trace, search, verify.

A model is traced once for all requests on it that have its sequence length and dtype.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Self

from planner.collector import paused_collector
from planner.errors import InfeasiblePlanError
from planner.graph.analysis.changed_buffers import buffers_that_steer, changed_buffers
from planner.graph.analysis.patterns import block_pattern
from planner.graph.analysis.trace_warnings import trace_warnings
from planner.graph.loading.hints import make_hints
from planner.model_argument import ModelObject, load_argument
from planner.plan.devices import cluster_of
from planner.plan.record import ModelSummary, OpRow, PlanRecord
from planner.plan.types import ModelRef
from planner.progress import ProgressCallback, timed_phase
from planner.request import PlanRequest
from planner.request_rules import (
    SAMPLES_PER_GPU,
    estimated_layout,
    resolve_dtype,
    resolve_margin,
)
from planner.vocabulary import ORDER_SIGN, WorkKind

if TYPE_CHECKING:
    from planner.framework.spec import FrameworkSpec
    from planner.graph.sizes.family import GraphFamily
    from planner.hardware.spec import ClusterSpec
    from planner.plan.serialize import SavedPlan
    from planner.plan.types import Plan, SearchOutcome
    from planner.search.search_request import SearchRequest
    from planner.strategy.rules import FixedValues


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What runs a plan."""

    framework: "FrameworkSpec"
    """The emitted script, or what an estimate is for."""
    cluster: "ClusterSpec"
    """Devices and links, with the memory to keep free."""

    @classmethod
    def of(cls, request: PlanRequest, *, gpus: int | None = None) -> Self:
        """Read the request's cluster, with another number of devices where one is named.

        Raises:
            ProfileError: There is no such profile, or a field of it is wrong.
            RequestError: Nothing joins the devices, or a link joins parts of nodes.
        """
        from planner.framework.script import SCRIPT, framework_on_cluster

        framework, cluster = framework_on_cluster(
            request.framework or SCRIPT,
            request.cluster,
            gpus=request.gpus if gpus is None else gpus,
            gpus_per_node=request.gpus_per_node,
            calibration=request.calibration,
        )
        machine = cls(framework=framework, cluster=cluster)
        return machine.with_margin(resolve_margin(request))

    def dtype_of(self, request: PlanRequest) -> str:
        """The compute dtype of a request on its devices.

        Raises:
            RequestError: One of them does not compute in the dtype asked for.
        """
        return resolve_dtype(request, *(kind.device for kind in self.cluster.kinds))

    def with_margin(self, margin: float) -> Self:
        """The same machine, a share of its memory kept free."""
        cluster = self.cluster.with_devices(lambda device: device.with_margin(margin))
        return replace(self, cluster=cluster)


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedModel:
    """A model for any number of searches."""

    summary: ModelSummary
    """The model in a few numbers."""
    ref: ModelRef
    """Where scripts find it."""
    graphs: "GraphFamily"
    """It at every microbatch size."""
    dtype: str
    """Compute dtype that it was traced with."""

    @classmethod
    @paused_collector()
    def of_request(
        cls,
        request: PlanRequest,
        model_object: ModelObject | None = None,
        *,
        progress: ProgressCallback | None = None,
    ) -> Self:
        """Load and trace the model of a checked request.

        Raises:
            ProfileError: There is no such cluster.
            RequestError: Its device does not compute in the dtype asked for.
            ModelError: The model cannot be loaded or traced.
        """
        dtype = Machine.of(request).dtype_of(request)
        with timed_phase(progress, "load"):
            hints = make_hints(request.hints)
            loaded = load_argument(
                request.model, model_object, seq_len=request.seq_len, hints=hints
            )
        with timed_phase(progress, "trace"):
            from planner.graph.recording.work import kinds_of_work, work_kind
            from planner.graph.sizes.family import trace_family

            graphs = trace_family(loaded, dtype=dtype)
            graph = graphs.smallest
        tokens = graph.tokens_per_sample
        return cls(
            summary=ModelSummary(
                name=loaded.description,
                num_parameters=graph.num_parameters,
                seq_len=tokens if tokens > 1 else None,
                block_pattern=str(block_pattern(graph)),
            ),
            ref=ModelRef(
                file=loaded.file,
                module=loaded.module,
                factory=loaded.factory,
                seq_len=loaded.seq_len,
                num_parameters=graph.num_parameters,
                has_scalars=not all(each.shape for each in graph.parameters),
                has_groups=any(work_kind(op.name) is WorkKind.GROUPED for op in graph.nodes),
                work=kinds_of_work((op.name, op.flop) for op in graph.nodes),
                changed_buffers=changed_buffers(graph),
                steering_buffers=buffers_that_steer(graph),
            ),
            graphs=graphs,
            dtype=dtype,
        )

    @classmethod
    def of_saved(cls, saved: "SavedPlan", *, progress: ProgressCallback | None = None) -> Self:
        """Trace the model that a plan's folder holds.

        Raises:
            ModelError: It is gone, or cannot be traced.
            VerificationError: It is not the model of the plan.
        """
        from planner.plan.saved_model import saved_graphs

        with timed_phase(progress, "trace"):
            graphs = saved_graphs(saved)
        plan = saved.plan
        return cls(summary=saved.model, ref=plan.model, graphs=graphs, dtype=plan.dtype)

    @paused_collector()
    def record(
        self,
        request: PlanRequest,
        *,
        machine: Machine | None = None,
        estimate_only: bool = False,
        progress: ProgressCallback | None = None,
    ) -> PlanRecord:
        """Search, and verify what was found.

        An estimate that fits without the margin alone has a cluster without it, and a warning.

        Args:
            request: Checked; of this model, its sequence length and dtype.
            machine: What to plan for, None for what the request names.
            estimate_only: Price the one layout that the request fixes.
            progress: Called when the search begins and ends.

        Raises:
            PlannerError: As ``planner.plan``.
        """
        machine = machine or Machine.of(request)
        fixed = estimated_layout(request) if estimate_only else dict(request.fixed)
        notes: tuple[str, ...] = ()
        with timed_phase(progress, "search"):
            try:
                outcome, rows = self._searched(request, machine, fixed)
            except InfeasiblePlanError:
                if not (estimate_only and machine.cluster.device.margin_bytes):
                    raise
                missed = machine.cluster.device.margin_words
                machine = machine.with_margin(0.0)
                outcome, rows = self._searched(request, machine, fixed)
                notes = (f"the layout fits the device, but not with {missed}",)
        return PlanRecord(
            request=request,
            model=self.summary,
            cluster=cluster_of(outcome.best, machine.cluster),
            outcome=outcome,
            **rows,
            warnings=(
                *trace_warnings(self.graphs.smallest),
                *_steering(outcome.best),
                *self._drawn(request, machine, outcome.best, rows["op_rows"]),
                *notes,
            ),
        )

    def _drawn(
        self, request: PlanRequest, machine: Machine, plan: "Plan", rows: Sequence[OpRow]
    ) -> tuple[str, ...]:
        """Warn of random draws that the plan changes."""
        from planner.plan.draws import draw_warnings

        if request.framework is not None:
            return ()
        graph, on_cpus = self.graphs.at(plan.microbatch_size), machine.cluster.host_is_device
        return draw_warnings(plan, graph, rows, on_cpus=on_cpus)

    def _searched(
        self, request: PlanRequest, machine: Machine, fixed: Mapping[str, str]
    ) -> "tuple[SearchOutcome, dict[str, Any]]":
        """Search, verify what was found, and list what the best plan consists of, by field."""
        from planner.plan.verify import verify_outcome
        from planner.pricing.reprice import verify_price
        from planner.search.framework_estimate import FrameworkEstimate
        from planner.search.run import Search

        graphs, cluster = self.graphs, machine.cluster
        asked = self._search_request(request, machine.framework, fixed)

        def resize(gpus: int) -> "ClusterSpec":
            other = Machine.of(request, gpus=gpus).cluster
            return replace(other, device=cluster.device)

        search = (
            FrameworkEstimate(graphs, cluster, asked)
            if request.framework is not None
            else Search(graphs, cluster, asked, resize=resize)
        )
        outcome = search.run()
        if request.framework is None:
            # Another framework's cuts and schedules are its own, and no plan of ours.
            outcome = _with_data_reads(outcome, graphs)
            verify_outcome(outcome, cluster, graphs=graphs, is_open=not fixed)
            verify_price(outcome.best, graphs, cluster, asked.framework)
        rows = {
            "op_rows": search.op_rows(outcome.best),
            "module_rows": search.module_rows(outcome.best),
            "traffic_rows": search.traffic_rows(outcome.best),
        }
        return outcome, rows

    def _search_request(
        self, request: PlanRequest, framework: "FrameworkSpec", fixed: Mapping[str, str]
    ) -> "SearchRequest":
        """Resolve what the request leaves open."""
        from planner.search.search_request import SearchRequest

        return SearchRequest(
            model=self.ref,
            global_batch_size=request.global_batch_size or SAMPLES_PER_GPU * request.gpus,
            dtype=self.dtype,
            fixed=_fixed_values(fixed),
            top=request.top,
            time_limit_s=request.time_limit_s,
            framework=framework,
        )


def _steering(plan: "Plan") -> tuple[str, ...]:
    """Warn of buffers by which data-parallel ranks train otherwise than one device would."""
    names, ranks = plan.model.steering_buffers, plan.degrees.dp
    if not names or ranks == 1:
        return ()
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"training reads what it leaves in the buffer {names[0]}{more}, and each of {ranks} "
        "data-parallel ranks leaves there what its own microbatches make of it: losses are not "
        "those of one device, unless the model's code shares it among ranks; checkpoints hold one "
        "rank's",
    )


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
        "float8": lambda value: value == "true",
        "cpu_offload": lambda value: value == "true",
        "activation_offload": lambda value: value == "true",
        "mesh_order": lambda value: tuple(value.split(ORDER_SIGN)),
    }
    chosen: Any = {
        name: types.get(name, int)(value) for name, value in fixed.items() if name in names
    }
    return FixedValues(**chosen)


def plan_record(
    request: PlanRequest,
    model_object: ModelObject | None,
    *,
    estimate_only: bool,
    progress: ProgressCallback | None,
) -> PlanRecord:
    """Carry out a checked request, from the model to what was found.

    Args:
        request: What is asked.
        model_object: The model, where ``request.model`` only describes it.
        estimate_only: Price the one layout that the request fixes.
        progress: Called when a phase begins and ends.

    Raises:
        PlannerError: As ``planner.plan``.
    """
    traced = TracedModel.of_request(request, model_object, progress=progress)
    return traced.record(request, estimate_only=estimate_only, progress=progress)
