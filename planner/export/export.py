"""A plan as the file of another framework."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from planner.errors import CodegenError, RequestError
from planner.export import accelerate, deepspeed, megatron, torchtitan
from planner.export.terms import Loss, Terms
from planner.plan.serialize import SavedPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A framework that a plan can be written for."""

    version: str
    """Framework and version that its file is for."""
    file_name: str
    """How its file is called in the file itself."""
    express: Callable[[SavedPlan], Terms]
    """Puts a plan in its terms."""
    text: Callable[[SavedPlan, Terms], str]
    """Writes its file."""


TARGETS: Mapping[str, Target] = {
    module.NAME: Target(
        version=module.VERSION,
        file_name=module.FILE_NAME,
        express=module.express,
        text=module.text,
    )
    for module in (torchtitan, megatron, deepspeed, accelerate)
}
"""Targets by the name that ``plan export --to`` takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A written file."""

    text: str
    """Its content."""
    target: Target
    """What it is for."""
    losses: tuple[Loss, ...]
    """What of the plan it does not say."""


def export_plan(saved: SavedPlan, name: str, *, allow_lossy: bool = False) -> Exported:
    """Write a plan for another framework.

    Args:
        saved: The plan.
        name: One of ``TARGETS``.
        allow_lossy: Write the file although a part of the plan is lost that changes time or
            memory.

    Raises:
        RequestError: There is no such target.
        CodegenError: The target cannot express the plan, or a part of it without ``allow_lossy``.
    """
    if name not in TARGETS:
        raise RequestError(f"--to {name}: no such target", hint=f"Known: {', '.join(TARGETS)}.")
    target = TARGETS[name]
    terms = target.express(saved)
    if terms.losses and not allow_lossy:
        lines = "\n".join(f"  - {loss.words}" for loss in terms.losses)
        raise CodegenError(
            f"{saved.file}: {target.version} cannot express all of the plan:\n{lines}",
            hint="Write it without these with --allow-lossy: time and memory then differ.",
        )
    return Exported(text=target.text(saved, terms), target=target, losses=terms.losses)
