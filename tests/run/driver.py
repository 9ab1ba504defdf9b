"""Runs functions in new processes that form a group, without starting Python and torch in each.

The processes are forks of one that has imported torch and does nothing else: importing it is most
of the time of a small run. They meet in a file and listen on no fixed port, so that several groups
run at once. Functions are named by their module, which every process imports: no test module.
"""

import contextlib
import importlib.util
import multiprocessing
import os
import sys
import time
import traceback
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from tempfile import TemporaryDirectory

TIMEOUT_S = 60.0

FORKS = multiprocessing.get_context("forkserver")
IMPORTED = [
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.experimental",
    "torch.distributed.tensor.parallel",
]
"""What an emitted script imports of torch. Its own modules are imported by each run."""


def run_ranks(function, *arguments, num_processes=None, timeout_s=900):
    """Call a function in processes that form a group; None processes: in one without a group.

    Raises:
        AssertionError: one failed, or the time is over. The others are ended; the message is
            what the first to fail has printed, which names the script that it ran.
    """
    FORKS.set_forkserver_preload(IMPORTED)
    with TemporaryDirectory() as folder:
        outputs = [Path(folder) / f"rank-{rank}.txt" for rank in range(num_processes or 1)]
        ranks = [
            FORKS.Process(target=run_rank, args=(function, arguments, rank, num_processes, output))
            for rank, output in enumerate(outputs)
        ]
        with started(ranks):
            failed = first_to_fail(ranks, timeout_s)
            code = None if failed is None else ranks[failed].exitcode
        if failed is not None:
            end = f"still ran after {timeout_s} s" if code is None else f"ended with {code}"
            raise AssertionError(f"rank {failed} {end}\n{outputs[failed].read_text()[-8000:]}")


@contextlib.contextmanager
def started(ranks):
    try:
        for rank in ranks:
            rank.start()
        yield
    finally:
        for rank in ranks:
            if rank.pid is not None:
                rank.kill()
                rank.join()


def first_to_fail(ranks, timeout_s):
    """Wait for all, and return the first that failed, or one that still runs after the time."""
    end = time.monotonic() + timeout_s
    running = {rank.sentinel: index for index, rank in enumerate(ranks)}
    while running:
        ended = connection.wait(list(running), end - time.monotonic())
        if not ended:
            return min(running.values())
        for sentinel in ended:
            index = running.pop(sentinel)
            ranks[index].join()
            if ranks[index].exitcode != 0:
                return index
    return None


def run_rank(function, arguments, rank, num_processes, output):
    """Call the function as a rank, and end the process as an emitted script does."""
    with output.open("w") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    try:
        if num_processes is None:
            function(*arguments)
        else:
            with process_group(rank, num_processes, output.parent / "meeting"):
                function(*arguments)
    except BaseException:
        traceback.print_exc()
        code = 1
    else:
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # see runtime.processes.leave


@contextlib.contextmanager
def process_group(rank, num_processes, meeting):
    import torch.distributed as dist  # not by the tests' process

    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
    }
    dist.init_process_group(
        "gloo",
        init_method=f"file://{Path(meeting).absolute()}",
        rank=rank,
        world_size=num_processes,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    yield
    dist.barrier()
    dist.destroy_process_group()


def run_scripts(jobs):
    """Run the ``main`` of emitted scripts one after the other; jobs are (folder, arguments)."""
    for index, (folder, arguments) in enumerate(jobs):
        run_script(folder, arguments, index)


def run_script(folder, arguments, index):
    print(f"-- {Path(folder).name} {' '.join(arguments)}", flush=True)
    sys.path[:] = [folder, *(path for path in sys.path if path != folder)]
    for name in [name for name in sys.modules if name.partition(".")[0] == "runtime"]:
        del sys.modules[name]  # each script has its own modules of it
    spec = importlib.util.spec_from_file_location(f"train_{index}", Path(folder) / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(arguments)
