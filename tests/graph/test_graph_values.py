"""What tracing knows of data, what it assumes, and what a hint tells it."""

import json
import random

import numpy
import pytest
import torch
from graph_models import mean_square, vectors, wrap
from torch import nn
from torch.utils.checkpoint import checkpoint

from planner.errors import ModelError, RequestError
from planner.graph.analysis.trace_warnings import trace_warnings
from planner.graph.loading.hints import make_hints, parse_hint, read_hints
from planner.graph.loading.loaded_model import LoadedModel
from planner.graph.operator_graph import Phase
from planner.graph.sizes.family import trace_family
from planner.graph.trace import trace_model

GLOBAL = torch.ones(8)


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)


def load(forward, batch=None, hints=()) -> LoadedModel:
    from dataclasses import replace

    model = type("Model", (Base,), {"forward": forward})
    loaded = wrap(model, batch or vectors(8), mean_square)
    return replace(loaded, hints=make_hints(dict(hints)))


def trace(forward, batch=None, hints=(), microbatch_size=2):
    return trace_model(
        load(forward, batch, hints), microbatch_size=microbatch_size, dtype="float32"
    )


def count(graph, name):
    return sum(op.name == name for op in graph.nodes)


def line_of(forward, offset=0):
    """Place of a line of a function, 0 for the line of its def or lambda."""
    return f"test_graph_values.py:{forward.__code__.co_firstlineno + offset}"


# Exact ---------------------------------------------------------------------------------------


def test_a_loop_count_from_integer_inputs_is_exact():
    def forward(self, x, times):
        for _ in range(int(times[0].item())):
            x = self.linear(x)
        return x

    graph = trace(forward, lambda size: ((torch.randn(size, 8), torch.full((size,), 3)), None))
    assert count(graph, "addmm") == 3
    assert graph.notes == ()


def test_a_branch_on_constants_is_exact():
    def forward(self, x):
        positions = torch.arange(x.shape[1], device=x.device)
        if (positions.diff() != 1).any():
            return self.linear(self.linear(x))
        return self.linear(x)

    assert count(trace(forward), "addmm") == 1


def test_a_branch_on_the_example_batch_is_exact():
    def forward(self, x):
        return self.linear(x) if x.abs().max() > 100 else self.linear(self.linear(x))

    assert count(trace(forward), "addmm") == 2
    assert count(trace(forward, lambda size: (torch.full((size, 8), 101.0), None)), "addmm") == 1


def test_a_constant_changed_in_place_is_not_stale():
    def forward(self, x):
        steps = torch.ones(2, dtype=torch.long, device=x.device)
        steps[0] = 5
        for _ in range(int(steps.sum())):
            x = self.linear(x)
        return x

    assert count(trace(forward), "addmm") == 6


def test_views_of_changed_memory_are_not_stale():
    def forward(self, x):
        steps = torch.zeros(2, 3, dtype=torch.long)
        row, column = steps[1], steps[:, 2]
        row.fill_(2)
        column += 1
        assert steps.tolist() == [[0, 0, 1], [2, 2, 3]]
        row[0] = 7
        for _ in range(int(steps.sum()) - int(column.sum())):
            x = self.linear(x)
        return x

    assert count(trace(forward), "addmm") == 9


def test_memory_that_weights_were_written_to_is_unknown():
    def forward(self, x):
        steps = torch.ones(2, device=x.device)
        whole = steps.view(2)
        steps[0] = self.linear.weight.detach()[0, 0]
        return x * float(whole.sum())

    with pytest.raises(ModelError, match="depends on weights"):
        trace(forward)


def test_tensor_literals_are_known_on_any_device():
    def forward(self, x):
        weights = torch.tensor([2, 1, 4], device=x.device)
        for _ in range(int(weights.max())):
            x = self.linear(x)
        return x * x.new_tensor(3.0).item()

    assert count(trace(forward), "addmm") == 4


def test_tensors_of_python_are_known():
    def forward(self, x):
        times = torch.arange(3).tolist()[-1] + int(torch.arange(4).numpy().max())
        for _ in range(times):
            x = self.linear(x)
        return x

    assert count(trace(forward), "addmm") == 5


def test_tensors_from_outside_are_known():
    def forward(self, x):
        for _ in range(int(GLOBAL.sum())):
            x = self.linear(x)
        return x + GLOBAL.to(x.device)

    graph = trace(forward)
    assert count(graph, "addmm") == 8
    assert graph.notes == ()
    assert GLOBAL.device.type == "cpu"


