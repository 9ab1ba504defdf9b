"""Runs a plan's script as some of its ranks, each without the others: the worker of ``check``.

The script's own ``parallelize`` lays the model out, and the model that it returns takes one step.
Replaced is what needs the cluster or data: the process group, first weights, batches, how many
rows go to which experts; and tensors are fake.
"""

import contextlib
import gc
import importlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from planner.checking.fake_world import (
    FakeWorld,
    copied_from_host,
    fake_group,
    offloaded_parameters,
    parameters_held,
    same_in_place,
)
from planner.checking.known_reads import NotedReads
from planner.checking.script_rank import (
    Theirs,
    answer_jobs,
    drawn_batch,
    forget_runtime,
    keep_inputs_nowhere,
    load_script,
    run_blocks_as_written,
    share_experts_evenly,
)
from planner.checking.watch import Held, LiveBytes, Traffic, Watch
from planner.codegen.undrawn import undrawn_model
from planner.runtime.anatomy import meta_twin
from planner.runtime.known_data import DataRead, PlannedReads
from planner.runtime.model import run_model
from planner.runtime.trees import cast_floats


class RankRun:
    """One rank's step."""

    def __init__(
        self, folder: Path, rank: int, num_microbatches: int, reads: Sequence[DataRead]
    ) -> None:
        """Keep what to run.

        Args:
            folder: Folder of the script.
            rank: Rank.
            num_microbatches: Microbatches in place of the plan's.
            reads: What lines of the model read of data.
        """
        self._folder = folder
        self._rank = rank
        self._num_microbatches = num_microbatches
        self._planned = reads
        self._world = FakeWorld()
        self._live = LiveBytes()
        self._traffic = Traffic()

    def run(self) -> dict[str, Any]:
        """Run the step and return what was seen."""
        script = self._script()
        script.NUM_MICROBATCHES = self._num_microbatches
        with fake_group(self._rank, script.WORLD_SIZE):
            model = undrawn_model(script.MODEL)
            dtype = script.DTYPES[script.DTYPE]
            twin = meta_twin(model, dtype)
            trained = script.parallelize(model)
            batch = drawn_batch(script, trained.data_parallel_rank)
            reads = PlannedReads(self._known_reads(twin, cast_floats(batch[0][0], dtype)))
            with self._watched():
                self._step(trained, self._world.on_host(batch), reads)
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
        """Load the script, whose parts get fake parameters."""
        forget_runtime()
        part: Theirs = importlib.import_module("runtime.part")
        materialise = part.Part.materialise

        def materialised(part: Theirs) -> None:
            with self._watched():
                materialise(part)
            part.has_weights = True  # fake ones

        part.Part.materialise = materialised
        part.Part.here = lambda part, batch: self._world.moved(batch, part.device)
        share_experts_evenly(self._folder)
        keep_inputs_nowhere(self._folder)
        run_blocks_as_written(self._folder)
        return load_script(self._folder)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        seen = Watch(self._live, self._traffic)
        with self._world.entered(), copied_from_host(), self._live.resizes_seen(), seen:
            yield

    def _known_reads(self, twin: nn.Module, inputs: Theirs) -> list[DataRead]:
        """Return the planned answers, and those that follow from a microbatch and constants.

        What a model reads after an error here, it reads in the step again, which tells it.
        """
        planned = {(read.file, read.line) for read in self._planned}
        on_meta = tree_map_only(Tensor, lambda t: t.to("meta"), inputs)
        noted = NotedReads(on_meta, inputs, self._planned)
        with contextlib.suppress(Exception), noted:
            run_model(twin, on_meta)
        found = [read for read in noted.noted if (read.file, read.line) not in planned]
        return [*self._planned, *found]

    def _step(self, trained: Theirs, batch: Theirs, reads: PlannedReads) -> None:
        """Take a step; what an optimiser makes in its first one is made before."""
        for optimizer in trained.optimizers:
            for parameter in _parameters(optimizer):
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()
            optimizer.zero_grad()
        self._leave_out_offloaded(trained)
        gc.collect()
        self._traffic.found.clear()
        buffers = self._world.faked(buffer for part in trained.parts for buffer in part.buffers())
        self._live.restart(lambda: _held(trained, buffers))
        with reads, same_in_place():
            trained.step_over(batch)

    def _leave_out_offloaded(self, trained: Theirs) -> None:
        """Count what lies in host memory no more, and gradients from when they have come there."""
        shards = [each for part in trained.parts for each in offloaded_parameters(part)]
        for parameter in shards:
            self._live.leave_out_tensor(parameter)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    lambda shard: self._live.leave_out_tensor(shard.grad)
                )
        for state in _states(trained) if shards else ():
            self._live.leave_out_tensor(state)


def _held(trained: Theirs, buffers: Sequence[Tensor]) -> Held:
    held = [parameters_held(part) for part in trained.parts]
    return {
        "params": [each for part in held for each in part["params"]],
        "optimizer": _states(trained),
        "grads_and_buffers": [
            *buffers,
            *(each for part in held for each in part["grads_and_buffers"]),
        ],
    }


def _states(trained: Theirs) -> list[Tensor]:
    return [
        value
        for optimizer in trained.optimizers
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor)
    ]


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _run(
    folder: Path, rank: int, num_microbatches: int, reads: Sequence[DataRead]
) -> dict[str, Any]:
    return RankRun(folder, rank, num_microbatches, reads).run()


answer = partial(answer_jobs, _run)
"""Answer jobs, in a process that does nothing else afterwards."""
