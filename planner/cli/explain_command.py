"""The verb that says what a plan depends on."""

from pathlib import Path
from typing import Unpack

import click

from planner.cli.option_types import ExplainOptions
from planner.cli.options import ExampleCommand, verbosity_options

_EXAMPLES = """
Examples:
  plan explain plans/gpt                          what binds, what would buy speed
  plan explain plans/gpt --why-not tp=8,pp=2      the best plan under that, and what it loses
  plan explain plans/gpt --why-not tp=2 --why-not activation_checkpointing=none
"""


@click.command(cls=ExampleCommand, examples=_EXAMPLES, context_settings={"max_content_width": 100})
@click.argument("plan", metavar="PLAN.json", type=click.Path(path_type=Path))
@click.option(
    "--why-not",
    multiple=True,
    metavar="NAME=VALUE,...",
    help="Answer this alone: the best plan with these values, as --fix takes them. Repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON on stdout.")
@verbosity_options("Seconds of each phase")
def explain_command(**options: Unpack[ExplainOptions]) -> None:
    """Say what a plan is bound by, what more memory or bandwidth would buy, and why not another.

    PLAN.json is what `plan MODEL` wrote, or its folder. Nothing is guessed from the plan: each
    answer is a search of its own, of the model that lies in the plan's folder.
    """
    from planner.cli.explain_screen import run_explain

    run_explain(options)
