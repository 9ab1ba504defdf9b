"""A sweep as a table: one row per point, columns of the plans as in report.csv."""

import pandas as pd

from planner.questions.sweep import SECONDS_PER_DAY, Sweep, SweepPoint
from planner.report.tables import REPORT_COLUMNS, REPORT_TYPES, plan_columns

_ASKED = ("cluster", "gpus", "seq_len", "global_batch_size")
_FOUND = ("status", "pick", "refusal")
_OWN = (
    "tokens_per_s",
    "scaling",
    "gpu_s_per_token",
    "cost_per_million_tokens",
    "days",
    "cost",
)
_LEFT_OUT = ("rank", "status", "rule_of_thumb", "reject_rule", "reject_detail")

SWEEP_COLUMNS = (
    *_ASKED,
    *_FOUND,
    *_OWN,
    *(name for name in REPORT_COLUMNS if name not in _LEFT_OUT),
)
"""Columns of the table; where a model has no tokens they count samples."""

_TYPES = {
    **{name: REPORT_TYPES.get(name, "float64") for name in SWEEP_COLUMNS},
    **dict.fromkeys(("gpus", "seq_len", "global_batch_size"), "Int64"),
    **dict.fromkeys(("cluster", "status", "refusal"), "string"),
    "pick": "boolean",
}

_MILLION = 1e6


def sweep_frame(sweep: Sweep) -> pd.DataFrame:
    """Tabulate all points in the order asked for; values that do not exist are missing."""
    pick = sweep.pick
    rows = [{**_row(sweep, point), "pick": point is pick} for point in sweep.points]
    return pd.DataFrame(rows, columns=list(SWEEP_COLUMNS)).astype(_TYPES)


def _row(sweep: Sweep, point: SweepPoint) -> dict[str, object]:
    asked = {name: getattr(point.request, name) for name in _ASKED}
    record = point.record
    if record is None:
        return {**asked, "status": "refused", "refusal": str(point.refusal)}
    per_token, duration_s = point.cost_per_token, point.duration_s
    return {
        **asked,
        "seq_len": record.model.seq_len,
        "status": "planned",
        **plan_columns(record.outcome.best, record),
        "tokens_per_s": point.tokens_per_s,
        "scaling": sweep.scaling(point),
        "gpu_s_per_token": point.gpu_s_per_token,
        "cost_per_million_tokens": None if per_token is None else per_token * _MILLION,
        "days": None if duration_s is None else duration_s / SECONDS_PER_DAY,
        "cost": point.cost,
        "solver_status": record.outcome.solver.status,
        "solver_gap": record.outcome.solver.gap,
    }
