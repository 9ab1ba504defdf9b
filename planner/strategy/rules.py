"""Which degrees and configurations a model and a request allow, with the reason for each no."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from planner.strategy.configuration import Configuration
from planner.strategy.facts import ModelFacts
from planner.strategy.mesh import ParallelDegrees
from planner.strategy.schedules import divided_rule, schedule_rule, tried_schedules
from planner.units import DTYPE_BYTES
from planner.vocabulary import (
    PLANNED_AXES,
    Axis,
    Dtype,
    Recomputation,
    Schedule,
)

SPLIT_AXES: tuple[Axis, ...] = (Axis.TP, Axis.CP, Axis.EP)
"""Axes over which modules are split: tp inside cp, or either, with experts over ep."""

LONG_SEQUENCE = 32_768
"""Tokens of a sample from which on cp is tried unasked."""

CHUNK_BYTES = 2**30
"""Most that a chunk of logits takes in float32 where open: smaller ones add gradients too often."""


UNASKED = ("compile", "float8", "cpu_offload", "activation_offload")
"""Settings that may pay, and that change what a user sees of training or double the search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedValues:
    """Values that the request fixes; None is open."""

    dp_replicate: int | None = None
    dp_shard: int | None = None
    cp: int | None = None
    tp: int | None = None
    pp: int | None = None
    ep: int | None = None
    schedule: str | None = None
    virtual_stages: int | None = None
    microbatch_size: int | None = None
    activation_checkpointing: str | None = None
    reshard_after_forward: bool | None = None
    sequence_parallel: bool | None = None
    compile: bool | None = None
    float8: bool | None = None
    loss_chunks: int | None = None
    cpu_offload: bool | None = None
    activation_offload: bool | None = None
    mesh_order: tuple[str, ...] | None = None  # axes that keep this order, outermost first


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokenRule:
    """Why something is refused."""

    rule: str
    """Short name: "kv_heads % tp"."""
    detail: str
    """The rule with its numbers, and what would work."""


def divisors(number: int) -> list[int]:
    """Divisors in ascending order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def enumerate_degrees(
    gpus: int, fixed: FixedValues, *, contexts: bool = False, experts: bool = False
) -> Iterator[ParallelDegrees]:
    """All degrees whose product is the number of devices and that keep the fixed ones.

    Args:
        gpus: Devices.
        fixed: What is fixed.
        contexts: Try cp above 1; else it is so where it is fixed.
        experts: The same for ep.
    """
    contexts = contexts or (fixed.cp or 1) > 1
    experts = experts or (fixed.ep or 1) > 1
    for pp in divisors(gpus):
        for tp in divisors(gpus // pp):
            for cp in divisors(gpus // pp // tp) if contexts else (1,):
                samples = gpus // pp // tp // cp
                shards = divisors(samples)
                for dp_shard in shards:
                    for ep in _expert_ranks(dp_shard, tp * cp, fixed) if experts else (1,):
                        degrees = ParallelDegrees(
                            dp_replicate=samples // dp_shard,
                            dp_shard=dp_shard,
                            cp=cp,
                            tp=tp,
                            pp=pp,
                            ep=ep,
                        )
                        if _keeps(degrees, fixed):
                            yield degrees


def _expert_ranks(dp_shard: int, sample_ranks: int, fixed: FixedValues) -> list[int]:
    """Ranks that may share experts: all that have the same samples, and some of dp_shard beside.

    What is fixed is refused with a reason where it is none of them.
    """
    if fixed.ep is not None:
        return [fixed.ep] if dp_shard * sample_ranks % fixed.ep == 0 else []
    return [1, *(sample_ranks * n for n in divisors(dp_shard) if sample_ranks * n > 1)]


def _keeps(degrees: ParallelDegrees, fixed: FixedValues) -> bool:
    return all(getattr(fixed, axis) in (None, getattr(degrees, axis)) for axis in PLANNED_AXES)


def broken_rule(
    degrees: ParallelDegrees, facts: ModelFacts, global_batch_size: int
) -> BrokenRule | None:
    """The first rule of the model's shapes that the degrees break.

    Data parallelism splits samples. A table whose rows tp does not divide stays whole.
    """
    refused = _context_rule(degrees, facts) or _expert_rule(degrees, facts)
    if refused is not None:
        return refused
    if degrees.pp > facts.max_stages:
        return BrokenRule(
            rule="stages > cuts",
            detail=f"pp {degrees.pp} needs {degrees.pp} stages, but the model can be cut into "
            f"{facts.max_stages} at most. {facts.no_cut_reason}".removesuffix(". "),
        )
    if degrees.pp > 1 and facts.autocast:
        return BrokenRule(
            rule="autocast with pp",
            detail=f"pp {degrees.pp} with {facts.autocast}, which uses torch.autocast: what stages "
            "send has types that the script cannot foresee; pp can be 1, or --dtype bfloat16 "
            "stand in for autocast",
        )
    if global_batch_size % degrees.dp:
        return BrokenRule(
            rule="global_batch_size % dp",
            detail=f"global_batch_size {global_batch_size} % (dp_replicate * dp_shard = "
            f"{degrees.dp}) = {global_batch_size % degrees.dp}; dp can be "
            f"{listed(divisors(global_batch_size))}",
        )
    return None


def heads_rule(
    degrees: ParallelDegrees, facts: ModelFacts, fixed: FixedValues
) -> BrokenRule | None:
    """Tensor parallelism that does not divide the heads is tried where it is asked for alone.

    Attention is then whole on each rank, while other modules are split: seldom the best layout, and
    each degree more is one for which all units are laid out and tried. So is cp around it that does
    not divide the heads which it leaves.
    """
    if fixed.tp is None and (refused := _all_heads_rule(degrees, facts)):
        return refused
    for name, sizes in (("heads", facts.heads), ("kv_heads", facts.kv_heads)):
        for size in sizes if fixed.tp is None else ():
            if size % degrees.tp:
                return BrokenRule(
                    rule=f"{name} % tp",
                    detail=f"{name} {size} % tp {degrees.tp} = {size % degrees.tp}; tp can be "
                    f"{listed(divisors(size))}, or fixed: attention is then whole on each rank",
                )
    return None


def _all_heads_rule(degrees: ParallelDegrees, facts: ModelFacts) -> BrokenRule | None:
    """Leave each rank of tp and cp a head of its own."""
    ranks = degrees.tp * degrees.cp
    for size in facts.heads if degrees.tp > 1 < degrees.cp else ():
        if size % ranks:
            return BrokenRule(
                rule="heads % (tp * cp)",
                detail=f"heads {size} % (tp {degrees.tp} * cp {degrees.cp} = {ranks}) = "
                f"{size % ranks}; their product can be {listed(divisors(size))}",
            )
    return None


def _context_rule(degrees: ParallelDegrees, facts: ModelFacts) -> BrokenRule | None:
    """Context parallelism splits the stream's sequence, and inside attention its heads."""
    cp = degrees.cp
    if cp == 1:
        return None
    if facts.sequence is None:
        return BrokenRule(
            rule="cp needs a sequence",
            detail=f"cp {cp} splits the sequence of what blocks hand on, but they do not hand on "
            "one tensor of (batch, sequence, features); cp can be 1",
        )
    for name, sizes in (("sequence", (facts.sequence,)), ("heads", facts.heads)):
        for size in sizes:
            if size % cp:
                return BrokenRule(
                    rule=f"{name} % cp",
                    detail=f"{name} {size} % cp {cp} = {size % cp}; cp can be "
                    f"{listed(divisors(size))}",
                )
    return None


