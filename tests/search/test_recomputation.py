"""Which recomputations the search may choose from."""

from dataclasses import replace

import pytest
import torch
from searches import search_for
from torch import nn

from planner.errors import RequestError
from planner.graph.loading.load import wrap_module
from planner.graph.sizes.family import GraphFamily, trace_family
from planner.hardware.profiles import load_cluster


class Overwriting(nn.Module):
    """Each block may change the output of its first product in place; then come cheap ops."""

    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(2048, 8192),
                nn.ReLU(inplace=in_place),
                *[nn.GELU() for _ in range(3)],
                nn.Linear(8192, 2048),
            )
            for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def family(*, in_place: bool) -> GraphFamily:
    model = wrap_module(
        lambda: Overwriting(in_place=in_place),
        example_batch=lambda size: (torch.zeros(size, 4096, 2048), torch.zeros(size)),
        loss_fn=lambda output, _: output.sum(),
    )
    return trace_family(model, dtype="bfloat16")


def chosen(graphs: GraphFamily) -> set[str]:
    """Recomputations of the best plans on devices of less and less memory."""
    cluster = load_cluster("h100-sxm", gpus=2)
    found = set()
    for memory_gib in (60, 40, 30, 20):
        device = replace(cluster.device, memory_bytes=memory_gib * 2**30)
        smaller = replace(cluster, device=device)
        plan = search_for(graphs, smaller, batch=32, microbatch_size=16, tp=1, pp=1).best
        found |= {kind for stage in plan.stages for kind in stage.activation_checkpointing}
    return found


def test_selective_is_never_chosen_where_it_would_fail():
    assert chosen(family(in_place=False)) == {"none", "selective"}
    assert chosen(family(in_place=True)) == {"none", "full"}


def test_selective_is_refused_where_it_is_asked_for():
    cluster = load_cluster("h100-sxm", gpus=2)
    with pytest.raises(RequestError, match=r"relu_ in blocks\.0 changes in place what"):
        search_for(family(in_place=True), cluster, activation_checkpointing="selective")
