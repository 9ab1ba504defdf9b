"""Columns of a stage as arrays: what many choices of a rank ask of them at once."""

from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from planner.search.columns import Column
from planner.search.configuration_search import ConfigurationSearch
from planner.strategy.moments import RankMoment, StageMoment

Floats = NDArray[np.float64]

_FIELDS = attrgetter(*(field.name for field in fields(StageMoment)))


class ColumnTable:
    """The columns of a stage as arrays, a row each."""

    def __init__(self, search: ConfigurationSearch, columns: Sequence[Column]) -> None:
        """Read all of them."""
        self.columns = columns
        self.lengths = np.array([column.end - column.first for column in columns])
        self.seconds: Floats = np.array([c.parts_s for c in columns])
        """``Column.parts_s``."""
        self.own_s: Floats = np.array(_own_s(search, columns))
        self.reductions: Floats = np.array([float(c.state.reduction_bytes) for c in columns])
        self._static: Floats = np.array([[float(c.state.static_bytes)] for c in columns])
        self._activations: Floats = np.array(
            [
                [
                    float(c.mix.kept_bytes + c.state.beside_bytes),
                    c.mix.kept_bytes - c.mix.left_bytes,
                ]
                for c in columns
            ]
        )
        self._waiting: Floats = np.array(
            [
                [
                    float(kept + c.state.waiting.gradients - c.state.waiting.released),
                    float(c.state.waiting.released),
                ]
                for c, kept in zip(columns, self._activations[:, 0], strict=True)
            ]
        )
        self._state: Floats = np.array(
            [
                [
                    float(c.state.gradient_bytes),
                    c.state.late_gathered_bytes,
                    c.state.new_gradient_bytes,
                ]
                for c in columns
            ]
        )
        self._transients: Floats = np.array(
            [[float(c.mix.temporary_bytes), c.mix.early_temporary_bytes] for c in columns]
        )

    def path_s(self, counts: Floats) -> Floats:
        """Seconds along paths that take each part of a column so often."""
        seconds: Floats = self.seconds @ counts.T
        return seconds

    def held_bytes(self, moments: Floats) -> Floats:
        """``Column.held_bytes`` at each moment (``numbers_of``)."""
        in_flight, is_ending, follows_backward, has_gradients, *divided = moments.T
        waiting, is_dividing, has_new_gradients = divided
        held = self._activations[:, :1] * in_flight - self._activations[:, 1:] * is_ending
        held += self._waiting[:, :1] * waiting + self._waiting[:, 1:] * is_dividing
        state = self._state @ np.stack([has_gradients, follows_backward, has_new_gradients])
        in_all: Floats = self._static + np.maximum(0.0, held) + state
        return in_all

    def transient_bytes(self, moments: Floats) -> Floats:
        """``Mix.transient_bytes`` at each moment."""
        transients: Floats = self._transients[:, (moments[:, 1] + moments[:, 5]).astype(int)]
        return transients


def numbers_of(moments: Sequence[RankMoment]) -> Floats:
    """The numbers of each moment of a rank, by stage of it."""
    return np.array([[_FIELDS(at) for at in moment] for moment in moments], dtype=float)


def _own_s(
    search: ConfigurationSearch, columns: Sequence[Column]
) -> list[tuple[float, float, float]]:
    """Each part of each column's units, at the least."""
    known: dict[tuple[int, int], tuple[float, float, float]] = {}
    for column in columns:
        run = (column.first, column.end)
        if run not in known:
            known[run] = search.least_parts_s(*run)
    return [known[column.first, column.end] for column in columns]
