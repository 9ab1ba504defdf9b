"""The operator graph: every op of one forward and backward pass, as pure data.

A graph belongs to one microbatch size and one sequence length, and refers to nothing of torch.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import Any

from planner.units import DTYPE_BYTES
from planner.vocabulary import Operands


class StorageKind(StrEnum):
    """Who owns the bytes of a storage."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    TARGET = "target"
    ACTIVATION = "activation"

    @property
    def is_of_batch(self) -> bool:
        """Whether the batch brings them."""
        return self in (StorageKind.INPUT, StorageKind.TARGET)


class Phase(StrEnum):
    """The half of the training step in which an op runs."""

    FORWARD = "forward"
    BACKWARD = "backward"


class UnitKind(StrEnum):
    """Where a unit stands relative to the list of blocks."""

    PROLOGUE = "prologue"
    BLOCK = "block"
    EPILOGUE = "epilogue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Memory that one or more tensors view."""

    id: int
    """Position in ``OperatorGraph.storages``."""
    size_bytes: int
    """Bytes allocated, counted once however many tensors view them."""
    kind: StorageKind
    """Owner of the bytes."""
    name: str = ""
    """First fully qualified name of a parameter or buffer, name of an input, else empty."""
    gradient_of: int | None = None
    """Forward value whose gradient, or a part of it, it holds; None for other memory."""
    named_until: int | None = None
    """Last forward op that ran while the model's code still held it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorValue:
    """One tensor that an op reads or writes (SSA: an in-place op makes a new value)."""

    id: int
    """Position in ``OperatorGraph.values``."""
    storage: int
    """Storage it views."""
    shape: tuple[int, ...]
    """Sizes of its dims."""
    dtype: str
    """As torch spells it without the prefix: "bfloat16"."""
    requires_grad: bool
    """Whether a gradient flows through it."""

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements, all of them where it is expanded."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpNode:
    """One ATen op, with the work that one microbatch of it takes."""

    id: int
    """Position in ``OperatorGraph.nodes``, which is execution order."""
    name: str
    """ATen packet name: "mm", "_scaled_dot_product_flash_attention", "view"."""
    module: str
    """Fully qualified path of the module that runs it, "" for the root and the loss function.
    A backward op has the path of its forward op."""
    phase: Phase
    """Forward or backward."""
    is_view: bool
    """True where no bytes move (the output aliases an input)."""
    is_pointwise: bool
    """True where torch says that each element depends on the inputs at its own place."""
    operands: Operands = "even"
    """What its kernel finds, where it goes element by element."""
    inputs: tuple[int, ...]
    """Values read, in argument order; a list argument contributes all its tensors."""
    outputs: tuple[int, ...]
    """Values made."""
    arguments: tuple[object, ...]
    """Positional arguments: None for tensors and lists of them, tuples for other lists."""
    keyword_arguments: tuple[tuple[str, object], ...]
    """Keyword arguments, likewise, sorted by name."""
    flop: int
    """Floating-point operations; attention in full (see ``graph.analysis.causal.masked_flop``)."""
    read_bytes: int
    """Bytes read from memory (0 for a view)."""
    write_bytes: int
    """Bytes written to memory (0 for a view)."""
    forward_op: int | None
    """For a backward op: the forward op that it differentiates, where known."""
    is_of_function: bool
    """Whether the backward of an ``autograd.Function`` calls it, Python code."""
    saved_inputs: tuple[int, ...]
    """Values among ``inputs`` that autograd keeps for backward on behalf of this op."""
    saved_outputs: tuple[int, ...]
    """Values among ``outputs`` that autograd keeps for backward on behalf of this op."""
    saved_in_vain: tuple[int, ...] = ()
    """Others that it keeps as long as the outputs are there: no gradient comes back to them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter of the model."""

    names: tuple[str, ...]
    """All fully qualified names; more than one where weights are tied."""
    storage: int
    """Its storage."""
    shape: tuple[int, ...]
    """Sizes of its dims."""
    requires_grad: bool
    """False for frozen parameters."""
    gradient: int | None
    """Storage of its gradient after backward, None where it gets none."""

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A piece of the model between two neighbouring cut points: what a stage is made of.

    Prologue (what runs before the first block), blocks, epilogue (after the last, with the loss).
    """

    index: int
    """Position in ``OperatorGraph.units``."""
    name: str
    """"prologue", the block's module path such as "layers.3", or "epilogue"."""
    kind: UnitKind
    """Prologue, block or epilogue."""
    block: int | None
    """Position in the block list (0-based), None for prologue and epilogue."""
    structure: str
    """Hash of what it computes; units with the same hash are priced once."""
    forward_ops: tuple[int, ...]
    """Forward ops in execution order."""
    num_block_ops: int
    """How many of them, from the first, run inside the block's forward; what follows runs
    between this block and the next. 0 for prologue and epilogue."""
    backward_ops: tuple[int, ...]
    """Backward ops in execution order (gradient accumulation into parameters included)."""
    parameters: tuple[int, ...]
    """Positions in ``OperatorGraph.parameters`` of all parameters it reads."""

    def path_of(self, module: str) -> str:
        """Path of a module in the block, "" for the block itself; others keep theirs."""
        if self.kind is not UnitKind.BLOCK:
            return module
        return "" if module == self.name else module.removeprefix(f"{self.name}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleOutput:
    """One tensor that a module's forward returns."""

    module: str
    """Path of the module, which is called once in a step."""
    index: int
    """Position among the tensors of its output, in the order of torch's pytree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRead:
    """What a line of the model's code reads from tensors that have data in training only.

    It is what a hint says or what was assumed: a number, a truth value (0 or 1), or how many
    elements the line chooses.
    """

    file: str
    """Name of its file, without folders."""
    line: int
    """Line, counted from 1."""
    answers: tuple[float, ...]
    """What it reads in one forward pass, in order."""
    repeats: tuple[int, ...]
    """How often each of them comes in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutPoint:
    """A place where the model can be cut into pipeline stages."""

    after_unit: int
    """The cut lies between this unit and the next."""
    values: tuple[int, ...]
    """Values that are sent: first the stream (the first tensor argument of the next block), then
    those of ``carried``."""
    carried: tuple[ModuleOutput, ...]
    """What is sent beside the stream, as the outputs of the modules that make it (skip
    connections, an encoder's memory): one of ``values[1:]`` each, in order."""
    stream_output: ModuleOutput | None
    """The module whose output the stream is, where units after the next one read it too."""
    crossing_bytes: int
    """Bytes of ``values`` for one microbatch."""
    constant_values: tuple[int, ...]
    """Values without gradient that cross it (rotary tables, masks): each stage remakes them."""
    tied_parameters: tuple[int, ...]
    """Positions in ``OperatorGraph.parameters`` of those that units on both sides read: both
    stages hold them, and their gradients are added up once a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedCut:
    """A place between two units where the model cannot be cut."""

    after_unit: int
    """The place lies between this unit and the next."""
    reason: str
    """Why no stage can end there, as a clause: what it could not hand over, say."""


@dataclass(frozen=True, kw_only=True, repr=False)
class OperatorGraph:
    """One training step of a model, forward and backward, for one microbatch, as it was recorded.

    What is derived from it is in functions of a graph (``planner.graph.analysis``).
    """

    microbatch_size: int
    """Sequences (samples) in the microbatch."""
    tokens_per_sample: int
    """Tokens per sample where inputs are (batch, sequence) integers, else 1."""
    storages: Sequence[Storage]
    """All storages, by id."""
    values: Sequence[TensorValue]
    """All tensors, by id."""
    nodes: Sequence[OpNode]
    """All ops in execution order, by id."""
    parameters: tuple[Parameter, ...]
    """All parameters, tied ones once."""
    units: tuple[Unit, ...]
    """Prologue, blocks, epilogue; without blocks one "model" of kind epilogue."""
    is_chain: bool
    """Whether each block works on that before and on constants alone, nothing running between."""
    cuts: tuple[CutPoint, ...]
    """Legal pipeline cuts, in order."""
    refused_cuts: tuple[RefusedCut, ...] = ()
    """Other places between units, with the reason why they are no cuts."""
    no_cut_reason: str = ""
    """Why ``cuts`` is empty, as a sentence; "" where it is not."""
    model: str = ""
    """What was traced, as the user named it."""
    dtype: str = ""
    """Compute dtype: "bfloat16"."""
    autocast: str = ""
    """Line of the model that uses ``torch.autocast``, "model.py:57"; "" where none does."""
    float8_modules: frozenset[str] = frozenset()
    """Modules that may multiply in float8."""
    draws: tuple[tuple[int, str], ...] = ()
    """Forward ops that draw random numbers, and the line of each with its code."""
    notes: tuple[str, ...] = ()
    """What the trace assumed about data, and what it could not take as it is, in sentences."""

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, tied ones counted once."""
        return sum(parameter.num_elements for parameter in self.parameters)

    @property
    def num_trainable_parameters(self) -> int:
        """Elements of the parameters that are not frozen."""
        return sum(each.num_elements for each in self.parameters if each.requires_grad)

    @cached_property
    def known(self) -> dict[Hashable, Any]:
        """Work of its ops on one rank, and layouts through them: kept where they are looked up."""
        return {}

    @cached_property
    def wiring(self) -> dict[Hashable, Any]:
        """What hangs on no size, kept where it is looked up: graphs of one model share it."""
        return {}

    @cached_property
    def forward_flop(self) -> int:
        """FLOPs of the forward pass."""
        return self._flop({unit.structure: unit.forward_ops for unit in self.units})

    @cached_property
    def backward_flop(self) -> int:
        """FLOPs of the backward pass."""
        return self._flop({unit.structure: unit.backward_ops for unit in self.units})

    def _flop(self, ops: Mapping[str, tuple[int, ...]]) -> int:
        """FLOPs of ops of all units, given those of one of each structure."""
        flop = {each: sum(self.nodes[op].flop for op in own) for each, own in ops.items()}
        return sum(flop[unit.structure] for unit in self.units)

    @cached_property
    def parametric_values(self) -> frozenset[int]:
        """Values that depend on a parameter, frozen or not; all others are constants of a step."""
        found = {
            value.id
            for value in self.values
            if self.storages[value.storage].kind is StorageKind.PARAMETER
        }
        for op in self.nodes:
            if not found.isdisjoint(op.inputs):
                found.update(op.outputs)
        return frozenset(found)

    @cached_property
    def table_storages(self) -> frozenset[int]:
        """Storages of the tables that token ids index (a head that shares the weight included)."""
        return frozenset(
            self.values[op.inputs[0]].storage
            for op in self.nodes
            if op.name == "embedding"
            and self.storages[self.values[op.inputs[1]].storage].kind.is_of_batch
        )

    def parameters_of(self, module: str) -> Mapping[str, Parameter]:
        """Parameters of a module, and of those that it holds, by their names in it."""
        return self._parameters_by_module.get(module, {})

    @cached_property
    def _parameters_by_module(self) -> dict[str, dict[str, Parameter]]:
        found: dict[str, dict[str, Parameter]] = {}
        for parameter in self.parameters:
            for name in parameter.names:
                for at in (at for at, letter in enumerate(name) if letter == "."):
                    found.setdefault(name[:at], {})[name[at + 1 :]] = parameter
        return found

    @cached_property
    def parameter_gradients(self) -> frozenset[int]:
        """Storages that hold the gradient of a parameter, or a part of one."""
        return self.whole_gradients | frozenset(
            storage.id
            for storage in self.storages
            if (value := storage.gradient_of) is not None
            and self.storages[self.values[value].storage].kind is StorageKind.PARAMETER
        )

    @cached_property
    def whole_gradients(self) -> frozenset[int]:
        """Storages that hold the whole gradient of a parameter, which nothing is added to."""
        return frozenset(p.gradient for p in self.parameters if p.gradient is not None)

    @cached_property
    def saved_storages(self) -> tuple[int, ...]:
        """Activation storages that autograd keeps between forward and backward, each once."""
        kept: dict[int, None] = {}
        for op in self.nodes:
            for value in (*op.saved_inputs, *op.saved_outputs):
                storage = self.storages[self.values[value].storage]
                if op.phase is Phase.FORWARD and storage.kind is StorageKind.ACTIVATION:
                    kept[storage.id] = None
        return tuple(kept)

    @property
    def saved_bytes(self) -> int:
        """Bytes of ``saved_storages``."""
        return sum(self.storages[storage].size_bytes for storage in self.saved_storages)

    @cached_property
    def unit_of_op(self) -> tuple[int, ...]:
        """Position in ``units`` of the unit of each op."""
        found = {op: u.index for u in self.units for op in (*u.forward_ops, *u.backward_ops)}
        return tuple(found.get(op, 0) for op in range(len(self.nodes)))

    def __repr__(self) -> str:
        size = f"{len(self.nodes):,} operators in {len(self.units)} units"
        return f"OperatorGraph({self.model!r}, {size})"
