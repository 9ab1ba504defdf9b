"""Reads measured runs, whatever they are in: a table, or logs of emitted scripts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from planner.errors import RequestError
from planner.validation.reading.logs import is_log, read_log
from planner.validation.reading.table import RunTable, read_table

Source = pd.DataFrame | str | Path | Sequence[str | Path]
"""A table, the path of its CSV file, or the paths of one or several logs."""


def read_source(
    source: Source,
    *,
    plan: Path | None = None,
    keep_going: bool = False,
    assume: Mapping[str, str] = {},
    name: str = "the table",
) -> RunTable:
    """Read measured runs.

    Args:
        source: Where they are.
        plan: As in ``read_log``.
        keep_going: As in ``read_table`` and ``read_log``.
        assume: As in ``read_table``.
        name: As in ``read_table``.

    Raises:
        PlannerError: As these, or an option does not belong to such a file.
    """
    if isinstance(source, pd.DataFrame):
        _refuse_plan(plan)
        return read_table(source, keep_going=keep_going, assume=assume, name=name)
    files = [Path(source)] if isinstance(source, str | Path) else [Path(each) for each in source]
    tables = [file for file in files if not is_log(file)]
    if tables and len(files) > 1:
        raise RequestError(
            f"{tables[0]}: this is no log, and of tables one is read at a time",
            hint="Give one table, or logs of scripts alone.",
        )
    if tables:
        _refuse_plan(plan)
        return read_table(files[0], keep_going=keep_going, assume=assume, name=name)
    if assume:
        raise RequestError(
            f"--assume {', '.join(assume)}: {files[0]} is a log, which leaves nothing open",
            hint="Leave it out: model and layout are those of the plan.",
        )
    return _joined([read_log(file, plan=plan, keep_going=keep_going) for file in files])


def _refuse_plan(plan: Path | None) -> None:
    if plan is not None:
        raise RequestError(
            f"--plan {plan}: the runs are a table, which states each run's model and layout",
            hint="Leave it out, or give the log of a run of that plan.",
        )


def _joined(logs: Sequence[RunTable]) -> RunTable:
    """One table of all logs, a row for each."""
    if len(logs) == 1:
        return logs[0]
    runs = [run for log in logs for run in log.runs]
    return RunTable(
        name=f"{len(logs)} logs",
        frame=pd.concat([log.frame for log in logs], ignore_index=True),
        runs=tuple(replace(run, row=row) for row, run in enumerate(runs)),
        problems=(),
    )
