"""The end of a model whose loss is taken in chunks of rows: what it computes and keeps.

The product that makes the logits, what follows and the backward of all of it run for one chunk
after the other, in the forward pass. Each chunk reads the table of classes and adds to its
gradient. Between forward and backward lie the gradients of the states and of the table instead of
the logits; backward scales them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from planner.cost.liveness import unit_peaks
from planner.cost.op import OpWork
from planner.cost.unit_work import UnitWork
from planner.cost.work import Shares, backward_work, forward_work
from planner.graph.analysis.loss_rows import LossRows
from planner.graph.operator_graph import OperatorGraph, OpNode
from planner.runtime.layout import REPLICATE


@dataclass(frozen=True, kw_only=True)
class ChunkedLoss:
    """Rows of a loss in chunks."""

    graph: OperatorGraph
    """The model at the microbatch size."""
    rows: LossRows
    """Its end."""
    num_chunks: int
    """How many."""

    def holds(self, op: OpNode) -> bool:
        """Whether an op runs in chunks, forward or backward."""
        return op.id in self.rows.forward_ops or op.id in self.rows.backward_ops

    def added_to(self, rest: UnitWork) -> UnitWork:
        """The work of a unit, from that of its ops which do not run in chunks."""
        states_bytes = self.graph.values[self.rows.states].size_bytes
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
        forward = replace(rest.forward, ops=(*rest.forward.ops, made, *chunk * self.num_chunks))
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
    def _share(self) -> Shares:
        """A chunk's share of each value that its ops know: all of the table, however viewed."""
        values = self.graph.values
        tables = {values[value].storage for value in self.rows.weights}
        whole = {each: REPLICATE for each in self._values if values[each].storage in tables}
        return Shares(layouts=whole, ranks=self.num_chunks, otherwise=1 / self.num_chunks)

    @cached_property
    def _values(self) -> list[int]:
        """What its ops read and make: some of tens of thousands of values."""
        nodes = self.graph.nodes
        ops = [nodes[op] for op in (*self.rows.forward_ops, *self.rows.backward_ops)]
        return sorted({value for op in ops for value in (*op.inputs, *op.outputs)})

    def _chunk_works(self) -> Iterator[OpWork]:
        """Kernels of one chunk."""
        graph, nodes = self.graph, self.graph.nodes
        for op in (nodes[op_id] for op_id in self.rows.forward_ops):
            if not op.is_view:
                yield forward_work(graph, op, self._share)
        for op in (nodes[op_id] for op_id in self.rows.backward_ops):
            if op.is_view:
                continue
            assert op.forward_op is not None
            work = backward_work(graph, op, nodes[op.forward_op], self._share)
            size = self._weight_bytes_of(op)
            if size:  # added to what the chunks before made
                work = replace(work, read_bytes=work.read_bytes + size, write_bytes=size)
            yield work

    def _weight_bytes_of(self, op: OpNode) -> int:
        """Bytes of what an op makes of the gradients of parameters."""
        values = (self.graph.values[value] for value in op.outputs)
        return sum(
            value.size_bytes for value in values if value.storage in self.graph.parameter_gradients
        )

    def _weight_gradient_bytes(self) -> int:
        """Bytes of the gradients of table and bias."""
        made = {
            self.graph.values[value].storage
            for op in self.rows.backward_ops
            for value in self.graph.nodes[op].outputs
        }
        return sum(
            self.graph.storages[storage].size_bytes
            for storage in made & self.graph.parameter_gradients
        )

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
        peaks = unit_peaks(
            graph, rows.forward_ops, rows.backward_ops,
            dict.fromkeys(rows.forward_ops, self._share), states | gradients,
        )  # fmt: skip
        held = graph.values[logits].size_bytes // self.num_chunks
        return max(peaks.forward_bytes, peaks.backward_bytes) + held
