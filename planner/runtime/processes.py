"""The process group, errors that all ranks share, and requests to stop."""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

FAILED_CODE = 1
BAD_INPUT_CODE = 2  # the command line, the plan, the model or a file is at fault
REQUEUE_CODE = 75  # stopped as asked, and saved: start again with --resume
STOPPED_CODE = 128 + signal.SIGTERM  # stopped as asked, and nothing saved

STOPPED_NAME = "stopped"
"""File in the folder of checkpoints that stands for REQUEUE_CODE, since torchrun turns the codes of
all ranks into 1. The launcher removes it before it starts again."""

SILENT_RANKS_WAIT_S = 10.0
"""Ranks that show no message stay so long: torchrun ends all others as soon as one has left."""


class RunError(Exception):
    """Something that the user can mend; one rank shows the message, and all end."""


class RankError(RunError):
    """The same where this rank alone may know of it, and shows the message."""


def gathered(value: object) -> list[Any]:
    """Return the values of all ranks."""
    values = [value]
    if dist.is_initialized():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value)
    return values


@contextlib.contextmanager
def agreed(what: str = "") -> Iterator[None]:
    """Let all ranks fail where one fails, with the message of the first of them.

    All ranks enter and leave it together, and raise a RunError. ``what`` begins the message of
    another error; one of the model file has its traceback.
    """
    problem = None
    try:
        yield
    except RunError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{what}: {error}"
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException:  # DCP's is no Exception
        problem = f"{what}\n{traceback.format_exc()}"
    if first := next(filter(None, gathered(problem)), None):
        raise RunError(first)


def is_first_rank() -> bool:
    """Say whether this is rank 0, or the only process."""
    return (dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))) == 0


def print_once(text: str) -> None:
    """Print a line from rank 0."""
    if is_first_rank():
        sys.stdout.write(f"{text}\n")
        sys.stdout.flush()


@contextlib.contextmanager
def process_group(
    world_size: int,
    timeout_s: float,
    watched: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    on_gpus: str = "nccl",
) -> Iterator[torch.device]:
    """Join the process group of torchrun, yield this rank's device, and leave it in good order.

    Args:
        world_size: Processes that the plan is for.
        timeout_s: Seconds after which a collective that waits for another rank gives up.
        watched: Ends this rank where another one is gone, which torchrun does on one node.
        on_gpus: Backends of GPUs; CPUs have gloo.
    """
    device = _local_device()
    if dist.is_initialized():
        yield device
        return
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != world_size:
        raise RunError(
            f"this plan is for {world_size} processes, but {started} were started: run "
            f"torchrun --standalone --nproc-per-node {world_size} {sys.argv[0]}, "
            "or python with --reference for one process"
        )
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    os.environ.update({name: os.environ.get(name, value) for name, value in alone.items()})
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        on_gpus if on_gpu else "gloo",
        timeout=timedelta(seconds=timeout_s),
        device_id=device if on_gpu else None,
    )
    with watched():
        yield device
        dist.barrier()  # without it, ranks that leave early abort the others
    dist.destroy_process_group()


def _local_device() -> torch.device:
    """Return the device of this rank, and make it torch's current one."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    if dist.is_initialized() or "WORLD_SIZE" in os.environ:
        torch.set_num_threads(1)  # the ranks share the cores of this machine
    keep_freed_memory()
    return torch.device("cpu")


def keep_freed_memory() -> None:
    """Let glibc keep what a step frees; clearing those pages anew is a tenth of the next one."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda *_: None)
    for threshold, most in ((-1, 2**31 - 1), (-3, 2**25)):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
        mallopt(threshold, most)


def run_and_leave(main: Callable[[], int]) -> NoReturn:
    """Run a script's main and end the process at once, with the code that it returns.

    When the interpreter takes gloo's threads down one by one, it sometimes aborts ("terminate
    called without an active exception"), and torchrun then reports a failure. A rank that fails
    ends at once too, so that the others do not wait for it.
    """
    try:
        code = main()
    except RunError as error:
        if is_first_rank() or isinstance(error, RankError):
            sys.stderr.write(f"{sys.argv[0]}: error: {error}\n")
        else:
            time.sleep(SILENT_RANKS_WAIT_S)
        code = BAD_INPUT_CODE
    except SystemExit as leaving:  # --help
        code = leaving.code if isinstance(leaving.code, int) else 0
    except BaseException as error:
        rank, words = f"rank {os.environ.get('RANK', '0')}", f"{type(error).__name__}: {error}"
        sys.stderr.write(f"{rank}: {traceback.format_exc()}{rank} failed: {words}\n")
        code = FAILED_CODE
    sys.stdout.flush()  # stderr is never behind by more than a line
    os._exit(code)


class StopRequest:
    """Notes SIGTERM, so that training ends with the step instead of in the middle of it.

    torchrun sends it as well where a process of this node has ended: a step that waits for that one
    would not end, so this process ends at once. A thread listens, since the main one may wait for
    a device meanwhile.
    """

    def __init__(self) -> None:
        """Take the signal from now on."""
        self.asked = False
        own = socket.gethostname()
        self._processes = [number for host, number in gathered((own, os.getpid())) if host == own]
        heard, told = socket.socketpair()
        told.setblocking(False)  # noqa: FBT003
        signal.signal(signal.SIGTERM, lambda *_: None)
        signal.set_wakeup_fd(told.fileno())
        threading.Thread(target=self._wait, args=(heard, told), daemon=True).start()

    def _wait(self, heard: socket.socket, _: socket.socket) -> None:
        while True:
            if heard.recv(1)[0] == signal.SIGTERM:
                self.asked = True
                try:
                    for number in self._processes:
                        os.kill(number, 0)
                except ProcessLookupError:
                    os._exit(FAILED_CODE)


def exit_code(checkpoints: Path | None, step: int) -> int:
    """Say on the screen and to the launcher how training was stopped; return the exit code."""
    if checkpoints is None:
        how, code = "nothing saved without --checkpoint DIR", STOPPED_CODE
    else:
        how, code = "saved; go on with --resume", REQUEUE_CODE
        if is_first_rank():
            (checkpoints / STOPPED_NAME).touch()
    print_once(f"asked to stop: ended after step {step}, {how}")
    return code
