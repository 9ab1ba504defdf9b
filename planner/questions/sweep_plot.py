"""A picture of a sweep: speed and cost against the number of devices."""

import math
from pathlib import Path
from typing import TYPE_CHECKING

from planner.errors import RequestError
from planner.picture import check_plot, picture_bytes
from planner.questions.sweep import SECONDS_PER_HOUR, Sweep, SweepPoint
from planner.questions.sweep_view import cost_word, series_words, token_word

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE_INCH = (9.6, 4.2)
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
"""Of Okabe and Ito, told apart by all readers."""

_BILLION = 1e9


def sweep_plot_bytes(sweep: Sweep, file: Path) -> bytes:
    """Draw tokens per second, with what even scaling would give, and the cost of a token.

    Args:
        sweep: What to draw.
        file: Its ending says how.

    Returns:
        Content of the file.

    Raises:
        RequestError: As ``check_plot``, or no point has a plan.
    """
    check_plot(file)
    if not sweep.planned:
        raise RequestError(
            f"--plot {file}: no point has a plan",
            hint="Run without --plot to see why.",
        )
    return picture_bytes(file, _SIZE_INCH, lambda figure: _draw(figure, sweep))


def _draw(figure: "Figure", sweep: Sweep) -> None:
    speed, cost = figure.subplots(1, 2)
    series: dict[tuple[object, ...], list[SweepPoint]] = {}
    for point in sorted(sweep.planned, key=lambda point: point.request.gpus):
        series.setdefault(point.series, []).append(point)
    for number, points in enumerate(series.values()):
        colour = _COLOURS[number % len(_COLOURS)]
        gpus = [point.request.gpus for point in points]
        label = series_words(sweep, points[0]) or None
        rates = [point.tokens_per_s for point in points]
        speed.plot(gpus, rates, marker="o", color=colour, label=label)
        even = [rates[0] / gpus[0] * count for count in gpus]
        speed.plot(
            gpus, even, color=colour, linewidth=1, linestyle=":", label=None if number else "even"
        )
        cost.plot(gpus, [_cost(sweep, point) for point in points], marker="o", color=colour)
    if sweep.pick is not None:
        pick = sweep.pick
        ring = {"s": 160, "facecolors": "none", "edgecolors": "black"}
        speed.scatter([pick.request.gpus], [pick.tokens_per_s], label="pick", **ring)
        cost.scatter([pick.request.gpus], [_cost(sweep, pick)], **ring)
    ticks = sorted({point.request.gpus for point in sweep.planned})
    _finish(speed, ticks, f"{token_word(sweep)} per second")
    speed.set(yscale="log")
    speed.legend(fontsize="small", frameon=False)
    _finish(cost, ticks, cost_word(sweep))
    cost.set(ylim=(0, None))


def _cost(sweep: Sweep, point: SweepPoint) -> float:
    """Cost of 10^9 tokens, or hours of a device; not a number where its price is not known."""
    gpu_s, per_token = point.gpu_s_per_token, point.cost_per_token
    assert gpu_s is not None
    if not sweep.request.prices_per_gpu_hour:
        return _BILLION * gpu_s / SECONDS_PER_HOUR
    return math.nan if per_token is None else _BILLION * per_token


def _finish(axes: "Axes", ticks: list[int], label: str) -> None:
    axes.set(xscale="log", xlabel="GPUs", ylabel=label)
    axes.set_xticks(ticks, [str(tick) for tick in ticks], rotation=45 if len(ticks) > 6 else 0)
    axes.minorticks_off()
    axes.grid(color="0.92", linewidth=0.6)
    axes.set_axisbelow(True)
