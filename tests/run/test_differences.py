"""What tests of scripts compare with: no number that is none passes for equal."""

from math import inf, nan

import pytest
import torch
from launch import largest_difference, largest_weight_difference


def test_differences_are_relative():
    assert largest_difference([1.0, 2.2, 4.0], [1.0, 2.0, 4.0]) == pytest.approx(0.1)
    weights = {"a": torch.tensor([1.0, 4.0]), "b": torch.tensor([[0.5]]), "c": torch.empty(0)}
    changed = {**weights, "a": torch.tensor([1.2, 4.0])}
    assert largest_weight_difference(changed, weights) == pytest.approx(0.05)


@pytest.mark.parametrize("other", [nan, inf])
def test_what_is_no_number_differs_wherever_it_stands(other):
    for found in ([other, 2.0], [2.0, other]):
        assert largest_difference(found, [2.0, 2.0]) == inf
        assert largest_difference([2.0, 2.0], found) > 0.5
        weights = {name: torch.tensor([each]) for name, each in zip("ab", found, strict=True)}
        whole = {name: torch.tensor([2.0]) for name in "ab"}
        assert largest_weight_difference(weights, whole) == inf
