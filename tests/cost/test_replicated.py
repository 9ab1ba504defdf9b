"""DDP and ZeRO-1 against the closed forms of Rajbhandari et al. 2020 (1910.02054)."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.collective import all_gather_s, all_reduce_s, broadcast_s, point_to_point_s
from planner.cost.replicated import ReplicatedLayout, ReplicatedStages
from planner.cost.stage_memory import ModelUnits, TiedWeight
from planner.cost.unit_pricing import PricedUnit, Recompute
from planner.framework.profiles import load_framework
from planner.framework.spec import StateBytes
from planner.hardware.profiles import load_cluster
from planner.hardware.topology import comm_group

BLOCKS, BLOCK, TABLE = 6, 40_000_000, 50_000_000
WHOLE = (0, BLOCKS + 3)
"""Embedding, blocks, head, loss."""

CLUSTER = load_cluster("h100-sxm", gpus=64)
LINK = CLUSTER.links[-1]
DEVICE = CLUSTER.device
BANDWIDTH = DEVICE.memory_bandwidth_bytes_per_s * DEVICE.efficiency.pointwise_bandwidth_fraction
MIB = 2**20

FRAMEWORK = replace(
    load_framework("nanotron"),
    state=StateBytes(gradient=6, optimizer=12),
    gradient_wire_bytes=4,
    bucket_bytes=512 * MIB,
    gradient_overlap=0.0,
    tp_overlap=0.0,
    message_s=1e-4,
    congested_message_s=0.5,
    optimizer_moved_bytes=50,
    accumulated_bytes=10,
    piled_share=0.5,
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
        piled_bytes=60,
        warm_piled_bytes=80,
        temporary_bytes={"none": 500, "full": 900},
        parameter_bytes=4 * parameters,
        gathered_bytes=2 * parameters,
        summed_gradient_bytes=0,
    )
    return replace(priced, **change)


def stages(*, dp=8, shards=1, pp=1, tied=True, units=None, **change):
    units = units or (unit(TABLE, 0.1), *[unit(BLOCK)] * BLOCKS, unit(TABLE, 0.4), unit(0, 0.2))
    embedding = TiedWeight(
        units=(0, BLOCKS + 1), parameter_bytes=4 * TABLE, gathered_bytes=2 * TABLE
    )
    model = ModelUnits(
        units=units,
        entering_bytes=(0, *[8 * MIB] * (BLOCKS + 1), 64 * MIB),
        tied=(embedding,) if tied else (),
        shared=(),
    )
    layout = ReplicatedLayout(
        cluster=CLUSTER,
        framework=FRAMEWORK,
        dtype="bfloat16",
        recompute="none",
        dp_group=comm_group(CLUSTER, degree=dp, stride=1),
        shard_ranks=shards,
        shard_group=comm_group(CLUSTER, degree=shards, stride=1),
        pp_group=comm_group(CLUSTER, degree=pp, stride=dp),
        is_congested=False,
    )
    return ReplicatedStages(model, replace(layout, **change))


def framework(**change):
    return replace(FRAMEWORK, **change)


class TestParameters:
    def test_a_shared_weight_counts_once_on_a_stage_that_holds_both_readers(self):
        assert stages().parameters(*WHOLE) == BLOCKS * BLOCK + TABLE
        assert stages(tied=False).parameters(*WHOLE) == BLOCKS * BLOCK + 2 * TABLE

    def test_it_counts_on_both_ends_of_a_pipeline(self):
        found = stages()
        ends = found.parameters(0, 2), found.parameters(2, WHOLE[1])
        assert ends == (TABLE + BLOCK, (BLOCKS - 1) * BLOCK + TABLE)


class TestPasses:
    def test_times_of_units_add_up(self):
        passes = stages().passes(1, 4, (LINK, LINK))
        accumulate_s = 10 * 3 * BLOCK / BANDWIDTH
        assert passes.forward_s == 3
        assert passes.input_backward_s == 3 * 1.25
        assert passes.weight_backward_s == pytest.approx(3 * 0.75 + accumulate_s)
        assert (passes.forward_comm_s, passes.backward_comm_s) == (3 * 0.125, 3 * 0.25)
        assert (passes.recompute_s, passes.transfer_s) == (0, 0)
        assert passes.forward_pass_s == 3 * 1.125
        assert passes.backward_pass_s == pytest.approx(3 * 2.25 + accumulate_s)

    def test_blocks_alone_are_computed_again(self):
        assert stages(recompute="full").passes(*WHOLE, (LINK, LINK)).recompute_s == pytest.approx(
            BLOCKS * 1.0
        )

    def test_overlap_hides_its_share_of_collectives(self):
        found = stages(framework=framework(tp_overlap=0.4), recompute="full")
        passes = found.passes(1, 2, (LINK, LINK))
        assert passes.forward_comm_s == pytest.approx(0.6 * 0.125)
        assert passes.backward_comm_s == pytest.approx(0.6 * 0.25)
        assert passes.recompute_s == pytest.approx(0.9 + 0.6 * 0.1)

    def test_collectives_hide_behind_weight_gradients(self):
        found = stages(framework=framework(hides_backward_collectives=True))
        assert found.passes(1, 2, (LINK, LINK)).backward_comm_s == 0
        slow = unit(BLOCK, backward_comm_s=1.0)
        found = stages(
            framework=framework(hides_backward_collectives=True),
            units=(unit(TABLE), *[slow] * BLOCKS, unit(TABLE), unit(0)),
        )
        assert found.passes(1, 2, (LINK, LINK)).backward_comm_s == 0.25

    def test_each_boundary_costs_its_link_and_a_message(self):
        found = stages(pp=4)
        inner, outer = CLUSTER.links[0], CLUSTER.links[-1]
        one_s, other_s = (point_to_point_s(8 * MIB, link) + 1e-4 for link in (inner, outer))
        transfers = [
            found.passes(first, end, (inner, outer)).transfer_s
            for first, end in ((0, 2), (2, 5), (5, WHOLE[1]))
        ]
        assert transfers == pytest.approx([other_s, one_s + other_s, one_s])

    def test_congestion_sets_the_time_of_a_message(self):
        found = stages(pp=4, is_congested=True).passes(2, 5, (LINK, LINK))
        assert found.transfer_s == pytest.approx(2 * (0.5 + point_to_point_s(8 * MIB, LINK)))


class TestReduction:
    HELD = (WHOLE,)
    PARAMETERS = BLOCKS * BLOCK + TABLE

    def buckets_s(self, collective, num_bytes, group):
        buckets = -(-num_bytes // (512 * MIB))
        return buckets * collective(num_bytes / buckets, group)

    def test_ddp_reduces_its_gradients_in_buckets(self):
        group = comm_group(CLUSTER, degree=8, stride=1)
        expected_s = self.buckets_s(all_reduce_s, 4 * self.PARAMETERS, group)
        assert stages().reduction_s(self.HELD, 1.0) == pytest.approx(expected_s)

    def test_zero_1_gathers_the_parameters_besides(self):
        group = comm_group(CLUSTER, degree=8, stride=1)
        added_s = stages(shards=8).reduction_s(self.HELD, 1.0) - stages().reduction_s(
            self.HELD, 1.0
        )
        expected_s = self.buckets_s(all_gather_s, 2 * self.PARAMETERS, group)
        assert added_s == pytest.approx(expected_s)

    def test_shards_of_fewer_ranks_are_gathered_among_these(self):
        group = comm_group(CLUSTER, degree=8, stride=1)
        many, few = stages(dp=64, shards=8), stages(dp=64)
        added_s = many.reduction_s(self.HELD, 1.0) - few.reduction_s(self.HELD, 1.0)
        expected_s = self.buckets_s(all_gather_s, 2 * self.PARAMETERS, group)
        assert added_s == pytest.approx(expected_s)

    def test_shards_may_be_broadcast_one_after_the_other(self):
        group = comm_group(CLUSTER, degree=8, stride=1)
        found = stages(shards=8, framework=framework(broadcasts_shards=True))
        added_s = found.reduction_s(self.HELD, 1.0) - stages().reduction_s(self.HELD, 1.0)
        assert added_s == pytest.approx(8 * broadcast_s(2 * self.PARAMETERS / 8, group))

    def test_one_rank_reduces_nothing(self):
        assert stages(dp=1).reduction_s(self.HELD, 1.0) == 0

    def test_a_share_of_the_backward_hides_the_reduction(self):
        whole_s = stages().reduction_s(self.HELD, 1.0)
        found = stages(framework=framework(gradient_overlap=0.5))
        assert found.reduction_s(self.HELD, whole_s) == pytest.approx(whole_s / 2)
        assert found.reduction_s(self.HELD, 3 * whole_s) == 0
        # What ZeRO-1 gathers comes after the update: nothing hides it.
        sharded = stages(shards=8, framework=framework(gradient_overlap=0.5))
        assert sharded.reduction_s(self.HELD, 3 * whole_s) > 0

    def test_a_shared_weight_is_summed_between_its_stages(self):
        found = stages(dp=1, pp=4)
        one_s = point_to_point_s(4 * TABLE, CLUSTER.links[0])
        assert found.reduction_s([(0, 2)], 1.0) == pytest.approx(2 * one_s)
        assert found.reduction_s([(2, 4)], 1.0) == 0
        assert found.reduction_s([(0, 2), (7, 9)], 1.0) == 0


def kept_bytes(memory):
    """Activations, and the buffers of which devices have not let go."""
    return memory.activations_bytes + memory.buffers_bytes


class TestState:
    PARAMETERS = BLOCKS * BLOCK + TABLE

    @pytest.mark.parametrize("shards", [1, 2, 8])
    def test_zero_1_divides_the_state_of_the_optimiser_alone(self, shards):
        memory = stages(shards=shards).peak([WHOLE], [1])
        assert memory.params_bytes == 2 * self.PARAMETERS
        assert memory.grads_bytes == 6 * self.PARAMETERS
        assert memory.optimizer_bytes == pytest.approx(12 * self.PARAMETERS / shards)
        assert memory.reserve_bytes == 3 * 2**30

    @pytest.mark.parametrize("shards", [1, 8])
    def test_each_rank_updates_its_share(self, shards):
        expected_s = 50 * self.PARAMETERS / shards / BANDWIDTH
        assert stages(shards=shards).update_s([WHOLE]) == pytest.approx(expected_s)

    def test_activations_are_those_of_all_microbatches_in_flight(self):
        found = stages().peak([(0, 2), (4, 7)], [3, 2])
        assert kept_bytes(found) == (3 * 2 + 2 * 3) * (1000 + 60 / 2)

    def test_recomputed_blocks_keep_their_inputs(self):
        found = stages(recompute="full").peak([WHOLE], [1])
        assert kept_bytes(found) == BLOCKS * 100 + 3 * 1000 + (BLOCKS + 3) * 60 / 2

    def test_buffers_pile_up_unless_devices_wait_for_the_network(self):
        assert kept_bytes(stages().peak([(1, 3)], [1])) == 2 * (1000 + 60 / 2)
        assert kept_bytes(stages(is_congested=True).peak([(1, 3)], [1])) == 2 * 1000

    def test_the_transient_of_an_earlier_unit_comes_when_later_tensors_are_gone(self):
        assert stages().peak([(1, 4)], [1]).temporary_bytes == 500
        # The last block's 900, of which nothing is released yet.
        assert stages(recompute="full").peak([(1, 4)], [1]).temporary_bytes == 900
        # The loss's 500 come first; then 2,000 bytes of loss and head are gone.
        assert stages(recompute="full").peak([WHOLE], [1]).temporary_bytes == 500


degrees = st.sampled_from([1, 2, 4, 8])


@given(shards=degrees, other=degrees, backward_s=st.floats(0, 1), overlap=st.floats(0, 1))
def test_more_shards_need_less_memory_and_less_time_to_update(shards, other, backward_s, overlap):
    few, many = (stages(shards=each) for each in sorted((shards, other)))
    assert many.peak([WHOLE], [1]).total_bytes <= few.peak([WHOLE], [1]).total_bytes
    assert many.update_s([WHOLE]) <= few.update_s([WHOLE])
    hidden = stages(shards=shards, framework=framework(gradient_overlap=overlap))
    shown_s, most_s = (
        each.reduction_s([WHOLE], backward_s) for each in (hidden, stages(shards=shards))
    )
    assert 0 <= shown_s <= most_s
    assert hidden.reduction_s([WHOLE], backward_s + 1) <= shown_s


@given(in_flight=st.integers(1, 16), end=st.integers(2, BLOCKS + 1))
def test_memory_grows_with_microbatches_and_blocks(in_flight, end):
    found = stages()
    smaller, larger = (found.peak([(1, end)], [n]).total_bytes for n in (in_flight, in_flight + 1))
    assert smaller < larger
    assert found.peak([(1, end + 1)], [in_flight]).total_bytes > smaller


@given(cut=st.integers(1, BLOCKS + 1))
def test_passes_of_two_stages_add_up_to_those_of_one(cut):
    found = stages(tied=False)
    links = (LINK, LINK)
    parts = [found.passes(0, cut, links), found.passes(cut, WHOLE[1], links)]
    whole = found.passes(*WHOLE, links)
    for name in ("forward_pass_s", "backward_pass_s", "weight_backward_s"):
        assert sum(getattr(part, name) for part in parts) == pytest.approx(getattr(whole, name))
