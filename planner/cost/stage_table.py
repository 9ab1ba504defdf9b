"""Time of any run of neighbouring units under one configuration.

All sums over units are prefix sums, so a stage [first, end) costs constant time to price.

Time of one microbatch on a stage:

    forward_s + backward_s + tensor-parallel collectives + recomputation
    + parameter gathers that the compute before them does not hide
    + transfers to and from the neighbouring stages

and once per step: gradient reduction, parameter gathers that happen once, the optimiser.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from planner.cost.collective import (
    all_gather_s,
    all_reduce_s,
    point_to_point_s,
    reduce_scatter_s,
)
from planner.cost.stage_memory import ModelUnits, StageMemory
from planner.hardware.spec import ClusterSpec
from planner.hardware.topology import CommGroup, comm_group
from planner.strategy.configuration import Configuration, axis_stride

OPTIMIZER_PASSES = 10
"""Bytes that clipping and AdamW move per byte of a parameter: the norm reads the gradient (1),
clipping reads and writes it (2), the fused update reads four tensors and writes three (7)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Seconds of a stage; the first six per microbatch, the last two per step."""

    compute_s: float
    """Forward and backward kernels."""
    recompute_s: float
    """Recomputation, its collectives included."""
    tp_comm_s: float
    """Tensor-parallel collectives."""
    dp_comm_s: float
    """Exposed parameter gathers (and gradient reductions) of every microbatch."""
    pp_comm_s: float
    """Transfers to and from the neighbouring stages."""
    forward_share: float
    """Share of the microbatch's time that is forward."""
    step_comm_s: float
    """Exposed data-parallel traffic once per step."""
    optimizer_s: float
    """Gradient norm, clipping, AdamW."""

    @property
    def microbatch_s(self) -> float:
        """One microbatch, forward and backward."""
        return self.compute_s + self.recompute_s + self.tp_comm_s + self.dp_comm_s + self.pp_comm_s


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientTraffic:
    """What a reduction moves per byte of the parameters in the optimiser's dtype."""

    wire: float = 1.0
    """Over the links."""
    copied: float = 1.5
    """In the device's memory: FSDP2 reads the gradients in a compute dtype of half the size and
    writes the buffer that is reduced (torch's ``foreach_reduce_scatter_copy_in``)."""


FSDP2_GRADIENTS = GradientTraffic()
"""Those of the emitted script."""


