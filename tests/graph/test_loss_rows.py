"""Which ends of models work on rows alone, and why others do not."""

import pytest
import torch
from graph_models import wrap
from torch import nn
from torch.nn import functional

from planner.graph.analysis.loss_rows import LossRows, loss_rows
from planner.graph.operator_graph import Phase
from planner.graph.trace import trace_model

CLASSES, FEATURES = 40, 8


class Net(nn.Module):
    """Ids of (batch, sequence) to logits, by a head that is asked for."""

    def __init__(self, *, bias=False, after=lambda y: y, tied=False, direct=False):
        super().__init__()
        self.table = nn.Embedding(CLASSES, FEATURES)
        self.inner = nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES, bias=bias)
        self.after, self.direct = after, direct
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids):
        x = self.inner(self.table(ids)).tanh()
        y = functional.linear(x, self.table.weight) if self.direct else self.head(x)
        return self.after(y)


def loss_of(logits, targets, **options):
    return functional.cross_entropy(logits.reshape(-1, CLASSES), targets.reshape(-1), **options)


def ids(size):
    return torch.zeros(size, 6, dtype=torch.int64), torch.zeros(size, 6, dtype=torch.int64)


def trace(net, loss):
    return trace_model(wrap(lambda: net, ids, loss), microbatch_size=2, dtype="float32")


def found(loss=loss_of, **options):
    return loss_rows(trace(Net(**options), loss))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": True},
        {"tied": True},
        {"after": lambda y: torch.tanh(y / 30.0) * 30.0},
        {"loss": lambda y, t: loss_of(y, t, reduction="sum")},
        {"loss": lambda y, t: loss_of(y.contiguous(), t, ignore_index=3)},
    ],
)
def test_an_end_of_rows_is_found(options):
    rows = found(**options)
    assert isinstance(rows, LossRows)
    assert rows.module == "head"
    assert (rows.rows % 6, rows.classes) == (0, CLASSES)


def test_it_is_all_between_the_product_and_the_loss():
    graph = trace(Net(bias=True), loss_of)
    rows = loss_rows(graph)
    forward = [graph.nodes[op].name for op in rows.forward_ops]
    assert forward[0] == "addmm"
    assert forward[-2:] == ["_log_softmax", "nll_loss_forward"]
    products = [op for op in rows.backward_ops if graph.nodes[op].name == "mm"]
    assert len(products) == 2
    assert all(graph.nodes[op].phase is Phase.BACKWARD for op in rows.backward_ops)
    assert sum(graph.nodes[op].flop for op in (rows.forward_ops[0], *products)) == (
        3 * 2 * rows.rows * CLASSES * FEATURES
    )


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"loss": lambda y, t: y.sum()}, "no cross-entropies"),
        ({"loss": lambda y, t: loss_of(y, t) + loss_of(y * 2, t)}, "2 cross-entropies"),
        ({"loss": lambda y, t: loss_of(y, t) + y.square().mean()}, "read by other ops"),
        ({"loss": lambda y, t: loss_of(y, t, label_smoothing=0.1)}, "read by other ops"),
        ({"loss": lambda y, t: loss_of(y, t, weight=torch.ones(CLASSES))}, "weighs its classes"),
        (
            {"loss": lambda y, t: loss_of(y, t, reduction="none").mean()},
            "not reduced to a mean or a sum",
        ),
        ({"loss": lambda y, t: loss_of(y[:, :-1], t[:, 1:])}, "works on more than a row"),
        ({"loss": lambda y, t: loss_of(y.transpose(0, 1), t)}, "works on more than a row"),
        ({"after": lambda y: y.softmax(1)}, "works on more than a row"),
        ({"after": lambda y: y + y.mean(1, keepdim=True)}, "works on more than a row"),
        ({"after": lambda y: y.mul_(2.0)}, "works on more than a row"),
        ({"direct": True}, "no torch.nn.Linear of the model's own"),
    ],
)
def test_another_end_is_refused_with_the_reason(options, reason):
    refused = found(**options)
    assert isinstance(refused, str)
    assert reason in refused
