"""What a plan is bound by, what would buy speed, and why it is not another layout.

Nothing here is estimated from the plan: each answer is a search of its own.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

from planner.errors import PlannerError, RequestError
from planner.fix_rules import FIX_NAMES
from planner.hardware.mixed import joined
from planner.hardware.spec import ClusterSpec, DeviceSpec
from planner.plan.devices import cluster_of
from planner.plan.record import PlanRecord
from planner.plan.serialize import SavedPlan
from planner.plan.types import Plan
from planner.planning import Machine, TracedModel
from planner.progress import PhaseEvent, ProgressCallback
from planner.questions.sweep import REFUSALS
from planner.request import PlanRequest
from planner.request_rules import check_request, fix_warnings, resolve_margin
from planner.strategy.rules import UNASKED
from planner.units import GIB

MORE_BANDWIDTH = 2.0
"""Factor on the bandwidth of a link in what is asked about it."""

MORE_MEMORY_BYTES = GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The plan on another machine, or with what is not tried unasked."""

    change: str
    """What is other: "1 GiB more memory", "twice the bandwidth of NVLink 4", "compile=true"."""
    plan: Plan
    """The best plan then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """A plan and what it depends on."""

    saved: SavedPlan
    """The plan that was asked about."""
    base: PlanRecord
    """Its request solved again: what the others are compared with."""
    what_ifs: tuple[WhatIf, ...]
    """The same request on other machines and with other settings, each solved."""
    notes: tuple[str, ...]
    """Where the plan is not what solving again finds."""

    @property
    def overtaker(self) -> Plan | None:
        """The fastest plan with other degrees or another schedule: the first to overtake it."""
        return self.base.outcome.runner_up

    def gain(self, what_if: WhatIf) -> float:
        """Share of the step that a change saves."""
        return 1.0 - what_if.plan.costs.step_time_s / self.base.outcome.best.costs.step_time_s


@dataclass(frozen=True, slots=True, kw_only=True)
class WhyNot:
    """A plan beside the best one under a restriction."""

    saved: SavedPlan
    """The plan that was asked about."""
    restriction: tuple[tuple[str, str], ...]
    """Settings as of ``--fix``."""
    record: PlanRecord | None
    """What the search finds under them."""
    refusal: PlannerError | None
    """The rule that they break."""
    notes: tuple[str, ...]
    """Where the two are not of the same constants."""

    @property
    def best(self) -> Plan | None:
        """The best plan under the restriction."""
        return None if self.record is None else self.record.outcome.best


def explain_plan(saved: SavedPlan, *, progress: ProgressCallback | None = None) -> Explanation:
    """Solve a plan's request again: as it is, on machines with more, and with more fixed.

    Args:
        saved: The plan.
        progress: Called when a search begins and ends.

    Raises:
        PlannerError: Its model or profile cannot be read, or its request no longer has a plan.
    """
    request = _request(saved, {})
    machine = Machine.of(request)
    traced = TracedModel.of_saved(saved, progress=progress)
    changes = list(_changes(request, machine))
    searches = len(changes) + 1
    _tell(progress, "as planned", 0.0)
    base = traced.record(request, machine=machine)
    what_ifs = []
    for number, (words, asked, changed) in enumerate(changes, start=1):
        _tell(progress, words, number / searches)
        with suppress(*REFUSALS):  # of a setting that does not go with the rest
            best = traced.record(asked, machine=changed).outcome.best
            what_ifs.append(WhatIf(change=words, plan=best))
    return Explanation(
        saved=saved,
        base=base,
        what_ifs=tuple(what_ifs),
        notes=(*_changed_notes(saved, machine), *_other_best_notes(saved, base)),
    )


def why_not(
    saved: SavedPlan, restriction: Mapping[str, str], *, progress: ProgressCallback | None = None
) -> WhyNot:
    """Search under a restriction, which takes the place of what the request fixes.

    Args:
        saved: The plan.
        restriction: Settings as of ``--fix``.
        progress: Called when the search begins and ends.

    Raises:
        RequestError: A setting has no such name or value.
        PlannerError: The plan's model or profile cannot be read.
    """
    _check_names(restriction)
    machine = Machine.of(_request(saved, {}))
    traced = TracedModel.of_saved(saved, progress=progress)
    record, refusal = None, None
    notes = list(_changed_notes(saved, machine))
    try:
        request = _request(saved, restriction)
        record = traced.record(request, machine=machine, progress=progress)
        notes.extend(fix_warnings(request, record.outcome.best))
    except REFUSALS as error:
        refusal = error
    return WhyNot(
        saved=saved,
        restriction=tuple(restriction.items()),
        record=record,
        refusal=refusal,
        notes=tuple(notes),
    )


def _check_names(restriction: Mapping[str, str]) -> None:
    unknown = sorted(set(restriction).difference(FIX_NAMES))
    if unknown or not restriction:
        raise RequestError(
            f"--why-not {','.join(unknown)}: nothing is named so",
            hint=f"For example --why-not tp=8,pp=2. Names: {', '.join(FIX_NAMES)}.",
        )


def _request(saved: SavedPlan, restriction: Mapping[str, str]) -> PlanRequest:
    request = saved.request
    if request.framework is not None:
        raise RequestError(
            f"{saved.file}: it is an estimate of what {request.framework} runs, of which there is "
            "no search",
            hint="Plan the model without --framework, and ask about that plan.",
        )
    fixed = {**dict(request.fixed), **restriction}
    return check_request(replace(request, fixed=tuple(fixed.items())))


def _changes(request: PlanRequest, machine: Machine) -> Iterator[tuple[str, PlanRequest, Machine]]:
    """Machines with more of one thing, then settings that are not tried unasked."""
    for words, changed in _machines(request, machine):
        yield words, request, changed
    for name in UNASKED:
        if name not in dict(request.fixed):
            fixed = (*request.fixed, (name, "true"))
            yield f"{name}=true", replace(request, fixed=fixed), machine


def _machines(request: PlanRequest, machine: Machine) -> Iterator[tuple[str, Machine]]:
    """Machines with more memory, then with more of the bandwidth of each link that is used."""
    cluster = machine.cluster
    larger = replace(machine, cluster=cluster.with_devices(_with_more_memory))
    yield "1 GiB more memory", larger.with_margin(resolve_margin(request))
    for words, wider in _with_wider_links(cluster):
        yield words, replace(machine, cluster=wider)


def _with_more_memory(device: DeviceSpec) -> DeviceSpec:
    return replace(device, memory_bytes=device.memory_bytes + MORE_MEMORY_BYTES)


def _with_wider_links(cluster: ClusterSpec) -> Iterator[tuple[str, ClusterSpec]]:
    """Clusters with twice the bandwidth of one link that is used; of parts those of each."""
    for place, part in enumerate(cluster.parts):
        for words, wider in _with_wider_links(part):
            parts = (*cluster.parts[:place], wider, *cluster.parts[place + 1 :])
            yield f"{words} of {part.name}", joined(parts)
    if cluster.parts:
        return
    reached = 1
    for level, link in enumerate(cluster.links):
        if reached >= cluster.num_gpus:
            break
        faster = replace(link, bandwidth_bytes_per_s=MORE_BANDWIDTH * link.bandwidth_bytes_per_s)
        links = (*cluster.links[:level], faster, *cluster.links[level + 1 :])
        words = f"twice the bandwidth of {link.name}"
        yield words, replace(cluster, links=links)
        reached = link.ranks or cluster.num_gpus


def _changed_notes(saved: SavedPlan, machine: Machine) -> Iterator[str]:
    if cluster_of(saved.plan, machine.cluster).profile_hash != saved.cluster.profile_hash:
        yield (
            f"the profile {saved.request.cluster} has other numbers than when {saved.file} was "
            "written: what is solved here is of the new ones"
        )


def _other_best_notes(saved: SavedPlan, base: PlanRecord) -> Iterator[str]:
    ours, best = saved.plan.costs.step_time_s, base.outcome.best.costs.step_time_s
    if abs(best / ours - 1.0) > max(1e-6, base.outcome.solver.gap):
        yield (
            f"{saved.file} is not what its request leads to now (an estimate, or of other "
            f"constants): its step takes {ours:.4g} s, the best one's {best:.4g} s"
        )


def _tell(progress: ProgressCallback | None, detail: str, fraction: float) -> None:
    if progress is not None:
        event = PhaseEvent(phase="search", elapsed_s=None, fraction=fraction, detail=detail)
        progress(event)
