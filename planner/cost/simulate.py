"""Step time of a pipeline by running its action lists against a clock."""

from collections.abc import Sequence

from planner.strategy.schedules import Actions


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
    num_stages = len(forward_s)
    forward_done: list[list[float]] = [[] for _ in range(num_stages)]
    backward_done: list[list[float]] = [[] for _ in range(num_stages)]
    clock = [0.0] * len(actions)
    position = [0] * len(actions)
    progress = True
    while progress:
        progress = False
        for rank, row in enumerate(actions):
            while position[rank] < len(row):
                stage, is_forward = row[position[rank]]
                ready = _ready_s(
                    stage, forward_done, backward_done, transfer_s, is_forward=is_forward
                )
                if ready is None:
                    break
                start = max(clock[rank], ready)
                done = forward_done if is_forward else backward_done
                clock[rank] = start + (forward_s if is_forward else backward_s)[stage]
                done[stage].append(clock[rank])
                position[rank] += 1
                progress = True
    assert all(place == len(row) for place, row in zip(position, actions, strict=True))
    return max(clock)


def _ready_s(
    stage: int,
    forward_done: list[list[float]],
    backward_done: list[list[float]],
    transfer_s: Sequence[float],
    *,
    is_forward: bool,
) -> float | None:
    """When the next action of a stage has its input, None while that is not computed yet."""
    done = forward_done if is_forward else backward_done
    microbatch = len(done[stage])
    last = len(forward_done) - 1
    if is_forward:
        if stage == 0:
            return 0.0
        source, transfer = forward_done[stage - 1], transfer_s[stage - 1]
    elif stage == last:
        source, transfer = forward_done[stage], 0.0
    else:
        source, transfer = backward_done[stage + 1], transfer_s[stage]
    return source[microbatch] + transfer if microbatch < len(source) else None
