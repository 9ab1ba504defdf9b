"""The verbs that work on a model or a table: what each takes, and its help.

What a verb does is imported when its arguments are known to be sound.
"""

from pathlib import Path
from typing import Unpack

import click

from planner.cli.option_types import CalibrateOptions, PlanOptions, TraceOptions, ValidateOptions
from planner.cli.options import (
    ExampleCommand,
    assume_option,
    framework_option,
    hint_options,
    keep_going_option,
    output_options,
    plan_of_log_option,
    request_from_options,
    request_options,
    search_options,
    verbosity_options,
)
from planner.version import VERSION
from planner.vocabulary import Dtype

_FILE = click.Path(path_type=Path)

_WIDE = {"max_content_width": 100}

_PLAN_EXAMPLES = """
Examples:
  plan model.py --gpus 8                                 plan, print, write plans/model
  plan model.py --gpus 64 --cluster h200-sxm --fix tp=4  keep tp, decide the rest
  plan path/to/config.json --gpus 16 --seq-len 4096      a Hugging Face model, without weights
  plan estimate model.py --gpus 8 --fix dp_shard=8       price one layout
"""

_VERBS = """
Verbs (a first argument that is none of them is the MODEL):
  estimate MODEL   Price one layout, without a search.
  sweep MODEL      Plan at many points: how it scales, what it costs, how long it takes.
  explain PLAN     Say what a plan is bound by, what more would buy, why not another layout.
  trace MODEL      Show what is in a model: FLOPs, bytes, blocks, where it can be cut.
  profiles         List the clusters, or show where the numbers of one come from.
  validate RUNS    Hold the cost model to measured runs, or to the log of a script.
  calibrate RUNS   Fit the constants of your cluster and framework to your own runs.
  check DIR        Hold a plan to its script, without the cluster.
  compare PLAN     Hold a plan to a measured run of its script, or to another plan.
  export PLAN      Write a plan for torchtitan, Megatron-LM, DeepSpeed or Accelerate.

Exit codes: 0 planned, 2 bad request, 3 nothing fits, 4 no answer from the solver,
5 the model cannot be loaded, 6 a profile is wrong, 7 no script or export for this plan, 8 a plan
that breaks a rule of its own (our bug), 9 a script that is not as its plan says (`plan check`).
"""

_ESTIMATE_EXAMPLES = """
Examples:
  plan estimate model.py --gpus 8 --fix dp_shard=8
  plan estimate model.py --gpus 8 --fix tp=2 --fix pp=2 --fix schedule=1F1B
  plan estimate model.py --gpus 8 --fix tp=2 --json
  plan estimate model.py --gpus 8 --framework nanotron --fix dp_shard=8
"""

_TRACE_EXAMPLES = """
Examples:
  plan trace model.py                                  FLOPs, bytes, blocks, cuts
  plan trace llama.py:llama_8b --seq-len 8192 -v       and every unit
  plan trace model.py --ops ops.csv --dot model.dot    every operator as a table, a picture
"""

_VALIDATE_EXAMPLES = """
Examples:
  plan validate runs.csv                                 how far off, as a table
  plan validate plans/gpt/log.jsonl                      the same of a run of the script
  plan validate runs.csv --failed failed.csv             and the verdicts on what fits
  plan validate runs.csv --assume recompute=full         of cells that are empty
  plan validate runs.csv --plot runs.png --out own.csv   a picture, every prediction
  plan calibrate runs.csv --out own.toml && plan validate more.csv --calibration own.toml
"""

_CALIBRATE_EXAMPLES = """
Examples:
  plan calibrate runs.csv --out own.toml                 fit, write, say what changed
  plan calibrate plans/*/log.jsonl --out own.toml        to runs of scripts
  plan validate more.csv --calibration own.toml          hold it to other runs
"""


@click.command(
    cls=ExampleCommand,
    examples=_PLAN_EXAMPLES,
    verbs=_VERBS,
    context_settings=_WIDE,
)
@request_options
@search_options
@output_options
@click.version_option(VERSION, prog_name="plan", message="%(prog)s %(version)s")
def plan_command(**options: Unpack[PlanOptions]) -> None:
    """Plan how to train MODEL on N devices, prove the plan best, write the script.

    MODEL is model.py, model.py:build_model or package.module:factory; the code in it is run. Or it
    is a Hugging Face config.json or its folder: weights are neither needed nor downloaded.
    """
    request = request_from_options(options)
    from planner.cli.plan_runner import run_planning

    run_planning(request, options, estimate=False)


