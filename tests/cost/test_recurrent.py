"""Recurrent layers cost their FLOPs, one step after the other."""

import pytest
import torch
from torch import nn

from planner.cost.op import op_s
from planner.cost.work import Shares, backward_work, forward_work
from planner.graph.loading.load import wrap_module
from planner.graph.operator_graph import Phase
from planner.graph.sizes.family import trace_family
from planner.hardware.profiles import load_cluster

DEVICE = load_cluster("h100-sxm", gpus=1).device
WIDTH, STEPS, BATCH = 1024, 512, 16


class Tagger(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embedding = nn.Embedding(1000, WIDTH)
        self.recurrent = kind(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, 1000)

    def forward(self, ids):
        return self.head(self.recurrent(self.embedding(ids))[0])


def example_batch(size):
    ids = torch.zeros(size, STEPS, dtype=torch.long)
    return ids, ids


def loss(output, targets):
    return nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten())


WHOLE = Shares()


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3)])
def test_a_recurrent_layer_takes_its_flop_and_a_step_at_a_time(kind, gates):
    model = wrap_module(
        lambda: Tagger(kind), example_batch=example_batch, loss_fn=loss, seq_len=None
    )
    graph = trace_family(model, dtype="bfloat16").at(BATCH)
    ops = [op for op in graph.nodes if op.name.startswith("_fused_rnn")]
    assert {op.phase for op in ops} == {Phase.FORWARD, Phase.BACKWARD}
    (forward,) = (op for op in ops if op.phase is Phase.FORWARD)
    for op in ops:
        work = (
            forward_work(graph, op, WHOLE)
            if op is forward
            else backward_work(graph, op, forward, WHOLE)
        )
        assert work.kind == "matmul"
        assert (work.m, work.n, work.k) == (BATCH, gates * WIDTH, WIDTH)
        seconds = op_s(work, DEVICE, "bfloat16")
        assert seconds > work.flop / DEVICE.peak_flop_per_s["bfloat16"]
        # A step of 16 rows leaves most of a tile idle.
        assert seconds > 3 * work.flop / (
            DEVICE.peak_flop_per_s["bfloat16"] * DEVICE.efficiency.sustained_fraction
        )
