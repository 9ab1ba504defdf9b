"""All units of a model priced under one tensor-parallel degree, stream and microbatch size."""

from dataclasses import dataclass, replace

from planner.cost.node_pricing import Pricing
from planner.cost.stage_memory import ModelUnits, TiedWeight
from planner.cost.unit_extraction import Part, unit_work
from planner.cost.unit_pricing import PricedUnit, master_bytes, price_unit
from planner.cost.unit_work import UnitWork
from planner.framework.spec import TORCH_KERNELS, KernelForms
from planner.graph.analysis.shared import shared_activations
from planner.graph.operator_graph import OperatorGraph, Unit, UnitKind
from planner.graph.sizes.family import GraphFamily
from planner.hardware.spec import ClusterSpec
from planner.hardware.topology import comm_group
from planner.search.sharding_ilp import ShardingSolution, is_solvable, solve_sharding
from planner.strategy.facts import SEQUENCE_DIM
from planner.strategy.layout import REPLICATE, Layout, shard
from planner.strategy.problem import ShardingProblem, sharding_problem, table_storages
from planner.units import DTYPE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingChoice:
    """What the units' prices depend on."""

    tp: int
    """Tensor-parallel ranks."""
    sequence_parallel: bool
    """The stream is split over the sequence inside blocks."""
    split_tables: bool
    """Rows of vocabulary-sized weights are split over tp."""
    microbatch_size: int
    """Samples per microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedModel:
    """The units' prices and the layouts behind them."""

    model: ModelUnits
    """Prices in model order."""
    solutions: dict[str, ShardingSolution]
    """Layouts by unit structure."""
    graph: OperatorGraph
    """Graph at this microbatch size."""


