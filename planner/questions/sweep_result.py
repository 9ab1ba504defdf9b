"""What ``planner.sweep`` returns."""

from pathlib import Path
from typing import TYPE_CHECKING

from planner.questions.document import sweep_json
from planner.questions.sweep import Sweep, SweepPoint
from planner.questions.sweep_plot import sweep_plot_bytes
from planner.questions.sweep_table import sweep_frame
from planner.questions.sweep_view import sweep_view
from planner.rendering import render
from planner.report.folder import write_file

if TYPE_CHECKING:
    import pandas as pd


class SweepResult:
    """The plans of many points.

    In a notebook it shows as a table. It prints nothing and writes only when asked to.
    """

    def __init__(self, sweep: Sweep) -> None:
        """Keep the points."""
        self._sweep = sweep

    @property
    def sweep(self) -> Sweep:
        """Request and points as data."""
        return self._sweep

    @property
    def points(self) -> tuple[SweepPoint, ...]:
        """Every point that was reached, with its plan or why it has none."""
        return self._sweep.points

    @property
    def pick(self) -> SweepPoint | None:
        """The point that the objective chooses; None where no point has a plan."""
        return self._sweep.pick

    @property
    def table(self) -> "pd.DataFrame":
        """One row per point, with the columns of the CSV."""
        return sweep_frame(self._sweep)

    def to_json(self) -> str:
        """Give what ``plan sweep --json`` prints."""
        return sweep_json(self._sweep)

    def plot(self, file: str | Path, *, force: bool = False) -> None:
        """Draw speed and cost against the number of devices into a .png, .svg or .pdf file.

        Raises:
            RequestError: It exists and ``force`` is false, it cannot be written, no point has a
                plan, or matplotlib is missing.
        """
        target = Path(file)
        content = sweep_plot_bytes(self._sweep, target)
        write_file(target, content, option="--plot", force=force)

    def _repr_html_(self) -> str:
        return render("questions/sweep.html.j2", view=sweep_view(self._sweep))

    def __repr__(self) -> str:
        view = sweep_view(self._sweep)
        return f"SweepResult({view.title}: {len(view.rows)} plans, pick {view.pick or 'none'})"