def test_a_tensor_on_the_cpu_among_the_models_own_is_told():
    def forward(self, x):
        return self.linear(x) + GLOBAL

    graph = trace(forward)
    (note,) = graph.notes
    assert note.startswith(f"{line_of(forward, 1)} (`return self.linear(x) + GLOBAL`) mixes")
    assert "on a GPU this raises" in note
    assert {value.shape for value in graph.values} >= {(2, 8)}


def test_a_tensor_made_without_a_device_is_told_where_it_meets_the_models_own():
    def forward(self, x):
        made = torch.ones(8).mul(2)
        fine = torch.ones(8).to(x.device) + torch.ones(8, device=x.device)
        return self.linear(x) * made + fine + x[torch.arange(2)] + torch.tensor(1.0)

    (note,) = trace(forward).notes
    assert note.startswith(f"{line_of(forward, 1)} (`made = torch.ones(8).mul(2)`) makes")
    assert "device=x.device" in note


def test_listed_positions_are_known():
    def forward(self, x, n):
        ends = n[:, [-1, 0]]
        if 4 in ends or 3 not in ends[[0, 1]]:
            return self.linear(self.linear(x))
        return self.linear(x)

    def batch(size):
        return (torch.randn(size, 8), torch.tensor([[3, 4, 5]] * size)), None

    assert count(trace(forward, batch), "addmm") == 1


def test_names_are_made_of_known_numbers():
    def forward(self, x):
        name = f"{torch.arange(3)[1]:02d}"
        assert f"{self.linear.weight.sum()}"
        return self.linear(x) if name == "01" else self.linear(self.linear(x))

    assert count(trace(forward), "addmm") == 1


def test_nonzero_of_a_constant_mask_has_its_real_size():
    def forward(self, x):
        mask = torch.arange(8, device=x.device) % 2 == 0
        return self.linear(x)[:, mask]

    graph = trace(forward)
    assert any(value.shape == (2, 4) for value in graph.values)


def test_indexing_with_positions_needs_no_data():
    def forward(self, x):
        order = self.linear(x).argsort(dim=-1)
        return self.linear(x)[torch.arange(x.shape[0])[:, None], order]

    assert count(trace(forward), "index") == 1


# Assumed -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.rand(()),
        lambda x: torch.rand(1, device=x.device),
        lambda x: torch.empty(()).uniform_(0, 1),
        lambda x: torch.rand_like(x)[0, 0],
        lambda x: torch.bernoulli(torch.full((), 0.9)),
        lambda x: x.new_empty(()).bernoulli_(0.9),
        lambda x: torch.randint(0, 10, ()) / 10,
        lambda x: 0.5 + torch.randn(()),
    ],
)
def test_a_draw_is_taken_at_its_mean(draw):
    def forward(self, x):
        if draw(x) < 0.1:
            return x * self.linear.bias
        return self.linear(x)

    graph = trace(forward)
    assert count(graph, "addmm") == 1
    (note,) = graph.notes
    assert note.startswith(f"{line_of(forward, 1)} (`if draw(x) < 0.1:`)")
    assert note.endswith("taken at the mean of its random draws, which gives False")
    assert trace_warnings(graph) == (note,)


def test_draws_of_python_are_the_same_every_time_and_told():
    def forward(self, x):
        for _ in range(random.randrange(1, 100) + numpy.random.randint(1, 100)):
            x = self.linear(x)
        return x

    states = random.getstate(), repr(numpy.random.get_state()), torch.get_rng_state().tolist()
    first, second = trace(forward), trace(forward)
    assert count(first, "addmm") == count(second, "addmm")
    (note,) = first.notes
    assert "draws from the random generator of Python or numpy" in note
    after = random.getstate(), repr(numpy.random.get_state()), torch.get_rng_state().tolist()
    assert after == states


def test_each_line_is_noted_once():
    def forward(self, x):
        for step in range(5):
            if torch.rand(()) < step / 6:
                continue
            x = self.linear(x)
        return x

    graph = trace(forward)
    assert count(graph, "addmm") == 4
    (note,) = graph.notes
    assert note.endswith("which gives False or True")


@pytest.mark.parametrize(
    "route",
    [
        lambda scores: scores.topk(2, dim=-1).indices,
        lambda scores: scores.sort(dim=-1, descending=True, stable=True)[1][:, :2],
        lambda scores: torch.multinomial(scores.softmax(-1), 2),
        lambda scores: scores.t().topk(2, dim=0)[1].t(),
    ],
)
def test_tokens_are_spread_evenly_over_second(route):
    def forward(self, x):
        chosen = route(self.linear(x))
        out = torch.zeros_like(x)
        for expert in range(8):
            rows, _ = torch.where(chosen == expert)
            out.index_add_(0, rows, self.linear(x[rows]))
        return out

    graph = trace(forward, microbatch_size=16)
    products = [op for op in graph.nodes if op.name == "addmm" and op.phase is Phase.FORWARD]
    # 16 tokens to 2 of 8 experts each: 4 for every expert.
    assert [graph.values[op.outputs[0]].shape for op in products] == [(16, 8)] + [(4, 8)] * 8
    (note,) = graph.notes
    assert "taken with choices (of experts, for one) spread evenly" in note


