import pytest

from planner.errors import ProfileError
from planner.framework.script import script_cluster
from planner.hardware.profiles import PROFILES_FOLDER, load_cluster
from planner.units import GIB

CALIBRATION = """format = 1

[[tuned]]
framework = "planner"
cluster = "h100-sxm"
host_dispatch_us = { value = 17, provenance = "fitted", source = "own runs" }
reserve_gib = { value = 5.5, provenance = "fitted", source = "own runs" }
"""


@pytest.fixture
def calibration(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text(CALIBRATION)
    return str(file)


def test_a_shipped_cluster_is_what_training_reaches_of_it():
    plain, script = load_cluster("h100-sxm", gpus=8), script_cluster("h100-sxm", gpus=8)
    assert script.device.efficiency.sustained_fraction == 0.62
    assert plain.device.efficiency.sustained_fraction == 0.8
    assert script.device.host_dispatch_s == pytest.approx(40e-6)
    assert script.links == plain.links
    assert script.step_time_error == plain.step_time_error == 0.09


def test_a_cluster_without_measured_runs_is_as_it_is():
    assert script_cluster("v100-sxm", gpus=8) == load_cluster("v100-sxm", gpus=8)


def test_numbers_of_an_own_file_are_never_changed(tmp_path):
    own = tmp_path / "h100-sxm.toml"
    own.write_text((PROFILES_FOLDER / "clusters" / "h100-sxm.toml").read_text())
    assert script_cluster(str(own), gpus=8) == load_cluster("h100-sxm", gpus=8)


def test_a_calibration_comes_on_top_and_leaves_the_error_unknown(calibration):
    cluster = script_cluster("h100-sxm", gpus=8, calibration=calibration)
    assert cluster.device.host_dispatch_s == pytest.approx(17e-6)
    assert cluster.device.reserve_bytes == 5.5 * GIB
    assert cluster.device.efficiency.sustained_fraction == 0.62
    assert cluster.step_time_error is None


def test_a_calibration_of_another_cluster_is_refused(calibration):
    with pytest.raises(ProfileError, match="no constants of framework 'planner' on cluster 'v100"):
        script_cluster("v100-sxm", gpus=8, calibration=calibration)
