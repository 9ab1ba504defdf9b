"""The pattern in which a model repeats its blocks."""

from functools import cache
from itertools import groupby

import pytest
from graph_models import EagerBlock, example, mean_square, vectors, wrap
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from planner.graph.analysis.patterns import (
    block_kinds,
    block_pattern,
    find_pattern,
    letter_name,
    saved_bytes_by_unit,
)
from planner.graph.trace import trace_model


@pytest.mark.parametrize(
    ("letters", "words"),
    [
        ("", ""),
        ("A", "A"),
        ("AB", "A + B"),
        ("A" * 126, "126 A"),
        ("A" + "B" * 23, "A + 23 B"),
        ("AAA" + "B" * 58, "3 A + 58 B"),
        ("ABABABAB", "4 x (A B)"),
        ("AAAB" * 8 + "AA", "8 x (A A A B) + 2 A"),
        ("AAAAAB" * 10 + "AA", "10 x (5 A + B) + 2 A"),
        ("C" + "ABBA" * 3, "C + 3 x (A B B A)"),
        ("ABCDE", "A + B + C + D + E"),
        ("AAAAA" + "AAB" * 3, "5 A + 3 x (A A B)"),
    ],
)
def test_patterns_are_written_as_a_person_would(letters, words):
    assert str(find_pattern(letters)) == words


def test_letters_go_on_after_z():
    assert [letter_name(number) for number in (0, 25, 26, 27, 51, 52, 701, 702)] == [
        *("A", "Z", "AA", "AB", "AZ", "BA", "ZZ", "AAA"),
    ]


@given(st.lists(st.sampled_from(["A", "B", "C", "AA"]), max_size=60))
def test_a_pattern_expands_to_its_sequence(letters):
    assert find_pattern(letters).expand() == tuple(letters)


@given(st.text(alphabet="AB", max_size=12))
def test_no_description_is_shorter(letters):
    assert symbols(find_pattern(letters)) == fewest_symbols(letters)


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.text(alphabet="ABC", min_size=1, max_size=4)), max_size=4
    )
)
def test_a_pattern_is_never_longer_than_what_made_the_sequence(parts):
    pattern = find_pattern("".join(group * count for count, group in parts))
    assert symbols(pattern) <= sum(group_symbols(group, count) for count, group in parts)


def symbols(pattern):
    return sum(group_symbols("".join(term.letters), term.count) for term in pattern.terms)


def group_symbols(group, count):
    inside = sum(1 if len(list(run)) == 1 else 2 for _, run in groupby(group))
    if count == 1:
        return inside
    return inside + (1 if len(group) == 1 else 2)


@cache
def fewest_symbols(letters):
    """Try every first term."""
    if not letters:
        return 0
    best = len(letters)
    for length in range(1, len(letters) + 1):
        group, count = letters[:length], 1
        while letters.startswith(group * count):
            rest = fewest_symbols(letters[length * count :])
            best = min(best, group_symbols(group, count) + rest)
            count += 1
    return best


class Wide(nn.Sequential):
    """A residual block with an inner layer of its own width."""

    def __init__(self, inner):
        super().__init__(nn.Linear(8, inner), nn.Tanh(), nn.Linear(inner, 8))

    def forward(self, x):
        return x + super().forward(x)


def mixed(letters):
    return nn.Sequential(*(Wide({"A": 16, "B": 32}[letter]) for letter in letters))


def test_a_graph_knows_its_kinds_of_blocks():
    model = wrap(lambda: mixed("AABAABA"), vectors(8), mean_square)
    graph = trace_model(model, microbatch_size=4, dtype="float32")
    # The first block needs no gradient of its input, and so it is a kind of its own.
    assert str(block_pattern(graph)) == "A + 2 x (B C B)"
    first, narrow, wide = block_kinds(graph)
    assert [(kind.letter, kind.count, kind.first) for kind in block_kinds(graph)] == [
        ("A", 1, "0"),
        ("B", 4, "1"),
        ("C", 2, "2"),
    ]
    assert first.num_parameters == narrow.num_parameters == 8 * 16 + 16 + 16 * 8 + 8
    assert wide.num_parameters == 8 * 32 + 32 + 32 * 8 + 8
    assert narrow.forward_flop == 2 * 2 * 4 * 8 * 16
    assert narrow.backward_flop == 2 * narrow.forward_flop
    assert first.backward_flop == narrow.forward_flop + narrow.forward_flop // 2
    # Its input and the output of tanh, which serves the second layer too.
    assert narrow.saved_bytes == 4 * (8 + 16) * 4
    assert wide.saved_bytes == 4 * (8 + 32) * 4


def test_what_blocks_share_is_counted_once():
    graph = trace_model(example("llama.py"), microbatch_size=2, dtype="bfloat16")
    saved = saved_bytes_by_unit(graph)
    assert sum(saved) == graph.saved_bytes
    (kind,) = block_kinds(graph)
    assert kind.saved_bytes == saved[2]
    assert kind.count * kind.num_parameters < graph.num_parameters


def test_a_model_without_blocks_has_no_pattern():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = EagerBlock(8, 2)

        def forward(self, x):
            return self.block(x.unsqueeze(1))

    graph = trace_model(wrap(Model, vectors(8), mean_square), microbatch_size=2, dtype="float32")
    assert block_kinds(graph) == ()
    assert block_pattern(graph).terms == ()
