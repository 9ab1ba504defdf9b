"""Runs a plan's script as some of its ranks, each without the others: the worker of ``check``.

The script's own ``main`` runs for one step, with its own modules. Replaced is what needs the
cluster or data: the process group, first weights, batches; and tensors are fake.
"""

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from planner.checking.fake_world import FakeWorld, fake_group, fsdp_held
from planner.checking.watch import Held, LiveBytes, Traffic, Watch

Theirs: TypeAlias = Any
"""A module, function or object of the script."""

_CHANGED = ("data", "first_weights", "processes", "sharding", "start", "step")
"""Modules of the runtime in which something is replaced, before others take names from them."""


class RankRun:
    """One rank's step."""

    def __init__(self, folder: Path, rank: int, num_microbatches: int) -> None:
        """Keep what to run.

        Args:
            folder: Folder of the script.
            rank: Rank.
            num_microbatches: Microbatches in place of the plan's.
        """
        self._folder = folder
        self._rank = rank
        self._num_microbatches = num_microbatches
        self._world = FakeWorld()
        self._live = LiveBytes()
        self._traffic = Traffic()
        self._inside = contextlib.ExitStack()
        self._parts: list[nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []

    def run(self) -> dict[str, Any]:
        """Run the step and return what was seen."""
        script = self._script()
        samples = script.GLOBAL_BATCH_SIZE // script.NUM_MICROBATCHES
        script.NUM_MICROBATCHES = self._num_microbatches
        script.GLOBAL_BATCH_SIZE = samples * self._num_microbatches
        with (
            fake_group(self._rank, prod(script.MESH.values())),
            self._optimizers_noted(),
            self._inside,
        ):
            script.main(["--steps", "1"])
        collectives = [
            {"kind": kind, "group_size": size, "count": count, "bytes": num_bytes}
            for (kind, size), (count, num_bytes) in sorted(self._traffic.found.items())
        ]
        return {
            "peak_bytes": self._live.peak_bytes,
            "components": self._live.at_peak,
            "collectives": collectives,
        }

    def _script(self) -> Theirs:
        """Load the script, with its runtime changed before it takes names from it."""
        for name in [name for name in sys.modules if name.partition(".")[0] == "runtime"]:
            del sys.modules[name]
        runtime: dict[str, Theirs] = {
            name: importlib.import_module(f"runtime.{name}") for name in _CHANGED
        }
        runtime["processes"].is_first_rank = lambda: False  # nothing is reported
        runtime["start"].build_model = _builder(runtime["start"], runtime["first_weights"])
        materialise = runtime["sharding"].materialise
        runtime["sharding"].materialise = lambda *args: self._materialised(materialise, *args)
        of_rank, run = runtime["data"].Batches.of_rank, runtime["step"].Runner.run
        runtime["data"].Batches.of_rank = lambda *args: self._world.fake(of_rank(*args))
        runtime["step"].Runner.run = lambda *args: self._ran(run, *args)
        spec = importlib.util.spec_from_file_location("train", self._folder / "train.py")
        assert spec is not None
        assert spec.loader is not None
        script = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(script)
        return script

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        with self._world.entered(), self._live.resizes_seen(), Watch(self._live, self._traffic):
            yield

    def _materialised(self, materialise: Callable[..., None], part: nn.Module, *args: Any) -> None:
        self._parts.append(part)
        with self._watched():
            materialise(part, *args)

    def _ran(self, run: Callable[..., Tensor], *args: Any) -> Tensor:
        """Run a step's forward and backward; all that follows is in the fake world too."""
        self._inside.enter_context(self._watched())
        self._make_states()
        gc.collect()
        self._traffic.found.clear()
        self._live.restart(self._held)
        with self._world.in_model():
            return run(*args)

    def _make_states(self) -> None:
        """Make the optimisers' states, as a first step does."""
        for optimizer in self._optimizers:
            for parameter in _parameters(optimizer):
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()

    def _held(self) -> Held:
        held = [fsdp_held(part) for part in self._parts]
        states = [
            value
            for optimizer in self._optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor)
        ]
        return {
            "params": [each for part in held for each in part["params"]],
            "optimizer": states,
            "grads_and_buffers": [each for part in held for each in part["grads_and_buffers"]],
        }

    @contextlib.contextmanager
    def _optimizers_noted(self) -> Iterator[None]:
        kind: Theirs = torch.optim.Optimizer
        own = kind.__init__

        def noted(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            own(optimizer, *args, **kwargs)
            self._optimizers.append(optimizer)

        kind.__init__ = noted
        try:
            yield
        finally:
            kind.__init__ = own


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _builder(start: Theirs, first_weights: Theirs) -> Callable[..., tuple[nn.Module, None]]:
    """Return what builds a model without drawing its weights, as one that a checkpoint fills."""

    def build(model: Theirs, seed: int, options: Theirs, _: object) -> tuple[nn.Module, None]:
        deferred = first_weights.DeferredInit()
        deferred._draw = lambda _: None
        with torch.random.fork_rng(devices=[]), deferred:
            torch.manual_seed(seed)
            built = getattr(start.user_module(model), model.factory)()
        start._make_real(built, deferred)
        return start.cast_parameters(built, options), None

    return build


def main() -> None:
    """Run the jobs on the command line: FOLDER, then RANK:MICROBATCHES; print a JSON line each."""
    folder, *jobs = sys.argv[1:]
    sys.path.insert(0, folder)
    warnings.simplefilter("ignore")
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the model's code prints
    for job in jobs:
        rank, _, number = job.partition(":")
        try:
            found = RankRun(Path(folder), int(rank), int(number)).run()
        except BaseException as error:
            found = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        answers.write(json.dumps({"job": job, **found}) + "\n")
        answers.flush()
        if "error" in found:
            break
    os._exit(0)  # the group's threads are not waited for


if __name__ == "__main__":
    main()
