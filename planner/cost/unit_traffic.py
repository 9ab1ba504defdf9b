"""What FSDP2 takes to gather and reduce one unit: a block, or a part of the root."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import NamedTuple

from planner.cost.collective import all_gather_s, all_reduce_s, reduce_scatter_s
from planner.cost.link_budget import UnitPasses
from planner.cost.offload import HostState
from planner.cost.op import pointwise_s
from planner.cost.stage_memory import PARAMETER_BYTES
from planner.cost.unit_pricing import PricedUnit
from planner.framework.spec import FrameworkSpec
from planner.hardware.spec import ClusterSpec
from planner.hardware.topology import CommGroup, comm_group
from planner.strategy.configuration import Configuration
from planner.strategy.placement import axis_group, expert_axes, state_axes
from planner.vocabulary import Axis, Operands, Recomputation

Collective = Callable[[float, CommGroup], float]
"""Seconds of a collective of some bytes over a group."""


class UnitTraffic(NamedTuple):
    """Seconds that nothing hides, with the copies that the device makes of what is moved."""

    microbatch: float
    """In every microbatch."""
    added: float
    """Adding up gradients of microbatches that are reduced together; of each in the mean."""
    step: float
    """Once a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Parameters that FSDP2 gathers and reduces together, on one tp rank; fields as of units."""

    trained_bytes: int
    gathered_bytes: int
    frozen_bytes: int
    experts_trained_bytes: int = 0
    experts_gathered_bytes: int = 0
    experts_frozen_bytes: int = 0

    @classmethod
    def of_block(cls, unit: PricedUnit) -> "StateBytes":
        """Those of a block, without what it reads outside of itself."""
        return cls(
            trained_bytes=unit.trained_bytes - unit.outer_trained_bytes,
            gathered_bytes=unit.inner_gathered_bytes,
            frozen_bytes=unit.frozen_bytes - unit.outer_frozen_bytes,
            experts_trained_bytes=unit.experts_trained_bytes,
            experts_gathered_bytes=unit.experts_gathered_bytes,
            experts_frozen_bytes=unit.experts_frozen_bytes,
        )


class UnitPricer:
    """Prices units under one configuration."""

    def __init__(
        self,
        configuration: Configuration,
        cluster: ClusterSpec,
        framework: FrameworkSpec,
        passes: UnitPasses,
    ) -> None:
        """Keep what traffic depends on.

        Args:
            configuration: ZeRO form, microbatches, pipeline.
            cluster: Devices and links.
            framework: Bytes of its reductions.
            passes: What hides behind the units' passes.
        """
        self._passes = passes
        self._wire = framework.gradient_wire_bytes / PARAMETER_BYTES
        place = configuration.degrees, configuration.mesh_order
        self._shard = comm_group(cluster, *state_axes(*place))
        self._experts = comm_group(cluster, *expert_axes(*place))
        degrees, order = place
        self._replicate = axis_group(cluster, degrees, Axis.DP_REPLICATE, order)
        self._microbatches = configuration.num_microbatches
        self._pipelined = configuration.degrees.pp > 1
        self._reshards = configuration.reshard_after_forward
        self._state = HostState(configuration, cluster, framework)
        host = cluster.script_host
        self._issue_s = host.collective_s if host is not None else 0.0
        self._known: dict[Hashable, float] = {}
        self._copied = framework.accumulated_bytes / PARAMETER_BYTES
        self._device = cluster.device
        self.is_alone = (
            not self._state.is_on_host and self._shard.num_ranks == self._replicate.num_ranks == 1
        )
        """Whether one device has the state, so that nothing but its own copies takes time."""

    def of_block(self, unit: PricedUnit, *, is_first: bool) -> UnitTraffic:
        """Traffic of a block, nothing recomputed.

        Its gather hides behind the forward of the block before it.

        Args:
            unit: The block.
            is_first: Whether no block comes before it.
        """
        state = StateBytes.of_block(unit)
        gather_s = self._passes.forward_exposed_s(unit, self._gather_s(state))
        every_s, once_s = self.backward_s(unit, Recomputation.NONE, is_first=is_first)
        return self._with_copies(state, gather_s, every_s, once_s)

    def of_root(self, state: StateBytes) -> UnitTraffic:
        """Traffic of what lies outside of the blocks: it hides behind nothing."""
        reductions_s = self._scatter_s(state)
        every_s = reductions_s if self._reshards and not self._pipelined else 0.0
        once_s = reductions_s + self._replicas_s(state) - every_s
        return self._with_copies(state, self._gather_s(state), every_s, once_s)

    def _with_copies(
        self, state: StateBytes, gather_s: float, every_s: float, once_s: float
    ) -> UnitTraffic:
        """Add copies, and what is moved in front of the forward, once a step or in each."""
        bandwidth = self._device.pointwise_bytes_per_s
        gather_copies_s = self._gather_copies_bytes(state) / bandwidth
        both_s = gather_s + gather_copies_s
        both_s += max(self._reduce_copies_bytes(state) / bandwidth, self._cast_s(state))
        if not self._reshards:
            return UnitTraffic(0.0, self._added_s(state), once_s + both_s)
        every_s += gather_copies_s
        if self._pipelined:
            return UnitTraffic(every_s, self._added_s(state), once_s + both_s)
        return UnitTraffic(every_s + both_s, 0.0, once_s)

    # -- backward of a block ----------------------------------------------------------------------

    def backward_s(self, unit: PricedUnit, kind: str, *, is_first: bool) -> tuple[float, float]:
        """Exposed traffic of a block's backward.

        Args:
            unit: The block.
            kind: Its recomputation.
            is_first: Whether no block comes before it.

        Returns:
            In every microbatch, and what the last of a step adds to that.
        """
        state = StateBytes.of_block(unit)
        scatter_s, replicas_s = self._scatter_s(state), self._replicas_s(state)
        gather_s = self._gather_s(state) if self._reshards else 0.0
        every_s = 0.0
        if self._reshards:
            each_s = 0.0 if self._pipelined else scatter_s
            every_s = self._exposed_s(unit, kind, gather_s, each_s, is_alone=is_first)
        if self._pipelined:
            return every_s, scatter_s + replicas_s
        last_s = self._exposed_s(unit, kind, gather_s, scatter_s + replicas_s, is_alone=is_first)
        return every_s, last_s - every_s

    def _exposed_s(
        self, unit: PricedUnit, kind: str, gathers_s: float, reductions_s: float, *, is_alone: bool
    ) -> float:
        """Behind a backward; the reduction of the first block is alone.

        So are reductions that the host waits for.
        """
        alone_s = 0.0
        if is_alone or self._state.waits:
            alone_s, reductions_s = reductions_s, 0.0
        hidden_s = self._passes.backward_exposed_s(
            unit, kind, gathers_s=gathers_s, reductions_s=reductions_s
        )
        return hidden_s + alone_s

    # -- its parts --------------------------------------------------------------------------------

    def _gather_copies_bytes(self, state: StateBytes) -> float:
        """What is read and written where parameters are gathered: FSDP copies them out of a buffer.

        Before, each rank casts its share, all of it where it has all; of several that is little.
        """
        updated_bytes = state.gathered_bytes - state.frozen_bytes
        casts = self._shard.num_ranks == 1 and updated_bytes != state.trained_bytes
        return 2.0 * state.gathered_bytes + casts * (state.trained_bytes + updated_bytes)

    def _reduce_copies_bytes(self, state: StateBytes) -> float:
        """The same of gradients: into a buffer, and one rank alone copies them out of it again."""
        alone = 2.0 if self._shard.num_ranks == 1 else 0.0
        return (self._copied + alone) * state.trained_bytes

    def _cast_s(self, state: StateBytes) -> float:
        """Casting a unit's gradients to the dtype in which they are reduced."""
        return pointwise_s(0.0, state.trained_bytes / PARAMETER_BYTES, "cast", self._device)

    def _added_s(self, state: StateBytes) -> float:
        """Gradients of a microbatch that are kept whole, in the dtype in which they are reduced.

        Those of the first are cast to it, others are added to what is there.
        """
        parameters = state.trained_bytes / PARAMETER_BYTES
        if not parameters or self._microbatches == 1:
            return 0.0
        made_bytes = state.gathered_bytes - state.frozen_bytes
        kept_bytes = self._wire * state.trained_bytes
        is_cast = made_bytes != kept_bytes
        operands: Operands = "cast" if is_cast else "even"
        first_s = pointwise_s(made_bytes + kept_bytes, parameters, operands, self._device) * is_cast
        other_s = pointwise_s(made_bytes + 2 * kept_bytes, parameters, operands, self._device)
        return first_s / self._microbatches + other_s * (1 - 1 / self._microbatches)

    def _collective_s(self, collective: Collective, num_bytes: float, group: CommGroup) -> float:
        """A collective, priced once for each size."""
        key = (collective, num_bytes, id(group))
        if key not in self._known:
            self._known[key] = collective(num_bytes, group)
        return self._known[key]

    def _shared_s(self, collective: Collective, whole_bytes: float, experts_bytes: float) -> float:
        """A collective of a unit: of its experts over the ranks that have them, and of the rest.

        Nothing is moved where there is nothing, as where all of it is frozen.
        """
        seconds = 0.0
        for num_bytes, group in (
            (whole_bytes - experts_bytes, self._shard),
            (experts_bytes, self._experts),
        ):
            if num_bytes and group.num_ranks > 1:
                seconds += self._collective_s(collective, num_bytes, group) + self._issue_s / 2
        return seconds

    def _gather_s(self, state: StateBytes) -> float:
        gather_s = self._shared_s(all_gather_s, state.gathered_bytes, state.experts_gathered_bytes)
        share = self._share(
            state.trained_bytes + state.frozen_bytes,
            state.experts_trained_bytes + state.experts_frozen_bytes,
        )
        return self._state.copy_s(share) + gather_s

    def _share(self, whole_bytes: float, experts_bytes: float) -> float:
        """A rank's share of some of a unit's state."""
        others_bytes = (whole_bytes - experts_bytes) / self._shard.num_ranks
        return others_bytes + experts_bytes / self._experts.num_ranks

    def _scatter_s(self, state: StateBytes) -> float:
        wire = self._wire
        scatter_s = self._shared_s(
            reduce_scatter_s, state.trained_bytes * wire, state.experts_trained_bytes * wire
        )
        return scatter_s + (0.0 if self._state.copies_once else self._to_host_s(state))

    def _to_host_s(self, state: StateBytes) -> float:
        return self._state.copy_s(self._share(state.trained_bytes, state.experts_trained_bytes))

    def _replicas_s(self, state: StateBytes) -> float:
        # Gradients are packed for the reduction once, whether ranks share them or not.
        is_packed_here = self._replicate.num_ranks > 1 and self._shard.num_ranks == 1
        total = self._issue_s / 2 if is_packed_here and state.trained_bytes else 0.0
        for num_bytes, group in (
            (state.trained_bytes - state.experts_trained_bytes, self._shard),
            (state.experts_trained_bytes, self._experts),
        ):
            if num_bytes:
                share_bytes = num_bytes / group.num_ranks * self._wire
                total += self._collective_s(all_reduce_s, share_bytes, self._replicate)
        return total + (self._to_host_s(state) if self._state.copies_once else 0.0)
