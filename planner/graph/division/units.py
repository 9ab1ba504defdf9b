"""Dividing a recorded step into units: prologue, blocks, epilogue."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.graph.division.blocks import Block, find_blocks, parameters_read_by_others
from planner.graph.division.cuts import Cut, find_cuts
from planner.graph.division.structure import structure_hashes
from planner.graph.operator_graph import (
    CutPoint,
    OperatorGraph,
    Phase,
    RefusedCut,
    StorageKind,
    Unit,
    UnitKind,
)
from planner.graph.recording.recording import Recording

_NO_BLOCKS = (
    "The model has no nn.ModuleList, nn.Sequential or alike modules that run once each and one"
    " after the other, each on a tensor that is an argument of its own (in no dict, tuple or other"
    " object), so that there is nowhere to cut it into stages."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A unit without its ops."""

    name: str
    path: str
    """Path under which its module is known to its ops, "" for prologue and epilogue."""
    kind: UnitKind
    block: int | None
    end_op: int
    """One past the last op of the block's forward, 0 for prologue and epilogue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitSpan(_Place):
    """A unit without its structure; the fields are those of ``Unit``."""

    forward_ops: tuple[int, ...]
    backward_ops: tuple[int, ...]
    parameters: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a model divides into units and where it can be cut, whatever the batch size."""

    units: tuple[UnitSpan, ...]
    is_chain: bool
    cuts: tuple[Cut, ...]
    refused_cuts: tuple[RefusedCut, ...]
    no_cut_reason: str


def find_layout(recording: Recording) -> Layout:
    """Find the blocks, divide the step into units and find the legal cuts.

    What runs between two blocks belongs to the unit of the first of them.
    """
    num_forward = sum(op.phase is Phase.FORWARD for op in recording.ops)
    calls = find_blocks(recording)
    if not calls:
        places = [_Place(name="model", path="", kind=UnitKind.EPILOGUE, block=None, end_op=0)]
        unit_of_op = _assign_ops(recording, [0, num_forward], places)
        return Layout(
            units=_spans(recording, unit_of_op, places),
            is_chain=False,
            cuts=(),
            refused_cuts=(),
            no_cut_reason=_why_no_blocks(recording),
        )
    bounds = [0, *[call.first_op for call in calls], calls[-1].end_op, num_forward]
    places = _places(calls)
    unit_of_op = _assign_ops(recording, bounds, places)
    cuts, refused = find_cuts(recording, calls, unit_of_op)
    is_chain = _is_chain(recording, calls, cuts)
    reason = _why_no_cuts(recording, calls)
    if reason:
        refused = tuple(
            RefusedCut(after_unit=after, reason=reason)
            for after in sorted(each.after_unit for found in (cuts, refused) for each in found)
        )
        cuts = ()
    return Layout(
        units=_spans(recording, unit_of_op, places),
        is_chain=is_chain,
        cuts=cuts,
        refused_cuts=refused,
        no_cut_reason="" if cuts else _no_cut_reason(refused, places),
    )


def _why_no_cuts(recording: Recording, calls: Sequence[Block]) -> str:
    """Say why no place between blocks is one for a stage to end; "" where nothing forbids all."""
    if place := _decided_between(recording, calls):
        return f"a random draw that {place} reads decides which of the blocks run"
    again = next((call.module for call in calls if call.module in recording.called_again), "")
    if again:
        return (
            f"the model's own code runs {again} again in backward (torch.utils.checkpoint), where a"
            " stage no longer has what it received: leave recomputation to the plan"
        )
    return ""


def _decided_between(recording: Recording, calls: Sequence[Block]) -> str:
    """The line that decides between two blocks by a draw, which may leave out one; "" for none.

    A stage cannot know which of another stage's blocks run.
    """
    return next(
        (
            each.place
            for each in recording.decisions
            for left, right in pairwise(calls)
            if left.end_op <= each.before_op <= right.first_op
        ),
        "",
    )


