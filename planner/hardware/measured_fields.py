"""Fields of profiles that only a measured machine has."""

from typing import TypedDict

from planner.errors import ProfileError
from planner.hardware.fields import FieldReader
from planner.hardware.spec import Curve, ScriptHost
from planner.units import GB, MIB, us_to_s

_OPS = "ops"

_CURVE_KEYS = {"us_by_mib": (MIB, 1e-6), "us_by_gflop": (GB, 1e-6), "ns_by_head_dim": (1, 1e-9)}
"""Keys of a measured op's curve, and the units of its sizes and times."""

_SCRIPT = "script"

_SCRIPT_KEYS = {
    "step_us": "step_s",
    "unit_us": "unit_s",
    "collective_us": "collective_s",
    "tensor_us": "tensor_s",
    "plain_tensor_us": "plain_tensor_s",
    "message_us": "message_s",
    "full_op_us": "full_op_s",
    "selective_op_us": "selective_op_s",
    "split_op_us": "split_op_s",
    "split_collective_us": "split_collective_s",
}


def read_ops(reader: FieldReader) -> dict[str, Curve]:
    """Read the curves of measured ops."""
    found = {}
    for index, table in enumerate(reader.tables(_OPS) if reader.has(_OPS) else []):
        each = FieldReader(path=reader.path, table=table, prefix=f"{_OPS}[{index}].")
        key = next((key for key in _CURVE_KEYS if each.has(key)), "us_by_mib")
        size_unit, seconds = _CURVE_KEYS[key]
        found[each.text("name")] = tuple(
            (size * size_unit, time * seconds) for size, time in each.curve(key)
        )
        each.finish()
    return found


def _read_script(reader: FieldReader) -> ScriptHost | None:
    """Read what the script's own code takes, None where it was not measured.

    Raises:
        ProfileError: A number is missing, as in profiles that an older version has measured.
    """
    if not reader.has(_SCRIPT):
        return None
    each = FieldReader(path=reader.path, table=reader.one_table(_SCRIPT), prefix=f"{_SCRIPT}.")
    missing = [key for key in _SCRIPT_KEYS if not each.has(key)]
    if missing:
        raise ProfileError(
            f"{reader.path}: [{_SCRIPT}] has no {', '.join(missing)}",
            hint="an older version has measured this machine: measure it again, "
            f"`plan profile --out {reader.path} --force`",
        )
    script = ScriptHost(
        **{name: us_to_s(each.number(key)) for key, name in _SCRIPT_KEYS.items()},
        element_s=each.number("ns_per_element") / GB,
    )
    each.finish()
    return script


class MeasuredFields(TypedDict):
    """Fields of a ``ClusterSpec``."""

    hides_traffic: bool
    script_host: ScriptHost | None
    measured_on: str


def read_measured(reader: FieldReader) -> MeasuredFields:
    """Read what a cluster's profile has of the machine."""
    waits = reader.has("traffic") and reader.text("traffic", ("hidden", "waited_for")) != "hidden"
    return {
        "hides_traffic": not waits,
        "script_host": _read_script(reader),
        "measured_on": reader.text("measured_on") if reader.has("measured_on") else "",
    }
