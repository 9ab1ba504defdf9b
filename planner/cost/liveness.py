"""How much memory a unit needs on one rank while it runs, what it keeps for backward included.

Its ops are replayed, forward and then backward, as ``planner.graph.analysis.lifetimes`` replays a
whole step: a storage lives from the op that makes it to the last that reads it, a saved one to
its last reader in the backward pass.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from operator import itemgetter

from planner.cost.work import Shares, backward_shares
from planner.graph.analysis.lifetimes import Moment, by_op, live_bytes, moments_of
from planner.graph.operator_graph import OperatorGraph, OpNode, Phase, Storage, StorageKind


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelMemory:
    """What kernels and layouts keep otherwise than a graph shows."""

    inner: Set[int] = frozenset()
    """Storages that are never in memory: tensors inside a fused kernel."""
    workspaces: Mapping[int, int] = field(default_factory=dict)
    """Bytes that an op needs beside what it reads and makes."""
    gathered_again: Set[int] = frozenset()
    """Storages of saved values that are not kept gathered."""
    copies_operands: bool = False
    """Beside the collective of a change of layout there is a copy of the larger side."""
    enters_whole: bool = False
    """Ranks hold all of what other units made; else parts of what flows between units."""


AS_SHOWN = KernelMemory()
"""Nothing of it."""


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


_WHOLE = Shares()

_Piece = tuple[int, int, str]
"""A storage, its bytes on a rank, and what they are gathered for again in backward: "" for nothing.
Where a layout changes ranks hold both for a while, what was made and what is read."""

_AGAIN = "backward"
"""What saved values are gathered for again."""


def unit_peaks(
    graph: OperatorGraph,
    forward_ops: Sequence[int],
    backward_ops: Sequence[int],
    shares: Mapping[int, Shares],
    beside: KernelMemory = AS_SHOWN,
    held: Sequence[int] = (),
) -> tuple[UnitPeaks, UnitPeaks]:
    """Replay a unit, as it runs once and where something of what enters is held to its end.

    Args:
        graph: The model.
        forward_ops: Its forward ops in order.
        backward_ops: Its backward ops in order.
        shares: Share of each value on a rank, by forward op.
        beside: What the graph does not show.
        held: Values that are held, by checkpoints for one, until all of the unit has run.
    """
    pieces = _Pieces(graph, shares, beside)
    ahead, behind = pieces.named(forward_ops, backward_ops)
    moments, num_forward = [*ahead, *behind], len(ahead)
    saved, sizes = pieces.saved_by(forward_ops), pieces.sizes
    last = _last_uses(moments, saved, num_forward)
    # A weight that units share: the other's gradient, and their sum, are there on some stages.
    joined = _joined_gradients(graph, backward_ops)
    without_gradients = {
        piece: size for piece, size in sizes.items() if piece[0] not in graph.parameter_gradients
    }
    own = {piece: size for piece, size in sizes.items() if piece[0] not in joined}

    def replayed(counted: Mapping[_Piece, int], ends: Mapping[Hashable, int]) -> list[int]:
        return [
            now_bytes + max((beside.workspaces.get(op.id, 0) for op in moment.ops), default=0)
            for now_bytes, moment in zip(live_bytes(moments, counted, ends), moments, strict=True)
        ]

    def peaks(last: dict[Hashable, int]) -> UnitPeaks:
        without = replayed(without_gradients, last)
        whole = dict.fromkeys((p for p in sizes if p[0] in graph.whole_gradients), len(moments))
        return UnitPeaks(
            forward_bytes=max(without[:num_forward], default=0),
            backward_bytes=max(without[num_forward:], default=0),
            gradient_bytes=max(replayed(own, last | whole)[num_forward:], default=0),
            added_gradient_bytes=max(replayed(own, last)[num_forward:], default=0),
        )

    storages = {graph.values[value].storage for value in held}
    to_the_end = {piece: len(moments) for piece in pieces.entered if piece[0] in storages}
    once = peaks(last)
    return once, peaks(last | to_the_end) if to_the_end else once


@dataclass(frozen=True, slots=True)
class _Touch:
    """A value that an op reads or makes."""

    storage: int
    piece: _Piece
    is_one: bool
    """Whether its storage is one piece, whatever the layouts."""
    is_made: bool
    """Whether the op makes its storage, as far as the op tells."""
    reader: str = ""
    """Module that reads a gradient, which it gathers for itself; "" for any other touch."""


_Named = tuple[Moment, _Piece | None]
"""A moment; where less is left of a piece after it, that piece."""


class _Pieces:
    """Memory of a unit on one rank."""

    def __init__(
        self, graph: OperatorGraph, shares: Mapping[int, Shares], beside: KernelMemory
    ) -> None:
        self.sizes: dict[_Piece, int] = {}
        """Bytes of each."""
        self.entered: Set[_Piece] = frozenset()
        """Those that are there when the unit begins."""
        self._graph = graph
        self._shares = shares
        self._beside = beside
        self._newest: dict[int, _Piece] = {}
        self._begun: set[_Piece] = set()
        self._num_copies = 0

    def named(
        self, forward_ops: Sequence[int], backward_ops: Sequence[int]
    ) -> tuple[list[Moment], list[Moment]]:
        """Name the pieces that ops touch, in moments; layouts change in moments between them.

        What enters comes as the smallest part of it that is read, or the largest.
        """
        forward = moments_of(self._graph, forward_ops)
        backward = by_op(self._graph, moments_of(self._graph, backward_ops))
        as_entered = max if self._beside.enters_whole else min
        touches = [[*self._touches(moment)] for moment in (*forward, *backward)]
        made: set[int] = set()
        entering: dict[int, _Piece] = {}
        for each in (each for of_moment in touches for each in of_moment):
            if each.is_made and each.storage not in entering:
                made.add(each.storage)
            elif each.storage not in made and not each.is_one:
                known = entering.get(each.storage, each.piece)
                entering[each.storage] = as_entered(known, each.piece)
        self._newest |= entering
        self.entered = frozenset(entering.values())
        named = [
            [*self._named(moment, own)]
            for moment, own in zip((*forward, *backward), touches, strict=True)
        ]
        return _in_time(named[: len(forward)]), _in_time(named[len(forward) :])

    def _touches(self, moment: Moment) -> Iterator[_Touch]:
        graph = self._graph
        for op in moment.ops:
            forward = op if op.forward_op is None else graph.nodes[op.forward_op]
            share = self._shares.get(forward.id, _WHOLE)
            read = {graph.values[value].storage for value in op.inputs}
            for value, part in _parts(graph, op, forward, share):
                part = part if op.inputs else 1.0  # code that makes a tensor makes all of it
                storage = graph.storages[graph.values[value].storage]
                if storage.kind is StorageKind.ACTIVATION:
                    # What attention exchanges is counted with what it keeps, and no gradient of a
                    # parameter changes its layout.
                    is_one = share.is_copied(value) or storage.id in graph.parameter_gradients
                    piece = self._piece(storage, part, op.phase)
                    is_read = storage.id in read
                    reader = op.module if is_read and storage.gradient_of is not None else ""
                    yield _Touch(storage.id, piece, is_one, not is_read, reader)

    def _named(self, moment: Moment, touches: Iterable[_Touch]) -> Iterator[_Named]:
        touched: set[Hashable] = set()
        for touch in touches:
            before = self._newest.get(touch.storage, touch.piece)
            piece = before if touch.is_one else touch.piece
            is_gathered = piece[1] > before[1] and piece not in self._begun
            is_own = bool(touch.reader) and is_gathered
            piece = (*piece[:2], touch.reader) if is_own else piece
            for each in (before, piece):
                is_inner = touch.storage in self._beside.inner
                self.sizes.setdefault(each, 0 if is_inner else each[1])
            if before != piece and piece not in self._begun:
                both = frozenset({before, piece, *self._copied(before, piece)})
                yield Moment(ops=(), touched=both), before if before[1] > piece[1] else None
            self._begun |= {before, piece}
            self._newest[touch.storage] = before if is_own else piece
            touched.add(piece)
        touched |= {self._newest[each] for each in moment.touched if each in self._newest}
        yield Moment(ops=moment.ops, touched=frozenset(touched)), None

    def _copied(self, before: _Piece, piece: _Piece) -> list[_Piece]:
        """What is there while a layout changes and at no other time.

        Samples are the dim before the sequence: one alone lies as it is carried.
        """
        if not self._beside.copies_operands or self._graph.microbatch_size == 1:
            return []
        self._num_copies += 1
        copy = (-self._num_copies, max(before[1], piece[1]), "")
        self.sizes[copy] = copy[1]
        return [copy]

    def saved_by(self, forward_ops: Sequence[int]) -> set[_Piece]:
        """Pieces that autograd saves on behalf of ops."""
        ops = (self._graph.nodes[op] for op in forward_ops)
        found = {
            self._piece(
                self._graph.storages[self._graph.values[value].storage],
                self._shares.get(op.id, _WHOLE)(value),
                Phase.FORWARD,
            )
            for op in ops
            for value in (*op.saved_inputs, *op.saved_outputs)
        }
        return found & self.sizes.keys()

    def _piece(self, storage: Storage, part: float, phase: Phase) -> _Piece:
        again = storage.id in self._beside.gathered_again and phase is Phase.BACKWARD
        return storage.id, int(storage.size_bytes * part), _AGAIN if again else ""


def _in_time(named: Sequence[Sequence[_Named]]) -> list[Moment]:
    """Put moments in order: modules leave parts of what they made when they end.

    What they gather they gather where it is read.
    """
    last: dict[Hashable, int] = {}
    placed: list[tuple[int, int, Moment]] = []
    for at, (moment, lessened) in enumerate(each for some in named for each in some):
        if lessened in last:
            placed.append((last[lessened], 1, moment))
            continue
        placed.append((at, 0, moment))
        last |= dict.fromkeys(moment.touched, at)
    return [moment for _, _, moment in sorted(placed, key=itemgetter(0, 1))]


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


def _parts(
    graph: OperatorGraph, op: OpNode, forward: OpNode, share: Shares
) -> Iterator[tuple[int, float]]:
    """Each value that an op reads or makes, and the share of it that the rank holds."""
    reads, writes = backward_shares(graph, op, forward, share)
    yield from zip(op.inputs, reads, strict=True)
    yield from zip(op.outputs, writes, strict=True)


def _last_uses(
    moments: Sequence[Moment], saved: Set[_Piece], num_forward: int
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
