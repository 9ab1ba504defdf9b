"""Fitted constants of frameworks on clusters, as a file that people keep for their own machines."""

from collections.abc import Mapping
from dataclasses import dataclass

from planner.framework.calibration import FrameworkOnCluster
from planner.validation.types import Unpriced


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedConstants:
    """The constants of one framework on one cluster."""

    values: Mapping[str, float]
    """Numbers by their keys in ``planner.framework.tuning.SETTINGS``."""
    num_rows: int
    """Rows that they were fitted to."""
    error_before: float
    """Mean absolute error of the rows' step times with the profile's own constants."""
    error_after: float
    """The same with the fitted ones."""
    at_bound: tuple[str, ...]
    """Keys of the values that are as large as a share can be: the runs ask for more, so that
    something else is missing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Constants by framework and cluster."""

    fitted: Mapping[FrameworkOnCluster, FittedConstants]
    """What was fitted."""
    left_out: tuple[Unpriced, ...]
    """Runs that cannot be priced."""

    def lines(self) -> list[str]:
        """What was fitted, for people."""
        found = []
        for (framework, cluster), each in self.fitted.items():
            found.append(
                f"{framework} on {cluster}: {each.num_rows} rows, mean error of the step time "
                f"{each.error_before:.1%} before, {each.error_after:.1%} after"
            )
            found += [
                f"  {key} = {value:.4g}{' (at its bound)' if key in each.at_bound else ''}"
                for key, value in each.values.items()
            ]
        return found

    def to_toml(self) -> str:
        """The file's content, which ``planner.framework.calibration`` reads."""
        lines = ["format = 1"]
        for (framework, cluster), each in self.fitted.items():
            lines += ["", "[[tuned]]", f'framework = "{framework}"', f'cluster = "{cluster}"']
            source = f"plan calibrate: {each.num_rows} rows"
            lines += [
                f'{key} = {{ value = {value:.6g}, provenance = "fitted", source = "{source}" }}'
                for key, value in each.values.items()
            ]
        return "\n".join(lines) + "\n"
