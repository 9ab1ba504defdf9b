"""Rows of a table become runs, or say why they do not."""

import dataclasses
import re
from pathlib import Path

import pytest
from run_tables import ROW, make_table

from planner.errors import RequestError
from planner.units import GIB
from planner.validation.reading.table import (
    OPTIONAL_COLUMNS,
    REQUIRED_COLUMNS,
    read_runs,
    read_table,
)
from planner.validation.types import Run


def read_one(**change):
    """The one row of a table, read."""
    table = read_runs(make_table(change))
    assert table.problems == ()
    (run,) = table.runs
    return run


def refusal(**change):
    """What the error says of the one row of a table."""
    with pytest.raises(RequestError) as caught:
        read_runs(make_table(change))
    return str(caught.value)


def limit(**change):
    """Why the one sound row of a table is not priced."""
    table = read_runs(make_table(change))
    assert table.runs == ()
    (problem,) = table.problems
    assert problem.column is None
    return problem.reason


def test_a_row_becomes_a_run():
    assert read_one() == Run(
        row=0,
        source="own log",
        framework="nanotron",
        notes="",
        arch="llama",
        model="Llama 1.3B",
        layers=16,
        hidden=2048,
        ffn=8192,
        heads=32,
        kv_heads=32,
        num_parameters=1.34e9,
        vocab_size=131072,
        seq_len=4096,
        gpu="H100-80GB-SXM",
        num_gpus=8,
        tp=2,
        cp=1,
        ep=1,
        pp=2,
        virtual_stages=1,
        dp=2,
        data_parallel="zero1",
        shard_ranks=None,
        microbatch_size=4,
        global_batch_size=256,
        recompute="none",
        sequence_parallel=True,
        dtype="bfloat16",
        schedule="1F1B",
        step_time_s=4.0,
        peak_mem_bytes=40 * GIB,
    )


def test_what_the_source_does_not_say_stays_open():
    empty = ("ffn", "heads", "kv_heads", "vocab", "params_b", "recompute", "precision")
    run = read_one(**dict.fromkeys((*empty, "step_time_s", "peak_mem_gib")))
    open_fields = ("ffn", "heads", "kv_heads", "vocab_size", "num_parameters", "recompute")
    for name in (*open_fields, "dtype", "step_time_s", "peak_mem_bytes"):
        assert getattr(run, name) is None, name


def test_columns_that_a_table_need_not_have():
    full = read_one()
    run = read_runs(make_table()[list(REQUIRED_COLUMNS)]).runs[0]
    unknown = {"source": "", "kv_heads": None, "num_parameters": None, "peak_mem_bytes": None}
    assert run == dataclasses.replace(full, **unknown)


def test_whole_numbers_may_have_a_point():
    assert read_one(heads="32.0", dp=2.0, zero_stage_or_fsdp=1.0) == read_one()


@pytest.mark.parametrize(
    ("text", "form", "shard_ranks"),
    [
        ("0", "ddp", None),
        ("0 (DDP)", "ddp", None),
        ("1", "zero1", None),
        ("1-equivalent (bf16 optimizer)", "zero1", None),
        ("1 (whole DP group)", "zero1", None),
        ("1 (sharded within 8 GPUs)", "zero1", 8),
        ("1 (sharded within 64 GPUs)", "zero1", None),
        ("2", "zero2", None),
        ("FSDP SHARD_GRAD_OP (ZeRO-2)", "zero2", None),
        ("FSDP FULL_SHARD (ZeRO-3)", "zero3", None),
        ("FSDP (ZeRO-3)", "zero3", None),
        ("FSDP2 (ZeRO-3)", "zero3", None),
        ("FSDP", "zero3", None),
        ("FSDP2 8", "zero3", 8),
        ("FSDP2 over dp*cp=16", "zero3", None),
    ],
)
def test_forms_of_data_parallelism(text, form, shard_ranks):
    run = read_one(zero_stage_or_fsdp=text, num_gpus=64, dp=16, tokens_per_s_per_gpu=None, mfu=None)
    assert (run.data_parallel, run.shard_ranks) == (form, shard_ranks)


@pytest.mark.parametrize("text", ["4", "1 (sharded within 2 nodes)", "FSDP HYBRID_SHARD", "ZeRO++"])
def test_other_forms_of_data_parallelism_are_not_modelled(text):
    assert limit(zero_stage_or_fsdp=text) == f"data parallelism {text} is not modelled"


