from dataclasses import replace

import pytest

from planner.errors import RequestError
from planner.framework.script import SCRIPT, framework_on_cluster
from planner.hardware.mixed import (
    as_if_all,
    between_parts,
    in_order,
    joined,
    orders,
    parse_parts,
    part_of_rank,
)
from planner.hardware.nodes import numbering_words, smaller_nodes
from planner.hardware.profiles import load_cluster


@pytest.fixture(scope="module")
def two_kinds():
    return joined([load_cluster("h100-sxm", gpus=12), load_cluster("a10g", gpus=4)])


def test_parts_are_read_with_their_numbers():
    assert parse_parts("h100-sxm:16,a100-80gb-sxm:8") == (("h100-sxm", 16), ("a100-80gb-sxm", 8))
    assert parse_parts("my/h100:x.toml:4, b.toml:2") == (("my/h100:x.toml", 4), ("b.toml", 2))
    assert parse_parts("h100-sxm") == parse_parts("folder/h100.toml") == ()


def test_a_comma_in_the_name_of_a_file_parts_nothing(tmp_path):
    file = tmp_path / "racks 1,2.toml"
    with pytest.raises(RequestError, match="is no profile with a number"):
        parse_parts(str(file))
    file.touch()
    assert parse_parts(str(file)) == ()


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ("h100-sxm:16,a10g", "'a10g' is no profile with a number"),
        ("h100-sxm:0,a10g:4", "'h100-sxm:0' is no profile"),
        ("h100-sxm:x,a10g:4", "'h100-sxm:x' is no profile"),
        ("h100-sxm:2,a10g:4,h100-sxm:2", "h100-sxm comes twice"),
        ("a:1,b:1,c:1,d:1,e:1,f:1", "6 kinds of device, and plans are made for 5 at most"),
    ],
)
def test_a_part_that_cannot_be_read_is_named(cluster, words):
    with pytest.raises(RequestError) as caught:
        parse_parts(cluster)
    assert words in str(caught.value)


def test_the_numbers_add_up_or_are_refused():
    with pytest.raises(RequestError, match=r"12 \+ 4 = 16"):
        framework_on_cluster(SCRIPT, "h100-sxm:12,a10g:4", gpus=8)
    _, cluster = framework_on_cluster(SCRIPT, "h100-sxm:12,a10g:4", gpus=16)
    assert (cluster.num_gpus, cluster.num_nodes, cluster.nodes) == (16, 3, (8, 4, 4))


def test_cpus_and_gpus_are_not_joined_nor_one_kind_with_itself():
    h100 = load_cluster("h100-sxm", gpus=8)
    for other, words in (
        (load_cluster("cpu", gpus=8), "on GPUs or on CPUs"),
        (h100, "of one name"),
    ):
        with pytest.raises(RequestError, match=words):
            joined([h100, other])


def test_ranks_lie_on_the_parts_in_their_order(two_kinds):
    assert [part_of_rank(two_kinds, rank) for rank in (0, 11, 12, 15)] == [0, 0, 1, 1]
    turned = in_order(two_kinds, ("a10g", "h100-sxm"))
    assert [part_of_rank(turned, rank) for rank in (0, 3, 4, 15)] == [0, 0, 1, 1]
    assert set(orders(two_kinds)) == {("h100-sxm", "a10g"), ("a10g", "h100-sxm")}
    assert in_order(turned, ("h100-sxm", "a10g")) == two_kinds


def test_parts_are_joined_by_the_slower_of_their_outer_links(two_kinds):
    outer = [part.links[-1].bandwidth_bytes_per_s for part in two_kinds.parts]
    assert between_parts(two_kinds).bandwidth_bytes_per_s == min(outer) < max(outer)


def test_a_part_stands_for_all_with_its_own_devices_and_links(two_kinds):
    for place, part in enumerate(two_kinds.parts):
        alone = as_if_all(two_kinds, place)
        assert (alone.device, alone.links, alone.num_gpus) == (part.device, part.links, 16)
        assert not alone.parts


def test_peaks_are_those_of_all_devices(two_kinds):
    h100, a10g = (part.device.peak_flop_per_s["bfloat16"] for part in two_kinds.parts)
    assert two_kinds.peak_flop_per_s("bfloat16") == 12 * h100 + 4 * a10g
    assert two_kinds.peak_flop_per_s("int4") == 0.0


def test_every_device_is_changed_and_none_of_its_numbers_is_lost(two_kinds):
    changed = two_kinds.with_devices(lambda device: device.with_margin(0.1))
    for part in changed.parts:
        assert part.device.margin_bytes == round(0.1 * part.device.memory_bytes)
    assert changed.profile_hash != two_kinds.profile_hash
    faster = [replace(part, host_time_factor=2.0) for part in two_kinds.parts]
    assert joined(faster).profile_hash != two_kinds.profile_hash


def test_nodes_are_numbered_along_the_parts(two_kinds):
    assert two_kinds.nodes_words == "1 node of 8 and one of 4 h100-sxm and 1 node of 4 a10g"
    assert numbering_words(two_kinds) == ("nodes 0 to 1 of h100-sxm", "node 2 of a10g")
    assert smaller_nodes(two_kinds) == ((1, 2, 4),)
    assert not two_kinds.is_flat
