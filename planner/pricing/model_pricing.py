"""All units of a model priced under one tensor-parallel degree, stream and microbatch size."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from planner.cost.chunked_work import ChunkedLoss
from planner.cost.model_units import ModelUnits, ModelWork, TiedWork
from planner.cost.node_pricing import RankSpec
from planner.cost.unit_extraction import Part, unit_work
from planner.cost.unit_work import UnitWork
from planner.framework.profiles import load_framework
from planner.framework.script import SCRIPT
from planner.framework.spec import KernelForms
from planner.graph.analysis.loss_rows import LossRows
from planner.graph.analysis.shared import kept_behind
from planner.graph.operator_graph import OperatorGraph, UnitKind
from planner.graph.sizes.family import GraphFamily
from planner.hardware.profiles import load_cluster
from planner.hardware.spec import ClusterSpec
from planner.hardware.topology import MeshAxis, comm_group
from planner.pricing.choice import Axes, ShardingChoice
from planner.pricing.graph_sizes import GraphSizes
from planner.pricing.least_work import LeastWork
from planner.pricing.sharding_ilp import ShardingSolution
from planner.pricing.unit_layouts import UnitLayouts, UnitSolver
from planner.runtime.layout import REPLICATE, Layout, shard
from planner.strategy.facts import SEQUENCE_DIM
from planner.strategy.placement import Strides, canonical_stride
from planner.strategy.sharding import WholeModule
from planner.vocabulary import Axis

_REFERENCE = "a100-80gb-sxm"
"""Cluster profile of the node by whose prices wired-in layouts are chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedModel:
    """The units' prices and the layouts behind them."""

    choice: ShardingChoice
    """What the layouts were chosen under."""
    model: ModelUnits
    """Prices in model order."""
    solutions: dict[str, ShardingSolution]
    """Layouts by unit structure."""
    graph: OperatorGraph
    """Graph at this microbatch size."""
    whole: Mapping[str, tuple[WholeModule, ...]] = field(default_factory=dict)
    """Modules that the script could not run split, by unit structure."""
    context: Mapping[str, ShardingSolution] = field(default_factory=dict)
    """Layouts over cp around those, by unit structure; empty where there is no such axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaidOut:
    """Neighbouring units of a model with their layouts."""

    priced: PricedModel
    """All units under these layouts."""
    units: range
    """Those that have them."""


class ModelPricer:
    """Prices a model on demand; equal questions are answered once."""

    def __init__(
        self,
        graphs: GraphFamily,
        cluster: ClusterSpec,
        dtype: str,
        *,
        kernels: KernelForms | None = None,
        collective_host_s: float = 0.0,
        is_tried: bool = False,
    ) -> None:
        """Keep what prices depend on.

        Args:
            graphs: The model at every microbatch size.
            cluster: Devices and links.
            dtype: Compute dtype.
            kernels: How a framework computes, None for the emitted script.
            collective_host_s: As in ``RankSpec``.
            is_tried: Give only layouts that the script's own runtime has run.
        """
        self._graphs = graphs
        self.cluster = cluster
        """Devices and links."""
        self._dtype = dtype
        self._kernels = kernels or load_framework(SCRIPT).kernels
        self._collective_host_s = collective_host_s
        self.solver = UnitSolver(graphs, self._reference_rank)
        """Gives the fastest layouts."""
        self._layouts = UnitLayouts(graphs, self.solver, is_tried=is_tried)
        self.least_work = LeastWork(graphs, [self.solver], [cluster.device])
        """What microbatches take at the least."""
        self._works: dict[ShardingChoice, ModelWork | None] = {}
        self._unit_works: UnitWorks = {}
        self._priced: dict[tuple[ShardingChoice, float, Strides | None], PricedModel | None] = {}

    def rank(self, choice: ShardingChoice, *, strides: Strides | None = None) -> RankSpec:
        """Device, links between the ranks of the axes that split modules, and host times.

        Args:
            choice: Over how many ranks modules are split.
            strides: Distances of neighbours on these axes; None for ranks side by side, tp inside
                cp, by which layouts are chosen.
        """
        strides = strides or self._side_by_side(choice)
        over_experts = strides.split if choice.over.is_inside_blocks else 1
        beside = {
            Axis.CP: MeshAxis(size=choice.cp, stride=strides.second),
            Axis.EP: MeshAxis(size=choice.ep, stride=over_experts),
        }
        return RankSpec(
            device=self.cluster.device,
            dtype=self._dtype,
            tp_group=comm_group(self.cluster, MeshAxis(size=choice.ranks, stride=strides.split)),
            beside={axis: comm_group(self.cluster, each) for axis, each in beside.items()},
            host=self.cluster.host,
            float8=choice.float8,
            splits_ops=choice.ranks > 1 and not choice.over.is_inside_blocks,
            compiled=choice.compile,
            collective_host_s=self._collective_host_s,
        )

    def _side_by_side(self, choice: ShardingChoice) -> Strides:
        if choice.context is None:
            return Strides()
        around = MeshAxis(size=choice.cp, stride=choice.tp)
        return Strides(second=canonical_stride(self.cluster, around))

    def priced(
        self,
        choice: ShardingChoice,
        *,
        network_host_s: float = 0.0,
        strides: Strides | None = None,
    ) -> PricedModel | None:
        """Price all units, None where some unit cannot run under the choice.

        Args:
            choice: The layouts.
            network_host_s: As in ``RankSpec``.
            strides: As in ``rank``.
        """
        key = (choice, network_host_s, strides)
        if key not in self._priced:
            work, solutions = self.work(choice), self._layouts.of(choice)
            rank = replace(self.rank(choice, strides=strides), network_host_s=network_host_s)
            self._priced[key] = (
                None
                if work is None or solutions is None
                else PricedModel(
                    choice=choice,
                    model=work.priced(rank),
                    solutions=solutions,
                    graph=self._graphs.at(choice.microbatch_size),
                    whole={each: self._layouts.whole(choice, each) for each in solutions},
                    context=self._layouts.around(choice),
                )
            )
        return self._priced[key]

    def confirm(self, choice: ShardingChoice) -> bool:
        """Try a choice's layouts at its own microbatch size; False where that changes its prices.

        Other sizes stand in where graphs follow from them (``UnitLayouts.confirm``).
        """
        if self._layouts.confirm(choice):
            return True
        del self._works[choice]
        self._priced = {key: each for key, each in self._priced.items() if key[0] != choice}
        return False

    def work(self, choice: ShardingChoice) -> ModelWork | None:
        """Count the work of all units, None where some unit cannot run under the choice."""
        if choice not in self._works:
            solutions = self._layouts.of(choice)
            self._works[choice] = (
                None
                if solutions is None
                else model_work(
                    self.solver.sizes(choice.microbatch_size),
                    solutions,
                    choice,
                    self._kernels,
                    known=self._unit_works,
                )
            )
        return self._works[choice]

    def reason(self, axes: Axes) -> str | None:
        """Why the script cannot run a layout over axes, where it was tried and refused."""
        return self._layouts.reasons.get(axes)

    def is_unpaid(self, axes: Axes) -> bool:
        """Whether modules could be split over axes, and each is faster whole."""
        return axes in self._layouts.unpaid

    def _reference_rank(self, choice: ShardingChoice) -> RankSpec:
        """Prices that layouts are chosen by.

        Wired-in ones are chosen by those of one reference node whose collectives have no latency,
        and whose devices are slow for its links. This gives the column-row pattern: it splits
        small models as well, where that does not pay.
        """
        if choice.over.name != Axis.TP or not self._kernels.wired_layouts:
            return self.rank(choice)
        node = load_cluster(_REFERENCE, gpus=choice.tp, gpus_per_node=choice.tp)
        links = [
            replace(link, latency_s=0.0, base_latency_s=0.0, ramp_bytes=0.0) for link in node.links
        ]
        group = comm_group(replace(node, links=tuple(links)), MeshAxis(size=choice.tp, stride=1))
        beside = self.rank(choice).beside
        return RankSpec(device=node.device, dtype=self._dtype, tp_group=group, beside=beside)


UnitWorks = dict[tuple[int, bool, KernelForms, int], tuple[ShardingSolution, UnitWork]]
"""Work under a solution (by identity), on a split stream or not, by some kernels, its loss in so
many chunks."""


def model_work(
    sizes: GraphSizes,
    solutions: dict[str, ShardingSolution],
    choice: ShardingChoice,
    kernels: KernelForms,
    *,
    known: UnitWorks,
) -> ModelWork:
    """Count the work of each unit in model order, with the layouts that were chosen.

    Args:
        sizes: The model.
        solutions: Layouts by unit structure.
        choice: What they were chosen under.
        kernels: How a framework computes.
        known: What was counted before with these kernels; more is added.
    """
    graph = sizes.graph
    loss_apart = kernels.loss_apart and graph.units[-1].kind is UnitKind.EPILOGUE
    works: dict[str, UnitWork] = {}
    for structure, solution in solutions.items():
        is_end = solution.problem.unit.kind is UnitKind.EPILOGUE
        chunks = choice.loss_chunks if is_end else 1
        forms = _forms(kernels, choice, solution.problem.unit.kind)
        key = (id(solution), choice.sequence_parallel, forms, chunks)
        if key not in known:
            part: Part | None = (lambda op: bool(op.module)) if loss_apart and is_end else None
            count = partial(_solution_work, part=part) if chunks == 1 else _chunked_work
            known[key] = solution, count(sizes, solution, choice, kernels)
        works[structure] = known[key][1]
    units = [works[unit.structure] for unit in graph.units]
    entering = _entering_bytes(sizes, choice, kernels)
    if loss_apart:
        epilogue = solutions[graph.units[-1].structure]
        units.append(_loss_work(sizes, epilogue, choice, kernels))
        entering.append(_loss_inputs_bytes(epilogue, choice))
    return ModelWork(
        units=tuple(units),
        entering_bytes=tuple(entering),
        entering_tensors=(*sizes.crossing_tensors, *[1] * loss_apart),
        tied=_tied_works(sizes, choice),
        shared=sizes.shared,
        matmul_flop=(*sizes.matmul_flop, *[0] * loss_apart),
        received_bytes=(*_received_bytes(sizes, choice), *[(0, 0, 0)] * loss_apart),
        sent_parts=_sent_parts(choice, kernels),
        buffer_bytes=sizes.buffer_bytes,
        held_by_code=sizes.held_by_code,
        epilogue_units=1 + loss_apart,
    )


def _solution_work(
    sizes: GraphSizes,
    solution: ShardingSolution,
    choice: ShardingChoice,
    kernels: KernelForms,
    part: Part | None,
) -> UnitWork:
    """A unit's work; the stream's crossings at its boundary are paid with it."""
    problem, on_host = solution.problem, choice.activation_offload
    return unit_work(
        problem,
        solution.chosen,
        (*solution.conversions, *stream_crossings(solution, choice)),
        kept_behind=frozenset() if on_host else kept_behind(sizes.graph, problem.unit),
        kernels=_forms(kernels, choice, problem.unit.kind),
        part=part,
    )


def _forms(kernels: KernelForms, choice: ShardingChoice, kind: UnitKind) -> KernelForms:
    """How a unit of some kind computes under a choice."""
    if kind is not UnitKind.BLOCK:
        return kernels
    if choice.compile:
        kernels = replace(kernels, pointwise="compiled")
    on_host = choice.activation_offload or kernels.keeps_inputs_on_host
    float8 = choice.float8 or kernels.float8
    return replace(kernels, float8=float8, keeps_inputs_on_host=on_host)


def _chunked_work(
    sizes: GraphSizes, epilogue: ShardingSolution, choice: ShardingChoice, kernels: KernelForms
) -> UnitWork:
    """Work of the epilogue where its loss is taken in chunks."""
    rows = sizes.loss_rows
    assert isinstance(rows, LossRows)
    loss = ChunkedLoss(
        problem=epilogue.problem, chosen=epilogue.chosen, rows=rows, num_chunks=choice.loss_chunks
    )
    rest = _solution_work(sizes, epilogue, choice, kernels, lambda op: not loss.holds(op))
    return loss.added_to(rest)


def _loss_work(
    sizes: GraphSizes, epilogue: ShardingSolution, choice: ShardingChoice, kernels: KernelForms
) -> UnitWork:
    """What the root does with the outputs of the epilogue's modules."""
    alone = replace(choice, sequence_parallel=False)  # its crossings are paid with the head
    work = _solution_work(
        sizes, replace(epilogue, conversions=()), alone, kernels, lambda op: not op.module
    )
    return replace(
        work,
        trained_elements=0,
        frozen_elements=0,
        outer_trained_elements=0,
        outer_frozen_elements=0,
        experts_trained_elements=0,
        experts_frozen_elements=0,
        trained_tensors=0,
    )