def _expert_rule(degrees: ParallelDegrees, facts: ModelFacts) -> BrokenRule | None:
    """Expert parallelism gives each rank as many experts as others, those of tp and cp included."""
    ep = degrees.ep
    if ep == 1:
        return None
    if not facts.experts:
        return BrokenRule(
            rule="ep needs experts",
            detail=f"ep {ep} gives each rank some of the experts, but no module of a block takes "
            "(tokens, features), the experts of each token and their weights, and holds the "
            "weights of all experts side by side; ep can be 1",
        )
    for size in facts.experts:
        if size % ep:
            return BrokenRule(
                rule="experts % ep",
                detail=f"experts {size} % ep {ep} = {size % ep}; ep can be "
                f"{listed(divisors(size))}",
            )
    ranks = degrees.sample_ranks
    if ep % ranks:
        axes = " * ".join(degrees.sample_axes)
        by = " * ".join(f"{axis} {getattr(degrees, axis)}" for axis in degrees.sample_axes)
        by = by if len(degrees.sample_axes) == 1 else f"({by} = {ranks})"
        return BrokenRule(
            rule=f"ep % {axes}",
            detail=f"ep {ep} % {by} = {ep % ranks}: the ranks of {axes} are among "
            f"those that share experts; ep can be 1 or a multiple of {ranks}",
        )
    return None


