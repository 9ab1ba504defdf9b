"""One recorded training step as immutable data, before it is divided into units."""

from collections.abc import Mapping
from dataclasses import dataclass

from planner.graph.operator_graph import OpNode, Parameter, Storage, TensorValue


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
    """Value of its first positional argument, where that is a tensor."""
    output: int | None
    """Value of its output, or of the first item where that is a tuple, where it is a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleListing:
    """A list of modules in the model."""

    path: str
    """Path of the list, "" for the root."""
    children: tuple[tuple[str, str], ...]
    """Path of each child in the list and the first path of that module (they differ where one
    module is listed twice)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Every op of one training step; the fields are those of ``OperatorGraph``, ops its nodes."""

    microbatch_size: int
    tokens_per_sample: int
    storages: tuple[Storage, ...]
    values: tuple[TensorValue, ...]
    ops: tuple[OpNode, ...]
    parameters: tuple[Parameter, ...]
    calls: tuple[ModuleCall, ...]
    """Calls of the children of module lists, in forward order."""
    lists: tuple[ModuleListing, ...]
    """Module lists of the model."""
    accumulations: Mapping[int, int]
    """Storage of the parameter by backward op that accumulates its gradient."""