class StageTable:
    """Prices stages of one configuration."""

    def __init__(
        self,
        model: ModelUnits,
        configuration: Configuration,
        cluster: ClusterSpec,
        gradients: GradientTraffic = FSDP2_GRADIENTS,
    ) -> None:
        """Build the prefix sums.

        Args:
            model: Units priced for the configuration's tp, stream and microbatch size.
            configuration: Degrees and schedule.
            cluster: Devices and links.
            gradients: What their reduction moves.
        """
        self.units = model.units
        self._gradients = gradients
        self.configuration = configuration
        self.device = cluster.device
        self.memory = StageMemory(model, configuration, cluster.device)
        """What the same stages hold."""
        self._model = model
        degrees = configuration.degrees
        self._shard = _group(cluster, configuration, "dp_shard")
        self._replicate = _group(cluster, configuration, "dp_replicate")
        self._tp = _group(cluster, configuration, "tp")
        pipeline = _group(cluster, configuration, "pp")
        self._pipeline_link = pipeline.slowest
        self._pp = degrees.pp
        self._last = len(self.units) - 1
        self._memory_bandwidth = (
            cluster.device.memory_bandwidth_bytes_per_s
            * cluster.device.efficiency.pointwise_bandwidth_fraction
        )
        self._sums: dict[str, list[float]] = {}
        self._traffic: dict[tuple[str, float], float] = {}
        self._build()

    def _build(self) -> None:
        units = self.units
        self._add("forward", lambda i: units[i].forward_s)
        self._add("compute", lambda i: units[i].forward_s + units[i].backward_s)
        self._add("tp_forward", lambda i: units[i].forward_comm_s)
        self._add("tp", lambda i: units[i].forward_comm_s + units[i].backward_comm_s)
        self._add("gather_forward", self._exposed_gather_forward_s)
        self._add("gather_backward", self._exposed_gather_backward_s)
        self._add("reduce_exposed", lambda i: self._exposed_s(i, self._reduce_s(i)))
        self._add("replicas_exposed", lambda i: self._exposed_s(i, self._replicas_s(i)))
        self._add("reduce", self._reduce_s)
        self._add("gather_copies", self._gather_copy_s)
        self._add("reduce_copies", self._reduce_copy_s)
        self._add("summed", lambda i: units[i].summed_gradient_bytes)

    def _add(self, name: str, of_unit: Callable[[int], float]) -> None:
        self._sums[name] = list(
            accumulate((of_unit(i) for i in range(len(self.units))), initial=0.0)
        )

    def total(self, name: str, first: int, end: int) -> float:
        """Sum of a quantity over the units [first, end)."""
        sums = self._sums[name]
        return sums[end] - sums[first]

    # -- data-parallel traffic of one unit ------------------------------------------------------

    def _is_root(self, index: int) -> bool:
        """Prologue and epilogue are gathered with the FSDP root, at the start of the stage."""
        return index in (0, self._last)

    def _gather_s(self, index: int) -> float:
        num_bytes = self.units[index].gathered_bytes
        if ("gather", num_bytes) not in self._traffic:
            self._traffic["gather", num_bytes] = all_gather_s(num_bytes, self._shard)
        return self._traffic["gather", num_bytes]

    def _scatter_s(self, index: int) -> float:
        """Reduce-scatter of the gradients over dp_shard."""
        num_bytes = self.units[index].parameter_bytes * self._gradients.wire
        if ("scatter", num_bytes) not in self._traffic:
            self._traffic["scatter", num_bytes] = reduce_scatter_s(num_bytes, self._shard)
        return self._traffic["scatter", num_bytes]

    def _replicas_s(self, index: int) -> float:
        """All-reduce of the gradients' shard over dp_replicate."""
        shard_bytes = self.units[index].parameter_bytes / self._shard.num_ranks
        num_bytes = shard_bytes * self._gradients.wire
        if ("replicas", num_bytes) not in self._traffic:
            self._traffic["replicas", num_bytes] = all_reduce_s(num_bytes, self._replicate)
        return self._traffic["replicas", num_bytes]

    def _copy_s(self, num_bytes: float) -> float:
        return num_bytes / self._memory_bandwidth if self._shard.num_ranks > 1 else 0.0

    def _gather_copy_s(self, index: int) -> float:
        """From the gathered buffer into the parameters (torch's ``split_with_sizes_copy``)."""
        return self._copy_s(2.0 * self.units[index].gathered_bytes)

    def _reduce_copy_s(self, index: int) -> float:
        """From the gradients into the buffer that is reduced."""
        return self._copy_s(self._gradients.copied * self.units[index].parameter_bytes)

    def _reduce_s(self, index: int) -> float:
        return self._scatter_s(index) + self._replicas_s(index)

    def _exposed_gather_forward_s(self, index: int) -> float:
        """The gather of a block hides behind the forward of the block before it.

        Neighbouring blocks are taken to be alike, so that a block's price does not depend on
        where the stage is cut.
        """
        unit = self.units[index]
        hidden_s = 0.0 if self._is_root(index) else unit.forward_s + unit.forward_comm_s
        return max(0.0, self._gather_s(index) - hidden_s)

    def _exposed_gather_backward_s(self, index: int) -> float:
        """The gather of a block hides behind the backward of the block after it.

        Under ZeRO-3 without a pipeline the reduction of that block's gradients shares the link.
        """
        if self._is_root(index):
            return 0.0
        unit = self.units[index]
        traffic_s = self._gather_s(index)
        if self._pp == 1:
            traffic_s += self._scatter_s(index)
        return max(0.0, traffic_s - unit.backward_s - unit.backward_comm_s)

    def _exposed_s(self, index: int, traffic_s: float) -> float:
        """What of a reduction the backward of the block before does not hide.

        Nothing runs behind that of the first block and of the root.
        """
        unit = self.units[index]
        is_last = self._is_root(index) or index == 1
        hidden_s = 0.0 if is_last else unit.backward_s + unit.backward_comm_s
        return max(0.0, traffic_s - hidden_s)

    # -- a stage ----------------------------------------------------------------------------------

    def seconds(self, first: int, end: int, kinds: Sequence[str] | None = None) -> StageSeconds:
        """Time of the stage [first, end).

        Args:
            first: First unit.
            end: One past the last unit.
            kinds: Recomputation of each unit; None for none at all.
        """
        recompute_s = 0.0
        if kinds is not None:
            recompute_s = sum(
                self.recompute_s(index, kind)
                for index, kind in zip(range(first, end), kinds, strict=True)
            )
        return self.seconds_with(first, end, recompute_s)

    def recompute_s(self, index: int, kind: str) -> float:
        """Recomputation of one unit for one microbatch, its collectives included."""
        again = self.units[index].recompute[kind]
        return again.compute_s + again.comm_s

    def seconds_with(self, first: int, end: int, recompute_s: float) -> StageSeconds:
        """Time of the stage [first, end) whose recomputation takes ``recompute_s``."""
        total = self.total
        compute_s, tp_s = total("compute", first, end), total("tp", first, end)
        every_s, once_s = self._data_parallel_s(first, end)
        forward_s = total("forward", first, end) + total("tp_forward", first, end)
        transfers_s = self._transfers_s(first, end)
        microbatch_s = compute_s + tp_s + recompute_s + every_s + transfers_s
        return StageSeconds(
            compute_s=compute_s,
            recompute_s=recompute_s,
            tp_comm_s=tp_s,
            dp_comm_s=every_s,
            pp_comm_s=transfers_s,
            forward_share=(forward_s + transfers_s / 2) / microbatch_s if microbatch_s else 0.0,
            step_comm_s=once_s,
            optimizer_s=self._optimizer_s(first, end),
        )

    def _data_parallel_s(self, first: int, end: int) -> tuple[float, float]:
        """Exposed data-parallel traffic of each microbatch and of the step.

        Without a pipeline, ZeRO-3 gathers forward and backward and reduce-scatters in every
        microbatch (replicas add their shards in the last), ZeRO-2 gathers in the first and
        reduces in the last, behind its backward. torch's
        schedules reduce after the last backward of the stage, unhidden; with ZeRO-3 a backward
        leaves the parameters for the next forward, so that each microbatch gathers once and the
        step once more.
        """
        total = self.total
        gather_copies_s = total("gather_copies", first, end)
        reduce_copies_s = total("reduce_copies", first, end)
        forward_s = total("gather_forward", first, end) + gather_copies_s
        backward_s = total("gather_backward", first, end)
        summed_s = all_reduce_s(total("summed", first, end), self._tp)
        if self._pp > 1:
            once_s = forward_s + total("reduce", first, end) + summed_s + self._tied_s(first, end)
            resharded = self.configuration.reshard_after_forward
            every_s = backward_s + gather_copies_s if resharded else 0.0
            return every_s, once_s + reduce_copies_s
        if self.configuration.reshard_after_forward:
            tail_s = sum(self._scatter_s(i) for i in (0, 1, self._last) if first <= i < end)
            replicas_s = total("replicas_exposed", first, end)
            copies_s = gather_copies_s + reduce_copies_s
            return forward_s + backward_s + tail_s + copies_s, replicas_s + summed_s
        reduced_s = total("reduce_exposed", first, end) + reduce_copies_s
        return 0.0, forward_s + reduced_s + summed_s

    def _tied_s(self, first: int, end: int) -> float:
        """All-reduce of the gradients of weights that this stage and others hold."""
        total = 0.0
        for tied in self._model.tied:
            held = sum(first <= unit < end for unit in tied.units)
            if 0 < held < len(tied.units):
                shard_bytes = tied.parameter_bytes / self._shard.num_ranks
                total += 2 * point_to_point_s(shard_bytes, self._pipeline_link)
        return total

    def _optimizer_s(self, first: int, end: int) -> float:
        moved_bytes = OPTIMIZER_PASSES * self.memory.sharded_parameter_bytes(first, end)
        return moved_bytes / self._memory_bandwidth

    def _transfers_s(self, first: int, end: int) -> float:
        """Transfers of one microbatch, activations and gradients.

        torch's schedules send to a neighbour and receive from it in one batch and wait for both,
        so that each boundary costs one transfer per microbatch on both its sides.
        """
        if self._pp == 1:
            return 0.0
        cuts = [cut for cut in (first, end) if 0 < cut <= self._last]
        return sum(
            point_to_point_s(self._model.entering_bytes[cut], self._pipeline_link) for cut in cuts
        )


def _group(cluster: ClusterSpec, configuration: Configuration, axis: str) -> CommGroup:
    degrees = configuration.degrees
    return comm_group(cluster, degree=getattr(degrees, axis), stride=axis_stride(degrees, axis))
