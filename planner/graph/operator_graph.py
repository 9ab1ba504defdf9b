"""The operator graph: every op of one forward and backward pass, as pure data.

A graph belongs to one microbatch size and one sequence length. Nothing in it refers to torch:
layers below read shapes, bytes and FLOPs only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

import networkx as nx


class StorageKind(StrEnum):
    """Who owns the bytes of a storage."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    INPUT = "input"
    ACTIVATION = "activation"


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
    """Element type as torch spells it without the prefix: "bfloat16"."""
    requires_grad: bool
    """Whether a gradient flows through it."""


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
    inputs: tuple[int, ...]
    """Values read, in argument order; a list argument contributes all its tensors."""
    outputs: tuple[int, ...]
    """Values made."""
    arguments: tuple[object, ...]
    """Positional arguments with each tensor (or list of tensors) replaced by None, lists by
    tuples, dtypes and devices by strings."""
    keyword_arguments: tuple[tuple[str, object], ...]
    """Keyword arguments, likewise, sorted by name."""
    flop: int
    """Floating-point operations; attention is counted in full, causal or not."""
    read_bytes: int
    """Bytes read from memory (0 for a view)."""
    write_bytes: int
    """Bytes written to memory (0 for a view)."""
    forward_op: int | None
    """For a backward op: the forward op that it differentiates, where known."""
    saved_inputs: tuple[int, ...]
    """Values among ``inputs`` that autograd keeps for backward on behalf of this op."""
    saved_outputs: tuple[int, ...]
    """Values among ``outputs`` that autograd keeps for backward on behalf of this op."""


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

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """A piece of the model between two neighbouring cut points: what a stage is made of.

    Units in order: the prologue (all that runs before the first block), the blocks, the
    epilogue (all that runs after the last block, the loss included).
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
    backward_ops: tuple[int, ...]
    """Backward ops in execution order (gradient accumulation into parameters included)."""
    parameters: tuple[int, ...]
    """Positions in ``OperatorGraph.parameters`` of all parameters it reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleOutput:
    """One tensor that a module's forward returns."""

    module: str
    """Path of the module, which is called once in a step."""
    index: int
    """Position among the tensors of its output, in the order of torch's pytree."""


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


@dataclass(frozen=True, kw_only=True)
class OperatorGraph:
    """One training step of a model, forward and backward, for one microbatch."""

    microbatch_size: int
    """Sequences (samples) in the microbatch."""
    tokens_per_sample: int
    """Tokens per sample where inputs are (batch, sequence) integers, else 1."""
    storages: tuple[Storage, ...]
    """All storages, by id."""
    values: tuple[TensorValue, ...]
    """All tensors, by id."""
    nodes: tuple[OpNode, ...]
    """All ops in execution order, by id."""
    parameters: tuple[Parameter, ...]
    """All parameters, tied ones once."""
    block_list: str | None
    """Module path of the list of blocks ("" = the root itself), None where there is none."""
    units: tuple[Unit, ...]
    """Prologue, blocks, epilogue; where the model has no block list a single unit "model" of kind
    epilogue (it holds the loss)."""
    cuts: tuple[CutPoint, ...]
    """Legal pipeline cuts, in order."""
    no_cut_reason: str = ""
    """Why ``cuts`` is empty, as a sentence; "" where it is not."""

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, tied ones counted once."""
        return sum(parameter.num_elements for parameter in self.parameters)

    @property
    def forward_flop(self) -> int:
        """FLOPs of the forward pass."""
        return sum(op.flop for op in self.nodes if op.phase is Phase.FORWARD)

    @property
    def backward_flop(self) -> int:
        """FLOPs of the backward pass."""
        return sum(op.flop for op in self.nodes if op.phase is Phase.BACKWARD)

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

    def nx(self, op_ids: Sequence[int] | None = None) -> "nx.DiGraph[int]":
        """Build the dataflow graph over op ids; views are nodes too.

        Args:
            op_ids: Only these ops (all when None).

        Returns:
            A DAG with the ``OpNode`` under the node attribute "op" and the value id under the
            edge attribute "value".
        """
        graph: nx.DiGraph[int] = nx.DiGraph()
        chosen = range(len(self.nodes)) if op_ids is None else op_ids
        producer: dict[int, int] = {}
        for op_id in chosen:
            op = self.nodes[op_id]
            graph.add_node(op_id, op=op)
            for value in op.inputs:
                if value in producer:
                    graph.add_edge(producer[value], op_id, value=value)
            for value in op.outputs:
                producer[value] = op_id
        return graph
