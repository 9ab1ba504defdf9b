"""Writes emitted scripts, runs them, and reads what they leave behind."""

import json
import subprocess
import warnings
from dataclasses import dataclass

import torch
import torch.distributed.checkpoint as dcp
from driver import run_ranks, run_scripts
from torch.distributed.checkpoint import FileSystemReader

from planner.codegen.files import script_files


def write_script(folder, plan, *, cluster=None):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in script_files(plan, cluster=cluster, folder=folder).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def run_jobs(jobs, *, num_processes=None, timeout_s=900, function=run_scripts):
    """Run (folder, arguments) pairs in one process group; None processes: in one without group."""
    listed = [(str(folder), arguments) for folder, arguments in jobs]
    run_ranks(function, listed, num_processes=num_processes, timeout_s=timeout_s)


def torchrun(num_processes):
    return ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]


def run(command, *, timeout_s, cwd=None):
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout_s, check=False, cwd=cwd
    )
    assert done.returncode == 0, (
        f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-8000:]}"
    )
    return done


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Log and checkpoint of a run."""

    rows: list
    """Of steps."""
    weights: dict
    buffers: dict

    @property
    def losses(self):
        return [row["loss"] for row in self.rows]

    @property
    def grad_norms(self):
        return [row["grad_norm"] for row in self.rows]


def arguments_of(folder, *, name="run", steps=3, extra=()):
    """Return the options that make a run leave a log and a checkpoint in its folder."""
    log, checkpoint = folder / f"{name}.jsonl", folder / name
    return [
        *("--steps", str(steps), "--log", str(log), "--checkpoint", str(checkpoint)),
        *extra,
    ]


def outcome_of(folder, *, name="run", steps=3):
    lines = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
    rows = [line for line in lines if "loss" in line]  # others are of evaluations
    checkpoint = folder / name / f"step-{steps:08d}"
    return Outcome(
        rows=rows,
        weights=read_weights(checkpoint),
        buffers=read_weights(checkpoint, kind="buffers"),
    )


def read_weights(checkpoint, *, kind="weights"):
    reader = FileSystemReader(checkpoint)
    entries = reader.read_metadata().state_dict_metadata
    weights = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if key.startswith(f"{kind}.")
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(weights, storage_reader=FileSystemReader(checkpoint), no_dist=True)
    return {key.removeprefix(f"{kind}."): value for key, value in weights.items()}


def largest_difference(found, expected):
    """Return the largest relative difference of two sequences of numbers; inf where one is none."""
    assert len(found) == len(expected)
    own, other = torch.tensor(found).double(), torch.tensor(expected).double()
    return _largest((own - other).abs() / other.abs())


def largest_weight_difference(found, expected):
    """Return the largest difference of any weight, relative to the largest of its tensor.

    It is inf where one is no number.
    """
    assert found.keys() == expected.keys()
    largest = [
        (found[key] - expected[key]).abs().max() / expected[key].abs().max().clamp(min=1e-3)
        for key in expected
        if expected[key].numel()
    ]
    return _largest(torch.stack(largest))


def _largest(differences):
    """Return the largest, inf where one is nan, which is larger and smaller than nothing."""
    return torch.where(differences.isnan(), float("inf"), differences).max().item()