def test_counts_of_tokens_are_those_of_the_even_spread():
    def forward(self, x):
        chosen = self.linear(x).argmax(-1)
        hits = nn.functional.one_hot(chosen, 8).sum(0)
        parts = x[chosen.argsort()].split(hits.tolist())
        return torch.cat([self.linear(part) for part in parts if part.shape[0]])

    graph = trace(forward, microbatch_size=6)
    assert count(graph, "addmm") == 1 + 6


def test_a_choice_among_many_is_no_routing():
    def forward(self, x):
        first = self.linear(x).repeat(1, 1000).argmax(-1)
        return self.linear(x) * (first == 3).sum().item()

    with pytest.raises(ModelError, match="reads the data"):
        trace(forward)


@pytest.mark.parametrize(
    "test",
    [
        lambda x: torch.isnan(x).any(),
        lambda x: torch.isinf(x).any() or torch.isnan(x).any(),
        lambda x: not torch.isfinite(x).all(),
        lambda x: (x != x).any(),
    ],
)
def test_activations_are_finite(test):
    def forward(self, x):
        x = self.linear(x)
        return x * 0 if test(x) else self.linear(x)

    graph = trace(forward)
    assert count(graph, "addmm") == 2
    assert all("taken as free of NaN and infinity" in note for note in graph.notes)
    assert graph.notes


def test_assertions_hold():
    def forward(self, x):
        x = self.linear(x)
        assert x.sum() > 0, "positive"
        assert not (x < 0).any()
        return x

    first, second = trace(forward).notes
    assert "taken as asserted" in first
    assert first.startswith(line_of(forward, 2))
    assert second.startswith(line_of(forward, 3))


def test_a_recomputation_reads_what_the_forward_pass_read():
    def forward(self, x):
        def inner(x):
            chosen = self.linear(x).argmax(-1)
            first = self.linear(x[chosen == 0])
            return self.linear(x) + first.sum() if torch.rand(()) > 0.1 else x

        return checkpoint(inner, x.requires_grad_(), use_reentrant=False)

    graph = trace(forward, microbatch_size=16)
    products = [op for op in graph.nodes if op.name == "addmm"]
    assert [graph.values[op.outputs[0]].shape[0] for op in products] == [16, 2, 16, 16, 2]


def test_checks_that_raise_are_taken_as_passed():
    def forward(self, x):
        x = self.linear(x)
        if (x > 9).any() or (x < -9).any():
            print("too large")
            raise ValueError
        if not ((x.abs() < 10).all()):
            raise ValueError
        return self.linear(x)

    graph = trace(forward)
    assert count(graph, "addmm") == 2
    first, second = graph.notes
    assert first.startswith(line_of(forward, 2))
    assert first.endswith("which gives False")
    assert second.endswith("which gives True")


def test_other_branches_than_checks_are_not_taken_as_passed():
    def forward(self, x):
        x = self.linear(x)
        if (x > 9).any() and not (x < -9).any():
            raise ValueError
        return x

    with pytest.raises(ModelError, match="reads the data"):
        trace(forward)


def test_distributions_check_their_arguments_themselves():
    def forward(self, x):
        spread = self.linear(x).exp()
        return torch.distributions.Normal(x, spread, validate_args=True).rsample()

    graph = trace(forward)
    assert all("taken as" in note for note in graph.notes)
    assert {line.split(" ")[0] for line in graph.notes} == {line_of(forward, 2)}


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_recomputed_method_reads_what_it_read_before(use_reentrant):
    class Routed(Base):
        def forward(self, x):
            return checkpoint(self.inner, x.requires_grad_(), use_reentrant=use_reentrant)

        def inner(self, x):
            chosen = self.linear(x).argmax(-1)
            sizes = nn.functional.one_hot(chosen, 8).sum(0).tolist()
            parts = x[chosen.argsort()].split(sizes)
            return torch.cat([part @ self.linear.weight for part in parts if len(part)])

    loaded = wrap(lambda: nn.Sequential(Routed()), vectors(8), mean_square)
    graph = trace_model(loaded, microbatch_size=12, dtype="float32")
    rows = [
        graph.values[op.inputs[0]].shape[0]
        for op in graph.nodes
        if op.name == "mm" and graph.values[op.outputs[0]].shape[-1] == 8 and op.forward_op is None
    ]
    # A checkpoint that is not reentrant stops where all that backward needs is there.
    assert rows == ([2, 2, 2, 2, 1, 1, 1, 1] * 2)[: 16 if use_reentrant else 15]
    again = [op for op in graph.nodes if op.phase is Phase.BACKWARD and op.forward_op is None]
    assert {op.module for op in again if op.name in ("argmax", "mm")} <= {"0", "0.linear"}


