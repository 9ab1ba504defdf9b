"""Where a model can be cut into pipeline stages, from what crosses each place."""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.graph.operator_graph import Phase, StorageKind
from planner.graph.recording import ModuleCall, Recording


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A legal cut."""

    after_unit: int
    value: int
    """The one value that is sent."""
    constants: tuple[int, ...]
    """Values that each stage makes again."""


def find_cuts(
    recording: Recording,
    calls: Sequence[ModuleCall],
    unit_of_op: Sequence[int],
    names: Sequence[str],
) -> tuple[tuple[Cut, ...], str]:
    """Find the legal cuts between neighbouring units.

    A cut is legal where one value crosses that stages can send: the output of the block before it
    and the first argument of the block after it. Other values may cross if each stage can make
    them again from the model's inputs: no gradient flows through them, and they are computed
    outside of the blocks without parameters (rotary tables, masks).

    Args:
        recording: The step.
        calls: Calls of the blocks, in order.
        unit_of_op: Unit of every op.
        names: Names of the units.

    Returns:
        The legal cuts, and the reason why there is none ("" where there is one).
    """
    crossing = _crossing(recording, unit_of_op, len(names))
    unmakeable = _bound_values(recording, calls)
    cuts: list[Cut] = []
    reasons: list[str] = []
    for unit in range(len(names) - 1):
        sent = _sent_value(calls, unit)
        place = f"between {names[unit]} and {names[unit + 1]}"
        others = [value for value in crossing[unit] if value != sent]
        extra = [
            value
            for value in others
            if value in unmakeable or recording.values[value].requires_grad
        ]
        if sent is None:
            reasons.append(f"{place}, the output of the one is not the first argument of the other")
        elif extra:
            shapes = ", ".join(str(recording.values[value].shape) for value in extra[:3])
            reasons.append(
                f"{place}, {len(extra)} more tensor(s) cross besides the block's output"
                f" (shapes {shapes})"
            )
        elif sent in crossing[unit]:
            cuts.append(Cut(after_unit=unit, value=sent, constants=tuple(others)))
    if cuts or not reasons:
        return tuple(cuts), "" if cuts else "Nothing is computed before the first block."
    inner = reasons[1] if len(reasons) > 2 else reasons[0]
    return (), f"The model cannot be cut into stages: {inner}."


def _sent_value(calls: Sequence[ModuleCall], unit: int) -> int | None:
    """Return the value that a cut after a unit would send, None where the blocks do not chain."""
    before = calls[unit - 1].output if unit > 0 else None
    after = calls[unit].first_argument if unit < len(calls) else None
    if unit == 0:
        return after
    if unit == len(calls):
        return before
    return before if before == after else None


def _crossing(recording: Recording, unit_of_op: Sequence[int], num_units: int) -> list[list[int]]:
    """List for each unit the values made in it or before and used in forward after it."""
    made_in: dict[int, int] = {}
    last_use: dict[int, int] = {}
    for op in recording.ops:
        if op.phase is Phase.BACKWARD:
            break
        unit = unit_of_op[op.id]
        for value in op.inputs:
            if value in made_in:
                last_use[value] = unit
        for value in op.outputs:
            made_in[value] = unit
    crossing: list[list[int]] = [[] for _ in range(num_units)]
    for value, last in last_use.items():
        for unit in range(made_in[value], last):
            crossing[unit].append(value)
    return crossing


def _bound_values(recording: Recording, calls: Sequence[ModuleCall]) -> set[int]:
    """Return the values that a stage without the earlier blocks or parameters cannot make."""
    inside: set[int] = set()
    for call in calls:
        inside.update(range(call.first_op, call.end_op))
    bound = {
        value.id
        for value in recording.values
        if recording.storages[value.storage].kind is StorageKind.PARAMETER
    }
    for op in recording.ops:
        if op.phase is Phase.BACKWARD:
            break
        if op.id in inside or any(value in bound for value in op.inputs):
            bound.update(op.outputs)
    return bound
