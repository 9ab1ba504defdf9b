"""Checkpoints that are written while training goes on."""

import contextlib
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from .checkpoint_folders import published


@dataclass(slots=True)
class BackgroundSave:
    """At most one checkpoint that is being written from a copy in the host's memory.

    All ranks of a process group call each method together.
    """

    _group: dist.ProcessGroup | None = None
    """Of its own, since the writers of all ranks talk while training does."""
    _writing: Future[Any] | None = None
    _draft: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def start(self, tensors: Mapping[str, Tensor], target: Path) -> None:
        """Copy tensors and begin to write them.

        Raises:
            RunError: The folder cannot be written.
        """
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        with contextlib.ExitStack() as stack:
            draft = stack.enter_context(published(target))
            self._writing = self._begin(tensors, draft)
            self._draft = stack.pop_all()

    def publish_if_written(self, device: torch.device) -> None:
        """Give the checkpoint its name where all ranks have written their part."""
        if self._writing is None:
            return
        busy = torch.tensor(float(not self._writing.done()), device=device)
        dist.all_reduce(busy)
        if not busy.item():
            self.finish()

    def finish(self) -> None:
        """Wait until the checkpoint is written, and give it its name.

        Raises:
            RunError: It cannot be written; earlier checkpoints stay as they are.
        """
        if self._writing is not None:
            writing, self._writing = self._writing, None
            with self._draft:
                writing.result()

    def _begin(self, tensors: Mapping[str, Tensor], draft: Path) -> Future[Any]:
        try:
            begun = dcp.async_save(  # type: ignore[attr-defined]
                dict(tensors), checkpoint_id=draft, process_group=self._group
            )
        except Exception as error:  # told by all ranks, at the end of the writing
            failed: Future[Any] = Future()
            failed.set_exception(error)
            return failed
        assert isinstance(begun, Future)
        return begun
