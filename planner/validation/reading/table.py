"""Reads a table of measured runs, row by row, and says of every row that it cannot use why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast, get_args

import pandas as pd

from planner.errors import RequestError
from planner.units import GIB
from planner.validation.reading.assume import check_assumed, with_assumed
from planner.validation.reading.cell_words import (
    NotModelledError,
    read_data_parallel,
    read_dtype,
    read_float8,
    read_recompute,
    read_schedule,
)
from planner.validation.reading.cells import BadCellError, Cells
from planner.validation.reading.contradictions import Work, approximate_flop_per_token, check_units
from planner.validation.types import Arch, DataParallel, LoggedRun, Run, Unpriced
from planner.vocabulary import Schedule

REQUIRED_COLUMNS = (
    *("framework", "arch", "model", "layers", "hidden", "ffn", "heads", "vocab", "seq_len"),
    *("gpu", "num_gpus", "tp", "pp", "dp", "zero_stage_or_fsdp", "micro_batch", "global_batch"),
    *("recompute", "seq_parallel", "precision", "step_time_s"),
)
"""Columns that every table has."""

OPTIONAL_COLUMNS = (
    *("source", "params_b", "kv_heads", "cp", "ep", "vpp", "schedule", "tokens_per_s_per_gpu"),
    *("tflops_per_gpu", "mfu", "peak_mem_gib", "notes"),
)
"""Columns that count as empty where a table does not have them."""

ASSUMED_MICROBATCH_SIZE = 1
"""Sequences of a microbatch where a row does not say."""

MOST_LISTED = 10
"""Rows that an error lists."""

FIRST_ROW_LINE = 2
"""Line of row 0 in the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTable:
    """A table of measured runs that has been read."""

    name: str
    """What messages call it: the file's name."""
    frame: pd.DataFrame
    """The table as it stands, rows numbered from 0."""
    runs: tuple[Run | LoggedRun, ...]
    """Rows that can be priced, in order."""
    problems: tuple[Unpriced, ...]
    """The other rows, in order."""


def read_table(
    source: pd.DataFrame | str | Path,
    *,
    keep_going: bool = False,
    assume: Mapping[str, str] = {},
    name: str = "the table",
) -> RunTable:
    """Read a table of measured runs.

    Args:
        source: The table, or the path of a CSV file.
        keep_going: List wrong rows among the problems instead of raising.
        assume: Values of open cells by column.
        name: What messages call a table that is no file.

    Raises:
        RequestError: The file cannot be read, a column is missing, or a row is wrong.
    """
    if isinstance(source, pd.DataFrame):
        return read_runs(source, keep_going=keep_going, assume=assume, name=name)
    frame = _read_csv(Path(source))
    return read_runs(frame, keep_going=keep_going, assume=assume, name=Path(source).name)


def read_runs(
    frame: pd.DataFrame,
    *,
    keep_going: bool = False,
    assume: Mapping[str, str] = {},
    name: str = "the table",
) -> RunTable:
    """Read the rows of a table.

    Args:
        frame: Columns as ``REQUIRED_COLUMNS`` and ``OPTIONAL_COLUMNS``; others are ignored.
        keep_going: List wrong rows among the problems instead of raising.
        assume: Values of open cells by column.
        name: What messages call the table.

    Raises:
        RequestError: A column is missing, or cannot be assumed; or, without ``keep_going``, a
            cell is no number, a number is not positive, or numbers of a row contradict each
            other.
    """
    check_assumed(assume, REQUIRED_COLUMNS + OPTIONAL_COLUMNS)
    frame = frame.reset_index(drop=True)
    filled, assumed = with_assumed(frame, assume)
    _check_columns(filled, name)
    answers = [
        _read_or_say_why(row, cast("dict[str, object]", cells), assumed[row])
        for row, cells in enumerate(filled.to_dict("records"))
    ]
    problems = tuple(each for each in answers if isinstance(each, Unpriced))
    if not keep_going:
        refuse_wrong_rows(problems, name=name)
    return RunTable(
        name=name,
        frame=frame,
        runs=tuple(each for each in answers if isinstance(each, Run)),
        problems=problems,
    )


