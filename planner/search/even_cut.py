"""Cuts nearest to wanted sums."""

from bisect import bisect_left
from collections.abc import Sequence


def nearest_cut(rising: Sequence[float], targets: Sequence[float]) -> list[int]:
    """Places that cut a rising sequence nearest to targets, from its first place to its last.

    Args:
        rising: Sums before each place.
        targets: Rising too; fewer than there are places inside.
    """
    places = [0]
    for left, target in zip(range(len(targets), 0, -1), targets, strict=True):
        places.append(_nearest(rising, target, places[-1] + 1, len(rising) - left))
    return [*places, len(rising) - 1]


def _nearest(rising: Sequence[float], target: float, low: int, high: int) -> int:
    """The first place in [low, high) of a rising sequence that is nearest to a target."""
    above = bisect_left(rising, target, low, high)
    if above == low:
        return low
    below = bisect_left(rising, rising[above - 1], low, above)
    if above == high or abs(rising[below] - target) <= abs(rising[above] - target):
        return below
    return above
