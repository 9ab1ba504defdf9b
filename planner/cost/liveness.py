"""How much memory a unit needs on one rank while it runs, what it keeps for backward included.

Its ops are replayed, forward and then backward: a storage lives from the op that makes it to the
last that reads it, or to that before which code has ceased to name it, a saved one to its last
reader in the backward pass.
"""

from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import takewhile
from operator import itemgetter

from planner.cost.memory_pieces import AS_SHOWN, KernelMemory, Piece, Pieces, is_copy
from planner.cost.work import Shares
from planner.graph.analysis.lifetimes import Moment, live_bytes
from planner.graph.analysis.retained import KEPT_BY_SELECTIVE
from planner.graph.operator_graph import OperatorGraph
from planner.vocabulary import Recomputation


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPeaks:
    """Highest bytes of a unit's own storages, parameters apart."""

    forward_bytes: int
    """During forward, what is saved so far included."""
    backward_bytes: int
    """During backward, what is still saved included; gradients of parameters apart."""
    gradient_bytes: int
    """The same with the gradients of its parameters, each from when it is made to the end."""
    added_gradient_bytes: int
    """The same with each of them only while it is made: it is added to one that was there."""


def unit_peaks(
    graph: OperatorGraph,
    forward_ops: Sequence[int],
    backward_ops: Sequence[int],
    shares: Mapping[int, Shares],
    beside: KernelMemory = AS_SHOWN,
    held: Sequence[int] = (),
) -> dict[str, UnitPeaks]:
    """Replay a unit, by what of it is recomputed.

    A checkpoint runs it twice: first, when nothing is saved, and in backward as far as it takes to
    have all that is.

    Args:
        graph: The model.
        forward_ops: Its forward ops in order.
        backward_ops: Its backward ops in order.
        shares: Share of each value on a rank, by forward op.
        beside: What the graph does not show.
        held: Values that are held, by checkpoints for one, until all of the unit has run.
    """
    pieces = Pieces(graph, shares, beside)
    replay = _Replay(graph, pieces, beside, forward_ops, backward_ops)
    storages = {graph.values[value].storage for value in held}
    inputs = {piece for piece in pieces.entered if piece[0] in storages}
    products = [op for op in forward_ops if graph.nodes[op].name in KEPT_BY_SELECTIVE]
    kept = pieces.of((op, value) for op in products for value in graph.nodes[op].outputs)
    return {
        Recomputation.NONE: replay.peaks(),
        Recomputation.SELECTIVE: replay.checkpointed(inputs, kept),
        Recomputation.FULL: replay.checkpointed(inputs, set()),
    }


class _Replay:
    """A unit's ops in time, on one rank."""

    def __init__(
        self,
        graph: OperatorGraph,
        pieces: Pieces,
        beside: KernelMemory,
        forward_ops: Sequence[int],
        backward_ops: Sequence[int],
    ) -> None:
        self._graph, self._pieces, self._beside = graph, pieces, beside
        self._ahead, behind = pieces.named(forward_ops, backward_ops)
        self._moments = [*self._ahead, *behind]
        nodes = graph.nodes
        saved = {op: (*nodes[op].saved_inputs, *nodes[op].saved_outputs) for op in forward_ops}
        self._saved = pieces.of((op, value) for op, values in saved.items() for value in values)
        # A weight that units share: the other's gradient, and their sum, are there on some stages.
        joined = _joined_gradients(graph, backward_ops)
        elsewhere = {each for each in pieces.entered if each[0] in beside.kept_elsewhere}
        elsewhere |= {piece for piece in pieces.sizes if beside.is_kept_behind(piece)}
        own = {piece: size for piece, size in pieces.sizes.items() if piece not in elsewhere}
        self._sizes = {
            piece: size for piece, size in own.items() if piece[0] not in graph.parameter_gradients
        }
        self._with_gradients = {
            piece: size for piece, size in own.items() if piece[0] not in joined
        }

    def checkpointed(self, inputs: Set[Piece], kept: Set[Piece]) -> UnitPeaks:
        """As a checkpoint runs it, which holds inputs and keeps some of what it makes.

        The gradient of what the unit returns waits meanwhile, gathered where it is.
        """
        again = self.peaks(inputs, _num_before(self._ahead, self._beside.stops_before))
        first = self._replayed(self._ahead, self._sizes, self._ends(self._ahead, kept, inputs))
        there = {piece for moment in self._ahead for piece in moment.touched}
        gathered = takewhile(lambda moment: not moment.ops, self._moments[len(self._ahead) :])
        begun = set[Hashable](self._pieces.entered).union(*(each.touched for each in gathered))
        waiting = [p for p in self._sizes if not is_copy(p) and p in begun - there]
        gradient_bytes = sum(self._sizes[piece] for piece in waiting)
        return replace(again, forward_bytes=max(again.forward_bytes + gradient_bytes, *first, 0))

    def peaks(self, held: Set[Piece] = frozenset(), num_again: int | None = None) -> UnitPeaks:
        """As forward and backward run it, with some pieces held; forward so far as said."""
        num_forward = len(self._ahead)
        moments, counted = self._moments, self._with_gradients
        ends = self._ends(moments, self._saved, held)
        whole = dict.fromkeys(
            (p for p in self._pieces.sizes if p[0] in self._graph.whole_gradients), len(moments)
        )
        without = self._replayed(moments, self._sizes, ends)
        return UnitPeaks(
            forward_bytes=max(without[:num_forward][:num_again], default=0),
            backward_bytes=max(without[num_forward:], default=0),
            gradient_bytes=max(
                self._replayed(moments, counted, ends | whole)[num_forward:], default=0
            ),
            added_gradient_bytes=max(
                self._replayed(moments, counted, ends)[num_forward:], default=0
            ),
        )

    def _ends(
        self, moments: Sequence[Moment], saved: Set[Piece], held: Set[Piece]
    ) -> dict[Hashable, int]:
        """Position of the moment after which each piece is free."""
        last = _last_uses(moments, saved, len(self._ahead))
        if self._beside.names_hold:
            _hold_named(self._graph, self._ahead, self._pieces.named_pieces, last)
        return last | dict.fromkeys(held, len(moments))

    def _replayed(
        self,
        moments: Sequence[Moment],
        counted: Mapping[Piece, int],
        ends: Mapping[Hashable, int],
    ) -> list[int]:
        """Bytes alive during each moment, workspaces included."""
        spaces = self._beside.workspaces
        return [
            now_bytes + max((spaces.get(op.id, 0) for op in moment.ops), default=0)
            for now_bytes, moment in zip(live_bytes(moments, counted, ends), moments, strict=True)
        ]


