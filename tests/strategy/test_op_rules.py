"""An op on shards, run by torch, gives the shard of the op on whole tensors."""

import pytest
import torch
from test_layout import local
from torch.nn.functional import gelu

from planner.graph.operator_graph import (
    OperatorGraph,
    OpNode,
    Phase,
    Storage,
    StorageKind,
    TensorValue,
)
from planner.strategy.layout import can_shard, shard
from planner.strategy.op_rules import output_layouts

TP = 2
CASES = {
    "transpose": (lambda x: x.transpose(1, 2), [(2, 4, 6, 8)], (None, 1, 2)),
    "t": (lambda x: x.t(), [(4, 6)], (None,)),
    "permute": (lambda x: x.permute(0, 2, 1, 3), [(2, 4, 6, 8)], (None, (0, 2, 1, 3))),
    "unbind": (lambda x: x.unbind(1), [(2, 3, 4)], (None, 1)),
    "select": (lambda x: x.select(1, 0), [(2, 3, 4)], (None, 1, 0)),
    "split": (lambda x: x.split(4, 2), [(2, 6, 8)], (None, 4, 2)),
    "cat": (lambda x, y: torch.cat([x, y], 1), [(2, 4, 6)] * 2, (None, 1)),
    "stack": (lambda x, y: torch.stack([x, y], -1), [(2, 4, 6)] * 2, (None, -1)),
    "stack ": (lambda x, y: torch.stack([x, y], 1), [(2, 4, 6)] * 2, (None, 1)),
    "mean": (lambda x: x.mean((-1,)), [(2, 4, 6)], (None, (-1,))),
    "sum": (lambda x: x.sum((1,), keepdim=True), [(2, 4, 6)], (None, (1,), True)),
    "_softmax": (lambda x: x.softmax(-1), [(2, 4, 6)], (None, -1, False)),
    "gelu": (gelu, [(2, 4, 6)], (None,)),
    "mul": (torch.mul, [(2, 4, 6)] * 2, (None, None)),
}


def op_of(name, inputs, outputs, arguments):
    shapes = [tuple(tensor.shape) for tensor in (*inputs, *outputs)]
    storage = Storage(id=0, size_bytes=0, kind=StorageKind.ACTIVATION)
    values = tuple(
        TensorValue(id=i, storage=0, shape=shape, dtype="float64", requires_grad=True)
        for i, shape in enumerate(shapes)
    )
    is_view = name in ("transpose", "t", "permute", "unbind", "select", "split")
    op = OpNode(
        id=0, name=name, module="", phase=Phase.FORWARD, is_view=is_view,
        inputs=tuple(range(len(inputs))), outputs=tuple(range(len(inputs), len(shapes))),
        arguments=arguments, keyword_arguments=(), flop=0, read_bytes=0, write_bytes=0,
        forward_op=None, saved_inputs=(), saved_outputs=(),
    )  # fmt: skip
    graph = OperatorGraph(
        microbatch_size=1, tokens_per_sample=1, storages=(storage,), values=values, nodes=(op,),
        parameters=(), units=(), is_chain=False, cuts=(),
    )  # fmt: skip
    return graph, op


@pytest.mark.parametrize("case", CASES)
def test_rules_agree_with_torch(case):
    run, shapes, arguments = CASES[case]
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    whole = run(*inputs)
    outputs = whole if isinstance(whole, tuple) else (whole,)
    graph, op = op_of(case.strip(), inputs, outputs, arguments)
    accepted = 0
    for dim in range(len(shapes[0])):
        layout = shard(dim)
        if not can_shard(shapes[0], layout, TP):
            continue
        found = output_layouts(graph, op, [layout] * len(inputs), TP)
        if found is None:
            continue
        accepted += 1
        for rank in range(TP):
            parts = run(*(local(tensor, layout, rank, TP) for tensor in inputs))
            parts = parts if isinstance(parts, tuple) else (parts,)
            for part, output, target in zip(parts, outputs, found, strict=True):
                torch.testing.assert_close(part, local(output, target, rank, TP))
    assert accepted


@pytest.mark.parametrize(
    ("case", "dim"),
    [("cat", 1), ("mean", 2), ("sum", 1), ("_softmax", 2), ("split", 2)],
)
def test_what_would_mix_shards_is_refused(case, dim):
    run, shapes, arguments = CASES[case]
    inputs = [torch.randn(shape) for shape in shapes]
    whole = run(*inputs)
    outputs = whole if isinstance(whole, tuple) else (whole,)
    graph, op = op_of(case, inputs, outputs, arguments)
    assert output_layouts(graph, op, [shard(dim)] * len(inputs), TP) is None
