"""Whatever the rules let run on shards gives the shards of the whole, forward and backward.

Samples of every op come from torch's own database; those of named rules that need larger sizes,
or kernels of another device, are added here.
"""

import warnings
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
import torch_samples
from sharded_runs import AtenCalls, Check, Program, check, gradient_flows, record
from torch.nn import functional
from torch_samples import samples_of_every_op

from planner.errors import ModelError
from planner.runtime import op_rules
from planner.runtime.layout import PARTIAL, REPLICATE, shard
from planner.runtime.op_rules import ATTENTIONS, NAMED_RULES
from planner.strategy import propagation
from planner.strategy.propagation import output_layouts

SAMPLES = 3
"""Of one op in torch's database."""
PROGRAMS = 4
"""Of one overload of an ATen op, in other shapes or with other arguments."""
LEAST_OPS = 250
"""ATen ops that run on shards."""
LEAST_RECORDED_OPS = 400
"""ATen ops that the rules are asked about."""
MOST_UNRECORDED = 100
"""Programs that read data or have no meta kernel, which no plan can hold either."""

aten = torch.ops.aten


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64)


def ones(*shape):
    return torch.ones(shape, dtype=torch.float64)


OWN = {
    "view": (lambda x: x.view(2, 4, 2, 4), [(2, 4, 8)]),
    "view as another dtype": (lambda x: x.view(torch.int32), [(2, 4, 8)]),
    "_unsafe_view": (lambda x: x.transpose(1, 2).reshape(2, 24, 8), [(2, 4, 6, 8)]),
    "expand": (lambda x: x.expand(4, 6, 8), [(6, 8)]),
    "squeeze": (lambda x: x.unsqueeze(1).squeeze(), [(4, 6)]),
    "squeeze a dim": (lambda x: x.unsqueeze(1).squeeze(1), [(2, 6)]),
    "t": (lambda x: x.t(), [(4, 6)]),
    "transpose": (lambda x: x.transpose(-1, 1), [(2, 4, 6, 8)]),
    "permute": (lambda x: x.permute(0, 2, -1, 1), [(2, 4, 6, 8)]),
    "unbind": (lambda x: x.unbind(-2), [(2, 3, 4)]),
    "select": (lambda x: x.select(1, -1), [(2, 3, 4)]),
    "split": (lambda x: x.split(4, -1), [(2, 6, 8)]),
    "split_with_sizes": (lambda x: x.split([2, 4], 1), [(2, 6, 8)]),
    "split in one and two segments": (lambda x: x.split([10, 20], 1), [(2, 30, 4)]),
    "chunk": (lambda x: x.chunk(3, 1), [(2, 12, 4)]),
    "slice": (lambda x: x[:, 4:], [(2, 8, 4)]),
    "slice off a segment": (lambda x: x[:, 1:5], [(2, 8, 4)]),
    "slice from the end": (lambda x: x[:, -4:], [(2, 8, 4)]),
    "slice with steps": (lambda x: x[:, ::2], [(2, 8, 4)]),
    "cat": (lambda x, y: torch.cat([x, y], 1), [(2, 4, 6)] * 2),
    "cat with a constant": (lambda x: torch.cat([ones(2, 3, 6), x], 1), [(2, 4, 6)]),
    "stack with a constant": (lambda x: torch.stack([x, ones(2, 4, 6)], 1), [(2, 4, 6)]),
    "split, of which one piece is read": (lambda x: x.split([2, 4], 1)[1], [(2, 6, 8)]),
    "stack last": (lambda x, y: torch.stack([x, y], -1), [(2, 4, 6)] * 2),
    "stack": (lambda x, y: torch.stack([x, y], 1), [(2, 4, 6)] * 2),
    "mean": (lambda x: x.mean((-1,)), [(2, 4, 6)]),
    "sum": (lambda x: x.sum((0,), keepdim=True), [(2, 4, 6)]),
    "sum of all": (lambda x: x.sum(), [(4, 6)]),
    "amax": (lambda x: x.amax((1, -1)), [(2, 4, 6)]),
    "amin": (lambda x: x.amin(1), [(2, 4, 6)]),
    "argmax": (lambda x: x.argmax(1), [(2, 4, 6)]),
    "argmin": (lambda x: x.argmin(-1, keepdim=True), [(2, 4, 6)]),
    "all": (lambda x: (x > 0).all(1), [(2, 4, 6)]),
    "any": (lambda x: (x > 0).any(-1), [(2, 4, 6)]),
    "max": (lambda x: x.max(1), [(2, 4, 6)]),
    "layer_norm": (lambda x: functional.layer_norm(x, (6, 8)), [(2, 4, 6, 8)]),
    "layer_norm with a weight": (lambda x, w: functional.layer_norm(x, (8,), w), [(2, 4, 8), (8,)]),
    "softmax": (lambda x: x.softmax(1), [(2, 4, 6)]),
    "log_softmax": (lambda x: x.log_softmax(-1), [(2, 4, 6)]),
    "native_dropout": (lambda x: torch.native_dropout(x, 0.5, True), [(2, 4, 6)]),
    "detach": (lambda x: x.detach(), [(2, 4, 6)]),
    "rotary": (lambda x: torch.view_as_complex(x.unflatten(-1, (-1, 2))), [(2, 4, 8)]),
    "in place": (lambda x, y: x.clone().add_(y), [(2, 4, 6), (6,)]),
    "in place through a view": (lambda x, y: x.select(1, 0).add_(y), [(2, 4, 6), (6,)]),
    "copy_": (lambda x, y: torch.empty_like(x).copy_(y), [(2, 4, 6), (6,)]),
}
"""Functions whose ATen ops are checked, and the shapes of their tensors."""