def _num_before(forward: Sequence[Moment], op: int | None) -> int:
    """Number of moments up to the last op that runs before this one; all where it is None."""
    ops = [(at, moment.ops[0].id) for at, moment in enumerate(forward) if moment.ops]
    before = [at for at, each in ops if op is not None and each < op]
    return len(forward) if op is None else max(before, default=-1) + 1


def _hold_named(
    graph: OperatorGraph,
    forward: Sequence[Moment],
    named: Mapping[int, Piece],
    last: dict[Hashable, int],
) -> None:
    """Let what code names be free no sooner than it ends to name it, or its unit ends.

    A module changes the layout of what it made before it returns.
    """
    begins = [(moment.ops[0].id, at) for at, moment in enumerate(forward) if moment.ops]
    ends = [*(at - 1 for _, at in begins[1:]), len(forward) - 1]
    for storage, piece in named.items():
        until = graph.storages[storage].named_until
        found = 0 if until is None else bisect_right(begins, until, key=itemgetter(0))
        if found and piece in last:
            last[piece] = max(last[piece], ends[found - 1])


def _joined_gradients(graph: OperatorGraph, backward_ops: Sequence[int]) -> set[int]:
    """Gradients of parameters that some ops read and do not make, and what is made with them."""
    made: set[int] = set()
    joined: set[int] = set()
    for op in (graph.nodes[op_id] for op_id in backward_ops):
        read = {graph.values[value].storage for value in op.inputs} & graph.parameter_gradients
        results = {graph.values[value].storage for value in op.outputs}
        foreign = read - made
        joined |= foreign
        if foreign:
            joined |= (results & graph.parameter_gradients) - made
        made |= results
    return joined


def loss_workspaces(
    graph: OperatorGraph, backward_ops: Sequence[int], sums: Set[int], shares: Mapping[int, Shares]
) -> dict[int, int]:
    """What backward of ops of a loss over a split vocabulary makes beyond that of a whole one.

    torch's loss_parallel adds the exponentials of the log-probabilities to its gradient in a
    tensor of its own.
    """
    found = {}
    for op in (graph.nodes[op_id] for op_id in backward_ops):
        forward = None if op.forward_op is None else graph.nodes[op.forward_op]
        if forward is not None and forward.id in sums and forward.name == "_log_softmax":
            share, outputs = shares[forward.id], forward.outputs
            found[op.id] = sum(int(graph.values[v].size_bytes * share(v)) for v in outputs)
    return found


def _last_uses(
    moments: Sequence[Moment], saved: Set[Piece], num_forward: int
) -> dict[Hashable, int]:
    """Position of the moment after which each piece is free.

    What is saved but never read in backward (its reader belongs to another unit, or it is kept
    for its shape only) stays until the end.
    """
    last = {piece: position for position, moment in enumerate(moments) for piece in moment.touched}
    for piece in saved:
        if last.get(piece, 0) < num_forward:
            last[piece] = len(moments)
    return last
