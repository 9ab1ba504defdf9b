"""The words of plans and requests are written in one module."""

import ast
import json
from pathlib import Path

import pytest

from planner import vocabulary
from planner.vocabulary import Axis, Recomputation, Schedule, Style

PACKAGE = Path(vocabulary.__file__).parent

ONE_MEANING = {
    *(Axis.DP_REPLICATE, Axis.DP_SHARD),
    *(set(Schedule) - {Schedule.NONE}),
    *(Recomputation.SELECTIVE, Recomputation.EVERY_OTHER_LAYER),
    Style.VOCAB_EMBEDDING,
}
"""Words that mean nothing else anywhere; "tp" is a column of tables, too, "none" many things."""

FILES = [
    file
    for file in sorted(PACKAGE.rglob("*.py"))
    # Copied beside scripts, where it imports nothing of ours.
    if PACKAGE / "runtime" not in file.parents and file.name != "vocabulary.py"
]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(PACKAGE).as_posix())
def test_no_word_is_written_twice(file):
    strings = {
        node.value
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert not strings & ONE_MEANING


def test_a_word_is_shown_and_written_as_its_string():
    word = Schedule.ONE_F_ONE_B
    assert (f"{word}", repr(word), json.dumps([word])) == ("1F1B", "'1F1B'", '["1F1B"]')
    assert {word: 1} == {"1F1B": 1}
