from pathlib import Path

import networkx as nx
import pandas as pd
import pytest
import torch
from plan_factory import make_record

import planner
from planner import api
from planner.errors import ModelError, ProfileError, RequestError

EXAMPLES = Path(__file__).parents[1] / "examples"


class Model:
    """Stands for a module: all that matters here is that it can be called."""

    def __call__(self):
        raise AssertionError("not called")


@pytest.fixture
def searched(monkeypatch):
    calls = []

    def search(request, model_object, *, estimate_only, progress):
        calls.append((request, model_object, estimate_only))
        return make_record()

    monkeypatch.setattr(api, "plan_record", search)
    return calls


def test_arguments_become_the_request(searched):
    result = planner.plan(
        "model.py",
        gpus=8,
        cluster="cpu",
        global_batch_size=32,
        fix={"tp": 2, "sequence_parallel": True},
        time_limit_s=5,
        hints={"model.py:57": True},
    )
    assert result.best.degrees.tp == 2
    request, model_object, estimate_only = searched[0]
    assert request.model == "model.py"
    assert request.cluster == "cpu"
    assert request.global_batch_size == 32
    assert request.fixed == (("tp", "2"), ("sequence_parallel", "true"))
    assert request.time_limit_s == 5
    assert request.hints == (("model.py:57", True),)
    assert model_object is None
    assert not estimate_only


def test_an_estimate_asks_for_no_search(searched):
    planner.estimate("model.py", gpus=8, fix={"tp": 2})
    assert searched[0][2]


def test_an_object_is_kept_beside_its_description(searched):
    def example_batch(microbatch_size):
        raise AssertionError("not called")

    model = Model()
    planner.plan(model, gpus=8, example_batch=example_batch)
    request, model_object, _ = searched[0]
    assert request.model == "Model (nn.Module)"
    assert model_object.model is model
    assert model_object.example_batch is example_batch


def test_a_factory_is_described_by_its_name(searched):
    def build_tiny():
        raise AssertionError("not called")

    planner.plan(build_tiny, gpus=8, example_batch=lambda microbatch_size: None)
    assert "build_tiny (factory)" in searched[0][0].model


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": "model.py", "gpus": 0}, "--gpus 0"),
        ({"model": "model.py", "gpus": 8, "fix": {"tp": 3}}, "What divides 8"),
        ({"model": "model.py", "gpus": 8, "fix": {"tensor": 2}}, "nothing is named tensor"),
        ({"model": "model.py", "gpus": 8, "loss_fn": print}, "offers its own"),
        ({"model": 3, "gpus": 8}, "neither a path, a module nor a function"),
    ],
)
def test_an_impossible_call_is_refused(searched, arguments, words):
    with pytest.raises(RequestError) as caught:
        planner.plan(**arguments)
    assert words in str(caught.value)
    assert caught.value.hint
    assert searched == []


def test_an_unknown_cluster_is_a_profile_error(tmp_path):
    with pytest.raises(ProfileError):
        planner.plan("model.py", gpus=8, cluster="h1000")


def test_a_missing_model_file_is_a_model_error(tmp_path):
    with pytest.raises(ModelError):
        planner.plan(str(tmp_path / "model.py"), gpus=8)


def test_an_object_without_data_is_a_model_error():
    with pytest.raises(ModelError, match="example_batch"):
        planner.plan(Model(), gpus=8)


def test_warnings_name_settings_without_effect(searched):
    result = planner.plan("model.py", gpus=8, fix={"schedule": "1F1B"})
    assert result.warnings == ("--fix schedule=1F1B has no effect: the plan has pp=1",)


def test_a_trace_gives_the_operator_graph_and_what_follows_from_it():
    result = planner.trace(str(EXAMPLES / "gpt.py"), microbatch_size=2, seq_len=32, dtype="float32")
    graph = result.graph
    assert isinstance(graph, planner.OperatorGraph)
    assert (graph.microbatch_size, graph.tokens_per_sample, graph.dtype) == (2, 32, "float32")
    assert isinstance(result.nx, nx.DiGraph)
    assert isinstance(result.ops, pd.DataFrame)
    assert len(result.nx) == len(result.ops) == len(graph.nodes)
    assert str(result.block_pattern) == "8 A"
    assert [cut.after_unit for cut in result.cuts] == list(range(9))
    assert result.saved_bytes == graph.saved_bytes
    assert result.warnings == ()
    assert repr(result).startswith(f"TraceResult('{graph.model}', microbatch 2 x 32 tokens")
    assert "<td>transformer.h.0</td>" in result._repr_html_()


def test_a_module_can_be_traced():
    model = torch.nn.Linear(3, 5, device="meta")
    graph = planner.trace(
        model,
        example_batch=lambda size: (torch.randn(size, 3), torch.randn(size, 5)),
        loss_fn=torch.nn.functional.mse_loss,
    )
    assert graph.model == "Linear"
    assert graph.num_parameters == 20
    assert graph.forward_flop == 2 * 3 * 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"microbatch_size": 0}, "--microbatch-size 0: it must be at least 1"),
        ({"seq_len": 0}, "--seq-len 0: it must be at least 1"),
        ({"dtype": "bf16"}, "Did you mean bfloat16?"),
        ({"loss_fn": print}, "offers its own"),
    ],
)
def test_an_impossible_trace_is_refused(arguments, words):
    with pytest.raises(RequestError) as caught:
        planner.trace("model.py", **arguments)
    assert words in str(caught.value)


def test_a_trace_tells_its_phases():
    events = []
    planner.trace(str(EXAMPLES / "mlp.py"), progress=events.append)
    ends = [event.phase for event in events if event.elapsed_s is not None]
    assert ends == ["load", "trace"]


def test_a_model_is_traced_for_all_lengths_at_once():
    llama = str(EXAMPLES / "llama.py")
    family = planner.trace_lengths(llama, longest=64, dtype="float32")
    fresh = planner.trace(llama, microbatch_size=3, seq_len=40, dtype="float32")
    assert family.at(3, 40) == fresh