# Hints ---------------------------------------------------------------------------------------


def positive(self, x):
    x = self.linear(x)
    if x.sum() > 0:
        return self.linear(x)
    return x


def masked(self, x):
    x = self.linear(x)
    return self.linear(x[x[:, 0] > 0])


def scaled(self, x):
    return self.linear(x) * x.mul(self.linear.bias).max().item()


def repeated(self, x):
    for _ in range(int(self.linear.bias.sum().long())):
        x = self.linear(x)
    return x


@pytest.mark.parametrize(
    ("forward", "offset", "kind"),
    [
        (positive, 2, "=true (a truth value)"),
        (masked, 2, "=0.5 (the share that it chooses of 2 elements)"),
        (scaled, 1, "=0.5 (a number)"),
        (repeated, 1, "=3 (a whole number)"),
    ],
)
def test_without_a_hint_the_line_and_the_hint_are_named(forward, offset, kind):
    with pytest.raises(ModelError, match="reads the data of a tensor") as error:
        trace(forward)
    place = line_of(forward, offset)
    assert f"{place}: " in str(error.value)
    assert f"--hint {place}{kind}" in error.value.hint
    assert "torch.where" in error.value.hint


@pytest.mark.parametrize(("answer", "products"), [(True, 2), (False, 1)])
def test_a_hint_decides_a_branch(answer, products):
    graph = trace(positive, hints={line_of(positive, 2): answer})
    assert count(graph, "addmm") == products
    assert graph.notes == ()


@pytest.mark.parametrize(("answer", "rows"), [(0.25, 4), (3, 3), (1.0, 16), (1, 1)])
def test_a_hint_says_how_many_elements_a_mask_chooses(answer, rows):
    graph = trace(masked, hints={line_of(masked, 2): answer}, microbatch_size=16)
    last = [op for op in graph.nodes if op.name == "addmm"][-1]
    assert graph.values[last.outputs[0]].shape == (rows, 8)


@pytest.mark.parametrize(
    ("choose", "shape"),
    [
        (lambda x: x.nonzero(), (12, 2)),
        (lambda x: x.masked_select(x > 0), (12,)),
        (lambda x: torch.unique(x), (12,)),
        (lambda x: torch.unique_consecutive(x), (12,)),
        (lambda x: torch.where(x > 0)[0], (12,)),
    ],
)
def test_a_hint_sizes_every_op_that_chooses_elements(choose, shape):
    def forward(self, x):
        x = self.linear(x)
        return self.linear(x) * choose(x).shape[0]

    graph = trace(forward, hints={line_of(choose): 0.75})
    assert any(value.shape == shape for value in graph.values)


def test_unique_along_a_dim_and_counts():
    def forward(self, x):
        x = self.linear(x).detach()
        rows, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True, dim=0)
        hits = torch.bincount(inverse)
        copies = torch.repeat_interleave(counts)
        return self.linear(rows), inverse, counts, hits, copies

    first = forward.__code__.co_firstlineno
    hints = {f"test_graph_values.py:{first + offset}": 5 for offset in (2, 3, 4)}
    loaded = load(forward, hints=hints)
    shapes = []

    def loss(output, _):
        shapes.extend(tuple(part.shape) for part in output)
        return output[0].sum()

    from dataclasses import replace

    trace_model(replace(loaded, loss_fn=loss), microbatch_size=16, dtype="float32")
    assert shapes == [(5, 8), (16,), (5,), (5,), (5,)]


def test_hints_are_numbers_too():
    assert count(trace(repeated, hints={line_of(repeated, 1): 3}), "addmm") == 3
    graph = trace(scaled, hints={line_of(scaled, 1): 2})
    assert (None, 2.0) in {op.arguments for op in graph.nodes if op.name == "mul"}


