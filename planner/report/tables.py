"""The run as tidy tables: one row per layout, per memory component, per op.

Columns carry their unit in the name. Adding a column is fine, renaming one breaks readers.
"""

from collections.abc import Sequence
from dataclasses import asdict, fields

import pandas as pd

from planner.cost.breakdown import MemoryBreakdown
from planner.plan.record import OpRow, PlanRecord
from planner.plan.serialize import checkpointing_word
from planner.plan.types import Plan, Rejection
from planner.report.figures import exposed_comm_s, plan_figures
from planner.vocabulary import ORDER_SIGN, Axis

DEGREE_COLUMNS = tuple(Axis)

REPORT_COLUMNS = (
    "rank",
    "status",
    "rule_of_thumb",
    "reject_rule",
    "reject_detail",
    *DEGREE_COLUMNS,
    "virtual_stages",
    "schedule",
    "num_microbatches",
    "microbatch_size",
    "activation_checkpointing",
    "reshard_after_forward",
    "sequence_parallel",
    "compile",
    "float8",
    "loss_chunks",
    "cpu_offload",
    "activation_offload",
    "mesh_order",
    "device_order",
    "step_time_s",
    "compute_s",
    "recompute_s",
    "exposed_comm_s",
    "tp_comm_s",
    "cp_comm_s",
    "ep_comm_s",
    "pp_comm_s",
    "dp_comm_s",
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
)

_INTEGER_COLUMNS = (
    "rank",
    *DEGREE_COLUMNS,
    "virtual_stages",
    "num_microbatches",
    "microbatch_size",
    "loss_chunks",
    "peak_memory_bytes",
    "peak_pp_rank",
    "capacity_bytes",
    "headroom_bytes",
)


_FLAG_COLUMNS = (
    "rule_of_thumb",
    "reshard_after_forward",
    "sequence_parallel",
    "compile",
    "float8",
    "cpu_offload",
    "activation_offload",
)

_TEXT_COLUMNS = (
    "status",
    "reject_rule",
    "reject_detail",
    "schedule",
    "activation_checkpointing",
    "mesh_order",
    "device_order",
    "solver_status",
)

REPORT_TYPES = {
    **dict.fromkeys(REPORT_COLUMNS, "float64"),
    **dict.fromkeys(_INTEGER_COLUMNS, "Int64"),
    **dict.fromkeys(_FLAG_COLUMNS, "boolean"),
    **dict.fromkeys(_TEXT_COLUMNS, "string"),
}
"""Column types in which a value can be missing without turning the others into floats."""


def candidates_frame(record: PlanRecord) -> pd.DataFrame:
    """Tabulate the priced layouts, fastest first; refused ones are in ``rejected_frame``."""
    return _report(_priced_rows(record))


def rejected_frame(record: PlanRecord) -> pd.DataFrame:
    """Tabulate the refused layouts with the rule and its numbers."""
    return _report(_refused_rows(record))


def report_frame(record: PlanRecord) -> pd.DataFrame:
    """Tabulate every layout, priced ones first: report.csv."""
    return _report([*_priced_rows(record), *_refused_rows(record)])


def memory_frame(record: PlanRecord) -> pd.DataFrame:
    """Tabulate peak memory by candidate, pipeline rank and component: memory.csv.

    ``candidate`` is the rank of the layout in report.csv; a pipeline rank (``pp_rank``) holds
    several stages under an interleaved schedule.
    """
    rows = [
        {
            "candidate": rank,
            "pp_rank": pp_rank,
            "component": field.name.removesuffix("_bytes"),
            "bytes": getattr(memory, field.name),
        }
        for rank, plan in enumerate(_priced_plans(record), start=1)
        for pp_rank, memory in enumerate(plan.memory_by_rank)
        for field in fields(MemoryBreakdown)
    ]
    return pd.DataFrame(rows, columns=["candidate", "pp_rank", "component", "bytes"])


def ops_frame(record: PlanRecord) -> pd.DataFrame:
    """Tabulate the ops of the recommended plan: ops.csv."""
    columns = [field.name for field in fields(OpRow)]
    return pd.DataFrame([asdict(row) for row in record.op_rows], columns=columns)


