"""The content of plan.json, which is also what ``--json`` prints."""

from planner.errors import InfeasiblePlanError
from planner.plan.record import PlanRecord
from planner.plan.serialize import (
    SCHEMA_VERSION,
    JsonValue,
    dump_json,
    encode,
    encode_fields,
    plan_document,
)
from planner.plan.types import Plan, Rejection
from planner.plan.verify import verify_outcome
from planner.report.figures import num_layouts, plan_figures, rejections_by_rule, safer_choice
from planner.version import VERSION

MOST_DETAILS = 20
"""Reasons that are listed for each rule."""


def plan_json(record: PlanRecord) -> str:
    """Write a run as the text of plan.json; equal runs give equal bytes.

    Wall times and output paths are left out, so that the text depends on the request, the
    model, the profile and the version only.

    Raises:
        VerificationError: A plan breaks a rule, so that nothing is to be written.
    """
    outcome = record.outcome
    if record.request.framework is None:
        verify_outcome(outcome, record.cluster)
    return dump_json(
        {
            "schema_version": SCHEMA_VERSION,
            "planner_version": VERSION,
            "request": _request_document(record),
            "model": encode(record.model),
            "cluster": encode(record.cluster),
            "best": _priced_document(outcome.best, record),
            "runner_up": _optional(outcome.runner_up, record),
            "tensor_parallel_modules": encode(record.module_rows),
            "traffic": encode(record.traffic_rows),
            "safer_choice": _optional(safer_choice(outcome, record.cluster), record),
            "rule_of_thumb": _optional(outcome.rule_of_thumb, record),
            "num_layouts": num_layouts(outcome),
            "rejected_by_rule": _rejections_document(record),
            "solver": encode(outcome.solver),
            "warnings": list(record.warnings),
        }
    )


def infeasible_json(error: InfeasiblePlanError) -> str:
    """Write the answer to a request that nothing satisfies: what is missing, stage by stage."""
    shortfall = error.shortfall_bytes_by_stage
    return dump_json(
        {
            "schema_version": SCHEMA_VERSION,
            "planner_version": VERSION,
            "best": None,
            "error": {
                "exit_code": error.exit_code,
                "message": error.args[0],
                "hint": error.hint,
                "shortfall_bytes_by_stage": {
                    str(stage): shortfall[stage] for stage in sorted(shortfall)
                },
            },
        }
    )


def _request_document(record: PlanRecord) -> dict[str, JsonValue]:
    """As given: null where the planner decided; what it decided is in ``best``."""
    document = encode_fields(record.request)
    document["fixed"] = dict(record.request.fixed)
    document["hints"] = dict(record.request.hints)
    return document


def _optional(plan: Plan | None, record: PlanRecord) -> JsonValue:
    return None if plan is None else _priced_document(plan, record)


def _priced_document(plan: Plan, record: PlanRecord) -> dict[str, JsonValue]:
    return {**plan_document(plan), "figures": encode(plan_figures(plan, record.cluster))}


def _rejections_document(record: PlanRecord) -> dict[str, JsonValue]:
    return {
        rule: {"count": len(group), "details": _distinct_details(group)}
        for rule, group in rejections_by_rule(record.outcome).items()
    }


def _distinct_details(group: tuple[Rejection, ...]) -> list[JsonValue]:
    """List the first reasons, each once; report.csv has every layout."""
    distinct: dict[JsonValue, None] = {}
    for rejection in group:
        if len(distinct) == MOST_DETAILS:
            break
        distinct[rejection.why().detail] = None
    return list(distinct)