def _loss_inputs_bytes(epilogue: ShardingSolution, choice: ShardingChoice) -> int:
    """Bytes on a rank of what the epilogue's modules hand to the loss."""
    graph = epilogue.problem.context.graph
    ops = [graph.nodes[op] for op in epilogue.problem.unit.forward_ops]
    made = {value for op in ops if op.module for value in op.outputs}
    read = {value for op in ops if not op.module for value in op.inputs} & made
    layouts = {v: layout for each in epilogue.chosen for v, layout in each.layouts.items()}
    return sum(
        graph.values[value].size_bytes
        // (choice.ranks if layouts.get(value, REPLICATE).is_shard else 1)
        for value in read
    )


def stream_crossings(
    solution: ShardingSolution, choice: ShardingChoice
) -> tuple[tuple[int, Layout, Layout], ...]:
    """Where the stream is split before the first block and made whole after the last.

    Paid with the prologue and the epilogue, which run on the whole stream.
    """
    if not choice.sequence_parallel:
        return ()
    folded, kind = solution.problem.folded, solution.problem.unit.kind
    split = shard(SEQUENCE_DIM)
    if kind is UnitKind.PROLOGUE:
        return tuple((value, REPLICATE, split) for value in folded.boundary_outputs)
    if kind is UnitKind.EPILOGUE:
        return tuple((value, split, REPLICATE) for value in folded.boundary_inputs)
    return ()


