"""Finding the blocks of a model: the module calls that stages are made of.

Candidates are the children of module lists. A list counts where its children run one after the
other, each on what comes from the one before. Of lists inside one another the outermost one with
alike children is taken (transformer layers rather than what they are made of); where no two
children are alike (the stages of a vision network, the halves of a U-Net), the lists inside of them
are looked at. A list in a list that is not called (layers that are lists of an attention and a
feed-forward) is what it holds. Where most of their children do no work (a convolution with its norm
and its activation) they are one layer. Attributes that run one after the other stand for a list
where there is none: alike ones, or many of the model itself. What a block *computes* decides
whether two are alike, not its class.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, pairwise, starmap

from planner.graph.operator_graph import Phase
from planner.graph.recording.recording import ModuleCall, Recording

_LEAST_SHARE = 0.05
"""Share of the forward work below which a list outside the others is no list of blocks (the
layers of a time embedding, of a head)."""

_COVERED_SHARE = 0.75
"""Share of a child's work that the lists inside of it must hold to take its place."""

_MANY = 4
"""Children of the model itself that are its blocks though no two are alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block(ModuleCall):
    """A call of a block; ``module`` is the path of its place in the list."""

    path: str
    """First path of the module, by which its ops know it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _List:
    """Children of a module list that run one after the other."""

    path: str
    calls: tuple[Block, ...]
    alike: bool
    """Two of them at least compute the same."""


def find_blocks(recording: Recording) -> tuple[Block, ...]:
    """Find the blocks of a recorded step, in execution order.

    Returns:
        Calls that neither overlap nor contain each other, under the path by which a list knows
        the module; none where the model has no such list.
    """
    return _BlockFinder(recording).find()


class _BlockFinder:
    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        num_forward = sum(op.phase is Phase.FORWARD for op in recording.ops)
        # One more per op, so that a model without products of matrices is divided too.
        self._work_before = list(
            accumulate((op.flop + 1 for op in recording.ops[:num_forward]), initial=0)
        )
        self._signatures: dict[tuple[int, int], int] = {}
        self._children = {listing.path: listing.children for listing in recording.lists}
        self._calls: dict[str, list[ModuleCall]] = {}
        for call in recording.calls:
            self._calls.setdefault(call.module, []).append(call)

    def find(self) -> tuple[Block, ...]:
        blocks = self.candidates()
        foreign = _read_by_others(self._recording, blocks)
        return tuple(block for block, others in zip(blocks, foreign, strict=True) if not others)

    def candidates(self) -> list[Block]:
        """Blocks, whoever reads their parameters."""
        listed = self._listed()
        paths = {each.path for each in listed}
        attributes = [each for each in self._attributes(paths) if self._mostly_works(each)]
        lists = [each for each in listed if self._mostly_works(each)]
        children = {call.module for each in lists for call in each.calls}
        others = (each for each in listed if not self._mostly_works(each))
        layers = [self._layer(each) for each in others if each.path not in children]
        alike = [each for each in attributes if each.alike]
        own = [each for each in attributes if not each.path and self._share_work(each.calls)]
        choices = ((lists, layers), (alike, ()), (own, ()), (listed, ()))
        blocks = next(filter(None, starmap(self._among, choices)), [])
        blocks.sort(key=lambda call: call.first_op)
        if any(left.end_op > right.first_op for left, right in pairwise(blocks)):
            return []
        return blocks

    # Lists -------------------------------------------------------------------------------------

    def _listed(self) -> list[_List]:
        """Module lists of the model whose children run one after the other."""
        found: list[_List] = []
        opened: set[str] = set()
        for listing in self._recording.lists:
            inside: set[str] = set()
            calls = self._calls_of(tuple(self._opened(listing.children, inside)))
            if listing.path not in opened and calls and self._is_chain(calls):
                found.append(self._list(listing.path, calls))
                opened |= inside
        return found

    def _opened(
        self, children: Iterable[tuple[str, str]], inside: set[str]
    ) -> Iterator[tuple[str, str]]:
        """Children of a list, those of lists among them that are not called in their place."""
        for path, module in children:
            listed = None if module in self._calls else self._children.get(path)
            if listed is None:
                yield path, module
            else:
                inside.add(path)
                yield from self._opened(listed, inside)

    def _attributes(self, lists: Set[str]) -> list[_List]:
        """Children of modules but lists that run one after the other."""
        children: dict[str, list[Block]] = {}
        for path, calls in self._calls.items():
            if len(calls) == 1 and path and calls[0].first_op < calls[0].end_op:
                children.setdefault(path.rpartition(".")[0], []).append(_block(path, calls[0]))
        return [
            self._list(path, calls)
            for path, calls in children.items()
            if path not in lists and len(calls) > 1 and self._is_chain(calls)
        ]

    def _list(self, path: str, calls: Sequence[Block]) -> _List:
        signatures = [self._signature(call) for call in calls]
        return _List(path=path, calls=tuple(calls), alike=len(set(signatures)) < len(signatures))

    def _calls_of(self, children: Sequence[tuple[str, str]]) -> list[Block]:
        """Calls of a list's children that ran and did something, none where one ran more often.

        A module that is listed twice runs twice; its calls are those of its places in order.
        """
        places: dict[str, list[str]] = {}
        for path, module in children:
            places.setdefault(module, []).append(path)
        found: list[Block] = []
        for module, paths in places.items():
            calls = self._calls.get(module, [])
            if len(calls) > len(paths):
                return []
            found.extend(
                _block(path, call)
                for path, call in zip(paths, calls, strict=False)
                if call.first_op < call.end_op
            )
        return sorted(found, key=lambda call: call.first_op)

    def _is_chain(self, calls: Sequence[ModuleCall]) -> bool:
        """Whether each call works on what comes, directly or not, from the one before."""
        return all(self._feeds(left, right) for left, right in pairwise(calls))

    def _feeds(self, left: ModuleCall, right: ModuleCall) -> bool:
        if left.end_op > right.first_op:
            return False
        reached = set(left.outputs)
        if right.first_argument in reached:
            return True
        for op in self._recording.ops[left.end_op : right.first_op]:
            if not reached.isdisjoint(op.inputs):
                reached.update(op.outputs)
        return right.first_argument in reached

    # Choice ------------------------------------------------------------------------------------

    def _layer(self, each: _List) -> _List:
        """A list that is one layer, as the call of it where it is called."""
        calls = self._calls.get(each.path, ())
        own = tuple(_block(each.path, call) for call in calls)
        return _List(path=each.path, calls=own, alike=False) if len(own) == 1 else each

    def _among(self, lists: Sequence[_List], layers: Sequence[_List]) -> list[Block]:
        """Blocks among lists: the outermost ones with enough work, divided where that helps.

        Args:
            lists: What may be outermost.
            layers: What may be a part of their children.
        """
        every = (*lists, *layers)
        listed = {call.module for each in every for call in each.calls}
        inside: dict[str, list[_List]] = {}
        for each in every:
            own = {call.module for call in each.calls}
            inside.setdefault(_owner(each.path, listed, own), []).append(each)
        outermost = set(map(id, lists))
        return [
            call
            for each in inside.get("", ())
            if id(each) in outermost
            if self._work(each.calls) >= _LEAST_SHARE * self._work_before[-1]
            for call in self._divided(each, inside)
        ]

    def _divided(self, each: _List, inside: Mapping[str, Sequence[_List]]) -> list[Block]:
        """The children of a list, or in the place of each the blocks inside of it."""
        found: list[Block] = []
        for call in each.calls:
            parts = [
                part
                for inner in inside.get(call.module, ())
                for part in self._divided(inner, inside)
            ]
            covered = self._work(parts) >= _COVERED_SHARE * self._work((call,))
            taken = covered and len(parts) > 1 and (not each.alike or self._all_alike(parts))
            found.extend(parts if taken else (call,))
        return found

    def _mostly_works(self, each: _List) -> bool:
        """Whether most children do a share of the work that is worth the name."""
        least = _LEAST_SHARE * self._work(each.calls) / len(each.calls)
        return 2 * sum(self._work((call,)) >= least for call in each.calls) > len(each.calls)

    def _share_work(self, calls: Sequence[ModuleCall]) -> bool:
        """Whether some calls are many, and none does more than all others together."""
        largest = max(self._work((call,)) for call in calls)
        return len(calls) >= _MANY and 2 * largest <= self._work(calls)

    def _all_alike(self, calls: Sequence[ModuleCall]) -> bool:
        return len({self._signature(call) for call in calls}) == 1

    def _work(self, calls: Iterable[ModuleCall]) -> int:
        return sum(
            self._work_before[call.end_op] - self._work_before[call.first_op] for call in calls
        )

    def _signature(self, call: ModuleCall) -> int:
        """Number that is equal for calls of the same ops on tensors of the same shapes."""
        key = (call.first_op, call.end_op)
        if key not in self._signatures:
            values = self._recording.values
            self._signatures[key] = hash(
                tuple(
                    (op.name, tuple([values[value].shape for value in op.outputs]))
                    for op in self._recording.ops[call.first_op : call.end_op]
                )
            )
        return self._signatures[key]


