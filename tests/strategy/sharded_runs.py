"""Runs ops on shards, as the ranks would, and compares with the op on whole tensors.

A *program* is a call of one ATen op, or of a function that users call. It is recorded on the meta
device by the recorder that plans use, so that the rules see of it what they see in planning; then
it runs on real shards in one process, forward and backward.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from test_layout import local
from torch import Tensor, nn

from planner.graph.loading.batch import Batch
from planner.graph.operator_graph import OperatorGraph, OpNode, StorageKind
from planner.graph.recording.kernels import fused_kernels
from planner.graph.recording.raw_op import tensors_in
from planner.graph.recording.recorder import Recorder
from planner.graph.torch_private import TorchDispatchMode, tree_map_only
from planner.graph.trace import freeze
from planner.runtime.layout import (
    PARTIAL,
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    Layout,
    can_shard,
    shard,
)
from planner.runtime.split_ops import run_split
from planner.runtime.split_tensor import Ranks, SplitTensor, layout_of
from planner.runtime.unread import SplitError, refuse_unread
from planner.strategy.propagation import output_layouts

assert SplitTensor.run is run_split  # as scripts have it

DEGREES = (2, 3, 5)
"""torch's samples have dims of 3, 5 and 10."""
MOST_RUNS = 10
"""Assignments of layouts that are run for one program; those of one rule are much alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Something to run on whole tensors and on shards."""

    name: str
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    recorded: Callable[..., Any] | None = None
    """What is recorded in its place: a kernel that this machine cannot run."""
    is_op: bool = True
    """One ATen op, whose sizes are adapted to shards as a DTensor does."""

    @property
    def tensors(self) -> list[Tensor]:
        return tensors_in((*self.args, *self.kwargs.values()), [])


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What the rules see of a program."""

    graph: OperatorGraph
    ops: tuple[OpNode, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Layouts that the rules allow."""

    tp: int
    inputs: tuple[Layout | None, ...]
    outputs: tuple[Layout | None, ...]


class AtenCalls(TorchDispatchMode):
    """Collects the ATen ops of what runs inside, with the tensors as they were before."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = tree_map_only(Tensor, lambda each: each.detach().clone(), (args, kwargs or {}))
        self.calls.append((func, *before))
        return func(*args, **(kwargs or {}))


# Recording -----------------------------------------------------------------------------------


def gradient_flows(tensors: Sequence[Tensor]) -> list[list[bool]]:
    """Say to which tensors a gradient flows: all of floating point, or the first of these."""
    floats = [each.is_floating_point() or each.is_complex() for each in tensors]
    first = [is_float and not any(floats[:i]) for i, is_float in enumerate(floats)]
    return [floats] if first == floats else [floats, first]


def record(program: Program, wants_grad: Sequence[bool]) -> Recorded:
    """Record a program on the meta device."""
    recorder = Recorder(nn.Module())
    leaves = [
        torch.empty_like(each, device="meta").requires_grad_(wanted)
        for each, wanted in zip(program.tensors, wants_grad, strict=True)
    ]
    copies = [leaf.clone() for leaf in leaves]
    inputs = tuple(
        recorder.table.register(each, StorageKind.INPUT, f"input{i}")
        for i, each in enumerate(copies)
    )
    with fused_kernels(), recorder:
        made = call(program.recorded or program.run, program, copies)
    outputs = tuple(recorder.table.read(each, keep=True) for each in tensors_in((made,), []))
    frozen = freeze(recorder, nn.Module(), Batch(args=(), kwargs={}, targets=None), 1)
    graph = OperatorGraph(
        microbatch_size=1, tokens_per_sample=1, storages=frozen.storages, values=frozen.values,
        nodes=frozen.ops, parameters=(), units=(), is_chain=False, cuts=(),
    )  # fmt: skip
    return Recorded(graph=graph, ops=frozen.ops, inputs=inputs, outputs=outputs)


def call(run: Callable[..., Any], program: Program, tensors: Sequence[Tensor]) -> Any:
    """Call with the program's arguments, its tensors replaced in order."""
    replacement = iter(tensors)
    args, kwargs = tree_map_only(
        Tensor, lambda _: next(replacement), (program.args, program.kwargs)
    )
    return run(*args, **kwargs)


# Layouts -------------------------------------------------------------------------------------


