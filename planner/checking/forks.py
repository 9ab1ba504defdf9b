"""Calls of one function in new processes that import nothing: forks of one that has its module.

Importing torch is most of the time of a short call. What is forked has imported the module and does
nothing else: of the caller, threads and locks in the middle of something would be copied (fork(2)).

    python -m planner.checking.forks MODULE FUNCTION

reads requests on stdin, a line of JSON each, and answers each with the exit codes of its calls.
"""

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

IDLE_S = 60.0
"""After so long without a request the process ends, and what it holds of memory is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A call that is over."""

    code: int
    """Exit code of its process."""
    printed: str
    """What was printed on stdout and stderr."""


class Forks:
    """Calls one function in forks of a process that is kept for the next calls."""

    def __init__(self, module: str, function: str, environment: Mapping[str, str]) -> None:
        """Keep what to call.

        Args:
            module: Module of the function, which imports all that its calls need.
            function: Takes what is given in a call, by name, all as JSON has it.
            environment: Environment variables beside those of this process.
        """
        self._module = module
        self._function = function
        self._environment = environment
        self._end: Callable[[], object] = lambda: None
        self._server: subprocess.Popen[str] | None = None
        self._answered_s = 0.0
        self._lock = threading.Lock()

    def call(self, calls: Sequence[Mapping[str, Any]]) -> list[Ended]:
        """Call the function in processes that run at once, and wait for all."""
        with self._lock, tempfile.TemporaryDirectory() as folder:
            logs = [Path(folder, f"{index}.log") for index in range(len(calls))]
            request = {
                "calls": calls,
                "logs": [str(log) for log in logs],
                "cwd": str(Path.cwd()),
                "environment": {**os.environ, **self._environment},
            }
            try:
                codes = self._codes(request)
            except BaseException:  # an answer that comes late would be taken for the next
                self._stop()
                raise
            if codes is None:
                return [self._server_ended()] * len(calls)
            printed = [log.read_text(errors="replace") if log.exists() else "" for log in logs]
            return [Ended(code=code, printed=log) for code, log in zip(codes, printed, strict=True)]

    def _codes(self, request: Mapping[str, Any]) -> list[int] | None:
        """Exit codes of the calls, None where what is forked has ended."""
        server = self._running()
        assert server.stdin is not None
        assert server.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            server.stdin.write(json.dumps(request) + "\n")
            server.stdin.flush()
        answer = server.stdout.readline()
        if not answer:
            return None
        self._answered_s = time.monotonic()
        codes: list[int] = json.loads(answer)
        return codes

    def _server_ended(self) -> Ended:
        assert self._server is not None
        code = self._server.wait()
        self._words.seek(0)
        ended = Ended(code=code, printed=self._words.read())
        self._stop()
        return ended

    def _running(self) -> "subprocess.Popen[str]":
        """Start what is forked, anew where it may have ended by itself."""
        if self._server is None or time.monotonic() - self._answered_s > IDLE_S / 2:
            self._stop()
            self._words = tempfile.TemporaryFile("w+")  # noqa: SIM115  # as long as the process
            self._server = subprocess.Popen(
                [sys.executable, "-m", __name__, self._module, self._function],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._words,
                text=True,
                env={**os.environ, **self._environment},
                start_new_session=True,
            )
            self._end = weakref.finalize(self, _end, self._server, self._words)
        return self._server

    def _stop(self) -> None:
        self._end()
        self._server = None


def _end(server: "subprocess.Popen[str]", words: IO[str]) -> None:
    """End what is forked, and all its forks."""
    with words, contextlib.suppress(BrokenPipeError), server:
        if server.poll() is None:
            os.killpg(server.pid, signal.SIGKILL)


@lru_cache(maxsize=1)
def forks_of(module: str, function: str, environment: tuple[tuple[str, str], ...]) -> Forks:
    """Return what calls a function; the next who asks for the same gets the same."""
    return Forks(module, function, dict(environment))


# -- in the process that is forked -----------------------------------------------------------


def serve(function: Callable[..., object]) -> None:
    """Answer requests until stdin ends, or none has come for IDLE_S."""
    while select.select([sys.stdin], [], [], IDLE_S)[0]:
        line = sys.stdin.readline()
        if not line:
            return
        request = json.loads(line)
        forks = [
            _forked(function, call, log, request)
            for call, log in zip(request["calls"], request["logs"], strict=True)
        ]
        codes = [os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) for fork in forks]
        sys.stdout.write(json.dumps(codes) + "\n")
        sys.stdout.flush()


def _forked(
    function: Callable[..., object],
    call: Mapping[str, Any],
    log: str,
    request: Mapping[str, Any],
) -> int:
    fork = os.fork()
    if fork:
        return fork
    code = 1
    try:
        for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, log, os.O_WRONLY)):
            os.dup2(os.open(path, flags | os.O_CREAT, 0o600), number)
        os.dup2(1, 2)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["cwd"])
        sys.path[0] = request["cwd"]  # as ``python -m`` has it
        function(**call)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # threads are not waited for, and nothing of the forked process is undone


if __name__ == "__main__":
    serve(getattr(importlib.import_module(sys.argv[1]), sys.argv[2]))
