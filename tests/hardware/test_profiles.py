import subprocess
import sys
from pathlib import Path

import pytest

from planner.errors import ProfileError, RequestError
from planner.hardware.fields import FieldReader
from planner.hardware.profiles import (
    PROFILES_FOLDER,
    list_clusters,
    list_devices,
    load_cluster,
    load_device,
)
from planner.hardware.spec import Provenance
from planner.hardware.template import template_files

REQUIRED_DEVICES = {
    "v100-16gb-sxm", "v100-32gb-sxm", "a100-40gb-sxm", "a100-80gb-sxm", "h100-sxm", "h100-pcie",
    "h200-sxm", "b200-sxm", "l40s", "a10g", "rtx4090", "mi300x", "cpu",
}  # fmt: skip
REQUIRED_CLUSTERS = {
    "a100-80gb-sxm", "a100-40gb-sxm", "h100-sxm", "h100-pcie", "h200-sxm", "b200-sxm", "v100-sxm",
    "l40s", "a10g", "rtx4090", "mi300x", "cpu",
}  # fmt: skip


def test_the_required_profiles_are_shipped() -> None:
    assert set(list_devices()) >= REQUIRED_DEVICES
    assert set(list_clusters()) >= REQUIRED_CLUSTERS


@pytest.mark.parametrize("name", list_devices())
def test_every_shipped_device_loads_and_every_number_has_a_source(name: str) -> None:
    device = load_device(name)
    assert device.name == name
    assert len(device.numbers) >= 17
    for number in device.numbers.values():
        assert number.source
        assert number.provenance in Provenance
    fastest = max(device.peak_flop_per_s.values())
    assert device.peak_flop_per_s["float64"] <= device.peak_flop_per_s["float32"] <= fastest


@pytest.mark.parametrize("name", list_clusters())
def test_every_shipped_cluster_loads_and_every_number_has_a_source(name: str) -> None:
    cluster = load_cluster(name, gpus=64)
    assert cluster.name == name
    assert cluster.num_nodes * cluster.gpus_per_node == 64
    for link in cluster.links:
        assert len(link.numbers) >= 6
    bandwidths = [link.bandwidth_bytes_per_s for link in cluster.links]
    assert bandwidths == sorted(bandwidths, reverse=True)


def test_human_units_become_si() -> None:
    device = load_device("h100-sxm")
    assert device.memory_bandwidth_bytes_per_s == 3.35e12
    assert device.peak_flop_per_s["bfloat16"] == 989e12
    assert device.memory_bytes == round(79.1 * 2**30)
    efa = load_cluster("h100-sxm", gpus=16).links[-1]
    assert efa.bandwidth_bytes_per_s == pytest.approx(50e9, rel=0.1)  # 400 Gbit/s, not 400 GB/s


def test_a_v100_has_no_bfloat16() -> None:
    assert "bfloat16" not in load_device("v100-32gb-sxm").peak_flop_per_s


def test_fewer_gpus_than_a_node_make_one_smaller_node() -> None:
    cluster = load_cluster("h100-sxm", gpus=4)
    assert (cluster.gpus_per_node, cluster.num_nodes) == (4, 1)


def test_gpus_per_node_overrides_the_profile() -> None:
    cluster = load_cluster("h100-sxm", gpus=16, gpus_per_node=4)
    assert (cluster.gpus_per_node, cluster.num_nodes) == (4, 4)
    assert cluster.links[0].ranks == 4


@pytest.mark.parametrize(
    ("gpus", "per_node", "nodes", "last", "words"),
    [
        (12, None, 2, 4, "1 node of 8 and one of 4"),
        (20, None, 3, 4, "2 nodes of 8 and one of 4"),
        (7, 3, 3, 1, "2 nodes of 3 and one of 1"),
        (18, 6, 3, 6, "3 nodes of 6"),
    ],
)
def test_the_last_node_may_not_be_full(gpus, per_node, nodes, last, words) -> None:
    cluster = load_cluster("h100-sxm", gpus=gpus, gpus_per_node=per_node)
    assert (cluster.num_nodes, cluster.last_node_gpus) == (nodes, last)
    assert cluster.nodes_words == words
    assert cluster.is_flat == (gpus % (per_node or 8) == 0)


