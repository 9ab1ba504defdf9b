"""Mesh axes and their degrees, in the words of torch and TorchTitan.

*Axis* is a mesh axis, *dim* a tensor dimension.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDegrees:
    """Size of every mesh axis. ``ep`` borrows its ranks from dp_shard * cp * tp."""

    dp_replicate: int = 1
    """Replicas of the sharded model."""
    dp_shard: int = 1
    """Ranks that share parameters, gradients and optimiser states (FSDP2)."""
    tp: int = 1
    """Tensor-parallel ranks."""
    cp: int = 1
    """Context-parallel ranks (sequence dim)."""
    pp: int = 1
    """Pipeline ranks."""
    ep: int = 1
    """Expert-parallel ranks."""

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.dp_replicate * self.dp_shard * self.tp * self.cp * self.pp

    @property
    def dp(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard
