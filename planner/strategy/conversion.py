"""Which collectives change a layout, forward and backward."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from planner.runtime.layout import Layout

Collective = Literal["all_gather", "all_reduce", "reduce_scatter", "all_to_all"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Collectives of one change of layout."""

    forward: Collective | None = None
    """On the tensor."""
    backward: Collective | None = None
    """On its gradient."""


_CONVERSIONS: dict[tuple[str, str], Conversion] = {
    ("replicate", "replicate"): Conversion(),
    ("replicate", "replicate_partial_grad"): Conversion(backward="all_reduce"),
    ("replicate", "shard"): Conversion(backward="all_gather"),
    ("shard", "replicate"): Conversion(forward="all_gather"),
    ("shard", "replicate_partial_grad"): Conversion(
        forward="all_gather", backward="reduce_scatter"
    ),
    ("shard", "shard"): Conversion(forward="all_to_all", backward="all_to_all"),
    ("partial", "replicate"): Conversion(forward="all_reduce"),
    ("partial", "replicate_partial_grad"): Conversion(forward="all_reduce", backward="all_reduce"),
    ("partial", "shard"): Conversion(forward="reduce_scatter", backward="all_gather"),
}


def operand_bytes(kind: Collective, tensor_bytes: float, ranks: int) -> float:
    """Bytes of a tensor by which a collective is priced.

    All of the tensor, but of what ranks exchange, of which each has a part, that part.

    Args:
        kind: The collective.
        tensor_bytes: Of the whole tensor.
        ranks: How many take part.
    """
    return tensor_bytes / ranks if kind == "all_to_all" else tensor_bytes


def copied_bytes(
    kind: Collective, shape: Sequence[int], layouts: Iterable[Layout], operand_bytes: float
) -> tuple[float, ...]:
    """Copies that a change of layout makes beside its collective, in ``Ranks`` of the runtime.

    A collective carries the parts of ranks one after the other: where a split dim is not the first,
    they are strewn over the whole. What is summed is a copy as well.

    Args:
        kind: The collective.
        shape: Of the whole tensor.
        layouts: Before and behind it.
        operand_bytes: As in ``operand_bytes``.

    Returns:
        Bytes of each copy.
    """
    if kind == "all_reduce":
        return (operand_bytes,)
    shards = [each for each in layouts if each.is_shard]
    strewn = sum(prod(shape[: each.dim]) * each.outer > 1 for each in shards)
    return (operand_bytes,) * (strewn if kind == "all_to_all" else min(strewn, 1))


def conversion(source: Layout, target: Layout) -> Conversion:
    """Collectives that bring a tensor from one layout to another, and its gradient back.

    The gradient of a whole tensor is whole, of a shard the same shard, and of a sum over ranks
    whole; "replicate_partial_grad" is what a column-parallel projection asks for: its input
    whole, while each rank contributes only its columns' part of the gradient.
    """
    if source == target:
        return Conversion()
    if source.is_shard and target.is_shard and max(source.outer, target.outer) > 1:
        # Parts that are strewn over a dim are not exchanged as they lie.
        return Conversion(forward="all_gather", backward="all_gather")
    return _CONVERSIONS[source.kind, target.kind]