def shards_of(shape: Sequence[int], tp: int) -> list[Layout]:
    """Return every shard of a shape, those side by side included."""
    found = [shard(dim, outer) for dim in range(len(shape)) for outer in (1, 2, 3)]
    return [each for each in found if shape[each.dim] and can_shard(tuple(shape), each, tp)]


def input_layouts(shapes: Sequence[Sequence[int]], tp: int) -> Iterator[tuple[Layout | None, ...]]:
    """Go through layouts of the inputs, at least one of them a shard.

    All of them for one or two tensors; for more, each shard of one beside constants, whole
    tensors, shards of the same dim and shards of the dim that it is broadcast along.
    """
    options = [[None, REPLICATE, *shards_of(shape, tp)] for shape in shapes]
    if len(shapes) <= 2:
        for found in itertools.product(*options):
            if any(each is not None and each.is_shard for each in found):
                yield found
        return
    seen = set()
    for lead, shape in enumerate(shapes):
        for layout in shards_of(shape, tp):
            beside = [
                [layout] if i == lead else _beside(layout, len(shape), len(other), choices)
                for i, (other, choices) in enumerate(zip(shapes, options, strict=True))
            ]
            for found in itertools.islice(itertools.product(*beside), 256):
                if found not in seen:
                    seen.add(found)
                    yield found


def _beside(layout: Layout, ndim: int, other_ndim: int, choices: list[Layout | None]) -> list[Any]:
    moved = layout.dim + other_ndim - ndim
    wanted = [layout, shard(moved, layout.outer)] if moved >= 0 else [layout]
    return [each for each in dict.fromkeys([*wanted, None, REPLICATE]) if each in choices]


def propagate(
    recorded: Recorded, inputs: Sequence[Layout | None], tp: int, *, is_op: bool
) -> tuple[Layout | None, ...] | None:
    """Follow layouts through the program, as a region's strategies do; None where it is refused."""
    layouts: dict[int, Layout | None] = dict(zip(recorded.inputs, inputs, strict=True))
    for op in recorded.ops:
        known = [layouts.get(value) for value in op.inputs]
        found = output_layouts(recorded.graph, op, known, tp)
        if found is None:
            return None
        layouts.update(zip(op.outputs, found, strict=True))
    return tuple(layouts.get(value) for value in recorded.outputs)


def assignments(program: Program, recorded: Recorded) -> list[Assignment]:
    """Collect the layouts that the rules allow, where something is split."""
    shapes = [tuple(each.shape) for each in program.tensors]
    found = []
    for tp in DEGREES:
        for inputs in input_layouts(shapes, tp):
            outputs = propagate(recorded, inputs, tp, is_op=program.is_op)
            if outputs and any(each is not None and each.is_shard for each in outputs):
                found.append(Assignment(tp=tp, inputs=inputs, outputs=outputs))
    step = max(1, len(found) / MOST_RUNS)
    return [found[int(i * step)] for i in range(min(len(found), MOST_RUNS))]


# Running -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a run makes."""

    outputs: list[Tensor]
    gradients: list[Tensor | None]
    """One per input, None where no gradient flows to it."""


def run(
    program: Program,
    tensors: Sequence[Tensor],
    wants_grad: Sequence[bool],
    cotangents: Callable[[int, Tensor], Tensor],
) -> Result:
    """Run forward, and backward where torch can differentiate the program."""
    leaves = [
        each.detach().clone().requires_grad_(wanted)
        for each, wanted in zip(tensors, wants_grad, strict=True)
    ]
    made = tensors_in((call(program.run, program, [leaf.clone() for leaf in leaves]),), [])
    flowing = [(i, each) for i, each in enumerate(made) if each.requires_grad]
    gradients: list[Tensor | None] = [None] * len(leaves)
    asked = [i for i, wanted in enumerate(wants_grad) if wanted]
    if flowing and asked:
        grads = torch.autograd.grad(
            [each for _, each in flowing], [leaves[i] for i in asked],
            [cotangents(i, each) for i, each in flowing], allow_unused=True,
        )  # fmt: skip
        refuse_unread(grads)
        for i, grad in zip(asked, grads, strict=True):
            gradients[i] = torch.zeros_like(leaves[i]) if grad is None else grad
    return Result(outputs=[each.detach() for each in made], gradients=gradients)


def part(tensor: Tensor, layout: Layout | None, rank: int, tp: int) -> Tensor:
    """Return what a rank holds of a tensor."""
    split = layout is not None and layout.is_shard
    return local(tensor, layout, rank, tp) if split else tensor


