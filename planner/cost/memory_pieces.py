"""Pieces of memory that a unit's ops touch on one rank, in time.

A piece is a storage as one layout has it: where layouts change a rank holds two for a while.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from math import inf, prod
from operator import itemgetter
from typing import NamedTuple

from planner.cost.work import Shares, sources
from planner.graph.analysis.lifetimes import Moment, by_op, moments_of
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
    kept_elsewhere: Set[int] = frozenset()
    """Storages that enter and stay, counted with who keeps them."""
    kept_behind: Mapping[int, int] = field(default_factory=dict)
    """Bytes by storage of what the unit behind counts, which reads and keeps it too."""
    enters_whole: bool = False
    """Ranks hold all of what other units made; else parts of what flows between units."""
    names_hold: bool = True
    """What the model's code names is there until it does no more; not where it is compiled."""
    stops_before: int | None = None
    """Forward op at which a recomputation stops, as all that was saved is back; None for none."""

    def is_kept_behind(self, piece: "Piece") -> bool:
        """Whether the unit behind counts a piece."""
        storage, num_bytes, reader = piece
        return not reader and self.kept_behind.get(storage) == num_bytes


AS_SHOWN = KernelMemory()
"""Nothing of it."""


_WHOLE = Shares()

Piece = tuple[int, int, str]
"""A storage, its bytes on a rank, and what they are gathered for again in backward: "" for nothing.
Where a layout changes ranks hold both for a while, what was made and what is read."""

AGAIN = "backward"
"""What saved values are gathered for again."""


def is_copy(piece: Piece) -> bool:
    """Whether a piece is only there while a layout changes."""
    return piece[0] < 0


class _Place(NamedTuple):
    """A value of an activation at an op, whatever the layouts."""

    value: int
    lies_as: int | None
    """The value as which it lies where no layout of its own is known; None for whole."""
    storage: int
    is_one: bool
    """Whether its storage is one piece: no gradient of a parameter changes its layout."""
    is_made: bool
    """Whether the op makes its storage, as far as the op tells."""
    reader: str
    """Module that reads a gradient, which it gathers for itself; "" for any other touch."""


class _Touch(NamedTuple):
    """A value that an op reads or makes."""

    storage: int
    piece: Piece
    is_one: bool
    is_made: bool
    reader: str


_Named = tuple[Moment, Piece | None]
"""A moment; where less is left of a piece after it, that piece."""


class Pieces:
    """Memory of a unit on one rank."""

    def __init__(
        self, graph: OperatorGraph, shares: Mapping[int, Shares], beside: KernelMemory
    ) -> None:
        self.sizes: dict[Piece, int] = {}
        """Bytes of each."""
        self.entered: Set[Piece] = frozenset()
        """Those that are there when the unit begins."""
        self._graph = graph
        self._shares = shares
        self._beside = beside
        self.named_pieces: dict[int, Piece] = {}
        """What code has that names a storage: as it enters, or as modules leave what they made."""
        self._own: dict[int, float] = {}
        """The least of each value that an op of forward has of it."""
        self._newest: dict[int, Piece] = {}
        self._begun: set[Piece] = set()
        self._num_copies = 0

    def named(
        self, forward_ops: Sequence[int], backward_ops: Sequence[int]
    ) -> tuple[list[Moment], list[Moment]]:
        """Name the pieces that ops touch, in moments; layouts change in moments between them.

        What enters comes as the smallest part of it that is read, or the largest.
        """
        for op in (self._graph.nodes[each] for each in forward_ops):
            share = self._shares.get(op.id, _WHOLE)
            for value in (*op.inputs, *op.outputs):
                self._own[value] = min(share(value), self._own.get(value, 1.0))
        forward = moments_of(self._graph, forward_ops)
        backward = by_op(self._graph, moments_of(self._graph, backward_ops))
        as_entered = max if self._beside.enters_whole else min
        touches = [[*self._touches(moment)] for moment in (*forward, *backward)]
        made: set[int] = set()
        entering: dict[int, Piece] = {}
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
            summed, places = _places(graph, op, forward)
            most = inf if summed is None else self._own.get(summed, inf)
            for place in places:
                value = place.value
                # Code that makes a tensor makes all of it.
                part = prod(each.as_of(value, place.lies_as) for each in share.axes)
                part = min(part if op.inputs else 1.0, most)
                piece = self._piece(graph.storages[place.storage], part, op.phase)
                # What attention exchanges is counted with what it keeps.
                is_one = place.is_one or share.is_copied(value)
                yield _Touch(place.storage, piece, is_one, place.is_made, place.reader)

    def _named(self, moment: Moment, touches: Iterable[_Touch]) -> Iterator[_Named]:
        touched: set[Hashable] = set()
        for touch in touches:
            before = self._newest.get(touch.storage, touch.piece)
            piece = before if touch.is_one else touch.piece
            is_gathered = piece[1] > before[1] and piece not in self._begun
            is_own = bool(touch.reader) and is_gathered
            piece = (*piece[:2], touch.reader) if is_own else piece
            named = self.named_pieces.setdefault(touch.storage, before)
            if named not in self.entered and not piece[2] and piece[1] < named[1]:
                self.named_pieces[touch.storage] = piece
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

    def _copied(self, before: Piece, piece: Piece) -> list[Piece]:
        """What is there while a layout changes and at no other time.

        Samples are the dim before the sequence: one alone lies as it is carried.
        """
        if not self._beside.copies_operands or self._graph.microbatch_size == 1:
            return []
        self._num_copies += 1
        copy = (-self._num_copies, max(before[1], piece[1]), "")
        self.sizes[copy] = copy[1]
        return [copy]

    def of(self, made: Iterable[tuple[int, int]]) -> set[Piece]:
        """Pieces of values as forward ops have them, each given with its op."""
        found = {
            self._piece(
                self._graph.storages[self._graph.values[value].storage],
                self._shares.get(op, _WHOLE)(value),
                Phase.FORWARD,
            )
            for op, value in made
        }
        return found & self.sizes.keys()

    def _piece(self, storage: Storage, part: float, phase: Phase) -> Piece:
        again = storage.id in self._beside.gathered_again and phase is Phase.BACKWARD
        return storage.id, int(storage.size_bytes * part), AGAIN if again else ""


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


def _places(
    graph: OperatorGraph, op: OpNode, forward: OpNode
) -> tuple[int | None, Sequence[_Place]]:
    """The value whose gradients an op adds up, which lie as it does; and what the op touches."""
    key = "places", op.id
    if key not in graph.wiring:
        graph.wiring[key] = _summed(graph, op), [*_found_places(graph, op, forward)]
    found: tuple[int | None, Sequence[_Place]] = graph.wiring[key]
    return found


def _summed(graph: OperatorGraph, op: OpNode) -> int | None:
    if op.phase is Phase.FORWARD or op.name != "add":
        return None
    values = (graph.values[value] for value in (*op.inputs, *op.outputs))
    *parts, whole = [graph.storages[each.storage].gradient_of for each in values]
    return None if None in parts else whole


def _found_places(graph: OperatorGraph, op: OpNode, forward: OpNode) -> Iterator[_Place]:
    read = {graph.values[value].storage for value in op.inputs}
    for value, lies_as in chain(*sources(graph, op, forward)):
        storage = graph.storages[graph.values[value].storage]
        if storage.kind is StorageKind.ACTIVATION:
            is_read = storage.id in read
            yield _Place(
                value=value,
                lies_as=lies_as,
                storage=storage.id,
                is_one=storage.id in graph.parameter_gradients,
                is_made=not is_read,
                reader=op.module if is_read and storage.gradient_of is not None else "",
            )
