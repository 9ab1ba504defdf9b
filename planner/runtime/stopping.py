"""A scheduler's request to stop."""

import signal
from types import FrameType

from .options import Options
from .processes import is_first_rank, print_once

REQUEUE_CODE = 75
"""Exit code where a request to stop was met and a checkpoint saved: start again with --resume."""

STOPPED_NAME = "stopped"
"""File in the folder of checkpoints that says the same to a launcher, which may see no exit code of
a rank: torchrun turns every one into 1. The launcher removes it before it starts again."""

STOPPED_CODE = 128 + signal.SIGTERM
"""Exit code where a request to stop was met and nothing was saved."""


class StopRequest:
    """Notes SIGTERM, so that training ends with the step instead of in the middle of it."""

    def __init__(self) -> None:
        """Take the signal from now on."""
        self.asked = False
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, _: int, __: FrameType | None) -> None:
        self.asked = True

    @staticmethod
    def exit_code(options: Options, step: int) -> int:
        """Say on the screen and to the launcher how training ended; return the exit code."""
        saved = options.checkpoint is not None
        if options.checkpoint is not None and is_first_rank():
            (options.checkpoint / STOPPED_NAME).touch()
        print_once(
            f"asked to stop: ended after step {step}, "
            + ("saved; go on with --resume" if saved else "nothing saved without --checkpoint DIR")
        )
        return REQUEUE_CODE if saved else STOPPED_CODE
