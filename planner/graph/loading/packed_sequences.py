"""Packed sequences without data: samples of several lengths, laid one after the other.

torch packs by reading lengths on the CPU. Here the lengths are known or told by a hint, and packing
is an index: as many bytes move as in torch's own kernel.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from planner.graph import torch_private

Reader = Callable[[Tensor, str], Tensor]
"""Returns the data of a tensor; gets the name of the function that wants it."""


def packing(read: Reader) -> Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor]]:
    """Make the function that packs padded samples, in place of torch's."""

    def pack(source: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:  # noqa: FBT001
        with torch_private.modes_disabled():
            long: list[int] = read(lengths, "pack_padded_sequence").tolist()
            sizes = [sum(length > step for length in long) for step in range(max(long))]
            batch_sizes = torch.tensor(sizes)
        size, steps = source.shape[:2] if batch_first else source.shape[1::-1]
        positions = _positions(sizes, size, steps, batch_first=batch_first)
        return source.flatten(0, 1).index_select(0, torch.tensor(positions)), batch_sizes

    return pack


def padding(read: Reader) -> Callable[..., tuple[Tensor, Tensor]]:
    """Make the function that pads packed samples, in place of torch's."""

    def pad(
        data: Tensor,
        batch_sizes: Tensor,
        batch_first: bool,  # noqa: FBT001
        padding_value: float,
        steps: int,
    ) -> tuple[Tensor, Tensor]:
        with torch_private.modes_disabled():
            sizes: list[int] = read(batch_sizes, "pad_packed_sequence").tolist()
        size = sizes[0]
        positions = _positions(sizes, size, steps, batch_first=batch_first)
        empty = data.new_full((size * steps, *data.shape[1:]), padding_value)
        lead = (size, steps) if batch_first else (steps, size)
        lengths = [sum(sample < each for each in sizes) for sample in range(size)]
        padded = empty.index_put((torch.tensor(positions),), data)
        return padded.view(*lead, *data.shape[1:]), torch.tensor(lengths)

    return pad


def _positions(
    batch_sizes: Sequence[int], size: int, steps: int, *, batch_first: bool
) -> list[int]:
    """Where the packed rows lie in the padded samples: step by step, the samples that last."""
    return [
        sample * steps + step if batch_first else step * size + sample
        for step, lasting in enumerate(batch_sizes)
        for sample in range(lasting)
    ]
