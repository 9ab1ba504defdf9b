"""Memory of a whole step: the moments of forward and backward, with recomputation.

What autograd saves lives until its node has run, the gradient of a parameter to the end of the
step. A block that is recomputed frees what it does not keep at the end of its forward, and makes
it again before the first of its nodes that needs it; what enters the block lives until the last
of them has run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.graph.analysis.lifetimes import (
    Moment,
    activation_storages,
    live_bytes,
    moments_of,
    same_node,
)
from planner.graph.analysis.retained import (
    KEPT_BY_SELECTIVE,
    block_ops,
    by_unit,
    entering_values,
    recomputed_ops,
    saved_values,
)
from planner.graph.operator_graph import OperatorGraph, Phase, Unit
from planner.vocabulary import Recomputation


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPeaks:
    """Highest bytes of activations and gradients of one microbatch."""

    forward_bytes: int
    """During forward."""
    step_bytes: int
    """During forward and backward."""


def step_peaks(
    graph: OperatorGraph, recomputation: str | Sequence[str] = Recomputation.NONE
) -> StepPeaks:
    """Replay forward and backward of one microbatch.

    Counted are activations and the gradients of parameters, which are zero before. Not counted
    are parameters, buffers, inputs, optimiser states, the workspaces inside of kernels, and what
    variables of the model's code hold beyond its last use.

    Args:
        graph: The model.
        recomputation: That of every block, or one for each unit.
    """
    return _Step(graph, by_unit(graph, recomputation)).peaks()


class _RecomputedBlock:
    """What the replay knows of a block that is recomputed."""

    def __init__(self, graph: OperatorGraph, unit: Unit, recomputation: str) -> None:
        ops = block_ops(unit)
        self.ops = frozenset(ops)
        self.saved = saved_values(graph, ops)
        self.entering = activation_storages(graph, entering_values(graph, unit))
        self.cached: frozenset[int] = frozenset()
        self.again = moments_of(graph, recomputed_ops(graph, unit, Recomputation.FULL))
        if recomputation == Recomputation.SELECTIVE:
            # What is kept is fetched where it would be made.
            kept = [graph.nodes[op] for op in ops if graph.nodes[op].name in KEPT_BY_SELECTIVE]
            self.cached = activation_storages(graph, (value for op in kept for value in op.outputs))
            self.again = [_fetched(graph, each) for each in self.again]
        fetched = frozenset(each for moment in self.again for each in moment.touched)
        self.held = self.entering | (self.cached - fetched)
        made = activation_storages(
            graph, (value for op in ops for value in graph.nodes[op].outputs)
        )
        first_copy = len(graph.storages)
        self.copies = {each: first_copy + each for each in made - self.cached - self.entering}

    def renamed(self, moment: Moment) -> Moment:
        """Let a moment work on the copies that recomputation makes."""
        touched = frozenset(self.copies.get(each, each) for each in moment.touched)
        return Moment(ops=moment.ops, touched=touched)

    def needs(self, moment: Moment) -> bool:
        """Tell whether a moment reads what its forward saved."""
        return any(value in self.saved for op in moment.ops for value in op.inputs)


class _Step:
    """The moments of one step under recomputation, and how long each piece of memory lives."""

    def __init__(self, graph: OperatorGraph, recomputations: Sequence[str]) -> None:
        self._graph = graph
        self._blocks = {
            unit.index: _RecomputedBlock(graph, unit, each)
            for unit, each in zip(graph.units, recomputations, strict=True)
            if each != Recomputation.NONE
        }
        self._block_of_op = {op: block for block in self._blocks.values() for op in block.ops}
        forward = [op.id for op in graph.nodes if op.phase is Phase.FORWARD]
        self._stream = moments_of(graph, forward)
        self._num_forward = len(forward)
        self._node_ends: dict[int, int] = {}
        self._frame_ends: dict[_RecomputedBlock, int] = {}
        for moment in moments_of(graph, range(len(forward), len(graph.nodes))):
            self._append(moment)

    def _append(self, moment: Moment) -> None:
        forward_op = moment.ops[0].forward_op
        if same_node(self._stream[-1].ops[-1], moment.ops[0]):
            forward_op = None  # a sum of gradients, after the node has let go of what it saved
        block = None if forward_op is None else self._block_of_op.get(forward_op)
        if block is not None:
            if block.needs(moment):
                if block not in self._frame_ends:
                    self._stream.extend(block.renamed(each) for each in block.again)
                self._frame_ends[block] = len(self._stream)
            moment = block.renamed(moment)
        if forward_op is not None:
            self._node_ends[forward_op] = len(self._stream)
        self._stream.append(moment)

    def peaks(self) -> StepPeaks:
        sizes = {each.id: each.size_bytes for each in self._graph.storages}
        for block in self._blocks.values():
            sizes |= {copy: sizes[storage] for storage, copy in block.copies.items()}
        found = live_bytes(self._stream, sizes, self._last_uses())
        return StepPeaks(
            forward_bytes=max(found[: self._num_forward], default=0),
            step_bytes=max(found, default=0),
        )

    def _last_uses(self) -> dict[int, int]:
        last = {
            piece: position
            for position, moment in enumerate(self._stream)
            for piece in moment.touched
        }
        for op in self._graph.nodes[: self._num_forward]:
            saved = activation_storages(self._graph, (*op.saved_inputs, *op.saved_outputs))
            block = self._block_of_op.get(op.id)
            for storage in saved:
                piece = storage if block is None else block.copies.get(storage, storage)
                end = self._node_ends.get(op.id)
                if end is None:  # saved by a function that autograd knows by another op
                    end = last[piece] if last[piece] >= self._num_forward else len(self._stream)
                last[piece] = max(last[piece], end)
        for block, end in self._frame_ends.items():
            for storage in block.held:
                last[storage] = max(last[storage], end)
        for parameter in self._graph.parameters:
            if parameter.gradient is not None:
                last[parameter.gradient] = len(self._stream)
        return last


def _fetched(graph: OperatorGraph, moment: Moment) -> Moment:
    (op,) = moment.ops
    if op.name not in KEPT_BY_SELECTIVE:
        return moment
    return Moment(ops=moment.ops, touched=activation_storages(graph, op.outputs))
