"""How a tensor lies on the ranks of an axis, and what views do to it."""

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class SplitAxis:
    """The axis of the mesh over which modules are split."""

    name: str
    """"tp"; "cp": there parameters are whole, and the stream is split from the model's inputs
    to its loss; or "ep": there ranks have samples of their own, and share experts."""
    size: int
    """Its ranks."""
    experts: int = 1
    """Ranks that share experts where the axis is tp: its own, and those of neighbours on
    dp_shard."""

    @property
    def is_context(self) -> bool:
        """Whether it divides the sequence alone."""
        return self.name == "cp"

    @property
    def is_inside_blocks(self) -> bool:
        """Whether what lies around the blocks runs as on one device."""
        return self.name == "ep"


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of one tensor over the ranks of an axis.

    ``kind`` is one of

    * "replicate": every rank holds the whole tensor, and its gradient is whole too;
    * "replicate_partial_grad": every rank holds the whole tensor, but each contributes a part
      of its gradient (the input of a column-parallel projection);
    * "shard": tensor dim ``dim`` is split; ``outer`` equal pieces lie side by side along the
      dim and each of them is split (3 for fused qkv; the batch where batch and sequence were
      flattened and the sequence is split). torch calls ``outer`` > 1 a strided shard;
    * "partial": every rank holds a summand.
    """

    kind: str
    dim: int = 0
    outer: int = 1

    def __str__(self) -> str:
        if self.kind == "shard":
            return f"Shard({self.dim})" if self.outer == 1 else f"Shard({self.dim}/{self.outer})"
        return {
            "replicate": "Replicate",
            "replicate_partial_grad": "Replicate",
            "partial": "Partial",
        }[self.kind]

    @property
    def is_shard(self) -> bool:
        """Whether each rank holds only its part."""
        return self.kind == "shard"


REPLICATE = Layout("replicate")
REPLICATE_PARTIAL_GRAD = Layout("replicate_partial_grad")
PARTIAL = Layout("partial")


def shard(dim: int, outer: int = 1) -> Layout:
    """Layout split along tensor dim ``dim`` (non-negative)."""
    return Layout("shard", dim, outer)


def can_shard(shape: tuple[int, ...], layout: Layout, tp: int) -> bool:
    """Whether a tensor of this shape splits evenly in this layout over tp ranks."""
    if not layout.is_shard:
        return True
    size = shape[layout.dim]
    return size % layout.outer == 0 and (size // layout.outer) % tp == 0


def through_reshape(
    layout: Layout, source: tuple[int, ...], target: tuple[int, ...], tp: int
) -> Layout | None:
    """Follow a shard through a view that keeps the order of elements.

    The split factor starts after ``left`` elements-worth of outer indices, where left is the
    product of the dims before it times ``outer``. The view keeps the shard if some target dim
    starts, or can be cut, at the same ``left`` and the part after the cut splits evenly.

    Returns:
        The layout of the target, None where the view mixes the shards.
    """
    if not layout.is_shard:
        return layout
    left = prod(source[: layout.dim]) * layout.outer
    before = 1
    for dim, size in enumerate(target):
        if left % before == 0:
            outer = left // before
            if outer <= size and size % outer == 0 and (size // outer) % tp == 0:
                return shard(dim, outer)
        before *= size
    return None


def through_segments(layout: Layout, dim: int, size: int, piece: int) -> Layout | None:
    """Follow a shard through a split (or slice) of tensor dim ``dim`` into pieces.

    Splitting another dim changes nothing. Splitting the sharded dim keeps the shard only where
    the pieces are exactly the ``outer`` equal segments, each of which is split over the ranks.

    Args:
        layout: Layout before.
        dim: Tensor dim that is split.
        size: Its size.
        piece: Size of each piece.
    """
    if not layout.is_shard or layout.dim != dim:
        return layout
    if layout.outer > 1 and size == piece * layout.outer:
        return shard(dim)
    return None
