from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import RequestError
from planner.questions.values import MOST_VALUES, count, prices, whole_numbers

NUMBERS = st.integers(1, 100_000)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8", (8,)),
        ("16,8,16", (16, 8)),
        ("8..64", (8, 16, 32, 64)),
        ("8..100", (8, 16, 32, 64, 100)),
        ("8..8", (8,)),
        ("8..40:16", (8, 24, 40)),
        ("8..44:16", (8, 24, 40, 44)),
        ("1, 8..16:4", (1, 8, 12, 16)),
    ],
)
def test_lists_of_numbers(text, expected):
    assert whole_numbers("--gpus", text) == expected


@pytest.mark.parametrize(
    "text", ["", "0", "-8", "8..", "..8", "64..8", "8..64:0", "eight", "8:16", "1..100000:1", "8.5"]
)
def test_what_is_no_list_is_refused_with_the_option(text):
    with pytest.raises(RequestError, match=r"^--gpus"):
        whole_numbers("--gpus", text)


@given(first=NUMBERS, end=NUMBERS)
def test_a_range_rises_from_its_first_number_to_its_last(first, end):
    first, end = sorted((first, end))
    found = whole_numbers("--gpus", f"{first}..{end}")
    assert found[0] == first
    assert found[-1] == end
    assert all(2 * a >= b > a for a, b in pairwise(found))


@given(first=NUMBERS, end=NUMBERS, step=NUMBERS)
def test_steps_are_even_but_for_the_last(first, end, step):
    first, end = sorted((first, end))
    if (end - first) / step > MOST_VALUES - 2:
        return
    found = whole_numbers("--gpus", f"{first}..{end}:{step}")
    assert set(found) == {*range(first, end, step), end}


@pytest.mark.parametrize(
    ("text", "expected"), [("15T", 15e12), ("300B", 3e11), ("1.5e12", 1.5e12), ("7", 7.0)]
)
def test_counts(text, expected):
    assert count("--tokens", text) == expected


@pytest.mark.parametrize("text", ["0", "-1B", "T", "nan", "inf", "many"])
def test_what_is_no_count_is_refused(text):
    with pytest.raises(RequestError, match=r"^--tokens"):
        count("--tokens", text)


def test_a_price_is_of_all_clusters_or_of_one():
    assert prices("--price", ["2"], ["a", "b"]) == {"a": 2.0, "b": 2.0}
    assert prices("--price", ["2", "b=3"], ["a", "b"]) == {"a": 2.0, "b": 3.0}
    assert prices("--price", ["./own=x.toml=3"], ["./own=x.toml"]) == {"./own=x.toml": 3.0}


@pytest.mark.parametrize("text", ["c=2", "free", "0", "a=", "=2"])
def test_what_is_no_price_is_refused(text):
    with pytest.raises(RequestError, match=r"^--price"):
        prices("--price", [text], ["a", "b"])