def _with_links(tmp_path, per_node, ranks):
    """A cluster of one's own with a link for each number of ranks, and one around them."""
    for name, text in template_files("own", like="h100-sxm").items():
        (tmp_path / name).write_text(text)
    path = tmp_path / "own.toml"
    head, inner, outer = path.read_text().split("[[links]]")
    head = head.replace("gpus_per_node = 8", f"gpus_per_node = {per_node}")
    links = [inner.replace("ranks = 8", f"ranks = {each}") for each in ranks]
    path.write_text("[[links]]".join([head, *links, outer]))
    return str(path)


def test_links_around_nodes_join_as_many_nodes_of_another_size(tmp_path) -> None:
    name = _with_links(tmp_path, 8, (2, 8, 32))
    cluster = load_cluster(name, gpus=64, gpus_per_node=4)
    assert [link.ranks for link in cluster.links] == [2, 4, 16, None]
    with pytest.raises(RequestError, match=r"3 GPUs per node .* joins 2 neighbours"):
        load_cluster(name, gpus=6, gpus_per_node=3)


def test_numbers_of_nodes_count_where_a_link_joins_some_of_them(tmp_path) -> None:
    name = _with_links(tmp_path, 4, (72,))
    assert load_cluster(name, gpus=72).is_flat
    assert not load_cluster(name, gpus=144).is_flat


@pytest.mark.parametrize("gpus", [0, -8])
def test_no_gpus_are_refused(gpus: int) -> None:
    with pytest.raises(RequestError):
        load_cluster("h100-sxm", gpus=gpus)


def test_zero_gpus_per_node_are_refused() -> None:
    with pytest.raises(RequestError):
        load_cluster("h100-sxm", gpus=8, gpus_per_node=0)


def test_processes_share_the_cores_and_memory_of_a_cpu_node() -> None:
    two, eight = load_cluster("cpu", gpus=2), load_cluster("cpu", gpus=8)
    ratio = two.device.peak_flop_per_s["float32"] / eight.device.peak_flop_per_s["float32"]
    assert ratio == pytest.approx(4)
    assert two.device.memory_bytes == pytest.approx(4 * eight.device.memory_bytes)
    assert two.links[0].bandwidth_bytes_per_s > eight.links[0].bandwidth_bytes_per_s


def test_an_unknown_cluster_names_near_ones() -> None:
    with pytest.raises(ProfileError, match="h100-smx") as caught:
        load_cluster("h100-smx", gpus=8)
    assert "h100-sxm" in caught.value.hint
    assert caught.value.exit_code == 6


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="there is no file"):
        load_cluster(str(tmp_path / "mine.toml"), gpus=8)


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").mkdir()
    with pytest.raises(ProfileError, match="there is no file"):
        load_cluster(str(tmp_path / "mine.toml"), gpus=8)


def copy_profile(folder: Path, kind: str, name: str, *edits: tuple[str, str]) -> Path:
    text = (PROFILES_FOLDER / kind / f"{name}.toml").read_text()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new, 1)
    path = folder / f"{kind}-{name}.toml"
    path.write_text(text)
    return path


def test_a_cluster_file_may_name_a_device_file_beside_it(tmp_path: Path) -> None:
    copy_profile(tmp_path, "devices", "h100-sxm", ('"h100-sxm"', '"mine"'))
    path = copy_profile(
        tmp_path,
        "clusters",
        "h100-sxm",
        ('device = "h100-sxm"', 'device = "devices-h100-sxm.toml"'),
    )
    assert load_cluster(str(path), gpus=8).device.name == "mine"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("format = 1", "format = 2", "this version reads 1"),
        ("format = 1", "format = [", "not a TOML file"),
        ("memory_gib", "memory_gb", "'memory_gib' is missing"),
        ("num_sms", "num_smx = 1\nnum_sms", "'num_smx' is unknown"),
        ("{ value = 79.1,", '{ value = "80 GB",', "has the value '80 GB', not a number"),
        ("{ value = 79.1,", "{ value = -1,", "'memory_gib' is -1, outside"),
        ("{ value = 79.1,", "{ value = nan,", "'memory_gib' is nan, outside"),
        ("{ value = 79.1,", "{ value = 0,", "must be above 0"),
        ("{ value = 79.1,", "{ value = 2.0,", "leaves nothing"),
        ("{ value = 132,", "{ value = 13.5,", "not a whole number"),
        ("{ value = 79.1, provenance", "{ provenance", "needs value, provenance and source"),
        ("memory_gib = {", 'memory_gib = "80"\nx = {', "needs value, provenance and source"),
        ('"measured"', '"guessed"', "provenance 'guessed'"),
        ("[[256, 128], ", "[[256], ", "not a list of"),
    ],
)
def test_a_wrong_device_field_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = copy_profile(tmp_path, "devices", "h100-sxm", (old, new))
    with pytest.raises(ProfileError, match=message) as caught:
        load_device(str(path))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('ranks = { value = 8,', 'rank = { value = 8,', r"links\[0\].rank' is unknown"),
        ("switch_all_reduce_fraction = { value = 0.7", "switch_all_reduce_fraction = { value = 2.7",
         "outside"),
        ("[[links]]", "[links]", "not a TOML file"),
        ("of_bandwidth = { value = 0.45", "of_bandwidth = { value = 1.45", r"host.optimizer_fra"),
        ("copies_peak_gb", "peak_gb", r"host.copies_peak_gb_per_s_per_gpu' is missing"),
        ('device = "h100-sxm"', 'device = "h100"', "no profile of that name"),
    ],
)  # fmt: skip
def test_a_wrong_cluster_field_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = copy_profile(tmp_path, "clusters", "h100-sxm", (old, new))
    with pytest.raises(ProfileError, match=message):
        load_cluster(str(path), gpus=8)


