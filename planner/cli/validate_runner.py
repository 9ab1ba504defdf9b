"""Runs a validation or a calibration from the options to the last line on screen."""

import sys
from pathlib import Path

from planner.cli.option_types import CalibrateOptions, ValidateOptions
from planner.cli.terminal import ProgressLine, answer_console, message_console
from planner.cli.validate_screen import print_calibration, print_validation
from planner.errors import RequestError
from planner.picture import check_plot
from planner.report.folder import check_file, check_files, write_file
from planner.report.tables import csv_text
from planner.validation.reading.source import read_source
from planner.validation.validate import ValidationResult, validate


def run_validation(options: ValidateOptions) -> None:
    """Price, score, write the files, print the answer.

    Raises:
        PlannerError: As the layers below.
    """
    _check_outputs(options)
    messages = message_console(no_color=options["no_color"])
    verbose, quiet = options["verbose"] > 0, options["quiet"]
    with ProgressLine(messages, verbose=verbose, quiet=quiet) as progress:
        result = validate(
            options["runs"],
            failed=options["failed"],
            plan=options["plan"],
            calibration=options["calibration"],
            assume=dict(options["assume"]),
            keep_going=options["keep_going"],
            capacity_gib=options["capacity_gib"],
            min_group=options["min_group"],
            progress=progress,
        )
    files = _write_outputs(result, options)
    if options["as_json"]:
        sys.stdout.write(result.to_json())
        if files and not quiet:
            sys.stderr.write(f"wrote {', '.join(map(str, files))}\n")
        return
    print_validation(
        answer_console(no_color=options["no_color"]),
        result,
        files=files,
        phases_s=progress.phases_s,
        verbose=verbose,
    )


def run_calibration(options: CalibrateOptions) -> None:
    """Fit, write the file, print what was fitted.

    Raises:
        PlannerError: As the layers below; also where no row can be priced.
    """
    check_file(options["out"], option="--out", force=options["force"])
    table = read_source(
        options["runs"],
        plan=options["plan"],
        keep_going=options["keep_going"],
        assume=dict(options["assume"]),
    )
    if not table.runs:
        raise _nothing_to_fit(table.name, options["runs"])
    from planner.validation.fitting.fit import calibrate_runs

    messages = message_console(no_color=options["no_color"])
    verbose, quiet = options["verbose"] > 0, options["quiet"]
    with ProgressLine(messages, verbose=verbose, quiet=quiet) as progress:
        calibration = calibrate_runs(table, keep_going=options["keep_going"], progress=progress)
    lines = calibration.lines()
    if not lines:
        raise _nothing_to_fit(table.name, options["runs"])
    write_file(options["out"], calibration.to_toml(), option="--out", force=options["force"])
    print_calibration(
        answer_console(no_color=options["no_color"]),
        lines,
        [*table.problems, *calibration.left_out],
        file=options["out"],
        phases_s=progress.phases_s,
    )


def _nothing_to_fit(name: str, runs: tuple[Path, ...]) -> RequestError:
    return RequestError(
        f"{name}: there is nothing to fit to, no row with a step time can be priced",
        hint=f"See why: plan validate {' '.join(map(str, runs))}",
    )


def _check_outputs(options: ValidateOptions) -> None:
    """Refuse, before any work is done, what cannot be written."""
    if options["failed_out"] is not None and options["failed"] is None:
        raise RequestError(
            f"--failed-out {options['failed_out']}: there are no failed rows to write",
            hint="Name their table with --failed CSV.",
        )
    files = {
        "--out": options["out"],
        "--failed-out": options["failed_out"],
        "--plot": options["plot"],
    }
    check_files(files, force=options["force"])
    if options["plot"] is not None:
        check_plot(options["plot"])


def _write_outputs(result: ValidationResult, options: ValidateOptions) -> list[Path]:
    """Write what was asked for; a picture without a point leaves no table behind."""
    contents: list[tuple[str, Path, str | bytes]] = []
    if options["plot"] is not None:
        contents.append(("--plot", options["plot"], result.plot_bytes(options["plot"])))
    if options["out"] is not None:
        contents.append(("--out", options["out"], csv_text(result.predictions)))
    if options["failed_out"] is not None and result.failed_predictions is not None:
        text = csv_text(result.failed_predictions)
        contents.append(("--failed-out", options["failed_out"], text))
    for option, file, content in contents:
        write_file(file, content, option=option, force=options["force"])
    return [file for _, file, _ in contents]
