"""Constants by what they belong to: a device, a cluster or a framework, never a pair of them.

A device's constants say what kernels reach of it while a model is trained, a cluster's what
collectives reach of its links and how fast its hosts are, a framework's what its code does. So any
framework is priced on any cluster: ``in_place`` joins the three.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from planner.errors import ProfileError
from planner.framework.spec import FrameworkSpec
from planner.hardware.fields import near_names
from planner.hardware.spec import ClusterSpec, DeviceSpec, EfficiencySpec, LinkSpec
from planner.units import GIB, MIB

SCRIPT = "planner"
"""Name of the emitted script's profile."""

Owner = Literal["device", "cluster", "framework"]
"""What a constant can belong to."""

Values = Mapping[str, float]
"""Numbers by their keys in ``KEYS``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constants:
    """Numbers that take the place of those of the profiles, by the owner's name."""

    device: Mapping[str, Values] = field(default_factory=dict)
    """By the names of device profiles."""
    cluster: Mapping[str, Values] = field(default_factory=dict)
    """By the names of cluster profiles."""
    framework: Mapping[str, Values] = field(default_factory=dict)
    """By the names of framework profiles."""

    def of(self, owner: Owner) -> Mapping[str, Values]:
        """Those of one kind of owner."""
        return {"device": self.device, "cluster": self.cluster, "framework": self.framework}[owner]


PROFILES_OWN = Constants()
"""Nothing is replaced."""

_SetDevice = Callable[[DeviceSpec, float], DeviceSpec]
_SetCluster = Callable[[ClusterSpec, float], ClusterSpec]
_SetFramework = Callable[[FrameworkSpec, float], FrameworkSpec]


def _efficiency(*fields: str) -> _SetDevice:
    """The first field takes the value, the others that there are keep their proportion to it."""

    def put(device: DeviceSpec, value: float) -> DeviceSpec:
        factor = value / getattr(device.efficiency, fields[0])
        own = {name: getattr(device.efficiency, name) for name in fields}
        changed = {name: share * factor for name, share in own.items() if share is not None}
        return replace(device, efficiency=replace(device.efficiency, **changed))

    return put


def _device(name: str, scale: float = 1.0) -> _SetDevice:
    def put(device: DeviceSpec, value: float) -> DeviceSpec:
        return replace(device, **{name: value * scale})  # type: ignore[arg-type]

    return put


def _links(position: int, change: Callable[[LinkSpec, float], LinkSpec]) -> _SetCluster:
    def put(cluster: ClusterSpec, value: float) -> ClusterSpec:
        links = list(cluster.links)
        links[position] = change(links[position], value)
        return replace(cluster, links=tuple(links))

    return put


def _bandwidth(link: LinkSpec, share: float) -> LinkSpec:
    return replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s * share)


def _latency(link: LinkSpec, factor: float) -> LinkSpec:
    return replace(
        link, latency_s=link.latency_s * factor, base_latency_s=link.base_latency_s * factor
    )


def _host(cluster: ClusterSpec, factor: float) -> ClusterSpec:
    return replace(cluster, host_time_factor=factor)


def _framework(name: str, scale: float = 1.0) -> _SetFramework:
    def put(framework: FrameworkSpec, value: float) -> FrameworkSpec:
        return replace(framework, **{name: value * scale})  # type: ignore[arg-type]

    return put


_TRAINING = "training_fraction_of_sustained"

_DEVICE: Mapping[str, _SetDevice] = {
    _TRAINING: _device("training_fraction"),
    "attention_forward_fraction_of_peak": _efficiency(
        "attention_forward_fraction",
        "attention_backward_fraction",
        "newest_attention_forward_fraction",
        "newest_attention_backward_fraction",
    ),
    "pointwise_fraction_of_bandwidth": _efficiency(
        "pointwise_bandwidth_fraction", "reduction_bandwidth_fraction"
    ),
    "matmul_k_overhead_elements": _efficiency("matmul_k_overhead"),
    "kernel_launch_us": _device("kernel_launch_s", 1e-6),
}

