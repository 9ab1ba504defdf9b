"""Runs the ``main`` of several emitted scripts one after the other in one process group.

Starting processes is half of the time of a small run, so the tests share one start. Called as
``torchrun ... driver.py JOBS``, or as ``python driver.py JOBS`` for runs on one process; JOBS is
a JSON file with a list of [folder of the script, arguments].
"""

import importlib.util
import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

TIMEOUT_S = 60.0


def run_script(folder, arguments, index):
    sys.path[:] = [folder, *(path for path in sys.path if path != folder)]
    spec = importlib.util.spec_from_file_location(f"train_{index}", Path(folder) / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(arguments)


def main(jobs_file):
    jobs = json.loads(Path(jobs_file).read_text())
    distributed = "WORLD_SIZE" in os.environ
    if distributed:
        dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    for index, (folder, arguments) in enumerate(jobs):
        if not distributed or dist.get_rank() == 0:
            print(f"-- {Path(folder).name} {' '.join(arguments)}", flush=True)
        run_script(folder, arguments, index)
        if distributed:
            dist.barrier()
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
    sys.stdout.flush()
    os._exit(0)  # as an emitted script does, see parallel.leave
