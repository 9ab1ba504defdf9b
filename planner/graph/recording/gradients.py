"""Which forward value each gradient belongs to, told by autograd's own wiring.

Every node of autograd is handed the gradients of what it made. Shapes say nothing about it: an
activation of as many tokens as there are channels has the shape of a weight.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from planner.graph import torch_private
from planner.graph.recording.value_table import ValueTable

if TYPE_CHECKING:
    from torch.autograd.graph import Node


class Gradients:
    """Notes on the storages that backward makes whose gradient they hold."""

    def __init__(self, table: ValueTable) -> None:
        self._table = table
        self._first_storage = 0

    def watch(self) -> None:
        """Let autograd tell, from now on; forward has ended."""
        self._first_storage = len(self._table.storages)
        made: dict[Node, dict[int, int]] = {}
        with torch_private.modes_disabled():
            for tensor, value in self._table.held():
                if torch_private.is_transformed(tensor):
                    continue
                if (node := tensor.grad_fn) is not None:
                    made.setdefault(node, {})[tensor.output_nr] = value
        for node, values in made.items():
            node.register_prehook(partial(self._see, values))

    def _see(self, values: Mapping[int, int], gradients: Sequence[Tensor | None]) -> None:
        """Note what a node gets: values by position among its outputs, and their gradients."""
        for position, value in values.items():
            gradient = gradients[position]
            if gradient is not None and not torch_private.is_transformed(gradient):
                self.note(self._table.read(gradient, keep=False), value)

    def note(self, gradient: int, value: int) -> None:
        """Note whose gradient a value is.

        A node that hands on what it gets (a sum) makes one gradient that of several values; it
        counts as that of the value for which it was made.
        """
        storage = self._table.keys[gradient][0]
        entry = self._table.storages[storage]
        if storage >= self._first_storage and entry.gradient_of is None:
            entry.gradient_of = value

    def note_sum(self, inputs: Sequence[int], outputs: Sequence[int]) -> None:
        """Note that what is added up to a gradient is a part of it."""
        for output in outputs:
            whole = self._table.storages[self._table.keys[output][0]].gradient_of
            if whole is not None:
                for part in inputs:
                    self.note(part, whole)