@pytest.mark.parametrize(
    ("text", "pp", "vpp", "schedule"),
    [
        ("", 2, 1, "1F1B"),
        ("FSDP", 2, 1, "1F1B"),
        ("", 2, 2, "Interleaved1F1B"),
        ("1F1B (DeepSpeed)", 2, None, "1F1B"),
        ("1F1B", 2, 2, "Interleaved1F1B"),
        ("interleaved 1F1B", 2, 3, "Interleaved1F1B"),
        ("1F1B-I", 2, 3, "Interleaved1F1B"),
        ("GPipe", 2, 1, "GPipe"),
        ("ZB-1p", 2, 1, "ZB-1p"),
        ("ZB-2p", 2, 1, "ZB-2p"),
        ("1F1B", 1, 1, "none"),
        ("", 1, None, "none"),
    ],
)
def test_schedules(text, pp, vpp, schedule):
    run = read_one(schedule=text, pp=pp, vpp=vpp, num_gpus=4 * pp, step_time_s=4.0, mfu=None)
    assert run.schedule == schedule
    assert run.virtual_stages == (vpp or 1)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("none", "none"),
        ("full", "full"),
        ("selective", "selective"),
        ("selective(op)", "selective"),
    ],
)
def test_recomputations(text, kind):
    assert read_one(recompute=text).recompute == kind


@pytest.mark.parametrize(
    ("text", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")]
)
def test_precisions(text, dtype):
    assert read_one(precision=text).dtype == dtype


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"precision": "fp8+int8"}, "precision fp8+int8 is not modelled"),
        ({"recompute": "selective(every third layer)"}, "is not modelled"),
        ({"schedule": "ZB-V"}, "schedule ZB-V is not modelled"),
        ({"ep": 2}, "expert parallelism (ep above 1) is not modelled"),
        ({"layers": 1, "params_b": None, "mfu": None}, "pp is above layers: stages would be empty"),
        ({"heads": 1, "kv_heads": 1}, "tp does not divide heads"),
    ],
)
def test_sound_rows_that_are_not_modelled_are_no_error(change, reason):
    assert reason in limit(**change)


def test_every_limit_of_a_row_is_told():
    assert limit(precision="fp8", ep=2) == (
        "precision fp8 is not modelled; expert parallelism (ep above 1) is not modelled"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_gpus": None}, "num_gpus: is empty"),
        ({"tp": "two"}, "tp: two is no number"),
        ({"heads": 64.5}, "heads: 64.5 is no whole number of at least 1"),
        ({"dp": -2}, "dp: -2 is no whole number of at least 1"),
        ({"micro_batch": 0}, "micro_batch: 0 is no whole number of at least 1"),
        ({"seq_len": "inf"}, "seq_len: inf is no finite number"),
        ({"step_time_s": -1.0}, "step_time_s: -1.0 is not above 0"),
        ({"seq_parallel": "maybe"}, "seq_parallel: maybe is neither yes nor no"),
        ({"seq_parallel": None}, "seq_parallel: is empty"),
        ({"arch": "bert"}, "arch: bert is none of gpt, llama, mpt"),
        ({"tp": 4}, "num_gpus: tp 4 x cp 1 x pp 2 x dp 2 = 16, not num_gpus 8"),
        ({"schedule": "1F1B-I"}, "vpp: an interleaved schedule has at least 2 stages per rank"),
        ({"vpp": 2, "pp": 1, "dp": 4}, "vpp: 2 stages per rank need pp above 1"),
        ({"heads": 30, "kv_heads": 30}, "heads: 30 does not divide hidden 2048"),
        ({"kv_heads": 5}, "kv_heads: 5 does not divide heads 32"),
    ],
)
def test_wrong_rows_are_an_error_with_row_and_column(change, words):
    text = refusal(**change)
    assert f"row 0 (line 2), column {words}" in text
    assert "--keep-going" in text


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"step_time_s": 32768.0, "tokens_per_s_per_gpu": 32768.0},
            "step_time_s looks like tokens per second",
        ),
        (
            {"step_time_s": 256 * 4096, "tokens_per_s_per_gpu": 32768.0},
            "step_time_s looks like tokens",
        ),
        (
            {"step_time_s": 4000.0, "tokens_per_s_per_gpu": 32768.0},
            "take 4 s at that rate; step_time_s looks like milliseconds",
        ),
        ({"tokens_per_s_per_gpu": 8 * 32768.0}, "looks like the rate of all 8 GPUs"),
        ({"tokens_per_s_per_gpu": 8.0}, "tokens_per_s_per_gpu looks like sequences per second"),
        ({"tokens_per_s_per_gpu": 20000.0}, "one of the two has another unit"),
        (
            {"step_time_s": 32768.0, "tokens_per_s_per_gpu": 4.0},
            "step_time_s and tokens_per_s_per_gpu look exchanged",
        ),
        ({"step_time_s": 32768.0, "mfu": None}, "would be 9.1 hours: it looks like tokens"),
        ({"step_time_s": 4000.0, "mfu": 0.4}, "step_time_s: 4000 and mfu 0.4 contradict"),
        (
            {"step_time_s": 4000.0, "mfu": None, "tflops_per_gpu": 400.0},
            "step_time_s: 4000 and tflops_per_gpu 400 contradict each other",
        ),
        ({"step_time_s": 0.004, "mfu": None}, "more than any device computes"),
        ({"mfu": 40.0}, "mfu: 40 is above 1: it looks like percent"),
        ({"peak_mem_gib": 40 * 1024}, "it looks like MiB, which would be 40 GiB"),
        ({"peak_mem_gib": 40 * GIB}, "it looks like bytes, which would be 40 GiB"),
    ],
)
def test_mixed_up_units_are_told(change, words):
    assert words in refusal(**change)


