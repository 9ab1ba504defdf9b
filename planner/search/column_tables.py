"""Columns of a stage as arrays: what many choices of a rank ask of them at once."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.search.columns import Column
from planner.search.configuration_search import ConfigurationSearch

Floats = NDArray[np.float64]


class ColumnTable:
    """The columns of a stage as arrays, a row each."""

    def __init__(self, search: ConfigurationSearch, columns: Sequence[Column]) -> None:
        """Read what they hold."""
        self._search = search
        self.columns = columns
        numbers = [
            (
                c.state.static_bytes,
                c.mix.kept_bytes + c.state.beside_bytes,
                c.mix.kept_bytes - c.mix.left_bytes,
                c.mix.kept_bytes
                + c.state.beside_bytes
                + c.state.waiting.gradients
                - c.state.waiting.released,
                c.state.waiting.released,
                c.state.gradient_bytes,
                c.state.late_gathered_bytes,
                c.state.new_gradient_bytes,
                c.mix.temporary_bytes,
                c.mix.early_temporary_bytes,
            )
            for c in columns
        ]
        found: Floats = np.array(numbers, dtype=float)
        self._static, self._activations, self._waiting = found[:, :1], found[:, 1:3], found[:, 3:5]
        self._state, self._transients = found[:, 5:8], found[:, 8:]

    @cached_property
    def lengths(self) -> NDArray[np.int64]:
        """Units of each."""
        return np.array([column.end - column.first for column in self.columns])

    @cached_property
    def seconds(self) -> Floats:
        """``Column.parts_s``."""
        return np.array([column.parts_s for column in self.columns])

    @cached_property
    def every_s(self) -> Floats:
        """The same, and ``Column.step_s``: one that is no more in any of them is no slower."""
        steps = [column.step_s for column in self.columns]
        return np.column_stack([self.seconds, steps])

    @cached_property
    def own_s(self) -> Floats:
        """``ConfigurationSearch.least_parts_s`` of the units of each."""
        return np.array([self._search.least_parts_s(c.first, c.end) for c in self.columns])

    @cached_property
    def reductions(self) -> Floats:
        """Bytes when gradients are reduced after backward."""
        return np.array([float(column.state.reduction_bytes) for column in self.columns])

    def path_s(self, counts: Floats) -> Floats:
        """Seconds along paths that take each part of a column so often."""
        seconds: Floats = self.seconds @ counts.T
        return seconds

    def held_bytes(self, moments: Floats) -> Floats:
        """``Column.held_bytes`` at each moment; at the mean of some, no more than its mean."""
        in_flight, is_ending, follows_backward, has_gradients, *divided = moments.T
        waiting, is_dividing, has_new_gradients, runs = divided
        held = self._activations[:, :1] * in_flight - self._activations[:, 1:] * is_ending
        held += self._waiting[:, :1] * waiting + self._waiting[:, 1:] * is_dividing
        state = self._static + self._state[:, :1] * has_gradients
        state += self._state[:, 2:] * has_new_gradients
        state += self._state[:, 1:2] * follows_backward
        early = is_ending + is_dividing
        in_all: Floats = state + np.maximum(0.0, held)
        in_all += self._transients @ np.array([runs - early, early])
        return in_all
