"""What a microbatch takes at the least under a choice, before its layouts are known to run.

With t(b) the seconds of b samples in the fastest layouts of the sharding programs, of their kernels
and collectives alone,

    t(b) / b  >=  t(n b) / (n b)        for any whole n.

The layouts of b samples are layouts of n b samples too. There, none of its kernels and collectives
takes more than n times as long: they do at most n times the work (``GraphFamily.work_is_shared``),
and rates rise with size (``planner.cost.op``, ``planner.cost.collective``; a measured device is
asked). So one program of the largest microbatch bounds all smaller ones, and each that is solved on
the way those below it. Layouts that run are no faster than the fastest.

Nor is any microbatch faster than the host issues its kernels (``planner.cost.unit_pricing``): as
many of each op as it is written, of whatever size, whether it runs on parts or not.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from math import lcm

from planner.cost.op import rates_rise
from planner.graph.sizes.family import GraphFamily
from planner.hardware.spec import DeviceSpec
from planner.pricing.choice import ShardingChoice
from planner.pricing.unit_layouts import UnitSolver

_TOLERANCE = 1e-6
"""Share by which solved programs may be off."""


class LeastWork:
    """Bounds on demand, from what was solved so far."""

    def __init__(
        self, graphs: GraphFamily, solvers: Sequence[UnitSolver], devices: Sequence[DeviceSpec]
    ) -> None:
        """Keep what bounds depend on; nothing is solved yet.

        Args:
            graphs: The model at every microbatch size.
            solvers: Give the fastest layouts on each kind of device; a unit may run on any.
            devices: These kinds.
        """
        self._graphs = graphs
        self._solvers = tuple(solvers)
        self._devices = tuple(devices)
        self._largest: dict[ShardingChoice, int] = {}
        self._solved: dict[ShardingChoice, dict[int, float]] = {}

    @cached_property
    def _holds(self) -> bool:
        return self._graphs.work_is_shared and all(map(rates_rise, self._devices))

    def expect(self, choice: ShardingChoice) -> None:
        """Note a choice that may be asked for: a larger one will bound it."""
        family = _family(choice if choice.context is None else _without_context(choice))
        self._largest[family] = lcm(self._largest.get(family, 1), choice.microbatch_size)

    def issued_s(self, choice: ShardingChoice) -> float:
        """What the host takes at the least to issue the kernels of one microbatch.

        Returns:
            Seconds, forward and backward, through all units; 0 where several ops are one kernel.
        """
        size = choice.microbatch_size
        if choice.compile or not self._graphs.evaluates(size):
            return 0.0
        sizes = self._solvers[0].sizes(self._graphs.size_of_trial(size))
        return sum(sizes.num_kernels) * min(each.host_dispatch_s for each in self._devices)

    def by_larger_s(self, choice: ShardingChoice) -> float:
        """What one microbatch takes at the least, by the larger ones that were solved.

        Args:
            choice: One that was expected.

        Returns:
            Seconds, forward and backward, through all units; 0 where larger ones tell nothing.
        """
        if choice.context is not None:
            return self._of_a_part_s(self.by_larger_s, choice)
        size, family = choice.microbatch_size, _family(choice)
        if not self._holds or _is_otherwise(choice) or not self._graphs.evaluates(size):
            return 0.0
        if self._largest[family] not in self._solved.get(family, ()):
            self.solved_s(replace(family, microbatch_size=self._largest[family]))
        return max(
            (
                least_s * size / larger
                for larger, least_s in self._solved[family].items()
                if larger % size == 0 and self._graphs.evaluates(larger)
            ),
            default=0.0,
        )

    def solved_s(self, choice: ShardingChoice) -> float:
        """The same by a program of its own.

        0 where there are no layouts. Blocks that are compiled or multiply in float8 are not
        bounded. A loss in chunks takes no less than a whole one: as many kernels and collectives
        for each chunk, of its part of the rows.
        """
        if choice.context is not None:
            return self._of_a_part_s(self.solved_s, choice)
        size = choice.microbatch_size
        solved = self._solved.setdefault(_family(choice), {})
        if size not in solved:
            solved[size] = 0.0 if _is_otherwise(choice) else self._solve(choice)
        return solved[size] if choice.loss_chunks == 1 or self._holds else 0.0

    def _of_a_part_s(
        self, known_s: Callable[[ShardingChoice], float], choice: ShardingChoice
    ) -> float:
        """What a microbatch takes at the least over tp of which ranks of cp have parts.

        None of the kernels and collectives on a part takes less than its share of what the same
        layouts over tp take on the whole, and those over cp come beside them.
        """
        return known_s(_without_context(choice)) / choice.cp if self._holds else 0.0

    def _solve(self, choice: ShardingChoice) -> float:
        sizes = self._solvers[0].sizes(choice.microbatch_size)
        by_structure: dict[str, float] = {}
        for unit in sizes.representatives:
            solutions = [solver.solve(unit, choice) for solver in self._solvers]
            bounds_s = [each.bound_s for each in solutions if each is not None]
            if len(bounds_s) < len(solutions):
                return 0.0
            by_structure[unit.structure] = min(bounds_s) * (1 - _TOLERANCE)
        return sum(by_structure[unit.structure] for unit in sizes.graph.units)


def _is_otherwise(choice: ShardingChoice) -> bool:
    """Whether blocks run other kernels than programs of layouts price."""
    return choice.compile or choice.float8


def _without_context(choice: ShardingChoice) -> ShardingChoice:
    """The same over tp alone."""
    return replace(choice, cp=1)


def _family(choice: ShardingChoice) -> ShardingChoice:
    """What choices have in common that differ in their microbatches, and so in chunks of a loss.

    And in what of theirs lies in host memory, which takes time beside.
    """
    return replace(choice, microbatch_size=1, loss_chunks=1, activation_offload=False)
