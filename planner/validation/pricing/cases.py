"""From a row of a table to what is priced: the model, the framework, the cluster."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from planner.errors import PlannerError
from planner.framework.profiles import list_frameworks, load_framework
from planner.framework.spec import FrameworkSpec, StateForm
from planner.hardware.fields import near_names
from planner.hardware.profiles import list_clusters
from planner.hardware.runs import cluster_matches
from planner.validation.pricing.models import ModelShape
from planner.validation.pricing.plan_case import PlanCase
from planner.validation.types import DataParallel, LoggedRun, Run, Unpriced
from planner.vocabulary import Dtype, Recomputation

_TIED_TOLERANCE = 0.5
"""Share of the embedding by which a stated size may miss a count and still tell it is meant."""

SHARDED_STAND_IN, REPLICATED_STAND_IN = "planner", "megatron"
"""What frameworks without a profile are priced as: those that shard gradients or parameters as the
emitted script, the others as Megatron-LM."""

_USUAL_SHARDING: Mapping[StateForm, DataParallel] = {"fsdp": "zero3", "replicated": "zero1"}
"""What data parallelism shards where a row does not say, by the framework's form."""

_FFN_STEP = 256
"""A gated MLP is 8/3 as wide as the stream where nothing else is stated, rounded up to a multiple
of this (Touvron et al. 2023, 2302.13971; InternLM)."""


