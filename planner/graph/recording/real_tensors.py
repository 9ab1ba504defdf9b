"""Tensors with data that a model brings into its forward pass: literals, globals, attributes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from planner.graph import torch_private
from planner.graph.loading.source import UserLine, lines_of_stack
from planner.graph.recording.known_values import KnownValues
from planner.graph.recording.value_table import ValueTable

_META = torch.device("meta")

_MOVING_OPS = frozenset({"_to_copy", "copy_", "index", "index_put_", "lift_fresh"})
"""Ops that take a tensor on the CPU beside one on a GPU."""


class RealTensors:
    """Gives each tensor with data a twin on the meta device, whose data is known."""

    def __init__(self, table: ValueTable, known: KnownValues) -> None:
        self._table = table
        self._known = known
        self._twins: dict[int, tuple[Tensor, Tensor]] = {}
        self._mixed: dict[UserLine, None] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What a GPU would refuse, one sentence for each line."""
        return tuple(
            f"{line.place} ({line.code}) mixes a tensor on the CPU, which is neither parameter"
            " nor buffer, with the model's own: on a GPU this raises; move it with .to(x.device)"
            " or register it as a buffer"
            for line in self._mixed
        )

    def lift(self, real: Tensor) -> Tensor:
        """Make a twin."""
        twin = torch.empty_like(real, device=_META)
        self._known.seed(self._table.read(twin, keep=True), real.detach().cpu())
        return twin

    def replace(
        self, name: str, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the tensors with data among an op's arguments by their twins.

        Single numbers stay as they are beside a meta tensor: torch takes them together.

        Args:
            name: Name of the op.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            tensors: The tensors in both.
        """
        has_meta = any(tensor.is_meta for tensor in tensors)

        def replace(tensor: Tensor) -> Tensor:
            if tensor.is_meta:
                return tensor
            if has_meta and not tensor.dim():
                self._known.seed(self._table.read(tensor, keep=True), tensor.detach())
                return tensor
            return self._twin(tensor)

        is_mixed = has_meta and any(tensor.dim() and not tensor.is_meta for tensor in tensors)
        if is_mixed and name not in _MOVING_OPS and (line := next(lines_of_stack(), None)):
            self._mixed[line] = None
        replaced: tuple[tuple[Any, ...], dict[str, Any]] = torch_private.tree_map_only(
            Tensor, replace, (tuple(args), kwargs)
        )
        return replaced

    def _twin(self, real: Tensor) -> Tensor:
        # The pair keeps the real tensor alive, so that its identity stays unique.
        pair = self._twins.get(id(real))
        if pair is None:
            pair = self._twins[id(real)] = real, self.lift(real)
        return pair[1]
