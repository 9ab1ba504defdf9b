"""Mesh axes and their degrees, in the words of torch and TorchTitan.

*Axis* is a mesh axis, *dim* a tensor dimension.
"""

from dataclasses import dataclass

from planner.vocabulary import Axis


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDegrees:
    """Size of every mesh axis. ``ep`` borrows its ranks from dp_shard: neighbours on it."""

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
        """The axis over which modules are split: tp (of one rank where none is), cp or ep."""
        return next((axis for axis in (Axis.CP, Axis.EP) if getattr(self, axis) > 1), Axis.TP)

    @property
    def split_ranks(self) -> int:
        """Ranks of that axis."""
        return max(self.tp, self.cp, self.ep)

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
        return self.shards // self.ep

    @property
    def dp(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard
