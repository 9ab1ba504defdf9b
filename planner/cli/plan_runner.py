"""Runs a request from the options to the last line on screen."""

import sys
from pathlib import Path

from planner import api
from planner.cli.option_types import PlanOptions
from planner.cli.plan_screen import print_result
from planner.cli.terminal import ProgressLine, answer_console, message_console
from planner.errors import InfeasiblePlanError
from planner.report.document import infeasible_json
from planner.report.folder import check_folder, free_folder
from planner.request import PlanRequest
from planner.result import PlanResult

PLANS_FOLDER = Path("plans")
"""Where plans are written without --out."""


def run_planning(request: PlanRequest, options: PlanOptions, *, estimate: bool) -> None:
    """Plan or estimate, write the files, print the answer.

    Args:
        request: Checked request.
        options: How to show and where to write.
        estimate: Price the one layout that the request fixes, without a search.

    Raises:
        PlannerError: As the layers below; on an infeasible request ``--json`` still prints what
            is missing.
    """
    folder = _output_folder(request, options, estimate=estimate)
    if folder is not None:
        check_folder(folder, force=options["force"])
    messages = message_console(no_color=options["no_color"])
    verbose, quiet = options["verbose"] > 0, options["quiet"]
    try:
        with ProgressLine(messages, verbose=verbose, quiet=quiet) as progress:
            result = api.run_request(request, estimate_only=estimate, progress=progress)
    except InfeasiblePlanError as error:
        if options["as_json"]:
            sys.stdout.write(infeasible_json(error))
        raise
    if not quiet:
        for warning in result.warnings:
            messages.print(f"warning: {warning}", markup=False, soft_wrap=True)
    script = request.framework is None
    files = result.save(folder, force=options["force"], script=script) if folder is not None else ()
    _print_answer(result, files, options)


def _print_answer(result: PlanResult, files: tuple[Path, ...], options: PlanOptions) -> None:
    if options["as_json"]:
        sys.stdout.write(result.to_json())
        if files and not options["quiet"]:
            sys.stderr.write(f"wrote {files[0].parent}\n")
        return
    console = answer_console(no_color=options["no_color"])
    print_result(console, result.record, files=files, verbose=options["verbose"] > 0)


def _output_folder(request: PlanRequest, options: PlanOptions, *, estimate: bool) -> Path | None:
    """Choose the folder: --out, or one named after the model; none for --json and estimates."""
    if options["out"] is not None:
        return options["out"]
    if estimate or options["as_json"]:
        return None
    wanted = PLANS_FOLDER / model_folder_name(request.model)
    return wanted if options["force"] else free_folder(wanted)


def model_folder_name(model: str) -> str:
    """Name a folder after the MODEL argument.

    "examples/gpt.py" gives "gpt", "llama.py:llama_8b" and "zoo.llama:llama_8b" "llama_8b", a
    Hugging Face folder or its config.json the folder's name.
    """
    source, _, factory = model.partition(":")
    path = Path(source)
    if factory and factory != "build_model":
        name = factory
    elif path.name == "config.json":
        name = path.absolute().parent.name
    elif path.suffix in (".py", ".json"):
        name = path.stem
    elif path.is_dir():
        name = path.absolute().name
    else:
        name = path.name.rpartition(".")[2]
    kept = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in name)
    return kept.strip("-") or "model"
