"""Prices the published tables of runs and prints how far off the cost model is, beside its goals.

``python tests/bench/validation_table.py [--json] [--out DIR] [--write]``; ``--out`` writes a CSV
file with all predictions of each table, ``--write`` puts the figures into README.md and
docs/validate.md, between the lines that mark their place.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from textwrap import fill

import pandas as pd

from planner import validate
from planner.hardware.profiles import PROFILES_FOLDER
from planner.validation.scoring.ranking import GROUP_COLUMNS, TIE
from planner.validation.scoring.scores import MIN_GROUP, Scores, score_runs
from planner.validation.validate import PricedTable, ValidationResult
from planner.validation.view import percent, reason_rows, table_words

RUNS_FOLDER = PROFILES_FOLDER / "published" / "runs"
"""Tables of published runs."""

FALSE_ALARM_SHARE = 0.01
FEW_GPUS = 16

Results = Mapping[str, ValidationResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A figure that is to be reached."""

    table: str
    """Table of runs, or a part of it."""
    measure: str
    best: str
    """What the best published cost model reaches, measured side by side."""
    to_reach: float
    figure: Callable[[Results], float | None]
    at_least: bool = False
    """Larger is better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """A goal, and what is reached."""

    table: str
    measure: str
    best: str
    to_reach: float
    reached: float | None
    met: bool
    at_least: bool

    @property
    def row(self) -> tuple[str, ...]:
        """The cells of its line."""
        sign = ">=" if self.at_least else "<="
        missed = "" if self.reached is None else f" by {abs(self.reached - self.to_reach):.1%}"
        verdict = "yes" if self.met else f"missed{missed}"
        target = f"{sign} {self.to_reach * 100:g}%"
        return (self.table, self.measure, self.best, target, percent(self.reached), verdict)


def priced_tables() -> dict[str, ValidationResult]:
    """All published tables, by name; failed layouts go with the runs of their sweep."""
    files = sorted(RUNS_FOLDER.glob("*.csv"))
    failed = {file.stem.removesuffix("_failed"): file for file in files if "_failed" in file.stem}
    return {
        file.stem: validate(file, failed=failed.get(file.stem), keep_going=True)
        for file in files
        if file not in failed.values()
    }


def few_gpus(result: ValidationResult, most: int) -> Scores:
    """Figures of the runs on at most so many devices."""
    measured, predictions = result.runs.measured, result.predictions
    few = (measured["num_gpus"] <= most).to_numpy()
    kept = predictions[few].assign(row=range(few.sum()))
    scores, _ = score_runs(measured[few].reset_index(drop=True), kept)
    return scores


def in_precision(result: ValidationResult, *, float8: bool) -> Scores:
    """Figures of the runs whose linear layers multiply in float8, or of those that do not."""
    measured = result.runs.measured
    rows = measured["precision"].str.startswith("fp8").to_numpy() == float8
    kept = result.predictions[rows].assign(row=range(rows.sum()))
    scores, _ = score_runs(measured[rows].reset_index(drop=True), kept)
    return scores


_Figure = Callable[[Scores], float | None]
_Runs = Callable[[str, _Figure, Results], float | None]
"""A figure of some runs of a table."""


def _few(name: str, figure: _Figure, results: Results) -> float | None:
    return figure(few_gpus(results[name], FEW_GPUS))


def _bf16(name: str, figure: _Figure, results: Results) -> float | None:
    return figure(in_precision(results[name], float8=False))


def _float8(name: str, figure: _Figure, results: Results) -> float | None:
    return figure(in_precision(results[name], float8=True))


def _all(name: str, figure: _Figure, results: Results) -> float | None:
    return figure(results[name].metrics)


def _caught(scores: Scores) -> float | None:
    """Failed layouts that are found at hardly a false alarm."""
    oom = scores.oom
    if oom is None or oom.caught is None or oom.caught_at_1pct is None:
        return None
    if oom.false_alarms is not None and oom.false_alarms <= FALSE_ALARM_SHARE:
        return max(oom.caught, oom.caught_at_1pct)
    return oom.caught_at_1pct


def _first_pick_ran(scores: Scores) -> float | None:
    with_failed = scores.ranking.with_failed
    if with_failed is None or with_failed.top1_failed is None:
        return None
    return 1 - with_failed.top1_failed


MAPE, MEDIAN, MEMORY = "MAPE", "median error", "memory MAPE"
REGRET, REGRET_MEDIAN = "top-1 regret, mean", "top-1 regret, median"
CAUGHT = "failed layouts caught at <= 1% false alarms"
FIRST_PICK = "first pick among all layouts did run"

FIGURES: Mapping[str, Callable[[Scores], float | None]] = {
    MAPE: lambda scores: scores.time.mape,
    MEDIAN: lambda scores: scores.time.median_ape,
    MEMORY: lambda scores: scores.memory.mape,
    REGRET: lambda scores: scores.ranking.top1_regret.mean,
    REGRET_MEDIAN: lambda scores: scores.ranking.top1_regret.median,
    CAUGHT: _caught,
    FIRST_PICK: _first_pick_ran,
}


def _goal(
    file: str, words: str, measure: str, best: str, to_reach: float, runs: _Runs = _all
) -> Goal:
    return Goal(
        table=words,
        measure=measure,
        best=best,
        to_reach=to_reach,
        figure=partial(runs, file, FIGURES[measure]),
        at_least=measure in (CAUGHT, FIRST_PICK),
    )


_NANOTRON, _FEW = "nanotron_ultrascale_h100", f"nanotron, <= {FEW_GPUS} GPUs"
_SWEEP = "nanotron, all"

GOALS = (
    _goal("vtrain_single_node", "vTrain, one node", MAPE, "8.4% (kernel profiles), 34%", 0.10),
    _goal("vtrain_single_node", "vTrain, one node", REGRET, "12.7%", 0.03),
    _goal("vtrain_multi_node", "vTrain, many nodes", MAPE, "14.7%", 0.07),
    _goal("vtrain_multi_node", "vTrain, many nodes", REGRET, "1.3%", 0.015),
    _goal(_NANOTRON, _FEW, MEDIAN, "51%", 0.07, _few),
    _goal(_NANOTRON, _FEW, MAPE, "55%", 0.10, _few),
    _goal(_NANOTRON, _FEW, REGRET, "2.4% (rule of thumb)", 0.02, _few),
    _goal(_NANOTRON, _SWEEP, MEDIAN, "60%", 0.15),
    _goal(_NANOTRON, _SWEEP, REGRET_MEDIAN, "8.4%", 0.05),
    _goal(_NANOTRON, _SWEEP, MEMORY, "27%", 0.06),
    _goal(_NANOTRON, _SWEEP, CAUGHT, "87%", 0.95),
    _goal(_NANOTRON, _SWEEP, FIRST_PICK, "38%", 0.95),
    _goal("korthikanti2022_table5", "Korthikanti 2022", MAPE, "3.6% (in sample)", 0.04),
    _goal("megatron_sc21_table1", "Megatron SC'21", MAPE, "9.2%", 0.04),
    _goal("zero_bubble_table4", "zero bubble", MAPE, "13.5% (1F1B only)", 0.06),
    _goal("zero_bubble_table4", "zero bubble", MEMORY, "3.3%", 0.05),
    _goal("bigscience_a100_176b", "BigScience", MAPE, "16%", 0.08),
    _goal("bigscience_a100_176b", "BigScience", REGRET, "5.0%", 0.02),
    _goal("bigscience_a100_176b", "BigScience", MEMORY, "26%", 0.10),
    _goal("llm_foundry_mpt", "LLM Foundry, FSDP", MAPE, "none", 0.10, _bf16),
    _goal("llm_foundry_mpt", "LLM Foundry, float8", MAPE, "none", 0.10, _float8),
    _goal("torchtitan", "torchtitan, bf16", MAPE, "none", 0.08, _bf16),
    _goal("torchtitan", "torchtitan, bf16", MEMORY, "none", 0.08, _bf16),
    _goal("torchtitan", "torchtitan, float8", MAPE, "none", 0.10, _float8),
)
"""What is to be reached."""


def reached(results: Results) -> list[Reached]:
    """Hold all goals to some pricing of all tables."""
    found = []
    for goal in GOALS:
        value = goal.figure(results)
        good = value is not None and (
            value >= goal.to_reach if goal.at_least else value <= goal.to_reach
        )
        found.append(
            Reached(
                table=goal.table,
                measure=goal.measure,
                best=goal.best,
                to_reach=goal.to_reach,
                reached=value,
                met=good,
                at_least=goal.at_least,
            )
        )
    return found


HEAD = ("table", "measure", "best so far", "to reach", "reached", "met")
FILE_HEAD = ("file", "rows", "step time MAPE", "median", "memory MAPE", "regret, mean")


def file_rows(results: Results) -> list[tuple[str, ...]]:
    """Figures of each table of runs that ran."""
    return [
        (
            f"{name}.csv",
            table_words(result.runs),
            percent(result.metrics.time.mape),
            percent(result.metrics.time.median_ape),
            percent(result.metrics.memory.mape),
            percent(result.metrics.ranking.top1_regret.mean),
        )
        for name, result in results.items()
    ]


def unpriced_lines(results: Results) -> list[str]:
    """Why rows are not priced, table by table."""
    tables: list[PricedTable] = [each for result in results.values() for each in result.tables]
    return [
        f"- {table.table.name}: {table_words(table)}: {rows} x {reason}"
        for table in tables
        for rows, reason, _ in reason_rows(table.unpriced)
    ]


LAYOUT = ["model", "tp", "pp", "zero_stage_or_fsdp", "micro_batch"]
"""Columns that say what a rank does, on however many devices."""

SLOWED = 2.0
"""Measured over predicted step time from which a run is called slowed down."""


def missed_lines(result: ValidationResult) -> list[str]:
    """What the failed layouts that are not foretold, and slowed runs, have in common."""
    assert result.failed is not None
    assert result.failed_predictions is not None
    ran, failed = result.runs.measured, result.failed.table.frame
    answers = result.failed_predictions
    priced = failed[answers["step_time_s"].notna().to_numpy()]
    missed = priced[answers.loc[priced.index, "feasible"].astype(bool).to_numpy()]
    exact = [*LAYOUT, "num_gpus", "dp", "global_batch"]
    alike = len(missed.merge(ran[LAYOUT].drop_duplicates(), on=LAYOUT))
    same = len(missed.merge(ran[exact].drop_duplicates(), on=exact))
    many = ran["num_gpus"] > FEW_GPUS
    slowed = ran["step_time_s"] > SLOWED * result.predictions["step_time_s"]
    return [
        f"- {len(missed)} of {len(priced)} failed layouts are predicted to run; {alike} of them "
        f"ran on some number of GPUs, {same} in the very same form",
        *first_pick_lines(ran, result.predictions, priced, answers.loc[priced.index]),
        f"- {(slowed & many).sum()} of {many.sum()} runs on more than {FEW_GPUS} GPUs took more "
        f"than {SLOWED:g} times the predicted step",
    ]


def first_pick_lines(
    ran: pd.DataFrame, answers: pd.DataFrame, failed: pd.DataFrame, failed_answers: pd.DataFrame
) -> list[str]:
    """Whether the layout that is predicted fastest ran, in how many groups."""
    whole = [
        table.assign(
            predicted_s=prediction["step_time_s"].to_numpy(),
            fits=prediction["feasible"].astype(bool).to_numpy(),
            ran=did_run,
        )
        for table, prediction, did_run in ((ran, answers, True), (failed, failed_answers, False))
    ]
    layouts = pd.concat(whole)
    picked = []
    for _, group in layouts.groupby(list(GROUP_COLUMNS)):
        if group["ran"].sum() >= MIN_GROUP:
            running = group[group["fits"]]
            least_s = running["predicted_s"].min() * (1 + TIE)
            picked.append(running.loc[running["predicted_s"] <= least_s, "ran"])
    return [
        f"- the layout picked first ran in {sum(each.any() for each in picked)} of {len(picked)} "
        f"groups, and failed as well in {sum(each.any() and not each.all() for each in picked)}"
    ]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in columns, as a README and a terminal show it."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [head, ["-" * width for width in widths], *rows]
    return "\n".join(
        f"| {' | '.join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))} |"
        for line in lines
    )


ROOT = Path(__file__).resolve().parents[2]

BEGIN, END = "<!-- figures of make validate -->\n", "<!-- end of the figures -->\n"
"""Lines of a document between which ``--write`` puts figures."""


WIDTH = 100
"""Longest line of a document."""


def summary_lines(results: Results, goals: Sequence[Reached]) -> list[str]:
    """How true the cost model is, in a few lines: what the README says."""
    sweep = {goal.measure: percent(goal.reached) for goal in goals if goal.table == _SWEEP}
    mean, median, memory, regret = (
        _range(results, FIGURES[measure]) for measure in (MAPE, MEDIAN, MEMORY, REGRET)
    )
    return [
        f"- Step time: the mean error of a table is {mean}; the median error is {median}.",
        "- Choice: the layout that it would pick takes longer than the best measured one, by"
        f" {regret} on average over a table.",
        f"- Memory: the mean error of a table is {memory}.",
        f"- Failures: it foretells {sweep[CAUGHT]} of nanotron's failed layouts, with false alarms"
        " on at most 1% of those that ran. Its first pick ran in"
        f" {sweep[FIRST_PICK]} of the groups.",
        f"- Goals: {sum(goal.met for goal in goals)} of {len(goals)} are met.",
    ]


def _range(results: Results, figure: Callable[[Scores], float | None]) -> str:
    """The least and the most of a figure over all tables: "0.8% to 24.1% (internevo)"."""
    found = [
        (value, name)
        for name, result in results.items()
        if (value := figure(result.metrics)) is not None
    ]
    most, name = max(found)
    return f"{percent(min(found)[0])} to {percent(most)} ({name})"


def figures(results: Results) -> dict[Path, str]:
    """The text with figures that each document holds."""
    goals = reached(results)
    summary = [fill(line, WIDTH, subsequent_indent="  ") for line in summary_lines(results, goals)]
    tables = [markdown(HEAD, [goal.row for goal in goals]), markdown(FILE_HEAD, file_rows(results))]
    missed = [
        fill(line, WIDTH, subsequent_indent="  ") for line in missed_lines(results[_NANOTRON])
    ]
    return {
        ROOT / "README.md": "\n".join(summary),
        ROOT / "docs" / "validate.md": "\n\n".join([*tables, "\n".join(missed)]),
    }


def with_figures(document: str, text: str, *, begin: str = BEGIN) -> str:
    """Put figures into a document, in the place of those that it has.

    Args:
        document: What has them.
        text: The figures.
        begin: Line in front of their place.
    """
    before, _, rest = document.partition(begin)
    assert END in rest, f"no lines {begin.strip()} and {END.strip()}"
    _, _, after = rest.partition(END)
    return f"{before}{begin}{text}\n{END}{after}"


def write_predictions(results: Results, folder: Path) -> None:
    """Write the predictions of every table."""
    folder.mkdir(parents=True, exist_ok=True)
    for result in results.values():
        for table in result.tables:
            table.predictions.to_csv(folder / table.table.name, index=False)


def main(arguments: Sequence[str]) -> int:
    """Price, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the goals as JSON")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write all predictions")
    parser.add_argument("--write", action="store_true", help="put the figures into the documents")
    options = parser.parse_args(arguments)
    results = priced_tables()
    if options.write:
        for file, text in figures(results).items():
            file.write_text(with_figures(file.read_text(), text))
    goals = reached(results)
    if options.out is not None:
        write_predictions(results, options.out)
    if options.json:
        print(json.dumps([asdict(goal) for goal in goals], indent=2))
        return 0
    print(markdown(HEAD, [goal.row for goal in goals]))
    print(f"\n{sum(goal.met for goal in goals)} of {len(goals)} met\n")
    print(markdown(FILE_HEAD, file_rows(results)))
    print("\nNot priced:\n" + "\n".join(unpriced_lines(results)))
    print("\nnanotron:\n" + "\n".join(missed_lines(results[_NANOTRON])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
