"""Minimising a function of a few positive parameters, the same on every run."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from math import inf

_SMALLEST_STEP = 0.01
_LEAST_GAIN = 1e-4

Move = tuple[tuple[str, int], ...]
"""Parameters that are moved together, each up (1) or down (-1)."""


def pattern_search(
    loss: Callable[[Mapping[str, float]], float],
    start: Mapping[str, float],
    *,
    fixed: Sequence[str] = (),
    most: Mapping[str, float] = {},
    pairs: bool = True,
) -> dict[str, float]:
    """Minimise by moving one or two parameters at a time by a factor that shrinks.

    After each round of moves, what it changed is tried once more as a whole (Hooke and Jeeves
    1961), which follows a valley in which parameters make up for each other.

    Args:
        loss: What to minimise.
        start: First values, above 0.
        fixed: Names that keep their values.
        most: Largest values, by name.
        pairs: Move parameters in pairs as well, which finds its way along narrower valleys and
            takes some ten times as many evaluations.
    """
    moves = _moves([name for name in start if name not in fixed], pairs=pairs)
    best = dict(start)
    best_loss = loss(best)
    step = 0.4
    while step > _SMALLEST_STEP:
        before, before_loss = best, best_loss
        back: Move = ()
        for move in moves:
            trial = _moved(best, move, step, most)
            if move == back or trial == best:
                continue
            trial_loss = loss(trial)
            if trial_loss < best_loss:
                best, best_loss = trial, trial_loss
                back = tuple((name, -sign) for name, sign in move)
        trial = _moved_on(before, best, most)
        if trial != best and (trial_loss := loss(trial)) < best_loss:
            best, best_loss = trial, trial_loss
        if best_loss > before_loss - _LEAST_GAIN:
            step /= 2
    return best


def _moves(names: Sequence[str], *, pairs: bool) -> list[Move]:
    moves: list[Move] = [((name, sign),) for name in names for sign in (1, -1)]
    if pairs:
        moves += [
            ((first, sign), (second, other))
            for first, second in itertools.combinations(names, 2)
            for sign in (1, -1)
            for other in (1, -1)
        ]
    return moves


def _moved_on(
    before: Mapping[str, float], after: Mapping[str, float], most: Mapping[str, float]
) -> dict[str, float]:
    """The same change once more; parameters that stood still do."""
    return {
        name: value if value == before[name] else min(value**2 / before[name], most.get(name, inf))
        for name, value in after.items()
    }


def _moved(
    values: Mapping[str, float], move: Move, step: float, most: Mapping[str, float]
) -> dict[str, float]:
    trial = dict(values)
    for name, sign in move:
        value = trial[name] * (1 + step) ** sign
        trial[name] = min(value, most.get(name, value))
    return trial
