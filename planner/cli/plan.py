"""``plan MODEL``: the main job."""

from typing import Unpack

import click

from planner.cli.options import (
    ExampleCommand,
    PlanOptions,
    output_options,
    request_from_options,
    request_options,
    search_options,
)

_EXAMPLES = """
Examples:
  plan model.py --gpus 8                                 plan, print, write plans/model
  plan model.py --gpus 64 --cluster h200-sxm --fix tp=4  keep tp, decide the rest
  plan path/to/config.json --gpus 16 --seq-len 4096      a Hugging Face model, without weights
  plan estimate model.py --gpus 8 --fix dp_shard=8       price one layout
"""

_VERBS = """
Verbs (a first argument that is none of them is the MODEL):
  estimate MODEL   Price one layout, without a search.
  trace MODEL      Show what is in a model: FLOPs, bytes, blocks, where it can be cut.
  profiles         List the clusters, or show where the numbers of one come from.
  validate CSV     Hold the cost model to measured runs.
  calibrate CSV    Fit the constants of your cluster and framework to your own runs.

Exit codes: 0 planned, 2 bad request, 3 nothing fits, 4 no answer from the solver,
5 the model cannot be loaded, 6 a profile is wrong, 7 no script for this plan.
"""


@click.command(
    cls=ExampleCommand,
    examples=_EXAMPLES,
    verbs=_VERBS,
    context_settings={"max_content_width": 100},
)
@request_options
@search_options
@output_options
@click.version_option(package_name="planner", prog_name="plan", message="%(prog)s %(version)s")
def plan_command(**options: Unpack[PlanOptions]) -> None:
    """Plan how to train MODEL on N devices, prove the plan best, write the script.

    MODEL is model.py, model.py:build_model or package.module:factory; the code in it is run. Or it
    is a Hugging Face config.json or its folder: weights are neither needed nor downloaded.
    """
    request = request_from_options(options)
    from planner.cli.runner import run_planning

    run_planning(request, options, estimate=False)
