"""A plan folder that was copied elsewhere trains, without the files that it was made from."""

import shutil

import pytest
from launch import run_jobs

import planner

pytestmark = pytest.mark.run

MODEL = """
import torch
from sizes import WIDTH
from torch import nn


def build_model():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))


def example_batch(microbatch_size):
    return torch.randn(microbatch_size, WIDTH), torch.randn(microbatch_size, 1)


def loss_fn(output, targets):
    return (output - targets).square().mean()
"""


def test_a_copied_folder_needs_nothing_else(tmp_path):
    source, folder, copy = (tmp_path / name for name in ("source", "plan", "elsewhere"))
    source.mkdir()
    (source / "net.py").write_text(MODEL)
    (source / "sizes.py").write_text("WIDTH = 8\n")
    planner.estimate(str(source / "net.py"), gpus=2, cluster="cpu", dtype="float32").save(folder)
    folder.rename(copy)
    shutil.rmtree(source)
    log = copy / "log.jsonl"
    run_jobs([(copy, ["--reference", "--steps", "1", "--log", str(log)])])
    assert log.read_text().count("\n") == 1
