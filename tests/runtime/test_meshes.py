"""What torch has no public name for: many tensors multiplied or copied together."""

import torch
from torch.profiler import ProfilerActivity, profile

from planner.runtime.meshes import copy_all, scale_all

COUNT = 5


def calls(function):
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        function()
    return [event.key for event in seen.key_averages()]


def test_tensors_of_a_dtype_are_scaled_together():
    single = [torch.full((3,), float(i)) for i in range(COUNT)]
    double = [torch.full((2, 2), float(i), dtype=torch.float64) for i in range(COUNT)]
    both = [each for pair in zip(single, double, strict=True) for each in pair]
    names = calls(lambda: scale_all(both, torch.tensor(0.5, dtype=torch.float64)))
    assert [name for name in names if "foreach" in name] == ["aten::_foreach_mul_"]
    for i, (one, other) in enumerate(zip(single, double, strict=True)):
        assert torch.equal(one, torch.full((3,), i / 2))
        assert torch.equal(other, torch.full((2, 2), i / 2, dtype=torch.float64))
    assert {each.dtype for each in both} == {torch.float32, torch.float64}


def test_tensors_are_copied_together():
    targets, sources = ([torch.full((3,), i) for i in many] for many in ([0] * 3, [1, 2, 3]))
    names = calls(lambda: copy_all(targets, sources))
    assert "aten::_foreach_copy_" in names
    assert all(torch.equal(a, b) for a, b in zip(targets, sources, strict=True))
