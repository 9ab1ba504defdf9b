"""What a step draws at random: alike where ranks must agree, and the same when it runs again."""

import contextlib
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch

from .data import mixed_seed
from .trees import Tree


def _numpy() -> Tree:
    return getattr(sys.modules.get("numpy"), "random", None)


def python_state() -> tuple[Any, Any]:
    """Return the state of Python's generator and, where it is loaded, of numpy's."""
    numpy = _numpy()
    return random.getstate(), numpy and numpy.get_state()


def set_python_state(state: tuple[Any, Any]) -> None:
    """Let them go on from a state."""
    random.setstate(state[0])
    if state[1]:
        _numpy().set_state(state[1])


@contextlib.contextmanager
def given_back(device: torch.device) -> Iterator[None]:
    """Let all generators go on after it as before: Python's, numpy's, torch's and the device's."""
    state = python_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            set_python_state(state)


def seed_draws(seed: int, *, samples: int) -> None:
    """Seed all generators for a microbatch: on hosts alike for all ranks, on GPUs by its samples.

    Ranks that run a part of the model each draw alike what lies around their parts, in whatever
    order a schedule runs microbatches; and all gather the same layers where a draw leaves some out.

    Args:
        seed: Of the microbatch.
        samples: Tells ranks apart that read different ones.
    """
    random.seed(seed)
    if numpy := _numpy():
        numpy.seed(seed % 2**32)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(mixed_seed(seed, samples))
    torch.default_generator.manual_seed(seed)
