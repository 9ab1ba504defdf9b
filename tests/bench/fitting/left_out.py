"""What fitted constants are worth for what they were not fitted to.

``python tests/bench/fitting/left_out.py`` leaves out one framework after the other, and one cluster
after the other, fits all constants to the rest and prices what was left out. It prints two tables
in Markdown, and below them the ``step_time_error`` of devices, the mean error of FSDP runs on such
devices whose cluster was left out.

A framework that is left out takes the constants that it shares with others from them, and for its
own what ``defaults`` says: the mean of what the other frameworks have. A cluster that is left out
keeps what is known of its links from single collectives, and its device what its relatives show.
"""

import math
import statistics
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import pandas as pd
from fit_parameters import CHIPS, FSDP, PARAMETERS, Parameter
from joint_fit import FitRow, JointFit, Pricer, constants_of, published_rows, thinned, touches
from refit import shipped_start

MIN_GROUP = 5
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


def step_time_errors(clusters: Sequence[LeftOut]) -> dict[str, float]:
    """Mean error of FSDP runs whose cluster was left out, by device; "" for all of them."""
    found: dict[str, list[float]] = {"": []}
    for each in clusters:
        for row, error in zip(each.rows, each.errors, strict=True):
            if row.case.framework.name in FSDP:
                found.setdefault(row.device, []).append(abs(error))
                found[""].append(abs(error))
    return {device: statistics.fmean(errors) for device, errors in found.items()}


_HEAD = ("left out", "runs", "median error", "mean error", "bias", "rank correlation")


def _line(cells: Sequence[str]) -> None:
    sys.stdout.write(f"| {' | '.join(cells)} |\n")
    sys.stdout.flush()


def _printed(kind: str, by_name: Mapping[str, list[FitRow]], pricer: Pricer) -> list[LeftOut]:
    """Leave out each in turn; a table in Markdown, line by line."""
    rows = published_rows()
    _line((f"{kind} {_HEAD[0]}", *_HEAD[1:]))
    _line(["---"] * len(_HEAD))
    found = []
    for name, own in by_name.items():
        found.append(left_out(rows, own, name, pricer))
        _line(found[-1].cells)
    every = LeftOut(
        name="all together",
        rows=tuple(row for each in found for row in each.rows),
        errors=tuple(error for each in found for error in each.errors),
    )
    _line(every.cells)
    sys.stdout.write("\n")
    return found


def main() -> int:
    """Print the tables."""
    pricer = Pricer()
    by_cluster: dict[str, list[FitRow]] = {}
    by_framework: dict[str, list[FitRow]] = {}
    for row in published_rows():
        by_cluster.setdefault(row.case.cluster, []).append(row)
        by_framework.setdefault(row.case.framework.name, []).append(row)
    for device, error in step_time_errors(_printed("cluster", by_cluster, pricer)).items():
        sys.stdout.write(f"{device or 'any device'}: step_time_error {error:.3f}\n")
    sys.stdout.write("\n")
    _printed("framework", by_framework, pricer)
    return 0


if __name__ == "__main__":
    sys.exit(main())