def attention(query, key, value, mask=None):
    return functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)


def flash(query, key, value):
    return aten._scaled_dot_product_flash_attention(query, key, value)[0]


def efficient(query, key, value, mask=None):
    return aten._scaled_dot_product_efficient_attention(query, key, value, mask, True)[0]


def cudnn(query, key, value):
    return aten._scaled_dot_product_cudnn_attention(query, key, value, None, True)[0]


def cpu_flash(query, key, value, mask=None):
    return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=mask)[0]


HEADS, GROUPS, MASK = (2, 4, 6, 8), (2, 2, 6, 8), (2, 4, 6, 6)
ATTENTION_CASES = {
    "flash": (flash, [HEADS] * 3),
    "flash with grouped heads": (flash, [HEADS, GROUPS, GROUPS]),
    "efficient": (efficient, [HEADS] * 3),
    "efficient with a mask": (efficient, [HEADS] * 3 + [MASK]),
    "efficient with grouped heads": (attention, [HEADS, GROUPS, GROUPS, MASK]),
    "cudnn": (cudnn, [HEADS] * 3),
    "cpu": (cpu_flash, [HEADS] * 3),
    "cpu with a broadcast mask": (cpu_flash, [HEADS] * 3 + [(1, 1, 6, 6)]),
}
"""Kernels that are recorded, and the shapes for which torch's attention runs in their place."""


def programs_of(function, args, kwargs, name):
    """Return the ATen ops that a function runs, and itself where it is more than one of them."""
    copies = [each.clone() if isinstance(each, torch.Tensor) else each for each in args]
    with AtenCalls() as seen:
        function(*copies, **kwargs)
    ops = [Program(name=str(f), run=f, args=a, kwargs=k) for f, a, k in seen.calls]
    yield from ops
    whole = Program(name=name, run=function, args=args, kwargs=kwargs, is_op=False)
    if name and [len(each.tensors) for each in ops] != [len(whole.tensors)]:
        yield whole


def all_programs():
    for function, shapes in OWN.values():
        yield from programs_of(function, tuple(map(lambda s: randn(*s), shapes)), {}, "")
    for kernel, shapes in ATTENTION_CASES.values():
        args = tuple(map(lambda s: randn(*s), shapes))
        yield Program(name=kernel.__name__, run=attention, args=args, kwargs={}, recorded=kernel)
    for sample in samples_of_every_op(SAMPLES):
        try:
            yield from programs_of(sample.run, sample.args, sample.kwargs, sample.op)
            if sample.in_place:
                yield from programs_of(sample.in_place, sample.args, sample.kwargs, "")
        except (RuntimeError, AssertionError, ValueError):
            continue  # samples that ask for another device, or do not fit the variant in place


def signature(program):
    def spelled(each):
        if isinstance(each, torch.Tensor):
            return tuple(each.shape), each.dtype
        return [spelled(item) for item in each] if isinstance(each, list | tuple) else each

    return program.name, program.is_op, repr(spelled(program.args)), repr(program.kwargs.keys())


def chosen_programs():
    """Return a few programs of every overload and function, no two alike."""
    seen, count = set(), Counter()
    for program in all_programs():
        key = signature(program)
        if key not in seen and count[key[:2]] < PROGRAMS:
            seen.add(key)
            count[key[:2]] += 1
            yield program


@dataclass(slots=True)
class Checks:
    """What all programs together have shown."""

    ops: set = field(default_factory=set)
    """ATen ops that the rules were asked about."""
    split_ops: set = field(default_factory=set)
    """ATen ops of single programs that ran on shards."""
    split_functions: set = field(default_factory=set)
    """Functions that ran on shards."""
    used_rules: set = field(default_factory=set)
    """Named rules of ops that ran on shards."""
    runs: int = 0
    differences: list = field(default_factory=list)
    unrecorded: list = field(default_factory=list)

    def add(self, program: Program, check: Check) -> None:
        self.ops |= check.ops
        self.runs += check.runs
        self.differences += check.differences
        if not check.runs:
            return
        self.used_rules |= check.ops & NAMED_RULES.keys()
        if program.is_op:
            self.split_ops |= check.ops
        else:
            self.split_functions.add(program.name)


