from statistics import fmean

import pytest

from planner.framework.script import script_cluster
from planner.hardware.profiles import list_clusters
from planner.validation.fitting.script_error import script_errors


@pytest.fixture(scope="module")
def errors():
    return script_errors()


def test_the_error_beside_a_plan_is_the_one_over_measured_runs(errors):
    for cluster, found in errors.items():
        shown = script_cluster(cluster, gpus=8).step_time_error
        assert shown == pytest.approx(fmean(found), abs=0.005), cluster  # whole percents


def test_a_cluster_without_measured_runs_shows_none(errors):
    shown = {name for name in list_clusters() if script_cluster(name, gpus=1).step_time_error}
    assert shown == set(errors)
