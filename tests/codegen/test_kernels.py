"""Kernels that a CPU does not have are met before a script is written."""

import pytest
import torch

import planner
from planner.errors import CodegenError

MODEL = """
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 16, 16) / 4)

    def forward(self, x):
        return x @ self.weight[0] + CALL


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def build_model():
    return Model()


def example_batch(num_samples):
    return torch.randn(num_samples, 16, 16), torch.zeros(num_samples, 16, 16)


def loss_fn(output, targets):
    return F.mse_loss(output, targets)
"""
GROUPED = """F.grouped_mm(
            x.flatten(0, 1), self.weight, offs=torch.tensor([8, 16], dtype=torch.int32)
        ).view_as(x)"""
NARROW = "torch.ops.kernels_test.narrow(x)"
NOWHERE = "torch.ops.kernels_test.doubled(x)"


for name in ("doubled", "narrow"):
    torch.library.define(f"kernels_test::{name}", "(Tensor x) -> Tensor")
    torch.library.impl(f"kernels_test::{name}", "Meta", torch.empty_like)
    torch.library.register_autograd(f"kernels_test::{name}", lambda _, grad: 2 * grad)


@torch.library.impl("kernels_test::narrow", "CPU")
def narrow(x):
    if x.dtype is torch.float64:
        raise RuntimeError("not implemented for 'Double'")
    return 2 * x


def saved(call, dtype, folder):
    model = folder / "model.py"
    model.write_text(MODEL.replace("CALL", call))
    planner.plan(str(model), gpus=1, cluster="cpu", dtype=dtype).save(folder / "out")
    return (folder / "out" / "train.py").is_file()


def test_a_kernel_that_does_not_take_the_dtype_is_named_with_one_that_it_takes(tmp_path):
    with pytest.raises(CodegenError, match=r"narrow does not take float64(?s:.)*float32"):
        saved(NARROW, "float64", tmp_path)


@pytest.mark.parametrize("call", [NARROW, GROUPED])
def test_a_kernel_that_takes_the_dtype_is_no_obstacle(tmp_path, call):
    assert saved(call, "float32", tmp_path)


def test_groups_of_rows_are_multiplied_in_float64(tmp_path):
    assert saved(GROUPED, "float64", tmp_path)


def test_an_op_without_any_kernel_for_cpus_is_refused(tmp_path):
    with pytest.raises(CodegenError, match=r"doubled does not take float32(?s:.)*Could not run"):
        saved(NOWHERE, "float32", tmp_path)
