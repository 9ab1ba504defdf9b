"""Stages priced by prefix sums: additive where they must be, and sized as the runtime is."""

from dataclasses import asdict, replace
from itertools import combinations, pairwise, product
from pathlib import Path

import pytest

from planner.cost.collective import all_gather_s, all_reduce_s, reduce_scatter_s
from planner.cost.held_stage import HeldStage
from planner.cost.stage_costs import StageCosts
from planner.framework.profiles import load_framework
from planner.framework.script import SCRIPT
from planner.graph.loading.load import load_model
from planner.graph.sizes.family import trace_family
from planner.hardware.profiles import load_cluster
from planner.hardware.topology import comm_group
from planner.pricing.choice import ShardingChoice
from planner.pricing.model_pricing import ModelPricer
from planner.strategy.configuration import Configuration
from planner.strategy.mesh import ParallelDegrees
from planner.strategy.moments import StageMoment
from planner.strategy.placement import mesh_axis

EXAMPLES = Path(__file__).parents[2] / "examples"
FRAMEWORK = load_framework(SCRIPT)


@pytest.fixture(scope="module")
def cluster():
    return load_cluster("h100-sxm", gpus=8)


@pytest.fixture(scope="module")
def model(cluster):
    family = trace_family(
        load_model(f"{EXAMPLES / 'gpt.py'}:gpt_124m", seq_len=1024), dtype="bfloat16"
    )
    pricer = ModelPricer(family, cluster, "bfloat16")
    choice = ShardingChoice(tp=1, sequence_parallel=False, split_tables=False, microbatch_size=4)
    return pricer.priced(choice).model


def table(
    model, cluster, *, reshard=False, microbatches=4, framework=FRAMEWORK, form="fsdp",
    offload=False, **degrees,
):  # fmt: skip
    configuration = Configuration(
        degrees=ParallelDegrees(**degrees),
        schedule="1F1B" if degrees.get("pp", 1) > 1 else "none",
        virtual_stages=1,
        microbatch_size=4,
        num_microbatches=microbatches,
        reshard_after_forward=reshard,
        sequence_parallel=False,
        state_form=form,
        cpu_offload=offload,
    )
    return StageCosts(model, configuration, cluster, framework)


def num_trained(model):
    """Trained parameters; the table, which embedding and head read, once."""
    (tied,) = model.tied
    return (sum(unit.trained_bytes for unit in model.units) - tied.trained_bytes) / 4


def added_s(model, cluster, microbatches, copies=1):
    """Adding up bf16 gradients in float32, of each microbatch in the mean.

    The first is cast (2 bytes read, 4 written), others are added to what there is (4 more read).
    Stages that each have a copy of the table add it up each.
    """
    parameters = num_trained(model) + (copies - 1) * model.tied[0].trained_bytes / 4
    cast_s = parameters / cluster.device.efficiency.cast_elements_per_s
    byte_s = parameters / cluster.device.pointwise_bytes_per_s
    first_s, other_s = (((size * byte_s) ** 4 + cast_s**4) ** (1 / 4) for size in (6, 10))
    return (first_s + (microbatches - 1) * other_s) / microbatches


def test_stages_add_up(model, cluster):
    priced = table(model, cluster, pp=2, dp_shard=4)
    whole, parts = priced.seconds(0, 14), [priced.seconds(0, 6), priced.seconds(6, 14)]
    direct = sum(u.forward_s + u.backward_s for u in model.units)
    assert whole.compute_s == pytest.approx(direct + added_s(model, cluster, 4))
    in_parts_s = direct + added_s(model, cluster, 4, copies=2)
    assert sum(p.compute_s for p in parts) == pytest.approx(in_parts_s)


