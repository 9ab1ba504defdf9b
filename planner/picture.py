"""Pictures in files: drawn by matplotlib, which is an extra."""

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from planner.errors import RequestError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
"""Endings of the file, and how it is written."""

_DOTS_PER_INCH = 150


def check_plot(file: Path) -> None:
    """Make sure, before any work is done, that a picture can be drawn.

    Args:
        file: Where it will be written.

    Raises:
        RequestError: The ending names no format, or matplotlib is missing.
    """
    if file.suffix.removeprefix(".").lower() not in FORMATS:
        raise RequestError(
            f"--plot {file}: there is no format {file.suffix or 'without an ending'}",
            hint=f"Choose an ending among {', '.join(f'.{name}' for name in FORMATS)}.",
        )
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise RequestError(
            f"--plot {file}: matplotlib draws the picture, and it is not installed",
            hint="pip install 'parallel-training-planner[plots]'",
        ) from error


def picture_bytes(
    file: Path, size_inch: tuple[float, float], draw: "Callable[[Figure], None]"
) -> bytes:
    """Draw a picture.

    Args:
        file: Its ending says how.
        size_inch: Width and height.
        draw: Fills the empty figure.

    Returns:
        Content of the file.

    Raises:
        RequestError: As ``check_plot``.
    """
    check_plot(file)
    from matplotlib.figure import Figure

    figure = Figure(figsize=size_inch, layout="constrained")
    draw(figure)
    content = BytesIO()
    figure.savefig(content, format=file.suffix[1:].lower(), dpi=_DOTS_PER_INCH)
    return content.getvalue()
