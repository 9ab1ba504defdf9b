"""Every shipped framework profile, and what is said of a wrong one."""

import re
from dataclasses import replace

import pytest

from planner.errors import ProfileError
from planner.framework.constants import Constants, in_place
from planner.framework.profiles import list_frameworks, load_framework
from planner.hardware.profiles import PROFILES_FOLDER, list_clusters, load_cluster

NANOTRON = (PROFILES_FOLDER / "frameworks" / "nanotron.toml").read_text()


@pytest.mark.parametrize("name", list_frameworks())
class TestShipped:
    def test_it_reads_under_the_name_of_its_file(self, name):
        assert load_framework(name).name == name

    def test_every_number_says_where_it_is_from(self, name):
        for source in load_framework(name).numbers.values():
            assert source.source

    def test_it_is_priced_on_any_cluster(self, name):
        framework = load_framework(name)
        for cluster in list_clusters():
            factor = load_cluster(cluster, gpus=8).host_time_factor
            placed, spec = in_place(framework, load_cluster(cluster, gpus=8))
            assert spec.device.host_dispatch_s == pytest.approx(framework.host_dispatch_s * factor)
            collective_host_s = framework.collective_host_s * factor
            assert placed == replace(framework, collective_host_s=collective_host_s)


def test_no_two_profiles_are_for_the_same_runs():
    matches = [match for name in list_frameworks() for match in load_framework(name).matches]
    keys = [(each.framework, each.source, each.notes) for each in matches]
    assert len(set(keys)) == len(keys)


@pytest.fixture
def changed(tmp_path):
    def write(pattern, replacement):
        text, found = re.subn(pattern, replacement, NANOTRON, count=1, flags=re.MULTILINE)
        assert found
        file = tmp_path / "own.toml"
        file.write_text(text)
        return str(file)

    return write


def test_an_own_file_is_read_by_its_path(changed):
    file = changed(r"^bucket_mib = \{ value = \d+", "bucket_mib = { value = 32")
    assert load_framework(file).bucket_bytes == 32 * 2**20


@pytest.mark.parametrize(
    ("pattern", "replacement", "words"),
    [
        (r"^bucket_mib = .*\n", "", "field 'bucket_mib' is missing"),
        (r"^bucket_mib", "bucket_mb", "field 'bucket_mib' is missing"),
        (r"^format = 1", "format = 1\ncolour = 3", "field 'colour' is unknown"),
        (r'^attention = "fused"', 'attention = "flash"', "field 'attention' is 'flash'"),
        (r'^name = "nanotron"', "name = 3", "field 'name' is 3, not a string"),
        (
            r"^gradient_overlap = \{ value = [^,]+",
            "gradient_overlap = { value = 1.5",
            r"field 'gradient_overlap' is 1.5, outside \[0, 1\]",
        ),
        (
            r"^bucket_mib = \{ value = [^,]+",
            "bucket_mib = { value = 0",
            "field 'bucket_mib' is 0, it must be above 0",
        ),
        (
            r"^host_dispatch_us = .*",
            "host_dispatch_us = true",
            r"field 'host_dispatch_us' needs value, provenance and source",
        ),
        (r'^framework = "nanotron"\n', "", r"field 'runs\[0\].framework' is missing"),
        (r"^\[\[runs\]\]", "[[run]]", "field 'run"),
    ],
)
def test_a_wrong_field_is_named_with_its_file(changed, pattern, replacement, words):
    file = changed(pattern, replacement)
    with pytest.raises(ProfileError, match=words) as caught:
        load_framework(file)
    assert "own.toml" in str(caught.value)


def test_an_unknown_name_lists_near_ones():
    with pytest.raises(ProfileError, match="no framework profile 'nanotrom'") as caught:
        load_framework("nanotrom")
    assert caught.value.hint == "did you mean nanotron?"


@pytest.mark.parametrize(
    "line",
    [
        'bucket_mib = { value = 25, provenance = "assumed", source = "a test" }',
        'zero_gather = "broadcasts"',
    ],
)
def test_what_sharded_parameters_do_not_have_is_refused(tmp_path, line):
    file = tmp_path / "own.toml"
    text = (PROFILES_FOLDER / "frameworks" / "planner.toml").read_text()
    file.write_text(text.replace("\n[[runs]]", f"{line}\n\n[[runs]]", 1))
    with pytest.raises(ProfileError, match='has no effect where state_form is "fsdp"'):
        load_framework(str(file))


def device_of(gpus, fix=None, **kwargs):
    cluster = load_cluster("h100-sxm", gpus=gpus)
    constants = Constants(device={"h100-sxm": fix or {}})
    return in_place(load_framework("planner"), cluster, constants, **kwargs)[1].device.efficiency


def test_only_a_device_without_others_loses_nothing_to_them():
    alone, several = device_of(1), device_of(2)
    assert several.sustained_fraction < alone.sustained_fraction
    assert device_of(1, is_part=True) == several
    # What a calibration found holds for one device too.
    found = device_of(1, {"training_fraction_of_sustained": 0.5})
    assert found.sustained_fraction == pytest.approx(alone.sustained_fraction / 2)


def test_a_calibrated_attention_moves_the_kernels_that_run():
    key = "attention_forward_fraction_of_peak"
    before = device_of(2)
    profile = load_cluster("h100-sxm", gpus=2).device.efficiency
    after = device_of(2, {key: profile.attention_forward_fraction * 0.5})
    assert before.attention_forward_fraction == profile.newest_attention_forward_fraction
    for name in ("attention_forward_fraction", "attention_backward_fraction"):
        assert getattr(after, name) == pytest.approx(getattr(before, name) / 2)
