"""Chains of pointwise kernels as one kernel each: a compiler's, or written by hand.

Ops between two matmuls, attentions or row gathers that hand tensors to one another, or read the
same one, run as one kernel, which reads what was made outside of it and writes what is read
outside of it, at the speed of a copy. What backward needs of a forward kernel's inner tensors it
computes again from that kernel's inputs, which costs no traffic of its own. Norms join their
neighbours where a compiler fuses; kernels written by hand have them apart.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace

from planner.cost.op import OpWork
from planner.cost.work import NORMS, Shares, backward_shares, op_kind
from planner.graph.operator_graph import OperatorGraph, OpNode, Phase, StorageKind

_FUSABLE = frozenset({"memory", "reduction"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """An op with its work on one rank, or several in one."""

    op: OpNode
    """The op, one of several."""
    forward: OpNode | None
    """The forward op that it is or differentiates, None where there is none."""
    share: Shares
    """Share of each forward value that the rank holds."""
    work: OpWork
    """What it computes and moves."""


class PointwiseFusion:
    """Joins the kernels of one unit."""

    def __init__(
        self, graph: OperatorGraph, forward: Sequence[Kernel], *, joins_norms: bool = True
    ) -> None:
        """Find what the unit's forward kernels write for others.

        Args:
            graph: The unit's graph.
            forward: All forward ops of the unit that move bytes, in order.
            joins_norms: Norms are part of the kernels beside them.
        """
        self._graph = graph
        self._joins_norms = joins_norms
        self._readers: dict[int, set[int]] = defaultdict(set)
        for op in graph.nodes:
            if not op.is_view:
                for storage in self._storages(op.inputs):
                    self._readers[storage].add(op.id)
        self._inner: dict[int, dict[int, float]] = {}
        for group in self._groups(forward):
            if _is_fusable(group[0]):
                reads, made = self._operands(group)
                for storage in made.keys() - self._written(group, made.keys()):
                    self._inner[storage] = reads

    def sources(self, storage: int) -> Set[int]:
        """What backward keeps of a forward tensor: itself, or what it is computed again from."""
        return self._inner.get(storage, {storage: 0.0}).keys()

    def inner_storages(self, *passes: Sequence[Kernel]) -> set[int]:
        """Tensors that stay inside the kernels of the unit.

        Args:
            passes: Ops of each pass that move bytes.
        """
        found: set[int] = set()
        for group in (group for ops in passes for group in self._in_order(ops)):
            if _is_fusable(group[0]):
                made = self._operands(group)[1].keys()
                found |= made - self._written(group, made)
        return found

    def kernels(self, ops: Sequence[Kernel]) -> list[Kernel]:
        """Join the kernels of some ops of the unit.

        Args:
            ops: Ops of one pass that move bytes.
        """
        return [
            self._joined(group) if _is_fusable(group[0]) else group[0]
            for group in self._in_order(ops)
        ]

    def _in_order(self, ops: Sequence[Kernel]) -> list[list[Kernel]]:
        return self._groups(sorted(ops, key=lambda each: each.op.id))

    def _storages(self, values: Iterable[int]) -> set[int]:
        return {self._graph.values[value].storage for value in values}

    def _groups(self, ops: Sequence[Kernel]) -> list[list[Kernel]]:
        """Ops that become one kernel each, in order of their first."""
        found: list[list[Kernel]] = []
        open_groups: list[list[Kernel]] = []
        for each in ops:
            if not _is_fusable(each):
                found += [*open_groups, [each]]
                open_groups = []
                continue
            touched = self._links(each)
            joined = [
                g
                for g in open_groups
                if not self._is_apart(g[0])
                and not self._is_apart(each)
                and any(touched & self._links(o) for o in g)
            ]
            merged = [other for group in joined for other in group] + [each]
            open_groups = [g for g in open_groups if g not in joined] + [merged]
        return found + open_groups

    def _is_apart(self, kernel: Kernel) -> bool:
        return not self._joins_norms and kernel.op.name in NORMS

    def _links(self, kernel: Kernel) -> set[int]:
        """Activations that an op reads or makes."""
        touched = self._storages((*kernel.op.inputs, *kernel.op.outputs))
        kind = StorageKind.ACTIVATION
        return {each for each in touched if self._graph.storages[each].kind is kind}

    def _written(self, group: Sequence[Kernel], made: Set[int]) -> set[int]:
        """What a kernel makes and others read; what nobody reads is a parameter's gradient."""
        members = {each.op.id for each in group}
        forward = group[0].op.phase is Phase.FORWARD
        found = set()
        for storage in made:
            readers = self._readers[storage] - members
            if forward:
                readers = {op for op in readers if not self._computes_again(op)}
            if readers or not self._readers[storage]:
                found.add(storage)
        return found

    def _computes_again(self, op_id: int) -> bool:
        """A pointwise op of backward, which takes inner tensors from their sources."""
        op = self._graph.nodes[op_id]
        return op.phase is Phase.BACKWARD and op_kind(op.name) in _FUSABLE

    def _joined(self, group: Sequence[Kernel]) -> Kernel:
        reads, made = self._operands(group)
        if group[0].op.phase is Phase.BACKWARD:
            sources: dict[int, float] = {}
            for storage, size in reads.items():
                sources |= self._inner.get(storage, {storage: size})
            reads = sources
        work = OpWork(
            kind="memory",
            flop=sum(each.work.flop for each in group),
            read_bytes=sum(reads.values()),
            write_bytes=sum(made[storage] for storage in self._written(group, made.keys())),
            backward=group[0].work.backward,
        )
        named = next((each for each in group if each.forward is not None), group[0])
        return replace(named, work=work)

    def _operands(self, group: Sequence[Kernel]) -> tuple[dict[int, float], dict[int, float]]:
        """Bytes on the rank of every storage that a kernel reads, and of those that it makes."""
        reads: dict[int, float] = {}
        made: dict[int, float] = {}
        for each in group:
            in_shares, out_shares = self._shares(each)
            self._add_sizes(reads, each.op.inputs, in_shares)
            self._add_sizes(made, each.op.outputs, out_shares)
        return {key: size for key, size in reads.items() if key not in made}, made

    def _shares(self, kernel: Kernel) -> tuple[list[float], list[float]]:
        op = kernel.op
        if op.phase is Phase.BACKWARD and kernel.forward is not None:
            return backward_shares(self._graph, op, kernel.forward, kernel.share)
        return [kernel.share(v) for v in op.inputs], [kernel.share(v) for v in op.outputs]

    def _add_sizes(
        self, sizes: dict[int, float], values: Sequence[int], shares: Sequence[float]
    ) -> None:
        """Note the largest part of each storage that some values are."""
        for value, share in zip(values, shares, strict=True):
            tensor = self._graph.values[value]
            whole = min(tensor.size_bytes, self._graph.storages[tensor.storage].size_bytes)
            sizes[tensor.storage] = max(sizes.get(tensor.storage, 0.0), whole * share)


def _is_fusable(kernel: Kernel) -> bool:
    return kernel.work.kind in _FUSABLE
