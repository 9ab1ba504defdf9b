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
        self._sizes = sizes_of(columns)

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
        return held_at(self._sizes[:, None], moments)


def sizes_of(columns: Sequence[Column]) -> Floats:
    """What ``held_at`` asks of columns, a row each."""
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
    return np.array(numbers, dtype=float)


def held_at(sizes: Floats, moments: Floats) -> Floats:
    """``Column.held_bytes`` of columns at moments, whose last axes are joined.

    Args:
        sizes: As ``sizes_of`` has them.
        moments: As ``moment_rows`` has them.
    """
    static, kept, gone, waiting, released, gradients, late, new, temporary, early = np.moveaxis(
        sizes, -1, 0
    )
    in_flight, ends, follows, has_gradients, waits, divides, has_new, runs = np.moveaxis(
        moments, -1, 0
    )
    activations = kept * in_flight - gone * ends + waiting * waits + released * divides
    state = static + gradients * has_gradients + new * has_new + late * follows
    is_early = ends + divides
    transients = temporary * (runs - is_early) + early * is_early
    held: Floats = state + np.maximum(0.0, activations) + transients
    return held
