"""What the screen and the HTML summary show, as strings and shares: no layout, no colour."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from planner.cost.breakdown import CostBreakdown, MemoryBreakdown
from planner.hardware.spec import ClusterSpec, MeasuredError
from planner.plan.devices import cluster_of, devices_of_ranks
from planner.plan.record import ModuleRow, PlanRecord
from planner.plan.types import Plan, SearchOutcome
from planner.report.figures import (
    distinct_layouts,
    measured_error,
    num_layouts,
    plan_figures,
    rejections_by_rule,
    safer_choice,
)
from planner.report.words import (
    COMPONENT_WORDS,
    MEMORY_WORDS,
    detail_words,
    difference_words,
    layout_words,
    percent_words,
    unit_words,
)
from planner.units import format_bytes, format_count, format_s, memory_unit
from planner.vocabulary import Dtype, Style

SLOWER_RULE = "slower"
"""Rule of the layouts that the search set aside: legal, but their lower bound is no better."""

MOST_RANKS = 12
"""Pipeline ranks that the memory table shows one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLine:
    """Memory of one pipeline rank."""

    cells: tuple[str, ...]
    """Rank, each component, total."""
    share: float
    """Total over the device's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTable:
    """Memory by pipeline rank and component."""

    unit: str
    """Unit of all cells: "GiB"."""
    capacity: str
    """Memory of the device in that unit, and what of it is kept free."""
    head: tuple[str, ...]
    """Column heads."""
    lines: tuple[MemoryLine, ...]
    """Ranks in order."""
    hidden: str
    """What is said of the ranks that are left out, "" where none is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart:
    """A component of the step time."""

    word: str
    """What it is called."""
    time: str
    """Seconds, formatted."""
    share: float
    """Of the step."""

    @property
    def percent(self) -> str:
        """The share as a whole percentage."""
        return f"{self.share:.0%}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherLayout:
    """A layout that lost, and why."""

    label: str
    """"Runner-up", "No. 3", "Rule of thumb"."""
    layout: str
    """Its degrees."""
    details: str
    """Microbatch and recomputation."""
    memory: str
    """Memory of its fullest rank."""
    step: str
    """Its step time."""
    percent: str
    """How much longer it takes."""
    why: str
    """Which components lose."""


def header_facts(record: PlanRecord) -> tuple[str, ...]:
    """Say what was planned for what, with "default" beside what the user left open."""
    request, plan = record.request, record.outcome.best
    facts = [f"{format_count(record.model.num_parameters)} parameters"]
    if record.model.seq_len is not None:
        facts.append(f"sequence {record.model.seq_len}{_default(request.seq_len)}")
    facts.append(f"global batch {plan.global_batch_size}{_default(request.global_batch_size)}")
    kept = Dtype.FLOAT64 if plan.dtype == Dtype.FLOAT64 else Dtype.FLOAT32
    facts.append(f"{plan.dtype} compute{_default(request.dtype)}, {kept} parameters and AdamW")
    return tuple(facts)


def cluster_words(cluster: ClusterSpec) -> str:
    """Describe the machine: "16 x h100-sxm of 80.0 GiB, 2 nodes of 8".

    Where devices are of several kinds, those of the first ranks come first.
    """
    if cluster.parts:
        return ", then ".join(map(cluster_words, cluster.parts))
    device = cluster.device
    measured = f"; measured on {cluster.measured_on}" if cluster.measured_on else ""
    return (
        f"{cluster.num_gpus} x {device.name} of {format_bytes(device.memory_bytes)}, "
        f"{cluster.nodes_words} (cluster {cluster.name}{measured})"
    )


def headline(record: PlanRecord) -> tuple[str, ...]:
    """Give the recommended plan's rates, and the error to expect of the step time."""
    plan = record.outcome.best
    figures = plan_figures(plan, record.cluster)
    measured = measured_error(plan, record.cluster)
    expected = f" +-{measured.error:.0%}" if measured else " (error not measured)"
    facts = [
        f"step {format_s(figures.step_time_s)}{expected}",
        f"{format_count(figures.tokens_per_s_per_gpu)} {record.model.token_word}/s/GPU",
    ]
    if figures.mfu is not None:
        of_what = f" of the {plan.dtype} peak" if plan.float8 else ""
        facts.append(f"MFU {figures.mfu:.1%}{of_what}")
    return tuple(facts)


