"""Whether a configuration with one stage per rank has a cut that fits, however slow.

Where stages may end is told stage by stage, as bits of a number. Runs inside a stretch of like
units are looked at once for each length, and moved to where they begin.
"""

from bisect import bisect_right
from collections.abc import Iterator

from planner.search.configuration_search import ConfigurationSearch


def may_fit(search: ConfigurationSearch) -> bool:
    """Whether some cut may fit, told without looking for recomputations.

    Each stage takes all that it may hold at the least. No cut gets further: a run that begins
    later, or ends earlier, holds no more.
    """
    first, end = 0, 0
    for stage in range(search.configuration.num_stages):
        near = 2 * end - first  # as many units as the stage before takes
        first, end = end, search.furthest_end(stage, end, near=near)
    return end == search.num_units


def some_cut_fits(search: ConfigurationSearch) -> bool:
    """Whether some cut fits, of a configuration that may fit."""
    return _Cuts(search).reach_end()


def fits_somehow(search: ConfigurationSearch) -> bool:
    """Whether some cut fits."""
    return may_fit(search) and some_cut_fits(search)


class _Cuts:
    """Cuts of one configuration."""

    def __init__(self, search: ConfigurationSearch) -> None:
        """Look at nothing yet."""
        self._search = search
        self._positions = sum(1 << position for position in search.positions)
        self._inside: dict[tuple[int, int], tuple[int, int]] = {}

    def reach_end(self) -> bool:
        """Whether stages that fit lead from the first unit to the last."""
        last, reached = self._search.configuration.num_stages - 1, 1
        for stage in range(last):
            reached = self._ends(stage, reached)
        end = self._search.num_units
        return any(
            self._search.last_held(last, first) == end and self._search.fits_alone(last, first, end)
            for first in _places(reached)
        )

    def _ends(self, stage: int, firsts: int) -> int:
        """Where a stage may end that leaves room for later ones, by where it may begin."""
        search, ends = self._search, 0
        limit = search.last_end(stage)
        for first in _places(firsts):
            start = search.stretches[first]
            stop = search.stretch_ends[start]
            inside, longest = self._ends_inside(stage, start)
            ends |= inside << first - start & _up_to(stop)
            if first + longest < stop:
                continue
            last = min(limit, search.last_held(stage, first))
            for end in search.positions[bisect_right(search.positions, stop) :]:
                if end > last:
                    break
                ends |= search.fits_alone(stage, first, end) << end
        return ends & self._positions & _up_to(limit)

    def _ends_inside(self, stage: int, start: int) -> tuple[int, int]:
        """Ends of the runs of a stretch that fit a stage, and the longest that may fit.

        Args:
            stage: The stage.
            start: The stretch's first unit, with which they begin.
        """
        search = self._search
        key = search.kind_of_stage(stage), start
        if key not in self._inside:
            ends, end, fits = 0, start, True
            while end < search.stretch_ends[start]:
                if search.exceeds_memory(stage, start, end + 1):
                    break
                end += 1
                # Of a run that fits, so does what is left without the unit that keeps the most.
                fits = fits and search.fits_alone(stage, start, end)
                ends |= fits << end
            self._inside[key] = ends, end - start
        return self._inside[key]


def _up_to(unit: int) -> int:
    """Bits of all units up to one."""
    return (1 << unit + 1) - 1


def _places(bits: int) -> Iterator[int]:
    """Where bits are set, from the lowest on."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
