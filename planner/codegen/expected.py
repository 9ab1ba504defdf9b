"""What a script says of the plan's prediction, beside which it shows what it measures."""

from planner.codegen.source import quote
from planner.hardware.spec import ClusterSpec
from planner.plan.serialize import plan_digest
from planner.plan.types import Plan


def expected_source(plan: Plan, cluster: ClusterSpec | None) -> list[str]:
    """Write the arguments of the runtime's ``Expected``.

    Args:
        plan: What the script runs.
        cluster: What it was planned for; None leaves out the devices' peak.
    """
    fullest = max(plan.memory_by_rank, key=lambda memory: memory.total_bytes)
    peak_flop_per_s = cluster and cluster.peak_flop_per_s(plan.dtype)
    has_sequence = plan.tokens_per_step != plan.global_batch_size
    arguments = {
        "plan": quote(plan_digest(plan)),
        "dtype": quote(plan.dtype),
        "step_time_s": repr(plan.costs.step_time_s),
        "peak_memory_bytes": str(fullest.total_bytes),
        "reserve_bytes": str(fullest.reserve_bytes),
        "items_per_step": str(plan.tokens_per_step),
        "item": quote("tokens" if has_sequence else "samples"),
        "flop_per_step": str(plan.flop_per_step),
    }
    if peak_flop_per_s:
        arguments["peak_flop_per_s"] = repr(peak_flop_per_s)
    return [f"{name}={value}" for name, value in arguments.items()]
