"""Runs a trace from the options to the last line on screen."""

import sys
from pathlib import Path

from planner.cli.options import TraceOptions, given_hints
from planner.cli.terminal import ProgressLine, answer_console, message_console
from planner.errors import RequestError
from planner.report.folder import check_file, write_file
from planner.request_rules import check_trace
from planner.trace_api import trace


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
    _check_files(options)
    hints = dict(given_hints(options["hint"], options["hints"]))
    messages = message_console(no_color=options["no_color"])
    verbose, quiet = options["verbose"] > 0, options["quiet"]
    with ProgressLine(messages, verbose=verbose, quiet=quiet) as progress:
        graph = trace(
            options["model"],
            microbatch_size=options["microbatch_size"],
            seq_len=options["seq_len"],
            dtype=options["dtype"],
            hints=hints,
            progress=progress,
        )
    if not quiet:
        for warning in graph.warnings:
            messages.print(f"warning: {warning}", markup=False, soft_wrap=True)
    files: list[Path] = []
    if options["ops"] is not None:
        from planner.report.tables import csv_text

        text = csv_text(graph.ops.reset_index())
        write_file(options["ops"], text, option="--ops", force=options["force"])
        files.append(options["ops"])
    if options["dot"] is not None:
        from planner.report.dot import dot_text

        write_file(options["dot"], dot_text(graph), option="--dot", force=options["force"])
        files.append(options["dot"])
    if options["as_json"]:
        from planner.report.trace_document import trace_json

        sys.stdout.write(trace_json(graph))
        if files and not quiet:
            sys.stderr.write(f"wrote {', '.join(map(str, files))}\n")
        return
    from planner.cli.trace_screen import print_trace

    console = answer_console(no_color=options["no_color"])
    print_trace(console, graph, files=files, phases_s=progress.phases_s, verbose=verbose)


def _check_files(options: TraceOptions) -> None:
    """Refuse, before any work is done, what cannot be written."""
    ops, dot = options["ops"], options["dot"]
    for option, file in (("--ops", ops), ("--dot", dot)):
        if file is not None:
            check_file(file, option=option, force=options["force"])
    if ops is not None and dot is not None and ops.resolve() == dot.resolve():
        raise RequestError(
            f"--ops {ops} --dot {dot}: both are the same file",
            hint="Give each of them a name of its own.",
        )
