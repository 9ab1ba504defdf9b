"""``plan validate RUNS.csv``: measured runs beside what the cost model says of them."""

from pathlib import Path
from typing import Unpack

import click

from planner.cli.options import (
    ExampleCommand,
    ValidateOptions,
    keep_going_option,
    verbosity_options,
)

_EXAMPLES = """
Examples:
  plan validate runs.csv                                 how far off, as a table
  plan validate runs.csv --failed failed.csv             and the verdicts on what fits
  plan validate runs.csv --plot runs.png --out own.csv   a picture, every prediction
  plan calibrate runs.csv --out own.toml && plan validate more.csv --calibration own.toml
"""

_FILE = click.Path(path_type=Path)


@click.command(cls=ExampleCommand, examples=_EXAMPLES, context_settings={"max_content_width": 100})
@click.argument("runs", metavar="RUNS.csv", type=_FILE)
@click.option(
    "--failed", type=_FILE, metavar="CSV", help="Layouts that were tried and did not run."
)
@click.option(
    "--calibration", type=_FILE, metavar="FILE", help="Constants that `plan calibrate` fitted."
)
@keep_going_option
@click.option(
    "--capacity-gib",
    type=float,
    metavar="GIB",
    help="Memory of a device, on top of the verdict of each prediction.",
)
@click.option(
    "--min-group",
    type=int,
    default=5,
    show_default=True,
    metavar="N",
    help="Measured rows that a group needs to be ranked.",
)
@click.option("--out", type=_FILE, metavar="CSV", help="Write the prediction of every row.")
@click.option(
    "--failed-out", type=_FILE, metavar="CSV", help="Write the predictions of the failed rows."
)
@click.option(
    "--plot",
    type=_FILE,
    metavar="FILE",
    help="Draw predicted against measured: .png, .svg or .pdf (extra `plots`).",
)
@click.option("--force", is_flag=True, help="Replace files that exist.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON on stdout.")
@verbosity_options("Every group, every reason, seconds of each phase")
def validate_command(**options: Unpack[ValidateOptions]) -> None:
    """Price measured runs with the cost model of the search, and say how far it is off.

    RUNS.csv has a row for each run: its model, layout, step time and memory (docs/validate.md).
    Rows that cannot be priced are listed with the reason.
    """
    from planner.cli.validate_runner import run_validation

    run_validation(options)
