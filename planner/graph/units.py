"""Dividing a recorded step into units: prologue, blocks, epilogue."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from planner.graph.cuts import Cut, find_cuts
from planner.graph.operator_graph import (
    CutPoint,
    OperatorGraph,
    Phase,
    StorageKind,
    Unit,
    UnitKind,
)
from planner.graph.recording import ModuleCall, ModuleListing, Recording
from planner.graph.structure import structure_hashes

_NO_LIST = (
    "The model has no nn.ModuleList or nn.Sequential whose children run one after the other, so"
    " that there is nowhere to cut it into stages."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A unit without its ops."""

    name: str
    path: str
    """Path under which its module is known to its ops, "" for prologue and epilogue."""
    kind: UnitKind
    block: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpan(_Place):
    """A unit without its structure; the fields are those of ``Unit``."""

    forward_ops: tuple[int, ...]
    backward_ops: tuple[int, ...]
    parameters: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a model divides into units and where it can be cut, whatever the batch size."""

    block_list: str | None
    units: tuple[UnitSpan, ...]
    cuts: tuple[Cut, ...]
    no_cut_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    listing: ModuleListing
    calls: tuple[ModuleCall, ...]


def find_layout(recording: Recording) -> Layout:
    """Find the list of blocks, divide the step into units and find the legal cuts.

    The list of blocks is the one that divides the forward FLOPs most evenly into pieces that run
    one after the other.
    """
    num_forward = sum(op.phase is Phase.FORWARD for op in recording.ops)
    best = _best_candidate(recording, num_forward)
    if best is None:
        places = [_Place(name="model", path="", kind=UnitKind.EPILOGUE, block=None)]
        unit_of_op = _assign_ops(recording, [0, num_forward], places)
        cuts: tuple[Cut, ...] = ()
        reason = _NO_LIST
    else:
        calls = best.calls
        bounds = [0, *[call.first_op for call in calls], calls[-1].end_op, num_forward]
        places = _places(best.listing)
        unit_of_op = _assign_ops(recording, bounds, places)
        cuts, reason = find_cuts(recording, calls, unit_of_op, [place.name for place in places])
    return Layout(
        block_list=None if best is None else best.listing.path,
        units=_spans(recording, unit_of_op, places),
        cuts=cuts,
        no_cut_reason=reason,
    )


def _places(listing: ModuleListing) -> list[_Place]:
    blocks = [
        _Place(name=name, path=path, kind=UnitKind.BLOCK, block=block)
        for block, (name, path) in enumerate(listing.children)
    ]
    prologue = _Place(name="prologue", path="", kind=UnitKind.PROLOGUE, block=None)
    epilogue = _Place(name="epilogue", path="", kind=UnitKind.EPILOGUE, block=None)
    return [prologue, *blocks, epilogue]


def assemble(
    recording: Recording, layout: Layout, classes: Sequence[int] | None = None
) -> OperatorGraph:
    """Make the operator graph of a recorded step.

    Args:
        recording: The step.
        layout: Its division, found here or on a step of another batch size.
        classes: Class of each unit where it is known which units have the same structure.
    """
    spans = layout.units
    if classes is None:
        classes = range(len(spans))
    representatives = {number: position for position, number in reversed(list(enumerate(classes)))}
    hash_of = structure_hashes(
        recording, {number: spans[position] for number, position in representatives.items()}
    )
    units = tuple(
        Unit(
            index=position,
            name=span.name,
            kind=span.kind,
            block=span.block,
            structure=hash_of[number],
            forward_ops=span.forward_ops,
            backward_ops=span.backward_ops,
            parameters=span.parameters,
        )
        for position, (span, number) in enumerate(zip(spans, classes, strict=True))
    )
    return OperatorGraph(
        microbatch_size=recording.microbatch_size,
        tokens_per_sample=recording.tokens_per_sample,
        storages=recording.storages,
        values=recording.values,
        nodes=recording.ops,
        parameters=recording.parameters,
        block_list=layout.block_list,
        units=units,
        cuts=tuple(_cut_point(recording, cut) for cut in layout.cuts),
        no_cut_reason=layout.no_cut_reason,
    )


def _cut_point(recording: Recording, cut: Cut) -> CutPoint:
    return CutPoint(
        after_unit=cut.after_unit,
        values=(cut.value,),
        carried=(),
        stream_output=None,
        crossing_bytes=value_bytes(recording, cut.value),
        constant_values=cut.constants,
    )


def value_bytes(recording: Recording, value: int) -> int:
    """Return the bytes of a value's elements."""
    tensor = recording.values[value]
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return math.prod(tensor.shape) * dtype.itemsize


