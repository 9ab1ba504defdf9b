"""What fitted constants are worth for what they were not fitted to.

``python tests/bench/fitting/left_out.py`` leaves out one cluster after the other, and one framework
after the other, fits all constants to the rest and prices what was left out. It prints two tables;
``--write`` puts them into docs/validate.md and the errors that stand beside a plan into the
profiles: the ``step_time_errors`` of devices, the mean errors of FSDP runs on such devices whose
cluster was left out, by the axes that they used, and ``step_time_error_not_calibrated`` of the
emitted script.

A framework that is left out takes the constants that it shares with others from them, and for its
own the mean of what the others have, or what is assumed (``Parameter.start``). A cluster that is
left out keeps what is known of its links from single collectives, and its device what its relatives
show.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pandas as pd
from fit_parameters import CHIPS, FSDP, PARAMETERS, Parameter
from joint_fit import FitRow, JointFit, Pricer, constants_of, published_rows, thinned, touches
from refit import profile_file, shipped_start, written

from planner.framework.script import SCRIPT
from planner.graph.recording.work import kinds_of_work
from planner.validation.pricing.models import ModelShape
from planner.validation.pricing.workbook import TRACED_LAYERS, traced
from planner.vocabulary import MODEL_AXES, WorkKind

sys.path.append(str(Path(__file__).parents[1]))
from validation_table import ROOT, markdown, with_figures

MIN_GROUP = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """A run and how far its predicted step time was off."""

    num_gpus: int
    """Its devices."""
    step_s: float
    """Its measured step."""
    work: frozenset[str]
    """Kinds of ops that do the FLOPs of its model."""
    error: float
    """Error of its step time, without sign."""


_MOST_ROWS = 30
_STEPS = (0.1, 0.03)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """Runs of one framework or cluster, priced with constants fitted to the others."""

    name: str
    """What was left out."""
    rows: tuple[FitRow, ...]
    """Its runs."""
    errors: tuple[float, ...]
    """Signed errors of their step times."""

    @property
    def cells(self) -> tuple[str, ...]:
        """Its line of the table."""
        sizes = [abs(error) for error in self.errors]
        rank = rank_correlation(self.rows, self.errors)
        return (
            self.name,
            f"{len(sizes):,}",
            f"{statistics.median(sizes):.1%}",
            f"{statistics.fmean(sizes):.1%}",
            f"{statistics.median(self.errors):+.1%}",
            "-" if rank is None else f"{rank:.2f}",
        )


def left_out(rows: Sequence[FitRow], out: Sequence[FitRow], name: str, pricer: Pricer) -> LeftOut:
    """Fit all constants to all but some runs, and price those."""
    gone, pairs = set(map(id, out)), {row.pair for row in out}
    rest = [row for row in rows if id(row) not in gone]
    seen = [each for each in PARAMETERS if any(touches(each, row.pair) for row in rest)]
    fit = JointFit(thinned(rest, _MOST_ROWS), seen, pricer)
    # What the other runs show begins at the shipped values, to save time.
    fitted = fit.fitted({each: shipped_start(each) for each in seen}, steps=_STEPS)
    needed = [each for each in PARAMETERS if any(touches(each, pair) for pair in pairs)]
    values = with_defaults(fitted, set(needed) - set(seen))
    errors = []
    for row in out:
        (error,) = pricer.log_errors(row.pair, [row], constants_of(values))
        errors.append(math.exp(error) - 1)
    return LeftOut(name=name, rows=tuple(out), errors=tuple(errors))


def with_defaults(
    fitted: Mapping[Parameter, float], unseen: Set[Parameter]
) -> dict[Parameter, float]:
    """What the fit shows, and what no run of it shows by what is nearest."""
    found = dict(fitted)
    for parameter in unseen:
        alike = [
            value
            for other, value in fitted.items()
            if (other.owner, other.key) == (parameter.owner, parameter.key)
            and _is_relative(parameter, other)
        ]
        found[parameter] = (
            math.exp(statistics.fmean(map(math.log, alike))) if alike else parameter.start
        )
    return found


def _is_relative(parameter: Parameter, other: Parameter) -> bool:
    """Devices take what chips of their generation show, frameworks what any other does."""
    if parameter.owner == "cluster":
        return False
    if parameter.owner == "framework":
        return True
    return any(parameter.names[0] in names and other.names[0] in names for names in CHIPS)


def rank_correlation(rows: Sequence[FitRow], errors: Sequence[float]) -> float | None:
    """Spearman's, mean over groups of rows of one model, batch and number of devices."""
    groups: dict[tuple[object, ...], list[tuple[float, float]]] = {}
    for row, error in zip(rows, errors, strict=True):
        run = row.case.run
        assert run.step_time_s
        key = (run.model, run.num_gpus, run.global_batch_size, run.seq_len, run.gpu)
        groups.setdefault(key, []).append((run.step_time_s, run.step_time_s * (1 + error)))
    found = []
    for pairs in groups.values():
        ranks = pd.DataFrame(pairs).rank()
        if len(pairs) >= MIN_GROUP and (ranks.nunique() > 1).all():
            found.append(float(ranks[0].corr(ranks[1])))
    return statistics.fmean(found) if found else None


