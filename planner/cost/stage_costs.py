"""Time and memory of any run of neighbouring units under one configuration.

All sums over units are prefix sums, so that a stage [first, end) costs constant time to price.

Time of one microbatch on a stage:

    forward + backward kernels + exposed tensor-parallel collectives + recomputation
    + data-parallel traffic that its compute does not hide (``planner.cost.link_budget``)
    + transfers to and from the neighbouring stages

and once per step: gradient reduction, parameter gathers that happen once, the optimiser. How the
state is held is a parameter of the configuration, what a framework does otherwise one of its own.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from itertools import accumulate
from math import isclose
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from planner.cost.collective import all_reduce_s, point_to_point_s
from planner.cost.data_parallel import ShardedState, WholeState
from planner.cost.link_budget import UnitPasses
from planner.cost.model_units import ModelUnits
from planner.cost.offload import HostState
from planner.cost.stage_links import Links, StageLinks
from planner.cost.stage_memory import PARAMETER_BYTES, StageMemory
from planner.cost.stage_seconds import StageSeconds
from planner.framework.spec import FrameworkSpec
from planner.hardware.spec import ClusterSpec, LinkSpec
from planner.hardware.topology import CommGroup, comm_group, shares_link
from planner.strategy.configuration import Configuration
from planner.strategy.mesh import BESIDE
from planner.strategy.placement import axis_group, copy_axes
from planner.vocabulary import Axis, Recomputation

_PARTS = attrgetter(*(field.name for field in fields(StageSeconds)))


class StageCosts:
    """Prices stages of one configuration."""

    def __init__(
        self,
        model: ModelUnits,
        configuration: Configuration,
        cluster: ClusterSpec,
        framework: FrameworkSpec,
        *,
        moves_state: bool = True,
        between: Sequence[LinkSpec] = (),
    ) -> None:
        """Build the prefix sums.

        Args:
            model: Units priced for the configuration's tp, stream and microbatch size.
            configuration: Degrees, schedule and form of the state.
            cluster: Devices and links.
            framework: What runs the step.
            moves_state: Whether gathers and reductions of parameters take time; False bounds what
                does from below.
            between: Links in front of all stages but the first; () for those of the cluster.
        """
        self.model = model
        self.units = model.units
        self.configuration = configuration
        self.cluster = cluster
        self.device = cluster.device
        self.framework = framework
        self.memory = StageMemory(model, configuration, cluster.device, framework)
        """What the same stages hold."""
        degrees, order = configuration.degrees, configuration.mesh_order
        self._tp = self._group(degrees.split_axis)
        self._pipelined = degrees.pp > 1
        self._links = StageLinks(model, configuration, cluster, framework, between)
        ranks = comm_group(cluster, *copy_axes(degrees, order))
        self._tp_shares_link = ranks.num_ranks > 1 and shares_link(ranks, self._tp)
        self._passes = passes = self._unit_passes(ranks)
        self.state = HostState(configuration, cluster, framework)
        self._whole: WholeState | None = None
        self._sharded: ShardedState | None = None
        self._shards = degrees.shards if configuration.state_form == "fsdp" else 1
        """Parts that a stage's gradients are held in."""
        if configuration.state_form == "replicated":
            shard = self._group(Axis.DP_SHARD)
            self._whole = WholeState(framework, self.memory, ranks=ranks, shard=shard)
        elif moves_state and configuration.state_form == "fsdp":
            self._sharded = ShardedState(model, configuration, cluster, framework, passes)
        self._sums = self._known_sums()
        self._sums = {**self._sums, **self._least_sums()}
        self._recomputes: dict[tuple[int, str, bool], float] = {}

    def _group(self, axis: str) -> CommGroup:
        """The ranks of an axis."""
        configuration = self.configuration
        return axis_group(self.cluster, configuration.degrees, axis, configuration.mesh_order)

    def _unit_passes(self, ranks: CommGroup) -> UnitPasses:
        """What traffic of units crosses links of the data-parallel ranks."""
        return UnitPasses(
            self.framework,
            tp_shares_link=self._tp_shares_link,
            beside_share_link=[
                ranks.num_ranks > 1 and shares_link(ranks, self._group(axis)) for axis in BESIDE
            ],
            hides=self.cluster.hides_traffic,
        )

    def _known_sums(self) -> Mapping[str, Sequence[float]]:
        """Prefix sums of the units' quantities; configurations that price them alike share them."""
        host = self.cluster.script_host
        # FSDP2's hooks run in forward and backward alike; prologue and epilogue are one unit.
        is_fsdp = self.configuration.state_form == "fsdp"
        hooks_s = host.unit_s if host is not None and is_fsdp else 0.0
        key = (self._passes.key, hooks_s)
        if key not in self.model.known_sums:
            self.model.known_sums[key] = self._new_sums(hooks_s)
        return self.model.known_sums[key]

    def _new_sums(self, hooks_s: float) -> dict[str, Sequence[float]]:
        units, passes, sums = self.units, self._passes, self.model.unit_sums.of
        hooks = [hooks_s if i in self.model.blocks or i == 0 else 0.0 for i in range(len(units))]
        return {
            "forward": sums(lambda i: units[i].forward_s + hooks[i] / 2),
            "compute": sums(lambda i: units[i].forward_s + units[i].backward_s + hooks[i]),
            "tensors": sums(lambda i: units[i].trained_tensors),
            "weight": sums(lambda i: min(units[i].weight_backward_s, units[i].backward_s)),
            "tp_forward": sums(lambda i: passes.forward_comm_s(units[i])),
            "tp": sums(
                lambda i: passes.forward_comm_s(units[i]) + passes.backward_comm_s(units[i])
            ),
            Axis.CP: sums(lambda i: passes.beside_comm_s(units[i], Axis.CP)),
            Axis.EP: sums(lambda i: passes.beside_comm_s(units[i], Axis.EP)),
            "tp_busy": sums(lambda i: units[i].backward_comm_s),
            "summed": sums(lambda i: units[i].summed_gradient_bytes),
        }

    def _least_sums(self) -> dict[str, Sequence[float]]:
        """What stages of the units take for a microbatch at the least: nothing recomputed or sent.

        Recomputation adds to it whatever it hides. Weights that several units read count once.
        """
        known, sharded = self._sums, self._sharded
        number = len(self.units)
        if sharded is not None:
            added = [sharded.added_s(0, end) for end in range(number + 1)]
        else:
            added = list(accumulate(map(self._least_added_s, range(number)), initial=0.0))
        moved = [sum(self._state_s(0, end)) for end in range(len(added))]
        parts = known["compute"], known["tp"], added, moved
        return {
            "least": [sum(each) for each in zip(*parts, strict=True)],
            "least_forward": [*map(sum, zip(known["forward"], known["tp_forward"], strict=True))],
            "least_weight": [*map(sum, zip(known["weight"], added, strict=True))],
        }

    def total(self, name: str, first: int, end: int) -> float:
        """Sum of a quantity over the units [first, end)."""
        sums = self._sums[name]
        return sums[end] - sums[first]

    def before(self, name: str) -> NDArray[np.float64]:
        """Sum of a quantity over the units before each, and over all."""
        return np.array(self._sums[name])

    def of_stage(self, stage: int) -> "StageCosts":
        """Prices of a stage by its position: all are made on devices of one kind."""
        return self

    @cached_property
    def recomputation_key(self) -> Hashable:
        """What ``recompute_s`` depends on besides the priced units: equal where that is."""
        configuration = self.configuration
        degrees = configuration.degrees
        # What lasts for a while is part of a choice of recomputations, too.
        lasting = self.memory.transients.key
        if self._sharded is None or (self._pipelined and not configuration.reshard_after_forward):
            return lasting
        return (
            lasting,
            degrees.dp_replicate,
            degrees.shards,
            configuration.mesh_order,
            configuration.num_microbatches,
        )

    def links(self, stage: int) -> Links:
        """The links of a stage; where they are equal, runs of units cost the same."""
        return self._links.of_stage(stage)

    # -- a stage ----------------------------------------------------------------------------------

    def seconds(
        self, first: int, end: int, kinds: Sequence[str] | None = None, *, stage: int | None = None
    ) -> StageSeconds:
        """Time of the stage [first, end).

        Args:
            first: First unit.
            end: One past the last unit.
            kinds: Recomputation of each unit; None for none at all.
            stage: Its position, which tells its links; None for the slowest on both sides.
        """
        recompute_s = 0.0
        if kinds is not None:
            recompute_s = sum(
                self.recompute_s(index, kind)
                for index, kind in zip(range(first, end), kinds, strict=True)
            )
        return self.seconds_with(first, end, recompute_s, stage=stage)

    def recompute_s(self, index: int, kind: str) -> float:
        """What recomputing one unit adds to each microbatch.

        Its kernels and collectives, less the data-parallel traffic that hides behind them: that of
        every microbatch, and what comes once a step divided by the microbatches.
        """
        unit = self.units[index]
        key = (id(unit), kind, index == self.model.blocks.start)
        if key not in self._recomputes:
            seconds = self._passes.recompute_s(unit, kind)
            if self._sharded is not None and kind != Recomputation.NONE:
                seconds -= self._sharded.hidden_by_recomputation_s(index, kind)
            self._recomputes[key] = max(0.0, seconds)
        return self._recomputes[key]

    def are_alike(self, one: int, other: int, kinds: Sequence[str]) -> bool:
        """Whether two units cost the same under any of some recomputations."""
        prices = (
            (
                *(self.recompute_s(at, kind) for kind in kinds),
                *_PARTS(self.seconds_with(at, at + 1, 0.0)),
            )
            for at in (one, other)
        )
        # Prices are differences of sums, which differ in their last digits.
        return all(
            isclose(*pair, rel_tol=1e-9, abs_tol=1e-15) for pair in zip(*prices, strict=True)
        )

    def seconds_with(
        self, first: int, end: int, recompute_s: float, *, stage: int | None = None
    ) -> StageSeconds:
        """Time of the stage [first, end) to which recomputation adds ``recompute_s``."""
        total = self.total
        accumulate_s = self._accumulate_s(first, end)
        tp_s = total("tp", first, end)
        transfers_s = self._links.transfers_s(first, end, stage)
        every_s, copies_s = self._state_s(first, end)
        compute_s = total("compute", first, end) + accumulate_s + copies_s
        forward_s = total("forward", first, end) + total("tp_forward", first, end)
        forward_s += transfers_s / 2
        microbatch_s = compute_s + recompute_s + tp_s + every_s + transfers_s
        return StageSeconds(
            compute_s=compute_s,
            recompute_s=recompute_s,
            tp_comm_s=tp_s,
            context_comm_s=total(Axis.CP, first, end),
            expert_comm_s=total(Axis.EP, first, end),
            dp_comm_s=every_s,
            pp_comm_s=transfers_s,
            forward_s=forward_s,
            weight_backward_s=total("weight", first, end) + accumulate_s,
            step_comm_s=self._step_comm_s(first, end, microbatch_s - forward_s),
            optimizer_s=self._optimizer_s(first, end),
        )

    def _state_s(self, first: int, end: int) -> tuple[float, float]:
        """FSDP's exposed traffic in every microbatch, or the copies of a rank that has no other."""
        if self._sharded is None:
            return 0.0, 0.0
        seconds = self._sharded.microbatch_s(first, end)
        return (0.0, seconds) if self._sharded.is_alone else (seconds, 0.0)

    def _accumulate_s(self, first: int, end: int) -> float:
        """Adding a microbatch's gradients to those before where they are whole.

        FSDP's copies belong to its reduction, but where it is put off. In plain tensors those of
        the first microbatch are kept as they come; else they are added to what a buffer has.
        """
        if self.configuration.state_form == "fsdp":
            return 0.0 if self._sharded is None else self._sharded.added_s(first, end)
        return self._added_whole_s(self.memory.local_trained_bytes(first, end))

    def _added_whole_s(self, trained_bytes: float) -> float:
        """The same of parameters that FSDP does not hold."""
        parameters = trained_bytes / PARAMETER_BYTES
        microbatches = self.configuration.num_microbatches
        if self.configuration.state_form == "plain":
            parameters *= (microbatches - 1) / microbatches
        return self.framework.accumulated_bytes * parameters / self.device.pointwise_bytes_per_s

    def _least_added_s(self, index: int) -> float:
        """The same of what a unit alone has, or is the first to have."""
        if self.configuration.state_form == "fsdp":
            return 0.0
        tied_bytes = sum(t.trained_bytes for t in self.model.tied if index in t.units[1:])
        return self._added_whole_s(self.units[index].trained_bytes - tied_bytes)

    def _step_comm_s(self, first: int, end: int, backward_s: float) -> float:
        reduced_s = 0.0
        if self._sharded is not None and not self._sharded.is_alone:
            reduced_s = self._sharded.step_s(first, end)
        elif self._whole is not None:
            busy_s = self.total("tp_busy", first, end) if self._tp_shares_link else 0.0
            reduced_s = self._whole.step_s(first, end, backward_s=backward_s, busy_s=busy_s)
        # What a rank sums over tp are its shards.
        summed_s = all_reduce_s(self.total("summed", first, end) / self._shards, self._tp)
        return reduced_s + summed_s + self._tied_s(first, end)

    def _tied_s(self, first: int, end: int) -> float:
        """All-reduce of the gradients of weights that this stage and others hold.

        The first and the last stage may lie on one rank, which sends nothing then.
        """
        wire = self.framework.gradient_wire_bytes / PARAMETER_BYTES
        total = 0.0
        ends = {0, len(self.units) - 1} if self.configuration.ends_meet else set()
        for tied in self.model.tied:
            held = sum(first <= unit < end for unit in tied.units)
            if tied.trained_bytes and 0 < held < len(tied.units) and not ends >= {*tied.units}:
                num_bytes = tied.trained_bytes * wire / self._shards
                total += 2 * point_to_point_s(num_bytes, self._links.slowest)
        return total

    def _optimizer_s(self, first: int, end: int) -> float:
        """Clipping and the optimiser on a rank's share, and what else a step has.

        The rank has the latter once: each of its stages has a share. FSDP's copies alone are here.
        """
        parameters = self.memory.sharded_trained_bytes(first, end) / PARAMETER_BYTES
        host = self.cluster.script_host
        if host is not None:
            is_plain = self.configuration.state_form == "plain"
            tensor_s = host.plain_tensor_s if is_plain else host.tensor_s
            tensors_s = self.total("tensors", first, end) * tensor_s
            updated_s = parameters * host.element_s + tensors_s
        else:
            updated_s = self.state.update_s(parameters)
        if self._sharded is not None and self._sharded.is_alone:
            updated_s += self._sharded.step_s(first, end)
        return updated_s + self.framework.step_s / self.configuration.virtual_stages

    def least_transfers_s(self, cuts: Sequence[int]) -> list[float]:
        """Transfers of each stage for one microbatch, at the least (``StageLinks``)."""
        return self._links.least_transfers_s(cuts)
