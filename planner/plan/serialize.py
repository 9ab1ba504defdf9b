"""Plans as JSON, exact in both directions.

A plan's document holds every field of ``Plan`` and, for readers that do not know this package,
a few derived values (names of the units of a stage, totals). The derived values are recomputed
on reading; a file in which they disagree was edited by hand and is refused.
"""

import hashlib
import json
import types
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from planner.cost.breakdown import CostBreakdown, MemoryBreakdown
from planner.errors import RequestError
from planner.hardware.spec import ClusterSpec
from planner.plan.record import ModelSummary, TrafficRow
from planner.plan.types import Plan, SolverReport, StagePlan
from planner.plan.verify import REPORT, verify_plan, verify_proof
from planner.request import PlanRequest
from planner.strategy.mesh import ParallelDegrees
from planner.vocabulary import Recomputation

SCHEMA_VERSION = 3
"""Version of plan.json; raised when a reader of the old form would misread the new one."""

_Decoded = TypeVar("_Decoded")

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]

_DERIVED: Mapping[type, tuple[str, ...]] = {
    ClusterSpec: ("num_nodes", "profile_hash"),
    CostBreakdown: ("step_time_s",),
    MemoryBreakdown: ("total_bytes",),
    ParallelDegrees: ("world_size",),
    Plan: ("peak_memory_bytes",),
    SolverReport: ("gap",),
}
"""Properties that are written after a type's fields."""

_ADDED: Mapping[type, tuple[str, ...]] = {
    Plan: ("activation_checkpointing", "figures"),
    StagePlan: ("units",),
}
"""Names that readers meet beside a type's own fields because they need more than the value:
``plan_document`` adds them, "figures" (rates on the cluster) is added by the report."""


def dump_json(document: Mapping[str, JsonValue]) -> str:
    """Write a document as text that is the same, byte for byte, for equal documents."""
    return json.dumps(document, indent=2, ensure_ascii=True, allow_nan=False) + "\n"


def encode(value: object) -> JsonValue:
    """Turn dataclasses, mappings, tuples and scalars into JSON values, in their own order.

    Raises:
        TypeError: For a value that has no JSON form.
    """
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value)]
        names.extend(_DERIVED.get(type(value), ()))
        return {name: encode(getattr(value, name)) for name in names}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if isinstance(value, StrEnum):
        return value.value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{type(value).__name__} has no JSON form")


def encode_fields(value: object) -> dict[str, JsonValue]:
    """Like ``encode`` for a dataclass, typed as the object that it becomes."""
    document = encode(value)
    assert isinstance(document, dict)
    return document


def checkpointing_counts(plan: Plan) -> dict[str, int]:
    """Number of blocks under each activation-checkpointing policy, the most frequent first."""
    counts: dict[str, int] = {}
    for stage in plan.stages:
        names = plan.units[stage.first_unit : stage.end_unit]
        for name, policy in zip(names, stage.activation_checkpointing, strict=True):
            if name not in ("prologue", "epilogue", "loss"):
                counts[policy] = counts.get(policy, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))


def checkpointing_word(plan: Plan) -> str:
    """Spell the policy of all blocks in one word: "full", or "full:12+none:4" where they differ."""
    counts = checkpointing_counts(plan)
    if len(counts) <= 1:
        return next(iter(counts), Recomputation.NONE)
    return "+".join(f"{policy}:{count}" for policy, count in counts.items())


def plan_document(plan: Plan) -> dict[str, JsonValue]:
    """Write a plan as a JSON object; ``plan_from_document`` gives the equal plan back."""
    document = encode_fields(plan)
    document["activation_checkpointing"] = checkpointing_word(plan)
    stage_documents = document["stages"]
    assert isinstance(stage_documents, list)
    for stage, stage_document in zip(plan.stages, stage_documents, strict=True):
        assert isinstance(stage_document, dict)
        stage_document["units"] = list(plan.units[stage.first_unit : stage.end_unit])
    return document


