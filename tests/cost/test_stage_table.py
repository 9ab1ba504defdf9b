"""Stages priced by prefix sums: additive where they must be, and sized as the runtime is."""

from dataclasses import replace
from pathlib import Path

import pytest

from planner.cost.collective import all_gather_s, reduce_scatter_s
from planner.cost.stage_memory import HeldStage
from planner.cost.stage_table import GradientTraffic, StageTable
from planner.graph.loading.load import load_model
from planner.graph.sizes.family import trace_family
from planner.hardware.profiles import load_cluster
from planner.hardware.topology import comm_group
from planner.search.model_pricing import ModelPricer, ShardingChoice
from planner.strategy.configuration import Configuration, axis_stride
from planner.strategy.mesh import ParallelDegrees

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def cluster():
    return load_cluster("h100-sxm", gpus=8)


@pytest.fixture(scope="module")
def model(cluster):
    family = trace_family(
        load_model(f"{EXAMPLES / 'gpt.py'}:gpt_124m", seq_len=1024), dtype="bfloat16"
    )
    pricer = ModelPricer(family, cluster, "bfloat16", time_limit_s=20)
    choice = ShardingChoice(tp=1, sequence_parallel=False, split_tables=False, microbatch_size=4)
    return pricer.priced(choice).model


def table(model, cluster, *, reshard=False, microbatches=4, **degrees):
    configuration = Configuration(
        degrees=ParallelDegrees(**degrees),
        schedule="1F1B" if degrees.get("pp", 1) > 1 else "none",
        virtual_stages=1,
        microbatch_size=4,
        num_microbatches=microbatches,
        reshard_after_forward=reshard,
        sequence_parallel=False,
    )
    return StageTable(model, configuration, cluster)


def test_stages_add_up(model, cluster):
    priced = table(model, cluster, pp=2, dp_shard=4)
    whole, parts = priced.seconds(0, 14), [priced.seconds(0, 6), priced.seconds(6, 14)]
    assert sum(p.compute_s for p in parts) == pytest.approx(whole.compute_s)
    direct = sum(u.forward_s + u.backward_s for u in model.units)
    assert whole.compute_s == pytest.approx(direct)


def test_tied_weights_count_once_on_one_rank_and_twice_on_two(model, cluster):
    tied = 4 * 50304 * 768
    assert [(w.units, w.parameter_bytes) for w in model.tied] == [((0, 13), tied)]
    whole = table(model, cluster, dp_shard=8)
    total = sum(u.parameter_bytes for u in model.units)
    assert whole.memory.sharded_parameter_bytes(0, 14) == pytest.approx((total - tied) / 8)
    cut = table(model, cluster, pp=2, dp_shard=4)
    halves = cut.memory.sharded_parameter_bytes(0, 6) + cut.memory.sharded_parameter_bytes(6, 14)
    assert halves == pytest.approx(total / 4)


def test_state_is_sixteen_bytes_per_parameter_over_the_shards(model, cluster):
    for shards in (1, 2, 8):
        memory = table(model, cluster, dp_shard=shards, dp_replicate=8 // shards).memory.peak(
            [HeldStage(first=0, end=14, kinds=("none",) * 14, in_flight=1)]
        )
        state = memory.params_bytes + memory.grads_bytes + memory.optimizer_bytes
        elements = sum(u.parameter_bytes for u in model.units) / 4 - 50304 * 768
        assert state == pytest.approx(16 * elements / shards, rel=1e-6)


def test_resharding_holds_the_root_and_two_blocks(model, cluster):
    kept = table(model, cluster, dp_shard=8, reshard=False).memory
    freed = table(model, cluster, dp_shard=8, reshard=True).memory
    unsharded = kept.local_parameter_bytes(0, 14) / 2  # bfloat16
    assert kept.gathered_bytes(0, 14) == unsharded
    root = 2 * (50304 * 768 + 1024 * 768 + 2 * 768)
    assert freed.gathered_bytes(0, 14) == root + 2 * model.units[1].gathered_bytes


def test_gradients_of_earlier_microbatches_lie_as_the_zero_form_says(model, cluster):
    local = table(model, cluster, dp_shard=8).memory.local_parameter_bytes(0, 14)

    def earlier(**options):
        return table(model, cluster, dp_shard=8, **options).memory.earlier_gradient_bytes(0, 14)

    assert earlier(microbatches=1) == (0, 0)
    assert earlier(reshard=True) == (local / 8, 0)
    assert earlier(reshard=False) == (local / 8, local * 7 / 8)


