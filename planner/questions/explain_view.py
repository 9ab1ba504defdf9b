"""What the screen shows of an explanation, as strings: no layout, no colour."""

from dataclasses import dataclass, fields

from planner.cost.breakdown import MemoryBreakdown
from planner.plan.devices import devices_of_ranks
from planner.plan.types import Plan
from planner.questions.explain import Explanation, WhyNot
from planner.report.figures import (
    CostDifference,
    cost_differences,
    exposed_comm_s,
    fullest_rank,
)
from planner.report.words import (
    COMPONENT_WORDS,
    MEMORY_WORDS,
    SMALL_DIFFERENCE,
    detail_words,
    difference_words,
    layout_words,
    percent_words,
)
from planner.units import format_bytes, format_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of a table of plans."""

    name: str
    """What was asked."""
    step: str
    """Step time."""
    change: str
    """Against the plan."""
    layout: str
    """The plan found."""


def plan_words(plan: Plan) -> str:
    """Name a plan: its layout and the rest."""
    return f"{layout_words(plan)}; {detail_words(plan)}"


def binding_words(explanation: Explanation) -> tuple[tuple[str, str], ...]:
    """Say what the plan leaves free and what it waits for, by what it is about."""
    base = explanation.base
    plan = base.outcome.best
    rank = fullest_rank(plan, base.cluster)
    fullest, device = plan.memory_by_rank[rank], devices_of_ranks(plan, base.cluster)[rank]
    free_bytes = device.capacity_bytes - fullest.total_bytes
    name, size = _largest(fullest)
    where = "" if plan.degrees.pp == 1 else f" on pipeline rank {rank}"
    costs = plan.costs
    words = [
        (
            "memory",
            f"{format_bytes(fullest.total_bytes)} of {device.capacity_words}{where}: "
            f"{format_bytes(free_bytes)} left, the largest part {name} ({format_bytes(size)})",
        )
    ]
    for label, seconds in (
        ("network", exposed_comm_s(costs)),
        ("bubble", costs.bubble_s),
        ("recompute", costs.recompute_s),
    ):
        if seconds > 0:
            share = seconds / costs.step_time_s
            words.append((label, f"{format_s(seconds)} of the step, {share:.1%}"))
    return tuple(words)


def what_if_rows(explanation: Explanation) -> tuple[Row, ...]:
    """The plan, and the best one on each other machine."""
    best = explanation.base.outcome.best
    own = Row(
        name="as planned",
        step=format_s(best.costs.step_time_s),
        change="",
        layout=plan_words(best),
    )
    rows = [own]
    for what_if in explanation.what_ifs:
        plan, gain = what_if.plan, explanation.gain(what_if)
        changed = plan_words(plan) if plan_words(plan) != own.layout else "the same layout"
        rows.append(
            Row(
                name=what_if.change,
                step=format_s(plan.costs.step_time_s),
                change=f"{-gain:+.1%}" if abs(gain) >= SMALL_DIFFERENCE / 4 else "nothing",
                layout=changed,
            )
        )
    return tuple(rows)


def overtaker_words(explanation: Explanation) -> str:
    """Name the first layout that would overtake the plan, "" where there is no other."""
    other, best = explanation.overtaker, explanation.base.outcome.best
    if other is None:
        return ""
    words = (
        f"{plan_words(other)}: {format_s(other.costs.step_time_s)} "
        f"({percent_words(other, best)}): {difference_words(other, best)}"
    )
    where = [
        what_if.change
        for what_if in explanation.what_ifs
        if (what_if.plan.degrees, what_if.plan.schedule) == (other.degrees, other.schedule)
    ]
    return f"{words}; it is the fastest with {' or '.join(where)}" if where else words


def why_not_words(answer: WhyNot) -> str:
    """Say in a line what the restriction leads to."""
    asked = restriction_words(answer)
    best, plan = answer.best, answer.saved.plan
    if best is None:
        return f"{asked}: {answer.refusal}"
    step, percent = format_s(best.costs.step_time_s), percent_words(best, plan)
    if plan_words(best) == plan_words(plan) and best.stages == plan.stages:
        return f"{asked}: that is the plan itself, {step}"
    return f"{asked}: the best is {plan_words(best)}, {step} ({percent})"


def restriction_words(answer: WhyNot) -> str:
    """Spell a restriction as it was asked."""
    return ",".join(f"{name}={value}" for name, value in answer.restriction)


def why_not_terms(answer: WhyNot) -> tuple[tuple[str, str], ...]:
    """Terms of the step in which the restricted plan loses or gains, the largest first."""
    if answer.best is None:
        return ()
    smallest_s = 1e-4 * answer.saved.plan.costs.step_time_s
    return tuple(
        (COMPONENT_WORDS[each.component], _signed(each))
        for each in cost_differences(answer.best, answer.saved.plan)
        if abs(each.difference_s) > smallest_s
    )


def _signed(difference: CostDifference) -> str:
    sign = "-" if difference.difference_s < 0 else "+"
    return f"{sign}{format_s(abs(difference.difference_s))}"


def _largest(memory: MemoryBreakdown) -> tuple[str, int]:
    sizes = {field.name: getattr(memory, field.name) for field in fields(MemoryBreakdown)}
    name = max(sizes, key=lambda each: sizes[each])
    return MEMORY_WORDS[name], sizes[name]