def error_words(plan: Plan, cluster: ClusterSpec) -> str:
    """Say how far step times of measured runs of a plan's kind were off, or that none were."""
    known = measured_error(plan, cluster)
    if known is not None:
        return (
            f"Error of the step time: {known.error:.0%} on average over {known.num_runs} measured "
            f"runs on such devices, {_kind_words(known)}"
        )
    if cluster.uncalibrated_error is None:
        return "Error of the step time: not known with constants of your own"
    kinds = "; ".join(_kind_words(error) for error in cluster.step_time_errors)
    measured = (
        f"runs on such devices were {kinds}" if kinds else "there are no runs on such devices"
    )
    return (
        f"Error of the step time: not measured for plans of this kind ({measured}); on GPU "
        f"clusters left out of the fit it is {cluster.uncalibrated_error:.0%} on average over all "
        "kinds"
    )


def _kind_words(error: MeasuredError) -> str:
    """Name a kind of runs.

    For example "data-parallel alone, 8 to 512 GPUs, steps of 700 ms to 100 s, models of matrix
    products and fused attention".
    """
    axes = f"with {' and '.join(error.axes)}" if error.axes else "data-parallel alone"
    least, most = error.least_gpus, error.most_gpus
    gpus = f"{most} GPUs" if least == most else f"{least} to {most} GPUs"
    steps = f"steps of {format_s(error.least_step_s)} to {format_s(error.most_step_s)}"
    return f"{axes}, {gpus}, {steps}, models of {' and '.join(error.work)}"


def memory_table(plan: Plan, cluster: ClusterSpec, *, show_all: bool = False) -> MemoryTable:
    """Tabulate memory by pipeline rank; of many ranks the first, the fullest and the last."""
    devices = devices_of_ranks(plan, cluster)
    # A reserve as large as a GPU's says nothing of a small model.
    held_bytes = max(memory.tensor_bytes for memory in plan.memory_by_rank)
    unit, scale = memory_unit(held_bytes)
    shown = _shown_ranks(plan, show_all=show_all)
    lines = []
    for rank in shown:
        memory = plan.memory_by_rank[rank]
        parts_bytes = [getattr(memory, field.name) for field in fields(MemoryBreakdown)]
        numbers = [f"{value / scale:.1f}" for value in (*parts_bytes, memory.total_bytes)]
        lines.append(
            MemoryLine(
                cells=("all" if plan.degrees.pp == 1 else str(rank), *numbers),
                share=memory.total_bytes / devices[rank].memory_bytes,
            )
        )
    num_hidden = len(plan.memory_by_rank) - len(shown)
    return MemoryTable(
        unit=unit,
        capacity=", ".join(_capacities(plan, cluster, scale)),
        head=("rank", *MEMORY_WORDS.values(), "peak"),
        lines=tuple(lines),
        hidden=f"{num_hidden} ranks that need no more are in memory.csv" if num_hidden else "",
    )


def _capacities(plan: Plan, cluster: ClusterSpec, scale: float) -> list[str]:
    """Memory of each kind of device in a plan's order, and what of it is kept free."""
    kinds = cluster_of(plan, cluster).kinds
    found = [
        f"{kind.device.memory_bytes / scale:.1f}"
        + (f" ({kind.device.name})" if cluster.parts else "")
        for kind in kinds
    ]
    return [*found, kinds[0].device.margin_words] if kinds[0].device.margin_bytes else found


def step_parts(costs: CostBreakdown) -> tuple[StepPart, ...]:
    """Split the step time into its components, leaving out those that take no time."""
    step_time_s = costs.step_time_s
    parts = [(field.name, getattr(costs, field.name)) for field in fields(CostBreakdown)]
    return tuple(
        StepPart(word=COMPONENT_WORDS[name], time=format_s(value), share=value / step_time_s)
        for name, value in parts
        if value > 0
    )


def other_layouts(record: PlanRecord) -> tuple[OtherLayout, ...]:
    """Compare the runner-ups and the rule of thumb with the best plan."""
    outcome = record.outcome
    best = outcome.best
    shown = distinct_layouts(outcome, record.request.top)[1:]
    labels = ["Runner-up", *(f"No. {place}" for place in range(3, len(shown) + 2))]
    lines = [_other_layout(label, plan, best) for label, plan in zip(labels, shown, strict=False)]
    thumb = outcome.rule_of_thumb
    if thumb is not None and thumb == best:
        lines.append(_statement("Rule of thumb", "gives the same plan"))
    elif thumb is not None:
        lines.append(_other_layout("Rule of thumb", thumb, best))
    elif distinct_layouts(outcome, 2)[1:]:
        lines.append(_statement("Rule of thumb", "gives no layout that fits"))
    return tuple(lines)


