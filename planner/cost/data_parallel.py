"""Data-parallel traffic of a stage: FSDP2, and ranks that hold their parameters whole."""

import math
from collections.abc import Sequence
from functools import cache

from planner.cost.collective import all_gather_s, all_reduce_s, broadcast_s
from planner.cost.fsdp_root import FsdpRoot
from planner.cost.link_budget import UnitPasses, exposed_s
from planner.cost.model_units import ModelUnits
from planner.cost.stage_memory import PARAMETER_BYTES, StageMemory
from planner.cost.unit_traffic import Collective, StateBytes, UnitPricer, UnitTraffic
from planner.framework.spec import FrameworkSpec
from planner.hardware.spec import ClusterSpec
from planner.hardware.topology import CommGroup
from planner.strategy.configuration import Configuration
from planner.vocabulary import Recomputation


class ShardedState:
    """FSDP2: parameters are gathered from their shards.

    Without a pipeline, ZeRO-3 gathers forward and backward and reduce-scatters in every
    microbatch (replicas add their shards in the last), ZeRO-2 gathers in the first and reduces in
    the last, behind its backward. torch's schedules reduce after the last backward of the stage,
    unhidden; with ZeRO-3 a backward leaves the parameters for the next forward, so that each
    microbatch gathers once and the step once more.

    Prologue and epilogue are the root, gathered at the start of the stage, with what blocks read
    that lies outside of them; what several units read is in it once. Nothing runs behind its
    reduction and that of the first block.
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
        self._pricer = UnitPricer(configuration, cluster, framework, passes)
        self._microbatches = configuration.num_microbatches
        self._root = FsdpRoot(model)
        self._roots: dict[tuple[int, int, int], UnitTraffic] = {}
        blocks = cache(self._of_block)

        def sums(name: str) -> Sequence[float]:
            return model.unit_sums.of(lambda index: getattr(blocks(index), name))

        self._sums = {name: sums(name) for name in UnitTraffic._fields}

    @property
    def is_alone(self) -> bool:
        """Whether one device has the state, so that nothing but its own copies takes time."""
        return self._pricer.is_alone

    def _of_block(self, index: int) -> UnitTraffic:
        """Traffic of a block; what lies around the blocks has none by itself."""
        if index not in self._blocks:
            return UnitTraffic(0.0, 0.0, 0.0)
        is_first = index == self._blocks.start
        return self._pricer.of_block(self._units[index], is_first=is_first)

    def hidden_by_recomputation_s(self, index: int, kind: str) -> float:
        """Traffic that a unit's recomputation hides, per microbatch; its share of the step's."""
        if index not in self._blocks:
            return 0.0
        unit, is_first = self._units[index], index == self._blocks.start
        every_s, once_s = (
            without_it - with_it
            for without_it, with_it in zip(
                self._pricer.backward_s(unit, Recomputation.NONE, is_first=is_first),
                self._pricer.backward_s(unit, kind, is_first=is_first),
                strict=True,
            )
        )
        return every_s + once_s / self._microbatches

    # -- a stage ----------------------------------------------------------------------------------

    def microbatch_s(self, first: int, end: int) -> float:
        """Exposed traffic of every microbatch, nothing recomputed, with its copies."""
        return self._total("microbatch", first, end)

    def added_s(self, first: int, end: int) -> float:
        """Adding up gradients of microbatches that are reduced together; of each in the mean."""
        return self._total("added", first, end)

    def step_s(self, first: int, end: int) -> float:
        """Exposed traffic once a step, nothing recomputed, with its copies."""
        return self._total("step", first, end)

    def _total(self, name: str, first: int, end: int) -> float:
        """That of its blocks and of their root."""
        sums = self._sums[name]
        seconds: float = getattr(self._of_root(first, end), name)
        return sums[end] - sums[first] + seconds

    def _of_root(self, first: int, end: int) -> UnitTraffic:
        """Traffic of what lies outside of its blocks, priced once for each size."""
        sizes = self._root.sizes(first, end)
        if sizes not in self._roots:
            gathered, trained, frozen = sizes
            state = StateBytes(gathered_bytes=gathered, trained_bytes=trained, frozen_bytes=frozen)
            self._roots[sizes] = self._pricer.of_root(state)
        return self._roots[sizes]


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
