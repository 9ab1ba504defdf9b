"""A unit with its layouts chosen: what one microbatch of it costs, in seconds and bytes."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from planner.cost.liveness import UnitPeaks, unit_peaks
from planner.cost.node_pricing import NodePrice, Pricing, conversion_s, forward_op_s
from planner.cost.work import Shares, shares_of
from planner.graph.analysis.retained import (
    KEPT_BY_SELECTIVE,
    RECOMPUTATIONS,
    block_ops,
    recomputed_ops,
    saved_values,
)
from planner.graph.analysis.shared import passing_storages
from planner.graph.operator_graph import OperatorGraph, OpNode, StorageKind
from planner.strategy.layout import Layout
from planner.strategy.nodes import NodeStrategy
from planner.strategy.problem import ShardingProblem
from planner.units import DTYPE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """What recomputing a unit in backward costs."""

    compute_s: float
    """Kernels run again."""
    comm_s: float
    """Collectives run again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedUnit:
    """One microbatch through one unit on one rank."""

    structure: str
    """Hash of what it computes."""
    forward_s: float
    """Forward kernels."""
    backward_s: float
    """Backward kernels, without recomputation."""
    forward_comm_s: float
    """Tensor-parallel collectives of the forward pass."""
    backward_comm_s: float
    """Tensor-parallel collectives of the backward pass."""
    recompute: Mapping[str, Recompute]
    """By kind of recomputation."""
    activation_bytes: Mapping[str, int]
    """Kept between forward and backward, by kind of recomputation; what it shares with other
    units apart."""
    temporary_bytes: Mapping[str, int]
    """Highest need while it runs, beyond ``activation_bytes``, by kind of recomputation."""
    parameter_bytes: int
    """Its parameters on one tp rank in the dtype of the optimiser, before data-parallel
    sharding."""
    gathered_bytes: int
    """The same in the compute dtype, as gathered for its forward."""
    summed_gradient_bytes: int
    """Gradients of whole parameters on a split stream, summed over tp once a step."""


def price_unit(
    problem: ShardingProblem,
    chosen: tuple[NodeStrategy, ...],
    prices: tuple[NodePrice, ...],
    conversions: tuple[tuple[int, Layout, Layout], ...],
    pricing: Pricing,
    *,
    saved_before: Set[int] = frozenset(),
) -> PricedUnit:
    """Add up a unit.

    Args:
        problem: The unit.
        chosen: The strategy of each node.
        prices: Their prices.
        conversions: Changes of layout in front of modules.
        pricing: Device and tp group.
        saved_before: Storages that the unit before keeps already.
    """
    graph = problem.context.graph
    comm = [conversion_s(graph, value, p, q, pricing) for value, p, q in conversions]
    view = _UnitView(problem, chosen, saved_before)
    peaks = unit_peaks(graph, problem.unit.forward_ops, problem.unit.backward_ops, view.shares)
    forward_comm_s = sum(p.forward_comm_s for p in prices) + sum(f for f, _ in comm)
    activations = {kind: view.activation_bytes(kind) for kind in RECOMPUTATIONS}
    parameter_elements = view.parameter_elements()
    return PricedUnit(
        structure=problem.unit.structure,
        forward_s=sum(price.forward_s for price in prices),
        backward_s=sum(price.backward_s for price in prices) + view.unowned_backward_s(pricing),
        forward_comm_s=forward_comm_s,
        backward_comm_s=sum(p.backward_comm_s for p in prices) + sum(b for _, b in comm),
        recompute={
            kind: _recompute(kind, view, prices, conversions, pricing) for kind in RECOMPUTATIONS
        },
        activation_bytes=activations,
        temporary_bytes=_temporaries(peaks, activations, view.unread_cache_bytes()),
        parameter_bytes=parameter_elements * master_bytes(pricing.dtype),
        gathered_bytes=parameter_elements * DTYPE_BYTES[pricing.dtype],
        summed_gradient_bytes=view.summed_gradient_elements() * master_bytes(pricing.dtype),
    )


def master_bytes(dtype: str) -> int:
    """Bytes per element of parameters, gradients and each optimiser state."""
    return DTYPE_BYTES["float64" if dtype == "float64" else "float32"]


def _temporaries(
    peaks: UnitPeaks, activations: Mapping[str, int], unread_cache_bytes: int
) -> dict[str, int]:
    """Peak beyond what is kept; recomputation brings the whole unit back for its backward."""
    highest = max(peaks.forward_bytes, peaks.backward_bytes)
    return {
        "none": max(0, highest - activations["none"]),
        "selective": max(0, highest + unread_cache_bytes - activations["selective"]),
        "full": max(0, highest - activations["full"]),
    }


def _recompute(
    kind: str,
    view: "_UnitView",
    prices: tuple[NodePrice, ...],
    conversions: tuple[tuple[int, Layout, Layout], ...],
    pricing: Pricing,
) -> Recompute:
    """Forward work done again; collectives as well where selective recomputation keeps outputs."""
    if kind == "none":
        return Recompute(compute_s=0.0, comm_s=0.0)
    graph = view.graph
    computed = set(recomputed_ops(graph, view.problem.unit, kind))
    again = set(recomputed_ops(graph, view.problem.unit, "full"))
    compute_s = comm_s = 0.0
    for node, strategy, price in zip(view.problem.folded.nodes, view.chosen, prices, strict=True):
        share = view.share_of_node[node.index]
        for op_id in node.ops:
            op = graph.nodes[op_id]
            if op_id in computed and not op.is_view:
                compute_s += forward_op_s(graph, op, share, pricing)
        if node.ops and node.ops[-1] in again and strategy.outputs:
            comm_s += price.forward_comm_s
    read = {v for op in again for v in graph.nodes[op].inputs}
    for value, p, q in conversions:
        if value in read or value in view.saved_values:
            comm_s += conversion_s(graph, value, p, q, pricing)[0]
    return Recompute(compute_s=compute_s, comm_s=comm_s)


