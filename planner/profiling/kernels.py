"""Times single ATen ops as training runs them.

A case runs forward and backward once under a dispatch mode that keeps every op with its very
arguments: the kernels that torch chooses on this device, operands in their real memory layout.
Each of them is then called and timed alone. So a row is a node of the planner's operator graph,
with FLOPs and bytes counted by the planner's own formulas.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from planner.cost.work import op_kind
from planner.graph.recording import work
from planner.graph.torch_private import TorchDispatchMode, TorchOp, packet_name, schema_aliases
from planner.profiling.clock import KEPT_BYTES, Clock

MATMULS = ("mm", "addmm", "bmm", "baddbmm")
NO_WORK = work.ALLOCATION_OPS | {"_local_scalar_dense", "detach", "alias", "lift_fresh"}
READ_ONLY_ARGUMENTS = {"_fused_adamw_": ("grads",)}
"""Arguments that a schema declares as written (gradients are unscaled where there is a scaler),
and that a plain training step only reads."""

MOST_COPIES = 200
"""Of the operands of an op on a CPU."""

LIMIT_S = 0.12
"""Repeats of one op take about so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One op as it was called."""

    op: TorchOp
    args: Sequence[Any]
    kwargs: dict[str, Any]
    outputs: list[Tensor]

    @property
    def name(self) -> str:
        """Name in the operator graph."""
        return packet_name(self.op)

    def run(self) -> object:
        """Call it again."""
        return self.op(*self.args, **self.kwargs)


class Capture(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps every op that works on more than single numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self,
        op: TorchOp,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Run an op and keep it."""
        result = op(*args, **(kwargs or {}))
        call = Call(op=op, args=args, kwargs=kwargs or {}, outputs=tensors_in(result))
        is_view, _ = schema_aliases(op)
        largest = max((t.numel() for t in tensors_in((args, kwargs, result))), default=0)
        if largest > 1 and not is_view and call.name not in NO_WORK:
            self.calls.append(call)
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """One timed op: a row of kernels.csv."""

    group: str
    kernel: str
    phase: str
    dtype: str
    shapes: str
    batch: int
    m: int
    n: int
    k: int
    causal: int
    flop: int
    read_bytes: int
    write_bytes: int
    seconds: float
    seconds_p10: float
    seconds_p90: float
    repeats: int


