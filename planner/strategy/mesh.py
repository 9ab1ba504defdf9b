"""Mesh axes and their degrees, in the words of torch and TorchTitan.

*Axis* is a mesh axis, *dim* a tensor dimension.
"""

from dataclasses import dataclass
from typing import Protocol

from planner.vocabulary import Axis


class SplitDegrees(Protocol):
    """What has a degree of each axis that splits modules."""

    @property
    def tp(self) -> int:
        """Tensor-parallel ranks."""

    @property
    def cp(self) -> int:
        """Context-parallel ranks."""

    @property
    def ep(self) -> int:
        """Expert-parallel ranks."""


def split_axis(degrees: SplitDegrees) -> Axis:
    """Return the axis over which modules are split, the inner one of tp and cp.

    ep where nothing else is.
    """
    if degrees.tp > 1:
        return Axis.TP
    if degrees.cp > 1:
        return Axis.CP
    return Axis.EP if degrees.ep > 1 else Axis.TP


BESIDE = (Axis.CP, Axis.EP)
"""Axes whose ranks exchange beside those of the split axis: of cp around tp, and of ep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDegrees:
    """Size of every mesh axis.

    The ranks of ``ep`` are those of tp and cp, and neighbours on dp_shard.
    """

    dp_replicate: int = 1
    """Replicas of the sharded model."""
    dp_shard: int = 1
    """Ranks that read different samples and share parameters, gradients and optimiser states
    (FSDP2) with those of cp."""
    tp: int = 1
    """Tensor-parallel ranks."""
    cp: int = 1
    """Context-parallel ranks: each holds a part of the sequence, and all parameters."""
    pp: int = 1
    """Pipeline ranks."""
    ep: int = 1
    """Expert-parallel ranks: each has some of the experts, which the tokens of all go to."""

    @property
    def split_axis(self) -> Axis:
        """The axis over which modules are split: tp (of one rank where none is), cp or ep.

        tp may split what ranks of cp have. Under either or both, experts may be those of the
        ranks of ep.
        """
        return split_axis(self)

    @property
    def split_axes(self) -> tuple[Axis, ...]:
        """The axes over which modules are split, the inner one first."""
        if not self.splits_modules:
            return ()
        around = (Axis.CP,) if self.tp > 1 < self.cp else ()
        return (self.split_axis, *around)

    @property
    def split_ranks(self) -> int:
        """Ranks of that axis."""
        return int(getattr(self, self.split_axis))

    @property
    def splits_modules(self) -> bool:
        """Whether modules are split over an axis."""
        return self.split_ranks > 1

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.dp_replicate * self.dp_shard * self.tp * self.cp * self.pp

    @property
    def shards(self) -> int:
        """Ranks that share parameters, gradients and optimiser states.

        Those that hold different parts of a sample are among them as those that read others.
        """
        return self.dp_shard * self.cp

    @property
    def expert_shards(self) -> int:
        """Ranks that share the state of the same experts."""
        return self.dp_shard * self.sample_ranks // self.ep if self.ep > 1 else self.shards

    @property
    def sample_axes(self) -> tuple[Axis, ...]:
        """The axes whose ranks have the same samples, in the usual order."""
        return tuple(axis for axis in (Axis.CP, Axis.TP) if getattr(self, axis) > 1)

    @property
    def sample_ranks(self) -> int:
        """Ranks that have the same samples and the same stage."""
        return self.tp * self.cp

    @property
    def dp(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard
