"""Sweeps and explanations as JSON; equal answers give equal bytes."""

from planner.plan.serialize import JsonValue, dump_json, encode, plan_document
from planner.plan.types import Plan
from planner.questions.explain import Explanation, WhyNot
from planner.questions.sweep import Sweep
from planner.questions.sweep_table import sweep_frame
from planner.report.figures import cost_differences
from planner.version import VERSION

QUESTIONS_SCHEMA_VERSION = 1
"""Version of these documents; raised when a reader of the old form would misread the new one."""


def sweep_json(sweep: Sweep) -> str:
    """Write every point: the columns of the table, null where there is no value."""
    frame = sweep_frame(sweep).astype(object)
    points = frame.where(frame.notna(), None).to_dict("records")
    request = sweep.request
    return dump_json(
        {
            **_head(),
            "objective": request.objective,
            "within": request.within,
            "tokens": request.tokens,
            "prices_per_gpu_hour": dict(request.prices_per_gpu_hour),
            "interrupted": sweep.interrupted,
            "points": [{str(name): value for name, value in row.items()} for row in points],
        }
    )


def explanation_json(explanation: Explanation) -> str:
    """Write a plan's explanation, each plan whole."""
    base = explanation.base.outcome
    return dump_json(
        {
            **_head(),
            "plan": explanation.saved.digest,
            "best": plan_document(base.best),
            "solver": encode(base.solver),
            "overtaker": _optional(explanation.overtaker),
            "what_ifs": [
                {
                    "change": what_if.change,
                    "gain": explanation.gain(what_if),
                    "best": plan_document(what_if.plan),
                }
                for what_if in explanation.what_ifs
            ],
            "notes": list(explanation.notes),
        }
    )


def why_not_json(answers: tuple[WhyNot, ...]) -> str:
    """Write what each restriction leads to."""
    return dump_json({**_head(), "why_not": [_why_not(answer) for answer in answers]})


def _why_not(answer: WhyNot) -> dict[str, JsonValue]:
    best, plan = answer.best, answer.saved.plan
    return {
        "plan": answer.saved.digest,
        "restriction": dict(answer.restriction),
        "best": _optional(best),
        "difference_s": {
            each.component: each.difference_s
            for each in (cost_differences(best, plan) if best else ())
        },
        "refusal": None if answer.refusal is None else str(answer.refusal),
        "notes": list(answer.notes),
    }


def _optional(plan: Plan | None) -> JsonValue:
    return None if plan is None else plan_document(plan)


def _head() -> dict[str, JsonValue]:
    return {"schema_version": QUESTIONS_SCHEMA_VERSION, "planner_version": VERSION}
