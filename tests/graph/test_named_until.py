"""Until when code holds what it makes, as the trace sees it."""

import subprocess
import sys

import pytest

import planner
from planner.graph.operator_graph import Phase, StorageKind

MODEL = """
import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        {body}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def build_model():
    return Model()


def example_batch(size):
    return torch.randn(size, 8), torch.randn(size, 8)


def loss_fn(output, targets):
    return functional.mse_loss(output, targets)
"""

NAMED = "y = self.up(x); z = y + 1.0; return self.down(torch.tanh(z))"
REBOUND = "y = self.up(x); y = y + 1.0; return self.down(torch.tanh(y))"
DELETED = "y = self.up(x); z = y + 1.0; del y; return self.down(torch.tanh(z))"
HANDED = "return self.down(torch.tanh(self.up(x) + 1.0))"
IN_A_LIST = "y = [self.up(x)]; z = y[0] + 1.0; return self.down(torch.tanh(z))"


@pytest.mark.parametrize(
    ("body", "last"),
    [
        (NAMED, "addmm"),
        (IN_A_LIST, "addmm"),
        (REBOUND, "add"),
        (DELETED, "add"),
        (HANDED, "add"),
    ],
)
def test_what_code_names_is_held_until_it_ends_to_name_it(tmp_path, body, last):
    (tmp_path / "model.py").write_text(MODEL.format(body=body))
    graph = planner.trace(str(tmp_path / "model.py")).graph
    forward = [op for op in graph.nodes if op.phase is Phase.FORWARD]
    ups = [op for op in forward if op.name == "addmm" and op.module.endswith("up")]
    assert len(ups) == 3
    # What torch does when a process first calls an op leaves frames, with what they name.
    for op in ups[1:]:
        storage = graph.storages[graph.values[op.outputs[0]].storage]
        assert storage.kind is StorageKind.ACTIVATION
        assert storage.named_until is not None
        assert graph.nodes[storage.named_until].name == last
        assert graph.nodes[storage.named_until].module.startswith(op.module.removesuffix(".up"))


TWICE = """
import sys
from planner.graph.loading.load import load_model
from planner.graph.trace import record_step

model = load_model(sys.argv[1])
first, second = (
    record_step(model, microbatch_size=2, dtype="float32").storages for _ in range(2)
)
assert first == second
"""


def test_the_first_step_of_a_process_is_as_any(tmp_path):
    """Its first op loads modules of torch."""
    text = MODEL.format(body=HANDED).replace("return x\n", "return self.blocks[0].up(x).mean(1)\n")
    (tmp_path / "model.py").write_text(text.replace("randn(size, 8),", "randn(size, 4, 8),"))
    command = [sys.executable, "-c", TWICE, str(tmp_path / "model.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
