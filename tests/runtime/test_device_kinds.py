import pytest
import torch

from planner.runtime.device_kinds import check_devices, wrong_device

KINDS = (("a100-80gb-sxm", 8), ("h100-sxm", 16))


@pytest.mark.parametrize(
    ("name", "rank", "wrong"),
    [
        ("NVIDIA A100-SXM4-80GB", 0, False),
        ("NVIDIA A100-SXM4-80GB", 8, True),
        ("NVIDIA H100 80GB HBM3", 7, True),
        ("NVIDIA H100 80GB HBM3", 8, False),
        ("NVIDIA H100 80GB HBM3", 23, False),
        ("NVIDIA L40S", 0, False),
    ],
)
def test_a_kind_of_the_plan_in_another_one_s_place_is_refused(name, rank, wrong):
    found = wrong_device(name, rank, KINDS)
    assert (found is not None) == wrong
    if found is not None:
        assert f"rank {rank} runs on {name}" in found
        assert "8 ranks on a100-80gb-sxm, then 16 ranks on h100-sxm" in found


def test_names_of_ones_own_say_nothing():
    assert wrong_device("NVIDIA H100 80GB HBM3", 0, (("mine", 8), ("yours", 8))) is None
    assert wrong_device("NVIDIA GeForce RTX 4090", 8, (("rtx4090", 8), ("l40s", 8))) is not None


def test_cpus_are_not_told_apart():
    check_devices(torch.device("cpu"), KINDS)