def _why_no_blocks(recording: Recording) -> str:
    shared = parameters_read_by_others(recording)
    if not shared:
        return _NO_BLOCKS
    return (
        "The model cannot be cut into stages: each of its blocks has a parameter that is also read"
        f" outside of it, as {shared[0]}."
    )


def _is_chain(recording: Recording, calls: Sequence[Block], cuts: Sequence[Cut]) -> bool:
    linked = all(
        left.outputs[:1] == (right.first_argument,)
        and all(op.is_view for op in recording.ops[left.end_op : right.first_op])
        for left, right in pairwise(calls)
    )
    inner = [cut for cut in cuts if 0 < cut.after_unit < len(calls)]
    return linked and len(inner) == len(calls) - 1 and all(not cut.carried for cut in inner)


def _no_cut_reason(refused: Sequence[RefusedCut], places: Sequence[_Place]) -> str:
    """Say why there is no cut, by the example of a place between two blocks."""
    inner = [each for each in refused if 0 < each.after_unit < len(places) - 2]
    example = (inner or refused)[0]
    left, right = places[example.after_unit], places[example.after_unit + 1]
    return (
        f"The model cannot be cut into stages: between {left.name} and {right.name},"
        f" {example.reason}."
    )


def _places(calls: Sequence[Block]) -> list[_Place]:
    blocks = [
        _Place(
            name=call.module,
            path=call.path,
            kind=UnitKind.BLOCK,
            block=block,
            end_op=call.end_op,
        )
        for block, call in enumerate(calls)
    ]
    prologue = _Place(name="prologue", path="", kind=UnitKind.PROLOGUE, block=None, end_op=0)
    epilogue = _Place(name="epilogue", path="", kind=UnitKind.EPILOGUE, block=None, end_op=0)
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
        _unit(position, span, hash_of[number])
        for position, (span, number) in enumerate(zip(spans, classes, strict=True))
    )
    tied = _tied_places(spans)
    return OperatorGraph(
        model=recording.model,
        dtype=recording.dtype,
        microbatch_size=recording.microbatch_size,
        tokens_per_sample=recording.tokens_per_sample,
        storages=recording.storages,
        values=recording.values,
        nodes=recording.ops,
        parameters=recording.parameters,
        units=units,
        is_chain=layout.is_chain,
        cuts=tuple(_cut_point(recording, tied, cut) for cut in layout.cuts),
        refused_cuts=layout.refused_cuts,
        no_cut_reason=layout.no_cut_reason,
        autocast=recording.autocast,
        float8_modules=recording.float8_modules,
        draws=recording.draws,
        notes=recording.notes,
    )


def _unit(position: int, span: UnitSpan, structure: str) -> Unit:
    return Unit(
        index=position,
        name=span.name,
        kind=span.kind,
        block=span.block,
        structure=structure,
        forward_ops=span.forward_ops,
        num_block_ops=sum(op < span.end_op for op in span.forward_ops),
        backward_ops=span.backward_ops,
        parameters=span.parameters,
    )


def _cut_point(recording: Recording, tied: Mapping[int, range], cut: Cut) -> CutPoint:
    return CutPoint(
        after_unit=cut.after_unit,
        values=cut.values,
        carried=cut.carried,
        stream_output=cut.stream_output,
        crossing_bytes=sum(recording.values[value].size_bytes for value in cut.values),
        constant_values=cut.constants,
        tied_parameters=tuple(
            parameter for parameter, places in tied.items() if cut.after_unit in places
        ),
    )


def _tied_places(spans: Sequence[UnitSpan]) -> dict[int, range]:
    """Units after which a cut would split the readers of a parameter, where there are several."""
    readers: dict[int, list[int]] = {}
    for unit, span in enumerate(spans):
        for parameter in span.parameters:
            readers.setdefault(parameter, []).append(unit)
    return {
        parameter: range(units[0], units[-1])
        for parameter, units in sorted(readers.items())
        if len(units) > 1
    }


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
            end_op=place.end_op,
            forward_ops=tuple(forward[unit]),
            backward_ops=tuple(backward[unit]),
            parameters=tuple(sorted(read[unit])),
        )
        for unit, place in enumerate(places)
    )
