"""A bound on one configuration without an integer program: its linear relaxation.

Paths of the action list join it until none is longer than the bound, or these become too many. This
rules out most configurations that would else need integer programs, and hands the paths on to
those.
"""

from dataclasses import dataclass

from planner.cost.pipeline import Path
from planner.search.stage_ilp import StageProblem
from planner.search.stage_program import StageProgram
from planner.solver import NoSolutionError

_MOST_ROUNDS = 60
"""Paths that may join."""
_MOST_ACTIONS = 200_000
"""Actions of all lists that may be run for that, but for a few rounds."""
_LEAST_ROUNDS = 4
_ENOUGH = 1e-5
"""Share by which a path is longer than the bound for it to join."""
_STALL_ROUNDS = 10
_LEAST_GAIN = 1e-3
"""Share that the bound must gain in so many rounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Relaxed:
    """What the relaxation of a configuration tells."""

    bound_s: float
    """No choice below the limit is faster; endless where there is none."""
    paths: tuple[Path, ...]
    """Paths of the action list beside ``bounding_paths`` that it took."""


def relaxed(problem: StageProblem, limit_s: float) -> Relaxed:
    """Bound the choices of one configuration.

    Args:
        problem: Its choices.
        limit_s: Steps that are no faster need not be told apart.
    """
    program = StageProgram(problem, limit_s)
    configuration = problem.configuration
    rounds = _MOST_ACTIONS // (2 * configuration.num_stages * configuration.num_microbatches)
    bounds: list[float] = []
    for _ in range(min(_MOST_ROUNDS, max(_LEAST_ROUNDS, rounds))):
        try:
            found = program.solve()
        except NoSolutionError:
            return Relaxed(bound_s=float("inf"), paths=tuple(program.paths))
        if found is None:
            break
        bounds.append(max(found.bound_s, bounds[-1] if bounds else 0.0))
        gained_from = bounds[max(0, len(bounds) - 1 - _STALL_ROUNDS)]
        stalls = len(bounds) > _STALL_ROUNDS and bounds[-1] < gained_from * (1 + _LEAST_GAIN)
        if bounds[-1] >= limit_s or stalls or not program.tighten(found, _ENOUGH):
            break
    return Relaxed(bound_s=bounds[-1] if bounds else 0.0, paths=tuple(program.paths))
