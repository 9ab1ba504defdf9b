"""Plans in words: the same terms on screen, in HTML and in messages."""

from collections.abc import Iterator
from itertools import groupby

from planner.hardware.spec import ClusterSpec
from planner.hardware.topology import units_of
from planner.plan.devices import devices_of_ranks
from planner.plan.serialize import checkpointing_counts
from planner.plan.types import Plan, SolverReport
from planner.report.figures import cost_differences
from planner.strategy.placement import axis_group
from planner.units import format_bytes, format_s
from planner.vocabulary import V_SCHEDULES, ZERO_BUBBLE_SCHEDULES, Axis, Recomputation

COMPONENT_WORDS = {
    "compute_s": "forward and backward",
    "recompute_s": "recomputation",
    "tp_comm_s": "exposed tensor-parallel collectives",
    "cp_comm_s": "exposed context-parallel collectives",
    "ep_comm_s": "exposed expert-parallel exchanges",
    "pp_comm_s": "exposed pipeline transfers",
    "dp_comm_s": "exposed parameter and gradient traffic",
    "bubble_s": "pipeline bubble",
    "optimizer_s": "optimizer and fixed work of a step",
}
"""What each field of ``CostBreakdown`` is called."""

MEMORY_WORDS = {
    "params_bytes": "params",
    "grads_bytes": "grads",
    "optimizer_bytes": "optim",
    "activations_bytes": "activ",
    "buffers_bytes": "buffers",
    "temporary_bytes": "temp",
    "reserve_bytes": "reserve",
}
"""Column heads of the fields of ``MemoryBreakdown``."""

NOT_MODELLED = (
    "host RAM beyond what is offloaded, data loading, checkpoint writing, contention with other "
    "jobs on the network"
)

SMALL_DIFFERENCE = 0.002
"""Relative difference in step time below which two plans count as equally fast."""


def layout_words(plan: Plan) -> str:
    """Name a layout by its degrees above 1, in TorchTitan's words: "dp_shard 4, tp 2"."""
    degrees = [f"{axis} {getattr(plan.degrees, axis)}" for axis in Axis]
    parts = [part for part in degrees if not part.endswith(" 1")] or ["one device"]
    if plan.degrees.pp > 1:
        parts.append(plan.schedule)
    if plan.cpu_offload:
        parts.append("cpu_offload")
    if plan.activation_offload:
        parts.append("activation_offload")
    return ", ".join(parts)


def detail_words(plan: Plan) -> str:
    """Name what a layout's degrees leave open: "microbatch 2 x 8, recompute full"."""
    policies = checkpointing_counts(plan)
    recompute = " + ".join(
        policy if len(policies) == 1 else f"{count} {policy}" for policy, count in policies.items()
    )
    return (
        f"microbatch {plan.microbatch_size} x {plan.num_microbatches}, "
        f"recompute {recompute or 'none'}{', compiled blocks' if plan.compile else ''}"
        f"{', products in float8' if plan.float8 else ''}"
        f"{f', loss in {plan.loss_chunks} chunks' if plan.loss_chunks > 1 else ''}"
    )


def explanation(plan: Plan, cluster: ClusterSpec) -> tuple[tuple[str, str], ...]:
    """Explain a plan to someone who meets these terms for the first time.

    Returns:
        Pairs of a term and what it means for this plan.
    """
    lines = [("data", _data_words(plan))]
    if plan.degrees.tp > 1:
        lines.append(("tensor", _tensor_words(plan)))
    if plan.degrees.cp > 1:
        lines.append(("context", _context_words(plan)))
    if plan.degrees.ep > 1:
        lines.append(("experts", _expert_words(plan)))
    if plan.degrees.pp > 1:
        lines.append(("pipeline", _pipeline_words(plan)))
    if plan.cpu_offload:
        lines.append(("offload", _offload_words(plan)))
    lines.append(("recompute", _recompute_words(plan)))
    if plan.activation_offload:
        lines.append(("inputs", _inputs_words(plan)))
    if plan.compile:
        lines.append(
            ("compile", "blocks run by torch.compile, which takes minutes in the first step")
        )
    if plan.float8:
        lines.append(
            ("float8", "linear layers of blocks round what they multiply to float8: losses differ")
        )
    if plan.loss_chunks > 1:
        lines.append(("loss", _loss_words(plan)))
    return (*lines, *_place_lines(plan, cluster))


