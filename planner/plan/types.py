"""The plan: all that the script, the reports and the exports need, as pure data."""

from collections.abc import Callable
from dataclasses import dataclass

from planner.cost.breakdown import CostBreakdown, MemoryBreakdown
from planner.framework.spec import StateForm
from planner.graph.operator_graph import DataRead, ModuleOutput
from planner.strategy.mesh import ParallelDegrees
from planner.strategy.sharding import UnitSharding
from planner.vocabulary import Recomputation


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRef:
    """Where the script finds the user's model."""

    file: str | None
    """Path of the model file, or of the Hugging Face config (".json"), as the user gave it; None
    for a model passed as an object."""
    module: str | None
    """Importable module name where the model was given as ``package.module:factory``."""
    factory: str
    """Function that builds the model: "build_model"."""
    seq_len: int | None
    """``seq_len`` passed to ``example_batch``, None where the user gave none."""
    num_parameters: int
    """Elements of its parameters, tied ones counted once."""
    has_scalars: bool = True
    """Whether some of its parameters are scalars; True where that was not noted."""
    has_groups: bool = False
    """Whether it multiplies groups of rows (``grouped_mm``)."""
    work: tuple[str, ...] = ()
    """Kinds of ops that do its FLOPs (``WorkKind``), most of them first."""
    changed_buffers: tuple[str, ...] = ()
    """Names of buffers that a forward changes."""
    steering_buffers: tuple[str, ...] = ()
    """Those of them that training reads."""

    @property
    def is_config(self) -> bool:
        """Whether a Hugging Face config stands for code: the script then has its own model.py."""
        return self.file is not None and self.file.endswith(".json")


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One pipeline stage (a virtual stage where a rank holds several)."""

    index: int
    """Position in model order."""
    pp_rank: int
    """Pipeline rank that holds it."""
    first_unit: int
    """First unit, a position in ``Plan.units``."""
    end_unit: int
    """One past the last unit."""
    activation_checkpointing: tuple[str, ...]
    """"none", "selective" or "full" for each of its units; prologue and epilogue are "none"."""
    forward_s: float
    """Forward of one microbatch, its exposed collectives included."""
    backward_s: float
    """Backward of one microbatch, recomputation and exposed collectives included."""
    memory: MemoryBreakdown
    """Peak memory of a rank that held this stage alone."""
    carried: tuple[ModuleOutput, ...] = ()
    """What it receives beside the stream (skip connections, an encoder's memory), as
    ``CutPoint.carried`` has it for the cut before it; empty on the first stage."""
    stream_output: ModuleOutput | None = None
    """The module whose output the received stream is, where units after its first read it too."""
    weight_backward_s: float = 0.0
    """The part of ``backward_s`` that no other stage waits for, where the schedule divides
    backwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A complete training layout with its predicted cost."""

    model: ModelRef
    """What is trained."""
    degrees: ParallelDegrees
    """Size of each mesh axis."""
    mesh_order: tuple[str, ...]
    """Axes from outermost to innermost; the innermost varies fastest over ranks."""
    schedule: str
    """Name as ``torch.distributed.pipelining.schedules.get_schedule_class`` takes it
    (``Schedule``), "none" where pp is 1."""
    virtual_stages: int
    """Stages per pipeline rank."""
    microbatch_size: int
    """Samples per microbatch and data-parallel rank."""
    num_microbatches: int
    """Microbatches per step and data-parallel rank (gradient accumulation where pp is 1)."""
    global_batch_size: int
    """Samples per step: microbatch_size * num_microbatches * dp."""
    dtype: str
    """Compute dtype; parameters, gradients and optimiser states are float32 (float64 where the
    compute dtype is float64)."""
    reshard_after_forward: bool
    """FSDP2 frees gathered parameters after forward (ZeRO-3) or keeps them (ZeRO-2)."""
    sequence_parallel: bool
    """The stream between sharded regions of blocks is split over the sequence dim on tp."""
    sequence_dim: int
    """Tensor dim of the stream that holds the sequence (used where it is split)."""
    units: tuple[str, ...]
    """Names: "prologue", paths of the blocks in execution order, "epilogue"; "model" alone where
    the model has no blocks."""
    tied_parameters: tuple[tuple[str, ...], ...]
    """Names that share one parameter."""
    shardings: tuple[UnitSharding, ...]
    """How modules are split over tp, cp or ep; empty where all are 1."""
    stages: tuple[StagePlan, ...]
    """Stages in model order."""
    memory_by_rank: tuple[MemoryBreakdown, ...]
    """Peak memory of each pipeline rank."""
    costs: CostBreakdown
    """Predicted step time by part."""
    tokens_per_step: int
    """Tokens (samples where the model has no sequence) per optimiser step."""
    flop_per_step: int
    """Model FLOPs of one step, recomputation not counted."""
    data_reads: tuple[DataRead, ...] = ()
    """What hints and assumptions answer where the model reads data: the script's look at the model
    on the meta device has none either."""
    compile: bool = False
    """Blocks run compiled (``torch.compile``)."""
    float8: bool = False
    """Linear layers of blocks multiply in float8, forward and backward."""
    loss_chunks: int = 1
    """Chunks of rows that the loss of a microbatch is taken in, forward and backward, so that its
    logits never lie whole."""
    loss_module: str = ""
    """Path of the ``nn.Linear`` that makes the logits, where there are several chunks."""
    cpu_offload: bool = False
    """Each rank's share of parameters, gradients and optimiser states lies in host memory, and is
    updated there (FSDP2's ``CPUOffloadPolicy``)."""
    activation_offload: bool = False
    """Inputs of blocks that are recomputed in full are copied to host memory, and back for their
    backward."""
    host_bytes_by_rank: tuple[int, ...] = ()
    """Host memory of what lies there on each pipeline rank; empty where nothing does."""
    device_order: tuple[str, ...] = ()
    """Kinds of device in the order of their ranks; () where all are alike."""
    state_form: StateForm = "fsdp"
    """What dp_shard divides: parameters, gradients and optimiser states, as the script does, or
    the optimiser's states alone ("replicated": estimates of other frameworks). Where one rank has
    them alone, in the dtype it computes in, FSDP2 is left out ("plain")."""

    @property
    def nested_axes(self) -> tuple[str, ...]:
        """Axes of several ranks, from the outermost to the innermost."""
        return tuple(axis for axis in self.mesh_order if getattr(self.degrees, axis) > 1)

    @property
    def splits_stream(self) -> bool:
        """Whether a rank has a part of the sequence of what flows between blocks."""
        return self.sequence_parallel or self.degrees.cp > 1

    @property
    def keeps_inputs_on_host(self) -> bool:
        """Whether inputs of some blocks lie in host memory."""
        kinds = {kind for stage in self.stages for kind in stage.activation_checkpointing}
        return self.activation_offload and Recomputation.FULL in kinds

    @property
    def peak_memory_bytes(self) -> int:
        """Peak memory of the fullest rank."""
        return max(memory.total_bytes for memory in self.memory_by_rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a layout was refused."""

    detail: str
    """The rule with the numbers and what would work."""
    peak_memory_bytes: int | None = None
    """Least memory it would need, for the memory rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejection:
    """A layout that was refused. A search refuses tens of thousands, and few are asked why."""

    degrees: ParallelDegrees
    """What was refused."""
    rule: str
    """Short name of the rule: "memory", "kv_heads % tp"."""
    why: Callable[[], Reason]
    """Tells why."""
    schedule: str = ""
    """Schedule, where the rule is about one."""
    microbatch_size: int | None = None
    """Microbatch size, where the rule is about one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SolverReport:
    """What the solver proved about the best plan."""

    status: str
    """"optimal", or "work limit" or "time limit" where the gap is not closed."""
    objective_s: float
    """Step time of the best plan, by its schedule's action list."""
    bound_s: float
    """No layout of the searched set can be faster than this."""
    limits: tuple[str, ...] = ()
    """What the searched set leaves out beyond what the documentation says, in words."""

    @property
    def gap(self) -> float:
        """Relative distance of objective and bound."""
        return max(0.0, (self.objective_s - self.bound_s) / self.objective_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOutcome:
    """What a search found."""

    best: Plan
    """The recommended plan."""
    candidates: tuple[Plan, ...]
    """Priced layouts, fastest first, the best among them."""
    rule_of_thumb: Plan | None
    """tp as small as fits inside a node, then pp, the rest dp, largest microbatch; None where
    nothing of that form fits."""
    rejections: tuple[Rejection, ...]
    """Refused layouts."""
    solver: SolverReport
    """What is proven."""

    @property
    def runner_up(self) -> Plan | None:
        """Fastest candidate with other degrees or another schedule than the best."""
        key = (self.best.degrees, self.best.schedule)
        others = (plan for plan in self.candidates if (plan.degrees, plan.schedule) != key)
        return next(others, None)