Built = tuple[Callable[[], Tensor | None], tuple[Tensor, ...]]
"""A forward, and what its output is differentiated by; a forward without output is a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """Ops that belong together, and how to run them."""

    group: str
    dtype: str
    build: Callable[[torch.device, torch.dtype], Built]
    causal: bool = False
    whole: tuple[str, str] | None = None
    """Names of the forward and the backward where the device runs several kernels for what is one
    op in the operator graph: they are timed together then."""

    @property
    def label(self) -> str:
        """What the log calls it."""
        return f"{self.group} {self.dtype}"

    def measure(self, clock: Clock, limit_s: float = LIMIT_S) -> Iterator[KernelRow]:
        """Time each op of the case, each for about so long."""
        forward, leaves = self.build(clock.device, getattr(torch, self.dtype))
        if self.whole is not None:
            yield from self._whole_rows(forward, leaves, clock, limit_s)
            return
        with Capture() as ahead:
            output = forward()
        if output is None:
            yield from self._rows(ahead.calls, "step", clock, limit_s)
            return
        # Both are captured before one is timed: calling again writes to what backward reads.
        gradient = torch.randn_like(output)
        with Capture() as behind:
            torch.autograd.grad(output, leaves, gradient)
        yield from self._rows(ahead.calls, "forward", clock, limit_s)
        yield from self._rows(behind.calls, "backward", clock, limit_s)

    def _whole_rows(
        self,
        forward: Callable[[], Tensor | None],
        leaves: tuple[Tensor, ...],
        clock: Clock,
        limit_s: float,
    ) -> Iterator[KernelRow]:
        """Time forward and backward as one op each."""
        assert self.whole is not None
        output = forward()
        assert output is not None
        gradient = torch.randn_like(output)
        own_bytes = sum(stored_bytes(tensor) for tensor in leaves)

        def behind() -> object:
            return torch.autograd.grad(output, leaves, gradient, retain_graph=True)

        def ahead() -> object:
            with torch.no_grad():
                return forward()

        for name, phase, call, read_bytes, write_bytes in (
            (self.whole[0], "forward", ahead, own_bytes, stored_bytes(output)),
            (self.whole[1], "backward", behind, own_bytes + stored_bytes(gradient), own_bytes),
        ):
            spread = clock.time_call(call, limit_s=limit_s)
            yield KernelRow(
                group=self.group, kernel=name, phase=phase, dtype=self.dtype,
                shapes=_shapes_in_words(list(leaves)), batch=1, m=0, n=0, k=0, causal=0, flop=0,
                read_bytes=read_bytes, write_bytes=write_bytes,
                seconds=spread.median_s, seconds_p10=spread.p10_s, seconds_p90=spread.p90_s,
                repeats=spread.repeats,
            )  # fmt: skip

    def _rows(
        self, calls: list[Call], phase: str, clock: Clock, limit_s: float
    ) -> Iterator[KernelRow]:
        for call in calls:
            row = replace(described(call), group=self.group, phase=phase, dtype=self.dtype)
            with torch.no_grad():
                run = call.run if clock.is_gpu else in_turn(call)
                spread = clock.time_call(run, limit_s=limit_s)
            yield replace(
                row,
                causal=int(self.causal and "scaled_dot_product" in call.name),
                seconds=spread.median_s,
                seconds_p10=spread.p10_s,
                seconds_p90=spread.p90_s,
                repeats=spread.repeats,
            )


def in_turn(call: Call) -> Callable[[], object]:
    """Run an op on a CPU on operands that it has not just read.

    In training it was written some time before, by ops that have used the cache since. Products
    read what they have read once again and again, so that they find it there.
    """
    if op_kind(call.name) == "matmul" or "scaled_dot_product" in call.name:
        return call.run
    num_bytes = sum(stored_bytes(tensor) for tensor in tensors_in((call.args, call.kwargs)))
    count = min(MOST_COPIES, KEPT_BYTES // max(1, num_bytes))
    copies = [tree_map_only(Tensor, _copied, (call.args, call.kwargs)) for _ in range(count)]
    turns = cycle([call, *(replace(call, args=args, kwargs=named) for args, named in copies)])
    return lambda: next(turns).run()


def _copied(tensor: Tensor) -> Tensor:
    """A copy that lies in memory as the tensor does; the same one where elements share a place."""
    if stored_bytes(tensor) < tensor.numel() * tensor.element_size():
        return tensor
    copy = torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return copy.copy_(tensor)


def described(call: Call) -> KernelRow:
    """Count what an op computes and moves, as the operator graph does; times are left 0."""
    inputs = tensors_in((call.args, call.kwargs))
    _, written = schema_aliases(call.op)
    targets: list[Tensor] = []
    for position, name, is_keyword in written:
        if name not in READ_ONLY_ARGUMENTS.get(call.name, ()):
            targets += tensors_in(call.kwargs.get(name) if is_keyword else call.args[position])
    outputs = targets if written else call.outputs
    read_bytes, write_bytes = work.traffic_bytes(
        call.name,
        [stored_bytes(tensor) for tensor in inputs],
        [stored_bytes(tensor) for tensor in outputs],
        in_place=bool(written),
    )
    batch, m, n, k = sizes(call)
    return KernelRow(
        group="",
        kernel=call.name,
        phase="",
        dtype="",
        shapes=_shapes_in_words(inputs),
        batch=batch,
        m=m,
        n=n,
        k=k,
        causal=0,
        flop=flop(call),
        read_bytes=read_bytes,
        write_bytes=write_bytes,
        seconds=0.0,
        seconds_p10=0.0,
        seconds_p90=0.0,
        repeats=0,
    )


def _shapes_in_words(tensors: list[Tensor]) -> str:
    """Shapes in order, "3*64x16" for three alike in a row."""
    shapes = ["x".join(map(str, tensor.shape)) or "1" for tensor in tensors]
    runs = [(shape, len(list(alike))) for shape, alike in groupby(shapes)]
    return " ".join(shape if count == 1 else f"{count}*{shape}" for shape, count in runs)


def sizes(call: Call) -> tuple[int, int, int, int]:
    """Batch, m, n, k of a product; batch times heads, queries, keys, head dim of attention."""
    if call.name in MATMULS:
        left, right = (tensor.shape for tensor in tensors_in(call.args)[-2:])
        return left[0] if len(left) == 3 else 1, left[-2], right[-1], left[-1]
    if "scaled_dot_product" in call.name:
        query, key, _ = attention_operands(call)
        return query.shape[0] * query.shape[1], query.shape[2], key.shape[2], query.shape[3]
    return 1, 0, 0, 0


def flop(call: Call) -> int:
    """FLOPs of an op; every fused attention kernel alike, those of the CPU too."""
    if "scaled_dot_product" not in call.name:
        return work.flop(call.name, call.args, call.outputs)
    count = work.attention_backward_flop if "backward" in call.name else work.attention_flop
    return count(*attention_operands(call))


def attention_operands(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key, value; the gradient comes before them in backward."""
    first = 1 if "backward" in call.name else 0
    query, key, value = call.args[first : first + 3]
    return query, key, value


def stored_bytes(tensor: Tensor) -> int:
    """Bytes behind a tensor: its elements, or less where they are expanded."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def tensors_in(tree: object) -> list[Tensor]:
    """All tensors of nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