def parameters_read_by_others(recording: Recording) -> tuple[str, ...]:
    """Parameters for which modules of a list are no blocks, each by the name that it has there."""
    finder = _BlockFinder(recording)
    return tuple(name for each in _read_by_others(recording, finder.candidates()) for name in each)


def _read_by_others(recording: Recording, blocks: Sequence[Block]) -> list[tuple[str, ...]]:
    """Parameters of each block that are read outside of it.

    Blocks that share a weight or are one module in several places, a penalty on weights, a product
    with another block's weight. The script gathers the parameters of a block where it runs, and
    sends it to one stage: none else may read them.
    """
    places = {op: block.module for block in blocks for op in range(block.first_op, block.end_op)}
    readers: dict[int, set[str]] = {}
    for op in recording.ops:
        for value in op.inputs if op.phase is Phase.FORWARD else ():
            readers.setdefault(recording.values[value].storage, set()).add(places.get(op.id, ""))
    paths = {block.module for block in blocks}
    found: dict[str, list[str]] = {path: [] for path in paths}
    for parameter in recording.parameters:
        of_parameter = readers.get(parameter.storage, set())
        for name in parameter.names:
            for path in paths.intersection(_parents(name)):
                if of_parameter - {path}:
                    found[path].append(name)
    return [tuple(found[block.module]) for block in blocks]


def _parents(name: str) -> Iterator[str]:
    """The modules that a parameter is in, by its name."""
    return (name[:at] for at, letter in enumerate(name) if letter == ".")


def _block(place: str, call: ModuleCall) -> Block:
    return Block(
        module=place,
        path=call.module,
        first_op=call.first_op,
        end_op=call.end_op,
        first_argument=call.first_argument,
        outputs=call.outputs,
    )


def _owner(path: str, listed: Set[str], own: Set[str]) -> str:
    """The listed module that a list lies in or is, none of its own; "" where there is none."""
    while path and (path not in listed or path in own):
        path = path.rpartition(".")[0]
    return path
