"""Tensors without data: what is seen of them, and what is answered."""

import gc
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from planner.checking.fake_world import FakeWorld
from planner.checking.watch import LiveBytes, Watch
from planner.runtime.known_data import DataRead, PlannedReads

MIB = 2**20


def test_the_peak_of_live_tensors_by_component():
    world, live = FakeWorld(), LiveBytes()
    with world.entered(), Watch(live):
        kept = torch.zeros(MIB, dtype=torch.uint8)
        live.restart(lambda: {"kept": [kept]})
        first = torch.ones(2 * MIB, dtype=torch.uint8)
        view = first.view(2, -1)
        del first
        second = view + 1
        del view, second
        gc.collect()
    assert live.peak_bytes == 5 * MIB
    assert live.now_bytes == MIB
    assert live.at_peak == {"kept": MIB, "activations": 4 * MIB}


def test_attention_runs_as_the_kernel_of_a_gpu():
    world, live = FakeWorld(), LiveBytes()
    with world.entered(), Watch(live):
        query = torch.zeros(1, 2, 4096, 64, dtype=torch.bfloat16, requires_grad=True)
        live.restart(dict)
        functional.scaled_dot_product_attention(query, query, query, dropout_p=0.1).sum().backward()
    assert live.peak_bytes < 16 * MIB  # scores alone are 64 MiB


def test_what_a_line_reads_of_data_is_answered_as_planned():
    world = FakeWorld()
    on_host = world.on_host(torch.ones(8, dtype=torch.bool))
    place = Path(__file__).name, sys._getframe().f_lineno + 3
    with world.entered(), PlannedReads([DataRead(*place, ((3.0, 2),))]):
        mask = world.moved(on_host, torch.device("cpu"))
        rows, other = torch.where(mask)[0], mask.nonzero()
        assert (rows.shape, other.shape, rows.device.type) == ((3,), (3, 1), "cpu")
        with pytest.raises(RuntimeError):
            mask.nonzero()
