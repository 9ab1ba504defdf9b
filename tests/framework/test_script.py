import pytest

from planner.errors import ProfileError
from planner.framework.profiles import load_framework
from planner.framework.script import SCRIPT, framework_on_cluster
from planner.hardware.profiles import PROFILES_FOLDER, list_clusters, load_cluster
from planner.units import GIB

CALIBRATION = """format = 1

[[framework]]
name = "planner"
host_dispatch_us = { value = 17, provenance = "fitted", source = "own runs" }
reserve_gib = { value = 5.5, provenance = "fitted", source = "own runs" }

[[device]]
name = "h100-sxm"
training_fraction_of_sustained = { value = 0.5, provenance = "fitted", source = "own runs" }
"""


def script_cluster(name, **options):
    return framework_on_cluster(SCRIPT, name, **options)[1]


@pytest.fixture
def calibration(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text(CALIBRATION)
    return str(file)


@pytest.mark.parametrize("name", [each for each in list_clusters() if each != "cpu"])
def test_a_copy_of_a_shipped_file_is_the_shipped_cluster(name, tmp_path):
    own = tmp_path / "own.toml"
    own.write_text((PROFILES_FOLDER / "clusters" / f"{name}.toml").read_text())
    copied = framework_on_cluster(SCRIPT, str(own), gpus=8)
    assert copied == framework_on_cluster(SCRIPT, name, gpus=8)


def test_a_cluster_is_what_training_reaches_of_it():
    plain, script = load_cluster("h100-sxm", gpus=16), script_cluster("h100-sxm", gpus=16)
    share = plain.device.training_fraction
    assert share < 1
    assert script.device.efficiency.sustained_fraction == pytest.approx(
        plain.device.efficiency.sustained_fraction * share
    )
    assert script.device.host_dispatch_s == load_framework(SCRIPT).host_dispatch_s > 0
    assert script.step_time_errors == plain.step_time_errors != ()


def test_devices_without_runs_say_what_is_known_of_clusters_left_out():
    script = script_cluster("v100-sxm", gpus=8)
    assert script.step_time_errors == ()
    assert script.uncalibrated_error == load_framework(SCRIPT).uncalibrated_error is not None


def test_a_calibration_comes_on_top_and_leaves_the_error_unknown(calibration):
    plain, cluster = (
        script_cluster("h100-sxm", gpus=8, calibration=each) for each in (None, calibration)
    )
    assert cluster.device.host_dispatch_s == pytest.approx(17e-6)
    assert cluster.device.reserve_bytes == 5.5 * GIB
    assert cluster.device.efficiency.sustained_fraction == pytest.approx(0.8 * 0.5)
    assert cluster.links == plain.links
    assert cluster.step_time_errors == ()


def test_constants_of_the_script_hold_on_any_cluster(calibration):
    cluster = script_cluster("v100-sxm", gpus=8, calibration=calibration)
    assert cluster.device.host_dispatch_s == pytest.approx(17e-6)


def test_a_calibration_of_other_machines_and_code_is_refused(tmp_path):
    own = tmp_path / "own.toml"
    own.write_text(
        CALIBRATION[: CALIBRATION.index("[[framework]]")]
        + CALIBRATION[CALIBRATION.index("[[device]]") :]
    )
    with pytest.raises(ProfileError, match="of cluster 'v100-sxm' or of device 'v100-32gb-sxm'"):
        script_cluster("v100-sxm", gpus=8, calibration=str(own))
