"""What ``--fix`` takes: names, and how the value of each is checked and spelled."""

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches

from planner.cost.pipeline import SPLIT_SCHEDULES
from planner.errors import RequestError
from planner.vocabulary import (
    MESH_ORDER,
    ORDER_SIGN,
    PLANNED_AXES,
    PLANNED_SCHEDULES,
    RECOMPUTATIONS,
    Axis,
    Recomputation,
)


def check_choice(setting: str, value: str, choices: Iterable[str]) -> str:
    """Return the value if it is one of the choices.

    Args:
        setting: What was typed.
        value: The value in it.
        choices: What it can be.

    Raises:
        RequestError: If it is not, with the nearest choice.
    """
    known = tuple(choices)
    if value in known:
        return value
    lowered = {choice.lower(): choice for choice in known}
    near = get_close_matches(value.lower(), lowered, n=1, cutoff=0.4)
    meant = f"Did you mean {lowered[near[0]]}? " if near else ""
    raise RequestError(
        f"{setting}: there is no such choice", hint=f"{meant}Choices: {', '.join(known)}."
    )


def _whole_number(name: str, value: str) -> str:
    digits = value.removeprefix("+")
    if not (digits.isascii() and digits.isdigit()) or int(digits) < 1:
        raise RequestError(
            f"--fix {name}={value}: {name} is a whole number, at least 1",
            hint=f"For example --fix {name}=2.",
        )
    return str(int(digits))


def _unplanned_with_frameworks(name: str, value: str) -> str:
    if _whole_number(name, value) != "1":
        raise RequestError(
            f"--fix {name}={value} with --framework: the axis {name} is priced for the emitted "
            "script alone",
            hint=f"Use --fix {name}=1, or leave out --framework.",
        )
    return "1"


def _boolean(name: str, value: str) -> str:
    return check_choice(f"--fix {name}={value}", value.lower(), ("true", "false"))


def _of_script_alone(name: str, value: str) -> str:
    raise RequestError(
        f"--fix {name}={value} with --framework: how a framework computes stands in its profile",
        hint="Leave out one of them; `plan profiles` shows what each profile is for.",
    )


def _one_of(choices: tuple[str, ...]) -> Callable[[str, str], str]:
    return lambda name, value: check_choice(f"--fix {name}={value}", value, choices)


def _mesh_order(name: str, value: str) -> str:
    axes = value.lower().split(ORDER_SIGN)
    for axis in axes:
        check_choice(f"--fix {name}={value}", axis, MESH_ORDER)
    if len(set(axes)) < max(2, len(axes)):
        raise RequestError(
            f"--fix {name}={value}: an order has two axes or more, each of them once",
            hint=f"For example --fix {name}=dp_replicate{ORDER_SIGN}pp: dp_replicate around pp.",
        )
    return ORDER_SIGN.join(axes)


_SCRIPT_NAMES = ("compile", "loss_chunks", "cpu_offload", "activation_offload", "mesh_order")
"""What the emitted script does alone."""

FIX_RULES: Mapping[str, Callable[[str, str], str]] = {
    **dict.fromkeys(PLANNED_AXES, _whole_number),
    "schedule": _one_of(PLANNED_SCHEDULES),
    "virtual_stages": _whole_number,
    "microbatch_size": _whole_number,
    "activation_checkpointing": _one_of(RECOMPUTATIONS),
    "reshard_after_forward": _boolean,
    "sequence_parallel": _boolean,
    "compile": _boolean,
    "float8": _boolean,
    "loss_chunks": _whole_number,
    "cpu_offload": _boolean,
    "activation_offload": _boolean,
    "mesh_order": _mesh_order,
}
"""What can be fixed, and how each value is checked and spelled."""

FRAMEWORK_FIX_RULES: Mapping[str, Callable[[str, str], str]] = {
    **FIX_RULES,
    **dict.fromkeys((Axis.CP, Axis.EP), _unplanned_with_frameworks),
    **dict.fromkeys(_SCRIPT_NAMES, _of_script_alone),
    "schedule": _one_of((*PLANNED_SCHEDULES, *SPLIT_SCHEDULES)),
    "activation_checkpointing": _one_of(tuple(Recomputation)),
}
"""The same for an estimate of another framework, which may do what the script does not."""

FIX_NAMES = tuple(FIX_RULES)
"""Names that ``--fix`` takes."""
