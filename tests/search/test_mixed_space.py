"""Plans for clusters of several kinds of device."""

from dataclasses import replace

import pytest
from searches import big_gpt, gpt, request_for, search_for

from planner.cost.kinds import kinds_of_stages, links_between
from planner.errors import InfeasiblePlanError, RequestError
from planner.framework.profiles import load_framework
from planner.framework.script import SCRIPT
from planner.hardware.mixed import in_order, joined
from planner.hardware.profiles import load_cluster
from planner.plan.devices import devices_of_ranks
from planner.plan.verify import verify_outcome
from planner.pricing.reprice import verify_price
from planner.search.mixed_space import layout_space
from planner.search.prospects import Prospect
from planner.strategy.configuration import Configuration
from planner.strategy.mesh import ParallelDegrees

__all__ = ["big_gpt", "gpt"]


def kinds(*parts, per_node=None):
    return joined([load_cluster(name, gpus=n, gpus_per_node=per_node) for name, n in parts])


def stage_lengths(plan):
    return [stage.end_unit - stage.first_unit for stage in plan.stages]


@pytest.mark.parametrize("fixed", [{"pp": 2}, {"pp": 4, "tp": 2}, {"pp": 2, "tp": 2}, {"pp": 8}])
def test_two_names_of_one_device_cost_what_one_does(big_gpt, fixed):
    """Parts that are alike in all but name are planned as one cluster of as many nodes."""
    whole = load_cluster("h100-sxm", gpus=8, gpus_per_node=4)
    half = load_cluster("h100-sxm", gpus=4, gpus_per_node=4)
    twin = replace(half, device=replace(half.device, name="twin"))
    fixed = {**fixed, "schedule": "1F1B", "mesh_order": ("pp",)}
    one = search_for(big_gpt, whole, **fixed)
    two = search_for(big_gpt, joined([half, twin]), **fixed)
    assert two.best.costs.step_time_s == pytest.approx(one.best.costs.step_time_s, rel=1e-9)
    assert stage_lengths(two.best) == stage_lengths(one.best)
    assert two.best.memory_by_rank == one.best.memory_by_rank


def test_faster_devices_take_more_and_nothing_is_priced_twice(big_gpt):
    cluster = kinds(("h100-sxm", 4), ("a100-80gb-sxm", 4))
    outcome = search_for(big_gpt, cluster)
    verify_outcome(outcome, cluster, graphs=big_gpt, is_open=True)
    for plan in outcome.candidates[:5]:
        verify_price(plan, big_gpt, cluster, load_framework(SCRIPT))
    best = outcome.best
    by_kind = dict.fromkeys(best.device_order, 0)
    devices = devices_of_ranks(best, cluster)
    for stage, length in zip(best.stages, stage_lengths(best), strict=True):
        by_kind[devices[stage.pp_rank].name] += length
    assert by_kind["h100-sxm"] > 1.4 * by_kind["a100-80gb-sxm"]
    assert outcome.solver.status == "optimal"


def test_the_mixed_cluster_is_between_those_of_its_kinds(big_gpt):
    fixed = {"pp": 2, "schedule": "1F1B"}
    fast, slow = (
        search_for(big_gpt, load_cluster(name, gpus=8, gpus_per_node=4), **fixed).best
        for name in ("h100-sxm", "a100-80gb-sxm")
    )
    mixed = search_for(big_gpt, kinds(("h100-sxm", 4), ("a100-80gb-sxm", 4), per_node=4), **fixed)
    step_s = mixed.best.costs.step_time_s
    assert fast.costs.step_time_s < step_s < slow.costs.step_time_s


def test_every_order_of_the_kinds_is_looked_at(gpt):
    cluster = kinds(("h100-sxm", 2), ("a100-80gb-sxm", 2), ("l40s", 2))
    legal, _ = layout_space(gpt, cluster, request_for(cluster, batch=12)).legal()
    assert len({each.device_order for each in legal}) == 6
    for each in legal:
        ordered = in_order(cluster, each.device_order)
        places = kinds_of_stages(ordered, each)
        assert sorted(set(places)) == [0, 1, 2]
        assert list(places) == sorted(places)


