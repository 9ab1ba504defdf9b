"""A plan's folder is asked about its model from wherever the plan is looked at."""

import sys

import pytest

import planner
from planner.plan.saved_model import saved_graphs
from planner.plan.serialize import load_saved_plan

LAYERS = """
from torch import nn


def layers():
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)))
"""

MODEL = """
import torch
from shared import layers


def build_model():
    return layers()


def example_batch(microbatch_size):
    return torch.randn(microbatch_size, 8), torch.randn(microbatch_size, 8)


def loss_fn(output, targets):
    return (output - targets).square().mean()
"""

BESIDE = """
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "common"))
"""


def layers_of(folder):
    return len(saved_graphs(load_saved_plan(folder)).at(1).parameters) // 2


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """Return a folder with models, where commands run, and one elsewhere."""
    for folder in ("common", "models", "elsewhere", "package"):
        (tmp_path / "sources" / folder).mkdir(parents=True)
    (tmp_path / "sources" / "common" / "shared.py").write_text(LAYERS)
    (tmp_path / "sources" / "models" / "net.py").write_text(BESIDE + MODEL)
    (tmp_path / "sources" / "package" / "__init__.py").write_text("")
    (tmp_path / "sources" / "package" / "shared.py").write_text(LAYERS)
    own = MODEL.replace("from shared", "from package.shared")
    (tmp_path / "sources" / "package" / "net.py").write_text(own)
    monkeypatch.chdir(tmp_path / "sources")
    return tmp_path / "sources"


@pytest.mark.parametrize("model", ["models/net.py", "package.net:build_model"])
def test_a_model_is_found_from_any_working_directory(model, sources, monkeypatch):
    path = list(sys.path)
    planner.plan(model, gpus=2, cluster="cpu", dtype="float32", fix={"pp": 2}).save(
        sources / "plan"
    )
    monkeypatch.chdir(sources / "elsewhere")
    monkeypatch.setattr(sys, "path", path)  # as in a new process
    monkeypatch.delitem(sys.modules, "shared", raising=False)
    assert layers_of(sources / "plan") == 4


def test_a_folder_that_was_moved_alone_finds_its_model_where_it_is_asked_from(sources, tmp_path):
    planner.plan("models/net.py", gpus=2, cluster="cpu", dtype="float32").save(sources / "plan")
    (tmp_path / "far" / "away").mkdir(parents=True)
    (sources / "plan").rename(tmp_path / "far" / "away" / "plan")
    assert layers_of(tmp_path / "far" / "away" / "plan") == 4
