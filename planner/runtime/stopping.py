"""A scheduler's request to stop."""

import signal
from types import FrameType

from .options import Options
from .processes import print_once

REQUEUE_CODE = 75
"""Exit code where a request to stop was met and a checkpoint saved: start again with --resume."""

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
        """Say on the screen how training ended, and return the exit code for it."""
        saved = options.checkpoint is not None
        print_once(
            f"asked to stop: ended after step {step}, "
            + ("saved; go on with --resume" if saved else "nothing saved without --checkpoint DIR")
        )
        return REQUEUE_CODE if saved else STOPPED_CODE
