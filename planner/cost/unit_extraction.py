"""Draws the work of one microbatch of a unit from its graph and chosen layouts."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace

from planner.cost.attention import attention_works, score_bytes
from planner.cost.liveness import UnitPeaks, unit_peaks
from planner.cost.node_pricing import backward_ops_by_forward
from planner.cost.op import OpWork
from planner.cost.unit_work import NO_WORK, CommWork, RankWork, UnitWork
from planner.cost.work import Shares, backward_work, forward_work, shares_of
from planner.framework.spec import TORCH_KERNELS, KernelForms
from planner.graph.analysis.retained import (
    KEPT_BY_SELECTIVE,
    RECOMPUTATIONS,
    block_ops,
    recomputed_ops,
    saved_values,
)
from planner.graph.analysis.shared import passing_storages
from planner.graph.operator_graph import OperatorGraph, OpNode, StorageKind
from planner.strategy.conversion import conversion
from planner.strategy.layout import Layout
from planner.strategy.nodes import NodeStrategy
from planner.strategy.op_rules import ATTENTIONS, MATMULS
from planner.strategy.problem import ShardingProblem
from planner.units import DTYPE_BYTES

_SOFTMAX_REDUCTIONS = 3
"""All-reduces of a vocabulary-parallel loss: row maximum, row sum, target's log-probability."""

Part = Callable[[OpNode], bool]
"""Tells which ops of a unit are meant."""

_Conversions = tuple[tuple[int, Layout, Layout], ...]


def unit_work(
    problem: ShardingProblem,
    chosen: tuple[NodeStrategy, ...],
    conversions: _Conversions,
    *,
    saved_before: Set[int] = frozenset(),
    kernels: KernelForms = TORCH_KERNELS,
    part: Part | None = None,
) -> UnitWork:
    """Draw the work of a unit.

    Args:
        problem: The unit.
        chosen: The strategy of each node.
        conversions: Changes of layout in front of modules.
        saved_before: Storages that the unit before keeps already.
        kernels: How attention is computed and what recomputation runs again.
        part: Ops to draw the work of; None for all of the unit's.
    """
    if part is not None:
        problem = _only(problem, part)
    view = _UnitView(problem, chosen, saved_before, kernels, _gathered(chosen, conversions))
    graph, unit = view.graph, problem.unit
    peaks = unit_peaks(graph, unit.forward_ops, unit.backward_ops, view.shares)
    activations = {kind: view.activation_bytes(kind) for kind in RECOMPUTATIONS}
    exits = [
        pair
        for node, strategy in zip(problem.folded.nodes, chosen, strict=True)
        if node.ops and node.ops[-1] in view.own_ops
        for pair in _exit_comm(graph, strategy)
    ]
    changes = [_change_comm(graph, *change) for change in conversions]
    inputs, weights = view.backward_works()
    return UnitWork(
        structure=unit.structure,
        forward=RankWork(
            ops=tuple(view.forward_works(unit.forward_ops)),
            comm=_comm(forward for forward, _ in (*exits, *changes)),
        ),
        input_backward=RankWork(
            ops=inputs,
            comm=_comm(backward for _, backward in (*exits, *changes)) + view.regathers(),
        ),
        weight_backward=RankWork(ops=weights, comm=()),
        recompute={kind: _recompute(kind, view, conversions) for kind in RECOMPUTATIONS},
        activation_bytes=activations,
        temporary_bytes=_temporaries(peaks, activations, view),
        parameter_elements=view.parameter_elements(),
        summed_gradient_elements=view.summed_gradient_elements(),
    )


def _only(problem: ShardingProblem, part: Part) -> ShardingProblem:
    """The same unit with some of its ops."""
    nodes, unit = problem.context.graph.nodes, problem.unit
    kept = replace(
        unit,
        forward_ops=tuple(op for op in unit.forward_ops if part(nodes[op])),
        backward_ops=tuple(op for op in unit.backward_ops if part(nodes[op])),
    )
    return replace(problem, unit=kept)


