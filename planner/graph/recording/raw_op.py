"""An op while it is recorded: what kind it is, what it reads and writes, how it is spelled."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import Tensor

from planner.graph import torch_private
from planner.graph.operator_graph import Phase
from planner.graph.recording.refusals import OPS_OF_ONE_DTYPE
from planner.graph.torch_private import TorchOp

_ALIASING_OPS = frozenset({"_unsafe_view", "detach", "alias", "lift_fresh", "_reshape_alias"})
"""Ops whose schema does not say that they share their input's memory."""


@dataclass(slots=True)
class RawOp:
    """An op while it is being recorded; the fields are those of ``OpNode``."""

    name: str
    module: str
    phase: Phase
    is_view: bool
    is_pointwise: bool
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    arguments: tuple[object, ...]
    keyword_arguments: tuple[tuple[str, object], ...]
    flop: int
    read_bytes: int
    write_bytes: int
    forward_op: int | None
    is_of_function: bool = False
    """As in ``OpNode``."""
    accumulates: int | None = None
    """Storage of the parameter whose gradient it accumulates, where it does."""
    renewed: list[int] = field(default_factory=list)
    """Results too: other views of what it wrote to, where they are read later."""
    saved_inputs: list[int] = field(default_factory=list)
    saved_outputs: list[int] = field(default_factory=list)
    saved_in_vain: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpKind:
    """What is known of an op whatever its arguments."""

    name: str
    """Packet name: "mm"."""
    is_view: bool
    """Its result shares its input's memory."""
    is_pointwise: bool
    """torch says that it works element by element."""
    written: tuple[tuple[int, str, bool], ...]
    """Arguments that it writes to: position, name, whether by keyword only."""
    dynamic: bool
    """The shapes of its results depend on data."""
    one_dtype: bool
    """Its kernel takes tensors of one element type only."""
    is_random: bool
    """It draws random numbers, or may."""
    is_fresh: bool
    """Its results are new memory that depends on nothing but the shapes of its arguments."""


@cache
def op_kind(func: TorchOp) -> OpKind:
    """Read an op's kind off its schema."""
    name = torch_private.packet_name(func)
    is_view, written = torch_private.schema_aliases(func)
    return OpKind(
        name=name,
        is_view=is_view or name in _ALIASING_OPS,
        is_pointwise=torch_private.is_pointwise(func),
        written=written,
        dynamic=torch_private.has_dynamic_output(func),
        one_dtype=name in OPS_OF_ONE_DTYPE,
        is_random=torch_private.is_random(func),
        is_fresh=func.namespace in ("aten", "planner") and not (is_view or written),
    )


def draws(func: TorchOp, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Tell whether what a random op draws has a say: attention without dropout draws nothing."""
    chance = torch_private.chance_argument(func)
    if chance is None:
        return True
    position, name, default = chance
    given = args[position] if position < len(args) else kwargs.get(name, default)
    return isinstance(given, Tensor) or given != 0


def written_tensors(kind: OpKind, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Collect what an op writes to."""
    targets: list[Tensor] = []
    for position, name, keyword_only in kind.written:
        by_name = keyword_only or position >= len(args)
        tensors_in((kwargs.get(name) if by_name else args[position],), targets)
    return targets


def plain(argument: object) -> object:
    """Spell an argument without torch: tensors as None, lists as tuples, dtypes as strings."""
    if argument is None or isinstance(argument, (bool, int, float, str)):
        return argument
    if isinstance(argument, Tensor):
        return None
    if isinstance(argument, (list, tuple)):
        if any(isinstance(item, Tensor) for item in argument):
            return None
        return tuple([plain(item) for item in argument])
    return str(argument).removeprefix("torch.")


def tensors_in(arguments: Sequence[Any], found: list[Tensor]) -> list[Tensor]:
    """Collect tensors in argument order, those inside lists too."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            found.append(argument)
        elif isinstance(argument, (list, tuple)):
            tensors_in(argument, found)
    return found
