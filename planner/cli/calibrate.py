"""``plan calibrate RUNS.csv``: the constants of a cluster and a framework, fitted to runs."""

from pathlib import Path
from typing import Unpack

import click

from planner.cli.options import (
    CalibrateOptions,
    ExampleCommand,
    keep_going_option,
    verbosity_options,
)

_EXAMPLES = """
Examples:
  plan calibrate runs.csv --out own.toml                 fit, write, say what changed
  plan validate more.csv --calibration own.toml          hold it to other runs
"""


@click.command(cls=ExampleCommand, examples=_EXAMPLES, context_settings={"max_content_width": 100})
@click.argument("runs", metavar="RUNS.csv", type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    metavar="FILE",
    help="Where to write the constants (TOML).",
)
@keep_going_option
@click.option("--force", is_flag=True, help="Replace the file where it exists.")
@verbosity_options("Seconds of each phase")
def calibrate_command(**options: Unpack[CalibrateOptions]) -> None:
    """Fit the few constants of your cluster and framework to your own measured runs.

    RUNS.csv is as for `plan validate`. Rows that cannot be priced are left out, and told.
    """
    from planner.cli.validate_runner import run_calibration

    run_calibration(options)
