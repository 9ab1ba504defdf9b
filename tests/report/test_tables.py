import io
from dataclasses import replace

import pandas as pd
import pytest
from plan_factory import make_costs, make_outcome, make_plan, make_record

from planner.report.tables import (
    REPORT_COLUMNS,
    candidates_frame,
    csv_text,
    memory_frame,
    ops_frame,
    rejected_frame,
    report_frame,
)
from planner.strategy.mesh import ParallelDegrees

DOCUMENTED = [
    "rank",
    "status",
    "reject_rule",
    "reject_detail",
    "dp_replicate",
    "dp_shard",
    "tp",
    "cp",
    "pp",
    "ep",
    "virtual_stages",
    "schedule",
    "num_microbatches",
    "microbatch_size",
    "activation_checkpointing",
    "reshard_after_forward",
    "step_time_s",
    "compute_s",
    "exposed_comm_s",
    "bubble_s",
    "optimizer_s",
    "tokens_per_s_per_gpu",
    "mfu",
    "peak_memory_bytes",
    "peak_pp_rank",
    "capacity_bytes",
    "headroom_bytes",
    "solver_status",
    "solver_gap",
]


def test_the_documented_columns_stand_in_their_order():
    assert [column for column in REPORT_COLUMNS if column in DOCUMENTED] == DOCUMENTED


def test_one_row_per_layout_refused_ones_too():
    record = make_record()
    frame = report_frame(record)
    assert list(frame.columns) == list(REPORT_COLUMNS)
    assert frame["status"].value_counts().to_dict() == {"refused": 5, "priced": 3, "best": 1}
    assert len(candidates_frame(record)) == 4
    assert len(rejected_frame(record)) == 5


def test_the_parts_of_a_step_add_up():
    frame = candidates_frame(make_record())
    parts = ["compute_s", "recompute_s", "exposed_comm_s", "bubble_s", "optimizer_s"]
    assert frame[parts].sum(axis=1).to_list() == pytest.approx(frame["step_time_s"].to_list())
    exposed = frame[["tp_comm_s", "pp_comm_s", "dp_comm_s"]].sum(axis=1)
    assert exposed.to_list() == pytest.approx(frame["exposed_comm_s"].to_list())


def test_rates_follow_from_the_step():
    record = make_record()
    best = record.outcome.best
    row = candidates_frame(record).iloc[0]
    assert row["tokens_per_s_per_gpu"] == pytest.approx(64 * 1024 / 0.412 / 8)
    assert row["mfu"] == pytest.approx(best.flop_per_step / (0.412 * 8 * 989e12))
    assert row["headroom_bytes"] == row["capacity_bytes"] - row["peak_memory_bytes"]


def test_a_dtype_without_a_peak_has_no_mfu():
    plan = make_plan(dtype="float64")
    row = candidates_frame(make_record(make_outcome(plan))).iloc[0]
    assert pd.isna(row["mfu"])


def test_the_rule_of_thumb_is_marked_and_not_doubled():
    record = make_record()
    thumb = record.outcome.rule_of_thumb
    assert candidates_frame(record)["rule_of_thumb"].to_list() == [False, False, False, True]
    within = replace(record.outcome, candidates=(*record.outcome.candidates, thumb))
    assert len(candidates_frame(make_record(within))) == 4


def test_refused_rows_say_why_and_keep_missing_numbers_missing():
    row = rejected_frame(make_record()).iloc[0]
    assert row["reject_rule"] == "kv_heads % tp"
    assert "tp 1, 2, 4 would work" in row["reject_detail"]
    assert row["tp"] == 8
    assert pd.isna(row["rank"])
    assert pd.isna(row["peak_memory_bytes"])


def test_csv_is_plain_and_exact():
    outcome = make_outcome(make_plan(costs=make_costs(compute_s=1 / 3)))
    text = csv_text(report_frame(make_record(outcome)))
    assert "\r" not in text
    header, first = text.splitlines()[:2]
    assert header.split(",") == list(REPORT_COLUMNS)
    assert "0.3333333333333333" in first
    again = pd.read_csv(io.StringIO(text))
    assert again["compute_s"].iloc[0] == 1 / 3
    assert again["peak_memory_bytes"].iloc[0] == outcome.best.peak_memory_bytes
    refused = text.splitlines()[-1]
    assert refused.startswith(",refused,False,memory,")


def test_memory_has_every_component_of_every_rank():
    plan = make_plan(ParallelDegrees(dp_shard=2, pp=4))
    frame = memory_frame(make_record(make_outcome(plan)))
    best = frame[frame["candidate"] == 1]
    assert sorted(best["pp_rank"].unique()) == [0, 1, 2, 3]
    assert best[best["pp_rank"] == 2]["bytes"].sum() == plan.memory_by_rank[2].total_bytes
    assert "activations" in set(best["component"])


def test_ops_have_their_columns_even_when_there_are_none():
    record = make_record()
    columns = ["op", "unit", "module", "stage", "placement", "compute_s", "comm_s", "bytes"]
    assert list(ops_frame(record).columns) == columns
    assert len(ops_frame(record)) == 1
    assert list(ops_frame(replace(record, op_rows=())).columns) == columns
