"""The command line of a training script."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import torch

from .processes import RunError

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}

_LOG_HELP = """write one JSON object per step to this file; under torchrun write --log-file,
since torchrun of Python before 3.12 takes --log for an option of its own"""
_TRACE_HELP = """write what torch's profiler sees of steps 4 to 6 of this run to this folder, a file
for each rank, for `plan compare --measured`"""
_EVALUATE_HELP = "call evaluate of the model file every N steps and at the end (default: never)"
_ASYNC_HELP = "write checkpoints from a copy in the host's memory while training goes on"
_RESUME_HELP = "go on from the newest checkpoint; where there is none, start at step 0"
_INIT_HELP = """read the first weights from safetensors (a file, an index, their folder) or from a
checkpoint"""


class Options(argparse.Namespace):
    """Command line of a training script, as its help describes it."""

    def is_due(self, every: int, step: int) -> bool:
        """Say whether what is done every so many steps, and at the end, is due after a step."""
        return step == self.steps or bool(every and step % every == 0)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RunError(f"{message} (--help lists the options)")


def parse_options(
    description: str | None, dtype: str, arguments: Sequence[str] | None = None
) -> Options:
    """Read the command line, the process's own where ``arguments`` is None."""
    parser = _Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=10, help="steps in all, resumed ones included (default: 10)")
    add("--log", "--log-file", type=Path, metavar="FILE", help=_LOG_HELP)
    add("--torch-trace", type=Path, metavar="DIR", help=_TRACE_HELP)
    add("--checkpoint", type=Path, metavar="DIR", help="save checkpoints in this folder")
    add("--checkpoint-every", type=int, default=0, metavar="N", help="default: at the end")
    add("--evaluate-every", type=int, default=0, metavar="N", help=_EVALUATE_HELP)
    add("--keep-checkpoints", type=int, default=0, metavar="K", help="the newest K (default: all)")
    add("--async-checkpoint", action="store_true", help=_ASYNC_HELP)
    add("--resume", action="store_true", help=_RESUME_HELP)
    add("--init", type=Path, metavar="PATH", help=_INIT_HELP)
    add("--reference", action="store_true", help="train the plain model on one process")
    add("--dtype", choices=tuple(DTYPES), default=dtype, help=f"default: {dtype}")
    add("--timeout-s", type=float, default=600.0, help="limit for a collective (default: 600)")
    options = parser.parse_args(arguments, Options())
    if options.resume and options.checkpoint is None:
        parser.error("--resume needs --checkpoint DIR, the folder that holds the checkpoints")
    options.dtype = DTYPES[options.dtype]
    return options
