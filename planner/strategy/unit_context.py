"""What the strategies of a unit's nodes depend on: the axis, and how the stream lies on it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.graph.operator_graph import OperatorGraph, StorageKind
from planner.runtime.layout import REPLICATE, Layout, can_shard, shard
from planner.vocabulary import Axis


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitContext:
    """What the strategies of a unit's nodes depend on."""

    graph: OperatorGraph
    """The model."""
    constants: frozenset[int]
    """Values that depend on no parameter."""
    ranks: int
    """Ranks of the axis, at least 2."""
    axis: Axis
    """tp; or cp: there parameters are whole, and a rank has a part of the sequence; or ep: there
    ranks have samples of their own."""
    experts: int
    """Ranks that share experts: those of ep, 1 where each rank has all."""
    sequence: int | None
    """Size of the dim that the stream is split along where samples and sequence may lie in one
    dim: over cp, and over tp where ranks share experts; else None."""
    least_split: int
    """Elements of the smallest matrix over tp that is not left whole on a part of the stream."""
    before: int
    """Product of the stream's dims before that one."""
    stream: Layout
    """Layout of values between modules outside sharded regions: REPLICATE, or the sequence
    shard under sequence parallelism."""
    readers: Mapping[int, tuple[int, ...]]
    """Forward ops of the unit that read each value."""

    def is_parameter(self, value: int) -> bool:
        """Whether the value is a parameter or a view of one."""
        graph = self.graph
        return graph.storages[graph.values[value].storage].kind is StorageKind.PARAMETER


def exits(value: int, layout: Layout, context: UnitContext) -> Sequence[Layout]:
    """Layouts in which a module may leave its output: as it is, whole, or as the stream."""
    if layout.is_shard:
        return tuple(dict.fromkeys((layout, REPLICATE)))
    return tuple(dict.fromkeys((REPLICATE, as_stream(value, context))))


def as_stream(value: int, context: UnitContext) -> Layout:
    """The stream's layout for a value, in which samples and sequence may lie in one dim."""
    shape = context.graph.values[value].shape
    if context.sequence and len(shape) == 2 and shape[0] == context.before * context.sequence:
        return shard(0, context.before)
    return context.stream


def fits(value: int, layout: Layout, context: UnitContext) -> bool:
    """Whether the value has the dim that the layout splits, and it splits evenly."""
    shape = context.graph.values[value].shape
    return not layout.is_shard or (
        layout.dim < len(shape) and can_shard(shape, layout, context.ranks)
    )
