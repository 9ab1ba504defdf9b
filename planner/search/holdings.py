"""What a rank can hold that has several stages: all their columns at once.

Where inner runs are alike, a stage is told by its length and its recomputation, wherever it lies,
so that the choices of one rank can be listed without the others': those that fit its memory, in a
step that may beat the limit. Memory is then no matter of the ILP, whose relaxation would mix a
column that fits too well with one that does not fit.

Most configurations that are asked for hold nothing in time. Whether the ranks can add up to the
model at all is told beforehand by a relaxation (``rank_units``).

Of two choices with stages of the same lengths, one that is no slower in any stage is enough: no
path through the action list, and no rank's end, prefers the other.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from planner.cost.pipeline import Path
from planner.search.bounds import bounding_paths
from planner.search.columns import Column, Holding
from planner.search.configuration_search import ConfigurationSearch
from planner.search.rank_units import StageChoices, possible_units
from planner.strategy.schedules import StageMoment

_MOST_LISTED = 50_000
"""Choices of the first stages of a rank that are looked at at once."""

Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


def holdings(
    search: ConfigurationSearch, stages: Sequence[Sequence[Column]], limit_s: float
) -> list[list[Holding]] | None:
    """What each rank can hold in a step no slower than the limit.

    Args:
        search: A configuration whose columns stand for all runs of their length.
        stages: Columns of each stage, at least one.
        limit_s: Steps that are slower need not be found.

    Returns:
        Choices by rank, all empty from a rank on that can hold none; None where there are too
        many to list.
    """
    pp = search.configuration.degrees.pp
    found: list[list[Holding]] = [[] for _ in range(pp)]
    listings = [_Listing(search, stages, rank, limit_s) for rank in range(pp)]
    if limit_s < float("inf") and not _can_add_up(search, stages, listings):
        return found
    for rank, listing in enumerate(listings):
        listed = listing.run()
        if listed is None:
            return None
        if not listed:
            break
        found[rank] = listed
    return found


def _can_add_up(
    search: ConfigurationSearch,
    stages: Sequence[Sequence[Column]],
    listings: Sequence["_Listing"],
) -> bool:
    """Whether numbers of units that the ranks may hold add up to the model."""
    least = np.array([[min(c.forward_s for c in s), min(c.backward_s for c in s)] for s in stages])
    sums = {0}
    for listing in listings:
        held = listing.possible_units(least)
        sums = {units + before for units in held for before in sums}
    return search.num_units in sums


@dataclass(slots=True)
class _Choices:
    """Choices of the first stages of a rank, a row each."""

    places: NDArray[np.intp]
    """Column of each stage."""
    seconds: Floats
    """Along each path."""
    own_s: Floats
    """Forward and backward of its units, at the least."""
    sizes: Floats
    """Bytes held at each moment, but for transients."""
    transients: Floats
    """Highest transient at each moment."""
    reductions: Floats
    """Bytes when gradients are reduced after backward."""

    def only(self, kept: Flags) -> "_Choices":
        return _Choices(*(getattr(self, field.name)[kept] for field in fields(self)))


class _Listing:
    """The choices of one rank, extended stage by stage."""

    def __init__(
        self,
        search: ConfigurationSearch,
        stages: Sequence[Sequence[Column]],
        rank: int,
        limit_s: float,
    ) -> None:
        pp = search.configuration.degrees.pp
        mine = range(rank, len(stages), pp)
        self._search = search
        self._most_s = limit_s * (1 + 1e-9) - search.once_s
        self._columns = [stages[stage] for stage in mine]
        self._paths = bounding_paths(search.configuration)[3 * rank : 3 * rank + 3]
        self._others = [stage for stage in range(len(stages)) if stage % pp != rank]
        moments = search.fullest_moments(rank)
        self._stages = [
            _Choices(
                places=np.arange(len(columns))[:, None],
                seconds=_path_s(columns, stage, self._paths),
                own_s=_own_s(search, columns),
                sizes=_held_bytes(columns, [moment[at] for moment in moments]),
                transients=_transient_bytes(columns, [moment[at] for moment in moments]),
                reductions=np.array([column.reduction_bytes for column in columns]),
            )
            for at, (stage, columns) in enumerate(zip(mine, self._columns, strict=True))
        ]

    def run(self) -> list[Holding] | None:
        """All choices, none of which makes another needless; None where there are too many."""
        found, *others = self._stages
        for at, stage in enumerate(others, start=1):
            found = self._promising(found, at)
            if len(found.places) * len(stage.places) > _MOST_LISTED:
                return None
            found = _extended(found, stage)
        found = self._promising(found, len(self._stages))
        found = found.only(self._leaves_enough(found) & self._fits(found))
        return _undominated(
            [
                tuple(columns[at] for columns, at in zip(self._columns, row, strict=True))
                for row in found.places
            ]
        )

    def possible_units(self, least: Floats) -> list[int]:
        """Numbers of units that the rank may hold in time, when others take their least.

        Along a path, the stages of other ranks take their fastest columns; what the model takes
        more than these and the rank's own is theirs too, and counts where it counts least.

        Args:
            least: Forward and backward of the fastest column of each stage.
        """
        whole = np.array(self._search.rest_s(()))
        counts = np.array([[path.forwards, path.backwards] for path in self._paths])
        counts = counts[:, :, self._others]
        fewest, others = counts.min(axis=2), least[self._others].T
        others_s = (counts * others).sum(axis=(1, 2)) + fewest @ (whole - others.sum(axis=1))
        transients = np.max([stage.transients.min(axis=0) for stage in self._stages], axis=0)
        relaxed = [
            StageChoices(
                lengths=np.array([column.end - column.first for column in columns]),
                seconds=stage.seconds - stage.own_s @ fewest.T,
                sizes=stage.sizes,
            )
            for stage, columns in zip(self._stages, self._columns, strict=True)
        ]
        return list(
            possible_units(
                relaxed,
                most_s=self._most_s - others_s,
                room_bytes=self._search.room_bytes - transients,
            )
        )

    def _promising(self, found: _Choices, at: int) -> _Choices:
        """Those within time and memory when the stages from ``at`` on take their least."""
        later = self._stages[at:]
        seconds = found.seconds + _least([stage.seconds for stage in later])
        sizes = found.sizes + _least([stage.sizes for stage in later])
        within = np.all(seconds <= self._most_s, axis=1)
        return found.only(within & np.all(sizes <= self._search.room_bytes, axis=1))

    def _fits(self, found: _Choices) -> Flags:
        """``ConfigurationSearch.fits`` for each choice."""
        room_bytes = self._search.room_bytes
        fits: Flags = np.all(found.sizes + found.transients <= room_bytes, axis=1)
        return fits & (found.reductions <= room_bytes)

    def _leaves_enough(self, found: _Choices) -> Flags:
        """Whether the other ranks can do the rest in time.

        Along the paths of this rank the rest counts where it counts least. And one of the others
        has its even share of the rest to do, for every microbatch.
        """
        configuration = self._search.configuration
        whole = np.array(self._search.rest_s(()))
        forward_s, backward_s = np.maximum(0.0, whole - found.own_s).T
        share_s = (forward_s + backward_s) / (configuration.degrees.pp - 1)
        enough: Flags = configuration.num_microbatches * share_s <= self._most_s
        for so_far, path in zip(found.seconds.T, self._paths, strict=True):
            least_forward = min(path.forwards[stage] for stage in self._others)
            least_backward = min(path.backwards[stage] for stage in self._others)
            rest_s = least_forward * forward_s + least_backward * backward_s
            enough &= so_far + rest_s <= self._most_s
        return enough


def _extended(found: _Choices, stage: _Choices) -> _Choices:
    """Every choice with every column of the next stage."""
    before = np.repeat(np.arange(len(found.places)), len(stage.places))
    added = np.tile(np.arange(len(stage.places)), len(found.places))
    return _Choices(
        places=np.column_stack([found.places[before], added]),
        seconds=found.seconds[before] + stage.seconds[added],
        own_s=found.own_s[before] + stage.own_s[added],
        sizes=found.sizes[before] + stage.sizes[added],
        transients=np.maximum(found.transients[before], stage.transients[added]),
        reductions=found.reductions[before] + stage.reductions[added],
    )


def _own_s(search: ConfigurationSearch, columns: Sequence[Column]) -> Floats:
    whole = np.array(search.rest_s(()))
    return np.array([whole - search.rest_s((column,)) for column in columns])


def _path_s(columns: Sequence[Column], stage: int, paths: Sequence[Path]) -> Floats:
    forward_s = np.array([[column.forward_s] for column in columns])
    backward_s = np.array([[column.backward_s] for column in columns])
    forwards = np.array([[path.forwards[stage] for path in paths]])
    backwards = np.array([[path.backwards[stage] for path in paths]])
    seconds: Floats = forward_s * forwards + backward_s * backwards
    return seconds


def _held_bytes(columns: Sequence[Column], moments: Sequence[StageMoment]) -> Floats:
    """What a stage holds at each moment, but for transients: ``Column.held_bytes``."""
    flights = np.array([[float(m.in_flight), m.is_ending] for m in moments])
    late = np.array([[float(m.has_gradients), m.follows_backward] for m in moments])
    each = np.array(
        [[float(c.mix.kept_bytes + c.beside_bytes), c.mix.kept_bytes - c.mix.left_bytes]
         for c in columns]
    )  # fmt: skip
    static = np.array([[c.static_bytes] for c in columns])
    states = np.array([[float(c.gradient_bytes), c.late_gathered_bytes] for c in columns])
    activations = np.maximum(0.0, each[:, :1] * flights[:, 0] - each[:, 1:] * flights[:, 1])
    held: Floats = static + activations + states[:, :1] * late[:, 0] + states[:, 1:] * late[:, 1]
    return held


def _transient_bytes(columns: Sequence[Column], moments: Sequence[StageMoment]) -> Floats:
    """Its highest transient at each moment: ``Mix.transient_bytes``."""
    early = np.array([[float(column.mix.early_temporary_bytes)] for column in columns])
    late = np.array([[float(column.mix.temporary_bytes)] for column in columns])
    transients: Floats = np.where([moment.is_ending for moment in moments], early, late)
    return transients


def _least(later: Sequence[Floats]) -> Floats | float:
    """What the stages to come take at the least, along each path or at each moment."""
    return sum((each.min(axis=0) for each in later), np.zeros(()))


def _undominated(found: list[Holding]) -> list[Holding]:
    """Choices that no other with the same lengths beats in every stage."""
    by_lengths: dict[tuple[int, ...], list[Holding]] = {}
    for held in sorted(found, key=lambda held: sum(column.microbatch_s for column in held)):
        alike = by_lengths.setdefault(tuple(c.end - c.first for c in held), [])
        if not any(_is_no_slower(other, held) for other in alike):
            alike.append(held)
    return [held for alike in by_lengths.values() for held in alike]


def _is_no_slower(one: Holding, other: Holding) -> bool:
    return all(
        a.forward_s <= b.forward_s and a.backward_s <= b.backward_s and a.step_s <= b.step_s
        for a, b in zip(one, other, strict=True)
    )
