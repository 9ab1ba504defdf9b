"""Losses over a vocabulary that tp splits: each sums what its rows need over the ranks."""

import re

import planner
from planner.checking.check import check_plan
from planner.hardware.profiles import PROFILES_FOLDER
from planner.vocabulary import SPLIT_STYLES

MODEL = """
import torch
from torch import nn
from torch.nn import functional


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(4096, 64)
        self.block = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.head = nn.Linear(64, 4096, bias=False)

    def forward(self, tokens):
        stream = self.embedding(tokens)
        stream = stream + self.block(stream)
        return self.head(stream), self.head(stream[:, :-1])


build_model = TwoHeads


def example_batch(size):
    tokens = torch.arange(size * 9).view(size, 9) % 4096
    return tokens[:, :-1], tokens[:, 1:]


def both(outputs, targets):
    first, second = outputs
    # Gradients pass a view on their way to the softmax, which has to add them up then.
    rows = functional.log_softmax(second, -1).flatten(0, 1)
    return functional.cross_entropy(first.flatten(0, 1), targets.flatten()) + (
        functional.nll_loss(rows, targets[:, 1:].flatten())
    )


def of_the_first(outputs, targets):
    return functional.cross_entropy(outputs[0].flatten(0, 1), targets.flatten())
"""


def planned(loss, folder):
    text = (PROFILES_FOLDER / "clusters" / "cpu.toml").read_text()
    text = re.sub(r"(latency_us_per_\w+ = \{ value =) \d+", r"\1 0", text)
    text = re.sub(r"(unidirectional = \{ value =) [\d.]+", r"\1 10000", text)
    (folder / "fast.toml").write_text(text)
    (folder / "two_heads.py").write_text(f"{MODEL}\n\nloss_fn = {loss}\n")
    return planner.plan(
        str(folder / "two_heads.py"), gpus=2, dtype="float32", global_batch_size=8,
        cluster=str(folder / "fast.toml"), fix={"tp": 2, "sequence_parallel": False},
    )  # fmt: skip


def split_modules(plan):
    return {
        each.module: each.style
        for group in plan.shardings
        for each in group.modules
        if each.style in SPLIT_STYLES
    }


def test_collectives_of_split_losses_are_those_planned(tmp_path):
    result = planned("both", tmp_path)
    assert split_modules(result.best)["head"] == "column"
    result.save(tmp_path / "plan")
    check = check_plan(tmp_path / "plan")
    assert check.traffic_holds, check.collectives


def test_a_call_of_a_module_that_nobody_reads_leaves_others_split(tmp_path):
    assert set(split_modules(planned("of_the_first", tmp_path).best)) == {"", "embedding"}