class ModelPricer:
    """Prices a model on demand; equal questions are answered once."""

    def __init__(
        self, graphs: GraphFamily, cluster: ClusterSpec, dtype: str, *, time_limit_s: float
    ) -> None:
        """Keep what prices depend on.

        Args:
            graphs: The model at every microbatch size.
            cluster: Devices and links.
            dtype: Compute dtype.
            time_limit_s: Limit for each sharding ILP.
        """
        self._graphs = graphs
        self._cluster = cluster
        self._dtype = dtype
        self._time_limit_s = time_limit_s
        self._priced: dict[ShardingChoice, PricedModel | None] = {}

    def priced(self, choice: ShardingChoice) -> PricedModel | None:
        """Price all units, None where some unit cannot run under the choice."""
        if choice not in self._priced:
            self._priced[choice] = self._price(choice)
        return self._priced[choice]

    def pricing(self, tp: int) -> Pricing:
        """Device and tp group of a tp degree."""
        return Pricing(
            device=self._cluster.device,
            dtype=self._dtype,
            tp_group=comm_group(self._cluster, degree=tp, stride=1),
        )

    def _price(self, choice: ShardingChoice) -> PricedModel | None:
        graph = self._graphs.at(choice.microbatch_size)
        pricing = self.pricing(choice.tp)
        solutions: dict[str, ShardingSolution] = {}
        prices: dict[str, PricedUnit] = {}
        for unit in representatives(graph):
            problem = unit_problem(graph, unit, choice)
            if not is_solvable(problem):
                return None
            solution = solve_sharding(problem, pricing, time_limit_s=self._time_limit_s)
            solutions[unit.structure] = solution
            crossings = stream_crossings(solution, choice)
            prices[unit.structure] = price_solution(solution, pricing, crossings)
        if choice.tp > 1 and not _shards_anything(solutions):
            return None
        units = tuple(prices[unit.structure] for unit in graph.units)
        return PricedModel(
            model=_model_units(graph, units, choice, self._dtype), solutions=solutions, graph=graph
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


def price_solution(
    solution: ShardingSolution,
    pricing: Pricing,
    crossings: tuple[tuple[int, Layout, Layout], ...],
) -> PricedUnit:
    """Price a unit with its layouts chosen, and the stream's crossings at its boundary."""
    return price_unit(_solution_work(solution, crossings), pricing)


def drawn_units(
    priced: PricedModel, choice: ShardingChoice, kernels: KernelForms
) -> tuple[UnitWork, ...]:
    """The work of each unit in model order, with the layouts that were chosen.

    The epilogue comes as two: what its modules do, and the loss, which the root does.

    Args:
        priced: A model priced under ``choice``.
        choice: What its prices depend on.
        kernels: How a framework computes what the model asks for.
    """
    found: dict[str, tuple[UnitWork, ...]] = {}
    for structure, solution in priced.solutions.items():
        crossings = stream_crossings(solution, choice)
        if solution.problem.unit.kind is UnitKind.EPILOGUE:
            head = _solution_work(solution, crossings, kernels, lambda op: bool(op.module))
            loss_conversions = replace(solution, conversions=())
            loss = _solution_work(loss_conversions, (), kernels, lambda op: not op.module)
            found[structure] = (head, replace(loss, parameter_elements=0))
        else:
            found[structure] = (_solution_work(solution, crossings, kernels),)
    return tuple(work for unit in priced.graph.units for work in found[unit.structure])


def _solution_work(
    solution: ShardingSolution,
    crossings: tuple[tuple[int, Layout, Layout], ...],
    kernels: KernelForms = TORCH_KERNELS,
    part: Part | None = None,
) -> UnitWork:
    problem = solution.problem
    return unit_work(
        problem,
        solution.chosen,
        (*solution.conversions, *crossings),
        saved_before=_saved_before(problem.context.graph, problem.unit),
        kernels=kernels,
        part=part,
    )


def unit_problem(graph: OperatorGraph, unit: Unit, choice: ShardingChoice) -> ShardingProblem:
    """The sharding problem of a unit under a choice."""
    return sharding_problem(
        graph,
        unit,
        tp=choice.tp,
        sequence_dim=SEQUENCE_DIM if choice.sequence_parallel else None,
        split_tables=choice.split_tables if choice.tp > 1 else None,
    )


def representatives(graph: OperatorGraph) -> list[Unit]:
    """One unit of each structure: the second where there are several.

    The first of many often makes what all share.
    """
    found: dict[str, list[Unit]] = {}
    for unit in graph.units:
        found.setdefault(unit.structure, []).append(unit)
    return [alike[min(1, len(alike) - 1)] for alike in found.values()]


def _saved_before(graph: OperatorGraph, unit: Unit) -> frozenset[int]:
    """Storages that the unit before keeps for its own backward."""
    if unit.index == 0:
        return frozenset()
    return frozenset(
        graph.values[value].storage
        for op in graph.units[unit.index - 1].forward_ops
        for value in (*graph.nodes[op].saved_inputs, *graph.nodes[op].saved_outputs)
    )


def _shards_anything(solutions: dict[str, ShardingSolution]) -> bool:
    return any(
        strategy.style in ("column", "row", "vocab_embedding")
        for solution in solutions.values()
        for strategy in solution.chosen
    )


def _model_units(
    graph: OperatorGraph, units: tuple[PricedUnit, ...], choice: ShardingChoice, dtype: str
) -> ModelUnits:
    """Add what crosses the cuts, and the weights and activations that several units read."""
    entering = [0] * len(units)
    for cut in graph.cuts:
        split = choice.tp if choice.sequence_parallel else 1
        entering[cut.after_unit + 1] = cut.crossing_bytes // split
    readers: dict[int, list[int]] = {}
    for unit in graph.units:
        for index in unit.parameters:
            readers.setdefault(index, []).append(unit.index)
    return ModelUnits(
        units=units,
        entering_bytes=tuple(entering),
        tied=tuple(
            _tied_weight(graph, index, places, choice, dtype)
            for index, places in sorted(readers.items())
            if len(places) > 1
        ),
        shared=shared_activations(graph, {unit.structure: unit for unit in representatives(graph)}),
    )


def _tied_weight(
    graph: OperatorGraph, index: int, units: list[int], choice: ShardingChoice, dtype: str
) -> TiedWeight:
    parameter = graph.parameters[index]
    split = choice.split_tables and choice.tp > 1 and parameter.storage in table_storages(graph)
    elements = parameter.num_elements // (choice.tp if split else 1)
    return TiedWeight(
        units=tuple(units),
        parameter_bytes=elements * master_bytes(dtype),
        gathered_bytes=elements * DTYPE_BYTES[dtype],
    )
