"""Requests to stop: of a scheduler, or of torchrun where a rank of this node is gone."""

import os
import signal
import socket
import threading
from pathlib import Path

import torch.distributed as dist

from .processes import FAILED_CODE, is_first_rank, print_once

REQUEUE_CODE = 75
"""Exit code where a request to stop was met and a checkpoint saved: start again with --resume."""

STOPPED_NAME = "stopped"
"""File in the folder of checkpoints that says the same to a launcher, which may see no exit code of
a rank: torchrun turns every one into 1. The launcher removes it before it starts again."""

STOPPED_CODE = 128 + signal.SIGTERM
"""Exit code where a request to stop was met and nothing was saved."""


class StopRequest:
    """Notes SIGTERM, so that training ends with the step instead of in the middle of it.

    torchrun sends it as well where a process of this node has ended: a step that waits for that one
    would not end, so this process ends at once.
    """

    def __init__(self) -> None:
        """Take the signal from now on, also while the main thread waits for a device."""
        self.asked = False
        self._processes = [(socket.gethostname(), os.getpid())]
        if dist.is_initialized():
            self._processes *= dist.get_world_size()
            dist.all_gather_object(self._processes, self._processes[0])
        heard, told = socket.socketpair()
        told.setblocking(False)  # noqa: FBT003
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(told.fileno())
        threading.Thread(target=self._wait, args=(heard, told), daemon=True).start()

    def _wait(self, heard: socket.socket, _: socket.socket) -> None:
        while True:
            if heard.recv(1)[0] == signal.SIGTERM:
                self.asked = True
                if not all(map(_is_running, self._processes)):
                    os._exit(FAILED_CODE)


def _is_running(process: tuple[str, int]) -> bool:
    host, number = process
    try:
        os.kill(number if host == socket.gethostname() else os.getpid(), 0)
    except ProcessLookupError:
        return False
    return True


def exit_code(checkpoints: Path | None, step: int) -> int:
    """Say on the screen and to the launcher how training was stopped; return the exit code."""
    if checkpoints is None:
        how = "nothing saved without --checkpoint DIR"
    else:
        how = "saved; go on with --resume"
        if is_first_rank():
            (checkpoints / STOPPED_NAME).touch()
    print_once(f"asked to stop: ended after step {step}, {how}")
    return STOPPED_CODE if checkpoints is None else REQUEUE_CODE
