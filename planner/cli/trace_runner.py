"""Runs a trace from the options to the last line on screen."""

import sys
from pathlib import Path

from planner.cli.option_types import TraceOptions
from planner.cli.options import given_hints
from planner.cli.terminal import ProgressLine, answer_console, message_console
from planner.report.folder import check_files, write_file
from planner.request_rules import check_trace
from planner.trace_api import trace
from planner.trace_result import TraceResult


def run_trace(options: TraceOptions) -> None:
    """Trace, write the files, print the answer.

    Raises:
        PlannerError: As the layers below.
    """
    check_trace(
        microbatch_size=options["microbatch_size"],
        seq_len=options["seq_len"],
        dtype=options["dtype"],
    )
    files = {"--ops": options["ops"], "--dot": options["dot"]}
    check_files(files, force=options["force"])
    hints = dict(given_hints(options["hint"], options["hints"]))
    messages = message_console(no_color=options["no_color"])
    verbose, quiet = options["verbose"] > 0, options["quiet"]
    with ProgressLine(messages, verbose=verbose, quiet=quiet) as progress:
        result = trace(
            options["model"],
            microbatch_size=options["microbatch_size"],
            seq_len=options["seq_len"],
            dtype=options["dtype"],
            hints=hints,
            progress=progress,
        )
    if not quiet:
        for warning in result.warnings:
            messages.print(f"warning: {warning}", markup=False, soft_wrap=True)
    written = _write_files(result, options)
    if options["as_json"]:
        from planner.report.trace_document import trace_json

        sys.stdout.write(trace_json(result.graph))
        if written and not quiet:
            sys.stderr.write(f"wrote {', '.join(map(str, written))}\n")
        return
    from planner.cli.trace_screen import print_trace

    console = answer_console(no_color=options["no_color"])
    print_trace(console, result.graph, files=written, phases_s=progress.phases_s, verbose=verbose)


def _write_files(result: TraceResult, options: TraceOptions) -> list[Path]:
    """Write what was asked for."""
    written: list[Path] = []
    if options["ops"] is not None:
        from planner.report.tables import csv_text

        text = csv_text(result.ops.reset_index())
        write_file(options["ops"], text, option="--ops", force=options["force"])
        written.append(options["ops"])
    if options["dot"] is not None:
        from planner.report.dot import dot_text

        write_file(options["dot"], dot_text(result.graph), option="--dot", force=options["force"])
        written.append(options["dot"])
    return written
