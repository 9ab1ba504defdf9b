"""Memory of any run of neighbouring units under one configuration.

Rajbhandari et al. 2020 (1910.02054) for the sharded state, Korthikanti et al. 2022 (2205.05198)
for activations. A rank is at its fullest at one of two moments of a step:

* *backward*, when the last microbatch starts its backward: parameters and AdamW's two moments,
  gradients of the microbatches before, gathered parameters, activations of every microbatch in
  flight, and the highest transient;
* *reduction*, when the backward is over: the state with all sharded gradients, and the
  parameters outside the blocks (the FSDP root) gathered, with their unsharded gradients and the
  input of their reduction. A weight that embedding and head share has two gradients and their
  sum there.

torch's pipeline stages keep a receive buffer for every microbatch of the step.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

from planner.cost.breakdown import MemoryBreakdown
from planner.cost.unit_pricing import PricedUnit
from planner.graph.analysis.shared import SharedActivation
from planner.hardware.spec import DeviceSpec
from planner.strategy.configuration import Configuration


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUnits:
    """The priced units of a model in order, for one tp, stream layout and microbatch size."""

    units: tuple[PricedUnit, ...]
    """Prologue, blocks, epilogue."""
    entering_bytes: tuple[int, ...]
    """Bytes of one microbatch on a rank that a stage receives which begins with each unit; 0
    where no stage can."""
    tied: tuple["TiedWeight", ...]
    """Weights that several units read, counted in each of them."""
    shared: tuple[SharedActivation, ...]
    """Activations that units share, counted in none of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedWeight:
    """A weight that several units read: once on each stage that holds some of them."""

    units: tuple[int, ...]
    """Its readers, in order."""
    parameter_bytes: int
    """Bytes on a tp rank in the optimiser's dtype."""
    gathered_bytes: int
    """The same in the compute dtype."""

    def copies(self, units: Collection[int]) -> int:
        """How often it is counted too much in a set of units."""
        return max(0, sum(unit in units for unit in self.units) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldStage:
    """A stage on a rank, at one moment of the schedule."""

    first: int
    """First unit."""
    end: int
    """One past the last unit."""
    kinds: tuple[str, ...]
    """Recomputation of each unit."""
    in_flight: int
    """Microbatches whose activations it holds."""


class StageMemory:
    """Sizes the stages of one configuration."""

    def __init__(self, model: ModelUnits, configuration: Configuration, device: DeviceSpec) -> None:
        """Build the prefix sums.

        Args:
            model: Units priced for the configuration's tp, stream and microbatch size.
            configuration: Degrees and schedule.
            device: Device of each rank.
        """
        self._model = model
        self._units = model.units
        self._last = len(model.units) - 1
        self._configuration = configuration
        self._device = device
        self._shards = configuration.degrees.dp_shard
        self._pipelined = configuration.degrees.pp > 1
        self._parameters = list(accumulate((u.parameter_bytes for u in self._units), initial=0))
        self._gathered = list(accumulate((u.gathered_bytes for u in self._units), initial=0))

    def _copies_bytes(self, units: Collection[int]) -> int:
        """Bytes of tied weights that are counted too much in some units."""
        return sum(tied.copies(units) * tied.parameter_bytes for tied in self._model.tied)

    def _gathered_copies_bytes(self, units: Collection[int]) -> int:
        return sum(tied.copies(units) * tied.gathered_bytes for tied in self._model.tied)

    def local_parameter_bytes(self, first: int, end: int) -> int:
        """Parameters of a stage on one tp rank in the optimiser's dtype, tied ones once."""
        whole = self._parameters[end] - self._parameters[first]
        return whole - self._copies_bytes(range(first, end))

    def sharded_parameter_bytes(self, first: int, end: int) -> float:
        """Parameters of a stage on one rank."""
        return self.local_parameter_bytes(first, end) / self._shards

    def _all_gathered_bytes(self, first: int, end: int) -> int:
        whole = self._gathered[end] - self._gathered[first]
        return whole - self._gathered_copies_bytes(range(first, end))

    def _root(self, first: int, end: int) -> tuple[int, ...]:
        """Units whose parameters form the FSDP root of the stage."""
        return tuple(i for i in {0, self._last} if first <= i < end)

    def _root_gathered_bytes(self, first: int, end: int) -> int:
        root = self._root(first, end)
        whole = sum(self._units[i].gathered_bytes for i in root)
        return whole - self._gathered_copies_bytes(root)

    def gathered_bytes(self, first: int, end: int) -> int:
        """Gathered parameters during the last backward.

        With resharding the root and two blocks, the one that runs and the next; without it, and
        under a pipeline (torch's schedules reshard nothing between backwards), all.
        """
        everything = self._all_gathered_bytes(first, end)
        if self._pipelined or not self._configuration.reshard_after_forward:
            return everything
        blocks = [self._units[i].gathered_bytes for i in range(first, end) if 0 < i < self._last]
        largest = max(blocks, default=0)
        return min(everything, self._root_gathered_bytes(first, end) + 2 * largest)

    def earlier_gradient_bytes(self, first: int, end: int) -> tuple[float, float]:
        """Gradients of the microbatches before the last: sharded part, unsharded rest."""
        if self._configuration.num_microbatches == 1:
            return 0.0, 0.0
        sharded = self.sharded_parameter_bytes(first, end)
        if self._configuration.reshard_after_forward and not self._pipelined:
            return sharded, 0.0
        return sharded, self.local_parameter_bytes(first, end) - sharded

    def receive_bytes(self, first: int, end: int) -> int:
        """Buffers for what the neighbouring stages send."""
        if not self._pipelined:
            return 0
        entering = self._model.entering_bytes[first] if first > 0 else 0
        leaving = self._model.entering_bytes[end] if end <= self._last else 0
        return self._configuration.num_microbatches * (entering + leaving)

    def static_bytes(self, first: int, end: int) -> float:
        """What a stage holds at the backward moment besides activations and transients."""
        return (
            3 * self.sharded_parameter_bytes(first, end)
            + sum(self.earlier_gradient_bytes(first, end))
            + self.gathered_bytes(first, end)
            + self.receive_bytes(first, end)
        )

    def reduction_transient_bytes(self, first: int, end: int) -> float:
        """Unsharded gradients of the root and the input of their reduction."""
        units = self._root(first, end)
        copies = self._copies_bytes(units)
        root = sum(self._units[i].parameter_bytes for i in units) - copies
        return 2.0 * root + copies

    def reduction_bytes(self, first: int, end: int) -> float:
        """All that a stage holds at the reduction moment."""
        return (
            4 * self.sharded_parameter_bytes(first, end)
            + self._root_gathered_bytes(first, end)
            + self.reduction_transient_bytes(first, end)
            + self.receive_bytes(first, end)
        )

    def kept_bytes(self, stage: HeldStage) -> int:
        """Activations of all its microbatches in flight."""
        units = range(stage.first, stage.end)
        kept = sum(
            self._units[index].activation_bytes[kind]
            for index, kind in zip(units, stage.kinds, strict=True)
        )
        return stage.in_flight * (kept + self.shared_bytes(stage.first, stage.end))

    def shared_bytes(self, first: int, end: int) -> int:
        """What several of the stage's units read and keep, for one microbatch."""
        return sum(each.size_bytes for each in self._model.shared if each.counts(first, end))

    def temporary_bytes(self, first: int, end: int, kinds: Sequence[str]) -> int:
        """Highest transient: the epilogue's, or a block's while the epilogue's tensors are gone."""
        has_epilogue = end == self._last + 1
        released = self._units[self._last].activation_bytes["none"] if has_epilogue else 0
        highest = 0
        for index, kind in zip(range(first, end), kinds, strict=True):
            later = released if index != self._last else 0
            highest = max(highest, self._units[index].temporary_bytes[kind] - later)
        return highest

    def peak(self, held: Sequence[HeldStage]) -> MemoryBreakdown:
        """The fuller of the two moments of a rank that holds some stages."""
        moments = (self._at_backward(held), self._at_reduction(held))
        return max(moments, key=lambda memory: memory.total_bytes)

    def _at_backward(self, held: Sequence[HeldStage]) -> MemoryBreakdown:
        sharded = round(sum(self.sharded_parameter_bytes(s.first, s.end) for s in held))
        earlier = [self.earlier_gradient_bytes(s.first, s.end) for s in held]
        buffers = sum(
            self.gathered_bytes(s.first, s.end) + self.receive_bytes(s.first, s.end) for s in held
        )
        return MemoryBreakdown(
            params_bytes=sharded,
            grads_bytes=round(sum(part for part, _ in earlier)),
            optimizer_bytes=2 * sharded,
            activations_bytes=sum(self.kept_bytes(stage) for stage in held),
            buffers_bytes=round(buffers + sum(rest for _, rest in earlier)),
            temporary_bytes=max(self.temporary_bytes(s.first, s.end, s.kinds) for s in held),
            reserve_bytes=self._device.reserve_bytes,
        )

    def _at_reduction(self, held: Sequence[HeldStage]) -> MemoryBreakdown:
        sharded = round(sum(self.sharded_parameter_bytes(s.first, s.end) for s in held))
        buffers = sum(
            self._root_gathered_bytes(s.first, s.end) + self.receive_bytes(s.first, s.end)
            for s in held
        )
        transient = sum(self.reduction_transient_bytes(s.first, s.end) for s in held)
        return MemoryBreakdown(
            params_bytes=sharded,
            grads_bytes=sharded,
            optimizer_bytes=2 * sharded,
            activations_bytes=0,
            buffers_bytes=round(buffers),
            temporary_bytes=round(transient),
            reserve_bytes=self._device.reserve_bytes,
        )