def split_words(record: PlanRecord) -> tuple[tuple[str, str], ...]:
    """Say for each kind of unit which modules are split over an axis, and why others are whole."""
    by_units: dict[tuple[str, ...], list[ModuleRow]] = {}
    for row in record.module_rows:
        by_units.setdefault(row.units, []).append(row)
    found = []
    for units, rows in by_units.items():
        groups: dict[str, list[str]] = {}
        for row in rows:
            words = _SPLIT_WORDS.get(row.how, f"whole ({row.reason})")
            groups.setdefault(words, []).append(row.module or "its own weights")
        lines = [f"{', '.join(modules)} {words}" for words, modules in groups.items()]
        found.append((unit_words(units), "; ".join(lines)))
    return tuple(found)


_SPLIT_WORDS: dict[str, str] = {
    Style.COLUMN: "by columns",
    Style.ROW: "by rows",
    Style.INNER: "inside its products",
    Style.VOCAB_EMBEDDING: "by vocabulary",
    Style.ON_PART: "on a part of the sequence",
    Style.EXPERTS: "some of its experts on each rank",
}
"""What each way to split a module is called."""


def safer_words(record: PlanRecord) -> str:
    """Name the plan that is as fast as far as one can tell and holds the least, "" for none."""
    plan = safer_choice(record.outcome, record.cluster)
    if plan is None:
        return ""
    best = record.outcome.best
    return (
        f"Safer choice: {layout_words(plan)}, {detail_words(plan)}: its "
        f"{format_s(plan.costs.step_time_s)} are within the error of the fastest, and it holds "
        f"{format_bytes(plan.peak_memory_bytes)}, "
        f"{format_bytes(best.peak_memory_bytes - plan.peak_memory_bytes)} less"
    )


def refused_words(outcome: SearchOutcome) -> str:
    """Count the refused layouts by rule, "" where none was refused or set aside."""
    groups = dict(rejections_by_rule(outcome))
    num_slower = len(groups.pop(SLOWER_RULE, ()))
    num_refused = len(outcome.rejections) - num_slower
    words = f"{num_layouts(outcome)} layouts"
    if num_refused:
        counts = ", ".join(f"{len(group)} {rule}" for rule, group in groups.items())
        words += f", refused {num_refused}: {counts}"
    if num_slower:
        words += f"; set aside {num_slower}: by their lower bound none is faster"
    return f"Considered {words}" if outcome.rejections else ""


def refused_details(outcome: SearchOutcome) -> Mapping[str, Sequence[tuple[str, int]]]:
    """List, by rule, each distinct reason with the number of layouts that it refused.

    What was set aside for its bound is left out: there is one reason for all of it.
    """
    details: dict[str, list[tuple[str, int]]] = {}
    for rule, group in rejections_by_rule(outcome).items():
        if rule == SLOWER_RULE:
            continue
        counts: dict[str, int] = {}
        for rejection in group:
            detail = rejection.why().detail
            counts[detail] = counts.get(detail, 0) + 1
        details[rule] = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return details


def _default(given: object) -> str:
    return " (default)" if given is None else ""


def _shown_ranks(plan: Plan, *, show_all: bool) -> list[int]:
    totals_bytes = [memory.total_bytes for memory in plan.memory_by_rank]
    num_ranks = len(totals_bytes)
    if show_all or num_ranks <= MOST_RANKS:
        return list(range(num_ranks))
    fullest = totals_bytes.index(max(totals_bytes))
    edge = MOST_RANKS // 3
    return sorted({*range(edge), fullest, *range(num_ranks - edge, num_ranks)})


def _other_layout(label: str, plan: Plan, best: Plan) -> OtherLayout:
    return OtherLayout(
        label=label,
        layout=layout_words(plan),
        details=detail_words(plan),
        memory=format_bytes(plan.peak_memory_bytes),
        step=format_s(plan.costs.step_time_s),
        percent=percent_words(plan, best),
        why=difference_words(plan, best),
    )


def _statement(label: str, words: str) -> OtherLayout:
    return OtherLayout(
        label=label, layout=words, details="", memory="", step="", percent="", why=""
    )
