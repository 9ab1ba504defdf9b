"""A line on a terminal that says how far a run is; it leaves nothing behind."""

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, Task, TextColumn
from rich.text import Text

from planner.progress import PhaseEvent

BAR_WIDTH = 24


class _KnownBar(BarColumn):
    """A bar where it is known how much there is to do, nothing elsewhere."""

    def render(self, task: Task) -> RenderableType:  # type: ignore[override]
        return super().render(task) if task.total is not None else Text("")


class PhaseBar:
    """One line: spinner, phase, bar, what is being done."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            _KnownBar(bar_width=BAR_WIDTH),
            TextColumn("{task.fields[detail]}", style="dim", markup=False),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("", total=None, detail="", visible=False)

    def start(self) -> None:
        """Begin to show."""
        self._progress.start()

    def stop(self) -> None:
        """Take the line away."""
        self._progress.stop()

    def show(self, event: PhaseEvent) -> None:
        """Show a phase that has begun or is under way."""
        if event.fraction is None:
            self._progress.reset(self._task, total=None, visible=True)
        else:
            self._progress.update(self._task, total=1.0, completed=event.fraction)
        self._progress.update(self._task, description=f"{event.phase} ...", detail=event.detail)