def _best_candidate(recording: Recording, num_forward: int) -> _Candidate | None:
    flop_before = [0]
    for op in recording.ops[:num_forward]:
        flop_before.append(flop_before[-1] + op.flop)
    best: _Candidate | None = None
    least = 0
    for listing in recording.lists:
        calls = _sequential_calls(recording, listing)
        if calls is None:
            continue
        bounds = [0, *[call.first_op for call in calls], calls[-1].end_op, num_forward]
        cost = _imbalance(
            [flop_before[end] - flop_before[start] for start, end in pairwise(bounds)]
        )
        if best is None or cost < least:
            best, least = _Candidate(listing=listing, calls=calls), cost
    return best


def _sequential_calls(
    recording: Recording, listing: ModuleListing
) -> tuple[ModuleCall, ...] | None:
    """Return the calls of a list's children, if each ran once, in order, outside the others."""
    if len(listing.children) < 2:
        return None
    children = [module for _, module in listing.children]
    members = set(children)
    calls = [call for call in recording.calls if call.module in members]
    if [call.module for call in calls] != children:
        return None
    if any(left.end_op > right.first_op for left, right in pairwise(calls)):
        return None
    return tuple(calls)


def _assign_ops(recording: Recording, bounds: Sequence[int], places: Sequence[_Place]) -> list[int]:
    """Return the unit of every op.

    A backward op belongs to the unit of its forward op, gradient accumulation to the first unit
    that reads the parameter, a recomputed op to its block, and what autograd adds in between
    (sums of gradients) to the unit whose op ran before it.
    """
    unit_of_op: list[int] = []
    for unit, (start, end) in enumerate(pairwise(bounds)):
        unit_of_op.extend([unit] * (end - start))
    first_reader: dict[int, int] = {}
    for op in recording.ops[: bounds[-1]]:
        for value in op.inputs:
            first_reader.setdefault(recording.values[value].storage, unit_of_op[op.id])
    last_unit = len(bounds) - 2
    unit_of_block = {place.path: unit for unit, place in enumerate(places) if place.path}
    current = last_unit
    for op in recording.ops[bounds[-1] :]:
        parameter = recording.accumulations.get(op.id)
        if op.forward_op is not None:
            current = unit_of_op[op.forward_op]
        elif parameter is not None:
            unit_of_op.append(first_reader.get(parameter, current))
            continue
        elif op.module:
            current = _block_unit(op.module, unit_of_block, current)
        unit_of_op.append(current)
    return unit_of_op


def _block_unit(module: str, unit_of_block: dict[str, int], default: int) -> int:
    path = module
    while path:
        if path in unit_of_block:
            return unit_of_block[path]
        path = path.rpartition(".")[0]
    return default


def _spans(
    recording: Recording,
    unit_of_op: Sequence[int],
    places: Sequence[_Place],
) -> tuple[UnitSpan, ...]:
    forward: list[list[int]] = [[] for _ in places]
    backward: list[list[int]] = [[] for _ in places]
    read: list[set[int]] = [set() for _ in places]
    parameter_of = {each.storage: index for index, each in enumerate(recording.parameters)}
    for op in recording.ops:
        unit = unit_of_op[op.id]
        (forward if op.phase is Phase.FORWARD else backward)[unit].append(op.id)
        if op.phase is Phase.FORWARD:
            for value in op.inputs:
                storage = recording.values[value].storage
                if recording.storages[storage].kind is StorageKind.PARAMETER:
                    read[unit].add(parameter_of[storage])
    return tuple(
        UnitSpan(
            name=place.name,
            path=place.path,
            kind=place.kind,
            block=place.block,
            forward_ops=tuple(forward[unit]),
            backward_ops=tuple(backward[unit]),
            parameters=tuple(sorted(read[unit])),
        )
        for unit, place in enumerate(places)
    )


def _imbalance(parts: Sequence[int]) -> int:
    """Measure how unevenly a whole is cut into parts: the sum of their squares.

    Of all lists of blocks the one that cuts the model into the most even pieces is the best, and
    the sum of squares falls with every further even cut.
    """
    return sum(part * part for part in parts)
