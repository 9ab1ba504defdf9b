"""The command line of a training script."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Command line of a training script."""

    steps: int
    """Optimiser steps in all, those before a resumed checkpoint included."""
    log: Path | None
    """File that gets one JSON object per step."""
    checkpoint: Path | None
    """Folder of checkpoints, one folder per saved step."""
    checkpoint_every: int
    """Steps between checkpoints, 0 for one at the end."""
    resume: bool
    """Go on from the newest checkpoint."""
    init: Path | None
    """Checkpoint to read the first weights from."""
    write_init: Path | None
    """Folder that gets the first weights; nothing is trained."""
    reference: bool
    """Train the plain model on one process."""
    dtype: torch.dtype
    """Compute dtype."""
    timeout_s: float
    """Seconds after which a collective that waits for another rank gives up."""

    @property
    def master_dtype(self) -> torch.dtype:
        """Dtype of parameters, gradients and optimiser states."""
        return torch.float64 if self.dtype is torch.float64 else torch.float32


_LOG_HELP = """write one JSON object per step to this file; under torchrun write --log-file,
since torchrun of Python before 3.12 takes --log for an option of its own"""


def parse_options(
    description: str | None, dtype: str, arguments: Sequence[str] | None = None
) -> Options:
    """Read the command line.

    Args:
        description: Shown by ``--help``.
        dtype: Compute dtype where the command line names none.
        arguments: Command line, None for the process's own.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=10, help="optimiser steps in all (default: 10)")
    add("--log", "--log-file", type=Path, metavar="FILE", help=_LOG_HELP)
    add("--checkpoint", type=Path, metavar="DIR", help="save checkpoints in this folder")
    add("--checkpoint-every", type=int, default=0, metavar="N", help="default: at the end")
    add("--resume", action="store_true", help="go on from the newest checkpoint")
    add("--init", type=Path, metavar="DIR", help="read the first weights from this checkpoint")
    add("--write-init", type=Path, metavar="DIR", help="write the first weights, then stop")
    add("--reference", action="store_true", help="train the plain model on one process")
    add("--dtype", choices=tuple(DTYPES), default=dtype, help=f"default: {dtype}")
    add("--timeout-s", type=float, default=600.0, help="limit for a collective (default: 600)")
    options = vars(parser.parse_args(arguments))
    if options["resume"] and options["checkpoint"] is None:
        parser.error("--resume needs --checkpoint DIR, the folder that holds the checkpoints")
    return Options(**{**options, "dtype": DTYPES[options["dtype"]]})
