"""Where a model can be cut into pipeline stages, and what crosses each place.

A stage runs the model's own code with stand-ins for all modules that other stages hold. So what
crosses a cut can be handed over where the receiving stage's code can pick it up:

* the *stream*, the first tensor argument of the next block (or the last block's output);
* outputs of modules: their stand-ins return what was received;
* what is computed from these between modules, without parameters and random numbers: each stage
  computes it again;
* constants, which depend on the model's inputs alone: each stage makes them again.

A buffer that a forward changes is like a parameter: the stage that calls its module has it. Where
code around the blocks changes one by what a single stage computes, no cut is legal; what all
stages count alike (a number of steps), each counts for itself.

Stages receive in buffers of one size, so that no tensor is handed over whose size data decide (the
rows that a mask chooses). Anything else (a tensor that a block leaves behind in an attribute, a
parameter added between two blocks) forbids the cut, and the reason is kept.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from planner.graph.analysis.changed_buffers import changes_of_buffers, written_values
from planner.graph.operator_graph import ModuleOutput, Phase, RefusedCut, StorageKind
from planner.graph.recording.known_values import SHAPE_ONLY_OPS
from planner.graph.recording.recording import ModuleCall, Recording

_TOLD_BY_DATA = (StorageKind.INPUT, StorageKind.TARGET, StorageKind.PARAMETER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A legal cut; the fields are those of ``CutPoint``."""

    after_unit: int
    values: tuple[int, ...]
    carried: tuple[ModuleOutput, ...]
    stream_output: ModuleOutput | None
    constants: tuple[int, ...]


class _Output(NamedTuple):
    """What a module has returned when an op is reached."""

    end_op: int
    of: ModuleOutput


class _NotCarriedError(Exception):
    """A value cannot be handed over; the message says why."""


def find_cuts(
    recording: Recording,
    calls: Sequence[ModuleCall],
    unit_of_op: Sequence[int],
) -> tuple[tuple[Cut, ...], tuple[RefusedCut, ...]]:
    """Find the legal cuts between neighbouring units.

    Args:
        recording: The step.
        calls: Calls of the blocks, in order.
        unit_of_op: Unit of every op.

    Returns:
        The legal cuts, and the other places with the reason.
    """
    finder = _CutFinder(recording, calls, unit_of_op)
    cuts: list[Cut] = []
    refused: list[RefusedCut] = []
    for unit in range(len(calls) + 1):
        try:
            cuts.append(finder.cut(unit))
        except _NotCarriedError as problem:
            refused.append(RefusedCut(after_unit=unit, reason=str(problem)))
    return tuple(cuts), tuple(refused)


