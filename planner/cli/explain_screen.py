"""An explanation as a person reads it."""

import sys

from rich.console import RenderableType
from rich.text import Text

from planner.cli.option_types import ExplainOptions
from planner.cli.pieces import draw_bar, figures, grid, stack, titled
from planner.cli.terminal import ProgressLine, answer_console, message_console, write_answer
from planner.plan.serialize import SavedPlan, load_saved_plan
from planner.progress import ProgressCallback
from planner.questions.document import explanation_json, why_not_json
from planner.questions.explain import Explanation, WhyNot, explain_plan, why_not
from planner.questions.explain_view import (
    binding_words,
    overtaker_words,
    plan_words,
    what_if_rows,
    why_not_terms,
    why_not_words,
)
from planner.report.view import cluster_words, step_parts
from planner.report.words import solver_words
from planner.request_rules import parse_fix
from planner.units import format_s

_BAR_CELLS = 20


def run_explain(options: ExplainOptions) -> None:
    """Answer, and print the answer.

    Raises:
        PlannerError: As the layers below.
    """
    saved = load_saved_plan(options["plan"])
    restrictions = [parse_fix(text.split(",")) for text in options["why_not"]]
    messages = message_console(no_color=options["no_color"])
    verbose, quiet = options["verbose"] > 0, options["quiet"]
    with ProgressLine(messages, verbose=verbose, quiet=quiet) as progress:
        text, sections = _answer(saved, restrictions, progress)
    if options["as_json"]:
        sys.stdout.write(text)
        return
    write_answer(answer_console(no_color=options["no_color"]), sections)


def _answer(
    saved: SavedPlan, restrictions: list[dict[str, str]], progress: ProgressCallback
) -> tuple[str, list[RenderableType]]:
    """Give the answer as JSON and as what is printed."""
    if not restrictions:
        explanation = explain_plan(saved, progress=progress)
        return explanation_json(explanation), _explanation(explanation)
    answers = tuple(why_not(saved, each, progress=progress) for each in restrictions)
    return why_not_json(answers), [_head(saved), *map(_why_not, answers)]


def _head(saved: SavedPlan) -> RenderableType:
    table = grid()
    table.add_row(Text("Model", "bold"), Text(saved.model.name))
    table.add_row(Text("Cluster", "bold"), Text(cluster_words(saved.cluster)))
    step = format_s(saved.plan.costs.step_time_s)
    table.add_row(Text("Plan", "bold"), Text(f"{plan_words(saved.plan)}: {step}", "bold green"))
    return table


def _explanation(explanation: Explanation) -> list[RenderableType]:
    best = explanation.base.outcome.best
    sections: list[RenderableType] = [_head(explanation.saved)]
    if explanation.notes:
        sections.append(stack(*(Text(note, "yellow") for note in explanation.notes)))
    time = titled(f"Where the {format_s(best.costs.step_time_s)} of a step go", heads=False)
    for part in step_parts(best.costs):
        bar = Text(draw_bar(part.share, _BAR_CELLS), "cyan")
        time.add_row(part.word, part.time, bar.append(f"{part.percent:>5}", "default"))
    binds = titled("What it uses", heads=False)
    for name, words in binding_words(explanation):
        binds.add_row(Text(name), Text(words))
    sections += [time, binds, _what_ifs(explanation)]
    if overtaker := overtaker_words(explanation):
        sections.append(stack(Text("First to overtake it", "bold"), Text(overtaker)))
    sections.append(stack(Text(f"Solver: {solver_words(explanation.base.outcome.solver)}")))
    return sections


def _what_ifs(explanation: Explanation) -> RenderableType:
    rows = [(row.name, row.step, row.change, row.layout) for row in what_if_rows(explanation)]
    return figures(
        "What more would buy, each solved again",
        ("", "step", "change", "plan"),
        rows,
        words=("", "plan"),
        folded=("plan",),
    )


def _why_not(answer: WhyNot) -> RenderableType:
    table = titled(None, heads=False)
    for term, difference in why_not_terms(answer):
        table.add_row(Text(f"  {term}"), Text(difference))
    notes = (Text(note, "yellow") for note in answer.notes)
    return stack(Text(f"Why not {why_not_words(answer)}"), table, *notes)
