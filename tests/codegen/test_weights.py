"""What is read as weights: bad input is told in a line that names it."""

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from planner.runtime.checkpoint import load_weights
from planner.runtime.checkpoint_folders import CheckpointWriter
from planner.runtime.part import Part
from planner.runtime.processes import RunError


@pytest.fixture
def part():
    return Part(nn.Linear(3, 2), user=None, blocks=())


def saved(folder):
    weights = {"weights.weight": torch.ones(2, 3), "weights.bias": torch.ones(2)}
    CheckpointWriter().write(weights, folder, wait=True)
    return folder


def test_a_file_an_index_and_a_checkpoint_are_read(tmp_path, part):
    weights = {"weight": torch.full((2, 3), 2.0), "bias": torch.full((2,), 2.0)}
    save_file(weights, tmp_path / "model.safetensors")
    index = '{"weight_map": {"weight": "model.safetensors", "bias": "model.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    save_file({"weight": torch.zeros(2, 3)}, tmp_path / "again.safetensors")  # not in the index
    for path in (tmp_path / "model.safetensors", tmp_path):
        nn.init.zeros_(part.model.weight)
        load_weights([part], path)
        assert torch.equal(part.model.weight, weights["weight"])
    load_weights([part], saved(tmp_path / "checkpoint"))
    assert torch.equal(part.model.bias, torch.ones(2))


def test_bad_input_is_named(tmp_path, part):
    with pytest.raises(RunError, match=r"nowhere lacks .*nowhere"):
        load_weights([part], tmp_path / "nowhere")
    with pytest.raises(RunError, match=r"lacks model\.safetensors\.index\.json, \*\.safetensors"):
        load_weights([part], tmp_path)
    (tmp_path / "broken.safetensors").write_text("nothing")
    with pytest.raises(RunError, match=r"broken\.safetensors: "):
        load_weights([part], tmp_path / "broken.safetensors")
    file = next(saved(tmp_path / "checkpoint").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(RunError, match=r"is no whole checkpoint: .* is cut short"):
        load_weights([part], tmp_path / "checkpoint")
