"""The library: ``planner.validate``, measured runs beside what the cost model says of them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import pandas as pd

from planner.cost.breakdown import CostBreakdown, MemoryBreakdown
from planner.errors import RequestError
from planner.plan.serialize import JsonValue, dump_json, encode, encode_fields
from planner.progress import ProgressCallback
from planner.units import GIB
from planner.validation.plot import plot_bytes
from planner.validation.reading.source import Source, read_source
from planner.validation.reading.table import RunTable, read_table, refuse_wrong_rows
from planner.validation.scoring.ranking import GroupScores
from planner.validation.scoring.scores import MIN_GROUP, Scores, score_runs
from planner.validation.types import Prediction, Unpriced
from planner.version import VERSION

VALIDATION_SCHEMA_VERSION = 1
"""Version of the document; raised when a reader of the old form would misread the new one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedTable:
    """A table of runs with an answer for each of its rows."""

    table: RunTable
    """The table."""
    priced: tuple[Prediction, ...]
    """Rows with a prediction, in order."""
    unpriced: tuple[Unpriced, ...]
    """Rows without one, in order."""

    @property
    def predictions(self) -> pd.DataFrame:
        """One row per row of the table.

        Columns row, step_time_s, peak_mem_gib, feasible, the parts of the time in seconds and of
        the memory in GiB, assumptions; unpriced says why they are empty.
        """
        answers: dict[int, dict[str, object]] = {
            **{each.row: _prediction_columns(each) for each in self.priced},
            **{each.row: {"row": each.row, "unpriced": each.words} for each in self.unpriced},
        }
        rows = [answers[row] for row in sorted(answers)]
        return pd.DataFrame(rows, columns=list(_PREDICTION_COLUMNS))

    @property
    def measured(self) -> pd.DataFrame:
        """The table without the measurements of wrong rows: nothing is compared with them."""
        wrong = [each.row for each in self.unpriced if each.column is not None]
        measured = self.table.frame.copy()
        for column in ("step_time_s", "peak_mem_gib"):
            if column in measured:
                measured[column] = measured[column].mask(measured.index.isin(wrong))
        return measured


