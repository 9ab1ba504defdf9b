"""Host memory: states that lie there, updated by the host, and inputs of blocks.

FSDP2 (``CPUOffloadPolicy``) keeps a rank's share of parameters, gradients and optimiser states in
pinned host memory. Each gather copies the share of a unit to the device first, and each reduction
ends with a copy of its result to the host. Both run on the streams of the collectives, behind
compute where these are; but a gradient that is added to those of earlier microbatches is added by
the host, which waits for the copy and issues nothing meanwhile (Ren et al. 2021, 2101.06840, for
the scheme).

The input of a block that is recomputed in full may lie there from its forward to its backward. It
is copied on the stream of compute, which waits for both copies (``runtime.host_inputs``).
"""

from planner.framework.spec import FrameworkSpec
from planner.hardware.spec import ClusterSpec
from planner.strategy.configuration import Configuration
from planner.units import DTYPE_BYTES
from planner.vocabulary import Dtype

_ADDED_BYTES = 3 * DTYPE_BYTES[Dtype.FLOAT32]
"""What the host reads and writes to add one element of a gradient to another."""


class HostState:
    """What of one configuration lies in host memory, and what its states cost there."""

    def __init__(
        self, configuration: Configuration, cluster: ClusterSpec, framework: FrameworkSpec
    ) -> None:
        """Keep what prices depend on."""
        self._host = cluster.host if configuration.cpu_offload else None
        is_used = configuration.cpu_offload or configuration.activation_offload
        self._room_bytes = cluster.host.memory_bytes if is_used and cluster.host else None
        self._framework = framework
        self._device_bytes_per_s = cluster.device.pointwise_bytes_per_s
        degrees = configuration.degrees
        self.copies_once = degrees.dp_replicate > 1
        """Whether gradients come to the host in the last microbatch alone, added up."""
        reduces_each = configuration.reshard_after_forward and degrees.pp == 1
        reduces_each = reduces_each and not self.copies_once
        self._additions = (configuration.num_microbatches - 1) * reduces_each

    @property
    def is_on_host(self) -> bool:
        """Whether states are offloaded."""
        return self._host is not None

    @property
    def room_bytes(self) -> int:
        """Host memory for what a rank has there, 0 where that is nothing."""
        return self._room_bytes or 0

    def lacks(self, num_bytes: float) -> bool:
        """Whether what a rank has in host memory is too large for it."""
        return self._room_bytes is not None and num_bytes > self._room_bytes

    @property
    def waits(self) -> bool:
        """Whether the host waits for reductions, to add up gradients."""
        return self._host is not None and self._additions > 0

    def copy_s(self, num_bytes: float) -> float:
        """A copy of a rank's share between host and device; none where it is not offloaded."""
        return 0.0 if self._host is None else num_bytes / self._host.link_bytes_per_s

    def update_s(self, parameters: float) -> float:
        """Clipping and the optimiser on a rank's share, its elements added up by the host before.

        Args:
            parameters: Elements of the share.
        """
        moved_bytes = parameters * self._framework.optimizer_moved_bytes
        if self._host is None:
            return moved_bytes / self._device_bytes_per_s
        moved_bytes += parameters * _ADDED_BYTES * self._additions
        return moved_bytes / self._host.memory_bandwidth_bytes_per_s
