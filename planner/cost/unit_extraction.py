"""Counts the work of one microbatch of a unit from its graph and chosen layouts."""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace

from planner.cost.attention import attention_works, score_bytes
from planner.cost.divided_backward import waiting_gradient_bytes, waiting_ops
from planner.cost.float8 import Float8Products, float8_products
from planner.cost.fusion import Kernel, PointwiseFusion
from planner.cost.liveness import UnitPeaks, loss_workspaces, unit_peaks
from planner.cost.memory_pieces import KernelMemory
from planner.cost.node_pricing import backward_ops_by_forward
from planner.cost.op import OpWork
from planner.cost.selective import kept_ops
from planner.cost.unit_comm import (
    Conversions,
    boundary_comm,
    conversion_comm,
    gathered_values,
    joined_comm,
    node_comm,
    rank_work,
    return_works,
    routing_works,
)
from planner.cost.unit_parameters import UnitParameters
from planner.cost.unit_work import NO_WORK, CommWork, RankWork, UnitWork
from planner.cost.work import (
    Shares,
    backward_work,
    forward_work,
    makes_weight_gradient,
    shares_by_op,
    unowned_work,
)
from planner.framework.spec import TORCH_KERNELS, KernelForms
from planner.graph.analysis.retained import block_ops, recomputed_ops, saved_values, stop_of
from planner.graph.analysis.shared import passing_storages
from planner.graph.operator_graph import OperatorGraph, OpNode, StorageKind, UnitKind
from planner.runtime.op_rules import ATTENTIONS
from planner.strategy.nodes import NodeStrategy
from planner.strategy.problem import ShardingProblem
from planner.units import DTYPE_BYTES
from planner.vocabulary import RECOMPUTATIONS, Recomputation

Part = Callable[[OpNode], bool]
"""Tells which ops of a unit are meant."""


