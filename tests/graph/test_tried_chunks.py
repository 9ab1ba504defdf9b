"""Layouts of the end of a model, tried with its loss in chunks."""

from pathlib import Path

import pytest

from planner.graph.loading.load import load_model
from planner.graph.trace import trace_model
from planner.graph.trial import LayoutTrial, TriedLayout, TriedModule
from planner.runtime.layout import SplitAxis

LLAMA = Path(__file__).parents[2] / "examples" / "llama.py"
HEAD = "output"


@pytest.fixture(scope="module")
def trial():
    model = load_model(str(LLAMA))
    return LayoutTrial(model, trace_model(model, microbatch_size=2, dtype="float32"), "float32")


def head(output_layout):
    """The head over tp, each rank with some of the classes, which it hands on in a layout."""
    module = TriedModule(
        module=HEAD, style="column", split=(("weight", 0, 1),),
        input_layout="Replicate", output_layout=output_layout,
    )  # fmt: skip
    return [TriedLayout(over=SplitAxis("tp", 2), sequence_dim=None, modules=(module,))]


@pytest.mark.parametrize("logits", ["", HEAD])
def test_classes_of_each_rank_run_whole_and_in_chunks(trial, logits):
    assert trial.ends(head("Shard(-1)"), logits) is None


def test_logits_that_are_gathered_run_whole_and_are_refused_in_chunks(trial):
    assert trial.ends(head("Replicate")) is None
    refusal = trial.ends(head("Replicate"), HEAD)
    assert refusal is not None
    assert "before it is made" in refusal.reason


@pytest.mark.parametrize("sizes", [(4, 2), (2, 4)])
def test_what_was_tried_before_changes_no_answer(trial, sizes):
    """All tries read the same inputs, of which each takes parts of another size."""
    for size in sizes:
        modules = tuple(
            TriedModule(
                module=path,
                style="on_part",
                split=(),
                input_layout="Shard(1)",
                output_layout="Shard(1)",
            )
            for path in ("tok_embeddings", "norm", HEAD)
        )
        over = SplitAxis("cp", size)
        assert trial.ends([TriedLayout(over=over, sequence_dim=1, modules=modules)]) is None