@click.command(cls=ExampleCommand, examples=_ESTIMATE_EXAMPLES, context_settings=_WIDE)
@request_options
@framework_option
@output_options
def estimate_command(**options: Unpack[PlanOptions]) -> None:
    """Price one layout of MODEL on N devices, without a search.

    Degrees that are not fixed are 1, and dp_shard takes the devices that are left over. Files
    are written with --out only. Of another framework than the emitted script no script is
    written; where its ranks hold their parameters whole, dp_shard divides the optimiser's states
    alone (ZeRO-1).
    """
    request = request_from_options(options)
    from planner.cli.plan_runner import run_planning

    run_planning(request, options, estimate=True)


@click.command(cls=ExampleCommand, examples=_TRACE_EXAMPLES, context_settings=_WIDE)
@click.argument("model", metavar="MODEL")
@click.option(
    "--seq-len",
    type=int,
    metavar="N",
    help="Tokens per sample.  [the model's own, of a config at most 2048]",
)
@click.option(
    "--microbatch-size",
    type=int,
    default=1,
    show_default=True,
    metavar="N",
    help="Samples in the microbatch.",
)
@click.option(
    "--dtype",
    default=Dtype.BFLOAT16,
    show_default=True,
    metavar="DTYPE",
    help="Compute in bfloat16, float32 or float64.",
)
@hint_options
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON on stdout.")
@click.option(
    "--ops",
    type=_FILE,
    metavar="CSV",
    help="Write every operator, forward and backward, as a table.",
)
@click.option(
    "--dot",
    type=_FILE,
    metavar="FILE",
    help="Write the graph of the forward pass for Graphviz (dot -Tsvg FILE).",
)
@click.option("--force", is_flag=True, help="Replace files that exist.")
@verbosity_options("Every unit, every place for a cut, seconds of each phase")
def trace_command(**options: Unpack[TraceOptions]) -> None:
    """Show what is in MODEL: parameters, FLOPs, bytes, its blocks and where it can be cut.

    Runs one training step of one microbatch on tensors without data; no weights are allocated.
    MODEL is as for `plan MODEL`; the code in it is run.
    """
    from planner.cli.trace_runner import run_trace

    run_trace(options)


@click.command(cls=ExampleCommand, examples=_VALIDATE_EXAMPLES, context_settings=_WIDE)
@click.argument("runs", metavar="RUNS...", type=_FILE, nargs=-1, required=True)
@click.option(
    "--failed", type=_FILE, metavar="CSV", help="Layouts that were tried and did not run."
)
@plan_of_log_option
@click.option(
    "--calibration", type=_FILE, metavar="FILE", help="Constants that `plan calibrate` fitted."
)
@assume_option
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

    RUNS is a CSV file with a row for each run: its model, layout, step time and memory
    (docs/validate.md); rows that cannot be priced are listed with the reason. Or it is one or
    several logs of scripts, LOG.jsonl: the runs are of their plans' own models and layouts.
    """
    from planner.cli.validate_runner import run_validation

    run_validation(options)


@click.command(cls=ExampleCommand, examples=_CALIBRATE_EXAMPLES, context_settings=_WIDE)
@click.argument("runs", metavar="RUNS...", type=_FILE, nargs=-1, required=True)
@click.option(
    "--out",
    type=_FILE,
    required=True,
    metavar="FILE",
    help="Where to write the constants (TOML).",
)
@plan_of_log_option
@assume_option
@keep_going_option
@click.option("--force", is_flag=True, help="Replace the file where it exists.")
@verbosity_options("Seconds of each phase")
def calibrate_command(**options: Unpack[CalibrateOptions]) -> None:
    """Fit the few constants of your devices, cluster and framework to your own measured runs.

    RUNS is as for `plan validate`. Rows that cannot be priced are left out, and told.
    """
    from planner.cli.validate_runner import run_calibration

    run_calibration(options)
