"""Flex attention on the meta device, as the kernel that a compiled run has."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from planner.graph import torch_private
from planner.graph.loading.source import UserLine, lines_of_stack
from planner.graph.torch_private import TorchResult


class FlexOnMeta:
    """Runs flex attention as attention without a mask: one fused kernel that keeps no scores."""

    def __init__(self) -> None:
        self._lines: dict[UserLine, None] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What is left out, one sentence for each line."""
        return tuple(
            f"{line.place} ({line.code}) is flex attention, traced as attention of every query to"
            " every key: its block mask and its changes of scores are left out"
            for line in self._lines
        )

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let flex attention work on meta tensors."""
        with torch_private.flex_attention_kernel(self._attend):
            yield

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, *options: TorchResult
    ) -> tuple[Tensor, Tensor, Tensor]:
        line = next(lines_of_stack(), None)
        if line is not None:
            self._lines[line] = None
        scale = options[2]
        output = functional.scaled_dot_product_attention(
            query, key, value, scale=scale, enable_gqa=key.shape[-3] != query.shape[-3]
        )
        sums = torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device)
        return output, sums, sums