_Comm = Sequence[CommWork]


def _gathered(chosen: Sequence[NodeStrategy], conversions: _Conversions) -> frozenset[int]:
    """Values that are made split and read whole."""
    exits = [
        (value, strategy.layouts[value], layout)
        for strategy in chosen
        for value, layout in strategy.outputs.items()
        if value in strategy.layouts
    ]
    return frozenset(
        value
        for value, source, target in (*conversions, *exits)
        if source.is_shard and not target.is_shard
    )


def _comm(parts: Iterable[_Comm]) -> tuple[CommWork, ...]:
    return tuple(comm for part in parts for comm in part)


def _exit_comm(graph: OperatorGraph, strategy: NodeStrategy) -> list[tuple[_Comm, _Comm]]:
    """Collectives at a node's exits and inside its loss, forward and backward."""
    found = [
        _change_comm(graph, value, strategy.layouts[value], layout)
        for value, layout in strategy.outputs.items()
        if value in strategy.layouts
    ]
    if strategy.loss_rows:
        rows_bytes = strategy.loss_rows * DTYPE_BYTES["float32"]
        row = CommWork(kind="all_reduce", num_bytes=rows_bytes)
        found.append(([row] * _SOFTMAX_REDUCTIONS, []))
    return found


def _change_comm(
    graph: OperatorGraph, value: int, source: Layout, target: Layout
) -> tuple[_Comm, _Comm]:
    """Collectives of a change of layout of one value, forward and backward."""
    change = conversion(source, target)
    num_bytes = graph.values[value].size_bytes
    forward, backward = (
        [] if kind is None else [CommWork(kind=kind, num_bytes=num_bytes)]
        for kind in (change.forward, change.backward)
    )
    return forward, backward


def _temporaries(
    peaks: UnitPeaks, activations: Mapping[str, int], view: "_UnitView"
) -> dict[str, int]:
    """Peak beyond what is kept; recomputation brings the whole unit back for its backward."""
    highest = max(peaks.forward_bytes, peaks.backward_bytes) + view.score_bytes()
    return {
        "none": max(0, highest - activations["none"]),
        "selective": max(0, highest + view.unread_cache_bytes() - activations["selective"]),
        "full": max(0, highest - activations["full"]),
    }


def _recompute(kind: str, view: "_UnitView", conversions: _Conversions) -> RankWork:
    """Forward work done again; collectives as well where selective recomputation keeps outputs."""
    if kind == "none":
        return NO_WORK
    graph, unit = view.graph, view.problem.unit
    if kind == "selective" and view.kernels.selective == "attention":
        scored = [op for op in block_ops(unit) if graph.nodes[op].name in ATTENTIONS]
        return RankWork(ops=tuple(view.forward_works(scored)), comm=())
    if not view.kernels.recompute_stops_early:
        computed = again = set(block_ops(unit))
    else:
        computed = set(recomputed_ops(graph, unit, kind))
        again = set(recomputed_ops(graph, unit, "full"))
    comm: list[CommWork] = []
    for node, strategy in zip(view.problem.folded.nodes, view.chosen, strict=True):
        if node.ops and node.ops[-1] in again and strategy.outputs:
            for forward, _ in _exit_comm(graph, strategy):
                comm += forward
    read = {v for op in again for v in graph.nodes[op].inputs}
    for value, p, q in conversions:
        if value in read or value in view.saved_values:
            comm += _change_comm(graph, value, p, q)[0]
    ops = [op for op in unit.forward_ops if op in computed]
    return RankWork(ops=tuple(view.forward_works(ops)), comm=tuple(comm))


