"""Arguments of an op, looked through and spelled."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor


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