def test_gradients_are_added_up_where_several_are_reduced_together(model, cluster):
    direct = sum(u.forward_s + u.backward_s for u in model.units)
    for microbatches, reshard, pp in product((1, 2, 8), (True, False), (1, 2)):
        degrees = {"pp": pp, "dp_shard": 8 // pp}
        priced = table(model, cluster, reshard=reshard, microbatches=microbatches, **degrees)
        together = microbatches > 1 and (pp > 1 or not reshard)
        expected = direct + together * added_s(model, cluster, microbatches)
        assert priced.seconds(0, 14).compute_s == pytest.approx(expected)
    alike = with_framework(gradient_wire_bytes=2.0)  # kept as they come, then added in place
    priced = table(model, cluster, framework=alike, dp_shard=8).seconds(0, 14)
    parameters = num_trained(model)
    alike_s = 3 / 4 * 6 * parameters / cluster.device.pointwise_bytes_per_s
    assert priced.compute_s == pytest.approx(direct + alike_s)


@pytest.mark.parametrize("form", ["fsdp", "plain", "replicated"])
@pytest.mark.parametrize("degrees", [{"pp": 4}, {"pp": 2, "dp_shard": 4}, {"dp_replicate": 8}])
@pytest.mark.parametrize("reshard", [False, True])
def test_what_stages_take_at_the_least_is_all_but_transfers(model, cluster, form, degrees, reshard):
    """Bounds of the search miss nothing that is the same however stages are cut."""
    priced = table(model, cluster, reshard=reshard, form=form, **degrees)
    tied = {unit for weight in model.tied for unit in weight.units}
    for first, end in combinations(range(len(model.units) + 1), 2):
        stage = priced.seconds(first, end)
        microbatch_s = stage.microbatch_s - stage.pp_comm_s
        least_s = priced.total("least", first, end)
        forward_s = priced.total("least_forward", first, end)
        weight_s = priced.total("least_weight", first, end)
        assert forward_s == pytest.approx(stage.forward_s - stage.pp_comm_s / 2)
        assert weight_s <= stage.weight_backward_s * (1 + 1e-9)
        assert least_s <= microbatch_s * (1 + 1e-9)
        if not tied.intersection(range(first, end)) or (form == "fsdp" and not first):
            assert weight_s == pytest.approx(stage.weight_backward_s)
            assert least_s == pytest.approx(microbatch_s)


def test_the_root_has_what_several_units_read_once(model, cluster):
    """A table that two blocks read too is moved with what lies around the blocks, once a stage."""
    (tied,) = model.tied
    sizes = {"trained_bytes": tied.trained_bytes, "gathered_bytes": tied.gathered_bytes}
    more = {f"outer_{name}": size for name, size in sizes.items()}
    units = [
        replace(unit, **{n: getattr(unit, n) + size for n, size in sizes.items()}, **more)
        if index in (3, 7)
        else unit
        for index, unit in enumerate(model.units)
    ]
    read_by_four = replace(model, units=tuple(units), tied=(replace(tied, units=(0, 3, 7, 13)),))
    for reshard, degrees in product((False, True), ({"dp_shard": 8}, {"pp": 2, "dp_shard": 4})):
        two = table(model, cluster, reshard=reshard, **degrees)
        four = table(read_by_four, cluster, reshard=reshard, **degrees)
        stages = ((0, 14), (0, 4), (0, 9), (4, 14), (1, 3)) if "pp" in degrees else ((0, 14),)
        for first, end in stages:
            root = four.memory.gathered.root
            names = "gathered_bytes", "trained_bytes", "new_gradient_bytes"
            every = [getattr(root, name)(first, end) for name in names]
            others = [getattr(two.memory.gathered.root, name)(first, end) for name in names]
            assert every == others
            prices = [asdict(each.seconds(first, end)) for each in (four, two)]
            for name, seconds in prices[0].items():
                assert seconds == pytest.approx(prices[1][name]), (name, first, end)
        # A stage that has none of the ends has it all the same.
        lone, other = four.seconds(2, 9), two.seconds(2, 9)
        assert four.memory.gathered.root.trained_bytes(2, 9) == tied.trained_bytes
        assert lone.step_comm_s + lone.dp_comm_s > other.step_comm_s + other.dp_comm_s


def test_of_the_roots_gradients_the_last_ones_copy_stays(model, cluster):
    """Positions come after the table; a table that the stage before has too comes by its name."""
    root = table(model, cluster, pp=2, dp_shard=2).memory.gathered.root
    (tied,) = model.tied
    positions_bytes = 4 * 1024 * 768
    assert root.trained_bytes(0, 6) == tied.trained_bytes + positions_bytes
    assert root.last_share(0, 6) * root.trained_bytes(0, 6) == pytest.approx(positions_bytes)
    end = len(model.units)
    assert root.last_share(6, end) * root.trained_bytes(6, end) == pytest.approx(tied.trained_bytes)
    assert root.last_share(0, end) < 1e-3  # a norm's weight
    assert root.last_share(2, 6) == 0


def test_tied_weights_count_once_on_one_rank_and_twice_on_two(model, cluster):
    tied = 4 * 50304 * 768
    assert [(w.units, w.trained_bytes) for w in model.tied] == [((0, 13), tied)]
    whole = table(model, cluster, dp_shard=8)
    total = sum(u.trained_bytes for u in model.units)
    assert whole.memory.sharded_trained_bytes(0, 14) == pytest.approx((total - tied) / 8)
    cut = table(model, cluster, pp=2, dp_shard=4)
    halves = cut.memory.sharded_trained_bytes(0, 6) + cut.memory.sharded_trained_bytes(6, 14)
    assert halves == pytest.approx(total / 4)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("large", [0, 1, 4, 12])
def test_stages_hold_what_is_said_at_the_least(model, cluster, reshard, large):
    """Wherever they are cut, also where one block is larger than the others, or an end."""
    units = list(model.units)
    units[large] = replace(units[large], gathered_bytes=20 * units[large].gathered_bytes)
    uneven = replace(model, units=tuple(units))
    memory = table(uneven, cluster, pp=2, dp_shard=4, reshard=reshard).memory
    for pieces in (1, 2, 3):
        for inner in combinations(range(1, 14), pieces - 1):
            stages = list(pairwise((0, *inner, 14)))
            held = sum(memory.static_bytes(*stage) for stage in stages)
            assert held >= memory.least_static_bytes() * (1 - 1e-12), stages


def test_state_is_sixteen_bytes_per_parameter_over_the_shards(model, cluster):
    for shards in (1, 2, 8):
        memory = table(model, cluster, dp_shard=shards, dp_replicate=8 // shards).memory.peak(
            [
                HeldStage(
                    first=0,
                    end=14,
                    kinds=("none",) * 14,
                    moment=StageMoment(in_flight=1, has_gradients=True),
                )
            ]
        )
        state = memory.params_bytes + memory.grads_bytes + memory.optimizer_bytes
        elements = sum(u.trained_bytes for u in model.units) / 4 - 50304 * 768
        assert state == pytest.approx(16 * elements / shards, rel=1e-6)


def test_resharding_holds_the_root_and_two_blocks(model, cluster):
    kept = table(model, cluster, dp_shard=8, reshard=False).memory
    freed = table(model, cluster, dp_shard=8, reshard=True).memory
    unsharded = kept.local_trained_bytes(0, 14) / 2  # bfloat16
    assert kept.gathered.start_bytes(0, 14) == unsharded
    root = 2 * (50304 * 768 + 1024 * 768 + 2 * 768)
    assert freed.gathered.start_bytes(0, 14) == root + 2 * model.units[1].gathered_bytes


def test_gradients_of_earlier_microbatches_lie_as_the_zero_form_says(model, cluster):
    local = table(model, cluster, dp_shard=8).memory.local_trained_bytes(0, 14)

    def earlier(**options):
        return table(model, cluster, dp_shard=8, **options).memory.earlier_gradient_bytes(0, 14)

    assert earlier(reshard=True) == (local / 8, 0)
    assert earlier(reshard=False) == (local / 8, local * 7 / 8)


def test_the_root_has_parameters_or_the_input_of_its_reduction(model, cluster):
    """Never both. New gradients are those of both readers of a tied weight and their sum.

    Those of several backwards are added up in float32, and so are those of a pipeline.
    """

    def transient(**options):
        memory = table(model, cluster, dp_shard=8, **options).memory
        return memory.reduction_transient_bytes(0, 14)

    root = 50304 * 768 + 1024 * 768 + 2 * 768  # elements; the table is that of the head too
    table_elements = 50304 * 768
    parameters, new = 2 * root, 2 * (root + 2 * table_elements)
    assert transient(reshard=True, microbatches=4) == parameters + new
    assert transient(reshard=False, microbatches=1) == parameters + new
    assert transient(reshard=False, microbatches=4) == parameters + new + 4 * root


def test_the_fuller_moment_counts(model, cluster):
    """Without recomputation the backward is the fuller one, with it the reduction."""
    memory = table(model, cluster, dp_shard=8, reshard=True, microbatches=1).memory

    def peak(kind):
        kinds = ("none", *(kind,) * 12, "none")
        alone = StageMoment(in_flight=1)
        return memory.peak([HeldStage(first=0, end=14, kinds=kinds, moment=alone)])

    assert peak("none").activations_bytes > 0
    assert peak("none").total_bytes >= peak("full").total_bytes
    assert peak("full").total_bytes >= memory.reduction_bytes(0, 14)


def test_replicas_add_their_gradients_once_a_step(model, cluster):
    priced = table(model, cluster, dp_shard=4, dp_replicate=2, reshard=True)
    alone = table(model, cluster, dp_shard=4, dp_replicate=1, reshard=True)
    assert priced.seconds(0, 14).step_comm_s > alone.seconds(0, 14).step_comm_s == 0


def test_receive_buffers_are_kept_for_every_microbatch(model, cluster):
    few = table(model, cluster, pp=2, dp_shard=4, microbatches=4).memory.buffers.size_bytes(6, 14)
    many = table(model, cluster, pp=2, dp_shard=4, microbatches=8).memory.buffers.size_bytes(6, 14)
    assert many - few == 4 * model.entering_bytes[6]


def test_gradients_are_reduced_after_the_last_backward_of_a_stage(model, cluster):
    priced = table(model, cluster, pp=2, dp_shard=4)
    seconds = priced.seconds(6, 14)
    group = comm_group(cluster, mesh_axis(priced.configuration.degrees, "dp_shard"))
    reduced = sum(reduce_scatter_s(u.trained_bytes, group) for u in model.units[6:14])
    assert seconds.step_comm_s >= reduced


def test_fsdp_copies_on_one_rank_what_it_gathers_and_reduces(model, cluster):
    """It casts all parameters (4 + 2 bytes), copies them (2 + 2), and gradients twice."""
    one = replace(cluster, num_gpus=1, gpus_per_node=1)
    seconds, plain = (table(model, one, form=f).seconds(0, 14) for f in ("fsdp", "plain"))
    parameters = num_trained(model)
    byte_s = parameters / cluster.device.pointwise_bytes_per_s  # of one of each
    gather_s, reduction_s = 10 * byte_s, (FRAMEWORK.accumulated_bytes + 4 + 4) * byte_s
    copies_s = gather_s + reduction_s
    assert seconds.optimizer_s - plain.optimizer_s == pytest.approx(copies_s)
    bare_s = sum(unit.forward_s + unit.backward_s for unit in model.units)
    assert seconds.compute_s == pytest.approx(bare_s + added_s(model, one, 4))
    every = table(model, one, reshard=True).seconds(0, 14)  # in each microbatch
    assert every.compute_s - bare_s == pytest.approx(gather_s + copies_s)
    for each in (seconds, every):
        assert (each.step_comm_s, each.dp_comm_s, each.pp_comm_s) == (0, 0, 0)


def test_plain_parameters_are_not_copied(model, cluster):
    one = replace(cluster, num_gpus=1, gpus_per_node=1)
    costs = table(model, one, form="plain")
    seconds = costs.seconds(0, 14)
    assert seconds.step_comm_s == 0
    parameters = costs.memory.local_trained_bytes(0, 14) / 4
    added_s = FRAMEWORK.accumulated_bytes * parameters / cluster.device.pointwise_bytes_per_s
    bare_s = sum(unit.forward_s + unit.backward_s for unit in model.units)
    assert seconds.compute_s - bare_s == pytest.approx(3 / 4 * added_s)  # not of the first
    of_one = table(model, one, form="plain", microbatches=1).seconds(0, 14)
    assert of_one.compute_s == pytest.approx(bare_s)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_plain_parameters_are_held_once(model, cluster, microbatches):
    one = replace(cluster, num_gpus=1, gpus_per_node=1)
    plain, fsdp = (
        table(model, one, form=form, microbatches=microbatches).memory for form in ("plain", "fsdp")
    )
    gathered_bytes = fsdp.gathered.whole_bytes(0, 14)
    assert plain.static_bytes(0, 14) == fsdp.static_bytes(0, 14) - gathered_bytes
    state_bytes = 4 * plain.local_trained_bytes(0, 14)
    assert plain.reduction_bytes(0, 14) == state_bytes


def test_temporaries_of_blocks_may_use_what_the_epilogue_left(model, cluster):
    memory = table(model, cluster, dp_shard=8).memory
    kinds = ("none",) * 14
    assert memory.transients.start_bytes(0, 14, kinds) == model.units[13].temporary_bytes["none"]
    without = memory.transients.start_bytes(1, 3, ("full", "full"))
    assert without == model.units[1].gradient_temporary_bytes["full"]


def test_new_gradients_lie_beside_those_before(model, cluster):
    """In the compute dtype, while the backward of their block runs; the head's, to the end."""
    block, head = model.units[1], model.units[13]
    made = block.gradient_temporary_bytes["full"] - block.temporary_bytes["full"]
    assert 0 < made <= block.gathered_bytes
    adds_up = table(model, cluster, pp=2, dp_shard=4).memory.transients
    assert adds_up.unit_bytes(1, "full") == block.gradient_temporary_bytes["full"]
    left = head.activation_bytes["none"] - head.gathered_bytes
    assert adds_up.released_bytes(13) == left
    reduces = table(model, cluster, dp_shard=8, reshard=True).memory.transients
    behind = block.trained_bytes - block.activation_bytes["full"]
    assert reduces.unit_bytes(1, "full") == block.gradient_temporary_bytes["full"] + behind
    assert reduces.unit_bytes(12, "full") == block.gradient_temporary_bytes["full"]
    assert reduces.released_bytes(13) == left
    alone = table(model, cluster, dp_shard=8, microbatches=1).memory.transients
    assert alone.unit_bytes(1, "full") == block.gradient_temporary_bytes["full"] + (
        block.trained_bytes - block.gathered_bytes
    )
    whole = table(model, replace(cluster, num_gpus=1, gpus_per_node=1), microbatches=1)
    assert whole.memory.transients.unit_bytes(1, "full") == block.gradient_temporary_bytes["full"]


@pytest.mark.parametrize("reshard", [False, True])
def test_shards_of_gradients_come_while_a_single_microbatch_goes(model, cluster, reshard):
    costs = table(model, cluster, dp_shard=8, microbatches=1, reshard=reshard)
    kinds = ("none", *("full",) * 12, "none")
    starts, ends = (
        costs.memory.peak([HeldStage(first=0, end=14, kinds=kinds, moment=moment)])
        for (moment,) in costs.configuration.fullest_moments(0)
    )
    assert starts.grads_bytes == 0
    blocks = costs.memory.sharded_trained_bytes(1, 13)
    assert ends.grads_bytes == pytest.approx(blocks, abs=1), "the root's come last"
    assert ends.activations_bytes < starts.activations_bytes
    assert ends.buffers_bytes < starts.buffers_bytes


def with_framework(**change):
    return replace(FRAMEWORK, **change)


def test_fsdp_copies_what_it_gathers_and_reduces(model, cluster):
    """Per microbatch 4 bytes a gathered bf16 parameter, the framework's a reduced gradient.

    Casting the gradient takes its time however few they are.
    """
    with_copies, cast_only = (
        table(model, cluster, reshard=True, dp_shard=8, framework=framework).seconds(0, 14)
        for framework in (FRAMEWORK, with_framework(accumulated_bytes=0.0))
    )
    parameters = num_trained(model)
    bandwidth = cluster.device.pointwise_bytes_per_s
    cast_s = parameters / cluster.device.efficiency.cast_elements_per_s
    assert with_copies.dp_comm_s - cast_only.dp_comm_s == pytest.approx(
        FRAMEWORK.accumulated_bytes * parameters / bandwidth - cast_s
    )
    assert with_copies.dp_comm_s > 10 * parameters / bandwidth


def test_gradients_of_half_the_size_take_less_of_the_links(model, cluster):
    half = with_framework(gradient_wire_bytes=2.0)
    whole_s, half_s = (
        table(model, cluster, dp_shard=8, framework=framework).seconds(0, 14).step_comm_s
        for framework in (FRAMEWORK, half)
    )
    assert half_s < whole_s


@pytest.mark.parametrize(
    "change",
    [
        {"step_s": 1.0},
        {"optimizer_moved_bytes": 80.0},
        {"accumulated_bytes": 20.0},
        {"gradient_wire_bytes": 8.0},
        {"gradient_overlap": 0.0},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_a_framework_does_changes_the_step(model, cluster, change):
    plain, changed = (
        table(model, cluster, reshard=True, dp_shard=8, framework=framework).seconds(0, 14)
        for framework in (FRAMEWORK, with_framework(**change))
    )
    assert changed.microbatch_s + changed.step_s > plain.microbatch_s + plain.step_s


def test_each_boundary_has_a_link_of_its_own(model):
    """Two stages of four ranks on each node: the second boundary lies between the nodes."""
    nodes = load_cluster("h100-sxm", gpus=16)
    priced = table(model, nodes, pp=4, dp_shard=4)
    inner, outer = nodes.links[0], nodes.links[-1]
    assert [priced.links(stage)[1] for stage in range(3)] == [inner, outer, inner]
    times = [priced.seconds(5, 8, stage=stage).pp_comm_s for stage in (1, 2)]
    assert times[0] == times[1] < priced.seconds(5, 8).pp_comm_s


def test_a_message_costs_time_on_both_sides_of_a_boundary(model, cluster):
    plain = table(model, cluster, pp=2, dp_shard=4).seconds(0, 6, stage=0)
    late = table(model, cluster, pp=2, dp_shard=4, framework=with_framework(message_s=1.0)).seconds(
        0, 6, stage=0
    )
    assert late.pp_comm_s - plain.pp_comm_s == pytest.approx(1.0 - FRAMEWORK.message_s)
    assert late.forward_s - plain.forward_s == pytest.approx((1.0 - FRAMEWORK.message_s) / 2)
    assert late.backward_s - plain.backward_s == pytest.approx((1.0 - FRAMEWORK.message_s) / 2)


def step_s(priced, kinds):
    seconds = priced.seconds(0, 14, kinds)
    return priced.configuration.num_microbatches * seconds.microbatch_s + seconds.step_s


KINDS = {kind: ("none", *(kind,) * 12, "none") for kind in ("none", "selective", "full")}


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("slower", [1, 10, 100, 1000])
def test_recomputation_hides_traffic_but_never_saves_time(model, cluster, reshard, slower):
    links = [
        replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / slower)
        for link in cluster.links
    ]
    slow = replace(cluster, links=tuple(links))
    priced = table(model, slow, reshard=reshard, dp_shard=4, dp_replicate=2)
    kernels_s = priced.units[2].recompute["full"].compute_s
    found_s = priced.recompute_s(2, "full")
    assert 0 <= found_s <= kernels_s * (1 + 1e-9)
    assert step_s(priced, KINDS["none"]) <= step_s(priced, KINDS["full"]) * (1 + 1e-9)
    if slower == 1000 and reshard:
        assert found_s == pytest.approx(0, abs=1e-9)  # the links are busy all the time
    if slower == 1:
        assert found_s == pytest.approx(kernels_s)  # all traffic was hidden before


def test_replicas_share_the_link_time_with_gathers_and_scatters(model, cluster):
    """What one block's backward hides is no longer than the backward, for all of them together."""
    links = [replace(link, bandwidth_bytes_per_s=5e9) for link in cluster.links]
    slow = replace(cluster, links=tuple(links))
    priced = table(model, slow, reshard=True, microbatches=1, dp_shard=4, dp_replicate=2)
    unit, degrees = model.units[5], priced.configuration.degrees
    shard, replicas = (
        comm_group(slow, mesh_axis(degrees, axis)) for axis in ("dp_shard", "dp_replicate")
    )
    gather_s = all_gather_s(unit.gathered_bytes, shard)
    back_s = reduce_scatter_s(unit.trained_bytes, shard) + gather_s
    back_s += all_reduce_s(unit.trained_bytes / 4, replicas)
    copies_s = (
        FRAMEWORK.accumulated_bytes / 4 * unit.trained_bytes + 2 * 2 * unit.gathered_bytes
    ) / (slow.device.pointwise_bytes_per_s)
    seconds = priced.seconds(5, 6)
    exposed_s = seconds.dp_comm_s + seconds.step_comm_s - copies_s
    assert exposed_s == pytest.approx(
        max(0, gather_s - unit.forward_s) + max(0, back_s - unit.backward_s)
    )
    assert back_s > unit.backward_s


def test_a_resharded_stage_gathers_as_its_activations_go(model, cluster):
    """Few blocks are gathered when a backward starts, all when it ends at the prologue."""
    costs = table(model, cluster, pp=2, dp_shard=4, reshard=True, microbatches=8)
    memory, kinds = costs.memory, ("none",) * 7
    kept, block = (sum(u.activation_bytes["none"] for u in model.units[a:7]) for a in (1, 6))

    def held(moment):
        return memory.peak([HeldStage(first=0, end=7, kinds=kinds, moment=moment)]).total_bytes

    starts, ends, _ = costs.configuration.fullest_moments(0)
    assert starts == (StageMoment(in_flight=2, has_gradients=True),)
    blocks = 6 * model.units[1].gathered_bytes
    less = kept - block
    transients = memory.transients
    more = transients.end_bytes(0, 7, kinds) - transients.start_bytes(0, 7, kinds)
    assert held(ends[0]) - held(starts[0]) == pytest.approx(4 / 6 * blocks - less + more, abs=2)
    (whole,) = table(
        model, cluster, pp=2, dp_shard=4, reshard=False, microbatches=8
    ).configuration.fullest_moments(0)
    assert whole == starts


def test_what_lies_in_receive_buffers_is_not_counted_again(model, cluster):
    memory = table(model, cluster, pp=2, dp_shard=4, microbatches=8).memory
    assert memory.buffers.least_bytes(6) == model.entering_bytes[6]
    assert memory.buffers.least_bytes(0) == memory.buffers.least_bytes(len(model.units)) == 0
    assert table(model, cluster, dp_shard=8).memory.buffers.least_bytes(6) == 0


@pytest.mark.parametrize("reshard", [False, True])
def test_a_share_in_host_memory_is_copied_to_each_gather_and_back(model, cluster, reshard):
    """Nothing hides here, so that all copies show: twice in each microbatch of ZeRO-3, once each
    in a step of ZeRO-2. The root is not gathered again."""
    seen = replace(cluster, hides_traffic=False)
    here, there = (
        table(model, seen, dp_shard=8, reshard=reshard, offload=offload).seconds(0, 14)
        for offload in (False, True)
    )
    link = cluster.host.link_bytes_per_s
    sizes = [unit.trained_bytes / 8 / link for unit in model.units]
    blocks_s, all_s = sum(sizes[1:13]), 4 * num_trained(model) / 8 / link
    if reshard:
        more_s = 4 * (there.dp_comm_s - here.dp_comm_s) + there.step_comm_s - here.step_comm_s
        assert more_s == pytest.approx(4 * (all_s + blocks_s + all_s))
    else:
        assert there.dp_comm_s == here.dp_comm_s == 0
        assert there.step_comm_s - here.step_comm_s == pytest.approx(2 * all_s)
    memory = table(model, seen, dp_shard=8, reshard=reshard, offload=True).memory
    assert memory.host_bytes(0, 14) == pytest.approx(4 * memory.sharded_trained_bytes(0, 14))
    moment = StageMoment(in_flight=1, has_gradients=True)
    held = memory.peak([HeldStage(first=0, end=14, kinds=("none",) * 14, moment=moment)])
    assert held.params_bytes == held.optimizer_bytes == held.grads_bytes == 0


def test_equal_keys_tell_of_equal_transients(model, cluster):
    """Recomputations that were chosen for one configuration are taken for others by this key."""
    found = {}
    for offload, reshard, pp, dp_shard, microbatches in product(
        (False, True), (False, True), (1, 2), (1, 2, 4), (1, 4)
    ):
        costs = table(
            model, cluster, reshard=reshard, microbatches=microbatches, offload=offload,
            pp=pp, dp_shard=dp_shard, dp_replicate=8 // pp // dp_shard,
        )  # fmt: skip
        transients = costs.memory.transients
        told = [transients.by_kind(index) for index in range(14)]
        told += [transients.released_bytes(13), transients.joined_bytes(0, 0, 14)]
        assert found.setdefault((offload, transients.key), told) == told
