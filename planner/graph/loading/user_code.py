"""Running the user's code: whatever it raises becomes an error that names its line."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from planner.errors import ModelError, PlannerError
from planner.graph.loading.source import line_of_traceback

_DEFAULT_HINT = (
    'The model must build, run and differentiate without data: try it under torch.device("meta").'
)

_NO_META_KERNEL = re.compile(r"(\w+::\w+).*no fake impl or Meta kernel", re.DOTALL)


_HIGHER_ORDER = re.compile(r"registered for HigherOrderOperator (\w+)")

_HINTS = {
    "sparse": "Sparse tensors have no storage that could be traced: use dense ones, an index or a"
    " mask.",
    "nested": "Nested tensors cannot be traced: use padded ones, or samples laid one after the"
    " other.",
    "process group": "The model communicates by itself: do so only where"
    " torch.distributed.is_initialized().",
    "saved tensor hooks": "torch.func.grad and its kind cannot be traced: use"
    " torch.autograd.grad(..., create_graph=True).",
}
"""What would help, by what is found in an error or in its line."""


@contextmanager
def user_code(action: str) -> Iterator[None]:
    """Turn what user code raises into a ``ModelError`` with its type, message and line.

    Args:
        action: What was being done, for the message: "Building model.py:build_model".
    """
    try:
        yield
    except PlannerError:
        raise
    except (Exception, SystemExit) as error:
        line = line_of_traceback(error.__traceback__)
        where = f"\nat {line}" if line else ""
        words, hint = _explain(error, line)
        raise ModelError(f"{action} raised {words}{where}", hint=hint) from error


def _explain(error: BaseException, line: str) -> tuple[str, str]:
    """Spell an exception, and say what would help."""
    words = f"{type(error).__name__}: {error}"
    if isinstance(error, ModuleNotFoundError):
        return words, f"Install {error.name}, or put it beside the model file."
    if found := _HIGHER_ORDER.search(words):
        words = f"{type(error).__name__}: the operator {found[1]} takes functions"
        return words, "Such operators cannot be traced: write the branch or the loop in Python."
    for sign, hint in _HINTS.items():
        if sign in f"{words} {line}".lower():
            return words, hint
    if isinstance(error, RecursionError):
        return words, "The model calls itself without end, or nests its modules too deeply."
    if "dtype" in words or "scalar type" in words:
        return (
            words,
            "Parameters are cast to the compute dtype, buffers are not: try --dtype float32.",
        )
    if found := _NO_META_KERNEL.search(words):
        words = f"{type(error).__name__}: {found[1]} has no kernel for tensors without data."
        return words, (
            f'Tell torch the shape of its result with torch.library.register_fake("{found[1]}"),'
            " or use another operator."
        )
    return words, _DEFAULT_HINT
