"""Activations that units keep which do not follow each other: skip connections, masks, memories.

A unit keeps what the unit before hands it, and counts it where both keep it. What comes from
further back (a skip connection, an encoder's output, a conditioning), and constants that are
computed once for all units (masks, rotary tables), several units keep together: they count once for
each stage. So do inputs and targets of the model, of which each stage has those of the microbatches
that it holds, and what a stage receives and sends on.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.graph.analysis.retained import block_ops, saved_values
from planner.graph.operator_graph import (
    CutPoint,
    OperatorGraph,
    Phase,
    StorageKind,
    Unit,
    UnitKind,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedActivation:
    """One storage that units keep together."""

    storage: int
    """Which."""
    size_bytes: int
    """Its bytes for one microbatch."""
    units: frozenset[int]
    """Units that keep it and do not count it."""
    owners: frozenset[int]
    """Units that keep it and count it themselves: a stage with one of them needs no second
    count."""
    received: frozenset[int] = frozenset()
    """Units at whose front a stage receives it: there it lies in the stage's receive buffers."""
    handed: frozenset[int] = frozenset()
    """Those of ``units`` that hand it to the unit behind, which keeps and counts it as well."""

    def counts(self, first: int, end: int) -> bool:
        """Tell whether it adds to what the units from ``first`` to ``end`` count themselves."""
        held = range(first, end)
        return not any(unit in held for unit in self.owners) and any(
            unit in held for unit in self.units
        )

    @property
    def is_sent_far(self) -> bool:
        """Whether a stage may receive it that does not begin behind a unit that hands it on."""
        return not self.received <= {unit + 1 for unit in self.handed}

    def is_sent_and_held(self, first: int, end: int) -> bool:
        """Tell whether a stage sends it on that has it anyway: received, or kept by its units."""
        held = range(first, end)
        return end in self.received and (
            first in self.received or any(unit in held for unit in self.units | self.owners)
        )


def kept_behind(graph: OperatorGraph, unit: Unit) -> frozenset[int]:
    """Storages that a unit keeps and hands to the unit behind, which keeps them in any case.

    A checkpoint keeps what a unit reads of the one before as well as its backward does.
    """
    key = "kept behind", unit.index
    if key not in graph.wiring:
        found: frozenset[int] = frozenset()
        for behind in graph.units[unit.index + 1 : unit.index + 2]:
            entering = (graph.values[value].storage for value in _entering(graph, behind))
            handed = frozenset(entering) - passing_storages(graph, behind)
            found = handed & _saved_storages(graph, behind) & _saved_storages(graph, unit)
        graph.wiring[key] = found
    kept: frozenset[int] = graph.wiring[key]
    return kept


def _saved_storages(graph: OperatorGraph, unit: Unit) -> frozenset[int]:
    """Storages that a unit keeps for its own backward."""
    values = saved_values(graph, unit.forward_ops)
    return frozenset(graph.values[value].storage for value in values)


def passing_storages(graph: OperatorGraph, unit: Unit) -> frozenset[int]:
    """Activations that a unit reads from further back than the unit before it.

    Constants of the step, which depend on no parameter, count as such wherever they were made
    before the unit.
    """
    found = set()
    for value in _entering(graph, unit):
        is_constant = value not in graph.parametric_values
        if is_constant or _unit_of_value(graph)[value] < unit.index - 1:
            found.add(graph.values[value].storage)
    return frozenset(found)


def passes_gradients(graph: OperatorGraph) -> bool:
    """Whether a block reads what has a gradient from further back than the unit before it."""
    return any(
        graph.values[value].requires_grad
        and graph.values[value].storage in passing_storages(graph, unit)
        for unit in graph.units
        if unit.kind is UnitKind.BLOCK
        for value in _entering(graph, unit)
    )


def shared_activations(
    graph: OperatorGraph, representatives: Mapping[str, Unit]
) -> tuple[SharedActivation, ...]:
    """Find the activations that units share, and those that stages only pass on.

    Units of one structure are sized by one of them, so that each leaves out what that one has from
    further back, and what that one and the unit behind it keep.

    Args:
        graph: The model.
        representatives: The unit of each structure that is sized.
    """
    units: dict[int, set[int]] = defaultdict(set)
    owners: dict[int, set[int]] = defaultdict(set)
    handed: dict[int, set[int]] = defaultdict(set)
    for unit in graph.units:
        sized = representatives[unit.structure]
        entered, own = _read(graph, unit, sized)
        left = _left_out(graph, unit, sized)
        for found, storages in ((units, entered | left), (owners, own - left)):
            for storage in storages:
                found[storage].add(unit.index)
        for storage in left & kept_behind(graph, unit):
            handed[storage].add(unit.index)
    for unit in graph.units:
        for storage in _kept_inputs(graph, unit):
            units[storage].add(unit.index)
    received: dict[int, set[int]] = defaultdict(set)
    for cut in graph.cuts:
        for storage in cut_storages(graph, cut):
            received[storage].add(cut.after_unit + 1)
    passed_on = {storage for storage, fronts in received.items() if len(fronts) > 1}
    return tuple(
        SharedActivation(
            storage=storage,
            size_bytes=graph.storages[storage].size_bytes,
            units=frozenset(units[storage]),
            owners=frozenset(owners[storage]),
            received=frozenset(received[storage]),
            handed=frozenset(handed[storage]),
        )
        for storage in sorted(passed_on | units.keys())
    )


