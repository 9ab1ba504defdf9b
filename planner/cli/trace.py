"""``plan trace MODEL``: what is in a model."""

from pathlib import Path
from typing import Unpack

import click

from planner.cli.options import ExampleCommand, TraceOptions, hint_options, verbosity_options

_EXAMPLES = """
Examples:
  plan trace model.py                                  FLOPs, bytes, blocks, cuts
  plan trace llama.py:llama_8b --seq-len 8192 -v       and every unit
  plan trace model.py --ops ops.csv --dot model.dot    every operator as a table, a picture
"""


@click.command(cls=ExampleCommand, examples=_EXAMPLES, context_settings={"max_content_width": 100})
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
    default="bfloat16",
    show_default=True,
    metavar="DTYPE",
    help="Compute in bfloat16, float32 or float64.",
)
@hint_options
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON on stdout.")
@click.option(
    "--ops",
    type=click.Path(path_type=Path),
    metavar="CSV",
    help="Write every operator, forward and backward, as a table.",
)
@click.option(
    "--dot",
    type=click.Path(path_type=Path),
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
