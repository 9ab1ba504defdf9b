"""A plan's script run on this machine's CPU, against the plain model on one process."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from math import inf, isfinite
from pathlib import Path
from tempfile import TemporaryDirectory

from planner.checking.failures import script_failure
from planner.errors import RequestError
from planner.plan.serialize import SavedPlan
from planner.plan.types import Plan
from planner.units import format_bytes, format_count

STEPS = 2
"""Optimiser steps: the second has the weights that the first has changed."""

MOST_PROCESSES = 16
"""Processes that one machine is asked to run."""

MOST_LOSS_DIFFERENCE = 1e-4
"""Relative, in float32."""

_PROCESS_BYTES = 400 << 20
"""A process with torch alone."""

_STATE_BYTES = 20
"""Per parameter and process, in float32: the whole model, weights, gradients, moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Losses of the same steps."""

    losses: tuple[float, ...]
    """Of the script on its processes."""
    reference_losses: tuple[float, ...]
    """Of the plain model on one."""

    @property
    def difference(self) -> float:
        """The largest relative difference; a loss may be 0. Endless where one is no number."""
        pairs = zip(self.losses, self.reference_losses, strict=True)
        found = [abs(own - other) / (abs(other) or abs(own) or 1.0) for own, other in pairs]
        return max(found) if all(map(isfinite, found)) else inf

    @property
    def first_not_finite(self) -> int | None:
        """The first step, from 0 on, whose loss on one process is no number; None where all are."""
        steps = enumerate(self.reference_losses)
        return next((step for step, loss in steps if not isfinite(loss)), None)

    @property
    def is_equal(self) -> bool:
        """Whether both train alike."""
        return self.difference <= MOST_LOSS_DIFFERENCE


def train_here(plan: Plan, folder: Path) -> Trained:
    """Run a script for two steps in float32 on gloo, and the plain model.

    Args:
        plan: The plan.
        folder: Folder of its script.

    Raises:
        CheckError: One of them fails.
    """
    world_size = plan.degrees.world_size
    script = str(folder.resolve() / "train.py")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    with TemporaryDirectory() as logs:
        found = [
            _losses([*words, "--steps", str(STEPS), "--dtype", "float32"], Path(logs, name))
            for name, words in (
                ("run", [*launch, script]),
                ("reference", [script, "--reference"]),
            )
        ]
    return Trained(losses=found[0], reference_losses=found[1])


def check_size(saved: SavedPlan) -> None:
    """Refuse a plan that is too large for this machine.

    Raises:
        RequestError: It is.
    """
    world_size, parameters = saved.plan.degrees.world_size, saved.model.num_parameters
    if world_size > MOST_PROCESSES:
        raise RequestError(
            f"--run: the plan is for {world_size} processes, and at most {MOST_PROCESSES} are "
            "started here",
            hint="Leave --run out: the check needs no other process.",
        )
    needed = world_size * (parameters * _STATE_BYTES + _PROCESS_BYTES)
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > present:
        raise RequestError(
            f"--run: {world_size} processes that build {format_count(parameters)} parameters need "
            f"about {format_bytes(needed)}, and this machine has {format_bytes(present)}",
            hint="Leave --run out: the check needs no memory for the model.",
        )


def _losses(words: list[str], log: Path) -> tuple[float, ...]:
    """Run a command that logs its steps.

    Raises:
        CheckError: It fails.
    """
    done = subprocess.run(
        [sys.executable, *words, "--log-file", str(log)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise script_failure(done.stdout + done.stderr, code=done.returncode)
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return tuple(row["loss"] for row in rows if "loss" in row)