def held_by_code(
    graph: OperatorGraph, shared: Sequence[SharedActivation]
) -> Mapping[frozenset[int], tuple[int, ...]]:
    """What every stage's code holds around its units, since it runs the model's.

    That is the model's inputs, and constants of the step that the prologue makes for others.

    Args:
        graph: The model.
        shared: Its ``shared_activations``.

    Returns:
        Storages by the units that keep them, and all that are alike: a stage with one of these
        counts them already.
    """
    known = {each.storage: each for each in shared}
    held = {each.id for each in graph.storages if each.kind is StorageKind.INPUT}
    made_in = _unit_of_value(graph)
    for value in {value for unit in graph.units for value in _entering(graph, unit)}:
        if made_in[value] == 0 and value not in graph.parametric_values:
            held.add(graph.values[value].storage)
    found: dict[frozenset[int], list[int]] = defaultdict(list)
    for storage in sorted(held):
        keepers: frozenset[int] = frozenset()
        if storage in known:
            if known[storage].received:  # it lies in receive buffers
                continue
            keepers = known[storage].units | known[storage].owners
        structures = {graph.units[index].structure for index in keepers}
        alike = frozenset(each.index for each in graph.units if each.structure in structures)
        found[alike].append(storage)
    return {keepers: tuple(storages) for keepers, storages in found.items()}


def _read(graph: OperatorGraph, unit: Unit, sized: Unit) -> tuple[set[int], set[int]]:
    """Storages that a unit reads of others: from further back, and others that it keeps.

    As its like does; it keeps them as they were read, or as it has written them.
    """
    passing, saved = passing_storages(graph, sized), _saved_storages(graph, sized)
    further, own = set(), set()
    pairs = zip(_entering(graph, unit), _entering(graph, sized), strict=True)
    for value, like in pairs:
        storage, known = (graph.values[each].storage for each in (value, like))
        if known in passing:
            further.add(storage)
        elif known in saved:
            own.add(storage)
    return further, own


def _left_out(graph: OperatorGraph, unit: Unit, sized: Unit) -> frozenset[int]:
    """Storages of a unit that its like leaves out, as the unit behind that keeps them."""
    left = kept_behind(graph, sized)
    pairs = zip(unit.forward_ops, sized.forward_ops, strict=True) if left else ()
    return frozenset(
        graph.values[value].storage
        for op, like in pairs
        for value, alike in zip(graph.nodes[op].outputs, graph.nodes[like].outputs, strict=True)
        if graph.values[alike].storage in left
    )


def _kept_inputs(graph: OperatorGraph, unit: Unit) -> set[int]:
    """Inputs of the model that a unit keeps: those saved, and those that a block begins with."""
    read = {value for op_id in block_ops(unit) for value in graph.nodes[op_id].inputs}
    kept = {graph.values[value].storage for value in read | saved_values(graph, unit.forward_ops)}
    return {each for each in kept if graph.storages[each].kind.is_of_batch}


def cut_storages(graph: OperatorGraph, cut: CutPoint) -> frozenset[int]:
    """Storages of what is sent where the model is cut."""
    return frozenset(graph.values[value].storage for value in cut.values)


def _entering(graph: OperatorGraph, unit: Unit) -> list[int]:
    """Values that a unit reads of activations made in units before it, in order of first use."""
    return list(
        dict.fromkeys(
            value
            for op_id in unit.forward_ops
            for value in graph.nodes[op_id].inputs
            if _unit_of_value(graph).get(value, unit.index) < unit.index
        )
    )


def _unit_of_value(graph: OperatorGraph) -> Mapping[int, int]:
    """Position of the unit whose forward makes each value of an activation, or has written it.

    A view is of the unit that has made what it is a view of.
    """
    key = "unit of value"
    if key not in graph.wiring:
        made_in: dict[int, int] = {}
        for op in (each for each in graph.nodes if each.phase is Phase.FORWARD):
            of_storage = {
                graph.values[value].storage: made_in[value]
                for value in op.inputs
                if op.is_view and value in made_in
            }
            for value in op.outputs:
                storage = graph.storages[graph.values[value].storage]
                if storage.kind is StorageKind.ACTIVATION:
                    own = graph.unit_of_op[op.id]
                    made_in.setdefault(value, of_storage.get(storage.id, own))
        graph.wiring[key] = made_in
    found: Mapping[int, int] = graph.wiring[key]
    return found
