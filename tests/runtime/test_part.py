"""Parameters are sharded where FSDP2 does more than copy them, and tied ones stay tied."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode

from planner.checking.fake_world import fake_group
from planner.runtime.first_weights import build_deferred
from planner.runtime.model import UserModel, build_model, cast_parameters
from planner.runtime.part import Part, shard_parameters, split_dim

TIED = """
from torch import nn


def build_model():
    model = nn.Sequential(nn.Embedding(512, 256), nn.Linear(256, 512, bias=False))
    model[1].weight = model[0].weight
    return model
"""

ORTHOGONAL = """
from torch import nn


def build_model():
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512))
    for layer in model:
        nn.init.orthogonal_(layer.weight)
    return model
"""


@pytest.mark.parametrize(
    ("ranks", "dtype", "is_sharded"),
    [
        (1, torch.float32, False),
        (1, torch.float64, False),
        (1, torch.bfloat16, True),
        (2, torch.float32, True),
    ],
)
def test_one_rank_keeps_parameters_that_are_not_cast_as_they_are(ranks, dtype, is_sharded):
    user = UserModel(module="types", factory="none")
    masters = torch.float64 if dtype is torch.float64 else torch.float32
    part = Part(nn.Sequential(nn.Linear(4, 4)).to(masters), user, blocks=["0"])
    before = list(part.parameters())
    with fake_group(0, ranks):
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp_shard",))
        shard_parameters(part, mesh, dtype, reshard_after_forward=True)
    assert isinstance(part, FSDPModule) is is_sharded
    kept = all(a is b for a, b in zip(before, part.parameters(), strict=True))
    assert kept is not is_sharded


@pytest.mark.parametrize(
    ("dtype", "kept"), [(torch.bfloat16, torch.complex64), (torch.float64, torch.complex128)]
)
def test_complex_numbers_are_not_cast_to_real_ones(dtype, kept):
    """Rotary positions, say, which ``Module.to`` would take the half of."""
    model = nn.Linear(2, 2)
    turns = torch.polar(torch.ones(3), torch.arange(3.0))
    model.register_buffer("turns", turns)
    model.register_buffer("places", torch.arange(3))
    model.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    cast_parameters(model, dtype)
    assert model.turns.dtype is kept
    assert model.turns.to(turns.dtype).equal(turns)
    assert model.places.dtype is torch.int64
    assert model.frozen.dtype is dtype
    assert model.weight.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)


def test_tied_parameters_on_meta_stay_tied_and_get_the_weights_of_one_process(tmp_path):
    (tmp_path / "tied.py").write_text(TIED)
    user = UserModel(file=tmp_path / "tied.py", factory="build_model")
    model, weights = build_deferred(user, 3)
    part = Part(model, user, blocks=())
    assert all(parameter.is_meta for parameter in part.parameters())
    part.materialise()
    assert not part.has_weights
    weights.fill([part])
    assert part.has_weights
    assert model[0].weight is model[1].weight
    torch.testing.assert_close(model[0].weight, build_model(user, 3)[0].weight, rtol=0, atol=0)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_weights_that_are_computed_do_not_depend_on_threads(tmp_path, two_threads):
    (tmp_path / "orthogonal.py").write_text(ORTHOGONAL)
    user = UserModel(file=tmp_path / "orthogonal.py", factory="build_model")
    whole = build_model(user, 3)
    model, weights = build_deferred(user, 3)
    part = Part(model, user, blocks=())
    part.materialise()
    weights.fill([part])
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)
    expected = build_model(user, 3)
    for found in (whole, model):
        for name, weight in expected.named_parameters():
            torch.testing.assert_close(found.get_parameter(name), weight, rtol=0, atol=0)


class Seen(TorchFunctionMode):
    """Notes the dtypes that batch norm is called with."""

    def __init__(self):
        super().__init__()
        self.dtypes = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.batch_norm:
            given = (*args, *(kwargs or {}).values())
            self.dtypes.append([each.dtype for each in given if isinstance(each, torch.Tensor)])
        return func(*args, **(kwargs or {}))


def test_weights_are_in_the_dtype_of_running_statistics():
    """What GPUs ask for: they take bfloat16 inputs beside float32 statistics and weights alone."""
    norm = nn.BatchNorm1d(4)
    reference = copy.deepcopy(norm).float()
    user = SimpleNamespace(loss=lambda output, _: output.float().square().sum())
    part = Part(nn.Sequential(nn.Linear(4, 4, bias=False), norm).bfloat16(), user, blocks=())
    norm.running_mean, norm.running_var = norm.running_mean.float(), norm.running_var.float()
    part.move_to(torch.device("cpu"), torch.bfloat16)
    inputs = torch.randn(8, 4)
    with Seen() as seen:
        part(inputs=inputs, targets=inputs).backward()
    narrow, wide = torch.bfloat16, torch.float32
    # Input, running mean and variance, weight, bias.
    assert seen.dtypes == [[narrow, wide, wide, wide, wide]]
    assert norm.weight.grad.dtype is narrow
    assert norm.weight.grad.abs().sum() > 0
    assert isinstance(norm.weight, nn.Parameter)
    with torch.no_grad():
        reference(part.model[0](inputs.bfloat16()).float())
    assert torch.allclose(norm.running_mean, reference.running_mean, atol=1e-2)


@pytest.mark.parametrize(
    ("sizes", "num_shards", "dim"),
    [
        ((4096, 64), 8, 0),
        ((50257, 768), 8, 0),  # seven rows more are nothing
        ((1, 1024, 768), 64, 1),
        ((1, 1025, 768), 64, 2),
        ((3, 7), 4, 0),  # ranks divide none
        ((3,), 4, 0),
        ((), 4, 0),
        ((96, 128), 64, 1),
        ((96, 128), 1, 0),
    ],
)
def test_dims_are_split_that_hold_together_about_what_they_hold_whole(sizes, num_shards, dim):
    assert split_dim(torch.empty(sizes, device="meta"), num_shards).dim == dim
