"""An op on operands in given layouts, as the rules of ops are asked about it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .layout import Layout
from .trees import Tree

Shape = tuple[int, ...]


class Op(Protocol):
    """An op of torch with the arguments of a call."""

    @property
    def name(self) -> str:
        """Packet name: "mm"."""

    @property
    def is_pointwise(self) -> bool:
        """Torch says that it works element by element."""

    @property
    def arguments(self) -> tuple[object, ...]:
        """Positional arguments: tensors as None, lists as tuples."""


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that an op reads."""

    shape: Shape
    layout: Layout | None
    """None for a constant of the step."""

    @property
    def split(self) -> Layout | None:
        """The layout where it is a shard."""
        return self.layout if self.layout is not None and self.layout.is_shard else None


@dataclass(frozen=True, slots=True)
class Call:
    """An op on operands in given layouts, at least one of them a shard."""

    op: Op
    operands: Sequence[Operand]
    targets: Sequence[Shape]
    """Shape of each output."""

    def __str__(self) -> str:
        operands = ", ".join(f"{each.shape} {each.layout or 'whole'}" for each in self.operands)
        return f"{self.op.name} of {operands}"

    @property
    def first(self) -> Operand:
        """The operand that most ops work on."""
        return self.operands[0]

    def argument(self, position: int, default: object) -> object:
        """Return a positional argument that is no tensor, or its default."""
        arguments = self.op.arguments
        return arguments[position] if position < len(arguments) else default

    def dim(self, position: int, default: int, ndim: int) -> int:
        """Return a positional argument that is a dim of a tensor with ``ndim`` dims."""
        dim = self.argument(position, default)
        assert isinstance(dim, int), f"{self.op.name} has no dim at {position}"
        return dim % max(ndim, 1)


Found = Sequence[Layout] | None
"""One layout per output, None where the op cannot run on its operands."""


Rule = Callable[[Call, int], Found]
"""Called with the op and the ranks of the axis."""


def plain(value: object) -> Tree:
    """Spell arguments without tensors, as the operator graph does."""
    if isinstance(value, Tensor):
        return None
    if isinstance(value, list | tuple):
        if any(isinstance(each, Tensor) for each in value) and not isinstance(value, tuple):
            return None
        return tuple(plain(each) for each in value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value).removeprefix("torch.")
