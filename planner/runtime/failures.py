"""What fails when a model is tried, and in which of its modules."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from .trees import Tree


class DryRunError(RuntimeError):
    """A layout does not run; the cause says why."""

    def __init__(self, module: str, reason: str) -> None:
        super().__init__(f"{module}: {reason}" if module else reason)
        self.module = module
        """Path of the innermost module that ran, "" where backward failed."""
        self.reason = reason
        """What failed there."""


@contextmanager
def naming_modules(model: nn.Module, below: str) -> Iterator[None]:
    """Turn what fails into an error that names the innermost module that ran."""
    running: list[str] = []
    handles = []

    def enter(path: str) -> Callable[..., None]:
        return lambda *_: running.append(path)

    def leave(*_: Tree) -> None:
        running.pop()

    for path, module in model.get_submodule(below).named_modules(prefix=below):
        handles.append(module.register_forward_pre_hook(enter(path), prepend=True))
        handles.append(module.register_forward_hook(leave))
    try:
        yield
    except DryRunError:
        raise
    except Exception as error:
        module = running[-1] if running else ""
        raise DryRunError(module, _reason(error)) from error
    finally:
        for handle in handles:
            handle.remove()


def _reason(error: Exception) -> str:
    """What failed, also where the error's own words are but a key."""
    if not isinstance(error, (LookupError, AttributeError)):
        return first_line(error)
    return (
        f"{type(error).__name__}: {first_line(error)}: code around a block may read what the "
        "block leaves in an attribute or by a hook; what it returns is handed over"
    )


def first_line(error: BaseException) -> str:
    """What an error says in its first line, or its type."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
