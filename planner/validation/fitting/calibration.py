"""Fitted constants of devices, clusters and frameworks, as a file that people keep."""

from collections.abc import Mapping
from dataclasses import dataclass

from planner.framework.constants import KEYS, Constants
from planner.validation.types import Unpriced


@dataclass(frozen=True, slots=True, kw_only=True)
class PairErrors:
    """How far off the step times of one framework on one cluster are."""

    num_rows: int
    """Rows."""
    before: float
    """Mean absolute error with the profiles' own constants."""
    after: float
    """The same with the fitted ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Constants by what they belong to."""

    constants: Constants
    """What was fitted."""
    errors: Mapping[tuple[str, str], PairErrors]
    """By the names of framework and cluster."""
    at_bound: frozenset[str]
    """Keys of values that are as large as a share can be: the runs ask for more, so that
    something else is missing."""
    left_out: tuple[Unpriced, ...]
    """Runs that cannot be priced."""

    @property
    def num_rows(self) -> int:
        """Rows that the constants are fitted to."""
        return sum(each.num_rows for each in self.errors.values())

    def lines(self) -> list[str]:
        """What was fitted, for people."""
        found = [
            f"{framework} on {cluster}: {each.num_rows} rows, mean error of the step time "
            f"{each.before:.1%} before, {each.after:.1%} after"
            for (framework, cluster), each in self.errors.items()
        ]
        rows = self.num_rows
        fitted = sum(len(of) for owner in KEYS for of in self.constants.of(owner).values())
        if rows < fitted:
            found.append(
                f"{rows} rows for {fitted} constants: together they meet these runs, each by "
                "itself is not known"
            )
        for owner in KEYS:
            for name, values in self.constants.of(owner).items():
                found.append(f"{owner} {name}")
                found += [
                    f"  {key} = {value:.4g}{' (at its bound)' if key in self.at_bound else ''}"
                    for key, value in values.items()
                ]
        return found

    def to_toml(self) -> str:
        """The file's content, which ``planner.framework.calibration`` reads."""
        lines = ["format = 1"]
        for owner in KEYS:
            for name, values in self.constants.of(owner).items():
                lines += ["", f"[[{owner}]]", f'name = "{name}"']
                lines += [
                    f'{key} = {{ value = {value:.6g}, provenance = "fitted", '
                    f'source = "plan calibrate: {self.num_rows} rows" }}'
                    for key, value in values.items()
                ]
        return "\n".join(lines) + "\n"
