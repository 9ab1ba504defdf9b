"""Constants change what belongs to their owner, and some price."""

from dataclasses import replace

import pytest
from run_tables import make_runs

from planner.errors import ProfileError
from planner.framework.constants import KEYS, PROFILES_OWN, Constants, in_place
from planner.framework.profiles import load_framework
from planner.hardware.profiles import load_cluster
from planner.validation.pricing.cases import case_of
from planner.validation.pricing.pricing import CasePricer

NODES = {"num_gpus": 64, "tp": 2, "pp": 2, "dp": 16, "layers": 4, "global_batch": 256}
"""Every axis, over several nodes."""
MANY_NODES = {**NODES, "num_gpus": 512, "dp": 128, "global_batch": 1024}
MPT = {
    **{"framework": "composer-fsdp", "arch": "mpt", "zero_stage_or_fsdp": "FSDP FULL_SHARD"},
    **{"num_gpus": 8, "tp": 1, "pp": 1, "dp": 8, "layers": 4},
}
RUNS = {
    "nanotron": NODES,
    "nanotron on many nodes": MANY_NODES,
    "composer-fsdp": MPT,
}
OF_MANY_NODES = ("congested_message_us",)


@pytest.fixture(scope="module")
def pricer():
    return CasePricer()


def prices(case, constants, pricer):
    price = pricer.price(case, constants)
    return price.costs.step_time_s, price.memory.total_bytes


@pytest.mark.parametrize(("owner", "key"), [(owner, key) for owner in KEYS for key in KEYS[owner]])
def test_every_constant_changes_some_price(owner, key, pricer):
    name = "nanotron on many nodes" if key in OF_MANY_NODES else "nanotron"
    if key == "attention_share":
        # Unfused attention has no such kernel.
        name = "composer-fsdp"
    (run,) = make_runs(RUNS[name])
    # The host must neither hide all that devices do, nor the other way round.
    case = case_of(replace(run, hidden=4096, ffn=14336, seq_len=4096))
    if key in (
        "host_dispatch_us",
        "collective_host_us",
        "host_time_factor",
        "kernel_launch_us",
    ):
        case = case_of(
            replace(run, hidden=512, ffn=1024, heads=8, kv_heads=8, seq_len=512, microbatch_size=1)
        )
    owners = {
        "device": load_cluster(case.cluster, gpus=8).device.name,
        "cluster": case.cluster,
        "framework": case.framework.name,
    }
    found = {
        prices(case, Constants(**{owner: {owners[owner]: {key: value}}}), pricer)
        for value in (0.3, 0.6)
    }
    if key in (
        "host_dispatch_us",
        "collective_host_us",
        "kernel_launch_us",
        "message_us",
        "step_us",
        "congested_message_us",
    ):
        found = {
            prices(case, Constants(**{owner: {owners[owner]: {key: value}}}), pricer)
            for value in (1e3, 1e4)
        }
    assert len(found) == 2, (owner, key)


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