def _place_lines(plan: Plan, cluster: ClusterSpec) -> Iterator[tuple[str, str]]:
    """Say where ranks lie: on which kinds of device, on which links."""
    if cluster.parts:
        yield "devices", _device_words(plan, cluster)
    if mesh := mesh_words(plan, cluster):
        yield "mesh", mesh


def mesh_words(plan: Plan, cluster: ClusterSpec) -> str:
    """Say which axis crosses which links, "" where one link joins all ranks."""
    units = units_of(cluster)
    used = plan.nested_axes
    if units[0] == units[-1] or not used:
        return ""
    by_links: dict[str, list[str]] = {}
    for axis in reversed(used):
        group = axis_group(cluster, plan.degrees, axis, plan.mesh_order)
        links = " and ".join(each.link.name for each in group.crossings)
        by_links.setdefault(links, []).append(axis)
    crossed = "; ".join(f"{', '.join(axes)} over {links}" for links, axes in by_links.items())
    nested = f"{' around '.join(used)}: " if len(used) > 1 else ""
    return f"{nested}{crossed}"


def _loss_words(plan: Plan) -> str:
    return (
        f"logits and their gradients exist for 1/{plan.loss_chunks} of a microbatch at a time, "
        "forward and backward, and not for all of it"
    )


def difference_words(plan: Plan, reference: Plan, *, parts: int = 2) -> str:
    """Say what a plan loses to another: "38 ms pipeline bubble, 12 ms optimizer".

    Only components that speak for the overall result are named, the largest first; a component
    is left out below a tenth of the total difference.

    Args:
        plan: The plan that lost (or won).
        reference: The plan that it is compared with.
        parts: Most components to name.
    """
    total_s = plan.costs.step_time_s - reference.costs.step_time_s
    if abs(total_s) <= SMALL_DIFFERENCE * reference.costs.step_time_s:
        return "as fast"
    sign = 1.0 if total_s > 0 else -1.0
    telling = [
        item
        for item in cost_differences(plan, reference)
        if item.difference_s * sign >= abs(total_s) / 10
    ]
    word = "more" if total_s > 0 else "less"
    named = [
        f"{format_s(abs(item.difference_s))} {word} {COMPONENT_WORDS[item.component]}"
        for item in telling[:parts]
    ]
    return ", ".join(named)


def percent_words(plan: Plan, reference: Plan) -> str:
    """Say by how much a plan's step is longer: "+8.3%"."""
    ratio = plan.costs.step_time_s / reference.costs.step_time_s - 1
    return f"{ratio:+.1%}"


def solver_words(solver: SolverReport) -> str:
    """Say what the solver proved."""
    if solver.status == "optimal":
        return (
            f"optimal, no layout of the searched set is faster than {format_s(solver.bound_s)} "
            f"(gap {solver.gap:.2%})"
        )
    return (
        f"{solver.status}: found {format_s(solver.objective_s)}, proved that nothing is faster "
        f"than {format_s(solver.bound_s)} (gap {solver.gap:.2%}); a --time-limit of minutes may "
        "find better"
    )


def searched_words(solver: SolverReport) -> str:
    """Say what the searched set leaves out, "" where it is all that the documentation says."""
    return f"Searched: {'; '.join(solver.limits)}" if solver.limits else ""


def unit_words(units: tuple[str, ...]) -> str:
    """Name neighbouring units briefly: "prologue, layers.0 - layers.15"."""
    blocks = [name for name in units if name not in ("prologue", "epilogue")]
    words = [name for name in units if name == "prologue"]
    if len(blocks) > 2:
        words.append(f"{blocks[0]} - {blocks[-1]}")
    else:
        words.extend(blocks)
    words.extend(name for name in units if name == "epilogue")
    return ", ".join(words)


def policy_words(policies: tuple[str, ...], units: tuple[str, ...]) -> str:
    """Name the activation checkpointing of a stage's blocks: "full x 12, none x 4"."""
    counts: dict[str, int] = {}
    for name, policy in zip(units, policies, strict=True):
        if name not in ("prologue", "epilogue", "loss"):
            counts[policy] = counts.get(policy, 0) + 1
    if len(counts) <= 1:
        return next(iter(counts), Recomputation.NONE)
    return ", ".join(f"{policy} x {count}" for policy, count in counts.items())


