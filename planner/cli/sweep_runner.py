"""Runs a sweep from the options to the last line on screen."""

import sys
from pathlib import Path

import click

from planner.cli.option_types import SweepOptions
from planner.cli.options import given_hints, text_of
from planner.cli.sweep_screen import print_sweep
from planner.cli.terminal import ProgressLine, answer_console, message_console
from planner.errors import PlannerError
from planner.picture import check_plot
from planner.questions.sweep import SweepRequest, check_sweep, run_sweep, sweep_points
from planner.questions.sweep_result import SweepResult
from planner.questions.values import count, prices, whole_numbers
from planner.report.folder import check_files, write_file
from planner.report.tables import csv_text
from planner.request import PlanRequest
from planner.request_rules import parse_fix, parse_margin, parse_share

INTERRUPTED_CODE = 130


def run_sweeping(options: SweepOptions) -> None:
    """Plan all points, write the files, print the answer.

    Raises:
        PlannerError: As the layers below; where no point has a plan, what the first of them raised.
        Exit: Ctrl-C came before all points were planned; those that were are printed.
    """
    request = _request(options)
    check_sweep(request)
    if options["plot"] is not None:
        check_plot(options["plot"])
    files = {"--out": options["out"], "--plot": options["plot"]}
    check_files(files, force=options["force"])
    messages = message_console(no_color=options["no_color"])
    verbose, quiet = options["verbose"] > 0, options["quiet"]
    with ProgressLine(messages, verbose=verbose, quiet=quiet) as progress:
        result = SweepResult(run_sweep(request, progress=progress))
    if not result.sweep.planned:
        raise _first_refusal(result)
    written = _write_files(result, options)
    if options["as_json"]:
        sys.stdout.write(result.to_json())
        if written and not quiet:
            sys.stderr.write(f"wrote {', '.join(map(str, written))}\n")
    else:
        print_sweep(answer_console(no_color=options["no_color"]), result.sweep, files=written)
    if result.sweep.interrupted:
        raise click.exceptions.Exit(INTERRUPTED_CODE)


def _request(options: SweepOptions) -> SweepRequest:
    clusters = options["cluster"]
    counts = whole_numbers("--gpus", options["gpus"])
    margin, tokens = options["memory_margin"], options["tokens"]
    batches, lengths = options["global_batch_size"], options["seq_len"]
    base = PlanRequest(
        model=options["model"],
        gpus=counts[0],
        gpus_per_node=options["gpus_per_node"],
        calibration=text_of(options["calibration"]),
        dtype=options["dtype"],
        memory_margin=None if margin is None else parse_margin(margin),
        fixed=tuple(parse_fix(options["fix"]).items()),
        hints=given_hints(options["hint"], options["hints"]),
        time_limit_s=options["time_limit"],
    )
    return SweepRequest(
        points=sweep_points(
            base,
            gpus=counts,
            clusters=clusters,
            seq_lens=(None,) if lengths is None else whole_numbers("--seq-len", lengths),
            global_batch_sizes=None
            if batches is None
            else whole_numbers("--global-batch-size", batches),
        ),
        prices_per_gpu_hour=prices("--price", options["price"], clusters),
        tokens=None if tokens is None else count("--tokens", tokens),
        objective=options["objective"],
        within=parse_share("--within", options["within"]),
    )


def _first_refusal(result: SweepResult) -> PlannerError:
    refusal = result.points[0].refusal
    assert refusal is not None
    return refusal


def _write_files(result: SweepResult, options: SweepOptions) -> list[Path]:
    """Write what was asked for."""
    written: list[Path] = []
    if options["out"] is not None:
        text = csv_text(result.table)
        write_file(options["out"], text, option="--out", force=options["force"])
        written.append(options["out"])
    if options["plot"] is not None:
        result.plot(options["plot"], force=options["force"])
        written.append(options["plot"])
    return written
