"""Columns of the stage ILP: runs of units with their recomputation (``column_maker``)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from planner.cost.held_stage import NOTHING_WAITS, WaitingBytes, moment_bytes
from planner.cost.shared_cores import times_of
from planner.search.fronts import FrontCache
from planner.strategy.configuration import Configuration
from planner.strategy.moments import StageMoment


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Recomputation of a run of units."""

    kinds: tuple[str, ...]
    """"none", "selective" or "full" for each unit."""
    recompute_s: float
    """Time per microbatch."""
    kept_bytes: int
    """Activations kept per microbatch."""
    left_bytes: int
    """What of it is left at the end of a backward."""
    temporary_bytes: float
    """Highest transient."""
    early_temporary_bytes: float
    """That of the units before the epilogue."""

    def transient_bytes(self, moment: StageMoment) -> float:
        """Highest transient at a moment of the schedule, where one stage of a rank runs."""
        if not moment.is_running:
            return 0.0
        is_early = moment.is_ending or moment.is_dividing
        return self.early_temporary_bytes if is_early else self.temporary_bytes


@dataclass(frozen=True, slots=True)
class KnownMixes:
    """Recomputations of runs, for priced units and what else ``recomputation_key`` names."""

    fronts: FrontCache = field(default_factory=dict)
    """Undominated choices."""
    mixes: dict[tuple[int, int, str], Mix] = field(default_factory=dict)
    """One kind for all blocks of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """What a run of units holds whatever it recomputes."""

    static_bytes: float
    """Parameters, optimiser states and buffers in every backward."""
    gradient_bytes: float
    """What its first backward adds to that."""
    late_gathered_bytes: int
    """What it has gathered after a backward and not before."""
    reduction_bytes: float
    """All that it holds when gradients are reduced after backward."""
    beside_bytes: int
    """``StageMemory.beside_bytes``."""
    waiting: WaitingBytes = NOTHING_WAITS
    """``StageMemory.waiting_bytes``."""
    new_gradient_bytes: int = 0
    """``StageMemory.new_gradient_bytes``."""

    def held_bytes(self, moment: StageMoment) -> float:
        """What it holds at a moment but for activations and transients."""
        held = self.static_bytes + self.gradient_bytes * moment.has_gradients
        held += self.new_gradient_bytes * moment.has_new_gradients
        return held + self.late_gathered_bytes * moment.follows_backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What a run may hold on a rank of its own."""

    state: RunState
    """What it holds whatever it recomputes."""
    by_moment: Sequence[tuple[StageMoment, float]]
    """What is left at each moment for activations and transients."""

    def holds(self, mix: Mix) -> bool:
        """Whether a recomputation fits."""
        state = self.state
        return all(
            moment_bytes(
                moment,
                kept=mix.kept_bytes,
                left=mix.left_bytes,
                beside=state.beside_bytes,
                waiting=state.waiting,
            )
            + (mix.early_temporary_bytes if moment.is_ending else mix.temporary_bytes)
            <= room_bytes
            for moment, room_bytes in self.by_moment
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One way to fill one stage."""

    first: int
    """First unit."""
    end: int
    """One past the last unit."""
    mix: Mix
    """Recomputation."""
    forward_s: float
    """Forward of one microbatch, collectives and half of the transfers included."""
    backward_s: float
    """Backward of one microbatch, with recomputation and the other half."""
    step_s: float
    """Exposed traffic and optimiser, once per step."""
    state: RunState
    """What its run holds whatever it recomputes."""
    weight_s: float = 0.0
    """The part of ``backward_s`` that only the parameters' gradients need, where backwards are
    divided."""

    @property
    def parts_s(self) -> tuple[float, float, float]:
        """Forward, and the two parts of the backward, as ``Path.counts`` has them."""
        return self.forward_s, self.backward_s - self.weight_s, self.weight_s

    @property
    def microbatch_s(self) -> float:
        """One microbatch, forward and backward."""
        return self.forward_s + self.backward_s

    def held_bytes(self, moment: StageMoment) -> float:
        """All that it holds at a moment of the schedule, with the highest transient if it runs."""
        kept_bytes = moment_bytes(
            moment,
            kept=self.mix.kept_bytes,
            left=self.mix.left_bytes,
            beside=self.state.beside_bytes,
            waiting=self.state.waiting,
        )
        return self.state.held_bytes(moment) + kept_bytes + self.mix.transient_bytes(moment)

    def placed(self, first: int) -> "Column":
        """The same column where an alike run starts at another unit."""
        if first == self.first:
            return self
        return replace(self, first=first, end=first + self.end - self.first)


Holding = tuple[Column, ...]
"""Columns of stages that are chosen together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A complete choice of stages for one configuration."""

    columns: tuple[Column, ...]
    """One per stage."""
    objective_s: float
    """Step time by the action list."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """What was proven of a configuration."""

    partition: Partition | None
    """The fastest choice that was met, None where none was below the limit."""
    bound_s: float
    """No choice is faster than this, or than the limit."""


def step_time_s(configuration: Configuration, columns: Sequence[Column]) -> float:
    """Step time of a choice of columns: the action list, then the dearest rank's end."""
    ranks = range(configuration.degrees.pp)
    once_s = max(
        sum(columns[stage].step_s for stage in configuration.stages_of(rank)) for rank in ranks
    )
    times = times_of(
        configuration,
        forward_s=[column.forward_s for column in columns],
        backward_s=[column.backward_s for column in columns],
        weight_backward_s=[column.weight_s for column in columns],
    )
    return once_s + times.step_s


def placed(columns: Sequence[Column]) -> tuple[Column, ...]:
    """Move columns that stand for all runs of their length to where they follow one another."""
    placed: list[Column] = []
    first = 0
    for column in columns:
        placed.append(column.placed(first))
        first = placed[-1].end
    return tuple(placed)
