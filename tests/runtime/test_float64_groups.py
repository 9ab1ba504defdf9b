"""Products of groups of rows in float64, beside those of torch's kernel and of plain products."""

import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import grouped_mm

from planner.runtime.float64_groups import allow_float64_groups


@pytest.fixture(autouse=True, scope="module")
def allowed():
    allow_float64_groups()


@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4), behind=st.integers(0, 2))
def test_groups_and_their_gradients_are_those_of_plain_products(sizes, behind):
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    torch.manual_seed(0)
    rows = torch.randn(sum(sizes) + behind, 4, dtype=torch.float64, requires_grad=True)
    experts = torch.randn(len(sizes), 4, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(len(rows), 3, dtype=torch.float64)

    found = grouped_mm(rows, experts, offs=ends)[: sum(sizes)]
    spans = pairwise([0, *ends.tolist()])
    expected = torch.cat([rows[a:b] @ own for (a, b), own in zip(spans, experts, strict=True)])
    torch.testing.assert_close(found, expected)

    def gradients(product):
        return torch.autograd.grad((product * weights[: len(product)]).sum(), (rows, experts))

    torch.testing.assert_close(gradients(found), gradients(expected))


@pytest.mark.parametrize("dims", [(2, 3), (3, 2), (2, 2), (3, 3)])
def test_all_forms_are_those_of_torch_in_float32(dims):
    """Integers, so that both dtypes have the same sums."""
    generator = torch.Generator().manual_seed(0)

    def matrix(num_dims, shape):
        return torch.randint(-4, 5, shape[-num_dims:], generator=generator).float()

    left, right = matrix(dims[0], (2, 8, 8)), matrix(dims[1], (2, 8, 8))
    offs = None if dims == (3, 3) else torch.tensor([4, 8], dtype=torch.int32)
    expected = grouped_mm(left, right, offs=offs)
    found = grouped_mm(left.double(), right.double(), offs=offs)
    assert found.dtype is torch.float64
    torch.testing.assert_close(found, expected.double(), rtol=0, atol=0)


def test_nothing_is_said_where_several_scripts_give_it():
    """torch warns of a kernel that takes another's place."""
    call = "from planner.runtime import float64_groups as f; allow = f.allow_float64_groups"
    call += "; first = allow(); allow.cache_clear(); second = allow()"
    done = subprocess.run([sys.executable, "-c", call], capture_output=True, text=True, check=True)
    assert done.stderr == ""