def _data_words(plan: Plan) -> str:
    degrees = plan.degrees
    who = "one" if degrees.dp == 1 else f"each of {degrees.dp}"
    plural = "microbatch" if plan.num_microbatches == 1 else "microbatches"
    ranks = "data-parallel rank" if degrees.dp == 1 else "data-parallel ranks"
    batch = (
        f"{who} {ranks} takes {plan.num_microbatches} {plural} of {plan.microbatch_size} per step"
    )
    if degrees.dp * degrees.cp == 1:
        return batch
    if degrees.shards == 1 or plan.state_form == "replicated":
        whole = f"{batch}; every rank keeps a whole copy of its parameters"
        if degrees.shards == 1:
            return whole
        return f"{whole}, {degrees.dp_shard} share the optimiser's states (ZeRO-1)"
    zero = "ZeRO-3" if plan.reshard_after_forward else "ZeRO-2"
    gathered = (
        "gathered again for backward" if plan.reshard_after_forward else "gathered once a step"
    )
    shards = f"FSDP2 shards the state over {degrees.shards} ranks ({zero}: {gathered})"
    copies = f", {degrees.dp_replicate} copies of that" if degrees.dp_replicate > 1 else ""
    return f"{batch}; {shards}{copies}"


def _tensor_words(plan: Plan) -> str:
    split = f"matrices are split over {plan.degrees.tp} ranks"
    if plan.sequence_parallel:
        return f"{split}; between them the sequence is split (sequence parallel)"
    return split


def _context_words(plan: Plan) -> str:
    return (
        f"{plan.degrees.cp} ranks take a part of each sequence; attention exchanges it for a part "
        "of the heads"
    )


def _expert_words(plan: Plan) -> str:
    degrees = plan.degrees
    inside = " and ".join(degrees.sample_axes)
    included = f", those of {inside} among them," if inside else ""
    return (
        f"{degrees.ep} ranks{included} share the experts of a block, and send each token to the "
        "ranks of its own; priced with as many tokens for each rank: one that gets more takes "
        "longer and needs more memory"
    )


def _offload_words(plan: Plan) -> str:
    return (
        "each rank's share of parameters, gradients and optimiser states lies in host memory, up "
        f"to {format_bytes(max(plan.host_bytes_by_rank))}, and is updated there; a gather copies "
        "what it needs to the device"
    )


def _inputs_words(plan: Plan) -> str:
    if not plan.keeps_inputs_on_host:
        return "activation_offload has no effect: no block is recomputed in full"
    beside = " with those states" if plan.cpu_offload else ""
    return (
        "the input of a block that is recomputed in full is copied to host memory, up to "
        f"{format_bytes(max(plan.host_bytes_by_rank))} of a rank{beside}, and back for its "
        "backward; both copies count as recomputation"
    )


def _pipeline_words(plan: Plan) -> str:
    stages = f"{plan.degrees.pp} ranks hold one stage each"
    if plan.virtual_stages > 1:
        stages = f"{plan.degrees.pp} ranks hold {plan.virtual_stages} stages each"
    words = f"{stages}, run by the {plan.schedule} schedule"
    if plan.schedule in V_SCHEDULES:
        words += ", along the ranks and back"
    if plan.schedule in ZERO_BUBBLE_SCHEDULES:
        words += "; gradients of parameters come after those that other stages wait for"
    return words


def _device_words(plan: Plan, cluster: ClusterSpec) -> str:
    """Say which stages lie on which kind of device."""
    found = []
    first = 0
    for kind, ranks in groupby(devices_of_ranks(plan, cluster)):
        last = first + len(tuple(ranks)) - 1
        stages = f"stage {first}" if first == last else f"stages {first} to {last}"
        found.append(f"{stages} on {kind.name}")
        first = last + 1
    return f"{', '.join(found)}: each has as much of the model as its speed and memory take"


def _recompute_words(plan: Plan) -> str:
    counts = checkpointing_counts(plan)
    words: dict[str, str] = {
        Recomputation.NONE: "keep all activations for backward",
        Recomputation.SELECTIVE: "keep some activations and recompute the cheap ones",
        Recomputation.FULL: "keep only their input and run forward again in backward",
    }
    if not counts:
        return words[Recomputation.NONE]
    if len(counts) == 1:
        policy = next(iter(counts))
        return f"activation_checkpointing {policy}: all blocks {words[policy]}"
    return "activation_checkpointing " + ", ".join(
        f"{policy} on {count} blocks" for policy, count in counts.items()
    )