def test_the_fuller_moment_counts(model, cluster):
    """Without recomputation the backward is the fuller one, with it the reduction."""
    memory = table(model, cluster, dp_shard=8, reshard=True, microbatches=1).memory

    def peak(kind):
        kinds = ("none", *(kind,) * 12, "none")
        return memory.peak([HeldStage(first=0, end=14, kinds=kinds, in_flight=1)])

    assert peak("none").activations_bytes > 0
    assert peak("none").total_bytes >= peak("full").total_bytes
    assert peak("full").total_bytes >= memory.reduction_bytes(0, 14)


def test_replicas_add_their_gradients_once_a_step(model, cluster):
    priced = table(model, cluster, dp_shard=4, dp_replicate=2, reshard=True)
    alone = table(model, cluster, dp_shard=4, dp_replicate=1, reshard=True)
    assert priced.seconds(0, 14).step_comm_s > alone.seconds(0, 14).step_comm_s == 0


def test_receive_buffers_are_kept_for_every_microbatch(model, cluster):
    few = table(model, cluster, pp=2, dp_shard=4, microbatches=4).memory.receive_bytes(6, 14)
    many = table(model, cluster, pp=2, dp_shard=4, microbatches=8).memory.receive_bytes(6, 14)
    assert many - few == 4 * model.entering_bytes[6]


def test_gradients_are_reduced_after_the_last_backward_of_a_stage(model, cluster):
    priced = table(model, cluster, pp=2, dp_shard=4)
    seconds = priced.seconds(6, 14)
    group = comm_group(
        cluster, degree=4, stride=axis_stride(priced.configuration.degrees, "dp_shard")
    )
    reduced = sum(reduce_scatter_s(u.parameter_bytes, group) for u in model.units[6:14])
    assert seconds.step_comm_s >= reduced


def test_hidden_gathers_cost_nothing(model, cluster):
    priced = table(model, cluster, dp_shard=8, reshard=True)
    blocks = priced.units[1:-1]
    hidden = [
        max(0.0, all_gather_s(u.gathered_bytes, comm_group(cluster, degree=8, stride=1))
            - u.forward_s - u.forward_comm_s)
        for u in blocks
    ]  # fmt: skip
    assert priced.total("gather_forward", 1, 13) == pytest.approx(sum(hidden))


def test_one_rank_has_no_data_parallel_traffic(model, cluster):
    one = replace(cluster, num_gpus=1, gpus_per_node=1)
    seconds = table(model, one).seconds(0, 14)
    assert seconds.dp_comm_s == 0
    assert seconds.step_comm_s == 0
    assert seconds.pp_comm_s == 0


def test_temporaries_of_blocks_may_use_what_the_epilogue_left(model, cluster):
    memory = table(model, cluster, dp_shard=8).memory
    kinds = ("none",) * 14
    assert memory.temporary_bytes(0, 14, kinds) == model.units[13].temporary_bytes["none"]
    without = memory.temporary_bytes(1, 3, ("full", "full"))
    assert without == model.units[1].temporary_bytes["full"]


def test_fsdp_copies_what_it_gathers_and_reduces(model, cluster):
    """Per microbatch 4 bytes a gathered bf16 parameter, 6 a reduced float32 gradient of it."""
    configuration = table(model, cluster, reshard=True, dp_shard=8).configuration
    nothing = GradientTraffic(wire=1.0, copied=0.0)
    with_copies = StageTable(model, configuration, cluster).seconds(0, 14)
    without = StageTable(model, configuration, cluster, nothing).seconds(0, 14)
    device = cluster.device
    bandwidth = device.memory_bandwidth_bytes_per_s * device.efficiency.pointwise_bandwidth_fraction
    parameters = sum(unit.parameter_bytes for unit in model.units) / 4
    assert with_copies.dp_comm_s - without.dp_comm_s == pytest.approx(6 * parameters / bandwidth)
    assert with_copies.dp_comm_s > 10 * parameters / bandwidth


def test_gradients_of_half_the_size_take_less_of_the_links(model, cluster):
    configuration = table(model, cluster, reshard=False, dp_shard=8).configuration
    halved = GradientTraffic(wire=0.5)
    whole_s, half_s = (
        StageTable(model, configuration, cluster, traffic).seconds(0, 14).step_comm_s
        for traffic in (GradientTraffic(), halved)
    )
    assert half_s < whole_s