class _CutFinder:
    def __init__(
        self, recording: Recording, calls: Sequence[ModuleCall], unit_of_op: Sequence[int]
    ) -> None:
        self._recording = recording
        self._calls = calls
        self._forward = [op for op in recording.ops if op.phase is Phase.FORWARD]
        self._producer = {value: op for op in self._forward for value in op.outputs}
        self._drawing = {op for op, _ in recording.draws}
        self._inside = {op for call in calls for op in range(call.first_op, call.end_op)}
        self._last_use: dict[int, int] = {}
        """Last forward op that reads each value."""
        for op in self._forward:
            self._last_use.update(dict.fromkeys(op.inputs, op.id))
        self._crossing = self._find_crossing(unit_of_op, len(calls) + 2)
        blocks = {call.module for call in calls}
        self._blocks = blocks
        self._holders = {path for block in blocks for path in _above(block)}
        """Modules that contain blocks: every stage runs their code."""
        self._changed = changes_of_buffers(recording.ops, recording.values, recording.storages)
        self._bound = self._find_bound()
        self._lonely = self._find_lonely()
        self._sized_by_data = self._find_sized_by_data()
        names = [name for parameter in recording.parameters for name in parameter.names]
        self._parametric = {path for name in (*names, *self._owned()) for path in _above(name)}
        self._outputs = self._find_outputs()

    # What the step tells -------------------------------------------------------------------------

    def _find_crossing(self, unit_of_op: Sequence[int], num_units: int) -> list[list[int]]:
        """List for each unit the values made in it or before and used in forward after it."""
        crossing: list[list[int]] = [[] for _ in range(num_units)]
        for value, op in self._producer.items():
            last = self._last_use.get(value)
            for unit in range(unit_of_op[op.id], unit_of_op[last] if last is not None else 0):
                crossing[unit].append(value)
        return crossing

    def _owned(self) -> list[str]:
        """Those of modules that hold no blocks: a single stage has them."""
        changed = self._changed.values()
        return [name for name in changed if name.rpartition(".")[0] not in self._holders]

    def _find_bound(self) -> set[int]:
        """Values that a stage cannot make again from the model's inputs alone."""
        owned = set(self._owned())
        bound = {
            value.id
            for value in self._recording.values
            if self._recording.storages[value.storage].kind is StorageKind.PARAMETER
            or self._changed.get(value.storage) in owned
        }
        for op in self._forward:
            depends = any(value in bound for value in op.inputs)
            if op.id in self._inside or depends or op.id in self._drawing:
                bound.update(op.outputs)
        return bound

    def _find_lonely(self) -> str:
        """A buffer of code that all stages run, which one stage alone can change; "" for none."""
        owned = set(self._owned())
        written = (
            self._recording.values[value].storage
            for op in self._forward
            if not self._bound.isdisjoint(op.inputs)
            for value in written_values(op)
        )
        names = (self._changed[storage] for storage in written if storage in self._changed)
        return min((name for name in names if name not in owned), default="")

    def _find_sized_by_data(self) -> set[int]:
        """Values that have another size for other data.

        What an op makes of such a value has none of its own where it is shaped like another input:
        a tensor into which chosen rows are written, say.
        """
        values = self._recording.values
        found: set[int] = set()
        told = self._find_told_by_inputs()
        counting = set(self._recording.counting_ops)
        for op in self._forward:
            masks = [value for value in op.inputs if "bool" in values[value].dtype]
            counts = op.id in counting and not told.isdisjoint(masks or op.inputs)
            if counts or not found.isdisjoint(op.inputs):
                kept = () if counts else op.inputs
                fixed = {(), *(values[value].shape for value in kept if value not in found)}
                found.update(value for value in op.outputs if values[value].shape not in fixed)
        return found

    def _find_told_by_inputs(self) -> set[int]:
        """Values that are others for other inputs of the model, other weights or other draws."""
        found = {
            value.id
            for value in self._recording.values
            if self._recording.storages[value.storage].kind in _TOLD_BY_DATA
        }
        for op in self._forward:
            if op.id in self._drawing or (
                op.name not in SHAPE_ONLY_OPS and not found.isdisjoint(op.inputs)
            ):
                found.update(op.outputs)
        return found

    def _find_outputs(self) -> dict[int, list[_Output]]:
        """Outputs of modules that run once, by value; of modules that contain blocks last."""
        times = Counter(call.module for call in self._recording.calls)
        outer = [
            call
            for call in self._recording.calls
            if call.module  # the model itself: what it returns, nobody is sent
            and times[call.module] == 1
            and not self._is_hidden(call.module)
        ]
        outer.sort(key=lambda call: call.module in self._holders)
        found: dict[int, list[_Output]] = {}
        for call in (*self._calls, *outer):
            for index, value in enumerate(call.outputs):
                maker = self._producer.get(value)
                if maker is not None and not call.first_op <= maker.id < call.end_op:
                    continue  # handed on: others may read it where it was made
                output = ModuleOutput(module=call.module, index=index)
                found.setdefault(value, []).append(_Output(call.end_op, output))
        return found

    def _output(self, value: int, first_op: int) -> ModuleOutput | None:
        """The module that has returned a value before an op."""
        for output in self._outputs.get(value, ()):
            if output.end_op <= first_op:
                return output.of
        return None

    def _is_hidden(self, module: str) -> bool:
        """Whether a module lies in a block, or in another module that may have a stand-in."""
        above = _above(module)
        return not self._blocks.isdisjoint(above) or any(
            path in self._parametric for path in above if path not in self._holders
        )

    # One place -----------------------------------------------------------------------------------

    def cut(self, unit: int) -> Cut:
        """Describe the cut after a unit.

        Raises:
            _NotCarriedError: It is not legal.
        """
        if self._lonely:
            raise _NotCarriedError(
                f"code that every stage runs changes the buffer {self._lonely} by what one stage "
                "computes; in a module of its own, without blocks, it may"
            )
        crossing = self._crossing[unit]
        stream = self._stream(unit)
        if stream not in crossing:
            raise _NotCarriedError("nothing that the next block works on was computed before")
        carried: dict[int, ModuleOutput] = {}
        constants: list[int] = []
        for value in crossing:
            if self._is_constant(value):
                constants.append(value)
            elif value != stream:
                self._carry(value, self._first_op(unit), carried)
        stream_output = self._stream_output(unit, stream, carried)
        for value in (stream, *carried):
            if value in self._sized_by_data:
                shape = self._recording.values[value].shape
                raise _NotCarriedError(f"data decide the size of a tensor of shape {shape} there")
        return Cut(
            after_unit=unit,
            values=(stream, *carried),
            carried=tuple(carried.values()),
            stream_output=stream_output,
            constants=tuple(value for value in constants if value != stream),
        )

    def _stream(self, unit: int) -> int:
        calls = self._calls
        if unit < len(calls):
            first = calls[unit].first_argument
            if first is None:
                raise _NotCarriedError("the block after it takes no tensor")
            return first
        if not calls[-1].outputs:
            raise _NotCarriedError("the last block returns no tensor")
        return calls[-1].outputs[0]

    def _stream_output(
        self, unit: int, stream: int, carried: dict[int, ModuleOutput]
    ) -> ModuleOutput | None:
        """Say how the stream reaches what reads it beside the next block."""
        calls = self._calls
        if unit < len(calls) and self._last_use[stream] >= calls[unit].end_op:
            self._carry(stream, self._first_op(unit), carried)
        return carried.pop(stream, None)

    def _first_op(self, unit: int) -> int:
        """First op after the cut behind a unit."""
        return self._calls[unit].first_op if unit < len(self._calls) else self._calls[-1].end_op

    def _is_constant(self, value: int) -> bool:
        return value not in self._bound and not self._recording.values[value].requires_grad

    def _carry(self, wanted: int, first_op: int, carried: dict[int, ModuleOutput]) -> None:
        """Add the module outputs that a value is, or is computed from, at the cut before an op.

        Raises:
            _NotCarriedError: It is made where no stand-in can hand it over.
        """
        left = [wanted]
        while left:
            value = left.pop()
            if value in carried or self._is_constant(value):
                continue
            output = self._output(value, first_op)
            if output is None:
                left.extend(self._sources(value))
            elif _is_floating(self._recording.values[value].dtype):
                carried[value] = output
            else:
                raise _NotCarriedError(f"integers made by {output.module} cross it")

    def _sources(self, value: int) -> tuple[int, ...]:
        """What a value is computed from between modules, where a stage can do that again."""
        tensor = self._recording.values[value]
        op = self._producer.get(value)
        if op is None:
            name = self._recording.storages[tensor.storage].name
            raise _NotCarriedError(f"what crosses it is computed from {name or 'a parameter'}")
        if op.id in self._inside or op.id in self._drawing or self._is_replaced(op.module):
            raise _NotCarriedError(
                f"a tensor of shape {tensor.shape} crosses it that {op.name} makes inside of"
                f" {op.module or 'the forward of the model'}"
            )
        return op.inputs

    def _is_replaced(self, module: str) -> bool:
        """Whether a stage may hold a stand-in for a module outside of the blocks, or around it."""
        return any(
            path in self._parametric
            for path in (*_above(module), module)
            if path not in self._holders
        )


def _above(path: str) -> list[str]:
    """Paths of the modules that hold a module, the root included."""
    parts = path.split(".") if path else []
    return [".".join(parts[:count]) for count in range(len(parts))]


def _is_floating(dtype: str) -> bool:
    return "float" in dtype or "complex" in dtype
