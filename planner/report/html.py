"""The summary of a run as an HTML fragment for notebooks."""

from planner.plan.record import PlanRecord
from planner.rendering import render
from planner.report.view import (
    cluster_words,
    error_words,
    header_facts,
    headline,
    memory_table,
    other_layouts,
    refused_words,
    safer_words,
    step_parts,
)
from planner.report.words import (
    NOT_MODELLED,
    detail_words,
    explanation,
    layout_words,
    solver_words,
)


def summary_html(record: PlanRecord) -> str:
    """Render a run as one fragment: inline CSS, every value escaped, nothing fetched."""
    best = record.outcome.best
    return render(
        "report/summary.html.j2",
        model=record.model,
        facts=(*header_facts(record), cluster_words(record.cluster)),
        layout=layout_words(best),
        details=detail_words(best),
        headline=headline(record),
        explanation=explanation(best, record.cluster),
        memory=memory_table(best, record.cluster),
        step=step_parts(best.costs),
        others=[
            (
                item.label,
                item.layout,
                item.details,
                item.memory,
                item.step,
                item.percent,
                item.why,
            )
            for item in other_layouts(record)
        ],
        safer=safer_words(record),
        refused=refused_words(record.outcome),
        solver=solver_words(record.outcome.solver),
        warnings=record.warnings,
        expected_error=error_words(record.outcome.best, record.cluster),
        not_modelled=NOT_MODELLED,
    )
