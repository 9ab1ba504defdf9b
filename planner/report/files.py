"""The data files that stand beside the script."""

from planner.plan.record import PlanRecord
from planner.report.document import plan_json


def report_files(record: PlanRecord) -> dict[str, str]:
    """Write plan.json and the three tables as text by file name."""
    from planner.report.tables import csv_text, memory_frame, ops_frame, report_frame

    return {
        "plan.json": plan_json(record),
        "report.csv": csv_text(report_frame(record)),
        "memory.csv": csv_text(memory_frame(record)),
        "ops.csv": csv_text(ops_frame(record)),
    }