def refuse_wrong_rows(problems: Sequence[Unpriced], *, name: str) -> None:
    """Raise where a row is wrong; rows that are sound but not modelled are no error.

    Args:
        problems: Rows that are not priced.
        name: What the message calls the table.

    Raises:
        RequestError: A row is wrong. It lists the first of them with row, line and column.
    """
    wrong = [problem for problem in problems if problem.column is not None]
    if not wrong:
        return
    lines = [f"  {row_words(problem.row)}, {problem.words}" for problem in wrong[:MOST_LISTED]]
    if len(wrong) > MOST_LISTED:
        lines.append(f"  and {len(wrong) - MOST_LISTED} more")
    rows = "1 row is wrong" if len(wrong) == 1 else f"{len(wrong)} rows are wrong"
    raise RequestError(
        "\n".join([f"{name}: {rows}", *lines]),
        hint="Correct them, or leave them out and price the others with --keep-going.",
    )


def row_words(row: int) -> str:
    """Name a row, as the table counts and as an editor does: "row 12 (line 14)"."""
    return f"row {row} (line {row + FIRST_ROW_LINE})"


def _read_csv(file: Path) -> pd.DataFrame:
    try:
        # "None" and "NA" are words here: only an empty cell is empty.
        return pd.read_csv(file, keep_default_na=False, na_values=[""], low_memory=False)
    except OSError as error:
        raise RequestError(
            f"{file}: the table cannot be read: {error.strerror}",
            hint="Give the path of a CSV file.",
        ) from error
    except (ValueError, pd.errors.ParserError) as error:
        raise RequestError(
            f"{file}: this is no table: {error}",
            hint="Give a CSV file with a line of column names.",
        ) from error


def _check_columns(frame: pd.DataFrame, name: str) -> None:
    missing = [column for column in REQUIRED_COLUMNS if column not in frame.columns]
    if not missing:
        return
    noun = "column" if len(missing) == 1 else "columns"
    raise RequestError(
        f"{name} lacks the {noun} {', '.join(missing)}",
        hint=f"The columns of a table are {', '.join(REQUIRED_COLUMNS)}; it may have also "
        f"{', '.join(OPTIONAL_COLUMNS)}.",
    )


def _read_or_say_why(
    row: int, cells: dict[str, object], assumed: tuple[str, ...]
) -> Run | Unpriced:
    try:
        run = _read_row(row, Cells(cells))
        return replace(run, assumed=assumed + run.assumed)
    except BadCellError as error:
        return Unpriced(row=row, reason=str(error), column=error.column)
    except NotModelledError as limit:
        return Unpriced(row=row, reason=str(limit))


def _read_row(row: int, cells: Cells) -> Run:
    """Read one row: numbers first, then what they say of each other, then the words."""
    arch = cells.stated("arch")
    if arch not in get_args(Arch):
        raise BadCellError("arch", f"{arch} is none of {', '.join(get_args(Arch))}")
    run = _read_numbers(row, cells, cast("Arch", arch))
    _check_degrees(run)
    _check_speeds(run, cells)
    _note_limits(run, cells)
    if cells.limits:
        raise NotModelledError("; ".join(cells.limits))
    return run


