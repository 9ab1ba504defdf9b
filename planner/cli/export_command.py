"""The verb that writes a plan for another framework."""

from pathlib import Path
from typing import TypedDict, Unpack

import click

from planner.cli.options import ExampleCommand, verbosity_options

_EXAMPLES = """
Examples:
  plan export plans/gpt --to torchtitan --out titan_plan.py
  plan export plans/gpt/plan.json --to megatron --out megatron.sh
  plan export plans/gpt --to deepspeed --allow-lossy > deepspeed.json
"""

TARGET_NAMES = ("torchtitan", "megatron", "deepspeed", "accelerate")


class ExportOptions(TypedDict):
    """Parsed options of ``plan export PLAN.json``."""

    plan: Path
    to: str
    out: Path | None
    allow_lossy: bool
    force: bool
    verbose: int
    quiet: bool
    no_color: bool


@click.command(cls=ExampleCommand, examples=_EXAMPLES, context_settings={"max_content_width": 100})
@click.argument("plan", metavar="PLAN.json", type=click.Path(path_type=Path))
@click.option(
    "--to",
    type=click.Choice(TARGET_NAMES),
    required=True,
    help="Framework that gets the plan.",
)
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="FILE", help="Where to write it.  [stdout]"
)
@click.option(
    "--allow-lossy",
    is_flag=True,
    help="Write it although a part of the plan is lost that changes time or memory.",
)
@click.option("--force", is_flag=True, help="Replace the file where it exists.")
@verbosity_options("Nothing more")
def export_command(**options: Unpack[ExportOptions]) -> None:
    """Write a plan as the configuration of another framework.

    PLAN.json is what `plan MODEL` wrote, or its folder. The file says which version it is for, how
    to run and check it, and what of the plan it cannot express; exit code 7 where that changes time
    or memory, unless --allow-lossy is given.
    """
    import sys

    from planner.export.export import export_plan
    from planner.plan.serialize import load_saved_plan
    from planner.report.folder import check_file, write_file

    out = options["out"]
    if out is not None:
        check_file(out, option="--out", force=options["force"])
    exported = export_plan(
        load_saved_plan(options["plan"]), options["to"], allow_lossy=options["allow_lossy"]
    )
    if out is None:
        sys.stdout.write(exported.text)
    else:
        write_file(out, exported.text, option="--out", force=options["force"])
    if not options["quiet"]:
        for loss in exported.losses:
            sys.stderr.write(f"not expressed: {loss.words}\n")
        if out is not None:
            sys.stderr.write(f"wrote {out} for {exported.target.version}\n")
