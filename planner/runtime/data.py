"""The microbatches of a step, and what is drawn at random in it: the same when it runs again."""

import contextlib
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from .model import UserModel
from .processes import RankError, RunError
from .trees import Microbatch, Tree, tensors_of


def drawn_microbatches(
    user: UserModel, seed: int, step: int, samples: Iterable[int], microbatch_size: int
) -> list[Microbatch]:
    """Draw microbatches, the same in every layout of one global batch size.

    Each sample is one of ``example_batch(1)`` under a seed of its own, that of the run mixed with
    the number of steps before this one and the sample's position in the global batch. So a rank
    draws no others than ``samples``, the positions that it reads.
    """
    drawn = []
    with given_back():
        for position in samples:
            seed_draws(mixed_seed(seed, step, position))
            drawn.append(checked(user.example_batch(1), 1, "example_batch(1)"))
    shapes = {tuple(tensor.shape for tensor in tensors_of(sample)) for sample in drawn}
    if len(shapes) > 1:
        raise RunError(f"example_batch(1) returns tensors of changing shapes: {shapes}")
    return split_batch(joined_batch(drawn), microbatch_size)


def checked(batch: Tree, size: int | None, source: str) -> Microbatch:
    """Return inputs and targets of a batch; a dict is the arguments of a model with its own loss.

    All its tensors must have ``size`` samples, or where that is None, equally many.
    """
    inputs, targets = (batch, None) if isinstance(batch, Mapping) else batch
    inputs = dict(inputs) if isinstance(inputs, Mapping) else inputs  # of collators, too
    for tensor in tensors_of((inputs, targets)):
        size = len(tensor) if size is None else size
        if tensor.shape[:1] != (size,):
            raise RankError(
                f"{source} gave a tensor of shape {tuple(tensor.shape)}: its first dim must be "
                f"the samples, {size} here (a DataLoader needs drop_last=True)"
            )
    return inputs, targets


def split_batch(batch: Tree, size: int) -> list[Microbatch]:
    """Split a batch into microbatches of ``size`` samples."""
    batch = checked(batch, None, "the training loop")
    num_samples = len(tensors_of(batch)[0])
    if num_samples % size:
        raise RankError(f"{num_samples} samples are no whole microbatches of {size}")

    def piece(first: int) -> Tree:
        return tree_map_only(Tensor, lambda t: t[first : first + size], batch)

    return [piece(first) for first in range(0, num_samples, size)]


def joined_batch(microbatches: Iterable[Microbatch]) -> Microbatch:
    """Return one batch of all microbatches."""
    joined: Microbatch = tree_map(
        lambda *each: torch.cat(each) if isinstance(each[0], Tensor) else each[0], *microbatches
    )
    return joined


def mixed_seed(*numbers: int) -> int:
    """Mix numbers into one seed (any order-dependent mix without collisions nearby will do)."""
    mixed = 0
    for number in numbers:
        mixed = (mixed * 1_000_003 + number + 1) % 2**63
    return mixed


def seed_draws(seed: int, *, samples: int = 0) -> None:
    """Seed all generators for a microbatch: on hosts alike for all ranks, on GPUs by its samples.

    Ranks that run a part of the model each draw alike what lies around their parts, in whatever
    order a schedule runs microbatches; and all gather the same layers where a draw leaves some out.
    """
    random.seed(seed)
    if numpy := _numpy():
        numpy.seed(seed % 2**32)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed(mixed_seed(seed, samples))
    torch.default_generator.manual_seed(seed)


@contextlib.contextmanager
def given_back() -> Iterator[None]:
    """Let all generators go on after it as before: Python's, numpy's, torch's and the device's."""
    state = python_state()
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng([torch.cuda.current_device()] if started else []):
        try:
            yield
        finally:
            set_python_state(state)


def python_state() -> tuple[Any, Any]:
    """Return the state of Python's generator and, where it is loaded, of numpy's."""
    numpy = _numpy()
    return random.getstate(), numpy and numpy.get_state()


def set_python_state(state: tuple[Any, Any]) -> None:
    """Let them go on from a state."""
    random.setstate(state[0])
    if state[1]:
        _numpy().set_state(state[1])


def _numpy() -> Tree:
    return getattr(sys.modules.get("numpy"), "random", None)
