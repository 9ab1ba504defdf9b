"""Training that is broken off and resumed: `python tests/bench/resume.py [--seed N]`.

A run of four processes gets SIGTERM or SIGKILL, after a step or while a checkpoint is written; the
same and two other layouts go on from what it left. A line per case: the step that was resumed
from, and how far losses are from those of a run that nothing broke off.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "run"))

from example_plans import SHALLOW_GPT, make_plan
from launch import torchrun, write_script

RUN = Path(__file__).parents[1] / "run"
HOOKED = replace(SHALLOW_GPT, name="hooked_gpt", file=RUN / "hooked_gpt.py")
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp 2, pp 2": {"tp": 2, "pp": 2, "sequence_parallel": True},
    "dp_shard 4": {"dp_shard": 4},
    "dp_shard 2, pp 2, Interleaved1F1B": {
        "dp_shard": 2, "pp": 2, "schedule": "Interleaved1F1B", "virtual_stages": 2,
    },
}  # fmt: skip
BROKEN = "tp 2, pp 2"
STEPS = 14
LIMIT = 1e-5
SIGNALS = (signal.SIGTERM, signal.SIGKILL)
MOMENTS = ("after a step", "in a save")


def command(script, log, *words):
    launcher = [sys.executable, *torchrun(4), str(script / "train.py")]
    return [*launcher, "--steps", str(STEPS), "--log-file", str(log), *words]


def losses(log):
    """Loss by step; of a step taken twice the later one."""
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def break_off(script, folder, number, moment, after):
    """Start training, and send a signal after so many steps; return the exit code."""
    log, checkpoints = folder / "log.jsonl", folder / "checkpoints"
    words = ["--checkpoint", str(checkpoints), "--checkpoint-every", "1", "--async-checkpoint"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command(script, log, *words), **quiet)

    def waits():
        if not log.exists() or len(losses(log)) < after:
            return True
        return moment == "in a save" and not list(checkpoints.glob(".step-*.draft"))

    while waits() and process.poll() is None:
        time.sleep(0.001)
    ranks = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
    )
    process.send_signal(number)
    if number is signal.SIGKILL:  # a launcher that is killed leaves its ranks
        for rank in ranks.stdout.split():
            os.kill(int(rank), number)
    return process.wait(timeout=120)


def went_on(script, folder, expected):
    """Resume, and return the first step taken and the largest relative difference of a loss."""
    log = folder / "resumed.jsonl"
    words = ["--checkpoint", str(folder / "checkpoints"), "--resume"]
    subprocess.run(command(script, log, *words), check=True, capture_output=True, timeout=300)
    found = losses(log)
    first = min(found, default=STEPS + 1)
    assert sorted(found) == list(range(first, STEPS + 1))
    return first, max((abs(found[s] / expected[s] - 1) for s in found), default=0.0)


def main():
    """Print the table, and return whether all went on as if nothing had happened."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    chance = random.Random(parser.parse_args().seed)
    holds = True
    with TemporaryDirectory() as made:
        root = Path(made)
        scripts = {
            name: write_script(root / f"script-{index}", make_plan(HOOKED, dtype="float32", **fix))
            for index, (name, fix) in enumerate(LAYOUTS.items())
        }
        whole = root / "whole.jsonl"
        subprocess.run(command(scripts[BROKEN], whole), check=True, capture_output=True)
        expected = losses(whole)
        for number, moment in product(SIGNALS, MOMENTS):
            folder, after = root / f"{number.name}-{moment}", chance.randint(2, STEPS - 4)
            folder.mkdir()
            code = break_off(scripts[BROKEN], folder, number, moment, after)
            for name, script in scripts.items():
                copy = shutil.copytree(folder, root / "copy")
                first, off = went_on(script, copy, expected)
                shutil.rmtree(copy)
                holds &= off < LIMIT
                logged = max(losses(folder / "log.jsonl"))
                words = f"{number.name} {moment:<12} exit {code:>3} after step {logged:>2}"
                words += f"; {name:<33} goes on at step {first:>2}, losses within {off:.1e}"
                print(words, flush=True)
    return holds


if __name__ == "__main__":
    sys.exit(not main())
