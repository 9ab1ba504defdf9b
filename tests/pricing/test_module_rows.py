"""What is split over tp, and why the rest stays whole."""

from pathlib import Path

import planner

MODEL = """
import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4096, 16384), nn.Linear(16384, 4096)
        self.scale = nn.Parameter(torch.ones(4096, 4096))
        self.odd = nn.Linear(4096, 4095)
        self.back = nn.Linear(4095, 4096)

    def forward(self, x):
        return x @ self.scale + self.down(functional.gelu(self.up(x))) + self.back(self.odd(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50257, 4096)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4096, 50257)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


build_model = Model


def example_batch(microbatch_size, seq_len=1024):
    tokens = torch.randint(0, 50257, (microbatch_size, seq_len + 1))
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(output, targets):
    return functional.cross_entropy(output.flatten(0, 1), targets.flatten())
"""


def test_each_matrix_is_split_or_whole_with_a_reason(tmp_path):
    model: Path = tmp_path / "model.py"
    model.write_text(MODEL)
    request = {"gpus": 2, "global_batch_size": 2}
    result = planner.estimate(str(model), fix={"tp": 2, "microbatch_size": 2}, **request)
    rows = {row.module: row for row in result.record.module_rows}
    assert rows["up"].how == "column"
    assert rows["down"].how == "row"
    assert rows["up"].units == ("blocks.0", "blocks.1")
    assert rows["embed"].how == "whole"
    assert rows["embed"].reason == "50257 rows do not divide over 2 ranks"
    assert rows[""].reason == "it works as no nn.Linear or nn.Embedding does"
    assert all(bool(row.reason) == (row.how == "whole") for row in rows.values())
    assert '"tensor_parallel_modules"' in result.to_json()
    alone = planner.estimate(str(model), fix={"dp_shard": 2}, **request)
    assert alone.record.module_rows == ()


def test_where_ranks_share_experts_a_router_is_whole_on_a_part():
    model = Path(__file__).parents[1] / "run" / "routed_attention.py"
    fix = {"tp": 2, "ep": 2, "sequence_parallel": True, "microbatch_size": 2}
    result = planner.estimate(str(model), gpus=2, global_batch_size=2, fix=fix)
    rows = {row.module: row for row in result.record.module_rows}
    assert (rows["ffn.experts"].how, rows["ffn.experts"].reason) == ("experts", "")
    assert rows["ffn.gate"].how == "whole"
    assert rows["ffn.gate"].reason == "it is small, and runs on a part of the sequence"
