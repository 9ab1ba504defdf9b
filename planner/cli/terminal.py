"""The two streams: the answer on stdout, everything else on stderr."""

from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType

from planner.progress import PhaseEvent
from planner.units import format_s

if TYPE_CHECKING:
    from planner.cli.progress_bar import PhaseBar


def answer_console(*, no_color: bool) -> Console:
    """Open stdout for the answer; colour and width follow the terminal and the environment."""
    return Console(no_color=True if no_color else None, highlight=False, soft_wrap=False)


def message_console(*, no_color: bool) -> Console:
    """Open stderr for progress and warnings."""
    return Console(stderr=True, no_color=True if no_color else None, highlight=False)


def write_answer(console: Console, sections: Sequence[RenderableType]) -> None:
    """Write sections with an empty line between them, without blanks at line ends.

    The text goes to the stream itself: a reader that went away shows as ``BrokenPipeError``.
    """
    with console.capture() as capture:
        for number, section in enumerate(sections):
            if number:
                console.print()
            console.print(section)
    lines = capture.get().split("\n")
    console.file.write("\n".join(line.rstrip(" ") for line in lines))


class ProgressLine:
    """Shows the phase that runs: a spinner and a bar on a terminal, nothing elsewhere.

    With ``verbose`` every finished phase leaves a line with its seconds.
    """

    def __init__(self, console: Console, *, verbose: bool, quiet: bool) -> None:
        """Keep the console; nothing is shown before the context is entered."""
        self.phases_s: dict[str, float] = {}
        """Wall time by finished phase."""
        self._console = console
        self._verbose = verbose and not quiet
        self._bar = _phase_bar(console) if console.is_terminal and not quiet else None

    def __enter__(self) -> "ProgressLine":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()

    def __call__(self, event: PhaseEvent) -> None:
        """Show one event."""
        if event.elapsed_s is None:
            if self._bar:
                self._bar.show(event)
            return
        self.phases_s[event.phase] = event.elapsed_s
        if self._verbose:
            self._console.print(f"{event.phase:<16} {format_s(event.elapsed_s)}", markup=False)


def _phase_bar(console: Console) -> "PhaseBar":
    """Make the line; rich's progress display is only imported where there is a terminal."""
    from planner.cli.progress_bar import PhaseBar

    return PhaseBar(console)