_CLUSTER: Mapping[str, _SetCluster] = {
    "inner_bandwidth_share": _links(0, _bandwidth),
    "inner_latency_factor": _links(0, _latency),
    "outer_bandwidth_share": _links(-1, _bandwidth),
    "outer_latency_factor": _links(-1, _latency),
    "host_time_factor": _host,
}

_FRAMEWORK: Mapping[str, _SetFramework] = {
    "host_dispatch_us": _framework("host_dispatch_s", 1e-6),
    "launch_wait_us": _framework("launch_wait_s", 1e-6),
    "attention_share": _framework("attention_share"),
    "collective_host_us": _framework("collective_host_s", 1e-6),
    "bucket_mib": _framework("bucket_bytes", MIB),
    "gradient_overlap": _framework("gradient_overlap"),
    "tp_overlap": _framework("tp_overlap"),
    "message_us": _framework("message_s", 1e-6),
    "congested_message_us": _framework("congested_message_s", 1e-6),
    "step_us": _framework("step_s", 1e-6),
    "optimizer_moved_bytes_per_parameter": _framework("optimizer_moved_bytes"),
    "accumulated_bytes_per_parameter": _framework("accumulated_bytes"),
    "reserve_gib": _framework("reserve_bytes", GIB),
}

KEYS: Mapping[Owner, tuple[str, ...]] = {
    "device": tuple(_DEVICE),
    "cluster": tuple(_CLUSTER),
    "framework": tuple(_FRAMEWORK),
}
"""What can be fitted, by what it belongs to."""


def check_keys(owner: Owner, name: str, values: Values) -> None:
    """Refuse what is no constant of such an owner.

    Raises:
        ProfileError: A key is unknown, or belongs to another kind of owner.
    """
    for key in values:
        if key not in KEYS[owner]:
            others = [other for other, keys in KEYS.items() if key in keys]
            raise ProfileError(
                f"{owner} {name!r}: {key!r} is no constant of a {owner}",
                hint=f"it belongs to a {others[0]}" if others else near_names(key, KEYS[owner]),
            )


def in_place(
    framework: FrameworkSpec,
    cluster: ClusterSpec,
    constants: Constants = PROFILES_OWN,
    *,
    is_part: bool = False,
) -> tuple[FrameworkSpec, ClusterSpec]:
    """A framework, and what it reaches of a cluster.

    Args:
        framework: As its profile has it.
        cluster: As its profile has it.
        constants: Numbers that take the place of the profiles'; those of other owners do nothing.
        is_part: Other devices belong to the cluster, so that a single one is not alone.

    What was measured of the script's own code on a cluster stands for its constants, those of a
    calibration for both.

    Returns:
        The framework, and the cluster with what training reaches of its devices, with the time
        that the framework's code takes on its hosts.

    Raises:
        ProfileError: A key is no constant of its owner.
    """
    device = cluster.device
    own = (
        constants.device.get(device.name, {}),
        {**cluster.in_training, **constants.cluster.get(cluster.name, {})},
        constants.framework.get(framework.name, {}),
    )
    for owner, name, values in zip(
        KEYS, (device.name, cluster.name, framework.name), own, strict=True
    ):
        check_keys(owner, name, values)
    _check_buckets(framework, own[2])
    framework, cluster = _with_own_code(framework, cluster)
    for key, value in own[0].items():
        device = _DEVICE[key](device, value)
    for key, value in own[1].items():
        cluster = _CLUSTER[key](cluster, value)
    for key, value in own[2].items():
        framework = _FRAMEWORK[key](framework, value)
    # What was found for the device holds, however many of them showed it.
    is_alone = cluster.num_gpus == 1 and not is_part and _TRAINING not in own[0]
    device = _in_training(framework, device, cluster, is_alone=is_alone)
    framework = replace(framework, collective_host_s=_collective_host_s(framework, cluster))
    return framework, replace(cluster, device=device, in_training={})


