"""A picture of predicted against measured step times."""

from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from planner.errors import RequestError
from planner.picture import check_plot, picture_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE_INCH = (6.4, 6.4)
_MARGIN = 1.3
"""Factor between the outermost points and the frame."""


def plot_bytes(points: pd.DataFrame, title: str, file: Path) -> bytes:
    """Draw predicted against measured step times.

    Both axes are logarithmic, a line shows where they are equal, and each number of GPUs has its
    colour.

    Args:
        points: Rows with both step times: columns measured_s, predicted_s, num_gpus.
        title: What stands above.
        file: Its ending says how.

    Returns:
        Content of the file.

    Raises:
        RequestError: As ``check_plot``, or there is no row.
    """
    check_plot(file)
    if points.empty:
        raise RequestError(
            f"--plot {file}: no row has a measured and a predicted step time",
            hint="Run without --plot to see why rows are not priced.",
        )
    return picture_bytes(
        file, _SIZE_INCH, lambda figure: _draw(figure.add_subplot(), points, title)
    )


def _draw(axes: "Axes", points: pd.DataFrame, title: str) -> None:
    from matplotlib import colormaps

    times = points[["measured_s", "predicted_s"]]
    limits = (times.to_numpy().min() / _MARGIN, times.to_numpy().max() * _MARGIN)
    axes.plot(limits, limits, color="0.6", linewidth=1, zorder=0, label="equal")
    sizes = sorted(points["num_gpus"].unique())
    for number, num_gpus in enumerate(sizes):
        group = points[points["num_gpus"] == num_gpus]
        shade = number / max(1, len(sizes) - 1) * 0.9
        axes.scatter(
            *(group["measured_s"], group["predicted_s"]),
            s=12,
            color=colormaps["viridis"](shade),
            alpha=0.7,
            linewidths=0,
            label=f"{num_gpus} GPU" if num_gpus == 1 else f"{num_gpus} GPUs",
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlim=limits,
        ylim=limits,
        aspect="equal",
        xlabel="measured step time, s",
        ylabel="predicted step time, s",
        title=title,
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.grid(color="0.92", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(fontsize="small", frameon=False)
