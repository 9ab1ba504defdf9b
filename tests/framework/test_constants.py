"""Constants are refused where they belong to others, and change nothing there."""

from dataclasses import replace

import pytest

from planner.errors import ProfileError
from planner.framework.constants import PROFILES_OWN, SCRIPT, Constants, in_place
from planner.framework.profiles import load_framework
from planner.hardware.profiles import load_cluster
from planner.hardware.spec import ScriptHost


def test_a_key_of_another_owner_is_refused_with_its_owner():
    framework, cluster = load_framework("nanotron"), load_cluster("h100-sxm", gpus=8)
    with pytest.raises(ProfileError, match="'step_us' is no constant of a device") as caught:
        in_place(framework, cluster, Constants(device={"h100-sxm": {"step_us": 1.0}}))
    assert caught.value.hint == "it belongs to a framework"
    with pytest.raises(ProfileError, match="'step_ms'") as caught:
        in_place(framework, cluster, Constants(framework={"nanotron": {"step_ms": 1.0}}))
    assert "step_us" in caught.value.hint


def test_constants_of_other_owners_do_nothing():
    framework, cluster = load_framework("nanotron"), load_cluster("h100-sxm", gpus=8)
    others = Constants(
        device={"a40": {"kernel_launch_us": 9.0}},
        cluster={"a10g": {"host_time_factor": 9.0}},
        framework={"megatron": {"step_us": 9.0}},
    )
    assert in_place(framework, cluster, others) == in_place(framework, cluster, PROFILES_OWN)


def test_buckets_of_sharded_parameters_are_refused():
    framework, cluster = load_framework("planner"), load_cluster("h100-sxm", gpus=8)
    with pytest.raises(ProfileError, match="'bucket_mib' has no effect"):
        in_place(framework, cluster, Constants(framework={"planner": {"bucket_mib": 25.0}}))


def test_what_was_measured_of_the_script_stands_for_its_constants_alone():
    host = ScriptHost(
        step_s=0.1,
        unit_s=0.0,
        collective_s=0.0,
        tensor_s=0.0,
        plain_tensor_s=0.0,
        message_s=0.0,
        full_op_s=1e-5,
        selective_op_s=2e-5,
        split_op_s=3e-5,
        split_collective_s=4e-5,
        element_s=0.0,
    )
    cluster = replace(load_cluster("cpu", gpus=2), script_host=host)
    script, own = in_place(load_framework(SCRIPT), cluster, PROFILES_OWN)
    assert (script.step_s, script.message_s, own.script_host) == (0.1, 0.0, host)
    ops = own.device.full_dispatch_s, own.device.selective_dispatch_s, own.device.split_dispatch_s
    assert (*ops, script.collective_host_s) == (1e-5, 2e-5, 3e-5, 4e-5)
    assert own.device.host_dispatch_s == 0
    fitted = Constants(framework={SCRIPT: {"step_us": 7.0}})
    assert in_place(load_framework(SCRIPT), cluster, fitted)[0].step_s == pytest.approx(7e-6)
    other, its = in_place(load_framework("nanotron"), cluster, PROFILES_OWN)
    assert its.script_host is None
    assert other.step_s == load_framework("nanotron").step_s
