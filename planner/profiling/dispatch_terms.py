"""What the host takes more for the ops of a block that runs again, or that is split over ranks.

torch looks at each op of such a block in Python: its checkpoints at every tensor that they keep,
selective ones at every op, split tensors at every op on parts. A GPU computes meanwhile; a CPU does
not, and takes several times as long for a small op. A block is timed as it is and in each of these
ways, by what the rank's own thread runs.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from planner.profiling.clock import Spread
from planner.profiling.host_model import loss_fn, transformer
from planner.profiling.host_terms import TOKENS, own_times
from planner.profiling.kernels import Call, Capture, described, tensors_in
from planner.runtime.model import UserModel
from planner.runtime.module_edge import ModuleSharding
from planner.runtime.recompute import SAVED_OPS, recompute_activations
from planner.runtime.split_part import SplitPart
from planner.runtime.split_tensor import SplitTensor
from planner.runtime.tensor_parallel import TensorParallel
from planner.vocabulary import Axis, Recomputation

BLOCKS = 4
ROUNDS = 9
HEAD_DIM = 8

SPLIT, SPLIT_LONGER = "split", "split, with more ops"
MORE_OPS = 10
"""Of each block that has more: what one of them takes is told by the difference, and what the ends
of split modules take by the rest."""

_INNER = "Shard(-1)"
_SHARDINGS = (
    ModuleSharding(
        "qkv", "column", split=(("weight", 0, 3), ("bias", 0, 3)), output_layout="Shard(-1/3)"
    ),
    ModuleSharding("out", "row", split=(("weight", 1, 1),), input_layout=_INNER),
    ModuleSharding(
        "wide", "column", split=(("weight", 0, 1), ("bias", 0, 1)), output_layout=_INNER
    ),
    ModuleSharding("narrow", "row", split=(("weight", 1, 1),), input_layout=_INNER),
)
"""Attention by heads and a feed-forward by columns and rows (Shoeybi et al. 2019, 1909.08053)."""

COLLECTIVES = 4 * BLOCKS
"""Of a split pass forward and backward: the output of each row and the input of each column."""


def time_dispatch(group: dist.ProcessGroup | None, device: torch.device) -> dict[str, Spread]:
    """Time forward and backward of blocks: as they are, recomputed, and split over a group."""
    heads = _heads(group)
    steps = {
        Recomputation.NONE.value: _step(_part(heads), heads, device),
        Recomputation.FULL.value: _step(_again(heads, Recomputation.FULL), heads, device),
        Recomputation.SELECTIVE.value: _step(_again(heads, Recomputation.SELECTIVE), heads, device),
    }
    if group is not None:
        for way, more_ops in ((SPLIT, 0), (SPLIT_LONGER, MORE_OPS)):
            steps[way] = _step(_split(group, device, more_ops), heads, device)
    return dict(zip(steps, own_times(list(steps.values()), ROUNDS), strict=True))


def dispatched_ops(group: dist.ProcessGroup | None, device: torch.device) -> Mapping[str, Any]:
    """The ops of these blocks that torch looks at.

    Returns:
        Those of the forward pass, those that selective checkpoints run again, and how many run on
        parts where a group splits the blocks, forward and backward, by way.
    """
    heads = _heads(group)
    model, x = transformer(BLOCKS, _width(heads), heads), _batch(heads)
    with Capture() as ahead:
        loss_fn(model(x), x)
    again = [call for call in ahead.calls if call.op not in SAVED_OPS]
    return {
        "forward": _rows(ahead.calls),
        "again": _rows(again),
        "num_split": {}
        if group is None
        else {
            SPLIT: _num_split(group, device, 0),
            SPLIT_LONGER: _num_split(group, device, MORE_OPS),
        },
    }


def _num_split(group: dist.ProcessGroup, device: torch.device, more_ops: int) -> int:
    step = _step(_split(group, device, more_ops), _heads(group), device)
    with Capture() as captured:
        step()
    operands = (tensors_in((call.args, call.kwargs)) for call in captured.calls)
    return sum(any(isinstance(each, SplitTensor) for each in given) for given in operands)


def _heads(group: dist.ProcessGroup | None) -> int:
    """Heads of blocks that a group can split."""
    return 2 if group is None else group.size()


def _rows(calls: Iterable[Call]) -> list[dict[str, Any]]:
    return [asdict(described(call)) for call in calls]


def _width(heads: int) -> int:
    return 2 * HEAD_DIM * heads


def _batch(heads: int) -> Tensor:
    return torch.randn(1, TOKENS, _width(heads))


def _part(heads: int, more_ops: int = 0) -> SplitPart:
    user = UserModel(factory="transformer", functions={"loss_fn": loss_fn}, module=__name__)
    model = transformer(BLOCKS, _width(heads), heads, more_ops)
    return SplitPart(model, user, blocks=[str(index) for index in range(BLOCKS)])


def _again(heads: int, kind: Recomputation) -> SplitPart:
    part = _part(heads)
    recompute_activations(part, [kind.value] * BLOCKS)
    return part


def _split(group: dist.ProcessGroup, device: torch.device, more_ops: int) -> SplitPart:
    mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=(Axis.TP,))
    part = _part(_heads(group), more_ops)
    TensorParallel.over(part, mesh, None).apply([(range(BLOCKS), _SHARDINGS)], ())
    return part


def _step(part: SplitPart, heads: int, device: torch.device) -> Callable[[], object]:
    part.model.to(device)
    x = _batch(heads).to(device)
    return lambda: torch.autograd.backward(part(inputs=x, targets=x))