class RunError(PlannerError):
    """A run that cannot be priced; the message says why."""

    def __init__(self, message: str, *, hint: str = "", column: str | None = None) -> None:
        """Keep the column of the cell that is wrong; None where the row is sound."""
        super().__init__(message, hint=hint)
        self.column = column


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A run with everything that its row leaves open filled in."""

    run: Run
    """The row."""
    shape: ModelShape
    """Its model."""
    dtype: str
    """Compute dtype."""
    recompute: str
    """Recomputation of every block."""
    framework: FrameworkSpec
    """Its framework."""
    cluster: str
    """Name of the cluster profile that it ran on."""
    assumptions: tuple[str, ...]
    """What was filled in."""

    @property
    def gpus_per_node(self) -> int | None:
        """Devices per node, None for the profile's."""
        return None

    @property
    def tells_reserve(self) -> bool:
        """Whether its memory holds what plans count in reserve."""
        return True

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step and data-parallel rank, rounded where the last is smaller."""
        return round(self.run.global_batch_size / (self.run.dp * self.run.microbatch_size))


AnyCase = Case | PlanCase
"""What is priced."""


@cache
def _profiles() -> tuple[FrameworkSpec, ...]:
    return tuple(load_framework(name) for name in list_frameworks())


def case_of(run: Run | LoggedRun) -> AnyCase:
    """Give what a run is priced as.

    Raises:
        RunError: No profile knows its accelerator, or it uses what is not modelled.
    """
    return PlanCase(run=run) if isinstance(run, LoggedRun) else _filled_in(run)


def _filled_in(run: Run) -> Case:
    """Fill in a run.

    Raises:
        RunError: No profile knows its accelerator, or it uses what is not modelled.
    """
    assumptions = list(run.assumed)
    framework = _framework_of(run, assumptions)
    cluster = _cluster_of(run)
    if not run.is_sharding_stated:
        run = replace(run, data_parallel=_USUAL_SHARDING[framework.state_form])
        assumptions.append(f"zero_stage_or_fsdp {run.data_parallel} (not stated)")
    _check_modelled(run, framework)
    shape = _shape(run, framework, assumptions)
    if run.tp > 1 and shape.heads % run.tp:
        raise RunError(f"heads {shape.heads} % tp {run.tp} = {shape.heads % run.tp}")
    _check_stages(run, framework)
    _check_batch(run, assumptions)
    dtype = run.dtype or Dtype.BFLOAT16
    if run.dtype is None:
        assumptions.append("dtype bfloat16 (not stated)")
    recompute = run.recompute or Recomputation.NONE
    if run.recompute is None:
        assumptions.append("recompute none (not stated)")
    return Case(
        run=run,
        shape=shape,
        dtype=dtype,
        recompute=recompute,
        framework=framework,
        cluster=cluster,
        assumptions=tuple(assumptions),
    )


def _check_modelled(run: Run, framework: FrameworkSpec) -> None:
    """Refuse what the cost model has no terms for."""
    if run.cp > 1:
        raise RunError(f"context parallelism (cp {run.cp}) is not modelled")
    if run.ep > 1:
        raise RunError(f"expert parallelism (ep {run.ep}) is not modelled")
    if framework.state_form == "replicated" and run.recompute == Recomputation.EVERY_OTHER_LAYER:
        raise RunError(f"recomputing every other layer is not modelled for {framework.name}")
    if framework.state_form == "replicated" and run.data_parallel == "zero3":
        raise RunError(f"sharded parameters (ZeRO-3) are not modelled for {framework.name}")


def _check_stages(run: Run, framework: FrameworkSpec) -> None:
    """Every stage needs a block, or what its framework counts as one."""
    ends = 2 if framework.stage_cuts == "even_with_ends" else 0
    if run.pp * run.virtual_stages > run.layers + ends:
        raise RunError(f"pp {run.pp} x {run.virtual_stages} stages per rank > layers {run.layers}")


def _check_batch(run: Run, assumptions: list[str]) -> None:
    """Every rank needs a microbatch; the last one may be smaller than the others."""
    per_rank = run.global_batch_size / (run.dp * run.microbatch_size)
    if per_rank < 1:
        raise RunError(
            f"dp {run.dp} x micro_batch {run.microbatch_size} > global_batch "
            f"{run.global_batch_size}"
        )
    if not per_rank.is_integer():
        assumptions.append(f"microbatches {round(per_rank)} (dp x micro_batch leaves a rest)")


def unpriced_because(run: Run | LoggedRun, error: PlannerError) -> Unpriced:
    """The answer for a run that cannot be priced, with the column where its cell is wrong."""
    column = error.column if isinstance(error, RunError) else None
    return Unpriced(row=run.row, reason=str(error).replace("\n", "; "), column=column)


def _framework_of(run: Run, assumptions: list[str]) -> FrameworkSpec:
    """The profile of the row; the one that names more of its source and notes goes first."""
    named = [
        (len(match.source) + len(match.notes), framework)
        for framework in _profiles()
        for match in framework.matches
        if match.framework == run.framework
        and match.source.lower() in run.source.lower()
        and match.notes.lower() in run.notes.lower()
    ]
    if named:
        return max(named, key=lambda pair: pair[0])[1]
    name = run.framework if run.framework in list_frameworks() else _stand_in(run)
    if name != run.framework:
        assumptions.append(f"framework as {name} ({run.framework} has no profile)")
    return next(framework for framework in _profiles() if framework.name == name)


def _stand_in(run: Run) -> str:
    """What a framework without a profile is priced as, by what it shards."""
    return SHARDED_STAND_IN if run.data_parallel in ("zero2", "zero3") else REPLICATED_STAND_IN


def _cluster_of(run: Run) -> str:
    """The cluster of the row: the one that names more of its source goes first."""
    if run.gpu in list_clusters():
        return run.gpu
    found = [
        match
        for match in cluster_matches()
        if match.gpu == run.gpu and match.source.lower() in run.source.lower()
    ]
    if not found:
        known = {match.gpu for match in cluster_matches()} | set(list_clusters())
        raise RunError(
            f"accelerator {run.gpu!r} is of no cluster profile",
            hint=near_names(run.gpu, known),
            column="gpu",
        )
    return max(found, key=lambda match: len(match.source)).cluster


def _shape(run: Run, framework: FrameworkSpec, assumptions: list[str]) -> ModelShape:
    gated = run.arch == "llama"
    heads = run.heads
    if heads is None:
        heads = framework.default_heads or max(1, run.hidden // 128)
        while run.hidden % heads or heads % run.tp:
            heads += 1
        assumptions.append(f"heads {heads} (not stated)")
    ffn = run.ffn
    if ffn is None:
        ffn = -(-8 * run.hidden // (3 * _FFN_STEP)) * _FFN_STEP if gated else 4 * run.hidden
        assumptions.append(f"ffn {ffn} (not stated)")
    vocab_size = run.vocab_size
    if vocab_size is None:
        vocab_size = framework.default_vocab_size
        assumptions.append(f"vocab {vocab_size} (not stated)")
    like_gpt = run.arch == "gpt" or (run.arch == "mpt" and _has_positions(run, ffn, vocab_size))
    return ModelShape(
        layers=run.layers,
        hidden=run.hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=run.kv_heads or heads,
        vocab_size=-(-vocab_size // (128 * run.tp)) * 128 * run.tp if run.tp > 1 else vocab_size,
        seq_len=run.seq_len,
        gated=gated,
        biases=like_gpt,
        learned_positions=like_gpt,
        tied=_is_tied(run, ffn, vocab_size),
        dropout=framework.dropout,
        plain_torch=framework.model_code == "plain_torch",
    )


def _has_positions(run: Run, ffn: int, vocab_size: int) -> bool:
    """Whether an MPT was built with learned positions and biases, which ALiBi does without.

    Its configuration allows both; the stated size is nearer to one of the two counts.
    """
    if run.num_parameters is None:
        return False
    norms = 2 * run.layers + 1
    matrices = run.layers * (4 * run.hidden + 2 * ffn) * run.hidden
    without = matrices + vocab_size * run.hidden + norms * run.hidden
    biases = run.layers * (5 * run.hidden + ffn) + norms * run.hidden
    added = biases + run.seq_len * run.hidden
    return run.num_parameters - without > added / 2


def _is_tied(run: Run, ffn: int, vocab_size: int) -> bool:
    """Whether embedding and head are one weight: what the stated size is nearer to."""
    if run.arch != "llama" or run.num_parameters is None or not run.heads:
        return run.arch != "llama"
    head_dim = run.hidden // run.heads
    attention = run.hidden * head_dim * (2 * run.heads + 2 * (run.kv_heads or run.heads))
    blocks = run.layers * (attention + 3 * run.hidden * ffn)
    embedding = vocab_size * run.hidden
    return run.num_parameters - blocks < (1 + _TIED_TOLERANCE) * embedding
