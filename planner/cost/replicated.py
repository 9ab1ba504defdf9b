"""Stages of frameworks whose ranks hold their parameters whole: DDP and ZeRO-1.

Rajbhandari et al. 2020 (1910.02054): with P parameters on a rank, of which ZeRO-1 gives each of
z ranks a share of the optimiser's work,

    state  = P (parameter + gradient + optimizer / z)      bytes per parameter from the framework
    reduce = all-reduce of P gradients over dp, hidden behind a share of the last backward
    gather = all-gather of P parameters over z (ZeRO-1), exposed
    update = P / z parameters through clipping and the optimiser

and every microbatch adds its gradients to the accumulated ones, which moves bytes as well.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from planner.cost.breakdown import MemoryBreakdown
from planner.cost.collective import all_gather_s, all_reduce_s, broadcast_s, point_to_point_s
from planner.cost.stage_memory import ModelUnits
from planner.cost.unit_pricing import PricedUnit
from planner.framework.spec import FrameworkSpec
from planner.hardware.spec import ClusterSpec, LinkSpec
from planner.hardware.topology import CommGroup
from planner.units import DTYPE_BYTES

Collective = Callable[[float, CommGroup], float]
"""Seconds of a collective of some bytes over a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatedLayout:
    """What a rank's stages depend on besides the model."""

    cluster: ClusterSpec
    """Devices and links."""
    framework: FrameworkSpec
    """How the framework runs them."""
    dtype: str
    """Compute dtype."""
    recompute: str
    """Recomputation of every block."""
    dp_group: CommGroup
    """Ranks that hold the same parameters."""
    shard_ranks: int
    """Ranks that share the optimiser's state: 1 for DDP."""
    shard_group: CommGroup
    """These ranks."""
    pp_group: CommGroup
    """Pipeline ranks."""
    is_congested: bool
    """Transfers between stages are stalled by the network, so that devices wait for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePasses:
    """Seconds of one microbatch through one stage."""

    forward_s: float
    """Forward kernels."""
    input_backward_s: float
    """Backward kernels on the way to the inputs."""
    weight_backward_s: float
    """Backward kernels for the parameters alone, adding up their gradients included."""
    recompute_s: float
    """Forward kernels run again, with their collectives."""
    forward_comm_s: float
    """Exposed tensor-parallel collectives of the forward pass."""
    backward_comm_s: float
    """Exposed tensor-parallel collectives of the backward pass."""
    transfer_s: float
    """Transfers from and to the neighbouring stages, activations and gradients."""

    @property
    def forward_pass_s(self) -> float:
        """The forward pass, with half of the transfers."""
        return self.forward_s + self.forward_comm_s + self.transfer_s / 2

    @property
    def backward_pass_s(self) -> float:
        """The whole backward pass, with half of the transfers."""
        return (
            self.input_backward_s
            + self.weight_backward_s
            + self.recompute_s
            + self.backward_comm_s
            + self.transfer_s / 2
        )


class ReplicatedStages:
    """Prices runs of neighbouring units that one rank holds whole.

    The first unit is the embedding, the last two are the head and the loss.
    """

    def __init__(self, model: ModelUnits, layout: ReplicatedLayout) -> None:
        """Keep what prices depend on."""
        self._model = model
        self._layout = layout
        self._units = model.units
        self._last = len(model.units) - 1
        self._blocks = range(1, len(model.units) - 2)
        device = layout.cluster.device
        self._bandwidth = (
            device.memory_bandwidth_bytes_per_s * device.efficiency.pointwise_bandwidth_fraction
        )

    # -- parameters -------------------------------------------------------------------------------

    def parameters(self, first: int, end: int) -> float:
        """Parameters of a stage on one tp rank, shared weights once."""
        itemsize = DTYPE_BYTES[self._layout.dtype]
        total = sum(unit.gathered_bytes for unit in self._units[first:end])
        for tied in self._model.tied:
            total -= tied.copies(range(first, end)) * tied.gathered_bytes
        return total / itemsize

    # -- time -------------------------------------------------------------------------------------

    def passes(self, first: int, end: int, links: tuple[LinkSpec, LinkSpec]) -> StagePasses:
        """One microbatch through the stage [first, end).

        Args:
            first: First unit.
            end: One past the last unit.
            links: To the stage before and to the stage behind.
        """
        framework = self._layout.framework
        exposed = 1 - framework.tp_overlap
        accumulate_s = framework.accumulated_bytes * self.parameters(first, end) / self._bandwidth
        forward_s = backward_s = weight_s = recompute_s = forward_comm_s = backward_comm_s = 0.0
        for index in range(first, end):
            unit = self._units[index]
            forward_s += unit.forward_s
            backward_s += unit.backward_s
            weight_s += min(unit.weight_backward_s, unit.backward_s)
            forward_comm_s += unit.forward_comm_s
            backward_comm_s += self._backward_comm_s(unit)
            recompute_s += self._recompute_s(index, unit)
        return StagePasses(
            forward_s=forward_s,
            input_backward_s=backward_s - weight_s,
            weight_backward_s=weight_s + accumulate_s,
            recompute_s=recompute_s,
            forward_comm_s=forward_comm_s * exposed,
            backward_comm_s=backward_comm_s * exposed,
            transfer_s=self._transfer_s(first, end, links),
        )

    def _backward_comm_s(self, unit: PricedUnit) -> float:
        """Collectives of a unit's backward, less what its weight gradients hide."""
        if not self._layout.framework.hides_backward_collectives:
            return unit.backward_comm_s
        return max(0.0, unit.backward_comm_s - unit.weight_backward_s)

    def _recompute_s(self, index: int, unit: PricedUnit) -> float:
        if index not in self._blocks:
            return 0.0
        again = unit.recompute[self._layout.recompute]
        return again.compute_s + again.comm_s * (1 - self._layout.framework.tp_overlap)

    def _transfer_s(self, first: int, end: int, links: tuple[LinkSpec, LinkSpec]) -> float:
        """Each boundary costs one transfer per microbatch and direction on both its sides."""
        if self._layout.pp_group.num_ranks == 1 or first == end:
            return 0.0
        framework = self._layout.framework
        stalled = self._layout.is_congested
        message_s = framework.congested_message_s if stalled else framework.message_s
        return sum(
            point_to_point_s(self._model.entering_bytes[cut], link) + message_s
            for cut, link in zip((first, end), links, strict=True)
            if 0 < cut <= self._last
        )

    def reduction_s(self, held: Sequence[tuple[int, int]], backward_s: float) -> float:
        """Exposed data-parallel traffic of a step.

        Args:
            held: The rank's stages.
            backward_s: One microbatch's backward, behind which the reduction can hide.
        """
        layout, framework = self._layout, self._layout.framework
        parameters = sum(self.parameters(first, end) for first, end in held)
        wire_bytes = parameters * framework.gradient_wire_bytes
        reduce_s = self._in_buckets_s(all_reduce_s, wire_bytes, layout.dp_group)
        exposed_s = max(0.0, reduce_s - framework.gradient_overlap * backward_s)
        if layout.shard_ranks > 1:
            exposed_s += self._gather_s(parameters * DTYPE_BYTES[layout.dtype])
        return exposed_s + self._tied_s(held)

    def _gather_s(self, num_bytes: float) -> float:
        """Every rank gets the parameters that the others updated, at once or from each in turn."""
        ranks, group = self._layout.shard_ranks, self._layout.shard_group
        if self._layout.framework.broadcasts_shards:
            return ranks * broadcast_s(num_bytes / ranks, group)
        return self._in_buckets_s(all_gather_s, num_bytes, group)

    def _in_buckets_s(self, collective: Collective, num_bytes: float, group: CommGroup) -> float:
        """A collective, a bucket at a time."""
        buckets = max(1, math.ceil(num_bytes / self._layout.framework.bucket_bytes))
        return buckets * collective(num_bytes / buckets, group)

    def _tied_s(self, held: Sequence[tuple[int, int]]) -> float:
        """Sum of the gradients of weights that this rank and another hold."""
        inside = {unit for first, end in held for unit in range(first, end)}
        total = 0.0
        for tied in self._model.tied:
            mine = sum(unit in inside for unit in tied.units)
            if 0 < mine < len(tied.units):
                elements = tied.gathered_bytes / DTYPE_BYTES[self._layout.dtype]
                wire_bytes = elements * self._layout.framework.gradient_wire_bytes
                total += 2 * point_to_point_s(wire_bytes, self._layout.pp_group.slowest)
        return total

    def update_s(self, held: Sequence[tuple[int, int]]) -> float:
        """Clipping and the optimiser."""
        parameters = sum(self.parameters(first, end) for first, end in held)
        share = parameters / self._layout.shard_ranks
        return share * self._layout.framework.optimizer_moved_bytes / self._bandwidth

    # -- memory -----------------------------------------------------------------------------------

    def peak(self, held: Sequence[tuple[int, int]], in_flight: Sequence[int]) -> MemoryBreakdown:
        """Memory of a rank at its fullest.

        Args:
            held: The rank's stages.
            in_flight: Microbatches whose activations each of them holds.
        """
        framework = self._layout.framework
        parameters = sum(self.parameters(first, end) for first, end in held)
        itemsize = DTYPE_BYTES[self._layout.dtype]
        stages = [(*stage, count) for stage, count in zip(held, in_flight, strict=True)]
        memory = MemoryBreakdown(
            params_bytes=round(parameters * itemsize),
            grads_bytes=round(parameters * framework.state.gradient),
            optimizer_bytes=round(
                parameters * framework.state.optimizer / self._layout.shard_ranks
            ),
            activations_bytes=sum(n * self._kept_bytes(first, end) for first, end, n in stages),
            buffers_bytes=0,
            temporary_bytes=max(self._temporary_bytes(first, end) for first, end in held),
            reserve_bytes=round(framework.reserve_bytes),
        )
        return replace(memory, buffers_bytes=self._piled_bytes(stages, memory))

    def _piled_bytes(self, stages: Sequence[tuple[int, int, int]], memory: MemoryBreakdown) -> int:
        """Buffers that devices have not let go of, at their most.

        Either of all microbatches in flight, or of all but one while the pipeline fills, when
        hosts run furthest ahead. Where the network stalls transfers hosts wait as well.
        """
        layout = self._layout
        if layout.is_congested:
            return 0
        steady = sum(n * self._units_sum("piled_bytes", first, end) for first, end, n in stages)
        filling = sum(
            (n - 1) * (self._units_sum("warm_piled_bytes", first, end))
            - self._kept_bytes(first, end)
            for first, end, n in stages
        )
        return round(layout.framework.piled_share * max(steady, filling, 0))

    def _units_sum(self, name: str, first: int, end: int) -> int:
        return sum(int(getattr(unit, name)) for unit in self._units[first:end])

    def _kind(self, index: int) -> str:
        return self._layout.recompute if index in self._blocks else "none"

    def _kept_bytes(self, first: int, end: int) -> int:
        """Activations of a microbatch."""
        return sum(
            self._units[index].activation_bytes[self._kind(index)] for index in range(first, end)
        )

    def _temporary_bytes(self, first: int, end: int) -> int:
        """Highest transient; an earlier unit's comes when the later ones' tensors are gone."""
        highest = released = 0
        for index in reversed(range(first, end)):
            unit, kind = self._units[index], self._kind(index)
            highest = max(highest, unit.temporary_bytes[kind] - released)
            released += unit.activation_bytes[kind]
        return highest
