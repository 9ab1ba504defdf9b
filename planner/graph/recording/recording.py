"""One recorded training step as immutable data, before it is divided into units."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from planner.graph.loading.hints import Hint
from planner.graph.operator_graph import DataRead, OpNode, Parameter, Storage, TensorValue


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall:
    """One call of a module's forward in the forward pass."""

    module: str
    """Path of the module."""
    first_op: int
    """First op at or after its entry."""
    end_op: int
    """One past its last op."""
    first_argument: int | None
    """Value of the first tensor among its arguments, positional ones first."""
    outputs: tuple[int, ...]
    """Values of the tensors in its output, in the order of torch's pytree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleListing:
    """A list of modules in the model."""

    path: str
    """Path of the list, "" for the root."""
    children: tuple[tuple[str, str], ...]
    """Path of each child in the list and the first path of that module (they differ where one
    module is listed twice)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A number that the model's code reads, and that other random draws would change."""

    before_op: int
    """The op that is recorded next."""
    place: str
    """Line that reads it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Every op of one training step; the fields are those of ``OperatorGraph``, ops its nodes."""

    model: str = ""
    dtype: str = ""
    microbatch_size: int
    tokens_per_sample: int
    storages: Sequence[Storage]
    values: Sequence[TensorValue]
    ops: Sequence[OpNode]
    parameters: tuple[Parameter, ...]
    calls: tuple[ModuleCall, ...]
    """Calls of modules in the forward pass, in the order in which they begin."""
    lists: tuple[ModuleListing, ...]
    """Lists of modules in the model (``nn.ModuleList``, ``nn.Sequential``, ``nn.ModuleDict``)."""
    accumulations: Mapping[int, int]
    """Storage of the parameter by backward op that accumulates its gradient."""
    autocast: str = ""
    """Line of the model that uses ``torch.autocast``, "" where none does."""
    float8_modules: frozenset[str] = frozenset()
    """Modules that may multiply in float8."""
    notes: tuple[str, ...] = field(default=(), compare=False)
    """What was assumed or lost on the way, one sentence each."""
    used_hints: tuple[Hint, ...] = field(default=(), compare=False)
    """Hints that a line asked for."""
    asked_places: tuple[str, ...] = field(default=(), compare=False)
    """Lines that read data which nothing but a hint can tell, or which is assumed."""
    data_reads: tuple[DataRead, ...] = field(default=(), compare=False)
    """What hints and assumptions answered in the forward pass."""
    decisions: tuple[Decision, ...] = ()
    """What draws decide in the forward pass, in order."""
    counting_ops: tuple[int, ...] = ()
    """Ops of the forward pass of whose results data decide the sizes: constants, or a batch."""
    draws: tuple[tuple[int, str], ...] = ()
    """Ops of the forward pass that draw random numbers, and the line of each."""
    called_again: tuple[str, ...] = ()
    """Modules that the model itself runs again in the backward pass."""
