"""``plan estimate MODEL``: the price of one layout."""

from typing import Unpack

import click

from planner.cli.options import (
    ExampleCommand,
    PlanOptions,
    output_options,
    request_from_options,
    request_options,
)

_EXAMPLES = """
Examples:
  plan estimate model.py --gpus 8 --fix dp_shard=8
  plan estimate model.py --gpus 8 --fix tp=2 --fix pp=2 --fix schedule=1F1B
  plan estimate model.py --gpus 8 --fix tp=2 --json
"""


@click.command(cls=ExampleCommand, examples=_EXAMPLES, context_settings={"max_content_width": 100})
@request_options
@output_options
def estimate_command(**options: Unpack[PlanOptions]) -> None:
    """Price one layout of MODEL on N devices, without a search.

    Degrees that are not fixed are 1, and dp_shard takes the devices that are left over. Files
    are written with --out only.
    """
    request = request_from_options(options)
    from planner.cli.runner import run_planning

    run_planning(request, options, estimate=True)