def test_a_hint_fills_what_python_takes_as_a_list():
    def forward(self, x):
        sizes = self.linear(x)[0].int().tolist()
        return self.linear(x) * sum(sizes)

    with pytest.raises(ModelError, match="reads the data"):
        trace(forward)
    graph = trace(forward, hints={line_of(forward, 1): 3})
    assert (None, 24) in {op.arguments for op in graph.nodes if op.name == "mul"}


def test_a_hint_may_name_a_caller_and_a_longer_path():
    def helper(x):
        return x.sum().item() > 0

    def forward(self, x):
        if helper(self.linear(x)):
            return self.linear(self.linear(x))
        return x

    for place in (line_of(helper, 1), line_of(forward, 1), "graph/" + line_of(forward, 1)):
        graph = trace(forward, hints={place: 1.0})
        assert count(graph, "addmm") == 3
    with pytest.raises(ModelError):
        trace(forward, hints={"other/" + line_of(forward, 1): 1.0})


@pytest.mark.parametrize(
    ("forward", "offset", "value", "words"),
    [
        (positive, 2, 3, "reads a truth value"),
        (repeated, 1, 0.5, "reads a whole number"),
        (repeated, 1, True, "reads a whole number"),
        (scaled, 1, False, "reads a number"),
        (masked, 2, 3, "chooses elements"),
        (masked, 2, -1, "chooses elements"),
        (masked, 2, 1.5, "chooses elements"),
        (masked, 2, True, "chooses elements"),
    ],
)
def test_a_hint_of_the_wrong_kind_is_refused(forward, offset, value, words):
    with pytest.raises(RequestError, match=words) as error:
        trace(forward, hints={line_of(forward, offset): value})
    assert error.value.hint


def test_a_hint_that_no_line_asked_for_is_refused():
    hints = {line_of(positive, 2): True, line_of(positive, 3): 2}
    with pytest.raises(RequestError, match=r"py:\d+=2: that line reads no data") as error:
        trace(positive, hints=hints)
    assert error.value.hint == f"Lines that do: {line_of(positive, 2)}."
    with pytest.raises(RequestError, match="reads no data"):
        trace_family(load(positive, hints=hints), dtype="float32")
    family = trace_family(load(positive, hints={line_of(positive, 2): True}), dtype="float32")
    assert family.is_affine


def test_shares_grow_with_the_batch():
    family = trace_family(load(masked, hints={line_of(masked, 2): 0.5}), dtype="float32")
    last = [op for op in family.at(64).nodes if op.name == "addmm"][-1]
    assert family.at(64).values[last.outputs[0]].shape == (32, 8)


def test_a_model_that_catches_our_error_is_refused_all_the_same():
    def forward(self, x):
        try:
            times = int(self.linear(x).sum())
        except Exception:
            times = 1
        return self.linear(x) * times

    with pytest.raises(ModelError, match="reads the data"):
        trace(forward)


@pytest.mark.parametrize(
    ("text", "value"),
    [("a.py:3=true", True), ("a.py:3 = False", False), ("a.py:3=7", 7), ("a.py:3=0.5", 0.5)],
)
def test_hints_are_written_as_file_line_value(text, value):
    assert parse_hint(text) == ("a.py:3", value)
    assert type(parse_hint(text)[1]) is type(value)


@pytest.mark.parametrize("text", ["a.py:3", "a.py:3=", "a.py:3=maybe", "=1", "a.py:3=[1]"])
def test_what_is_no_hint(text):
    with pytest.raises(RequestError, match="is no hint"):
        parse_hint(text)


@pytest.mark.parametrize("hints", [{"a.py": 1}, {":3": 1}, {"a.py:x": 1}, {"a.py:3": "yes"}])
def test_what_is_no_table_of_hints(hints):
    with pytest.raises(RequestError, match="is no hint"):
        make_hints(hints)


def test_hints_that_contradict_each_other():
    with pytest.raises(RequestError, match="contradict"):
        make_hints([("a.py:3", 1), ("a.py:3", 2)])
    assert len(make_hints([("a.py:3", 1), ("a.py:3", 1)])) == 1


def test_hints_from_files(tmp_path):
    hints = {"a.py:3": True, "a.py:4": 0.5}
    (tmp_path / "hints.json").write_text(json.dumps(hints))
    (tmp_path / "hints.toml").write_text('"a.py:3" = true\n"a.py:4" = 0.5\n')
    assert read_hints(tmp_path / "hints.json") == hints
    assert read_hints(tmp_path / "hints.toml") == hints
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "broken.toml").write_text("a b")
    for name, words in (
        ("list.json", "no table"),
        ("broken.toml", "is no TOML"),
        ("missing.json", "cannot read"),
    ):
        with pytest.raises(RequestError, match=words):
            read_hints(tmp_path / name)
