"""The command ``plan``: the verbs, and what every one of them does with errors and signals.

Importing this module must stay cheap: torch, pandas, networkx and PuLP are imported by what a
verb does, after its arguments are known to be sound.
"""

import gc
import os
import sys
import traceback
from collections.abc import Sequence

import click

from planner.cli.check_command import check_command
from planner.cli.commands import (
    calibrate_command,
    estimate_command,
    plan_command,
    trace_command,
    validate_command,
)
from planner.cli.compare_command import compare_command
from planner.cli.explain_command import explain_command
from planner.cli.export_command import export_command
from planner.cli.profile_command import profile_command
from planner.cli.profiles import profiles_command
from planner.cli.sweep_command import sweep_command
from planner.errors import PlannerError

VERBS: dict[str, click.Command] = {
    "calibrate": calibrate_command,
    "compare": compare_command,
    "estimate": estimate_command,
    "check": check_command,
    "explain": explain_command,
    "export": export_command,
    "profile": profile_command,
    "profiles": profiles_command,
    "sweep": sweep_command,
    "trace": trace_command,
    "validate": validate_command,
}
"""Verbs beside the main job; a first argument that is none of them is the MODEL."""

_YOUNG_OBJECTS = 100_000
"""Objects that are made before the collector looks through the newest: imports alone make more, and
nearly all of what a command makes stays until its end."""

EXIT_BUG = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


def main() -> None:
    """Run the command line and leave with its exit code."""
    gc.set_threshold(_YOUNG_OBJECTS)
    code = run(sys.argv[1:])
    # What is left goes with the process: the interpreter need not look for garbage in it.
    gc.freeze()
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run one command line.

    Args:
        arguments: What stands behind ``plan``.

    Returns:
        The exit code: 0, that of the ``PlannerError``, 2 for usage, 1 for our own bug, 130 when
        interrupted, 141 when the reader of stdout went away.
    """
    try:
        _dispatch(arguments)
        sys.stdout.flush()
    except click.ClickException as error:
        return _fail(_usage_words(error), EXIT_USAGE, arguments)
    except PlannerError as error:
        return _fail(str(error), error.exit_code, arguments)
    except KeyboardInterrupt:
        return _fail("interrupted", EXIT_INTERRUPTED, arguments)
    except BrokenPipeError:
        _discard_stdout()
        return EXIT_BROKEN_PIPE
    except click.exceptions.Exit as request:
        return request.exit_code
    except Exception as error:
        words = (
            f"{type(error).__name__}: {error}\nThis is a bug of the planner. Run again with -vv "
            "for the traceback, and report it."
        )
        return _fail(words, EXIT_BUG, arguments)
    return 0


def _dispatch(arguments: Sequence[str]) -> None:
    """Hand the arguments to a verb, or to the main job."""
    rest = list(arguments)
    if not rest:
        help_text = plan_command.get_help(click.Context(plan_command, info_name="plan"))
        sys.stderr.write(help_text + "\n")
        raise click.exceptions.Exit(EXIT_USAGE)
    command: click.Command = plan_command
    name = "plan"
    if rest[0] in VERBS:
        name = f"plan {rest[0]}"
        command = VERBS[rest.pop(0)]
    # Not command.main(): it has its own ideas of signals and broken pipes.
    with command.make_context(name, rest) as context:
        command.invoke(context)


def _usage_words(error: click.ClickException) -> str:
    context = error.ctx if isinstance(error, click.UsageError) else None
    command = context.command_path if context else "plan"
    return f"{error.format_message()}\nSee {command} --help."


def _fail(words: str, exit_code: int, arguments: Sequence[str]) -> int:
    if _wants_traceback(arguments):
        traceback.print_exc()
    sys.stderr.write(f"error: {words}\n")
    return exit_code


def _wants_traceback(arguments: Sequence[str]) -> bool:
    """Whether -v is given twice; arguments that cannot be parsed count too."""
    count = 0
    for argument in arguments:
        if argument == "--verbose":
            count += 1
        elif argument.startswith("-v") and set(argument[1:]) == {"v"}:
            count += len(argument) - 1
    return count >= 2


def _discard_stdout() -> None:
    """Let the interpreter flush into nothing on exit instead of failing again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