def _loss_chunks(
    degrees: ParallelDegrees, facts: ModelFacts, fixed: FixedValues, microbatch_size: int
) -> int | BrokenRule:
    """Chunks of a loss: as many as are asked for, else as large logits call for, 1 for small ones.

    They divide the rows of a rank of cp, so that all are alike. Ranks of tp have some of the
    classes each, or of the rows.
    """
    if isinstance(facts.loss, str):
        return 1
    rows, tp, asked = microbatch_size * facts.loss.rows // degrees.cp, degrees.tp, fixed.loss_chunks
    if asked is not None:
        if rows % asked:
            return BrokenRule(
                rule="rows % loss_chunks",
                detail=f"{rows} rows of a rank's microbatch of {microbatch_size} % loss_chunks "
                f"{asked} = {rows % asked}; it can be {listed(divisors(rows))}",
            )
        return asked
    logits = rows * facts.loss.classes // (tp if facts.loss.classes % tp == 0 else 1)
    least = -(-logits * DTYPE_BYTES[Dtype.FLOAT32] // CHUNK_BYTES)
    return next((count for count in divisors(rows) if count >= least), 1)


def listed(numbers: list[int]) -> str:
    """Spell out what would work."""
    shown = numbers if len(numbers) <= 10 else [*numbers[:7], "...", *numbers[-2:]]
    return ", ".join(str(number) for number in shown)


def configurations(
    degrees: ParallelDegrees, facts: ModelFacts, global_batch_size: int, fixed: FixedValues
) -> Iterator[Configuration | BrokenRule]:
    """All configurations of legal degrees; a broken rule where a fixed value allows none.

    GPipe is tried where it is fixed or 1F1B cannot run: it takes as long and holds more. Resharding
    under a pipeline only where fixed: parameters stay gathered from a backward to the next forward.
    """
    samples = global_batch_size // degrees.dp
    sizes = divisors(samples)
    if fixed.microbatch_size is not None:
        if samples % fixed.microbatch_size:
            yield BrokenRule(
                rule="batch % microbatch_size",
                detail=f"{samples} samples per data-parallel rank % microbatch_size "
                f"{fixed.microbatch_size} = {samples % fixed.microbatch_size}; it can be "
                f"{listed(sizes)}",
            )
            return
        sizes = [fixed.microbatch_size]
    found, schedules = False, _schedules(degrees.pp, facts, fixed)
    reason = None if schedules else _too_few_cuts(degrees.pp, facts, fixed)
    splits = _options(possible=can_split_stream(degrees, facts), fixed=fixed.sequence_parallel)
    asked: dict[str, Any] = {name: bool(getattr(fixed, name)) for name in UNASKED}
    for size in sizes:
        chunks = _loss_chunks(degrees, facts, fixed, size)
        for schedule, virtual_stages in schedules:
            number = samples // size
            rule = _schedule_rule(schedule, fixed, degrees.pp, virtual_stages, number)
            reason = chunks if isinstance(chunks, BrokenRule) else rule
            if isinstance(chunks, BrokenRule) or reason is not None:
                continue
            if schedule == Schedule.GPIPE and fixed.schedule is None and number >= degrees.pp:
                continue
            found = True
            for reshard, split in product(_reshards(degrees, fixed), splits):
                yield Configuration(
                    degrees=degrees,
                    schedule=schedule,
                    virtual_stages=virtual_stages,
                    microbatch_size=size,
                    num_microbatches=number,
                    reshard_after_forward=reshard,
                    sequence_parallel=split,
                    loss_chunks=chunks,
                    **asked,
                )
    if not found and reason is not None:
        yield reason


def _schedules(pp: int, facts: ModelFacts, fixed: FixedValues) -> list[tuple[str, int]]:
    tried = tried_schedules(pp, facts.max_stages, fixed.schedule, fixed.virtual_stages)
    return [each for each in tried if each[1] == 1 or not fixed.cpu_offload]


def _too_few_cuts(pp: int, facts: ModelFacts, fixed: FixedValues) -> BrokenRule:
    """Why a model is not cut into as many stages as ranks of several stages need."""
    each = fixed.virtual_stages or 2
    what = fixed.schedule or "an interleaved schedule"
    return BrokenRule(
        rule="stages > cuts",
        detail=f"pp {pp}: {what} with {each} stages on each rank needs {pp * each} stages, but "
        f"the model can be cut into {facts.max_stages} at most; "
        "schedule can be 1F1B, with one stage on each rank",
    )


def _schedule_rule(
    schedule: str, fixed: FixedValues, pp: int, virtual_stages: int, num_microbatches: int
) -> BrokenRule | None:
    """Refuse a schedule that breaks its limits, or divides backwards beside what is fixed."""
    detail = divided_rule(
        schedule,
        recompute=fixed.activation_checkpointing or Recomputation.NONE,
        reshard_after_forward=bool(fixed.reshard_after_forward),
        whole="compile" if fixed.compile else "float8" if fixed.float8 else "",
    )
    if detail is not None:
        return BrokenRule(rule="divided backward", detail=detail)
    detail = schedule_rule(
        schedule, pp=pp, virtual_stages=virtual_stages, num_microbatches=num_microbatches
    )
    return None if detail is None else BrokenRule(rule="microbatches < stages", detail=detail)


def _reshards(degrees: ParallelDegrees, fixed: FixedValues) -> tuple[bool, ...]:
    """Forms to try; of one shard it is gathered what is kept, unless that lies in host memory."""
    if fixed.reshard_after_forward is None and degrees.pp > 1:
        return (False,)
    is_possible = degrees.shards > 1 or bool(fixed.cpu_offload)
    return _options(possible=is_possible, fixed=fixed.reshard_after_forward)


def can_split_stream(degrees: ParallelDegrees, facts: ModelFacts) -> bool:
    """Whether tp divides the sequence of what blocks hand on, or what cp leaves of it."""
    tp, ranks = degrees.tp, degrees.sample_ranks
    return tp > 1 and facts.sequence is not None and facts.sequence % ranks == 0


def _options(*, possible: bool, fixed: bool | None) -> tuple[bool, ...]:
    if not possible:
        return (False,)
    return (True, False) if fixed is None else (fixed,)