def run_checks(programs):
    """Check programs where a gradient flows to all tensors, to the first, or else to none."""
    torch.manual_seed(0)
    found = Checks()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for program in programs:
            flows = gradient_flows(program.tensors)
            done, reason = 0, ""
            for wants_grad in (*flows, [False] * len(program.tensors)):
                if done and not any(wants_grad):
                    continue
                try:
                    found.add(program, check(program, wants_grad))
                    done += 1
                except (RuntimeError, NotImplementedError, ModelError) as error:
                    reason = str(error)
            if not done:
                found.unrecorded.append(f"{program.name}: {reason[:100]}")
    return found


@pytest.fixture(scope="module")
def programs():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(chosen_programs())


@pytest.fixture(scope="module")
def checks(programs):
    return run_checks(programs)


def test_shards_give_the_shards_of_the_whole(checks):
    assert not checks.differences, "\n".join(checks.differences[:40])


def test_every_rule_and_enough_ops_are_covered(checks):
    assert len(checks.split_ops) >= LEAST_OPS, len(checks.split_ops)
    assert len(checks.ops) >= LEAST_RECORDED_OPS, len(checks.ops)
    assert checks.used_rules == NAMED_RULES.keys()
    assert len(checks.unrecorded) <= MOST_UNRECORDED, checks.unrecorded


WHOLE = ("cummax", "cumprod", "logcumsumexp", "tril", "flip", "sort", "roll", "cumsum")
"""rot90 is a flip and a transpose."""


def test_ops_that_nothing_vouches_for_stay_whole(checks):
    assert checks.ops > {*WHOLE}
    assert checks.split_ops.isdisjoint(WHOLE)


def test_ops_that_were_taken_for_pointwise_would_be_caught(programs, monkeypatch):
    monkeypatch.setattr(propagation, "rule_of", lambda op: op_rules._pointwise)
    names = {f"aten.{name}.default" for name in WHOLE}
    found = run_checks(program for program in programs if program.name in names)
    assert {each.split(":")[0] for each in found.differences} == names


def recorded_op(function, *tensors, trained=True):
    program = Program(name="", run=function, args=tensors, kwargs={})
    found = record(program, [trained and each.is_floating_point() for each in tensors])
    return found.graph, found.ops[-1]


def test_a_whole_operand_with_a_gradient_stays_out_of_split_ops():
    """Each rank would add a part of its gradient, which nothing sums."""
    graph, op = recorded_op(torch.mul, randn(2, 4, 6), randn(2, 4, 1))
    assert output_layouts(graph, op, [shard(2), REPLICATE], 2) is None
    assert output_layouts(graph, op, [shard(2), None], 2) == (shard(2),)
    graph, op = recorded_op(torch.mul, randn(2, 4, 6), randn(2, 4, 1), trained=False)
    assert output_layouts(graph, op, [shard(2), REPLICATE], 2) == (shard(2),)


def test_no_op_runs_on_the_summands_of_a_sum_over_ranks():
    graph, op = recorded_op(torch.relu, randn(2, 4, 6))
    assert output_layouts(graph, op, [PARTIAL], 2) is None


def test_a_whole_buffer_is_not_written_to_by_shards():
    graph, op = recorded_op(lambda x, y: x.copy_(y), torch.zeros(2, 4), randn(2, 4), trained=False)
    assert output_layouts(graph, op, [None, shard(1)], 2) is None
    assert output_layouts(graph, op, [shard(1), shard(1)], 2) == (shard(1),)


def test_an_op_of_the_users_library_is_not_taken_for_one_of_torch():
    library = torch.library.Library("user_ops", "DEF")
    try:
        library.define("sum(Tensor x, int[] dim) -> Tensor")
        library.impl("sum", lambda x, dim: x.cumsum(-1), "Meta")
        graph, op = recorded_op(lambda x: torch.ops.user_ops.sum(x, [1]), randn(2, 4, 6))
    finally:
        library._destroy()
    assert op.name == "user_ops::sum"
    assert output_layouts(graph, op, [shard(2)], 2) is None


def test_a_database_that_has_moved_is_said_so(monkeypatch):
    monkeypatch.setattr(torch_samples, "PLACE", "torch.testing._internal.elsewhere")
    with pytest.raises(RuntimeError, match="find where its samples of ops"):
        next(samples_of_every_op(1))


def test_attention_kernels_have_a_case_each():
    recorded = {
        recorded_op(kernel, *(randn(*shape) for shape in shapes), trained=False)[1].name
        for kernel, shapes in ATTENTION_CASES.values()
    }
    assert recorded == ATTENTIONS