def held(tensor: Tensor, layout: Layout | None, ranks: Ranks, *, wants_grad: bool) -> Tensor:
    """Return the tensor that a rank of the script has in the place of a whole one."""
    if layout is not None and layout.is_shard:
        return SplitTensor(part(tensor, layout, ranks.rank, ranks.size), layout, ranks)
    return SplitTensor(tensor, REPLICATE_PARTIAL_GRAD, ranks) if wants_grad else tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What running a program in the layouts that the rules allow has shown."""

    ops: frozenset[str]
    """ATen ops that it was recorded as."""
    runs: int
    """Layouts that were run, each forward, and backward where a gradient flows."""
    differences: tuple[str, ...]
    """What differs from the whole, in words."""


def check(program: Program, wants_grad: Sequence[bool]) -> Check:
    """Run a program in all layouts that the rules allow and compare with the whole.

    Args:
        program: What to run.
        wants_grad: Whether a gradient flows to each of its tensors. Those to which none flows
            may be whole beside shards.
    """
    recorded = record(program, wants_grad)
    ops = frozenset(op.name for op in recorded.ops)
    allowed = assignments(program, recorded)
    if not allowed:
        return Check(ops=ops, runs=0, differences=())
    random: dict[int, Tensor] = {}

    def whole_cotangent(i: int, output: Tensor) -> Tensor:
        random[i] = torch.randn_like(output)
        return random[i]

    whole = run(program, program.tensors, wants_grad, whole_cotangent)
    found = []
    for assignment in allowed:
        try:
            try:
                _compare(program, assignment, whole, wants_grad, random)
            except SplitError:  # in backward, as the dry run of a layout would find
                refused = replace(whole, gradients=[None] * len(wants_grad))
                _compare(program, assignment, refused, [False] * len(wants_grad), random)
        except (AssertionError, RuntimeError, IndexError, TypeError, ValueError) as error:
            first_lines = " ".join(str(error).split())[:200]
            found.append(f"{program.name}: {assignment}: {first_lines}")
    return Check(ops=ops, runs=len(allowed), differences=tuple(found))


def _compare(
    program: Program,
    assignment: Assignment,
    whole: Result,
    wants_grad: Sequence[bool],
    cotangents: dict[int, Tensor],
) -> None:
    tp = assignment.tp
    results = []
    for rank in range(tp):
        ranks = Ranks(rank=rank, size=tp, group=None)
        tensors = [
            held(each, layout, ranks, wants_grad=wanted)
            for each, layout, wanted in zip(
                program.tensors, assignment.inputs, wants_grad, strict=True
            )
        ]

        def cotangent(i: int, output: Tensor, ranks: Ranks = ranks) -> Tensor:
            if not isinstance(output, SplitTensor):
                return cotangents[i]
            layout = output.layout_over_ranks
            mine = part(cotangents[i], layout, ranks.rank, ranks.size)
            return SplitTensor(mine, layout, ranks)

        results.append(run(program, tensors, wants_grad, cotangent))
    _compare_outputs(program, assignment, whole, results)
    if _is_random(program):
        return
    for i, expected in enumerate(whole.gradients):
        parts = [each.gradients[i] for each in results]
        if expected is None:
            assert all(each is None for each in parts)
        elif layout_of(parts[0], ranks) == PARTIAL:
            total = sum(each.local for each in parts)
            torch.testing.assert_close(
                total, expected, equal_nan=True, msg=lambda m: f"summed gradient: {m}"
            )
        else:
            for rank, each in enumerate(parts):
                torch.testing.assert_close(
                    local_of(each), part(expected, layout_of(each, ranks), rank, tp),
                    equal_nan=True, msg=lambda m: f"gradient: {m}",
                )  # fmt: skip


def local_of(tensor: Tensor) -> Tensor:
    return tensor.local if isinstance(tensor, SplitTensor) else tensor


def _is_random(program: Program) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(program.run, "tags", ())


def _compare_outputs(
    program: Program, assignment: Assignment, whole: Result, results: Sequence[Result]
) -> None:
    compares_data = not _is_random(program) and "empty" not in program.name
    for rank, result in enumerate(results):
        for layout, made, expected in zip(
            assignment.outputs, result.outputs, whole.outputs, strict=True
        ):
            wanted = part(expected, layout, rank, assignment.tp)
            output = local_of(made)
            assert output.shape == wanted.shape, f"{output.shape} for {wanted.shape}"
            if compares_data:
                torch.testing.assert_close(output, wanted, equal_nan=True)