def _read_numbers(row: int, cells: Cells, arch: Arch) -> Run:
    tp, cp, pp = cells.count("tp"), cells.count("cp", empty=1), cells.count("pp")
    dp, virtual_stages = cells.count("dp"), cells.count("vpp", empty=1)
    data_parallel, shard_ranks = _data_parallel(cells, dp * cp)
    params_b, peak_mem_gib = cells.quantity("params_b"), cells.quantity("peak_mem_gib")
    return Run(
        row=row,
        source=cells.text("source"),
        framework=cells.text("framework"),
        notes=cells.text("notes"),
        arch=arch,
        model=cells.stated("model"),
        layers=cells.count("layers"),
        hidden=cells.count("hidden"),
        ffn=cells.optional_count("ffn"),
        heads=cells.optional_count("heads"),
        kv_heads=cells.optional_count("kv_heads"),
        num_parameters=None if params_b is None else params_b * 1e9,
        vocab_size=cells.optional_count("vocab"),
        seq_len=cells.count("seq_len"),
        gpu=cells.stated("gpu"),
        num_gpus=cells.count("num_gpus"),
        tp=tp,
        cp=cp,
        ep=cells.count("ep", empty=1),
        pp=pp,
        virtual_stages=virtual_stages,
        dp=dp,
        data_parallel=data_parallel,
        shard_ranks=shard_ranks,
        microbatch_size=cells.count("micro_batch", empty=ASSUMED_MICROBATCH_SIZE),
        global_batch_size=cells.count("global_batch"),
        recompute=cells.word(lambda: read_recompute(cells.text("recompute")), None),
        # Without tensor parallelism there is nothing to split: an empty cell says enough.
        sequence_parallel=(tp > 1 or bool(cells.text("seq_parallel")))
        and cells.truth("seq_parallel"),
        dtype=cells.word(lambda: read_dtype(cells.text("precision")), None),
        float8=read_float8(cells.text("precision")),
        schedule=cells.word(
            lambda: read_schedule(cells.text("schedule"), pp=pp, virtual_stages=virtual_stages),
            str(Schedule.NONE),
        ),
        step_time_s=cells.quantity("step_time_s"),
        peak_mem_bytes=None if peak_mem_gib is None else peak_mem_gib * GIB,
        is_sharding_stated=dp * cp == 1 or bool(cells.text("zero_stage_or_fsdp")),
        assumed=()
        if cells.text("micro_batch")
        else (f"micro_batch {ASSUMED_MICROBATCH_SIZE} (not stated)",),
    )


def _data_parallel(cells: Cells, ranks: int) -> tuple[DataParallel, int | None]:
    """Read what is sharded; an empty cell leaves it to the framework."""
    text = cells.text("zero_stage_or_fsdp")
    if not text:
        return "ddp", None
    otherwise: tuple[DataParallel, int | None] = ("ddp", None)
    return cells.word(lambda: read_data_parallel(text, ranks=ranks), otherwise)


def _check_degrees(run: Run) -> None:
    """Refuse degrees that contradict each other."""
    product = run.tp * run.cp * run.pp * run.dp
    if product != run.num_gpus:
        raise BadCellError(
            "num_gpus",
            f"tp {run.tp} x cp {run.cp} x pp {run.pp} x dp {run.dp} = {product}, not num_gpus "
            f"{run.num_gpus}",
        )
    if run.virtual_stages > 1 and run.pp == 1:
        raise BadCellError("vpp", f"{run.virtual_stages} stages per rank need pp above 1")
    if run.schedule == Schedule.INTERLEAVED and run.virtual_stages == 1:
        raise BadCellError("vpp", "an interleaved schedule has at least 2 stages per rank")
    if run.heads is not None and run.hidden % run.heads:
        raise BadCellError("heads", f"{run.heads} does not divide hidden {run.hidden}")
    if run.heads is not None and run.kv_heads is not None and run.heads % run.kv_heads:
        raise BadCellError("kv_heads", f"{run.kv_heads} does not divide heads {run.heads}")


def _check_speeds(run: Run, cells: Cells) -> None:
    work = Work(
        num_gpus=run.num_gpus,
        global_batch_size=run.global_batch_size,
        seq_len=run.seq_len,
        flop_per_token=approximate_flop_per_token(
            layers=run.layers,
            hidden=run.hidden,
            seq_len=run.seq_len,
            num_parameters=run.num_parameters,
        ),
    )
    check_units(cells, work)


def _note_limits(run: Run, cells: Cells) -> None:
    """Note what cannot run, or what is not modelled; tables of failed runs hold such rows."""
    if run.ep > 1:
        cells.limits.append("expert parallelism (ep above 1) is not modelled")
    if run.pp > run.layers:
        cells.limits.append("pp is above layers: stages would be empty")
    if run.heads is not None and run.heads % run.tp:
        cells.limits.append("tp does not divide heads")
