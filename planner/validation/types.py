"""What passes between the reading of a table of runs, their pricing and the report."""

from dataclasses import dataclass
from typing import Literal

from planner.cost.breakdown import CostBreakdown, MemoryBreakdown
from planner.plan.serialize import SavedPlan

Arch = Literal["gpt", "llama", "mpt"]
"""GELU MLP with biases; gated MLP without; GPT with ALiBi."""

DataParallel = Literal["ddp", "zero1", "zero2", "zero3"]
"""Replicated state; optimiser states sharded; gradients as well; parameters as well (FSDP)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One row of a table: a dense transformer, its layout, and what was measured."""

    row: int
    """0-based position in the table."""
    source: str
    """Where the row comes from."""
    framework: str
    """Framework column as it stands, "nanotron"."""
    notes: str
    """Notes column as it stands."""
    arch: Arch
    """Family of the model."""
    model: str
    """Name of the model, for grouping only."""
    layers: int
    """Transformer blocks."""
    hidden: int
    """Width of the residual stream."""
    ffn: int | None
    """Inner width of the MLP, None where the source does not say."""
    heads: int | None
    """Query heads, None where the source does not say."""
    kv_heads: int | None
    """Key and value heads, None where the source does not say."""
    num_parameters: float | None
    """Size of the model as the source states it (params_b), None where it does not; tells
    whether embedding and head share their weight."""
    vocab_size: int | None
    """Rows of the embedding, None where the source does not say."""
    seq_len: int
    """Tokens per sequence."""
    gpu: str
    """Accelerator as it stands in the table, "H100-80GB-SXM"."""
    num_gpus: int
    """Ranks in all."""
    tp: int
    """Tensor-parallel ranks."""
    cp: int
    """Context-parallel ranks."""
    ep: int
    """Expert-parallel ranks."""
    pp: int
    """Pipeline ranks."""
    virtual_stages: int
    """Stages per pipeline rank."""
    dp: int
    """Data-parallel ranks."""
    data_parallel: DataParallel
    """What data parallelism shards."""
    shard_ranks: int | None
    """Ranks that share one copy of the sharded state, None for all data-parallel ranks."""
    microbatch_size: int
    """Sequences per microbatch."""
    global_batch_size: int
    """Sequences per step."""
    recompute: str | None
    """A ``Recomputation``, None where the source does not say."""
    sequence_parallel: bool
    """The residual stream is split over tp between the sharded regions."""
    dtype: str | None
    """"bfloat16", "float16" or "float32", None where the source does not say."""
    schedule: str
    """A ``Schedule``."""
    step_time_s: float | None
    """Measured time of an optimiser step."""
    peak_mem_bytes: float | None
    """Measured peak memory of the fullest rank, as the source measures it."""
    float8: bool = False
    """Linear layers of blocks multiply in float8."""
    is_sharding_stated: bool = True
    """Whether the row says what data parallelism shards; ``data_parallel`` means nothing else."""
    assumed: tuple[str, ...] = ()
    """What was filled into its open cells: "micro_batch 1 (not stated)"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """A run of an emitted script, as its log has it: any model, the layout of its plan."""

    row: int
    """0-based position in the table."""
    saved: SavedPlan
    """What was run."""
    step_time_s: float
    """Measured time of an optimiser step."""
    peak_mem_bytes: float
    """Measured peak memory of the fullest rank."""
    is_allocated: bool
    """Whether that is what torch allocated, without what the plan holds in reserve."""
    notes: tuple[str, ...]
    """What was taken of the log: "median of 97 steps, the first 3 are warm-up"."""

    @property
    def num_gpus(self) -> int:
        """Ranks in all."""
        return self.saved.plan.degrees.world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the cost model says of a run."""

    row: int
    """The run's row."""
    step_time_s: float
    """One optimiser step."""
    peak_mem_bytes: int
    """Memory of the fullest rank."""
    feasible: bool
    """Whether that fits into the device."""
    costs: CostBreakdown
    """Where the time goes."""
    memory: MemoryBreakdown
    """What the fullest rank holds."""
    assumptions: tuple[str, ...]
    """What the row leaves open and how it was filled: "vocab 50304 (not stated)"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpriced:
    """A row without a prediction."""

    row: int
    """0-based position in the table."""
    reason: str
    """Why, in words: "precision fp8 is not modelled"."""
    column: str | None = None
    """Column of the cell that is wrong; None where the row is sound, and not modelled."""

    @property
    def words(self) -> str:
        """The reason, with the column: "column tp: -2 is no whole number of at least 1"."""
        return self.reason if self.column is None else f"column {self.column}: {self.reason}"
