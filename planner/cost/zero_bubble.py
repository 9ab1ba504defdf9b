"""Pipelines whose backward is split in two: ZB-1p and ZB-2p of Qi et al. 2024 (2401.10241).

The backward of a microbatch is its input part B, which the stage before waits for, and its
weight part W, which nobody waits for and which fills what would be bubbles. A rank holds a
microbatch's activations until its B is done, and a part of them until its W is: at most ``limit``
microbatches' in all, as many as 1F1B's first rank for ZB-1p, twice as many for ZB-2p. The order is
found as the paper's heuristic does: B as soon as its gradient is there, else F while memory
allows, else W.

No rank waits for the others between two steps: the optimiser's step is taken at once and checked
afterwards (section 4 there). A step therefore takes as long as the rank that is busy longest, from
its own first forward to its own last W.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

HELD_FOR_WEIGHTS = 0.4
"""Share of a microbatch's activations that W still needs: 32 of 34 + 5 a s / h bytes per element
of the stream (section 2.3 there, attention unfused), for a s / h of 8 to 11."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitPipeline:
    """What such a pipeline takes."""

    step_s: float
    """From a rank's first forward to its last weight part, on the rank where it takes longest."""
    in_flight: tuple[int, ...]
    """Most microbatches that each rank held at once."""


@dataclass(slots=True)
class _Rank:
    """One rank while it runs."""

    started_s: float = 0.0
    clock_s: float = 0.0
    forwards: int = 0
    backwards: int = 0
    weights: int = 0
    most_held: float = 0.0
    forward_done_s: list[float] = field(default_factory=list)
    backward_done_s: list[float] = field(default_factory=list)

    @property
    def held(self) -> float:
        """Microbatches whose activations it holds, parts counted as parts."""
        waiting = self.backwards - self.weights
        return self.forwards - self.backwards + HELD_FOR_WEIGHTS * waiting


def zero_bubble_s(
    *,
    forward_s: Sequence[float],
    input_backward_s: Sequence[float],
    weight_backward_s: Sequence[float],
    num_microbatches: int,
    limit: int,
) -> SplitPipeline:
    """Run the pipeline against a clock.

    Args:
        forward_s: Forward of one microbatch, by rank; transfers included.
        input_backward_s: Input part of its backward, by rank.
        weight_backward_s: Weight part of its backward, by rank.
        num_microbatches: Microbatches of the step.
        limit: Most microbatches that a rank may hold.
    """
    ranks = [_Rank() for _ in forward_s]
    last = len(ranks) - 1
    while any(rank.weights < num_microbatches for rank in ranks):
        options = [
            (start_s, index, what)
            for index in range(len(ranks))
            for start_s, what in [_next(ranks, index, last, num_microbatches, limit)]
            if what
        ]
        assert options, "every rank waits for another"
        start_s, index, what = min(options)
        rank = ranks[index]
        if what == "F":
            if not rank.forwards:
                rank.started_s = start_s
            rank.clock_s = start_s + forward_s[index]
            rank.forwards += 1
            rank.forward_done_s.append(rank.clock_s)
            rank.most_held = max(rank.most_held, rank.held)
        elif what == "B":
            rank.clock_s = start_s + input_backward_s[index]
            rank.backwards += 1
            rank.backward_done_s.append(rank.clock_s)
        else:
            rank.clock_s = start_s + weight_backward_s[index]
            rank.weights += 1
    return SplitPipeline(
        step_s=max(rank.clock_s - rank.started_s for rank in ranks),
        in_flight=tuple(math.ceil(rank.most_held) for rank in ranks),
    )


def _next(
    ranks: Sequence[_Rank], index: int, last: int, num_microbatches: int, limit: int
) -> tuple[float, str]:
    """When a rank starts its next action, and which; "" while it can start none."""
    rank = ranks[index]
    found: list[tuple[float, str]] = []
    backward_s = _ready_s(ranks[index + 1].backward_done_s if index < last else
                          rank.forward_done_s, rank.backwards)  # fmt: skip
    if backward_s is not None and rank.backwards < rank.forwards:
        found.append((max(rank.clock_s, backward_s), "B"))
    if rank.forwards < num_microbatches and rank.held + 1 <= limit:
        forward_s = 0.0 if index == 0 else _ready_s(ranks[index - 1].forward_done_s, rank.forwards)
        if forward_s is not None:
            found.append((max(rank.clock_s, forward_s), "F"))
    if rank.weights < rank.backwards:
        found.append((rank.clock_s, "W"))
    # At equal times B goes first, then F, then W: the order of their names.
    return min(found, default=(0.0, ""))


def _ready_s(done_s: Sequence[float], position: int) -> float | None:
    return done_s[position] if position < len(done_s) else None