def _check_buckets(framework: FrameworkSpec, values: Values) -> None:
    if "bucket_mib" in values and framework.state_form == "fsdp":
        raise ProfileError(
            f"framework {framework.name!r}: 'bucket_mib' has no effect, its gradients are reduced "
            "block by block",
            hint="leave it out",
        )


def _with_own_code(
    framework: FrameworkSpec, cluster: ClusterSpec
) -> tuple[FrameworkSpec, ClusterSpec]:
    """Take what was measured of the script's own code, for the script alone."""
    host = cluster.script_host
    if framework.name != SCRIPT:
        return framework, replace(cluster, script_host=None)
    if host is None:
        return framework, cluster
    return replace(framework, step_s=host.step_s, message_s=host.message_s), cluster


def _collective_host_s(framework: FrameworkSpec, cluster: ClusterSpec) -> float:
    """What a collective over tp takes the host of a cluster beyond an op."""
    if cluster.script_host is not None:
        return cluster.script_host.split_collective_s
    return framework.collective_host_s * cluster.host_time_factor


def _dispatched(framework: FrameworkSpec, device: DeviceSpec, cluster: ClusterSpec) -> DeviceSpec:
    """A device with what ops take its host; what some take more as it was measured, if it was."""
    dispatch_s = framework.host_dispatch_s * cluster.host_time_factor
    host = cluster.script_host
    if host is None:
        return replace(
            device,
            host_dispatch_s=dispatch_s,
            split_dispatch_s=dispatch_s * framework.split_host_share,
            selective_dispatch_s=dispatch_s * framework.selective_host_share,
        )
    return replace(
        device,
        host_dispatch_s=dispatch_s,
        split_dispatch_s=host.split_op_s,
        selective_dispatch_s=host.selective_op_s,
        full_dispatch_s=host.full_op_s,
    )


def _attention_fractions(
    framework: FrameworkSpec, efficiency: EfficiencySpec
) -> tuple[float, float]:
    """Shares of peak of the kernels of fused attention that a framework runs."""
    forward = efficiency.newest_attention_forward_fraction
    backward = efficiency.newest_attention_backward_fraction
    if not framework.newest_attention or forward is None or backward is None:
        return efficiency.attention_forward_fraction, efficiency.attention_backward_fraction
    return forward, backward


_PUBLISHED_KERNELS: dict[str, Any] = {"strided_elements_per_s": None, "cast_elements_per_s": None}
"""What pointwise kernels take beyond their bytes is in the constants of frameworks that were fitted
to published runs."""


def _in_training(
    framework: FrameworkSpec, device: DeviceSpec, cluster: ClusterSpec, *, is_alone: bool
) -> DeviceSpec:
    """A device as the kernels and the host code of a framework use it.

    What a training step loses against single matmuls was fitted to runs of several GPUs, whose
    collectives take part of each: a rank that is alone loses nothing.
    """
    efficiency = device.efficiency
    forward, backward = _attention_fractions(framework, efficiency)
    fraction = 1.0 if is_alone else device.training_fraction
    return replace(
        _dispatched(framework, device, cluster),
        training_fraction=1.0,
        beside_traffic_fraction=fraction,
        kernel_launch_s=device.kernel_launch_s + framework.launch_wait_s,
        efficiency=replace(
            efficiency,
            sustained_fraction=efficiency.sustained_fraction * fraction,
            float8_sustained_fraction=efficiency.float8_sustained_fraction * fraction,
            matmul_fraction=efficiency.matmul_fraction * fraction,
            attention_forward_fraction=forward * framework.attention_share,
            attention_backward_fraction=backward * framework.attention_share,
            **({} if framework.newest_attention else _PUBLISHED_KERNELS),
        ),
    )
