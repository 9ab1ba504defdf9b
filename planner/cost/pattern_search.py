"""Minimising a function of a few positive parameters, the same on every run."""

import itertools
from collections.abc import Callable, Mapping, Sequence

_SMALLEST_STEP = 0.01
_LEAST_GAIN = 1e-4


def pattern_search(
    loss: Callable[[Mapping[str, float]], float],
    start: Mapping[str, float],
    *,
    fixed: Sequence[str] = (),
    most: Mapping[str, float] = {},
) -> dict[str, float]:
    """Minimise by moving one or two parameters at a time by a factor that shrinks.

    Args:
        loss: What to minimise.
        start: First values, above 0.
        fixed: Names that keep their values.
        most: Largest values, by name.
    """
    free = [name for name in start if name not in fixed]
    moves: list[tuple[tuple[str, int], ...]] = [
        ((name, sign),) for name in free for sign in (1, -1)
    ]
    moves += [
        ((first, sign), (second, other))
        for first, second in itertools.combinations(free, 2)
        for sign in (1, -1)
        for other in (1, -1)
    ]
    best = dict(start)
    best_loss = loss(best)
    step = 0.4
    while step > _SMALLEST_STEP:
        before = best_loss
        for move in moves:
            trial = dict(best)
            for name, sign in move:
                value = trial[name] * (1 + step) ** sign
                trial[name] = min(value, most.get(name, value))
            trial_loss = loss(trial)
            if trial_loss < best_loss:
                best, best_loss = trial, trial_loss
        if best_loss > before - _LEAST_GAIN:
            step /= 2
    return best