def test_step_times_within_a_fifth_of_the_rate_are_sound():
    assert read_one(tokens_per_s_per_gpu=32768.0 / 1.15).step_time_s == 4.0


def test_the_error_lists_ten_rows_and_counts_the_others():
    table = make_table(*[{"tp": -1}] * 12)
    with pytest.raises(RequestError) as caught:
        read_runs(table, name="runs.csv")
    lines = str(caught.value).splitlines()
    assert lines[0] == "runs.csv: 12 rows are wrong"
    assert lines[10] == "  row 9 (line 11), column tp: -1 is no whole number of at least 1"
    assert lines[11] == "  and 2 more"


def test_with_keep_going_the_other_rows_are_read():
    table = read_runs(make_table({}, {"tp": -1}, {"precision": "fp8"}, {}), keep_going=True)
    assert [run.row for run in table.runs] == [0, 3]
    assert [(each.row, each.column) for each in table.problems] == [(1, "tp"), (2, None)]


@pytest.mark.parametrize("column", REQUIRED_COLUMNS)
@pytest.mark.parametrize("keep_going", [False, True])
def test_a_missing_column_is_always_an_error(column, keep_going):
    with pytest.raises(RequestError, match=f"lacks the column {column}") as caught:
        read_runs(make_table().drop(columns=column), keep_going=keep_going)
    assert "The columns of a table are" in caught.value.hint


def test_a_file_is_read_like_a_table(tmp_path):
    file = tmp_path / "own.csv"
    make_table({}, {"step_time_s": None}).to_csv(file, index=False)
    table = read_table(file)
    assert table.name == "own.csv"
    assert table.runs == read_runs(make_table({}, {"step_time_s": None})).runs


def test_the_documented_table_can_be_read(tmp_path):
    text = (Path(__file__).parents[2] / "docs" / "validate.md").read_text()
    (content,) = re.findall(r"```\n(framework,.*?)```", text, flags=re.DOTALL)
    file = tmp_path / "own.csv"
    file.write_text(content)
    table = read_table(file)
    assert len(table.runs) == 3
    assert set(table.frame.columns) == {*REQUIRED_COLUMNS, "peak_mem_gib"}
    named = set(re.findall(r"`(\w+)`|(\w+),|(\w+)`", text.split("## Rows")[0]))
    assert {*REQUIRED_COLUMNS, *OPTIONAL_COLUMNS} <= {word for words in named for word in words}


def test_none_is_a_word_in_a_file(tmp_path):
    file = tmp_path / "own.csv"
    make_table({"recompute": "None"}).to_csv(file, index=False)
    assert read_table(file).runs[0].recompute == "none"


@pytest.mark.parametrize(("content", "words"), [(None, "cannot be read"), ("", "is no table")])
def test_what_is_no_table_is_an_error(tmp_path, content, words):
    file = tmp_path / "own.csv"
    if content is not None:
        file.write_text(content)
    with pytest.raises(RequestError, match=words):
        read_table(file)


def test_rows_are_counted_from_the_top_of_the_frame():
    frame = make_table({}, {}, {"model": "last"}).iloc[1:]
    assert [(run.row, run.model) for run in read_runs(frame).runs] == [
        (0, ROW["model"]),
        (1, "last"),
    ]
