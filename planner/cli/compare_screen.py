"""A comparison as a person reads it."""

import sys

from rich.console import RenderableType
from rich.text import Text

from planner.cli.option_types import CompareOptions
from planner.cli.pieces import figures, stack
from planner.cli.terminal import answer_console, write_answer
from planner.errors import RequestError
from planner.report.words import COMPONENT_WORDS, MEMORY_WORDS, detail_words, layout_words
from planner.units import format_bytes, format_s
from planner.validation.compare import (
    PEAK_PART,
    STEP_PART,
    Comparison,
    Part,
    compare_measured,
    compare_plans,
)

_WORDS = {
    STEP_PART: "step",
    **COMPONENT_WORDS,
    "update_s": "norm, clipping, optimizer",
    "host_s": "host, once a step",
    PEAK_PART: "peak memory",
    **MEMORY_WORDS,
}


def run_compare(options: CompareOptions) -> None:
    """Compare and print.

    Raises:
        PlannerError: As the layers below; also where nothing, or two things, are given to compare
            with.
    """
    other, measured = options["other"], options["measured"]
    if (other is None) == (measured is None):
        raise RequestError(
            f"plan compare {options['plan']}: "
            + (
                "there is nothing to compare with"
                if other is None
                else "two things to compare with"
            ),
            hint="Name another plan, or a log or trace with --measured.",
        )
    if other is not None:
        comparison = compare_plans(options["plan"], other)
    else:
        assert measured is not None
        comparison = compare_measured(options["plan"], measured)
    if options["as_json"]:
        sys.stdout.write(comparison.to_json())
        return
    write_answer(answer_console(no_color=options["no_color"]), [_table(comparison)])


def _table(comparison: Comparison) -> RenderableType:
    plan, other = comparison.plan.plan, comparison.other
    head = ("", "planned", "measured", "off")
    title = f"{layout_words(plan)}, {detail_words(plan)}"
    if other is not None:
        head = ("", "A", "B", "B - A")
        title = f"A: {title}\nB: {layout_words(other.plan)}, {detail_words(other.plan)}"
    rows = [
        (_WORDS[part.name], _number(part, part.first), _number(part, part.second), _off(part))
        for part in comparison.parts
        if part.first or part.second
    ]
    table = figures(title, head, rows, words=("",), folded=())
    return stack(table, *(Text(note, "dim") for note in comparison.notes))


def _number(part: Part, value: float | None) -> str:
    if value is None:
        return "-"
    return format_bytes(round(value)) if part.name.endswith("_bytes") else format_s(value)


def _off(part: Part) -> str:
    """How much more the second is: of wholes as a share, of parts in their unit."""
    if part.first is None or part.second is None:
        return ""
    if part.name in (STEP_PART, PEAK_PART) and part.first:
        return f"{part.second / part.first - 1:+.1%}"
    difference = part.second - part.first
    return f"{'-' if difference < 0 else '+'}{_number(part, abs(difference))}"
