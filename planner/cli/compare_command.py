"""The verb that holds a plan to a measurement or to another plan."""

from pathlib import Path
from typing import Unpack

import click

from planner.cli.option_types import CompareOptions
from planner.cli.options import ExampleCommand, verbosity_options

_EXAMPLES = """
Examples:
  plan compare plans/gpt --measured plans/gpt/log.jsonl        the log of a run of its script
  plan compare plans/gpt --measured trace/                     the parts of a step, from traces
  plan compare plans/gpt plans/other                           the terms in which two plans differ
"""


@click.command(cls=ExampleCommand, examples=_EXAMPLES, context_settings={"max_content_width": 100})
@click.argument("plan", metavar="PLAN.json", type=click.Path(path_type=Path))
@click.argument("other", metavar="[OTHER.json]", type=click.Path(path_type=Path), required=False)
@click.option(
    "--measured",
    type=click.Path(path_type=Path),
    metavar="LOG|TRACE",
    help="What a run of its script wrote with --log-file LOG.jsonl or --torch-trace DIR.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON on stdout.")
@verbosity_options("Nothing more")
def compare_command(**options: Unpack[CompareOptions]) -> None:
    """Hold a plan to a measured run of its script, or to another plan, part by part.

    PLAN.json is what `plan MODEL` wrote, or its folder. A log has the step time and the memory; a
    trace of torch's profiler the parts of a step on one rank (of a folder of traces, the one that
    computes longest): compute, exposed collectives by axis,
    bubble, optimiser, host.
    """
    from planner.cli.compare_screen import run_compare

    run_compare(options)
