"""One planning run as the faces show it: what was asked, of what machine, and what came out."""

from dataclasses import dataclass

from planner.hardware.spec import ClusterSpec
from planner.plan.types import SearchOutcome
from planner.request import PlanRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """The model in a few numbers."""

    name: str
    """What was planned: "examples/gpt.py" or "GPT (nn.Module)"."""
    num_parameters: int
    """Elements of all parameters, tied ones counted once."""
    seq_len: int | None
    """Tokens per sample, None where samples are not sequences of tokens."""
    block_pattern: str = ""
    """How its kinds of blocks follow each other: "3 A + 58 B"; "" where it has no blocks."""

    @property
    def token_word(self) -> str:
        """What ``Plan.tokens_per_step`` counts."""
        return "samples" if self.seq_len is None else "tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRow:
    """One forward op of the recommended plan, priced on one rank: a row of ops.csv."""

    op: str
    """ATen name."""
    unit: str
    """Unit that it belongs to."""
    module: str
    """Module path."""
    stage: int
    """Pipeline stage."""
    placement: str
    """Layout of its output over the tensor-parallel ranks: "Replicate", "Shard(-1)"."""
    compute_s: float
    """Forward time of one microbatch."""
    comm_s: float
    """Collectives that it causes, one microbatch."""
    bytes: int
    """Memory traffic of one microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRow:
    """A module with a matrix under tensor parallelism, the same in all units of a kind."""

    units: tuple[str, ...]
    """Names of the units."""
    module: str
    """Path in the unit, "" for a block itself; in prologue and epilogue in the model."""
    how: str
    """"column", "row", "inner", "vocab_embedding", or "whole"."""
    reason: str
    """Why it stays whole, as a clause; "" where it is split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficRow:
    """Collectives of one kind that each rank of a pipeline rank takes part in during a step."""

    pp_rank: int
    """Pipeline rank."""
    axis: str
    """Mesh axis that they run over, or "world"."""
    kind: str
    """"all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send" or "receive"."""
    group_size: int
    """Ranks of the axis."""
    count: int
    """How many in a step."""
    bytes: int
    """Their bytes in a step: of the whole tensor on one rank, what is gathered, reduced, sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecord:
    """All that a run leaves behind."""

    request: PlanRequest
    """As given."""
    model: ModelSummary
    """What was planned."""
    cluster: ClusterSpec
    """For what machine."""
    outcome: SearchOutcome
    """What was found."""
    op_rows: tuple[OpRow, ...] = ()
    """Ops of the recommended plan in execution order."""
    module_rows: tuple[ModuleRow, ...] = ()
    """Modules of the recommended plan that are split over tp, and those that stay whole."""
    traffic_rows: tuple[TrafficRow, ...] = ()
    """Collectives and transfers of the recommended plan's script."""
    warnings: tuple[str, ...] = ()
    """What the user should know: options without effect, idle devices."""
