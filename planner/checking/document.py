"""A check as JSON."""

from planner.checking.check import PlanCheck
from planner.plan.serialize import JsonValue, dump_json, encode_fields


def check_json(check: PlanCheck) -> str:
    """Write a check as text; what each stage and collective is off by stands with it."""
    document = encode_fields(check)
    stages: list[JsonValue] = [{**encode_fields(s), "error": s.error} for s in check.stages]
    collectives: list[JsonValue] = [
        {**encode_fields(c), "is_equal": c.is_equal} for c in check.collectives
    ]
    shares: list[JsonValue] = [
        {**encode_fields(s), "time_error": s.time_error, "memory_error": s.memory_error}
        for s in check.shares
    ]
    return dump_json(
        {
            "holds": check.holds,
            **document,
            "stages": stages,
            "collectives": collectives,
            "shares": shares,
        }
    )
