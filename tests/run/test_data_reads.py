"""Hints and assumptions reach the script: what is planned with them trains."""

import sys
from pathlib import Path

import pytest
from launch import (
    arguments_of,
    largest_difference,
    largest_weight_difference,
    outcome_of,
    run_jobs,
)

import planner
from planner.cli.main import run
from planner.errors import CodegenError, RequestError

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
from families import fast_links, split_words

pytestmark = pytest.mark.run

MODEL = Path(__file__).with_name("routed_moe.py")
LINES = MODEL.read_text().splitlines()
HINTED, ASKED = (
    f"{MODEL.name}:{1 + next(i for i, line in enumerate(LINES) if mark in line)}"
    for mark in ("# HINTED", "# ASKED")
)
REQUEST = {
    "gpus": 2, "cluster": "cpu", "dtype": "float64", "global_batch_size": 8,
    "fix": {"pp": 2, "schedule": "1F1B", "microbatch_size": 2},
}  # fmt: skip


def test_a_script_gets_what_hints_and_assumptions_answer(tmp_path):
    result = planner.plan(str(MODEL), hints={ASKED: False}, **REQUEST)
    reads = {f"{read.file}:{read.line}": read for read in result.best.data_reads}
    assert reads[ASKED].answers == (0.0,)
    assert reads[ASKED].repeats == (4,)
    # Two of four experts for each of 2 x 16 tokens, evenly: 16 for each expert of each block.
    assert reads[HINTED].answers == (16.0,)
    assert reads[HINTED].repeats == (16,)
    result.save(tmp_path)
    run_jobs([(tmp_path, arguments_of(tmp_path, name="reference", extra=("--reference",)))])
    run_jobs([(tmp_path, arguments_of(tmp_path))], num_processes=2)
    expected = outcome_of(tmp_path, name="reference")
    assert largest_difference(outcome_of(tmp_path).losses, expected.losses) < 1e-8


def test_lists_and_names_of_what_is_assumed_reach_the_script(tmp_path):
    model = MODEL.with_name("listed_experts.py")
    request = {**REQUEST, "cluster": fast_links(tmp_path), "fix": {"tp": 2}}
    result = planner.plan(str(model), **request)
    (reads,) = result.best.data_reads  # names and masks follow from constants
    assert "# LISTED" in model.read_text().splitlines()[reads.line - 1]
    # Two of four experts for each of 8 x 16 rows, evenly, in each of four blocks.
    assert (set(reads.answers), sum(reads.repeats)) == ({64.0}, 16)
    assert split_words(result.best).startswith("4/4 blocks")
    names = {module.module for group in result.best.shardings for module in group.modules}
    assert {"shared", "embed"} <= names
    result.save(tmp_path / "plan")
    folder = tmp_path / "plan"
    run_jobs([(folder, arguments_of(folder, name="reference", extra=("--reference",)))])
    run_jobs([(folder, arguments_of(folder))], num_processes=2)
    expected, found = outcome_of(folder, name="reference"), outcome_of(folder)
    assert largest_difference(found.losses, expected.losses) < 1e-8
    assert largest_weight_difference(found.weights, expected.weights) < 1e-8


@pytest.mark.parametrize("fix", [{"dp_shard": 2}, {"dp_replicate": 2, "dp_shard": 1}])
def test_ranks_may_use_different_parameters_and_nobody_some(tmp_path, fix):
    model = str(MODEL.with_name("skipped_experts.py"))
    fix |= {"microbatch_size": 1, "reshard_after_forward": fix["dp_shard"] > 1}
    planner.plan(model, **{**REQUEST, "global_batch_size": 4, "fix": fix}).save(tmp_path)
    run_jobs([(tmp_path, arguments_of(tmp_path, name="reference", extra=("--reference",)))])
    run_jobs([(tmp_path, arguments_of(tmp_path))], num_processes=2)
    expected, found = outcome_of(tmp_path, name="reference"), outcome_of(tmp_path)
    assert largest_difference(found.losses, expected.losses) < 1e-8
    assert largest_weight_difference(found.weights, expected.weights) < 1e-8


@pytest.mark.parametrize(
    "fix",
    [
        {"dp_shard": 2, "microbatch_size": 4},
        {"dp_replicate": 2, "dp_shard": 1, "microbatch_size": 4},
        {"tp": 2, "microbatch_size": 8},
    ],
)
def test_all_ranks_leave_out_the_blocks_that_one_process_does(tmp_path, fix):
    """By draws of the host, of which one process makes as many as each rank."""
    model = str(MODEL.with_name("skipped_blocks.py"))
    alone = {**REQUEST, "gpus": 1, "fix": {"microbatch_size": 8}}
    planner.plan(model, **alone).save(tmp_path / "alone")
    planner.plan(model, **{**REQUEST, "fix": fix}).save(tmp_path / "two")
    run_jobs([(tmp_path / "alone", arguments_of(tmp_path / "alone"))])
    run_jobs([(tmp_path / "two", arguments_of(tmp_path / "two"))], num_processes=2)
    expected, found = outcome_of(tmp_path / "alone"), outcome_of(tmp_path / "two")
    assert largest_difference(found.losses, expected.losses) < 1e-8
    assert largest_weight_difference(found.weights, expected.weights) < 1e-8


def test_a_block_that_a_draw_may_leave_out_is_no_place_for_a_stage():
    model = str(MODEL.with_name("skipped_blocks.py"))
    with pytest.raises(RequestError, match="a random draw that skipped_blocks") as caught:
        planner.plan(model, **REQUEST)
    assert "pp 2 needs 2 stages" in str(caught.value)


def test_a_line_that_a_warning_names_takes_a_hint():
    plain = planner.trace(str(MODEL), hints={ASKED: False})
    assert any(HINTED in note for note in plain.graph.notes)
    hinted = planner.trace(str(MODEL), hints={ASKED: False, HINTED: 4})
    assert hinted.graph.forward_flop < plain.graph.forward_flop
    assert not any(HINTED in note for note in hinted.graph.notes)


def test_what_the_script_cannot_answer_is_refused_at_planning(tmp_path, capsys):
    model = tmp_path / "model.py"
    text = MODEL.read_text()
    line = next(line for line in LINES if "# ASKED" in line)
    model.write_text(text.replace(line, "        if x.abs().amax().numpy() > 1e6:  # ASKED"))
    hint = f"model.py:{ASKED.rpartition(':')[2]}"
    result = planner.plan(str(model), hints={hint: 1.0}, **REQUEST)
    with pytest.raises(CodegenError, match="reads data") as caught:
        result.save(tmp_path / "out")
    assert "pp=1" in caught.value.hint
    assert not (tmp_path / "out").exists()
    command = ["--gpus", "2", "--cluster", "cpu", "--dtype", "float32", "--out"]
    fixed = ["--fix", "pp=2", "--hint", f"{hint}=1.0"]
    assert run([str(model), *command, str(tmp_path / "o"), *fixed]) == 7
    assert "reads data" in capsys.readouterr().err
