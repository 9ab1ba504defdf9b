"""Step time of a pipeline by running its action lists against a clock."""

from collections.abc import Sequence
from functools import lru_cache

from planner.strategy.schedules import Actions

_Wired = tuple[int, int, bool, int | None, int | None]
"""Rank, stage, whether it is a forward; position of the action whose output it reads, boundary
that this crosses."""


def simulate_s(
    actions: Sequence[Actions],
    *,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    transfer_s: Sequence[float],
) -> float:
    """Time until the last rank has finished its list.

    A forward of stage s waits for the same microbatch's forward of stage s - 1 and its
    transfer, a backward for that of stage s + 1 (on the last stage for its own forward); a rank
    runs its list in order.

    Args:
        actions: Per rank, (stage, is_forward) in order; the i-th forward (backward) of a stage
            is that of microbatch i.
        forward_s: Forward of one microbatch, by stage.
        backward_s: Backward of one microbatch, by stage.
        transfer_s: Transfer from stage s to s + 1 (and back), by s.

    Raises:
        AssertionError: The lists wait for each other in a circle.
    """
    clock = [0.0] * len(actions)
    done: list[float] = []
    for rank, stage, is_forward, source, boundary in _wired(tuple(actions), len(forward_s) - 1):
        start = clock[rank]
        if source is not None:
            ready = done[source] + (0.0 if boundary is None else transfer_s[boundary])
            start = max(start, ready)
        clock[rank] = start + (forward_s if is_forward else backward_s)[stage]
        done.append(clock[rank])
    return max(clock)


@lru_cache(maxsize=256)
def _wired(actions: tuple[Actions, ...], last: int) -> tuple[_Wired, ...]:
    """All actions in an order in which each comes after those that it waits for."""
    wired: list[_Wired] = []
    places: dict[tuple[int, bool], list[int]] = {
        (stage, is_forward): [] for stage in range(last + 1) for is_forward in (True, False)
    }
    position = [0] * len(actions)
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(actions):
            while position[rank] < len(row):
                stage, is_forward = row[position[rank]]
                source = boundary = None
                if not (is_forward and stage == 0):
                    feeder, boundary = _feeder(stage, last, is_forward=is_forward)
                    microbatch = len(places[stage, is_forward])
                    if microbatch >= len(places[feeder]):
                        break
                    source = places[feeder][microbatch]
                places[stage, is_forward].append(len(wired))
                wired.append((rank, stage, is_forward, source, boundary))
                position[rank] += 1
                progress = True
    assert all(place == len(row) for place, row in zip(position, actions, strict=True))
    return tuple(wired)


def _feeder(stage: int, last: int, *, is_forward: bool) -> tuple[tuple[int, bool], int | None]:
    """Stage and pass that an action reads from, and the boundary between."""
    if is_forward:
        return (stage - 1, True), stage - 1
    return ((stage, True), None) if stage == last else ((stage + 1, False), stage)
