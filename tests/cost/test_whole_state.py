"""DDP and ZeRO-1 against the closed forms of Rajbhandari et al. 2020 (1910.02054)."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.collective import all_gather_s, all_reduce_s, broadcast_s, point_to_point_s
from planner.cost.held_stage import HeldStage
from planner.cost.model_units import ModelUnits, TiedWeight
from planner.cost.stage_costs import StageCosts
from planner.cost.unit_pricing import PricedUnit, Recompute
from planner.framework.profiles import load_framework
from planner.framework.spec import StateBytes
from planner.hardware.profiles import load_cluster
from planner.hardware.topology import MeshAxis, comm_group
from planner.strategy.configuration import Configuration
from planner.strategy.mesh import ParallelDegrees
from planner.strategy.moments import StageMoment

BLOCKS, BLOCK, TABLE = 6, 40_000_000, 50_000_000
END = BLOCKS + 3
"""Embedding, blocks, head, loss."""
PARAMETERS = BLOCKS * BLOCK + TABLE

CLUSTER = load_cluster("h100-sxm", gpus=64)
BANDWIDTH = CLUSTER.device.pointwise_bytes_per_s
MIB = 2**20

FRAMEWORK = replace(
    load_framework("nanotron"),
    state=StateBytes(gradient=6, optimizer=12),
    gradient_wire_bytes=4,
    bucket_bytes=512 * MIB,
    gradient_overlap=0.0,
    tp_overlap=0.0,
    message_s=1e-4,
    step_s=0.0,
    congested_message_s=0.5,
    optimizer_moved_bytes=50,
    accumulated_bytes=10,
    reserve_bytes=3 * 2**30,
)


def unit(parameters, scale=1.0, **change):
    """A unit whose times are told apart by their digits."""
    priced = PricedUnit(
        structure="unit",
        forward_s=1.0 * scale,
        backward_s=2.0 * scale,
        weight_backward_s=0.75 * scale,
        forward_comm_s=0.125 * scale,
        backward_comm_s=0.25 * scale,
        recompute={
            "none": Recompute(compute_s=0.0, comm_s=0.0),
            "full": Recompute(compute_s=0.9 * scale, comm_s=0.1 * scale),
        },
        activation_bytes={"none": 1000, "full": 100},
        temporary_bytes={"none": 500, "full": 900},
        gradient_temporary_bytes={"none": 500, "full": 900},
        added_temporary_bytes={"none": 500, "full": 900},
        trained_bytes=4 * parameters,
        gathered_bytes=2 * parameters,
        summed_gradient_bytes=0,
    )
    return replace(priced, **change)


def stages(*, dp=8, shards=1, pp=1, tied=True, units=None, cluster=CLUSTER, **change):
    units = units or (unit(TABLE, 0.1), *[unit(BLOCK)] * BLOCKS, unit(TABLE, 0.4), unit(0, 0.2))
    embedding = TiedWeight(units=(0, BLOCKS + 1), trained_bytes=4 * TABLE, gathered_bytes=2 * TABLE)
    model = ModelUnits(
        units=units,
        entering_bytes=(0, *[8 * MIB] * (BLOCKS + 1), 64 * MIB),
        tied=(embedding,) if tied else (),
        shared=(),
        epilogue_units=2,
    )
    configuration = Configuration(
        degrees=ParallelDegrees(dp_replicate=dp // shards, dp_shard=shards, pp=pp),
        schedule="1F1B" if pp > 1 else "none",
        virtual_stages=1,
        microbatch_size=1,
        num_microbatches=8,
        reshard_after_forward=False,
        sequence_parallel=False,
        state_form="replicated",
    )
    return StageCosts(model, configuration, cluster, replace(FRAMEWORK, **change))


def peak(costs, *held, kind="none"):
    return costs.memory.peak(
        [
            HeldStage(
                first=first,
                end=end,
                kinds=tuple(kind if 1 <= i <= BLOCKS else "none" for i in range(first, end)),
                moment=StageMoment(in_flight=number),
            )
            for first, end, number in held
        ]
    )


def test_a_shared_weight_counts_once_on_a_stage_that_holds_both_readers():
    assert stages().memory.local_trained_bytes(0, END) == 4 * PARAMETERS
    assert stages(tied=False).memory.local_trained_bytes(0, END) == 4 * (PARAMETERS + TABLE)
    ends = [stages().memory.local_trained_bytes(*stage) / 4 for stage in ((0, 2), (2, END))]
    assert ends == [TABLE + BLOCK, (BLOCKS - 1) * BLOCK + TABLE]


class TestMicrobatch:
    def test_times_of_units_add_up(self):
        seconds = stages().seconds(1, 4)
        accumulate_s = 10 * 3 * BLOCK / BANDWIDTH
        assert seconds.compute_s == pytest.approx(3 * 3.0 + accumulate_s)
        assert seconds.weight_backward_s == pytest.approx(3 * 0.75 + accumulate_s)
        assert seconds.tp_comm_s == pytest.approx(3 * 0.375)
        assert (seconds.recompute_s, seconds.pp_comm_s, seconds.dp_comm_s) == (0, 0, 0)
        assert seconds.forward_s == pytest.approx(3 * 1.125)
        assert seconds.backward_s == pytest.approx(3 * 2.25 + accumulate_s)

    def test_overlap_hides_its_share_of_collectives(self):
        found = stages(tp_overlap=0.4)
        assert found.seconds(1, 2).tp_comm_s == pytest.approx(0.6 * 0.375)
        assert found.recompute_s(1, "full") == pytest.approx(0.9 + 0.6 * 0.1)

    def test_collectives_hide_behind_weight_gradients(self):
        found = stages(hides_backward_collectives=True)
        assert found.seconds(1, 2).tp_comm_s == pytest.approx(0.125)
        slow = unit(BLOCK, backward_comm_s=1.0)
        units = (unit(TABLE), *[slow] * BLOCKS, unit(TABLE), unit(0))
        found = stages(hides_backward_collectives=True, units=units)
        assert found.seconds(1, 2).tp_comm_s == pytest.approx(0.125 + 0.25)

    def test_each_boundary_costs_its_link_and_a_message(self):
        found = stages(dp=4, pp=4, cluster=load_cluster("h100-sxm", gpus=16))
        inner_s, outer_s = (
            point_to_point_s(8 * MIB, link) + 1e-4 for link in (CLUSTER.links[0], CLUSTER.links[-1])
        )
        bounds = ((0, 2), (2, 5), (5, 7), (7, END))
        transfers = [
            found.seconds(*stage, stage=index).pp_comm_s for index, stage in enumerate(bounds)
        ]
        assert transfers == pytest.approx([inner_s, inner_s + outer_s, outer_s + inner_s, inner_s])
        assert found.seconds(4, 4, stage=2).pp_comm_s == 0  # a stage without units

    def test_congestion_sets_the_time_of_a_message(self):
        found = stages(pp=8, congested_nodes=8).seconds(2, 5)
        link = CLUSTER.links[-1]
        assert found.pp_comm_s == pytest.approx(2 * (0.5 + point_to_point_s(8 * MIB, link)))


class TestReduction:
    def reduction_s(self, **change):
        return stages(**change).seconds(0, END).step_comm_s

    def buckets_s(self, collective, num_bytes, group):
        buckets = -(-num_bytes // (512 * MIB))
        return buckets * collective(num_bytes / buckets, group)

    def test_ddp_reduces_its_gradients_in_buckets(self):
        group = comm_group(CLUSTER, MeshAxis(size=8, stride=1))
        expected_s = self.buckets_s(all_reduce_s, 4 * PARAMETERS, group)
        assert self.reduction_s() == pytest.approx(expected_s)

    @pytest.mark.parametrize("dp", [8, 64])
    def test_zero_1_gathers_the_parameters_besides(self, dp):
        group = comm_group(CLUSTER, MeshAxis(size=8, stride=1))
        added_s = self.reduction_s(dp=dp, shards=8) - self.reduction_s(dp=dp)
        expected_s = self.buckets_s(all_gather_s, 2 * PARAMETERS, group)
        assert added_s == pytest.approx(expected_s)

    def test_shards_may_be_broadcast_one_after_the_other(self):
        group = comm_group(CLUSTER, MeshAxis(size=8, stride=1))
        added_s = self.reduction_s(shards=8, broadcasts_shards=True) - self.reduction_s()
        assert added_s == pytest.approx(8 * broadcast_s(2 * PARAMETERS / 8, group))

    def test_one_rank_reduces_nothing(self):
        assert self.reduction_s(dp=1) == 0

    def test_a_share_of_the_backward_hides_the_reduction(self):
        whole_s = self.reduction_s()
        backward_s = stages().seconds(0, END).backward_s
        share = 0.5 * whole_s / backward_s
        assert self.reduction_s(gradient_overlap=share) == pytest.approx(whole_s / 2)
        assert self.reduction_s(gradient_overlap=1.0) == 0
        # What ZeRO-1 gathers comes after the update: nothing hides it.
        assert self.reduction_s(shards=8, gradient_overlap=1.0) > 0

    def test_a_shared_weight_is_summed_between_its_stages(self):
        found = stages(dp=1, pp=4)
        one_s = point_to_point_s(4 * TABLE, CLUSTER.links[0])
        assert found.seconds(0, 2).step_comm_s == pytest.approx(2 * one_s)
        assert found.seconds(2, 4).step_comm_s == 0


class TestState:
    @pytest.mark.parametrize("shards", [1, 2, 8])
    def test_zero_1_divides_the_state_of_the_optimiser_alone(self, shards):
        memory = peak(stages(shards=shards), (0, END, 1))
        assert memory.params_bytes == 2 * PARAMETERS
        assert memory.grads_bytes == 6 * PARAMETERS
        assert memory.optimizer_bytes == pytest.approx(12 * PARAMETERS / shards)
        assert memory.reserve_bytes == 3 * 2**30
        assert memory.buffers_bytes == 0

    @pytest.mark.parametrize("shards", [1, 8])
    def test_each_rank_updates_its_share(self, shards):
        expected_s = 50 * PARAMETERS / shards / BANDWIDTH
        assert stages(shards=shards).seconds(0, END).optimizer_s == pytest.approx(expected_s)

    def test_activations_are_those_of_all_microbatches_in_flight(self):
        found = peak(stages(), (0, 2, 3), (4, 7, 2)).activations_bytes
        assert found == (3 * 2 + 2 * 3) * 1000

    def test_recomputed_blocks_keep_their_inputs(self):
        memory = peak(stages(), (0, END, 1), kind="full")
        assert memory.activations_bytes == BLOCKS * 100 + 3 * 1000

    def test_the_transient_of_an_earlier_unit_comes_when_later_tensors_are_gone(self):
        assert peak(stages(), (1, 4, 1)).temporary_bytes == 500
        assert peak(stages(), (1, 4, 1), kind="full").temporary_bytes == 900
        # The loss's 500 come first; then 2,000 bytes of loss and head are gone.
        assert peak(stages(), (0, END, 1), kind="full").temporary_bytes == 500


degrees = st.sampled_from([1, 2, 4, 8])


@given(shards=degrees, other=degrees, overlap=st.floats(0, 1))
def test_more_shards_need_less_memory_and_less_time_to_update(shards, other, overlap):
    few, many = (stages(shards=each) for each in sorted((shards, other)))
    assert peak(many, (0, END, 1)).total_bytes <= peak(few, (0, END, 1)).total_bytes
    assert many.seconds(0, END).optimizer_s <= few.seconds(0, END).optimizer_s
    hidden = stages(shards=shards, gradient_overlap=overlap).seconds(0, END).step_comm_s
    assert 0 <= hidden <= stages(shards=shards).seconds(0, END).step_comm_s


@given(in_flight=st.integers(1, 16), end=st.integers(2, BLOCKS + 1))
def test_memory_grows_with_microbatches_and_blocks(in_flight, end):
    found = stages()
    smaller, larger = (peak(found, (1, end, n)).total_bytes for n in (in_flight, in_flight + 1))
    assert smaller < larger
    assert peak(found, (1, end + 1, in_flight)).total_bytes > smaller


@given(cut=st.integers(1, BLOCKS + 1))
def test_two_stages_add_up_to_one(cut):
    found = stages(tied=False)
    parts = [found.seconds(0, cut), found.seconds(cut, END)]
    whole = found.seconds(0, END)
    for name in ("forward_s", "backward_s", "weight_backward_s"):
        assert sum(getattr(part, name) for part in parts) == pytest.approx(getattr(whole, name))
