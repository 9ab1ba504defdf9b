"""Rules of what a request fixes beside degrees, with the reason for each no."""

from planner.hardware.spec import ClusterSpec, DeviceSpec
from planner.strategy.facts import ModelFacts
from planner.strategy.mesh import ParallelDegrees
from planner.strategy.rules import (
    BrokenRule,
    FixedValues,
    can_split_stream,
    divisors,
    listed,
)
from planner.vocabulary import SHARED_SCHEDULES, Dtype, Recomputation


def recomputation_rule(facts: ModelFacts, fixed: FixedValues) -> BrokenRule | None:
    """Refuse a fixed recomputation under which the model would fail."""
    asked = fixed.activation_checkpointing or Recomputation.NONE
    reason = facts.recompute_refusals.get(asked)
    if reason is None:
        return None
    return BrokenRule(
        rule="recomputation of the model",
        detail=f"activation_checkpointing={asked}: {reason}; it can be none",
    )


def compile_rule(degrees: ParallelDegrees, fixed: FixedValues) -> BrokenRule | None:
    """Refuse to compile blocks whose experts ranks share: how many rows go where is data."""
    if not fixed.compile or degrees.ep == 1:
        return None
    return BrokenRule(
        rule="compile with ep",
        detail=f"compile=true with ep {degrees.ep}: how many rows each rank sends is known when a "
        "step runs, and a graph of ops has fixed sizes; ep can be 1, or compile false",
    )


def float8_rule(
    facts: ModelFacts, fixed: FixedValues, device: DeviceSpec, dtype: str
) -> BrokenRule | None:
    """Refuse float8 that the device or the model has no products for."""
    if not fixed.float8:
        return None
    if not device.float8_flop_per_s:
        return BrokenRule(
            rule="float8 on the device",
            detail=f"float8=true on {device.name}, whose profile has no rate of products in "
            "float8 (peak_float8_dense_tflop_per_s); it can be false",
        )
    if dtype != Dtype.BFLOAT16:
        return BrokenRule(
            rule="float8 with dtype",
            detail=f"float8=true with {dtype}: products are rounded where all else is in "
            f"{Dtype.BFLOAT16}; float8 can be false, or --dtype {Dtype.BFLOAT16}",
        )
    if facts.autocast:
        return BrokenRule(
            rule="float8 with autocast",
            detail=f"float8=true with {facts.autocast}, which uses torch.autocast: what layers "
            "multiply has other types there; float8 can be false, or --dtype bfloat16 stand in "
            "for autocast",
        )
    if not facts.has_float8_products:
        return BrokenRule(
            rule="float8 needs linear layers",
            detail="float8=true, but no block has an nn.Linear whose input and output features "
            "are multiples of 16; float8 can be false",
        )
    return None


def offload_rule(fixed: FixedValues, cluster: ClusterSpec) -> BrokenRule | None:
    """Refuse host memory of which nothing is known, or which is the device's own."""
    names = [name for name in ("cpu_offload", "activation_offload") if getattr(fixed, name)]
    if not names:
        return None
    name = names[0]
    asked = f"{name}=true on cluster {cluster.name!r}"
    schedule, stages = fixed.schedule, fixed.virtual_stages or 1
    if fixed.cpu_offload and (schedule in SHARED_SCHEDULES or stages > 1):
        what = schedule or f"virtual_stages={stages}"
        return BrokenRule(
            rule="cpu_offload with shared ranks",
            detail=f"cpu_offload=true with {what}: what several stages of a rank hold in host "
            "memory is not planned; schedule can be 1F1B or GPipe, with one stage on each rank",
        )
    if cluster.host_is_device:
        detail = f"{asked}: its ranks run on CPUs, and all that they have lies in host memory"
        return BrokenRule(rule=f"{name} on CPUs", detail=f"{detail}; it can be false")
    if any(kind.host is None for kind in cluster.kinds):
        return BrokenRule(
            rule=f"{name} needs a host",
            detail=f"{asked}, whose profile says nothing of its hosts; it can be false, or the "
            "profile have a [host] with their memory, its bandwidth and that of the link to each "
            "device (plan profiles show h100-sxm has one)",
        )
    return None


def inputs_rule(
    degrees: ParallelDegrees, facts: ModelFacts, fixed: FixedValues
) -> BrokenRule | None:
    """Refuse inputs of blocks in host memory where something else holds them on the device."""
    if not fixed.activation_offload:
        return None
    if degrees.pp > 1:
        return BrokenRule(
            rule="activation_offload with pp",
            detail=f"activation_offload=true with pp {degrees.pp}: what stages receive lies in "
            "buffers on their devices; pp can be 1",
        )
    if fixed.compile:
        return BrokenRule(
            rule="activation_offload with compile",
            detail="activation_offload=true with compile=true: compiled code saves its own "
            "inputs; one of them can be false",
        )
    if facts.passes_gradients:
        return BrokenRule(
            rule="activation_offload with shared inputs",
            detail="activation_offload=true, but several blocks read an activation that has a "
            "gradient (an encoder's output, a skip connection), which would be copied for each "
            "of them; it can be false",
        )
    return None


def stream_rule(
    degrees: ParallelDegrees, facts: ModelFacts, fixed: FixedValues
) -> BrokenRule | None:
    """Refuse sequence parallelism that is asked for where tp cannot split the stream.

    Without tp there is nothing to split, and the plan says that it has no effect.
    """
    tp = degrees.tp
    if not fixed.sequence_parallel or tp == 1 or can_split_stream(degrees, facts):
        return None
    if facts.sequence is None:
        return BrokenRule(
            rule="sequence_parallel needs a sequence",
            detail=f"sequence_parallel=true with tp {tp} splits the sequence of what blocks hand "
            "on, but they do not hand on one tensor of (batch, sequence, features); "
            "sequence_parallel can be false",
        )
    ranks = degrees.sample_ranks
    by = f"tp {tp}" if degrees.cp == 1 else f"(tp {tp} * cp {degrees.cp} = {ranks})"
    can_be = "tp" if degrees.cp == 1 else "their product"
    return BrokenRule(
        rule="sequence % tp",
        detail=f"sequence_parallel=true: sequence {facts.sequence} % {by} = "
        f"{facts.sequence % ranks}; {can_be} can be {listed(divisors(facts.sequence))}, or "
        "sequence_parallel false",
    )


def chunk_rule(facts: ModelFacts, fixed: FixedValues) -> BrokenRule | None:
    """Refuse chunks of a loss that has no rows of its own."""
    if (fixed.loss_chunks or 1) == 1 or not isinstance(facts.loss, str):
        return None
    detail = f"loss_chunks={fixed.loss_chunks}: {facts.loss}; loss_chunks can be 1"
    return BrokenRule(rule="loss_chunks", detail=detail)