def _entering_bytes(sizes: GraphSizes, choice: ShardingChoice, kernels: KernelForms) -> list[int]:
    """Bytes that a rank sends to a stage that begins with each unit.

    The gather inside the node that follows a transfer split over tp is not priced: its links are
    some ten times as fast.
    """
    parts = _sent_parts(choice, kernels)
    return [num_bytes // parts for num_bytes in sizes.crossing_bytes]


def _sent_parts(choice: ShardingChoice, kernels: KernelForms) -> int:
    return max(choice.stream_parts, choice.ranks if kernels.splits_transfers else 1)


def _received_bytes(sizes: GraphSizes, choice: ShardingChoice) -> Iterator[tuple[int, ...]]:
    """Bytes on a rank that each unit counts of what a cut sends it, by recomputation."""
    for by_kind in sizes.received_bytes:
        yield tuple(num_bytes // choice.stream_parts for num_bytes in by_kind)


def _tied_works(sizes: GraphSizes, choice: ShardingChoice) -> tuple[TiedWork, ...]:
    """Weights that several units read, with their elements on a tp rank."""
    found, tables = [], sizes.graph.table_storages
    for index, units in sizes.tied:
        parameter = sizes.graph.parameters[index]
        split = choice.split_tables and choice.tp > 1 and parameter.storage in tables
        elements = parameter.num_elements // (choice.tp if split else 1)
        found.append(TiedWork(units=units, elements=elements, trained=parameter.requires_grad))
    return tuple(found)