def step_time_errors(clusters: Sequence[LeftOut]) -> dict[str, dict[str, list[Sized]]]:
    """FSDP runs whose cluster was left out, by device and the axes that divided their model."""
    found: dict[str, dict[str, list[Sized]]] = {}
    for each in clusters:
        for row, error in zip(each.rows, each.errors, strict=True):
            if row.case.framework.name in FSDP:
                run = row.case.run
                used = [axis for axis in MODEL_AXES if (getattr(run, axis, None) or 1) > 1]
                kinds = found.setdefault(row.device, {})
                kinds.setdefault(" x ".join(used) or "none", []).append(sized(row, error))
    return found


def sized(row: FitRow, error: float) -> Sized:
    """What is said of a run beside its error."""
    run = row.case.run
    assert run.step_time_s
    shape = replace(row.case.shape, layers=min(run.layers, TRACED_LAYERS))
    return Sized(
        num_gpus=run.num_gpus,
        step_s=run.step_time_s,
        work=_work(shape, row.case.dtype, run.microbatch_size),
        error=abs(error),
    )


@cache
def _work(shape: ModelShape, dtype: str, microbatch_size: int) -> frozenset[str]:
    """Kinds of ops that do a model's FLOPs."""
    graph = traced(shape, dtype).at(microbatch_size)
    return frozenset(kinds_of_work((op.name, op.flop) for op in graph.nodes))


def mean_cluster_error(clusters: Sequence[LeftOut]) -> float:
    """Mean over the clusters of the mean error of their runs: all clusters weigh alike."""
    return statistics.fmean(statistics.fmean(map(abs, each.errors)) for each in clusters)


_HEAD = ("left out", "runs", "median error", "mean error", "bias", "rank correlation")
_BEGIN = "<!-- figures of left_out.py -->\n"
_DOCUMENT = ROOT / "docs" / "validate.md"
_SOURCE = "tests/bench/fitting/left_out.py"


def table(kind: str, found: Sequence[LeftOut]) -> str:
    """What was left out, the least error first, and all of it together."""
    together = LeftOut(
        name="all together",
        rows=tuple(row for each in found for row in each.rows),
        errors=tuple(error for each in found for error in each.errors),
    )
    best_first = sorted(found, key=lambda each: statistics.median(map(abs, each.errors)))
    cells = [each.cells for each in (*best_first, together)]
    return markdown((f"{kind} {_HEAD[0]}", *_HEAD[1:]), cells)


def _each_left_out(by_name: Mapping[str, list[FitRow]], pricer: Pricer) -> list[LeftOut]:
    """Leave out each in turn."""
    found = []
    for name, own in by_name.items():
        found.append(left_out(published_rows(), own, name, pricer))
        sys.stderr.write(f"{found[-1].cells}\n")
    return found


def write(clusters: Sequence[LeftOut], tables: Sequence[str]) -> None:
    """Put the tables into the document, and the errors into the profiles."""
    document = _DOCUMENT.read_text(encoding="utf-8")
    document = with_figures(document, "\n\n".join(tables), begin=_BEGIN)
    _DOCUMENT.write_text(document, encoding="utf-8")
    for device, kinds in step_time_errors(clusters).items():
        file = profile_file("device", device)
        text = file.read_text(encoding="utf-8").partition("\n[[step_time_errors]]")[0]
        text += "".join(_error_table(axes, runs) for axes, runs in kinds.items())
        file.write_text(text, encoding="utf-8")
    source = f"{_SOURCE}: mean over {len(clusters)} clusters, each left out, of the mean error"
    error = mean_cluster_error(clusters)
    file = profile_file("framework", SCRIPT)
    key, text = "step_time_error_not_calibrated", file.read_text(encoding="utf-8")
    text = written(text, key, round(error, 3), source, provenance="measured")
    file.write_text(text, encoding="utf-8")


def _error_table(axes: str, runs: Sequence[Sized]) -> str:
    """The errors of one kind of run, as the last tables of a device's profile have them."""
    sizes = [run.num_gpus for run in runs]
    steps_s = [run.step_s for run in runs]
    work = frozenset.union(*(run.work for run in runs))
    source = f"{_SOURCE}: FSDP runs on this device, their cluster left out"
    numbers = {
        "mean_error": round(statistics.fmean(run.error for run in runs), 3),
        "runs": len(runs),
        "least_gpus": min(sizes),
        "most_gpus": max(sizes),
        "least_step_s": min(steps_s),
        "most_step_s": max(steps_s),
    }
    lines = [
        f'{key} = {{ value = {value:g}, provenance = "measured", source = "{source}" }}\n'
        for key, value in numbers.items()
    ]
    kinds = ", ".join(kind for kind in WorkKind if kind in work)
    return f'\n[[step_time_errors]]\naxes = "{axes}"\nwork = "{kinds}"\n' + "".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Print the tables, and with ``--write`` put them where they are read."""
    parser = argparse.ArgumentParser(prog=f"python {_SOURCE}")
    parser.add_argument("--write", action="store_true", help="write what was found")
    options = parser.parse_args(arguments)
    by_cluster: dict[str, list[FitRow]] = {}
    by_framework: dict[str, list[FitRow]] = {}
    for row in published_rows():
        by_cluster.setdefault(row.case.cluster, []).append(row)
        by_framework.setdefault(row.case.framework.name, []).append(row)
    pricer = Pricer()
    clusters = _each_left_out(by_cluster, pricer)
    frameworks = _each_left_out(by_framework, pricer)
    tables = [table("cluster", clusters), table("framework", frameworks)]
    sys.stdout.write("\n\n".join(tables) + "\n")
    if options.write:
        write(clusters, tables)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
