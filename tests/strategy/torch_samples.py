"""Samples of every op, from the database with which torch tests itself.

The database is private to torch: this is the one file that knows where it is and what it holds.
"""

import contextlib
import itertools
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

PLACE = "torch.testing._internal.common_methods_invocations"
SEARCHERS = (
    "torch.testing._internal.common_utils",
    "torch.testing._internal.opinfo.core",
)
"""Modules that look for the test case that draws a sample."""
LEAST_OPS = 600
"""torch 2.13 has 702."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One call of an op on small tensors of float64 with data."""

    op: str
    """Name of the op in the database, with its variant."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    run: Any
    """The function that users call."""
    in_place: Any
    """Its variant that writes to the first argument, None where there is none."""


def samples_of_every_op(per_op: int) -> Iterator[Sample]:
    """Draw samples of every op that takes float64.

    Args:
        per_op: Samples of one op at most.

    Raises:
        RuntimeError: torch has moved or changed its database.
    """
    for info in _database():
        if torch.float64 not in info.dtypes:
            continue
        with warnings.catch_warnings(), _no_test_searched():
            warnings.simplefilter("ignore", UserWarning)
            torch.manual_seed(0)
            drawn = info.sample_inputs("cpu", torch.float64, requires_grad=False)
            chosen = list(itertools.islice(drawn, per_op))
        for sample in chosen:
            yield Sample(
                op=f"{info.name}.{info.variant_test_name}".rstrip("."),
                args=(sample.input, *sample.args),
                kwargs=dict(sample.kwargs),
                run=info.op,
                in_place=info.inplace_variant,
            )


@contextlib.contextmanager
def _no_test_searched() -> Iterator[None]:
    """Spare torch the search of the call stack for the test case that draws: there is none.

    It would take most of the time: it reads the source of every frame.
    """
    with contextlib.ExitStack() as stack:
        for place in SEARCHERS:
            stack.enter_context(mock.patch(f"{place}.extract_test_fn", return_value=None))
        yield


def _database() -> list[Any]:
    with mock.patch.dict(os.environ), mock.patch("torch.backends.disable_global_flags"):
        try:
            module = __import__(PLACE, fromlist=["op_db"])
            found = list(module.op_db)
            names = {info.name for info in found if callable(info.sample_inputs) and info.dtypes}
        except (ImportError, AttributeError) as error:
            raise RuntimeError(
                f"torch {torch.__version__} has no {PLACE}.op_db as 2.13 has it: find where its "
                "samples of ops (OpInfo) went, and change this file alone"
            ) from error
    if len(names) < LEAST_OPS:
        raise RuntimeError(
            f"{PLACE}.op_db of torch {torch.__version__} has {len(names)} ops, 2.13 had "
            f"{LEAST_OPS} and more: find where the others went"
        )
    return found
