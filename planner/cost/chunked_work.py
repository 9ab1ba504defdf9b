"""The end of a model whose loss is taken in chunks of rows: what it computes and keeps.

The product that makes the logits, what follows and the backward of all of it run for one chunk
after the other, in the forward pass. Each chunk reads the table of classes and adds to its
gradient. Between forward and backward lie the gradients of the states and of the table instead of
the logits; backward scales them.

Ranks of an axis have some of the rows or some of the classes each. What is summed over a row's
classes is summed for one chunk after the other.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from planner.cost.liveness import loss_workspaces, unit_peaks
from planner.cost.memory_pieces import KernelMemory
from planner.cost.op import OpWork
from planner.cost.unit_comm import chunked_comm
from planner.cost.unit_work import UnitWork
from planner.cost.work import (
    Shares,
    backward_shares,
    backward_work,
    forward_work,
    shares_by_op,
)
from planner.graph.analysis.loss_rows import LossRows
from planner.graph.operator_graph import OperatorGraph, OpNode
from planner.runtime.layout import REPLICATE
from planner.strategy.nodes import NodeStrategy
from planner.strategy.problem import ShardingProblem
from planner.vocabulary import Recomputation


@dataclass(frozen=True, kw_only=True)
class ChunkedLoss:
    """Rows of a loss in chunks."""

    problem: ShardingProblem
    """The unit that ends in it."""
    chosen: tuple[NodeStrategy, ...]
    """The strategy of each of its nodes."""
    rows: LossRows
    """Its end."""
    num_chunks: int
    """How many."""

    @property
    def graph(self) -> OperatorGraph:
        """The model at the microbatch size."""
        return self.problem.context.graph

    def holds(self, op: OpNode) -> bool:
        """Whether an op runs in chunks, forward or backward."""
        return op.id in self.rows.forward_ops or op.id in self.rows.backward_ops

    def added_to(self, rest: UnitWork) -> UnitWork:
        """The work of a unit, from that of its ops which do not run in chunks."""
        states_bytes = self._states_bytes()
        weights_bytes = self._weight_gradient_bytes()
        gradients_bytes = states_bytes + weights_bytes
        alone = rest.activation_bytes
        kept = {kind: num_bytes + gradients_bytes for kind, num_bytes in alone.items()}
        chunk_bytes = states_bytes + self._chunk_bytes()

        def temporary(afterwards: Mapping[str, int]) -> dict[str, int]:
            """In chunks, or when their gradients are there and the rest runs backward."""
            return {
                kind: max(chunk_bytes, num_bytes + weights_bytes - gradients_bytes)
                for kind, num_bytes in afterwards.items()
            }

        made = OpWork(kind="memory", flop=0.0, read_bytes=0.0, write_bytes=gradients_bytes)
        scaled = OpWork(
            kind="memory", flop=0.0, read_bytes=gradients_bytes, write_bytes=gradients_bytes
        )
        chunk = tuple(self._chunk_works())
        comm = chunked_comm(self.problem, self.chosen, self.holds, self.num_chunks)
        forward = replace(
            rest.forward,
            ops=(*rest.forward.ops, made, *chunk * self.num_chunks),
            comm=(*rest.forward.comm, *comm),
        )
        backward = replace(rest.input_backward, ops=(scaled, *rest.input_backward.ops))
        return replace(
            rest,
            forward=forward,
            input_backward=backward,
            activation_bytes=kept,
            temporary_bytes=temporary(rest.temporary_bytes),
            gradient_temporary_bytes=temporary(rest.gradient_temporary_bytes),
            added_temporary_bytes=temporary(rest.added_temporary_bytes),
            lasting_bytes=weights_bytes,
        )

    @cached_property
    def _on_rank(self) -> dict[int, Shares]:
        """A rank's share of what each forward op knows."""
        shares = shares_by_op(self.problem, self.chosen)
        return {op: shares[op] for op in self.rows.forward_ops}

    @cached_property
    def _shares(self) -> dict[int, Shares]:
        """A chunk's part of it: all of the table, however viewed."""
        values = self.graph.values
        tables = {values[value].storage for value in self.rows.weights}
        whole = {each: REPLICATE for each in self._values if values[each].storage in tables}
        part = Shares(layouts=whole, ranks=self.num_chunks, otherwise=1 / self.num_chunks)
        return {op: replace(part, around=share) for op, share in self._on_rank.items()}

    def _states_bytes(self) -> int:
        """Bytes of what enters the product on a rank."""
        share = self._on_rank[self.rows.forward_ops[0]]
        return int(self.graph.values[self.rows.states].size_bytes * share(self.rows.states))

    @cached_property
    def _values(self) -> list[int]:
        """What its ops read and make: some of tens of thousands of values."""
        nodes = self.graph.nodes
        ops = [nodes[op] for op in (*self.rows.forward_ops, *self.rows.backward_ops)]
        return sorted({value for op in ops for value in (*op.inputs, *op.outputs)})

    def _chunk_works(self) -> Iterator[OpWork]:
        """Kernels of one chunk; a chunk of what a rank has whole is no part that ranks share."""
        graph, nodes = self.graph, self.graph.nodes
        for op in (nodes[op_id] for op_id in self.rows.forward_ops):
            if not op.is_view:
                whole = forward_work(graph, op, self._on_rank[op.id])
                work = forward_work(graph, op, self._shares[op.id])
                yield replace(work, is_split=whole.is_split)
        for op in (nodes[op_id] for op_id in self.rows.backward_ops):
            if op.is_view:
                continue
            assert op.forward_op is not None
            forward = nodes[op.forward_op]
            whole = backward_work(graph, op, forward, self._on_rank[forward.id])
            work = backward_work(graph, op, forward, self._shares[forward.id])
            work = replace(work, is_split=whole.is_split)
            size = self._weight_bytes_of(op)
            if size:  # added to what the chunks before made
                work = replace(work, read_bytes=work.read_bytes + size, write_bytes=size)
            yield work

    def _weight_bytes_of(self, op: OpNode) -> int:
        """Bytes on a rank of what an op makes of the gradients of parameters."""
        return sum(self._weight_gradients(op).values())

    def _weight_gradient_bytes(self) -> int:
        """Bytes on a rank of the gradients of table and bias."""
        found: dict[int, int] = {}
        for op in self.rows.backward_ops:
            found |= self._weight_gradients(self.graph.nodes[op])
        return sum(found.values())

    def _weight_gradients(self, op: OpNode) -> dict[int, int]:
        """Bytes on a rank of each gradient of a parameter that an op makes, by storage."""
        graph = self.graph
        assert op.forward_op is not None
        forward = graph.nodes[op.forward_op]
        _, shares = backward_shares(graph, op, forward, self._on_rank[forward.id])
        made = [graph.values[value].storage for value in op.outputs]
        return {
            storage: int(graph.storages[storage].size_bytes * share)
            for storage, share in zip(made, shares, strict=True)
            if storage in graph.parameter_gradients
        }

    def _chunk_bytes(self) -> int:
        """Most that a chunk holds beside rows of the states and of their gradient.

        Its logits stay from the product to the end of their backward, which asks for their
        gradient.
        """
        graph, rows = self.graph, self.rows
        product = graph.nodes[rows.forward_ops[0]]
        (logits,) = product.outputs
        states = {graph.values[rows.states].storage}
        storages = {graph.values[value].storage for value in self._values}
        gradients = {each for each in storages if graph.storages[each].gradient_of == rows.states}
        sums = {each.op for strategy in self.chosen for each in strategy.row_sums}
        beside = KernelMemory(
            inner=states | gradients,
            workspaces=loss_workspaces(graph, rows.backward_ops, sums, self._shares),
        )
        found = unit_peaks(graph, rows.forward_ops, rows.backward_ops, self._shares, beside)
        peaks = found[Recomputation.NONE]
        held = int(graph.values[logits].size_bytes * self._shares[product.id](logits))
        return max(peaks.forward_bytes, peaks.backward_bytes) + held
