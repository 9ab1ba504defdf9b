"""Reads measured runs, whatever they are in: a table, or the log of an emitted script."""

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from planner.errors import RequestError
from planner.validation.reading.logs import is_log, read_log
from planner.validation.reading.table import RunTable, read_table


def read_source(
    source: pd.DataFrame | str | Path,
    *,
    plan: Path | None = None,
    keep_going: bool = False,
    assume: Mapping[str, str] = {},
    name: str = "the table",
) -> RunTable:
    """Read measured runs.

    Args:
        source: A table, the path of its CSV file, or that of a log.
        plan: As in ``read_log``.
        keep_going: As in ``read_table`` and ``read_log``.
        assume: As in ``read_table``.
        name: As in ``read_table``.

    Raises:
        PlannerError: As these, or an option does not belong to such a file.
    """
    if not isinstance(source, pd.DataFrame) and is_log(Path(source)):
        if assume:
            raise RequestError(
                f"--assume {', '.join(assume)}: {source} is a log, which leaves nothing open",
                hint="Leave it out: model and layout are those of the plan.",
            )
        return read_log(Path(source), plan=plan, keep_going=keep_going)
    if plan is not None:
        raise RequestError(
            f"--plan {plan}: the runs are a table, which states each run's model and layout",
            hint="Leave it out, or give the log of a run of that plan.",
        )
    return read_table(source, keep_going=keep_going, assume=assume, name=name)