def plan_digest(plan: Plan) -> str:
    """Name a plan by what it says: 16 hexadecimal digits, the same for equal plans."""
    text = json.dumps(plan_document(plan), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def plan_from_document(document: JsonValue, *, path: str = "plan") -> Plan:
    """Read a plan from the object that ``plan_document`` wrote.

    Args:
        document: Parsed JSON.
        path: How to call the document in messages: "plans/run1/plan.json: best".

    Returns:
        The plan.

    Raises:
        RequestError: For missing, unknown or ill-typed fields, and for derived values that do
            not follow from the fields.
    """
    plan = _decode(Plan, document, path)
    assert isinstance(plan, Plan)
    try:
        again = plan_document(plan)
    except ValueError as error:
        raise RequestError(
            f"{path} is no plan: a stage names another number of units than of "
            "activation_checkpointing policies",
            hint="Write the file again with `plan`.",
        ) from error
    _check_same(document, again, path)
    return plan


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPlan:
    """What a plan.json holds of its recommended plan."""

    file: Path
    """The plan.json."""
    digest: str
    """Names the recommended plan, as ``plan_digest`` does."""
    planner_version: str
    """Version that wrote it."""
    plan: Plan
    """The recommended plan."""
    cluster: ClusterSpec
    """What it was planned for."""
    model: ModelSummary
    """What was planned."""
    traffic: tuple[TrafficRow, ...]
    """Its collectives."""
    request: PlanRequest
    """What was asked."""


def load_plan(path: str | Path) -> Plan:
    """Read the recommended plan from a plan.json, or from the folder that holds one.

    Raises:
        RequestError: Where there is no such file, or it is not a plan of this version.
        VerificationError: The plan breaks a rule, or what the file says of its proof does.
    """
    return load_saved_plan(path).plan


def load_saved_plan(path: str | Path) -> SavedPlan:
    """Read the recommended plan with its model and cluster.

    Raises:
        PlannerError: As ``load_plan``.
    """
    file = Path(path)
    file = file / "plan.json" if file.is_dir() else file
    document = _plan_document_of(file)
    plan = plan_from_document(document.get("best"), path=f"{file}: best")
    cluster = _decode_exactly(ClusterSpec, document.get("cluster"), f"{file}: cluster")
    solver = _decode_exactly(SolverReport, document.get("solver"), f"{file}: solver")
    hint = f"Write the file again with `plan`; if it was not edited, {REPORT}"
    verify_plan(plan, cluster, name=f"{file}: best", hint=hint)
    verify_proof(solver, plan, name=f"{file}: solver", hint=hint)
    return SavedPlan(
        file=file,
        digest=plan_digest(plan),
        planner_version=str(document.get("planner_version")),
        plan=plan,
        cluster=cluster,
        model=_decode_exactly(ModelSummary, document.get("model"), f"{file}: model"),
        traffic=_traffic(document.get("traffic"), f"{file}: traffic"),
        request=_request(document.get("request"), f"{file}: request"),
    )


def _traffic(value: JsonValue, path: str) -> tuple[TrafficRow, ...]:
    rows = _decode(tuple[TrafficRow, ...], value, path)
    assert isinstance(rows, tuple)
    return rows


def _request(value: JsonValue, path: str) -> PlanRequest:
    """Read a request, whose pairs are objects in the file."""
    if not isinstance(value, dict):
        raise _wrong_type(path, "an object", value)
    names = {field.name for field in fields(PlanRequest)}
    fixed, hints = value.get("fixed"), value.get("hints")
    if set(value) != names or not isinstance(fixed, dict) or not isinstance(hints, dict):
        raise _wrong_type(path, f"an object of {', '.join(sorted(names))}", value)
    given: Any = {**value, "fixed": tuple(fixed.items()), "hints": tuple(hints.items())}
    return PlanRequest(**given)


def _plan_document_of(file: Path) -> dict[str, JsonValue]:
    """Read a plan.json of this version.

    Raises:
        RequestError: It is none.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(
            f"cannot read the plan {file}: {error.strerror}",
            hint="Give a plan.json that `plan MODEL --gpus N --out DIR` wrote, or its folder.",
        ) from error
    try:
        document = json.loads(text)
    except ValueError as error:
        raise RequestError(
            f"{file} is not JSON: {error}",
            hint="Give a plan.json that `plan MODEL --gpus N --out DIR` wrote.",
        ) from error
    version = document.get("schema_version") if isinstance(document, dict) else None
    if version != SCHEMA_VERSION:
        raise RequestError(
            f"{file} has schema_version {version!r}, this version reads {SCHEMA_VERSION}",
            hint="Write the file again with `plan`.",
        )
    assert isinstance(document, dict)
    return document


def _decode_exactly(kind: type[_Decoded], value: JsonValue, path: str) -> _Decoded:
    """Read a dataclass and make sure that its derived values follow from its fields."""
    found = _decode(kind, value, path)
    assert isinstance(found, kind)
    _check_same(value, encode(found), path)
    return found


def _decode(kind: object, value: JsonValue, path: str) -> object:
    """Read one value of an annotated type."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (kind,) = (option for option in get_args(kind) if option is not types.NoneType)
        return _decode(kind, value, path)
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong_type(path, "a list", value)
        (item_kind, _) = get_args(kind)
        return tuple(_decode(item_kind, item, f"{path}[{i}]") for i, item in enumerate(value))
    if origin is Mapping:
        if not isinstance(value, dict):
            raise _wrong_type(path, "an object", value)
        (_, item_kind) = get_args(kind)
        return {key: _decode(item_kind, item, f"{path}.{key}") for key, item in value.items()}
    if origin is Literal:
        if value not in get_args(kind):
            raise _wrong_type(path, f"one of {', '.join(get_args(kind))}", value)
        return value
    assert isinstance(kind, type)
    if is_dataclass(kind):
        return _decode_fields(kind, value, path)
    return _decode_scalar(kind, value, path)


def _decode_scalar(kind: type, value: JsonValue, path: str) -> object:
    """Read a bool, int, float or str; an int may stand for a float, a bool for nothing else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float and is_number:
        return float(value)  # type: ignore[arg-type]
    if issubclass(kind, StrEnum) and value in list(kind):
        return kind(value)
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    raise _wrong_type(path, kind.__name__, value)


def _decode_fields(kind: type, value: JsonValue, path: str) -> object:
    """Read a dataclass: all its fields, and nothing unknown beside the derived names."""
    if not isinstance(value, dict):
        raise _wrong_type(path, "an object", value)
    hints = get_type_hints(kind)
    derived = {*_DERIVED.get(kind, ()), *_ADDED.get(kind, ())}
    for name in value:
        if name not in hints and name not in derived:
            near = get_close_matches(name, hints, n=1)
            raise RequestError(
                f"{path} has an unknown field {name!r}",
                hint=f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(hints)}.",
            )
    for name in hints:
        if name not in value:
            raise RequestError(
                f"{path} lacks the field {name!r}: an older version wrote the file, or someone "
                "edited it",
                hint="Plan again: the same `plan MODEL --gpus N --out DIR`, with `--force`.",
            )
    return kind(**{name: _decode(hints[name], value[name], f"{path}.{name}") for name in hints})


def _wrong_type(path: str, wanted: str, value: JsonValue) -> RequestError:
    return RequestError(
        f"{path} must be {wanted}, not {json.dumps(value)[:40]}",
        hint="Write the file again with `plan`.",
    )


def _check_same(given: JsonValue, derived: JsonValue, path: str) -> None:
    """Refuse a document that differs from what its own fields give."""
    difference = _first_difference(given, derived, path)
    if difference:
        raise RequestError(
            f"{difference}, which does not follow from the rest of the file: it was edited",
            hint="Write the file again with `plan`, with `--fix` for what should differ.",
        )


def _first_difference(given: JsonValue, derived: JsonValue, path: str) -> str:
    """Name the first place in which two documents differ, "" where they are equal."""
    if isinstance(given, dict) and isinstance(derived, dict):
        for name in derived:
            if name not in given:
                return f"{path} lacks {name!r}"
            found = _first_difference(given[name], derived[name], f"{path}.{name}")
            if found:
                return found
        return ""
    if isinstance(given, list) and isinstance(derived, list) and len(given) == len(derived):
        pairs = enumerate(zip(given, derived, strict=True))
        found_all = (_first_difference(a, b, f"{path}[{i}]") for i, (a, b) in pairs)
        return next((found for found in found_all if found), "")
    return "" if given == derived else f"{path} is {json.dumps(given)[:60]}"