def test_links_are_ordered_from_the_innermost(tmp_path: Path) -> None:
    text = (PROFILES_FOLDER / "clusters" / "h100-sxm.toml").read_text()
    head, inner, outer = text.split("[[links]]")
    path = tmp_path / "swapped.toml"
    path.write_text(f"{head}[[links]]{outer}\n[[links]]{inner}")
    with pytest.raises(ProfileError, match="every link but the last"):
        load_cluster(str(path), gpus=8)


def test_an_empty_source_is_refused(tmp_path: Path) -> None:
    table = {"size": {"value": 1, "provenance": "measured", "source": " "}}
    with pytest.raises(ProfileError, match="empty source"):
        FieldReader(path=tmp_path, table=table).number("size")


def test_the_hash_follows_numbers_and_not_words(tmp_path: Path) -> None:
    shipped = load_cluster("h100-sxm", gpus=8).profile_hash
    renamed = copy_profile(
        tmp_path, "clusters", "h100-sxm", ('name = "h100-sxm"', 'name = "other"')
    )
    assert load_cluster(str(renamed), gpus=8).profile_hash == shipped
    changed = copy_profile(tmp_path, "clusters", "h100-sxm", ("value = 450,", "value = 451,"))
    assert load_cluster(str(changed), gpus=8).profile_hash != shipped
    assert load_cluster("h100-sxm", gpus=16).profile_hash != shipped


def test_profiles_load_without_torch_and_pandas() -> None:
    code = (
        "import sys; from planner.hardware.profiles import load_cluster; import planner.cost.op;"
        "import planner.cost.collective; load_cluster('h100-sxm', gpus=8);"
        "assert not {'torch', 'pandas'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_plain_number_is_stated_by_the_user(tmp_path: Path) -> None:
    text = (PROFILES_FOLDER / "devices" / "h100-sxm.toml").read_text()
    line = next(each for each in text.splitlines() if each.startswith("memory_gib"))
    path = copy_profile(tmp_path, "devices", "h100-sxm", (line, "memory_gib = 96"))
    device = load_device(str(path))
    assert device.memory_bytes == 96 * 2**30
    assert device.numbers["memory_gib"].provenance is Provenance.STATED


def test_no_shipped_number_is_plain() -> None:
    for name in list_clusters():
        cluster = load_cluster(name, gpus=1)
        hosts = () if cluster.host is None else (cluster.host,)
        for each in (cluster, cluster.device, *cluster.links, *hosts):
            assert Provenance.STATED not in {found.provenance for found in each.numbers.values()}


@pytest.mark.parametrize("name", list_clusters())
def test_a_template_is_the_cluster_that_it_is_like(name: str, tmp_path: Path) -> None:
    for file, text in template_files("mine", like=name).items():
        (tmp_path / file).write_text(text)
    found, shipped = load_cluster(str(tmp_path / "mine.toml"), gpus=1), load_cluster(name, gpus=1)
    assert found.profile_hash == shipped.profile_hash
    assert found.name == "mine"
    assert found.step_time_errors == ()


def test_a_template_needs_a_plain_name_and_a_shipped_cluster() -> None:
    with pytest.raises(RequestError, match="no folder and no suffix"):
        template_files("mine.toml", like="h100-sxm")
    with pytest.raises(RequestError, match="ships already"):
        template_files("h100-sxm", like="h100-sxm")
    with pytest.raises(ProfileError, match="h100-smx") as caught:
        template_files("mine", like="h100-smx")
    assert "h100-sxm" in caught.value.hint
