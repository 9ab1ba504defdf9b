"""A plan beside a log, a trace or another plan, part by part."""

import json

import pytest

import planner
from planner.cli.main import run
from planner.errors import RequestError
from planner.plan.serialize import load_saved_plan
from planner.validation.compare import compare_measured, compare_plans
from planner.validation.reading.torch_trace import read_torch_trace

MODEL = """
import torch
from torch import nn


def build_model():
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


def example_batch(microbatch_size):
    return torch.randn(microbatch_size, 64), torch.randn(microbatch_size, 64)


def loss_fn(output, targets):
    return (output - targets).square().mean()
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("compare")
    (root / "net.py").write_text(MODEL)
    for name, fix in (("sharded", {"dp_shard": 2}), ("staged", {"pp": 2})):
        result = planner.estimate(
            str(root / "net.py"), gpus=2, cluster="cpu", dtype="float32", fix=fix
        )
        result.save(root / name, script=False)
    return root


def span(name, begin_us, end_us, *, cat="user_annotation", tid=1, **args):
    return {
        "ph": "X", "name": name, "cat": cat, "tid": tid, "ts": begin_us, "dur": end_us - begin_us,
        "args": args,
    }  # fmt: skip


def write_trace(file, plan, events):
    document = {"plan": plan, "distributedInfo": {"rank": 1}, "traceEvents": events}
    file.write_text(json.dumps(document))
    return file


GLOO = [
    span("plan: step", 0, 1000),
    span("FSDP::pre_forward (0)", 10, 120),
    span("c10d::_allgather_base_", 20, 30, cat="cpu_op"),
    span("gloo:all_gather", 25, 115, tid=2),  # 90 of data parallelism
    span("autograd::engine::evaluate_function: X", 120, 500, cat="cpu_op"),
    span("aten::mm", 120, 320, cat="cpu_op"),  # 200 of compute
    span("aten::copy_", 200, 210, cat="cpu_op"),  # inside it
    span("c10d::allreduce_", 310, 315, cat="cpu_op"),
    span("gloo:all_reduce", 312, 380, tid=3),  # 60 of tensor parallelism, 8 behind compute
    span("FSDP::post_backward_reduce (0)", 400, 460),
    span("c10d::_reduce_scatter_base_", 405, 410, cat="cpu_op"),
    span("gloo:all_reduce", 408, 458, tid=2),  # 50 of data parallelism
    span("gloo:recv", 500, 600),  # 10 of a transfer and 90 of waiting
    span("gloo:recv", 600, 610),  # 10 of a transfer
    span("plan: update", 700, 800),  # 100, a collective among them
    span("c10d::allreduce_", 710, 715, cat="cpu_op"),
    span("gloo:all_reduce", 712, 730, tid=3),
    span("c10d::allreduce_", 900, 905, cat="cpu_op"),
    span("gloo:all_reduce", 903, 943, tid=4),  # 40 until all ranks are there
]


def test_gloo_spans_are_parts_of_a_step(tmp_path):
    trace = read_torch_trace(write_trace(tmp_path / "rank-1.json", "p", GLOO))
    (step,) = trace.steps
    found_us = {name: round(getattr(step, name) * 1e6) for name in step.__slots__}
    assert found_us == {
        "compute_s": 200,
        "split_comm_s": 60,
        "pp_comm_s": 20,
        "dp_comm_s": 140,
        "bubble_s": 130,
        "update_s": 100,
        "host_s": 350,
    }
    assert trace.rank == 1
    assert step.step_time_s == pytest.approx(1000e-6)


def test_nccl_kernels_are_told_by_their_groups(tmp_path):
    def kernel(name, begin_us, end_us, group=""):
        return span(name, begin_us, end_us, cat="kernel", **{"Process Group Description": group})

    events = [
        span("plan: step", 0, 1000),
        span("aten::mm", 0, 900, cat="cpu_op"),  # the host's
        kernel("gemm", 100, 300),
        kernel("ncclDevKernel_AllGather_RING", 250, 350, "mesh_dp_shard"),
        kernel("ncclDevKernel_AllReduce_Sum", 350, 400, "mesh_tp"),
        kernel("ncclDevKernel_SendRecv", 400, 430, "mesh_pp"),
        kernel("ncclDevKernel_SendRecv", 470, 477, "mesh_cp"),  # what attention exchanges
        kernel("ncclDevKernel_ReduceScatter", 440, 460, "mesh_dp_replicate_dp_shard"),
        span("plan: update", 500, 560, cat="gpu_user_annotation"),
        span("plan: update", 10, 30),
        kernel("adamw", 510, 550),
    ]
    (step,) = read_torch_trace(write_trace(tmp_path / "rank-0.json", "p", events)).steps
    found_us = {name: round(getattr(step, name) * 1e6) for name in step.__slots__}
    assert found_us == {
        "compute_s": 200,
        "split_comm_s": 50 + 7,
        "pp_comm_s": 30,
        "dp_comm_s": 70,
        "bubble_s": 0,
        "update_s": 60,
        "host_s": 583,
    }


def test_a_trace_stands_beside_its_plan(folders, tmp_path):
    saved = load_saved_plan(folders / "sharded")
    events = [span("plan: step", 0, 4e6), span("aten::mm", 0, 3e6, cat="cpu_op")]
    file = write_trace(tmp_path / "rank-0.json", saved.digest, events)
    parts = {part.name: part for part in compare_measured(folders / "sharded", file).parts}
    assert parts["step_time_s"].second == pytest.approx(4)
    assert parts["compute_s"].second == pytest.approx(3)
    assert parts["host_s"].second == pytest.approx(1)
    costs = saved.plan.costs
    planned = [part.first for name, part in parts.items() if name != "step_time_s"]
    assert sum(planned) == pytest.approx(costs.step_time_s)
    assert parts["dp_comm_s"].first == costs.dp_comm_s > 0


def test_of_a_folder_of_traces_the_rank_that_computes_longest_is_taken(folders, tmp_path):
    saved = load_saved_plan(folders / "staged")
    with pytest.raises(RequestError, match="holds no trace"):
        compare_measured(folders / "staged", tmp_path)
    for rank, computed_us in enumerate((1e6, 3e6)):
        events = [span("plan: step", 0, 4e6), span("aten::mm", 0, computed_us, cat="cpu_op")]
        write_trace(tmp_path / f"rank-{rank}.json", saved.digest, events)
    comparison = compare_measured(folders / "staged", tmp_path)
    (compute,) = [part for part in comparison.parts if part.name == "compute_s"]
    assert compute.second == pytest.approx(3)
    assert "which computes longest" in comparison.notes[0]


def test_a_log_has_the_step_and_the_memory(folders, tmp_path, capsys):
    saved = load_saved_plan(folders / "sharded")
    rows = [
        {"step": step, "step_time_s": 2.0, "peak_memory_bytes": 2**30, "plan": saved.digest}
        for step in range(1, 6)
    ]
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(map(json.dumps, rows)))
    assert run(["compare", str(folders / "sharded"), "--measured", str(log), "--json"]) == 0
    parts = {part["name"]: part for part in json.loads(capsys.readouterr().out)["parts"]}
    assert parts["step_time_s"]["second"] == 2
    assert parts["peak_memory_bytes"]["second"] == 2**30
    assert parts["dp_comm_s"]["second"] is None


def test_plans_differ_in_their_terms(folders, capsys):
    comparison = compare_plans(folders / "sharded" / "plan.json", folders / "staged")
    parts = {part.name: part for part in comparison.parts}
    first, second = (load_saved_plan(folders / name).plan for name in ("sharded", "staged"))
    assert parts["bubble_s"].first == 0 < parts["bubble_s"].second == second.costs.bubble_s
    assert parts["step_time_s"].first == first.costs.step_time_s
    assert comparison.notes == ()
    assert run(["compare", str(folders / "sharded"), str(folders / "staged"), "--no-color"]) == 0
    said = capsys.readouterr().out
    assert "pipeline bubble" in said
    assert "tensor-parallel" not in said  # neither has it


def test_a_run_of_another_plan_is_refused(folders, tmp_path, capsys):
    other = load_saved_plan(folders / "staged").digest
    trace = write_trace(tmp_path / "rank-0.json", other, [span("plan: step", 0, 1)])
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"step": 1, "step_time_s": 1.0, "plan": other}))
    for measured in (trace, log):
        assert run(["compare", str(folders / "sharded"), "--measured", str(measured)]) == 2
        told = capsys.readouterr()
        assert other in told.err
        assert not told.out


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"traceEvents": []}', '{"traceEvents": [], "plan": "p"}']
)
def test_what_is_no_trace_of_a_script_is_refused(tmp_path, text):
    file = tmp_path / "trace.json"
    file.write_text(text)
    with pytest.raises(RequestError, match=r"trace\.json"):
        read_torch_trace(file)


def test_one_thing_is_compared_with(folders, capsys):
    plan = str(folders / "sharded")
    assert run(["compare", plan]) == 2
    assert run(["compare", plan, plan, "--measured", "log.jsonl"]) == 2
    assert "two things" in capsys.readouterr().err
