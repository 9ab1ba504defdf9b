"""Action lists of torch's schedules that divide backwards: Qi et al. 2024 (2401.10241).

Each rank's list is made as ``torch.distributed.pipelining.schedules`` of torch 2.13 makes it. An
action is a stage and what it runs: "F" a forward, "B" a backward, or of a backward "I" the part
for its inputs, which the stage before waits for, and "W" the part for its weights. Microbatches of
a stage follow each other in each.
"""

from collections import deque
from typing import Literal

_Pass = Literal["F", "B", "I", "W"]
_Action = tuple[int, _Pass]


def interleaved_zero_bubble(
    rank: int, pp: int, virtual_stages: int, num_microbatches: int
) -> tuple[_Action, ...]:
    """One rank under InterleavedZeroBubble: ZB-H1 of the paper, also for several stages a rank.

    Forwards for warm-up, then pairs of a forward and a backward's first part, then the remaining
    first parts. From the rank's number of first parts on, each is followed by the oldest second
    part.
    """
    group = num_microbatches // max(1, num_microbatches // pp)
    total = virtual_stages * num_microbatches
    warmup = min(total, (virtual_stages - 1) * group + pp - 1 - rank)

    def stage(step: int) -> int:
        return (step // group) % virtual_stages * pp + rank

    last = (virtual_stages - 1) * pp + 2 * rank
    row: list[_Action] = [(stage(step), "F") for step in range(warmup)]
    for step in range(total):
        if warmup + step < total:
            row.append((stage(warmup + step), "F"))
        row.append((last - stage(step), "I"))
        if step >= rank:
            row.append((last - stage(step - rank), "W"))
    row += [(last - stage(step), "W") for step in range(max(0, total - rank), total)]
    return tuple(row)


def zbv(rank: int, pp: int, num_microbatches: int) -> tuple[_Action, ...]:
    """One rank under ZBVZeroBubble (section 6 there): two stages, along the ranks and back.

    torch makes the list for 2 pp - 1 microbatches at the least, and leaves out those that a step
    does not have.
    """
    down, up = rank, 2 * pp - 1 - rank
    number = max(2 * pp - 1, num_microbatches)
    row: list[_Action] = [(down, "F")] * (2 * (pp - rank) - 1)
    row += [(up, "F"), (down, "F")] * rank
    row += [(up, "F"), (up, "I"), (up, "W")] * (pp - rank)
    begun = 2 * pp - 1 - rank  # forwards of the first stage; of the second it has begun pp
    steady: list[_Action] = [(down, "I"), (down, "W"), (up, "F"), (up, "I"), (up, "W")]
    for more in range(number - pp):
        if begun + more < number:
            row.append((down, "F"))
        row += steady
    ends: list[_Action] = [(down, "I"), (up, "I")] * rank
    ends += [(down, "I"), (down, "W")] * (pp - rank)
    ends += [(up, "W")] * rank
    ends += [(down, "W")] * rank
    return _only(row + ends, num_microbatches)


def _only(row: list[_Action], num_microbatches: int) -> tuple[_Action, ...]:
    """The actions of the first microbatches."""
    counts: dict[_Action, int] = {}
    found = []
    for action in row:
        counts[action] = counts.get(action, 0) + 1
        if counts[action] <= num_microbatches:
            found.append(action)
    return tuple(found)


def dual_pipe_v(rank: int, pp: int, num_microbatches: int) -> tuple[_Action, ...]:
    """One rank under DualPipeV (DeepSeek-V3, 2412.19437, its half by Sea AI Lab).

    Its pairs of a forward and a backward, which custom code may overlap, run one after the other.
    """
    down, up = rank, 2 * pp - 1 - rank
    row: list[_Action] = [(down, "F")] * (2 * (pp - rank - 1))
    row += [(down, "F"), (up, "F")] * (rank + 1)
    row += [(up, "I"), (up, "W"), (up, "F")] * (pp - rank - 1)
    row += [(down, "F"), (up, "B"), (up, "F"), (down, "B")] * (num_microbatches - 2 * pp + rank + 1)
    row += [(up, "B"), (up, "F"), (down, "B")] * (pp - rank - 1)
    waiting: deque[int] = deque()
    divides = False
    for step in range(rank + 1):
        for stage, begins in ((up, rank % 2 == 1), (down, rank % 2 == 0)):
            divides = divides or (step == (rank + 1) // 2 and begins)
            row.append((stage, "I" if divides else "B"))
            if divides:
                waiting.append(stage)
    for _ in range(pp - rank - 1):
        if waiting:
            row.append((waiting.popleft(), "W"))
        row.append((down, "I" if divides else "B"))
        if divides:
            waiting.append(down)
    row += [(stage, "W") for stage in waiting]
    return tuple(row)
