"""What a model reads without data: constants, what is changed in place, and what the plan says."""

import inspect

import pytest
import torch

from planner.runtime.known_data import DataRead, KnownData

HERE = "test_known_data.py"
META = torch.device("meta")


def known(*, tokens=None, reads=()):
    real = torch.tensor([[1, 2], [3, 0]]) if tokens is None else tokens
    on_meta = real.to(META)
    return on_meta, KnownData(on_meta, real, reads)


def answered(line, *numbers):
    """Say what a line of this file reads."""
    return [DataRead(HERE, line, tuple((number, 1) for number in numbers))]


def next_line():
    return inspect.currentframe().f_back.f_lineno + 1


@pytest.mark.parametrize(
    "change",
    [
        lambda mask: mask.fill_(0),
        lambda mask: mask.mul_(0),
        lambda mask: mask.__setitem__((slice(None), 0), 0),
        lambda mask: mask.masked_fill_(torch.ones(2, 2, dtype=torch.bool, device=META), 0),
        lambda mask: mask.copy_(torch.zeros(2, 2, dtype=torch.int64, device=META)),
    ],
)
def test_what_is_changed_in_place_stays_known(change):
    _, mode = known()
    with mode:
        mask = torch.ones(2, 2, dtype=torch.int64, device=META)
        before = mask + 0
        change(mask)
        assert not mask.all()
        assert before.all()


def test_a_view_is_not_known_after_its_memory_was_changed():
    _, mode = known()
    with mode:
        mask = torch.ones(2, 2, device=META)
        row = mask[0]
        mask.fill_(0)
        with pytest.raises(RuntimeError):
            bool(row.any())


def test_what_is_changed_by_unknown_data_is_not_known():
    unknown = torch.empty(2, device=META)
    _, mode = known()
    with mode:
        mask = torch.ones(2, device=META)
        mask.mul_(unknown)
        assert bool(torch.zeros_like(mask).any()) is False  # of its shape alone
        with pytest.raises(RuntimeError):
            bool(mask.all())


@pytest.mark.parametrize("where", [{"device": META}, {}])
def test_draws_are_what_the_plan_says(where):
    line = next_line() + 3
    _, mode = known(reads=answered(line, 0.0, 1.0))
    with mode:
        for expected in (False, True):
            found = bool(torch.rand((), **where) < 2)
            assert found is expected
        with pytest.raises(RuntimeError):
            bool(torch.rand((), **where) < 2)


KEPT = torch.tensor([1.0, 0.0])


def test_tensors_of_the_cpu_stand_beside_those_of_the_device():
    _, mode = known()
    with mode:
        x = torch.empty(2, 2, device=META)
        assert (x * torch.ones(2, 2).tril() + KEPT).is_meta
        positions = torch.arange(3)
        positions[0] = 5
        assert positions.tolist() == [5, 1, 2]
        assert torch.arange(3).numpy().sum() == 3
        assert bool((KEPT + torch.zeros(2, device=META)).any())


def test_a_known_mask_chooses_of_unknown_data():
    tokens, mode = known()
    with mode:
        x = torch.empty(2, 2, 5, device=META, requires_grad=True)
        chosen = x[tokens > 0]
        assert chosen.shape == (3, 5)
        assert x[:, tokens[0] > 1].shape == (2, 1, 5)
        y = x * 1
        y[tokens > 0] = chosen * 2
        y.sum().backward()
    assert x.grad.shape == x.shape


def test_lists_and_names_are_made_of_numbers():
    unknown = torch.empty(2, 2, dtype=torch.int64, device=META)
    line = next_line() + 2
    tokens, mode = known(reads=answered(line, 1, 2, 3, 4) + answered(line + 1, 7))
    with mode:
        assert unknown.tolist() == [[1, 2], [3, 4]]
        assert f"expert_{unknown[0, 0]}" == "expert_7"
        assert tokens.tolist() == [[1, 2], [3, 0]]
        assert [f"{token:02d}" for token in tokens[1]] == ["03", "00"]
        with pytest.raises(RuntimeError):
            f"{unknown[0, 0]}"


CHOICES = {
    "bincount": lambda x, _: torch.bincount(x, minlength=4),
    "bincount of weights": lambda x, _: x.bincount(x.half()),
    "positions": lambda x, _: torch.repeat_interleave(x),
    "rows": lambda x, table: table.repeat_interleave(x, dim=0),
    "elements": lambda x, _: torch.repeat_interleave(x, x),
    "unique": lambda x, _: torch.unique(x),
    "unique rows": lambda _, table: torch.unique(table, return_inverse=True, dim=0),
    "unique and counts": lambda x, _: x.unique(return_inverse=True, return_counts=True),
    "consecutive": lambda x, _: torch.unique_consecutive(x, return_counts=True),
    "argwhere": lambda x, _: torch.argwhere(x),
}


@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
def test_results_that_data_size_are_as_large_as_the_plan_says(choose):
    numbers, table = torch.tensor([0, 3, 3]), torch.tensor([[1.0, 2.0], [3.0, 1.0], [3.0, 1.0]])
    expected = choose(numbers, table)
    first = expected[0] if isinstance(expected, tuple) else expected
    line = choose.__code__.co_firstlineno
    _, mode = known(reads=answered(line, first.shape[0]))
    with mode:
        found = choose(numbers.to(META), table.to(META))
    each = zip(*([x] if torch.is_tensor(x) else x for x in (found, expected)), strict=True)
    assert all(a.shape == b.shape and a.dtype is b.dtype for a, b in each)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of importing what compiles
def test_what_the_model_compiles_runs_as_it_is_written():
    @torch.compile
    def gated(x):
        assert not torch.compiler.is_compiling()
        return x * torch.sigmoid(x)

    numbers, mode = known(tokens=torch.ones(2, dtype=torch.int64))
    with mode:
        assert gated(numbers).shape == (2,)
        assert bool((gated(numbers) < 1).all())


@pytest.mark.parametrize("options", [{"enabled": False}, {"dtype": torch.bfloat16}])
def test_code_under_autocast_for_its_tensors_runs_without_data(options):
    numbers, mode = known()
    with mode, torch.autocast(numbers.device.type, **options):
        assert (numbers.double() @ numbers.double()).dtype is torch.float64
    with pytest.raises(RuntimeError):
        torch.autocast(META.type, **options)


def test_set_aside_it_answers_nothing_and_lets_what_is_compiled_be_compiled():
    drawn = []

    def backend(graph, _):
        drawn.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    _, mode = known()
    with mode:
        mask = torch.ones(2, device=META)
        with mode.set_aside():
            with pytest.raises(RuntimeError):
                mask.all().item()
            compiled(torch.ones(3, device=META))
        assert mask.all()
        compiled(torch.ones(4, device=META))  # as it is written
    assert len(drawn) == 1
