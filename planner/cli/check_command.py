"""The verb that holds a plan to its script."""

from pathlib import Path
from typing import TypedDict, Unpack

import click

from planner.cli.options import ExampleCommand, verbosity_options

_EXAMPLES = """
Examples:
  plan check plans/gpt                  run the script as one rank of each stage, without the others
  plan check plans/gpt/plan.json --json
  plan check plans/gpt --run            and train two steps here, against one process
  plan check plans/gpt --gpu            and time one rank of each stage on this machine's GPU
"""


class CheckOptions(TypedDict):
    """Parsed options of ``plan check DIR``."""

    plan: Path
    run: bool
    gpu: bool
    as_json: bool
    verbose: int
    quiet: bool
    no_color: bool


@click.command(cls=ExampleCommand, examples=_EXAMPLES, context_settings={"max_content_width": 100})
@click.argument("plan", metavar="DIR|PLAN.json", type=click.Path(path_type=Path))
@click.option(
    "--run",
    is_flag=True,
    help="Train two steps on this machine's CPU too, and compare the losses with one process.",
)
@click.option(
    "--gpu",
    is_flag=True,
    help="Time one rank of each pipeline stage on this machine's GPU too, the other ranks not "
    "there, and compare time and memory.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON on stdout.")
@verbosity_options("Every collective")
def check_command(**options: Unpack[CheckOptions]) -> None:
    """Hold a plan to its script, without the cluster.

    DIR is what `plan MODEL` wrote. Its own script runs one step as one rank of each pipeline stage:
    no other rank exists, tensors have no data, and memory is needed for none. Peak memory and
    collectives are shown beside the plan's. Exit code 9 where the script does not run, memory is
    off by more than 5% (and 2 MiB), or collectives are others.
    """
    import sys

    from planner.checking.check import check_plan
    from planner.checking.document import check_json
    from planner.cli.check_screen import print_check
    from planner.cli.terminal import answer_console

    check = check_plan(options["plan"], run=options["run"], gpu=options["gpu"])
    if options["as_json"]:
        sys.stdout.write(check_json(check))
    else:
        console = answer_console(no_color=options["no_color"])
        print_check(console, check, verbose=options["verbose"] > 0)
    check.demand()
