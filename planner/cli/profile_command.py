"""``plan profile``: measure this machine and write its profile."""

from pathlib import Path
from typing import Unpack

import click

from planner.cli.option_types import ProfileOptions
from planner.cli.options import ExampleCommand, verbosity_options

_EXAMPLES = """
Examples:
  plan profile --quick --out my.toml
  plan profile --processes 8 --out my.toml
  plan profile --device cuda --processes 8 --out my.toml
  plan profile --hosts node1,node2 --processes 4 --out my.toml
  plan MODEL --gpus 8 --cluster my.toml
"""


@click.command(cls=ExampleCommand, examples=_EXAMPLES, context_settings={"max_content_width": 100})
@click.option(
    "--device", type=click.Choice(("cpu", "cuda")), default="cpu", show_default=True,
    help="What the ranks compute on.",
)  # fmt: skip
@click.option(
    "--processes", type=click.IntRange(min=1), metavar="N",
    help="Ranks on each host, all measuring at once: as many as your plans have.  "
    "[cores, or GPUs]",
)  # fmt: skip
@click.option(
    "--hosts", metavar="NAMES",
    help="Hosts, the first where ranks meet; this machine alone without it.",
)  # fmt: skip
@click.option(
    "--remote", metavar="COMMAND", default="ssh {host}", show_default=True,
    help="Runs the rest of its line on {host}.",
)  # fmt: skip
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="FILE.toml", required=True,
    help="Cluster profile; FILE-device.toml and FILE-points.jsonl lie beside it.",
)  # fmt: skip
@click.option(
    "--quick",
    is_flag=True,
    help="Fewer sizes and repeats: under 20 s, twice that where two processes share a core.",
)
@click.option("--force", is_flag=True, help="Replace the files, and measure all anew.")
@verbosity_options("How well the fits are")
def profile_command(**options: Unpack[ProfileOptions]) -> None:
    """Measure this machine and write its profile, for plans with --cluster FILE.

    Measured with all ranks at once: rates of matrix products, attention and other ops by size,
    collectives and transfers by payload and group, memory, and what the script's own code takes.
    An interrupted measurement goes on where it was.
    """
    from planner.cli.profile_runner import run_profile

    run_profile(options)
