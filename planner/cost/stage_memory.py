"""Memory of any run of neighbouring units under one configuration.

Rajbhandari et al. 2020 (1910.02054) for the state, Korthikanti et al. 2022 (2205.05198) for
activations. A rank is at its fullest at one of two moments of a step:

* *backward*, when a microbatch starts its backward: parameters and the optimiser's states,
  gradients of the backwards before, gathered parameters, activations of every microbatch in
  flight, and the highest transient, less what is gone by then of blocks behind the one that has it
  (``planner.cost.sections``). Under a pipeline also when it ends, with the activations of one
  block left of it: gradients, and with resharding all parameters, have come meanwhile;
* *reduction*, when the backward is over: the state with all sharded gradients, and the
  parameters outside the blocks (the FSDP root) gathered, with their unsharded gradients and the
  input of their reduction. A weight that embedding and head share has two gradients and their
  sum there.

Ranks that hold their parameters whole (DDP, ZeRO-1) have the first moment alone. Where one rank
has all of the state and computes in its dtype, nothing is gathered or reduced at either.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from math import ceil

from planner.cost.breakdown import MemoryBreakdown
from planner.cost.gathered import GatheredParameters
from planner.cost.held_stage import (
    HeldStage,
    StageState,
    WaitingBytes,
    left_bytes,
    moment_breakdown,
    moment_bytes,
)
from planner.cost.model_units import ModelUnits
from planner.cost.receive_buffers import ReceiveBuffers
from planner.cost.transients import Transients
from planner.framework.spec import FrameworkSpec
from planner.hardware.spec import DeviceSpec
from planner.strategy.configuration import Configuration
from planner.strategy.moments import StageMoment
from planner.units import DTYPE_BYTES
from planner.vocabulary import RECOMPUTATIONS, Dtype, Recomputation

PARAMETER_BYTES = DTYPE_BYTES[Dtype.FLOAT32]
"""Bytes per parameter in the optimiser's dtype that a framework's numbers are stated for."""

_NOTHING_YET = StageMoment(in_flight=0)
_GRADIENTS = StageMoment(in_flight=0, has_gradients=True)


class StageMemory:
    """Sizes the stages of one configuration."""

    def __init__(
        self,
        model: ModelUnits,
        configuration: Configuration,
        device: DeviceSpec,
        framework: FrameworkSpec,
    ) -> None:
        """Build the prefix sums.

        Args:
            model: Units priced for the configuration's tp, stream and microbatch size.
            configuration: Degrees, schedule and form of the state.
            device: Device of each rank.
            framework: What it holds per parameter, and in reserve.
        """
        self._model = model
        self._units = model.units
        self._blocks = model.blocks
        self._configuration = configuration
        self._framework = framework
        own = framework.reserve_bytes
        self.reserve_bytes = device.reserve_bytes if own is None else round(own)
        """Memory beyond tensors, whatever they take."""
        self.allocator_share = device.allocator_share
        """Memory beside them, as a share of what they take."""
        self._shards = configuration.degrees.shards
        self._gathers = configuration.state_form == "fsdp"
        self._offloads = configuration.cpu_offload
        self._is_script = configuration.state_form != "replicated"
        self._pipelined = configuration.degrees.pp > 1
        degrees = configuration.degrees
        self._adds_up_late = degrees.dp_replicate > 1 < configuration.num_microbatches
        self._more_of_experts = degrees.shards // degrees.expert_shards - 1
        self.transients = Transients(model, configuration)
        """What the same stages hold for a while."""
        self.gathered = GatheredParameters(
            model, configuration, adds_up_gradients=self.transients.gradients.add_up
        )
        """What they have gathered of their parameters."""
        self.buffers = ReceiveBuffers(model, configuration)
        """What neighbouring stages send them, and where it lies."""
        self._root = self.gathered.root
        self._sums = model.byte_sums
        # Stages of a rank have the same buffers.
        self._own_bytes = model.buffer_bytes / configuration.virtual_stages
        self._states: dict[Hashable, StageState] = {}
        self._kept: dict[tuple[int, int, tuple[str, ...]], Callable[[StageMoment], int]] = {}

    def _sum(self, name: str, first: int, end: int) -> int:
        """Bytes of some parameters of the units [first, end), tied ones in each."""
        return self._sums[name][end] - self._sums[name][first]

    def local_trained_bytes(self, first: int, end: int) -> int:
        """Trained parameters of a stage on one tp rank in the optimiser's dtype, tied ones once."""
        copies = sum(t.copies(range(first, end)) * t.trained_bytes for t in self._model.tied)
        return self._sum("trained_bytes", first, end) - copies

    def sharded_trained_bytes(self, first: int, end: int) -> float:
        """The share of them whose optimiser states a rank holds.

        Of experts, which ep divides already, fewer ranks share the state.
        """
        more = self._more_of_experts * self._sum("experts_trained_bytes", first, end)
        return (self.local_trained_bytes(first, end) + more) / self._shards

    def _local_frozen_bytes(self, first: int, end: int) -> int:
        """Frozen parameters of a stage on one tp rank in the compute dtype, tied ones once."""
        copies = sum(t.copies(range(first, end)) * t.frozen_bytes for t in self._model.tied)
        return self._sum("frozen_bytes", first, end) - copies

    def _sharded_bytes(self, first: int, end: int) -> float:
        """A rank's share of all parameters of a stage, as they are kept between steps."""
        experts = self._sum("experts_frozen_bytes", first, end)
        frozen_bytes = self._local_frozen_bytes(first, end) + self._more_of_experts * experts
        return self.sharded_trained_bytes(first, end) + frozen_bytes / self._shards

    def updated_bytes(self, first: int, end: int) -> int:
        """Trained parameters of a stage on one tp rank in the compute dtype, tied ones once."""
        return self.gathered.whole_bytes(first, end) - self._local_frozen_bytes(first, end)

    def _root_shards_bytes(self, first: int, end: int) -> float:
        return self._root.trained_bytes(first, end) / self._shards

    def _late_root_shards_bytes(self, first: int, end: int) -> float:
        """Shards of the root's gradients, where no earlier backward of the step has left some."""
        reduced_before = not self.transients.gradients.add_up
        if not self._gathers or (reduced_before and self._configuration.num_microbatches > 1):
            return 0.0
        return self._root_shards_bytes(first, end)

    def earlier_gradient_bytes(self, first: int, end: int) -> tuple[float, float]:
        """Gradients of earlier backwards: sharded part, unsharded rest.

        Those of a single backward come block by block; FSDP reduces the root's last.
        """
        sharded = self.sharded_trained_bytes(first, end)
        if not self.transients.gradients.add_up:
            sharded -= self._late_root_shards_bytes(first, end)
            # Replicas add up theirs in the last backward, and keep them on their devices till then.
            return sharded if self._adds_up_late else self._here(sharded), 0.0
        sharded = self._here(sharded)
        return sharded, self.local_trained_bytes(first, end) - sharded

    def _optimizer_bytes(self, first: int, end: int) -> float:
        each = self._framework.state.optimizer / PARAMETER_BYTES
        return each * self.sharded_trained_bytes(first, end)

    def _at_backward(self, first: int, end: int, moment: StageMoment) -> StageState:
        """While a backward runs; looked at once for all moments that tell the same of a state."""
        changes = moment.has_gradients, moment.follows_backward, moment.has_new_gradients
        if (first, end, changes) not in self._states:
            self._states[first, end, changes] = self._new_at_backward(first, end, moment)
        return self._states[first, end, changes]

    def _new_at_backward(self, first: int, end: int, moment: StageMoment) -> StageState:
        """While a backward runs.

        What reduces gradients runs on a stream of its own. An allocator that keeps memory by
        stream, as CUDA's does, cannot give its shards the memory of freed activations.
        """
        gradient = self._framework.state.gradient / PARAMETER_BYTES
        if not self._is_script:
            return StageState(
                params=self.gathered.whole_bytes(first, end),
                grads=gradient * self.local_trained_bytes(first, end),
                optimizer=self._optimizer_bytes(first, end),
                buffers=self._own_bytes,
            )
        sharded, unsharded = 0.0, 0.0
        if moment.has_gradients:
            sharded, unsharded = self.earlier_gradient_bytes(first, end)
        if self._framework.holds_gradient_shards:
            sharded = max(sharded, self._here(gradient * self.sharded_trained_bytes(first, end)))
        buffers = unsharded + self._own_bytes
        buffers += self.gathered.start_bytes(first, end) + self.buffers.size_bytes(first, end)
        if moment.follows_backward:
            buffers += self.gathered.late_bytes(first, end)
        if moment.has_new_gradients:
            buffers += self.new_gradient_bytes(first, end)
        return StageState(
            params=self._here(self._sharded_bytes(first, end)),
            grads=sharded,
            optimizer=self._here(self._optimizer_bytes(first, end)),
            buffers=buffers,
        )

    def _here(self, state_bytes: float) -> float:
        """What of a rank's share of the state is on its device."""
        return 0.0 if self._offloads else state_bytes

    def host_bytes(self, first: int, end: int, kinds: Sequence[str] | None = None) -> float:
        """What is in host memory: inputs of blocks, and of the state, with gradients, its share.

        Args:
            first: First unit.
            end: One past the last unit.
            kinds: Recomputation of each unit; None for what is the most, full of all.
        """
        inputs_bytes = self._sum("pinned_bytes", first, end)
        if kinds is not None:
            run = zip(self._units[first:end], kinds, strict=True)
            inputs_bytes = sum(u.pinned_bytes for u, kind in run if kind == Recomputation.FULL)
        if not self._offloads:
            return float(inputs_bytes)
        updated_bytes = self.sharded_trained_bytes(first, end)
        state_bytes = self._sharded_bytes(first, end) + self._optimizer_bytes(first, end)
        return state_bytes + updated_bytes + inputs_bytes

    def _at_reduction(self, first: int, end: int) -> StageState:
        """When the backward is over, looked at once."""
        if (first, end) not in self._states:
            self._states[first, end] = self._new_at_reduction(first, end)
        return self._states[first, end]

    def _new_at_reduction(self, first: int, end: int) -> StageState:
        """When the backward is over; of whole parameters less than at the backward.

        Blocks have their shards of gradients, and the root gets its own. torch's schedules reduce
        those of the root first: blocks are gathered then, and their gradients whole.
        """
        if not self._is_script:
            return self._at_backward(first, end, _NOTHING_YET)
        blocks_shards = self.sharded_trained_bytes(first, end)
        blocks_shards -= self._late_root_shards_bytes(first, end)
        grads, whole = self._here(blocks_shards), 0
        if self._reduces_root_first:
            grads = 0.0
            whole += self.gathered.whole_bytes(first, end) - self._root.gathered_bytes(first, end)
            whole += self.local_trained_bytes(first, end) - self._root.trained_bytes(first, end)
        return StageState(
            params=self._here(self._sharded_bytes(first, end)),
            grads=grads,
            optimizer=self._here(self._optimizer_bytes(first, end)),
            buffers=self.buffers.size_bytes(first, end) + self._own_bytes + whole,
            transient=self.reduction_transient_bytes(first, end),
        )

    @property
    def _reduces_root_first(self) -> bool:
        """Whether the root is reduced before blocks; of ranks with several stages one at a time."""
        return self._pipelined and self._gathers and self._configuration.virtual_stages == 1

    def static_bytes(self, first: int, end: int) -> float:
        """What a stage holds in every backward besides activations and transients."""
        return self._at_backward(first, end, _NOTHING_YET).total

    def least_static_bytes(self) -> float:
        """What all stages together hold in every backward at the least, wherever they are cut.

        All adds up but gathered blocks, of which it is certain that a stage has the largest.
        """
        return self.static_bytes(0, len(self._units)) - self.gathered.uncertain_bytes()

    def gradient_bytes(self, first: int, end: int) -> float:
        """What it holds more from its first backward on."""
        if not self._is_script:
            return 0.0
        with_them = self._at_backward(first, end, _GRADIENTS).total
        return with_them - self.static_bytes(first, end)

    def reduction_transient_bytes(self, first: int, end: int) -> float:
        """What the root has beside its shards of the state while its gradients are reduced.

        First its gathered parameters and new gradients, of a weight that several units read one
        for each reader and their sum; gradients of earlier backwards are added up in the dtype of
        the reduction. Then parameters are sharded, and gradients are copied to the input of the
        reduction; at last that input and the rank's shards, beside which FSDP still has the last of
        what was copied, unless one rank has it all.
        """
        if not self._gathers:
            return 0.0
        reduced = self._root.trained_bytes(first, end)
        gathered = self._root.gathered_bytes(first, end)
        made = self._root.new_gradient_bytes(first, end)
        tied = [each for each in self._model.tied if each.trained_bytes]
        joined = [each for each in tied if each.copies(range(first, end))]
        new = made + sum(2 * each.gathered_bytes for each in joined)
        summed = reduced if self.transients.gradients.add_up else 0
        if summed and made == reduced:
            new = 0  # each is added where it is made
        copied = summed or made
        left = copied * self._root.last_share(first, end)
        return max(
            float(gathered + new + summed),
            float(copied + reduced),
            reduced + self._root_shards_bytes(first, end) + left * (self._shards > 1),
        )

    def reduction_bytes(self, first: int, end: int) -> float:
        """All that a stage holds at the reduction moment."""
        return self._at_reduction(first, end).total

    def kept_bytes(self, stage: HeldStage) -> int:
        """Activations of all its microbatches in flight; looked at once for all moments."""
        run = stage.first, stage.end, stage.kinds
        if run not in self._kept:
            kept, left = self._of_microbatch(*run)
            beside, waiting = self.beside_bytes(*run[:2]), self.waiting_bytes(*run[:2])
            self._kept[run] = partial(
                moment_bytes, kept=kept, left=left, beside=beside, waiting=waiting
            )
        return self._kept[run](stage.moment)

    def _of_microbatch(self, first: int, end: int, kinds: tuple[str, ...]) -> tuple[int, int]:
        """Activations of one microbatch, and what of them is left at the end of its backward."""
        sizes = {
            index: self._units[index].activation_bytes[kind]
            for index, kind in zip(range(first, end), kinds, strict=True)
        }
        if sizes and (more := self.buffers.more_bytes(first)):
            sizes[first] -= more[RECOMPUTATIONS.index(kinds[0])]
        inside = [size for index, size in sizes.items() if index in self._blocks]
        outside = sizes.get(0, 0) + self.transients.left_gradient_bytes(first, end)
        return sum(sizes.values()), left_bytes(outside, sum(inside), len(inside))

    def waiting_bytes(self, first: int, end: int) -> WaitingBytes:
        """What a stage holds otherwise of a microbatch whose backward is divided."""
        gradients = self._sum("waiting_gradient_bytes", first, end)
        return WaitingBytes(gradients=gradients, released=self._sum("released_bytes", first, end))

    def new_gradient_bytes(self, first: int, end: int) -> int:
        """Gradients in the compute dtype that FSDP has not yet added to those before."""
        updated = self.updated_bytes(first, end)
        return updated * (self._is_script and updated != self.local_trained_bytes(first, end))

    def beside_bytes(self, first: int, end: int) -> int:
        """What a stage keeps of a microbatch beside what its units count.

        Less what its first unit counts of it that lies in receive buffers.
        """
        return self.shared_bytes(first, end) - self.buffers.least_bytes(first)

    def shared_bytes(self, first: int, end: int) -> int:
        """What a stage keeps for one microbatch beside what its units count.

        What several of its units read, and the rest of its output: torch's stages hold on to what
        they sent until its gradient has come back.
        """
        has_buffers = self._pipelined and self._is_script
        kept = sum(
            each.size_bytes
            for each in self._model.shared
            if each.counts(first, end) and not (has_buffers and first in each.received)
        )
        if has_buffers and end < len(self._units):
            kept += self._model.entering_bytes[end]
            held = (each for each in self._model.shared if each.is_sent_and_held(first, end))
            kept -= sum(each.size_bytes // self._model.sent_parts for each in held)
        return kept

    def peak(self, *moments: Sequence[HeldStage]) -> MemoryBreakdown:
        """A rank at the fullest of some moments, or at the reduction if it is fuller then."""
        held = max(moments, key=self._held_bytes)
        found = [
            moment_breakdown(
                [self._at_backward(each.first, each.end, each.moment) for each in held],
                activations_bytes=sum(map(self.kept_bytes, held)),
                temporary_bytes=max(map(self.transients.of, held), default=0),
            )
        ]
        if self._is_script:
            found.append(moment_breakdown([self._at_reduction(e.first, e.end) for e in held]))
        fullest = max(found, key=lambda memory: memory.tensor_bytes)
        slack_bytes = ceil(self.allocator_share * fullest.tensor_bytes)
        return replace(fullest, reserve_bytes=self.reserve_bytes + slack_bytes)

    def _held_bytes(self, held: Sequence[HeldStage]) -> float:
        """All tensors of a rank at one moment of its backwards."""
        states = sum(self._at_backward(each.first, each.end, each.moment).total for each in held)
        highest = max(map(self.transients.of, held), default=0)
        return states + sum(map(self.kept_bytes, held)) + highest
