"""Hints on the command line, from the refusal to the answer."""

import json

import pytest

from planner.cli.main import run

MODEL = """
import torch
from torch import nn

class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
        self.extra = nn.Linear(8, 8)

    def forward(self, x):
        x = self.blocks(x)
        if x.sum() > 0:
            x = self.extra(x)
        return self.extra(x[x[:, 0] > 0])

build_model = Gated

def example_batch(microbatch_size):
    return torch.randn(microbatch_size, 8), None

def loss_fn(output, targets):
    return output.mean()
"""


@pytest.fixture(autouse=True)
def workplace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path


def test_each_refusal_names_the_next_hint(workplace, capsys):
    command = ["trace", "model.py", "--microbatch-size", "8", "--dtype", "float32", "--json"]
    assert run(command) == 5
    assert "--hint model.py:13=true" in capsys.readouterr().err
    command += ["--hint", "model.py:13=true"]
    assert run(command) == 5
    assert "--hint model.py:15=0.5" in capsys.readouterr().err
    (workplace / "hints.toml").write_text('"model.py:15" = 0.5\n')
    command += ["--hints", "hints.toml"]
    assert run(command) == 0
    out, err = capsys.readouterr()
    assert err == ""
    # Four blocks and the extra layer on 8 samples, the extra layer again on half of them.
    assert json.loads(out)["forward_flop"] == 2 * 8 * 8 * (5 * 8 + 4)
    assert run([*command, "--hint", "model.py:16=1"]) == 2
    assert "Lines that do: model.py:13, model.py:15." in capsys.readouterr().err


def test_an_estimate_takes_hints_and_keeps_them(capsys):
    command = ["estimate", "model.py", "--gpus", "1", "--cluster", "cpu", "--dtype", "float32"]
    hints = ["--hint", "model.py:13=false", "--hint", "model.py:15=0.5"]
    assert run([*command, *hints, "--json"]) == 0
    request = json.loads(capsys.readouterr().out)["request"]
    assert request["hints"] == {"model.py:13": False, "model.py:15": 0.5}
