"""What the planner knows of the hardware: devices, links and the cluster they form.

All numbers are SI. They come from the TOML files in ``profiles/``, where each stands with its
provenance and source (``planner.hardware.profiles`` reads them).
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum

from planner.units import format_bytes
from planner.vocabulary import Axis


class Provenance(StrEnum):
    """How a number of a profile came to be."""

    MEASURED = "measured"
    FITTED = "fitted"
    DATASHEET = "datasheet"
    ASSUMED = "assumed"
    STATED = "stated by user"


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberSource:
    """Where one number of a profile comes from."""

    provenance: Provenance
    """How it came to be."""
    source: str
    """The table, document or page that it was taken from."""


ATTENTION_FILL_KEYS = 235.0
"""Of a GPU: an H100 reaches 328.9, 389.7, 433.7, 458.4, 470.7 and 476.8 TFLOP/s over 512 to 16,384
keys (Triton; FlashAttention-3 rises the same way), pytorch/benchmark #2391."""

Curve = tuple[tuple[float, float], ...]
"""Seconds by rising size: bytes moved, FLOPs of ops that are limited by them, or of fused attention
its head dim, the seconds being those of one score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EfficiencySpec:
    """Shares of a device's peak rates that kernels reach; ``planner.cost.op`` has the model."""

    matmul_fraction: float
    """Share of peak FLOP/s of an endless matmul with endless tiles."""
    matmul_tiles: tuple[tuple[int, int], ...]
    """Output tiles (m, n) that the matmul library chooses from, in elements."""
    matmul_tile_overhead: float
    """Elements of tile edge that cost as much as computing them: small tiles are less efficient."""
    matmul_k_overhead: float
    """Elements of the k dim that filling and draining one tile costs."""
    matmul_setup_s: float
    """Time of a matmul beyond ``kernel_launch_s`` and its work (choice and set-up of tiles)."""
    matmul_bandwidth_fraction: float
    """Share of memory bandwidth that a matmul reaches when it is limited by its operands."""
    pointwise_bandwidth_fraction: float
    """Share of memory bandwidth of pointwise kernels and copies."""
    strided_elements_per_s: float | None = None
    """Elements that such kernels make where operands lie differently in memory, at most; None where
    that is not known."""
    cast_elements_per_s: float | None = None
    """The same where their dtypes differ."""
    reduction_bandwidth_fraction: float
    """Share of memory bandwidth of norms, softmax and other reductions."""
    embedding_bandwidth_fraction: float
    """Share of memory bandwidth of row gathers and scatters."""
    attention_forward_fraction: float
    """Share of peak FLOP/s of fused attention, forward."""
    attention_backward_fraction: float
    """Share of peak FLOP/s of fused attention, backward."""
    newest_attention_forward_fraction: float | None = None
    """Forward, by kernels that only newer frameworks have; None where there are none."""
    newest_attention_backward_fraction: float | None = None
    """Backward, by these."""
    sustained_fraction: float
    """Largest share of peak FLOP/s that matmuls keep up under a training load (power, heat)."""
    float8_sustained_fraction: float = 1.0
    """The same share of those in float8."""
    attention_fill_keys: float = ATTENTION_FILL_KEYS
    """Keys as long as whose work a tile of queries takes beyond its own."""
    attention_head_overhead: float = 0.0
    """Elements of head dim as long as whose work one score takes beyond its products (softmax)."""
    attention_masked_share: float = 0.0
    """Share of the pairs that a causal mask hides which the kernel works on all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredError:
    """How far predicted step times were off over measured runs of one kind."""

    axes: tuple[Axis, ...]
    """Axes that divided the model in these runs; () where they were data-parallel alone."""
    error: float
    """Mean of |predicted / measured - 1|, by constants that were not fitted to their cluster."""
    num_runs: int
    """Runs."""
    least_gpus: int
    """Devices of the smallest."""
    most_gpus: int
    """Devices of the largest."""
    least_step_s: float
    """Step of the fastest."""
    most_step_s: float
    """Step of the slowest."""
    work: tuple[str, ...]
    """Kinds of ops that did the FLOPs of their models (``WorkKind``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One accelerator (or one CPU process), as a rank of the job sees it."""

    name: str
    """Name of the profile: "h100-sxm"."""
    memory_bytes: int
    """Memory that torch can allocate from, before ``reserve_bytes``."""
    reserve_bytes: int
    """Device context, communicator buffers, library workspaces, and slack of the allocator that
    does not grow."""
    allocator_share: float = 0.0
    """What the allocator holds beside live tensors when they take most, as a share of these."""
    peak_flop_per_s: Mapping[str, float] = field(hash=False)
    """Dense matmul peak by dtype ("bfloat16"); a dtype that is missing is not supported."""
    float8_flop_per_s: float = 0.0
    """Dense peak of products of float8; 0 where there are none."""
    memory_bandwidth_bytes_per_s: float
    """Peak of the device memory."""
    num_sms: int
    """Units that work on one tile each: streaming multiprocessors, compute units, cores."""
    kernel_launch_s: float
    """Time that a kernel takes on the device beyond its work."""
    training_fraction: float = 1.0
    """Share of the rate of single matmuls that those of a training step keep up; 1 where the
    efficiency counts it already (``planner.framework.constants.in_place``)."""
    beside_traffic_fraction: float = 1.0
    """The ``training_fraction`` that the efficiency counts already; a rank that exchanges nothing
    with others computes faster by it."""
    host_dispatch_s: float = 0.0
    """Time that a framework's host takes to issue one op, which bounds a queue of short ones: 0 as
    a profile is read, and where the host runs ops itself: what it takes more comes on top."""
    split_dispatch_s: float = 0.0
    """The same beyond it of an op on parts of tensors that ranks share."""
    selective_dispatch_s: float = 0.0
    """The same beyond it of an op in a block that is recomputed selectively."""
    full_dispatch_s: float = 0.0
    """The same beyond it of an op that runs again where all of its block does."""
    efficiency: EfficiencySpec
    """Shares of peak that kernels reach."""
    op_curves: Mapping[str, Curve] = field(default_factory=dict, hash=False)
    """Times of single ops by their names, without ``kernel_launch_s``, where they were measured:
    they take the place of the shares."""
    step_time_errors: tuple[MeasuredError, ...] = ()
    """Errors of step times by kind of run, of those that were measured on it."""
    margin_bytes: int = 0
    """Memory that plans keep free, for what is wrong about their predicted peak."""
    numbers: Mapping[str, NumberSource] = field(hash=False, repr=False)
    """Provenance and source of every number, by its key in the profile file."""

    @property
    def capacity_bytes(self) -> int:
        """Memory that a plan may fill, ``reserve_bytes`` included."""
        return self.memory_bytes - self.margin_bytes

    @property
    def capacity_words(self) -> str:
        """Its memory, and what of it is kept free: "79.1 GiB, 5% kept free"."""
        words = format_bytes(self.memory_bytes)
        return f"{words}, {self.margin_words}" if self.margin_bytes else words

    @property
    def margin_words(self) -> str:
        """The share that is kept free: "5% kept free"."""
        return f"{100 * self.margin_bytes / self.memory_bytes:.3g}% kept free"

    def with_margin(self, margin: float) -> "DeviceSpec":
        """The same device, a share of its memory kept free."""
        return replace(self, margin_bytes=round(margin * self.memory_bytes))

    @property
    def pointwise_bytes_per_s(self) -> float:
        """Memory bandwidth that copies and pointwise kernels reach."""
        return self.memory_bandwidth_bytes_per_s * self.efficiency.pointwise_bandwidth_fraction

    @property
    def usable_bytes(self) -> int:
        """Memory left for tensors, and what the allocator holds beside them."""
        return self.memory_bytes - self.reserve_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """A class of links, as one rank sees it (``planner.cost.collective`` has the model)."""

    name: str
    """"NVLink 4", "EFA"."""
    ranks: int | None
    """Neighbouring ranks that it joins (8 in an HGX node), None for any number."""
    bandwidth_bytes_per_s: float
    """Unidirectional, per rank, as a large collective reaches it while all ranks send."""
    latency_s: float
    """Time of one hop of a small message."""
    base_latency_s: float
    """Fixed time of one collective or transfer."""
    ramp_bytes: float
    """Chunk (payload over ranks) at which a collective reaches 71% of the bandwidth."""
    switch_all_reduce_fraction: float
    """Payload per second of an all-reduce inside the switch over ``bandwidth_bytes_per_s``; 0
    where the switch cannot reduce."""
    numbers: Mapping[str, NumberSource] = field(hash=False, repr=False)
    """Provenance and source of every number, by its key in the profile file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """What a node's host gives each of its devices, where optimiser states may lie with it."""

    memory_bytes: int
    """Host memory of one rank: that of the node, shared out evenly."""
    link_bytes_per_s: float
    """Copies between host and device, in one direction, as large ones in pinned memory reach it."""
    memory_bandwidth_bytes_per_s: float
    """What one rank's optimiser reaches of the host's memory while all ranks update."""
    numbers: Mapping[str, NumberSource] = field(hash=False, repr=False)
    """Provenance and source of every number, by its key in the profile file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptHost:
    """What the emitted script's own code takes on the hosts of a cluster, where it was measured."""

    step_s: float
    """A step, whatever the model."""
    unit_s: float
    """One microbatch of a block, forward and backward: FSDP2's hooks."""
    collective_s: float
    """Gathering and reducing the parameters of a block once, beyond the collectives themselves."""
    tensor_s: float
    """A step of one parameter of FSDP2, whatever its size: clipping and the optimiser."""
    plain_tensor_s: float
    """The same of one that is a plain tensor."""
    message_s: float
    """A tensor of a microbatch at a boundary of a stage, there and back: torch's schedule."""
    full_op_s: float
    """An op that runs again, beyond itself, where checkpoints keep the input of its block alone."""
    selective_op_s: float
    """An op of a block that is recomputed selectively, in forward and again, beyond itself."""
    split_op_s: float
    """An op on parts of tensors that ranks share, or a collective over them, beyond itself."""
    split_collective_s: float
    """Such a collective beyond that: the ends of split modules."""
    element_s: float
    """A step of one element of a parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """The machines of one job, links from the innermost outwards.

    All devices are of one kind, or those of each of ``parts`` are.
    """

    name: str
    """Name of the profile: "h100-sxm"."""
    device: DeviceSpec
    """What each rank runs on; where there are parts, those of the first."""
    gpus_per_node: int
    """Ranks per node, at most ``num_gpus``."""
    links: tuple[LinkSpec, ...]
    """Link classes, innermost first; the last joins any number of ranks."""
    num_gpus: int
    """Ranks in all."""
    ranks_per_core: float = 1.0
    """Ranks on a core of a node, where they share cores; all times are those while all run."""
    host_time_factor: float = 1.0
    """Time of its hosts for the code of a framework, over that of AWS p5 (AMD EPYC 7R13); 0 where
    the host is the device."""
    hides_traffic: bool = True
    """Whether data-parallel traffic runs beside compute; a rank on a CPU waits for gloo, which
    reduces whole tensors on all ranks."""
    script_host: ScriptHost | None = None
    """Times of the script's code, None where a framework's constants stand for them."""
    host: HostSpec | None = None
    """What states can be offloaded to, None where nothing is known of it."""
    measured_on: str = ""
    """The machine that the numbers are of, "" where it is not one machine."""
    in_training: Mapping[str, float] = field(default_factory=dict, hash=False)
    """What training reaches of its links over what single collectives do, by the keys of
    ``planner.framework.constants``; empty where the links count it already."""
    step_time_errors: tuple[MeasuredError, ...] = ()
    """Those of its device; () where nothing is known of the constants in use."""
    uncalibrated_error: float | None = None
    """The same over all clusters that were left out of a fit: what to expect where no runs were
    measured; None where constants are of the user's own fit."""
    parts: tuple["ClusterSpec", ...] = ()
    """Clusters of one kind of device each that it joins, in the order of their ranks
    (``planner.hardware.mixed``); () where all devices are alike."""
    numbers: Mapping[str, NumberSource] = field(hash=False, repr=False)
    """Provenance and source of the cluster's own numbers."""

    @property
    def kinds(self) -> tuple["ClusterSpec", ...]:
        """Its parts, itself where all devices are alike."""
        return self.parts or (self,)

    @property
    def nodes(self) -> tuple[int, ...]:
        """Ranks of each node."""
        if self.parts:
            return tuple(ranks for part in self.parts for ranks in part.nodes)
        return (self.gpus_per_node,) * (self.num_nodes - 1) + (self.last_node_gpus,)

    @property
    def host_is_device(self) -> bool:
        """Whether ranks run on CPUs."""
        return self.host_time_factor == 0

    @property
    def num_nodes(self) -> int:
        """Nodes in all; the last may not be full."""
        if self.parts:
            return sum(part.num_nodes for part in self.parts)
        return -(-self.num_gpus // self.gpus_per_node)

    @property
    def last_node_gpus(self) -> int:
        """Ranks of the last node."""
        if self.parts:
            return self.parts[-1].last_node_gpus
        return self.num_gpus - (self.num_nodes - 1) * self.gpus_per_node

    @property
    def is_flat(self) -> bool:
        """Whether any node can take any number: all are full, and one link joins them."""
        if self.parts:
            return False
        above = [link for link in self.links[:-1] if (link.ranks or 0) > self.gpus_per_node]
        is_joined = all((link.ranks or 0) >= self.num_gpus for link in above)
        return is_joined and self.last_node_gpus == self.gpus_per_node

    @property
    def nodes_words(self) -> str:
        """How ranks lie on nodes: "2 nodes of 8", "2 nodes of 8 and one of 4"."""
        if self.parts:
            return " and ".join(f"{each.nodes_words} {each.device.name}" for each in self.parts)
        full = self.num_gpus // self.gpus_per_node
        words = f"{full} node{'s' if full > 1 else ''} of {self.gpus_per_node}"
        if self.last_node_gpus < self.gpus_per_node:
            words += f" and one of {self.last_node_gpus}"
        return words

    @property
    def devices_words(self) -> str:
        """Its devices: "16 x h100-sxm", "16 x h100-sxm and 16 x a100-80gb-sxm"."""
        return " and ".join(f"{kind.num_gpus} x {kind.device.name}" for kind in self.kinds)

    def with_devices(self, change: Callable[[DeviceSpec], DeviceSpec]) -> "ClusterSpec":
        """The same with each kind of device changed."""
        parts = tuple(part.with_devices(change) for part in self.parts)
        return replace(self, device=change(self.device), parts=parts)

    def peak_flop_per_s(self, dtype: str, *, float8: bool = False) -> float:
        """Peak of all devices together; 0 where the profile of one states none.

        Args:
            dtype: Compute dtype.
            float8: Whether products may be in float8.
        """
        total = 0.0
        for kind in self.kinds:
            peak = kind.device.peak_flop_per_s.get(dtype, 0.0)
            if not peak:
                return 0.0
            total += kind.num_gpus * max(peak, float8 * kind.device.float8_flop_per_s)
        return total

    @property
    def profile_hash(self) -> str:
        """Hash of every number that a plan depends on; names, sources and errors do not count."""
        content = json.dumps(_without_words(asdict(self)), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


def _without_words(value: object) -> object:
    """Drop names, sources and errors from nested dicts and tuples."""
    if isinstance(value, dict):
        return {
            key: _without_words(part)
            for key, part in value.items()
            if key
            not in ("name", "numbers", "step_time_errors", "uncalibrated_error", "measured_on")
        }
    if isinstance(value, list | tuple):
        return [_without_words(part) for part in value]
    return value
