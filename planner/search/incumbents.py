"""The best solutions of a search so far."""

from collections.abc import Iterable
from dataclasses import dataclass

from planner.search.columns import Column
from planner.search.configuration_search import ConfigurationSearch
from planner.strategy.configuration import Configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """A solution of one configuration."""

    search: ConfigurationSearch
    """The configuration with its prices."""
    columns: tuple[Column, ...]
    """Its stages."""
    objective_s: float
    """Its step time."""


class Incumbents:
    """Solutions found, and what a new one must beat."""

    def __init__(self, top: int) -> None:
        """Start empty.

        Args:
            top: Layouts that the user wants to see.
        """
        self.solved: list[Solved] = []
        """All solutions, in the order in which they were found."""
        self._top = top
        self._best_by_layout: dict[tuple[object, str], float] = {}
        self._times: list[float] = []

    def add(self, solved: Solved) -> None:
        """Take a solution in; layouts count once, by degrees and schedule."""
        self.solved.append(solved)
        key = _layout(solved.search.configuration)
        known = self._best_by_layout.get(key, float("inf"))
        self._best_by_layout[key] = min(known, solved.objective_s)
        self._times = sorted(self._best_by_layout.values())

    def nth_s(self, place: int) -> float:
        """Step time of the layout in that place; endless where there are fewer."""
        return self._times[place - 1] if len(self._times) >= place else float("inf")

    def limit_s(self, configurations: Iterable[Configuration], *, near: float) -> float:
        """Step time that one of some configurations must beat to be worth a look.

        It may then be among the layouts to show, and there be faster than what is known of the
        same one, or else near to the best.

        Args:
            configurations: They.
            near: Share by which the step of those may be longer than the best.
        """
        shown_s, near_s = self.nth_s(self._top), self.nth_s(1) * (1 + near)
        if shown_s <= near_s:
            return shown_s
        best_s = self._best_by_layout
        known_s = max(best_s.get(_layout(each), float("inf")) for each in configurations)
        return min(shown_s, max(known_s, near_s))

    def ranked(self) -> list[Solved]:
        """All solutions, fastest first."""
        return sorted(self.solved, key=lambda solved: solved.objective_s)


def _layout(configuration: Configuration) -> tuple[object, str]:
    """What layouts to show are told apart by."""
    return configuration.degrees, configuration.schedule
