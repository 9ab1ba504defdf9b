"""Data-parallel traffic of a stage: FSDP2, and ranks that hold their parameters whole."""

import math
from collections.abc import Callable, Hashable

from planner.cost.collective import all_gather_s, all_reduce_s, broadcast_s, reduce_scatter_s
from planner.cost.link_budget import UnitPasses, exposed_s
from planner.cost.model_units import ModelUnits
from planner.cost.offload import HostState
from planner.cost.op import pointwise_s
from planner.cost.stage_memory import PARAMETER_BYTES, StageMemory
from planner.framework.spec import FrameworkSpec
from planner.hardware.spec import ClusterSpec
from planner.hardware.topology import CommGroup, comm_group
from planner.strategy.configuration import Configuration
from planner.strategy.placement import axis_group, expert_axes, state_axes
from planner.vocabulary import Axis, Operands, Recomputation

Collective = Callable[[float, CommGroup], float]
"""Seconds of a collective of some bytes over a group."""


class ShardedState:
    """FSDP2: parameters are gathered from their shards.

    Without a pipeline, ZeRO-3 gathers forward and backward and reduce-scatters in every
    microbatch (replicas add their shards in the last), ZeRO-2 gathers in the first and reduces in
    the last, behind its backward. torch's schedules reduce after the last backward of the stage,
    unhidden; with ZeRO-3 a backward leaves the parameters for the next forward, so that each
    microbatch gathers once and the step once more.

    Prologue and epilogue are the root, gathered at the start of the stage. Nothing runs behind
    their reduction and that of the first block.
    """

    def __init__(
        self,
        model: ModelUnits,
        configuration: Configuration,
        cluster: ClusterSpec,
        framework: FrameworkSpec,
        passes: UnitPasses,
    ) -> None:
        """Sum up the units' traffic.

        Args:
            model: Priced units.
            configuration: ZeRO form, microbatches, pipeline.
            cluster: Devices and links.
            framework: Bytes of its reductions.
            passes: What hides behind the units' passes.
        """
        self._units = model.units
        self._blocks = model.blocks
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
        self._device = device = cluster.device
        bandwidth = device.pointwise_bytes_per_s
        sums = model.unit_sums
        self._gathers = sums.of(
            lambda i: self._forward_gather_s(i) + self._gather_copies_bytes(i) / bandwidth
        )
        self._regathers = sums.of(lambda i: self._gather_copies_bytes(i) / bandwidth)
        self._reduce_copies = sums.of(
            lambda i: max(self._reduce_copies_bytes(i) / bandwidth, self._cast_s(i))
        )
        self._added = sums.of(self._added_s)
        self._every = sums.of(lambda i: self._every_s(i, Recomputation.NONE))
        self._once = sums.of(lambda i: self._once_s(i, Recomputation.NONE))

    @property
    def is_alone(self) -> bool:
        """Whether one device has the state, so that nothing but its own copies takes time."""
        return (
            not self._state.is_on_host and self._shard.num_ranks == self._replicate.num_ranks == 1
        )

    # -- one unit ---------------------------------------------------------------------------------

    def _gather_copies_bytes(self, index: int) -> float:
        """What is read and written where parameters are gathered: FSDP copies them out of a buffer.

        Before, each rank casts its share, all of it where it has all; of several that is little.
        """
        unit = self._units[index]
        updated_bytes = unit.gathered_bytes - unit.frozen_bytes
        casts = self._shard.num_ranks == 1 and updated_bytes != unit.trained_bytes
        return 2.0 * unit.gathered_bytes + casts * (unit.trained_bytes + updated_bytes)

    def _reduce_copies_bytes(self, index: int) -> float:
        """The same of gradients: into a buffer, and one rank alone copies them out of it again."""
        alone = 2.0 if self._shard.num_ranks == 1 else 0.0
        return (self._copied + alone) * self._units[index].trained_bytes

    def _parameters(self, index: int) -> float:
        return self._units[index].trained_bytes / PARAMETER_BYTES

    def _cast_s(self, index: int) -> float:
        """Casting a unit's gradients to the dtype in which they are reduced."""
        return pointwise_s(0.0, self._parameters(index), "cast", self._device)

    def _added_s(self, index: int) -> float:
        """Gradients of a microbatch that are kept whole, in the dtype in which they are reduced.

        Those of the first are cast to it, others are added to what is there.
        """
        parameters = self._parameters(index)
        if not parameters or (self._reshards and not self._pipelined) or self._microbatches == 1:
            return 0.0
        unit = self._units[index]
        made_bytes = unit.gathered_bytes - unit.frozen_bytes
        kept_bytes = self._wire * unit.trained_bytes
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

    def _gather_s(self, index: int) -> float:
        unit = self._units[index]
        gather_s = self._shared_s(all_gather_s, unit.gathered_bytes, unit.experts_gathered_bytes)
        share = self._share(
            unit.trained_bytes + unit.frozen_bytes,
            unit.experts_trained_bytes + unit.experts_frozen_bytes,
        )
        return self._state.copy_s(share) + gather_s

    def _share(self, whole_bytes: float, experts_bytes: float) -> float:
        """A rank's share of some of a unit's state."""
        others_bytes = (whole_bytes - experts_bytes) / self._shard.num_ranks
        return others_bytes + experts_bytes / self._experts.num_ranks

    def _scatter_s(self, index: int) -> float:
        unit, wire = self._units[index], self._wire
        scatter_s = self._shared_s(
            reduce_scatter_s, unit.trained_bytes * wire, unit.experts_trained_bytes * wire
        )
        return scatter_s + (0.0 if self._state.copies_once else self._to_host_s(index))

    def _to_host_s(self, index: int) -> float:
        unit = self._units[index]
        return self._state.copy_s(self._share(unit.trained_bytes, unit.experts_trained_bytes))

    def _replicas_s(self, index: int) -> float:
        unit = self._units[index]
        # Gradients are packed for the reduction once, whether ranks share them or not.
        is_packed_here = self._replicate.num_ranks > 1 and self._shard.num_ranks == 1
        total = self._issue_s / 2 if is_packed_here and unit.trained_bytes else 0.0
        for num_bytes, group in (
            (unit.trained_bytes - unit.experts_trained_bytes, self._shard),
            (unit.experts_trained_bytes, self._experts),
        ):
            if num_bytes:
                share_bytes = num_bytes / group.num_ranks * self._wire
                total += self._collective_s(all_reduce_s, share_bytes, self._replicate)
        return total + (self._to_host_s(index) if self._state.copies_once else 0.0)

    def _forward_gather_s(self, index: int) -> float:
        """The gather of a block hides behind the forward of the block before it."""
        gather_s = self._gather_s(index)
        if index not in self._blocks:
            return gather_s
        return self._passes.forward_exposed_s(self._units[index], gather_s)

    def _backward_s(self, index: int, kind: str, *, gathers_s: float, reductions_s: float) -> float:
        """Exposed traffic of a unit's backward; that of the root and the first block is alone.

        So are reductions that the host waits for.
        """
        if index not in self._blocks:
            return gathers_s + reductions_s
        unit = self._units[index]
        alone_s = 0.0
        if index == self._blocks.start or self._state.waits:
            alone_s, reductions_s = reductions_s, 0.0
        hidden_s = self._passes.backward_exposed_s(
            unit, kind, gathers_s=gathers_s, reductions_s=reductions_s
        )
        return hidden_s + alone_s

    def _every_s(self, index: int, kind: str) -> float:
        """Exposed traffic of a unit's backward in every microbatch."""
        if not self._reshards:
            return 0.0
        return self._backward_s(
            index,
            kind,
            gathers_s=self._gather_s(index) if index in self._blocks else 0.0,
            reductions_s=0.0 if self._pipelined else self._scatter_s(index),
        )

    def _once_s(self, index: int, kind: str) -> float:
        """What the last backward adds to that."""
        reductions_s = self._scatter_s(index) + self._replicas_s(index)
        if self._pipelined:
            return reductions_s
        gathers = self._reshards and index in self._blocks
        last_s = self._backward_s(
            index,
            kind,
            gathers_s=self._gather_s(index) if gathers else 0.0,
            reductions_s=reductions_s,
        )
        return last_s - self._every_s(index, kind)

    # -- a stage ----------------------------------------------------------------------------------

    def microbatch_s(self, first: int, end: int) -> float:
        """Exposed traffic of every microbatch, nothing recomputed, with its copies."""
        if not self._reshards:
            return 0.0
        seconds = _between(self._every, first, end) + _between(self._regathers, first, end)
        if not self._pipelined:
            seconds += _between(self._gathers, first, end)
            seconds += _between(self._reduce_copies, first, end)
        return seconds

    def added_s(self, first: int, end: int) -> float:
        """Adding up gradients of microbatches that are reduced together; of each in the mean."""
        return _between(self._added, first, end)

    def step_s(self, first: int, end: int) -> float:
        """Exposed traffic once a step, nothing recomputed, with its copies."""
        seconds = _between(self._once, first, end)
        if self._pipelined or not self._reshards:
            seconds += _between(self._gathers, first, end)
            seconds += _between(self._reduce_copies, first, end)
        return seconds

    def hidden_by_recomputation_s(self, index: int, kind: str) -> float:
        """Traffic that a unit's recomputation hides, per microbatch; its share of the step's."""
        hidden_s = self._every_s(index, Recomputation.NONE) - self._every_s(index, kind)
        once_s = self._once_s(index, Recomputation.NONE) - self._once_s(index, kind)
        return hidden_s + once_s / self._microbatches


