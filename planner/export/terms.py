"""What a target makes of a plan: values for its file, and what it cannot express."""

from collections.abc import Mapping
from dataclasses import dataclass

from planner.hardware.nodes import nodes_from_to, numbering_words, smaller_nodes
from planner.hardware.spec import ClusterSpec
from planner.plan.serialize import SavedPlan
from planner.version import VERSION
from planner.vocabulary import PLANNED_AXES


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A part of the plan that a target cannot express, and that changes time or memory."""

    asked: str
    """What the plan says, with its numbers."""
    instead: str
    """What the file says instead."""

    @property
    def words(self) -> str:
        """Both in one line."""
        return f"{self.asked}; instead: {self.instead}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """A plan in the terms of a target."""

    values: Mapping[str, object]
    """What its file says, by the names of the file's template."""
    losses: tuple[Loss, ...] = ()
    """What is lost."""
    notes: tuple[str, ...] = ()
    """What is set elsewhere than in this file, and what differs without changing the layout."""


def header_lines(
    saved: SavedPlan, terms: Terms, *, version: str, run: str, check: str
) -> list[str]:
    """Write what stands first in every file: its origin, how to run and check it, what is lost.

    Args:
        saved: The plan.
        terms: The plan in the target's terms.
        version: Target and version: "torchtitan 0.3.0".
        run: Commands that run it.
        check: Commands that check it.
    """
    lines = [
        f"Written by planner {VERSION} from the plan {saved.digest} for {version}.",
        "",
        f"Model   {saved.model.name}",
        f"Layout  {layout_words(saved)}",
        "",
        "Run it:",
        *(f"    {line}" for line in run.splitlines()),
        "Check it:",
        *(f"    {line}" for line in check.splitlines()),
    ]
    if terms.losses:
        lines += ["", "Not expressed, so that time and memory differ from the plan's:"]
        lines += [f"  - {loss.words}" for loss in terms.losses]
    notes = [*terms.notes, *node_notes(saved.cluster)]
    if notes:
        lines += ["", "Mind:"]
        lines += [f"  - {note}" for note in notes]
    return lines


def layout_words(saved: SavedPlan) -> str:
    """Name the degrees above 1, the schedule and the microbatches."""
    plan = saved.plan
    used = [f"{axis} {getattr(plan.degrees, axis)}" for axis in PLANNED_AXES]
    words = [each for each in used if not each.endswith(" 1")] or ["one device"]
    if plan.degrees.pp > 1:
        words.append(plan.schedule)
    return (
        f"{', '.join(words)}; {plan.num_microbatches} microbatches of {plan.microbatch_size} on "
        f"{plan.degrees.dp} data-parallel ranks"
    )


def torchrun(saved: SavedPlan) -> str:
    """The launcher of the plan's cluster; on several nodes it is started on each of them."""
    cluster = saved.cluster
    if cluster.num_nodes == 1:
        return f"torchrun --standalone --nproc-per-node {cluster.num_gpus}"
    start = f"torchrun --nnodes {cluster.num_nodes} --nproc-per-node {_processes(cluster)}"
    if cluster.is_flat:
        return f"{start} --rdzv-backend c10d --rdzv-endpoint HOST:29500"
    return f"{start} --node-rank RANK --master-addr HOST --master-port 29500"


def _processes(cluster: ClusterSpec) -> str:
    """Processes of a node, which the last one sets to fewer."""
    each = str(cluster.gpus_per_node)
    return f"${{PROCESSES:-{each}}}" if smaller_nodes(cluster) else each


def node_notes(cluster: ClusterSpec) -> list[str]:
    """What to mind where it matters which node has which number."""
    notes = []
    if not cluster.is_flat:
        notes.append(f"nodes are numbered (RANK, from 0 on): {', '.join(numbering_words(cluster))}")
    for first, last, ranks in smaller_nodes(cluster):
        notes.append(f"{nodes_from_to(first, last)}: {ranks} processes, PROCESSES there")
    return notes