class _UnitView:
    """Lookups over one unit and its chosen strategies."""

    def __init__(
        self,
        problem: ShardingProblem,
        chosen: tuple[NodeStrategy, ...],
        saved_before: Set[int],
    ) -> None:
        self.problem = problem
        self.chosen = chosen
        self.graph: OperatorGraph = problem.context.graph
        self._tp = problem.context.tp
        self._saved_before = saved_before
        self._passing = passing_storages(self.graph, problem.unit)
        self.share_of_node = [shares_of(strategy.layouts, self._tp) for strategy in chosen]
        self.shares: dict[int, Shares] = {
            op: self.share_of_node[node.index] for node in problem.folded.nodes for op in node.ops
        }
        self.saved_values = saved_values(self.graph, problem.unit.forward_ops)

    def _own_storage(self, value: int) -> int | None:
        """Storage of an activation, None for shared ones, parameters, buffers and inputs."""
        storage = self.graph.storages[self.graph.values[value].storage]
        own = storage.kind is StorageKind.ACTIVATION and storage.id not in self._passing
        return storage.id if own else None

    def _saved(self, op_ids: Sequence[int]) -> dict[tuple[int, float], int]:
        """Bytes on a rank of each storage that some forward ops save.

        A gathered copy counts beside its shard.
        """
        found: dict[tuple[int, float], int] = {}
        for op_id in op_ids:
            op = self.graph.nodes[op_id]
            share = self.shares[op_id]
            for value in (*op.saved_inputs, *op.saved_outputs):
                storage = self._own_storage(value)
                if storage is None:
                    continue
                if storage in self._saved_before and share(value) == self._boundary_share():
                    continue
                size = self.graph.storages[storage].size_bytes
                found[storage, share(value)] = int(size * share(value))
        return found

    def _boundary_share(self) -> float:
        return 1 / self._tp if self.problem.boundary.is_shard else 1.0

    def activation_bytes(self, kind: str) -> int:
        """Bytes kept between forward and backward for one microbatch."""
        unit = self.problem.unit
        if kind == "none":
            return sum(self._saved(unit.forward_ops).values())
        inputs = self.problem.folded.boundary_inputs
        kept = self.boundary_bytes([v for v in inputs if self._own_storage(v) is not None])
        kept += sum(self._saved(unit.forward_ops[unit.num_block_ops :]).values())
        return kept if kind == "full" else kept + sum(self._cached().values())

    def _cached(self) -> dict[int, int]:
        """Bytes on a rank of the outputs that selective recomputation keeps."""
        found: dict[int, int] = {}
        for op_id in block_ops(self.problem.unit):
            op = self.graph.nodes[op_id]
            if op.name in KEPT_BY_SELECTIVE:
                for value in op.outputs:
                    found[value] = int(
                        self.graph.values[value].size_bytes * self.shares[op.id](value)
                    )
        return found

    def unread_cache_bytes(self) -> int:
        """Cached outputs that backward itself never needs."""
        return sum(size for value, size in self._cached().items() if value not in self.saved_values)

    def _forward_ops(self) -> list[OpNode]:
        return [self.graph.nodes[op] for op in self.problem.unit.forward_ops]

    def boundary_bytes(self, values: Sequence[int]) -> int:
        """Bytes on a rank of values at the unit's boundary."""
        share = self._boundary_share()
        return sum(int(self.graph.values[value].size_bytes * share) for value in values)

    def parameter_elements(self) -> int:
        """Parameter elements on one tp rank."""
        total = 0.0
        for index in self.problem.unit.parameters:
            parameter = self.graph.parameters[index]
            total += parameter.num_elements * self._parameter_share(parameter.storage)
        return round(total)

    def _parameter_share(self, storage: int) -> float:
        """Smallest share in which a matmul, gather or add of the unit reads a parameter."""
        least = 1.0
        for op in self._forward_ops():
            for value in op.inputs:
                if self.graph.values[value].storage == storage:
                    least = min(least, self.shares[op.id](value))
        return least

    def summed_gradient_elements(self) -> int:
        """Elements of whole parameters that run on a split stream."""
        total = 0
        for node, strategy in zip(self.problem.folded.nodes, self.chosen, strict=True):
            if strategy.style == "sequence":
                storages = {
                    self.graph.values[value].storage
                    for op in node.ops
                    for value in self.graph.nodes[op].inputs
                    if self.problem.context.is_parameter(value)
                }
                total += sum(
                    parameter.num_elements
                    for parameter in self.graph.parameters
                    if parameter.storage in storages
                )
        return total

    def unowned_backward_s(self, pricing: Pricing) -> float:
        """Backward ops that belong to no forward op: sums of gradients, priced whole."""
        bandwidth = (
            pricing.device.memory_bandwidth_bytes_per_s
            * pricing.device.efficiency.pointwise_bandwidth_fraction
        )
        own = set(self.problem.unit.forward_ops)
        total = 0.0
        for op_id in self.problem.unit.backward_ops:
            op = self.graph.nodes[op_id]
            if not op.is_view and (op.forward_op is None or op.forward_op not in own):
                moved = (op.read_bytes + op.write_bytes) * self._boundary_share()
                total += pricing.device.kernel_launch_s + moved / bandwidth
        return total
