"""Fits all constants at once, over all runs that share them.

The loss is the mean over parts of the published tables of the mean over their rows of
min(|ln(predicted / measured)|, cap): the logarithm weighs a step that is twice too long like one
that is twice too short, and the cap keeps runs that something unusual slowed down from pulling the
constants. A small square of ln(value / start) / spread holds what no run tells at its start.

One constant moves at a time while all others stand, round after round with shrinking steps, until
nothing is gained (coordinate descent). A move prices only the runs that have its owner. Rows of
long tables are taken at regular intervals, so that the fit takes minutes and is the same on every
run.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from fit_parameters import Parameter

from planner.errors import PlannerError
from planner.framework.constants import Constants
from planner.hardware.profiles import PROFILES_FOLDER, load_cluster
from planner.validation.pricing.case_price import CasePrice, CasePricer
from planner.validation.pricing.cases import Case, case_of
from planner.validation.pricing.workbook import WorkBook
from planner.validation.reading.table import read_table

RUNS_FOLDER = PROFILES_FOLDER / "published" / "runs"

CAP = 0.7
MOST_ROWS = 150
"""Rows of a part that are fitted to."""

_PULL = 0.001
STEPS = (0.3, 0.1, 0.03, 0.01)
_SWEEPS = 3
_MOST_MOVES = 4
_LEAST_GAIN = 1e-5

FEW_GPUS = 16

Pair = tuple[str, str]
"""Names of a framework and of a cluster profile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitRow:
    """A run that constants are fitted to."""

    part: str
    """Part of the tables; all parts weigh alike."""
    case: Case
    """The run."""

    @property
    def pair(self) -> Pair:
        """What it ran on."""
        return self.case.framework.name, self.case.cluster

    @property
    def device(self) -> str:
        """Name of the device profile."""
        return _device_of(self.case.cluster)


@cache
def published_rows() -> tuple[FitRow, ...]:
    """All timed runs of the published tables that can be priced."""
    found = []
    for file in sorted(RUNS_FOLDER.glob("*.csv")):
        if file.stem.endswith("_failed"):
            continue
        for run in read_table(file, keep_going=True).runs:
            with suppress(PlannerError):  # what is not modelled cannot be fitted to
                case = case_of(run)
                if (
                    isinstance(case, Case) and run.step_time_s and not run.float8
                ):  # constants and errors are of bfloat16
                    found.append(FitRow(part=_part(file.stem, case), case=case))
    return tuple(found)


def _part(table: str, case: Case) -> str:
    few = " on few" if case.run.num_gpus <= FEW_GPUS and case.framework.name == "nanotron" else ""
    return f"{table} {case.framework.name} {case.cluster}{few}"


def thinned(rows: Sequence[FitRow], most: int = MOST_ROWS) -> list[FitRow]:
    """At most so many rows of each part, at regular intervals."""
    found = []
    for part in dict.fromkeys(row.part for row in rows):
        own = [row for row in rows if row.part == part]
        found += own[:: math.ceil(len(own) / most)]
    return found


class Pricer:
    """Prices rows under constants; equal questions are answered once."""

    def __init__(self) -> None:
        """Draw nothing yet."""
        self._book = WorkBook()
        self._pricers: dict[Pair, CasePricer] = {}

    def price(self, row: FitRow, constants: Constants) -> CasePrice:
        """Price a row."""
        if row.pair not in self._pricers:
            self._pricers[row.pair] = CasePricer(self._book)
        return self._pricers[row.pair].price(row.case, constants)

    def log_errors(self, pair: Pair, rows: Sequence[FitRow], constants: Constants) -> list[float]:
        """ln(predicted / measured) of rows of one framework on one cluster."""
        found = []
        for row in rows:
            assert row.pair == pair
            assert row.case.run.step_time_s
            price = self.price(row, constants)
            found.append(math.log(price.costs.step_time_s / row.case.run.step_time_s))
        return found


Fitted = Mapping[Parameter, float]


def constants_of(values: Fitted) -> Constants:
    """The values by their owners."""
    found: dict[str, dict[str, dict[str, float]]] = {"device": {}, "cluster": {}, "framework": {}}
    for parameter, value in values.items():
        for name in parameter.names:
            found[parameter.owner].setdefault(name, {})[parameter.key] = value
    return Constants(**found)  # type: ignore[arg-type]


@cache
def _device_of(cluster: str) -> str:
    return load_cluster(cluster, gpus=1).device.name


def touches(parameter: Parameter, pair: Pair) -> bool:
    """Whether a constant belongs to something of the pair."""
    framework, cluster = pair
    owners = {"framework": framework, "cluster": cluster, "device": _device_of(cluster)}
    return owners[parameter.owner] in parameter.names


class JointFit:
    """One fit of some constants to some rows."""

    def __init__(
        self, rows: Sequence[FitRow], parameters: Sequence[Parameter], pricer: Pricer
    ) -> None:
        """Keep what the loss depends on."""
        self._pricer = pricer
        self._parameters = tuple(parameters)
        self._rows: dict[Pair, list[FitRow]] = {}
        for row in rows:
            self._rows.setdefault(row.pair, []).append(row)
        parts = [row.part for row in rows]
        self._weight = {part: 1 / parts.count(part) / len(set(parts)) for part in parts}
        self._known: dict[tuple[Pair, tuple[float, ...]], float] = {}

    def fitted(self, start: Fitted, steps: Sequence[float] = STEPS) -> dict[Parameter, float]:
        """The constants of least loss, from some start."""
        values = dict(start)
        free = [each for each in self._parameters if self._is_seen(each)]
        for step in steps:
            for _ in range(_SWEEPS):
                before = self.loss(values)
                for parameter in free:
                    self._move(parameter, values, step)
                if self.loss(values) > before - _LEAST_GAIN:
                    break
        return values

    def num_rows(self, parameter: Parameter) -> int:
        """Rows that a constant is fitted to."""
        return sum(len(rows) for pair, rows in self._rows.items() if touches(parameter, pair))

    def _is_seen(self, parameter: Parameter) -> bool:
        return any(touches(parameter, pair) for pair in self._rows)

    def _move(self, parameter: Parameter, values: dict[Parameter, float], step: float) -> None:
        """Move one constant while that gains."""
        best = self.loss(values)
        for factor in (1 + step, 1 / (1 + step)):
            gained = False
            for _ in range(_MOST_MOVES):
                old = values[parameter]
                values[parameter] = min(old * factor, parameter.most)
                loss = self.loss(values)
                if loss >= best:
                    values[parameter] = old
                    break
                best, gained = loss, True
            if gained:
                return

    def loss(self, values: Fitted) -> float:
        """What is minimised."""
        pull = sum(
            (math.log(value / parameter.start) / parameter.spread) ** 2
            for parameter, value in values.items()
        )
        return sum(self._pair_loss(pair, values) for pair in self._rows) + _PULL * pull

    def _pair_loss(self, pair: Pair, values: Fitted) -> float:
        own = {each: value for each, value in values.items() if touches(each, pair)}
        key = (pair, tuple(own.values()))
        if key not in self._known:
            rows = self._rows[pair]
            errors = self._pricer.log_errors(pair, rows, constants_of(own))
            self._known[key] = sum(
                self._weight[row.part] * min(abs(error), CAP)
                for row, error in zip(rows, errors, strict=True)
            )
        return self._known[key]