class ValidationResult:
    """How true the cost model is on a table of measured runs. It prints and writes nothing."""

    def __init__(
        self,
        *,
        runs: PricedTable,
        failed: PricedTable | None,
        metrics: Scores,
        groups: tuple[GroupScores, ...],
    ) -> None:
        """Keep the answers and their scores."""
        self.runs = runs
        """Measured runs with their answers."""
        self.failed = failed
        """Runs that failed with theirs, None where they were not given."""
        self.metrics = metrics
        """All figures of the table."""
        self.groups = groups
        """Figures of each group."""

    @property
    def by_group(self) -> pd.DataFrame:
        """Figures of each group (model, num_gpus, global_batch, seq_len), one row each."""
        names = [field.name for field in fields(GroupScores)]
        return pd.DataFrame([asdict(group) for group in self.groups], columns=names)

    @property
    def predictions(self) -> pd.DataFrame:
        """Predictions of the measured runs, as ``PricedTable.predictions``."""
        return self.runs.predictions

    @property
    def failed_predictions(self) -> pd.DataFrame | None:
        """Predictions of the runs that failed; None where they were not given."""
        return None if self.failed is None else self.failed.predictions

    @property
    def unpriced(self) -> pd.DataFrame:
        """Rows without a prediction: table, row, column (of a wrong cell) and reason."""
        rows = [
            {"table": priced.table.name, **asdict(each)}
            for priced in self.tables
            for each in priced.unpriced
        ]
        return pd.DataFrame(rows, columns=["table", "row", "column", "reason"])

    @property
    def tables(self) -> tuple[PricedTable, ...]:
        """The measured runs and, where they were given, those that failed."""
        return (self.runs,) if self.failed is None else (self.runs, self.failed)

    def to_json(self) -> str:
        """Write everything as JSON; equal answers give equal bytes."""
        failed = self.failed
        return dump_json(
            {
                "schema_version": VALIDATION_SCHEMA_VERSION,
                "planner_version": VERSION,
                "metrics": encode(self.metrics),
                "by_group": [encode(group) for group in self.groups],
                "predictions": _documents(self.runs.priced),
                "failed_predictions": None if failed is None else _documents(failed.priced),
                "unpriced": _documents(self.runs.unpriced),
                "failed_unpriced": None if failed is None else _documents(failed.unpriced),
            }
        )

    def plot(self, file: str | Path) -> None:
        """Draw predicted against measured step times.

        Args:
            file: Where to; its ending (.png, .svg) says how. It is replaced where it exists.

        Raises:
            RequestError: There is no such format, nothing to draw, or matplotlib is missing.
        """
        Path(file).write_bytes(self.plot_bytes(Path(file)))

    def plot_bytes(self, file: Path) -> bytes:
        """The picture of ``plot``; the file's ending says how it is written.

        Raises:
            RequestError: As ``plot``.
        """
        mape, points = self.metrics.time.mape, self.plotted_points
        errors = "" if mape is None else f": MAPE {mape:.1%} over {len(points):,} runs"
        return plot_bytes(points, f"{self.runs.table.name}{errors}", file)

    @property
    def plotted_points(self) -> pd.DataFrame:
        """Rows with both step times: columns measured_s, predicted_s, num_gpus."""
        frame = self.runs.measured
        points = pd.DataFrame(
            {
                "measured_s": pd.to_numeric(frame["step_time_s"], errors="coerce"),
                "predicted_s": self.predictions.set_index("row")["step_time_s"],
                "num_gpus": pd.to_numeric(frame["num_gpus"], errors="coerce"),
            }
        ).dropna()
        return points.astype({"num_gpus": int})

    def __repr__(self) -> str:
        time, rows = self.metrics.time, self.metrics.rows
        errors = (
            "no step time to compare"
            if time.mape is None or time.median_ape is None
            else f"step time MAPE {time.mape:.1%}, median {time.median_ape:.1%}"
        )
        return (
            f"ValidationResult({self.runs.table.name!r}: {len(self.runs.priced)} of "
            f"{rows.measured} rows priced, {errors})"
        )


def validate(
    runs: Source,
    *,
    failed: pd.DataFrame | str | Path | None = None,
    plan: str | Path | None = None,
    calibration: str | Path | None = None,
    assume: Mapping[str, str] = {},
    keep_going: bool = False,
    capacity_gib: float | None = None,
    min_group: int = MIN_GROUP,
    progress: ProgressCallback | None = None,
) -> ValidationResult:
    """Price measured runs with the cost model of the search, and say how far it is off.

    Args:
        runs: Table of measured runs, one row each, or the path of its CSV file; or logs of emitted
            scripts, one path or several.
        failed: Layouts that were tried and did not run, a table of the same form.
        plan: The plan.json of a log or its folder, None for the one beside the log or in the folder
            above it.
        calibration: File of constants that ``plan calibrate`` fitted, None for those that ship.
        assume: What to take for cells that the tables leave open, by column: {"recompute":
            "full"}; for ``framework`` also where no profile knows the name.
        keep_going: Price the other rows where some are wrong.
        capacity_gib: Memory of a device: what is predicted to need more does not fit, on top of
            the planner's own verdict.
        min_group: Measured rows that a group needs to be ranked.
        progress: Called when a phase begins, is under way and ends, None for silence.

    Returns:
        Figures, predictions, and the rows that cannot be priced with the reason.

    Raises:
        RequestError: A table cannot be read, lacks a column, or has a wrong row without
            ``keep_going``; or an option is out of range.
        ProfileError: The calibration is wrong.
    """
    _check_options(capacity_gib, min_group)
    plan_file = None if plan is None else Path(plan)
    tables = _tables(runs, failed, plan=plan_file, keep_going=keep_going, assume=assume)
    calibration_file = None if calibration is None else Path(calibration)
    priced = _price(tables, calibration_file, keep_going=keep_going, progress=progress)
    return _scored(priced, capacity_gib=capacity_gib, min_group=min_group)