def test_links_between_stages_are_those_of_their_parts():
    cluster = kinds(("h100-sxm", 12), ("a100-80gb-sxm", 8))
    configuration = Configuration(
        degrees=ParallelDegrees(pp=5, dp_shard=4), schedule="1F1B", virtual_stages=1,
        microbatch_size=1, num_microbatches=8, reshard_after_forward=False,
        sequence_parallel=False,
    )  # fmt: skip
    h100, a100 = cluster.parts
    assert links_between(cluster, configuration) == (
        h100.links[0], h100.links[-1], cluster.links[0], a100.links[0]
    )  # fmt: skip
    turned = in_order(cluster, ("a100-80gb-sxm", "h100-sxm"))
    assert links_between(turned, configuration) == (
        a100.links[0], cluster.links[0], h100.links[0], h100.links[-1]
    )  # fmt: skip


def test_the_small_device_holds_what_it_has_room_for(big_gpt):
    """As fast a device with less memory gets fewer blocks, or recomputes more of them."""
    half = load_cluster("h100-sxm", gpus=4, gpus_per_node=4)
    room = half.device.reserve_bytes + 4 * 2**30
    small = replace(half, device=replace(half.device, name="small", memory_bytes=room))
    twin = replace(half, device=replace(half.device, name="small"))
    fixed = {"pp": 2, "schedule": "1F1B", "microbatch_size": 4}
    roomy, tight = (
        search_for(big_gpt, joined([half, other]), **fixed).best for other in (twin, small)
    )
    devices = devices_of_ranks(tight, joined([half, small]))
    for memory, device in zip(tight.memory_by_rank, devices, strict=True):
        assert memory.total_bytes <= device.memory_bytes
    assert roomy.peak_memory_bytes > room
    assert tight.costs.step_time_s > roomy.costs.step_time_s
    tiny = replace(small, device=replace(small.device, memory_bytes=room - 4 * 2**30 + 2**20))
    with pytest.raises(InfeasiblePlanError) as caught:
        search_for(big_gpt, joined([half, tiny]), pp=2, schedule="1F1B")
    assert "4 x h100-sxm and 4 x small" in str(caught.value)


@pytest.mark.parametrize(
    ("fixed", "words"),
    [
        ({"pp": 1}, "a stage can have as many ranks as divide 4"),
        ({"schedule": "Interleaved1F1B"}, "schedule can be GPipe or 1F1B"),
        ({"mesh_order": ("tp", "pp"), "tp": 2, "pp": 4}, "pp is the outermost axis"),
        ({"float8": True, "tp": 1}, "a100-80gb-sxm"),
    ],
)
def test_what_does_not_lie_on_kinds_of_device_is_refused(gpt, fixed, words):
    with pytest.raises(RequestError) as caught:
        search_for(gpt, kinds(("h100-sxm", 4), ("a100-80gb-sxm", 4)), **fixed)
    assert words in str(caught.value)


@pytest.mark.parametrize("fixed", [{}, {"tp": 2}])
def test_over_kinds_of_device_the_same_is_found_as_where_all_is_priced(gpt, monkeypatch, fixed):
    cluster = kinds(("h100-sxm", 4), ("a100-80gb-sxm", 4))
    some = search_for(gpt, cluster, **fixed)
    monkeypatch.setattr(Prospect, "sharpen", lambda prospect: False)
    every = search_for(gpt, cluster, **fixed)
    shown = [[plan.costs.step_time_s for plan in each.candidates[:5]] for each in (some, every)]
    assert shown[0] == pytest.approx(shown[1], rel=1e-9)


@pytest.mark.parametrize("share", [0.0, 0.3])
@pytest.mark.parametrize("rooms", [(1.0, 1.0), (0.2, 1.8)])
def test_states_are_spread_over_all_devices_whatever_each_holds(gpt, rooms, share):
    """Parameters, gradients and two moments in float32, with what the allocator holds beside."""
    needed_bytes = 16 * gpt.smallest.num_trainable_parameters * (1 + share)
    for factor, fits in ((1.001, True), (0.999, False)):
        parts = []
        for place, room in enumerate(rooms):
            part = load_cluster("h100-sxm", gpus=4)
            memory_bytes = part.device.reserve_bytes + round(factor * room * needed_bytes / 8)
            device = replace(
                part.device,
                name=f"kind-{place}",
                memory_bytes=memory_bytes,
                allocator_share=share,
            )
            parts.append(replace(part, device=device))
        cluster = joined(parts)
        assert layout_space(gpt, cluster, request_for(cluster)).state_fits() == fits