def table_files(record: PlanRecord) -> dict[str, str]:
    """Write the three tables that stand beside the script, as text by file name."""
    return {
        "report.csv": csv_text(report_frame(record)),
        "memory.csv": csv_text(memory_frame(record)),
        "ops.csv": csv_text(ops_frame(record)),
    }


def csv_text(frame: pd.DataFrame) -> str:
    """Write a table as CSV: UTF-8, "." as the decimal point, exact floats, line feeds."""
    return frame.to_csv(index=False, lineterminator="\n")


def _priced_plans(record: PlanRecord) -> tuple[Plan, ...]:
    """All priced plans; the rule of thumb comes last where the search did not price it."""
    candidates = record.outcome.candidates
    rule_of_thumb = record.outcome.rule_of_thumb
    if rule_of_thumb is None or rule_of_thumb in candidates:
        return candidates
    return (*candidates, rule_of_thumb)


def _priced_rows(record: PlanRecord) -> list[dict[str, object]]:
    outcome = record.outcome
    return [
        {
            **plan_columns(plan, record),
            "rank": rank,
            "status": "best" if plan == outcome.best else "priced",
            "rule_of_thumb": plan == outcome.rule_of_thumb,
            "solver_status": outcome.solver.status if plan == outcome.best else None,
            "solver_gap": outcome.solver.gap if plan == outcome.best else None,
        }
        for rank, plan in enumerate(_priced_plans(record), start=1)
    ]


def plan_columns(plan: Plan, record: PlanRecord) -> dict[str, object]:
    """Give the columns of report.csv that say what a plan is and what it achieves."""
    figures = plan_figures(plan, record.cluster)
    return {
        **{axis: getattr(plan.degrees, axis) for axis in DEGREE_COLUMNS},
        "virtual_stages": plan.virtual_stages,
        "schedule": plan.schedule,
        "num_microbatches": plan.num_microbatches,
        "microbatch_size": plan.microbatch_size,
        "activation_checkpointing": checkpointing_word(plan),
        "reshard_after_forward": plan.reshard_after_forward,
        "sequence_parallel": plan.sequence_parallel,
        "compile": plan.compile,
        "float8": plan.float8,
        "loss_chunks": plan.loss_chunks,
        "cpu_offload": plan.cpu_offload,
        "activation_offload": plan.activation_offload,
        "mesh_order": ORDER_SIGN.join(plan.mesh_order),
        "device_order": ", ".join(plan.device_order) or None,
        "step_time_s": figures.step_time_s,
        **asdict(plan.costs),
        "exposed_comm_s": exposed_comm_s(plan.costs),
        "tokens_per_s_per_gpu": figures.tokens_per_s_per_gpu,
        "mfu": figures.mfu,
        "peak_memory_bytes": figures.peak_memory_bytes,
        "peak_pp_rank": figures.peak_rank,
        "capacity_bytes": figures.capacity_bytes,
        "headroom_bytes": figures.headroom_bytes,
    }


def _refused_rows(record: PlanRecord) -> list[dict[str, object]]:
    capacity_bytes = max(kind.device.memory_bytes for kind in record.cluster.kinds)
    return [_refused_row(item, capacity_bytes) for item in record.outcome.rejections]


def _refused_row(rejection: Rejection, capacity_bytes: int) -> dict[str, object]:
    why = rejection.why()
    needed_bytes = why.peak_memory_bytes
    return {
        "status": "refused",
        "rule_of_thumb": False,
        "reject_rule": rejection.rule,
        "reject_detail": why.detail,
        **{axis: getattr(rejection.degrees, axis) for axis in DEGREE_COLUMNS},
        "schedule": rejection.schedule or None,
        "microbatch_size": rejection.microbatch_size,
        "peak_memory_bytes": needed_bytes,
        "capacity_bytes": capacity_bytes,
        "headroom_bytes": None if needed_bytes is None else capacity_bytes - needed_bytes,
    }


def _report(rows: Sequence[dict[str, object]]) -> pd.DataFrame:
    return pd.DataFrame(list(rows), columns=list(REPORT_COLUMNS)).astype(REPORT_TYPES)
