"""Options that the verbs share, and the help text that goes with them."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from planner.cli.option_types import PlanOptions
from planner.graph.loading.hints import HintValue, make_hints, parse_hint, read_hints
from planner.request import PlanRequest
from planner.request_rules import check_request, parse_fix, parse_margin

DEFAULT_TOP = 5

Command = TypeVar("Command", bound=Callable[..., object])


class ExampleCommand(click.Command):
    """A command whose help opens with examples."""

    def __init__(
        self, *args: object, examples: str = "", verbs: str = "", **kwargs: object
    ) -> None:
        """Keep the examples, and the list of verbs that stands at the end."""
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._examples = examples
        self._verbs = verbs

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write examples, usage, what it does, options, verbs."""
        if self._examples:
            formatter.write(self._examples.strip("\n") + "\n\n")
        super().format_help(ctx, formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs as they stand."""
        if self._verbs:
            formatter.write("\n" + self._verbs.strip("\n") + "\n")


def request_options(command: Command) -> Command:
    """Add MODEL and the options that say what is planned, and for what machine."""
    return _apply(
        command,
        click.argument("model", metavar="MODEL"),
        click.option("--gpus", type=int, required=True, metavar="N", help="Devices in all."),
        click.option(
            "--cluster",
            default="h100-sxm",
            show_default=True,
            metavar="NAME",
            help="Cluster profile, a name from `plan profiles` or the path of a TOML file; of "
            "several kinds of device each with its number: h100-sxm:16,a100-80gb-sxm:16.",
        ),
        place_options,
        click.option(
            "--global-batch-size",
            type=int,
            metavar="N",
            help="Samples per optimiser step.  [8 x GPUs]",
        ),
        click.option(
            "--seq-len",
            type=int,
            metavar="N",
            help="Tokens per sample.  [the model's own, of a config at most 2048]",
        ),
        dtype_option,
        layout_options,
        hint_options,
    )


def place_options(command: Command) -> Command:
    """Add the options that say more of the machine."""
    return _apply(
        command,
        click.option(
            "--gpus-per-node", type=int, metavar="N", help="Devices per node.  [profile's]"
        ),
        click.option(
            "--calibration",
            type=click.Path(path_type=Path, dir_okay=False),
            metavar="FILE",
            help="Constants of your cluster, as `plan calibrate` wrote them.",
        ),
    )


def dtype_option(command: Command) -> Command:
    """Add the option of the compute dtype."""
    words = "Compute in bfloat16, float32 or float64.  [the best the device has]"
    return click.option("--dtype", metavar="DTYPE", help=words)(command)


def layout_options(command: Command) -> Command:
    """Add the options that bound the layouts."""
    return _apply(
        command,
        click.option(
            "--memory-margin",
            metavar="SHARE",
            help="Share of each device's memory to keep free, as 0.1 or 10%.  [5%]",
        ),
        click.option(
            "--fix",
            multiple=True,
            metavar="NAME=VALUE",
            help="Fix a degree (dp_replicate, dp_shard, cp, tp, pp, ep) or schedule, "
            "virtual_stages, microbatch_size, activation_checkpointing, reshard_after_forward, "
            "sequence_parallel, compile, float8, loss_chunks, cpu_offload, activation_offload, "
            "mesh_order. Repeatable, or with commas.",
        ),
    )


def hint_options(command: Command) -> Command:
    """Add the options that say what the model's code reads from tensors without data."""
    return _apply(
        command,
        click.option(
            "--hint",
            multiple=True,
            metavar="FILE:LINE=VALUE",
            help="What this line of the model reads from a tensor that has data in training "
            "only: true, false or a number. Repeatable.",
        ),
        click.option(
            "--hints",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help='TOML or JSON file of hints: "model.py:57" = true.',
        ),
    )


def framework_option(command: Command) -> Command:
    """Add the option that says what runs the layout."""
    words = "Framework profile that runs the layout, as `nanotron`.  [the emitted script]"
    return click.option("--framework", metavar="NAME", help=words)(command)


def search_options(command: Command) -> Command:
    """Add the options that steer the search."""
    return _apply(
        command,
        click.option(
            "--top",
            type=int,
            default=DEFAULT_TOP,
            show_default=True,
            metavar="K",
            help="Layouts to show.",
        ),
        time_limit_option,
    )


def time_limit_option(command: Command) -> Command:
    """Add the option that ends a search by the clock."""
    words = "Time for the solver.  [a limit of work, the same on every machine]"
    return click.option("--time-limit", type=float, metavar="SECONDS", help=words)(command)


def output_options(command: Command) -> Command:
    """Add the options that say what is written, and how much is said."""
    return _apply(
        command,
        click.option(
            "--out",
            type=click.Path(path_type=Path),
            metavar="DIR",
            help="Folder for the script, the plan and the tables.",
        ),
        click.option("--force", is_flag=True, help="Replace files in a folder that is not empty."),
        click.option("--json", "as_json", is_flag=True, help="Print plan.json on stdout."),
        verbosity_options("Seconds of each phase, reasons of all refusals"),
    )


def plan_of_log_option(command: Command) -> Command:
    """Add the option that says whose log it is."""
    words = "Plan of a log, plan.json or its folder.  [beside the log, or in the folder above]"
    return click.option("--plan", type=click.Path(path_type=Path), metavar="DIR", help=words)(
        command
    )


def keep_going_option(command: Command) -> Command:
    """Add the option for tables with wrong rows."""
    words = "List rows that are wrong (bad cells, mixed-up units) and price the others."
    return click.option("--keep-going", is_flag=True, help=words)(command)


def _assumptions(
    _context: click.Context, _option: click.Parameter, texts: tuple[str, ...]
) -> tuple[tuple[str, str], ...]:
    """Divide each text at its first equals sign."""
    found = []
    for text in texts:
        column, sign, cell = text.partition("=")
        if not sign:
            raise click.BadParameter(f"{text} is not of the form COLUMN=VALUE")
        found.append((column.strip(), cell.strip()))
    return tuple(found)


def assume_option(command: Command) -> Command:
    """Add the option for cells that a table leaves open."""
    words = "What to take for the empty cells of a column, and for frameworks without a profile."
    return click.option(
        "--assume", multiple=True, callback=_assumptions, metavar="COLUMN=VALUE", help=words
    )(command)


def verbosity_options(verbose: str) -> Callable[[Command], Command]:
    """Make the options that say how much is said, and in what colours.

    Args:
        verbose: What -v adds.
    """
    return lambda command: _apply(
        command,
        click.option("-v", "--verbose", count=True, help=f"{verbose}; -vv: tracebacks."),
        click.option("-q", "--quiet", is_flag=True, help="Nothing on stderr but errors."),
        click.option("--no-color", is_flag=True, help="No colour."),
    )


def request_from_options(options: PlanOptions) -> PlanRequest:
    """Build the request and check all rules that need nothing else.

    Raises:
        RequestError: For the first rule that is broken.
    """
    return check_request(
        PlanRequest(
            model=options["model"],
            gpus=options["gpus"],
            cluster=options["cluster"],
            gpus_per_node=options["gpus_per_node"],
            calibration=text_of(options["calibration"]),
            global_batch_size=options["global_batch_size"],
            seq_len=options["seq_len"],
            dtype=options["dtype"],
            memory_margin=_margin(options["memory_margin"]),
            framework=options.get("framework"),
            fixed=tuple(parse_fix(options["fix"]).items()),
            hints=given_hints(options["hint"], options["hints"]),
            top=options.get("top", DEFAULT_TOP),
            time_limit_s=options.get("time_limit"),
        )
    )


def _margin(text: str | None) -> float | None:
    return None if text is None else parse_margin(text)


def text_of(path: Path | None) -> str | None:
    """Spell a path as requests hold it."""
    return None if path is None else str(path)


def given_hints(texts: tuple[str, ...], file: Path | None) -> tuple[tuple[str, HintValue], ...]:
    """Collect the hints of ``--hint`` and ``--hints``.

    Raises:
        RequestError: One is none, the file cannot be read, or two contradict each other.
    """
    read = read_hints(file) if file is not None else {}
    given = make_hints([*read.items(), *(parse_hint(text) for text in texts)])
    return tuple((hint.place, hint.value) for hint in given)


def _apply(command: Command, *decorators: Callable[[Command], Command]) -> Command:
    """Decorate from the last to the first, so that the help lists them in order."""
    for decorator in reversed(decorators):
        command = decorator(command)
    return command
