"""What a trace tells while it runs."""

import pytest
from graph_models import example

from planner.graph.recording import trace_progress
from planner.graph.trace import trace_model


@pytest.fixture(scope="module")
def told():
    """Every event of one trace, however fast it is."""
    events = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trace_progress, "INTERVAL_S", 0.0)
        graph = trace_model(
            example("gpt.py"), microbatch_size=1, dtype="float32", progress=events.append
        )
    return graph, events


def test_it_goes_from_nothing_to_all_of_it(told):
    _, events = told
    fractions = [event.fraction for event in events]
    assert fractions == sorted(fractions)
    assert 0 < fractions[0] < 0.1
    assert fractions[-2] == pytest.approx(trace_progress.STEP_SHARE, rel=0.01)
    assert fractions[-1] == trace_progress.STEP_SHARE
    assert all(event.phase == "trace" and event.elapsed_s is None for event in events)


def test_it_says_which_pass_runs_and_counts_operators(told):
    graph, events = told
    passes = [event.detail.split(",")[0] for event in events]
    assert list(dict.fromkeys(passes)) == ["forward", "backward", "dividing into blocks"]
    last_of_forward = events[passes.index("backward") - 1]
    assert last_of_forward.fraction == pytest.approx(trace_progress.FORWARD_SHARE, rel=0.1)
    assert events[-1].detail == f"dividing into blocks, {len(graph.nodes):,} operators"


def test_the_graph_is_the_same_with_and_without(told):
    graph, _ = told
    assert trace_model(example("gpt.py"), microbatch_size=1, dtype="float32") == graph


def test_it_is_told_a_few_times_a_second_at_most():
    events = []
    trace_model(example("gpt.py"), microbatch_size=1, dtype="float32", progress=events.append)
    assert len(events) < 50