class WholeState:
    """DDP and ZeRO-1: every rank holds all parameters of its stages.

    Rajbhandari et al. 2020 (1910.02054): gradients are all-reduced a bucket at a time, behind a
    share of the last backward; with ZeRO-1 the ranks then gather the parameters that each has
    updated, with nothing to hide behind.
    """

    def __init__(
        self, framework: FrameworkSpec, memory: StageMemory, *, ranks: CommGroup, shard: CommGroup
    ) -> None:
        """Keep the groups.

        Args:
            framework: Its buckets and overlap.
            memory: Sizes of stages.
            ranks: All ranks that hold the same parameters.
            shard: Those of them that share the optimiser's states.
        """
        self._framework = framework
        self._memory = memory
        self._ranks = ranks
        self._shard = shard

    def step_s(self, first: int, end: int, *, backward_s: float, busy_s: float) -> float:
        """Exposed traffic once a step.

        Args:
            first: First unit.
            end: One past the last unit.
            backward_s: The stage's backward of one microbatch.
            busy_s: Other traffic of this backward on the same link.
        """
        framework = self._framework
        parameters = self._memory.local_trained_bytes(first, end) / PARAMETER_BYTES
        reduce_s = self._in_buckets_s(
            all_reduce_s, parameters * framework.gradient_wire_bytes, self._ranks
        )
        share = framework.gradient_overlap
        seconds = exposed_s(reduce_s, busy_s=share * busy_s, window_s=share * backward_s)
        if self._shard.num_ranks > 1:
            seconds += self._gather_s(self._memory.updated_bytes(first, end))
        return seconds

    def _gather_s(self, num_bytes: float) -> float:
        """Every rank gets the parameters that the others updated, at once or from each in turn."""
        ranks = self._shard.num_ranks
        if self._framework.broadcasts_shards:
            return ranks * broadcast_s(num_bytes / ranks, self._shard)
        return self._in_buckets_s(all_gather_s, num_bytes, self._shard)

    def _in_buckets_s(self, collective: Collective, num_bytes: float, group: CommGroup) -> float:
        buckets = max(1, math.ceil(num_bytes / self._framework.bucket_bytes))
        return buckets * collective(num_bytes / buckets, group)


def _between(sums: list[float], first: int, end: int) -> float:
    return sums[end] - sums[first]