def _scored(
    priced: Sequence[PricedTable], *, capacity_gib: float | None, min_group: int
) -> ValidationResult:
    """Score the measured runs, and those that failed where they were given."""
    failed = priced[1] if len(priced) > 1 else None
    metrics, groups = score_runs(
        priced[0].measured,
        priced[0].predictions,
        failed=None if failed is None else failed.measured,
        failed_predictions=None if failed is None else failed.predictions,
        capacity_gib=capacity_gib,
        min_group=min_group,
    )
    return ValidationResult(runs=priced[0], failed=failed, metrics=metrics, groups=groups)


def _tables(
    runs: Source,
    failed: pd.DataFrame | str | Path | None,
    *,
    plan: Path | None,
    keep_going: bool,
    assume: Mapping[str, str],
) -> list[RunTable]:
    tables = [read_source(runs, plan=plan, keep_going=keep_going, assume=assume)]
    if failed is not None:
        name = "the table of failed runs"
        tables.append(read_table(failed, keep_going=keep_going, assume=assume, name=name))
    return tables


def _check_options(capacity_gib: float | None, min_group: int) -> None:
    if min_group < 1:
        raise RequestError(
            f"--min-group {min_group}: it must be at least 1", hint="The default is 5."
        )
    if capacity_gib is not None and not capacity_gib > 0:
        raise RequestError(
            f"--capacity-gib {capacity_gib:g}: it must be above 0",
            hint="Leave it out for the memory of each row's own device.",
        )


def _price(
    tables: Sequence[RunTable],
    calibration: Path | None,
    *,
    keep_going: bool,
    progress: ProgressCallback | None,
) -> list[PricedTable]:
    """Price the rows of all tables in one go: they share models."""
    from planner.validation.pricing.predict import predict_runs

    runs = [run for table in tables for run in table.runs]
    answers = iter(predict_runs(runs, calibration=calibration, progress=progress))
    priced = []
    for table in tables:
        own = [next(answers) for _ in table.runs]
        assert [each.row for each in own] == [run.row for run in table.runs]
        unpriced = sorted(
            [*table.problems, *(each for each in own if isinstance(each, Unpriced))],
            key=lambda each: each.row,
        )
        if not keep_going:
            refuse_wrong_rows(unpriced, name=table.name)
        priced.append(
            PricedTable(
                table=table,
                priced=tuple(each for each in own if isinstance(each, Prediction)),
                unpriced=tuple(unpriced),
            )
        )
    return priced


def _prediction_columns(prediction: Prediction) -> dict[str, object]:
    memory = asdict(prediction.memory)
    return {
        "row": prediction.row,
        "step_time_s": prediction.step_time_s,
        "peak_mem_gib": prediction.peak_mem_bytes / GIB,
        "feasible": prediction.feasible,
        **asdict(prediction.costs),
        **{_gib_name(name): value / GIB for name, value in memory.items()},
        "assumptions": "; ".join(prediction.assumptions),
    }


def _gib_name(name: str) -> str:
    return f"{name.removesuffix('_bytes')}_gib"


_PREDICTION_COLUMNS = (
    *("row", "step_time_s", "peak_mem_gib", "feasible"),
    *(field.name for field in fields(CostBreakdown)),
    *(_gib_name(field.name) for field in fields(MemoryBreakdown)),
    *("assumptions", "unpriced"),
)


def _documents(answers: Sequence[Prediction | Unpriced]) -> list[JsonValue]:
    documents: list[JsonValue] = []
    documents.extend(encode_fields(answer) for answer in answers)
    return documents
