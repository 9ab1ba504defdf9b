"""The verb that plans a model at many points."""

from pathlib import Path
from typing import Unpack

import click

from planner.cli.option_types import SweepOptions
from planner.cli.options import (
    ExampleCommand,
    dtype_option,
    hint_options,
    layout_options,
    place_options,
    time_limit_option,
    verbosity_options,
)
from planner.questions.objectives import OBJECTIVES

_FILE = click.Path(path_type=Path)

_EXAMPLES = """
Examples:
  plan sweep model.py --gpus 8..1024                          how it scales, the batch held
  plan sweep model.py --gpus 8..64:8 --price 2.5 --tokens 300B    what it costs, how long it takes
  plan sweep model.py --gpus 64 --seq-len 2048..32768         longer and longer samples
  plan sweep model.py --gpus 16..256 --cluster h100-sxm --cluster a100-80gb --out sweep.csv
"""


@click.command(cls=ExampleCommand, examples=_EXAMPLES, context_settings={"max_content_width": 100})
@click.argument("model", metavar="MODEL")
@click.option(
    "--gpus",
    required=True,
    metavar="LIST",
    help="Devices in all: 8,16,24 or 8..1024 (doubled) or 8..64:8 (in steps of 8).",
)
@click.option(
    "--cluster",
    multiple=True,
    default=("h100-sxm",),
    show_default=True,
    metavar="NAME",
    help="Cluster profile, as for `plan MODEL`. Repeatable.",
)
@place_options
@click.option(
    "--global-batch-size",
    metavar="LIST",
    help="Samples per optimiser step.  [8 x the most GPUs, the same at every point]",
)
@click.option("--seq-len", metavar="LIST", help="Tokens per sample.  [the model's own]")
@dtype_option
@layout_options
@hint_options
@click.option(
    "--price",
    multiple=True,
    metavar="[NAME=]PRICE",
    help="Of one GPU for one hour, in any currency; of one cluster by its name. Repeatable.",
)
@click.option(
    "--tokens",
    metavar="COUNT",
    help="Tokens to train on (15T, 300B), for days and cost; samples of a model without tokens.",
)
@click.option(
    "--objective",
    default=OBJECTIVES[0],
    show_default=True,
    metavar="WORD",
    help="What is picked: step (the fastest), gpus (the fewest that hold it) or cost (least per "
    "token).",
)
@click.option(
    "--within",
    default="0%",
    show_default=True,
    metavar="SHARE",
    help="Share of the objective to give up: for fewer GPUs where it is step, for speed else.",
)
@time_limit_option
@click.option("--out", type=_FILE, metavar="CSV", help="Write a row for every point.")
@click.option(
    "--plot",
    type=_FILE,
    metavar="FILE",
    help="Draw speed and cost against GPUs: .png, .svg or .pdf (extra `plots`).",
)
@click.option("--force", is_flag=True, help="Replace files that exist.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON on stdout.")
@verbosity_options("Seconds of each phase")
def sweep_command(**options: Unpack[SweepOptions]) -> None:
    """Plan MODEL at many points: how it scales, what a token costs, how long a training takes.

    MODEL is as for `plan MODEL`; every point is what that finds. The global batch is the same at
    every point unless several are asked for, since another batch is another training.
    """
    from planner.cli.sweep_runner import run_sweeping

    run_sweeping(options)