class _UnitView:
    """Lookups over one unit and its chosen strategies."""

    def __init__(
        self,
        problem: ShardingProblem,
        chosen: tuple[NodeStrategy, ...],
        saved_before: Set[int],
        kernels: KernelForms,
        gathered: frozenset[int],
    ) -> None:
        self.problem = problem
        self.kernels = kernels
        self._gathered_again = frozenset() if kernels.keeps_gathered_inputs else gathered
        self.chosen = chosen
        self.graph: OperatorGraph = problem.context.graph
        self._tp = problem.context.tp
        self._saved_before = saved_before
        self.own_ops = frozenset(problem.unit.forward_ops)
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
                part = 1 / self._tp if value in self._gathered_again else share(value)
                if storage in self._saved_before and part == self._boundary_share():
                    continue
                found[storage, part] = int(self.graph.storages[storage].size_bytes * part)
        return found

    def regathers(self) -> tuple[CommWork, ...]:
        """Gathers in backward of saved values that are not kept gathered."""
        return tuple(
            CommWork(kind="all_gather", num_bytes=self.graph.values[value].size_bytes)
            for value in sorted(self._gathered_again & self.saved_values)
        )

    def _boundary_share(self) -> float:
        return 1 / self._tp if self.problem.boundary.is_shard else 1.0

    def activation_bytes(self, kind: str) -> int:
        """Bytes kept between forward and backward for one microbatch."""
        unit = self.problem.unit
        if kind == "none":
            return sum(self._saved(unit.forward_ops).values()) + self.score_bytes()
        if kind == "selective" and self.kernels.selective == "attention":
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

    # -- kernels ----------------------------------------------------------------------------------

    def forward_works(self, op_ids: Sequence[int]) -> list[OpWork]:
        """Kernels of some forward ops."""
        found: list[OpWork] = []
        for op_id in op_ids:
            op = self.graph.nodes[op_id]
            if not op.is_view:
                work = forward_work(self.graph, op, self.shares[op_id])
                found += attention_works(work, self.kernels, self._itemsize(op))
        return found

    def backward_works(self) -> tuple[tuple[OpWork, ...], tuple[OpWork, ...]]:
        """Kernels of the backward pass: those on the way to the inputs, those for parameters."""
        inputs: list[OpWork] = []
        weights: list[OpWork] = []
        for forward_id, behind in backward_ops_by_forward(self.problem).items():
            forward = self.graph.nodes[forward_id] if forward_id in self.shares else None
            for op in behind:
                if op.is_view:
                    continue
                if forward is None:
                    weights.append(self._unowned_work(op))
                    continue
                work = backward_work(self.graph, op, forward, self.shares[forward_id])
                found = weights if self._is_for_weight(op, forward) else inputs
                found += attention_works(work, self.kernels, self._itemsize(op))
        return tuple(inputs), tuple(weights)

    def _is_for_weight(self, op: OpNode, forward: OpNode) -> bool:
        """A product of a layer with a parameter that does not read the parameter."""
        if op.name not in MATMULS:
            return False
        return self._reads_parameter(forward) and not self._reads_parameter(op)

    def _reads_parameter(self, op: OpNode) -> bool:
        return any(self.problem.context.is_parameter(value) for value in op.inputs)

    def _unowned_work(self, op: OpNode) -> OpWork:
        """Backward ops that belong to no forward op: sums of gradients."""
        share = self._boundary_share()
        return OpWork(
            kind="memory",
            flop=op.flop * share,
            read_bytes=op.read_bytes * share,
            write_bytes=op.write_bytes * share,
        )

    def _itemsize(self, op: OpNode) -> int:
        return DTYPE_BYTES[self.graph.values[op.outputs[0]].dtype] if op.outputs else 0

    def score_bytes(self) -> int:
        """What unfused attention keeps beyond fused: the weights, and what dropout makes."""
        total = 0.0
        for op_id in self.problem.unit.forward_ops:
            op = self.graph.nodes[op_id]
            if op.name in ATTENTIONS:
                work = forward_work(self.graph, op, self.shares[op_id])
                total += score_bytes(work, self.kernels, self._itemsize(op))
        return round(total)