def unit_work(
    problem: ShardingProblem,
    chosen: tuple[NodeStrategy, ...],
    conversions: Conversions,
    *,
    kept_behind: Set[int] = frozenset(),
    kernels: KernelForms = TORCH_KERNELS,
    part: Part | None = None,
) -> UnitWork:
    """Count the work of a unit.

    Args:
        problem: The unit.
        chosen: The strategy of each node.
        conversions: Changes of layout in front of modules.
        kept_behind: Storages that the unit behind keeps and counts.
        kernels: How attention is computed and what recomputation runs again.
        part: Ops to count the work of; None for all of the unit's. Parameters are all of its.
    """
    parameters = UnitParameters(problem, chosen)
    problem = problem if part is None else _only(problem, part)
    view = _UnitView(problem, chosen, kept_behind, kernels, gathered_values(chosen, conversions))
    ops = problem.unit.forward_ops, problem.unit.backward_ops
    peaks = unit_peaks(view.graph, *ops, view.shares, view.kernel_memory(), view.own_inputs())
    kept = {kind: view.activation_bytes(kind) for kind in RECOMPUTATIONS}
    there, back = map(view.sent, boundary_comm(problem, chosen, conversions, view.own_ops))
    inputs, weights = view.backward_works()
    return UnitWork(
        structure=problem.unit.structure,
        forward=rank_work(view.forward_works(ops[0]), there, kernels),
        input_backward=rank_work(inputs, back + view.regathers(), kernels),
        weight_backward=RankWork(ops=weights, comm=()),
        recompute={kind: _recompute(kind, view, conversions) for kind in RECOMPUTATIONS},
        activation_bytes=kept,
        temporary_bytes=_temporaries("backward_bytes", peaks, kept, view),
        gradient_temporary_bytes=_temporaries("gradient_bytes", peaks, kept, view),
        added_temporary_bytes=_temporaries("added_gradient_bytes", peaks, kept, view),
        trained_elements=parameters.elements(trained=True),
        last_trained_elements=parameters.last_trained_elements(),
        frozen_elements=parameters.elements(trained=False),
        experts_trained_elements=parameters.elements(trained=True, experts=True),
        experts_frozen_elements=parameters.elements(trained=False, experts=True),
        outer_trained_elements=parameters.elements(trained=True, outer=True),
        outer_frozen_elements=parameters.elements(trained=False, outer=True),
        summed_gradient_elements=parameters.summed_gradient_elements(),
        waiting_gradient_bytes=waiting_gradient_bytes(view.graph, *ops, view.shares),
        released_bytes=view.released_bytes(),
        trained_tensors=parameters.trained_tensors(),
        offloaded_bytes=tuple(view.offloaded_bytes()),
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


def _temporaries(
    backward: str, peaks: Mapping[str, UnitPeaks], kept: Mapping[str, int], view: "_UnitView"
) -> dict[str, int]:
    """Peak beyond what is kept; recomputation brings the whole unit back for its backward."""
    beside = view.score_bytes() + view.exchanged_bytes()
    highest = {k: max(p.forward_bytes, getattr(p, backward)) + beside for k, p in peaks.items()}
    highest[Recomputation.SELECTIVE] += view.unread_cache_bytes()
    return {kind: max(0, each - kept[kind]) for kind, each in highest.items()}


def _recompute(kind: str, view: "_UnitView", conversions: Conversions) -> RankWork:
    """Forward work done again; collectives as well where selective recomputation keeps outputs."""
    if kind == Recomputation.NONE:
        return NO_WORK
    graph, unit = view.graph, view.problem.unit
    if kind == Recomputation.SELECTIVE and view.kernels.selective == "attention":
        scored = [op for op in block_ops(unit) if graph.nodes[op].name in ATTENTIONS]
        return RankWork(ops=tuple(view.forward_works(scored)), comm=())
    if not view.kernels.recompute_stops_early:
        computed = again = set(block_ops(unit))
    else:
        again = set(recomputed_ops(graph, unit, Recomputation.FULL))
        computed = again - view.kept_ops if kind == Recomputation.SELECTIVE else again
    comm: list[CommWork] = []
    for node, strategy in zip(view.problem.folded.nodes, view.chosen, strict=True):
        if again.isdisjoint(node.ops):
            continue
        entries, exits = node_comm(view.problem, node, strategy)
        comm += joined_comm(forward for forward, _ in entries)
        if node.ops[-1] in again and strategy.outputs:
            comm += joined_comm(forward for forward, _ in exits)
    read = {v for op in again for v in graph.nodes[op].inputs}
    for value, p, q in conversions:
        if value in read or value in view.saved_values:
            comm += conversion_comm(view.problem, value, p, q)[0]
    ops = [op for op in unit.forward_ops if op in computed]
    return rank_work(view.forward_works(ops, again), view.sent(comm), view.kernels)


class _UnitView:
    """Lookups over one unit and its chosen strategies."""

    def __init__(
        self,
        problem: ShardingProblem,
        chosen: tuple[NodeStrategy, ...],
        kept_behind: Set[int],
        kernels: KernelForms,
        gathered: frozenset[int],
    ) -> None:
        self.problem = problem
        self.kernels = kernels
        self.graph: OperatorGraph = problem.context.graph
        again = frozenset() if kernels.keeps_gathered_inputs else gathered
        self._gathered_again = {self.graph.values[value].storage for value in again}
        self.chosen = chosen
        self._tp = problem.context.ranks
        self._kept_behind = kept_behind
        self.own_ops = frozenset(problem.unit.forward_ops)
        self.kept_ops = kept_ops(kernels, self.graph, problem.unit)
        self._passing = passing_storages(self.graph, problem.unit)
        self.shares = shares_by_op(problem, chosen)
        self.saved_values = saved_values(self.graph, problem.unit.forward_ops)
        self._fusion: PointwiseFusion | None = None
        self._float8: Float8Products | None = None
        fuses_blocks = kernels.pointwise != "as_written"
        if kernels.float8 and problem.unit.kind is UnitKind.BLOCK:
            self._float8 = float8_products(problem, chosen, gathered, kernels)
        fuses = {UnitKind.BLOCK: fuses_blocks, UnitKind.EPILOGUE: kernels.fuses_loss}
        if fuses.get(problem.unit.kind):
            forward = self._forward_kernels(problem.unit.forward_ops)
            joins_norms = kernels.pointwise != "by_hand"
            self._fusion = PointwiseFusion(self.graph, forward, joins_norms=joins_norms)

    def sent(self, comm: Sequence[CommWork]) -> tuple[CommWork, ...]:
        """Collectives as ranks of a block send what they carry."""
        return tuple(comm) if self._float8 is None else self._float8.sent(comm)

    def kernel_memory(self) -> KernelMemory:
        """What the graph does not show: fused kernels, losses, products in float8."""
        inner: set[int] = set()
        if self._fusion is not None:
            forward = self._forward_kernels(self.problem.unit.forward_ops)
            inner = self._fusion.inner_storages(forward, self._backward_kernels())
        in_place, backward_ops = self.kernels.splits_loss_in_place, self.problem.unit.backward_ops
        sums = {each.op for strategy in self.chosen for each in strategy.row_sums if not in_place}
        found = loss_workspaces(self.graph, backward_ops, sums, self.shares)
        if self._float8 is not None:
            own = self._forward_kernels(self.problem.unit.forward_ops) + self._backward_kernels()
            for each in filter(self._float8.has, own):
                found[each.op.id] = self._float8.held_bytes(each)
        end = stop_of(self.graph, self.problem.unit)
        return KernelMemory(
            inner=inner,
            workspaces=found,
            gathered_again=self._gathered_again,
            copies_operands=self.kernels.copies_operands,
            kept_elsewhere=self._passing,
            kept_behind={
                each: int(self.graph.storages[each].size_bytes * self._boundary_share())
                for each in self._kept_behind
            },
            enters_whole=not self.problem.boundary.is_shard,
            names_hold=self._fusion is None,
            stops_before=end if self.kernels.recompute_stops_early else None,
        )

    def _own_storage(self, value: int) -> int | None:
        """Storage of an activation, None for shared ones, parameters, buffers and inputs."""
        storage = self.graph.storages[self.graph.values[value].storage]
        own = storage.kind is StorageKind.ACTIVATION and storage.id not in self._passing
        return storage.id if own else None

    def _saved(self, op_ids: Sequence[int]) -> dict[tuple[int, float, bool], int]:
        """Bytes on a rank of what some forward ops save; gathered or exchanged copies beside it."""
        found: dict[tuple[int, float, bool], int] = {}
        for op_id in op_ids:
            op = self.graph.nodes[op_id]
            share = self.shares[op_id]
            for value in (*op.saved_inputs, *op.saved_outputs):
                storage = self._own_storage(value)
                if storage is None:
                    continue
                part = 1 / self._tp if storage in self._gathered_again else share(value)
                if storage in self._kept_behind and part == self._boundary_share():
                    continue
                inside = op.name in ATTENTIONS and share.is_copied(value)
                for kept in self._kept(storage):
                    found[kept, part, inside] = int(self.graph.storages[kept].size_bytes * part)
        return found

    def exchanged_bytes(self) -> int:
        """What attention keeps of values that ranks exchange and that others keep as well."""
        saved = self._saved(self.problem.unit.forward_ops)
        outside = {storage for storage, _, inside in saved if not inside}
        return sum(size for (key, _, inside), size in saved.items() if inside and key in outside)

    def released_bytes(self) -> int:
        """What the last unit no longer holds when the inputs' part of its backward is over."""
        unit = self.problem.unit
        if unit.kind is not UnitKind.EPILOGUE:
            return 0
        waiting = self._saved(waiting_ops(self.graph, unit.forward_ops))
        return sum(self._saved(unit.forward_ops).values()) - sum(waiting.values())

    def _kept(self, storage: int) -> list[int]:
        """The storage, or those from which a fused kernel computes it again."""
        sources = {storage} if self._fusion is None else self._fusion.sources(storage)
        kind = StorageKind.ACTIVATION
        return [each for each in sorted(sources) if self.graph.storages[each].kind is kind]

    def regathers(self) -> tuple[CommWork, ...]:
        """Gathers in backward of saved values that are not kept gathered."""
        saved = {self.graph.values[value].storage for value in self.saved_values}
        return tuple(
            CommWork(kind="all_gather", num_bytes=self.graph.storages[storage].size_bytes)
            for storage in sorted(self._gathered_again & saved)
        )

    def _boundary_share(self) -> float:
        problem, around = self.problem, self.problem.around
        share = 1 / self._tp if problem.boundary.is_shard else 1.0
        return share / around.ranks if around and around.boundary.is_shard else share

    def activation_bytes(self, kind: str) -> int:
        """Bytes kept between forward and backward for one microbatch."""
        unit = self.problem.unit
        if kind == Recomputation.NONE:
            return sum(self._saved(unit.forward_ops).values()) + self.score_bytes()
        if kind == Recomputation.SELECTIVE and self.kernels.selective == "attention":
            return sum(self._saved(unit.forward_ops).values())
        behind = self._saved(unit.forward_ops[unit.num_block_ops :])
        kept = self.boundary_bytes(self.own_inputs()) + sum(behind.values())
        if kind == Recomputation.FULL:
            return kept - sum(self.offloaded_bytes())
        values, twice = self.graph.values, {storage for storage, *_ in behind}
        cached = self._cached().items()
        return kept + sum(size for each, size in cached if values[each].storage not in twice)

    def own_inputs(self) -> list[int]:
        """Activations that the unit before hands to it."""
        inputs = self.problem.folded.boundary_inputs
        return [value for value in inputs if self._own_storage(value) is not None]

    def offloaded_bytes(self) -> list[int]:
        """Inputs that full recomputation keeps in host memory: those with gradients."""
        if not self.kernels.keeps_inputs_on_host:
            return []
        trained = (v for v in self.own_inputs() if self.graph.values[v].requires_grad)
        return [self.boundary_bytes([value]) for value in trained]

    def _cached(self) -> dict[int, int]:
        """Bytes on a rank of the outputs that selective recomputation keeps."""
        found: dict[int, int] = {}
        for op_id in sorted(self.kept_ops):
            for value in self.graph.nodes[op_id].outputs:
                share = self.shares[op_id](value)
                if self.graph.values[value].storage not in self._kept_behind:
                    found[value] = int(self.graph.values[value].size_bytes * share)
        return found

    def unread_cache_bytes(self) -> int:
        """Cached outputs that recomputation does not fetch, so that they stay to its end."""
        again = recomputed_ops(self.graph, self.problem.unit, Recomputation.FULL)
        fetched = {value for op in again for value in self.graph.nodes[op].outputs}
        return sum(size for value, size in self._cached().items() if value not in fetched)

    def boundary_bytes(self, values: Sequence[int]) -> int:
        """Bytes on a rank of values at the unit's boundary."""
        share = self._boundary_share()
        return sum(int(self.graph.values[value].size_bytes * share) for value in values)

    def forward_works(self, op_ids: Sequence[int], run: Set[int] | None = None) -> list[OpWork]:
        """Kernels of some forward ops, and what brings their rows to experts and back.

        Args:
            op_ids: The ops.
            run: All that run, where some of them are fetched; None for those alone.
        """
        kernels = self._forward_kernels(op_ids)
        if self._fusion is not None:
            kernels = self._fusion.kernels(kernels)
        works = [work for kernel in kernels for work in self._works(kernel)]
        run = frozenset(op_ids) if run is None else run
        for node, strategy in zip(self.problem.folded.nodes, self.chosen, strict=True):
            if strategy.routed is not None and not run.isdisjoint(node.ops):
                works += routing_works(strategy.routed)[0]
                works += return_works(strategy.routed)[0] if node.ops[-1] in run else []
        return works

    def _forward_kernels(self, op_ids: Sequence[int]) -> list[Kernel]:
        found = []
        for op in (self.graph.nodes[op_id] for op_id in op_ids):
            if not op.is_view:
                share = self.shares[op.id]
                work = forward_work(self.graph, op, share)
                found.append(Kernel(op=op, forward=op, share=share, work=work))
        return found

    def _works(self, kernel: Kernel) -> list[OpWork]:
        """A kernel, or those that unfused attention and a product in float8 consist of."""
        if self._float8 is not None and self._float8.has(kernel):
            return self._float8.works(kernel)
        return attention_works(kernel.work, self.kernels, self._itemsize(kernel.op))

    def backward_works(self) -> tuple[tuple[OpWork, ...], tuple[OpWork, ...]]:
        """Kernels of the backward pass: those on the way to the inputs, those for parameters."""
        inputs: list[OpWork] = []
        weights: list[OpWork] = []
        kernels = self._backward_kernels()
        if self._fusion is not None:
            kernels = self._fusion.kernels(kernels)
        for kernel in kernels:
            is_last = kernel.forward is None or makes_weight_gradient(self.graph, kernel.op)
            found = weights if is_last else inputs
            found += self._works(kernel)
        for routed in (each.routed for each in self.chosen if each.routed is not None):
            inputs += routing_works(routed)[1] + return_works(routed)[1]
        return tuple(inputs), tuple(weights)

    def _backward_kernels(self) -> list[Kernel]:
        found = []
        for forward_id, behind in backward_ops_by_forward(self.problem).items():
            forward = self.graph.nodes[forward_id] if forward_id in self.shares else None
            share = self.shares.get(forward_id, Shares(otherwise=self._boundary_share()))
            for op in (op for op in behind if not op.is_view):
                work = (
                    unowned_work(op, self._boundary_share())
                    if forward is None
                    else backward_work(self.graph, op, forward, share)
                )
                found.append(Kernel(op=op, forward=forward, share=share, work=work))
        return found

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
