"""Remembered results of meta kernels: the recorded step must not depend on them."""

import graph_models
import pytest
import torch
from torch import nn

from planner.graph.loading.load import wrap_module
from planner.graph.recording.meta_results import MetaResults
from planner.graph.trace import record_step

aten = torch.ops.aten


def meta(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("name", ["gpt.py", "llama.py"])
def test_a_step_is_recorded_alike_with_and_without_memory(monkeypatch, name):
    model = graph_models.example(name)
    remembered = record_step(model, microbatch_size=2, dtype="bfloat16")
    monkeypatch.setattr(MetaResults, "run", lambda _, func, args, kwargs: func(*args, **kwargs))
    assert record_step(model, microbatch_size=2, dtype="bfloat16") == remembered


class Convolutions(nn.Module):
    """Channels-last tensors: results whose strides are not those of a fresh tensor."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            *[nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)) for _ in range(3)]
        )

    def forward(self, x):
        x = x.to(memory_format=torch.channels_last)
        return (self.layers(x) + x).relu().mean()


def test_strides_are_remembered(monkeypatch):
    model = wrap_module(Convolutions(), example_batch=lambda b: (torch.randn(b, 4, 8, 8), None))
    remembered = record_step(model, microbatch_size=2, dtype="bfloat16")
    monkeypatch.setattr(MetaResults, "run", lambda _, func, args, kwargs: func(*args, **kwargs))
    assert record_step(model, microbatch_size=2, dtype="bfloat16") == remembered


def test_an_equal_call_gives_new_memory_of_the_same_form():
    results = MetaResults()
    left, right = meta(4, 6).t(), meta(6, 4)
    first = results.run(aten.add.Tensor, (left, right), {})
    second = results.run(aten.add.Tensor, (left, right), {})
    assert second.untyped_storage()._cdata != first.untyped_storage()._cdata
    assert (second.shape, second.stride(), second.dtype) == (
        first.shape,
        first.stride(),
        first.dtype,
    )


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((meta(2, 3), 1), (meta(2, 3), 1.0)),
        ((meta(2, 3), True), (meta(2, 3), 1)),
        ((meta(2, 3, dtype=torch.int64), 1), (meta(2, 3), 1)),
        ((meta(2, 3), meta(3)), (meta(2, 3), meta(2, 1))),
    ],
)
def test_calls_that_differ_in_type_or_shape_are_not_confused(first, second):
    results = MetaResults()
    results.run(aten.mul.Tensor, first, {})
    fresh = aten.mul.Tensor(*second)
    remembered = results.run(aten.mul.Tensor, second, {})
    assert (remembered.shape, remembered.dtype) == (fresh.shape, fresh.dtype)


def test_results_of_several_tensors_and_of_shared_memory():
    results = MetaResults()
    arguments = (meta(4, 8), [8], None, None, 1e-5)
    for _ in range(2):
        made = results.run(aten.native_layer_norm.default, arguments, {})
        assert [tuple(each.shape) for each in made] == [(4, 8), (4, 1), (4, 1)]
    source = meta(3, 3)
    for _ in range(2):
        kept = results.run(aten.lift_fresh.default, (source,), {})
        assert kept.untyped_storage()._cdata == source.untyped_storage()._cdata
