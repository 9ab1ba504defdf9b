"""The emitted script as a framework: what it reaches of a cluster."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from planner.errors import ProfileError
from planner.framework.calibration import load_calibration
from planner.framework.constants import PROFILES_OWN, Constants, in_place
from planner.framework.constants import SCRIPT as SCRIPT
from planner.framework.profiles import load_framework
from planner.framework.spec import FrameworkSpec
from planner.hardware.mixed import check_total, joined, parse_parts
from planner.hardware.profiles import load_cluster
from planner.hardware.spec import ClusterSpec


def framework_on_cluster(
    framework: str,
    name_or_path: str,
    *,
    gpus: int,
    gpus_per_node: int | None = None,
    calibration: str | None = None,
    is_part: bool = False,
) -> tuple[FrameworkSpec, ClusterSpec]:
    """Read a framework and a cluster with what the framework reaches of its rates.

    A shipped profile and a user's own file are read alike. What a calibration holds for the
    framework, the cluster or its device comes on top, the memory that it found in reserve too, and
    then nothing is known of the error. Where devices are of several kinds, the framework's own code
    takes what it does on the slowest of their hosts.

    Args:
        framework: Name of a framework profile.
        name_or_path: Name of a shipped cluster, or path of a TOML file; several, each with its
            number of devices, as ``planner.hardware.mixed`` has them.
        gpus: Ranks in all.
        gpus_per_node: Ranks per node, None for the profile's.
        is_part: Devices of another kind belong to the cluster.
        calibration: Path of a file that ``plan calibrate`` wrote, None for none.

    Raises:
        ProfileError: There is no such profile, or a field of it is wrong.
        RequestError: Nothing joins the ranks, or a link joins parts of nodes.
    """
    if parts := parse_parts(name_or_path):
        check_total(name_or_path, parts, gpus)
        return _on_parts(framework, parts, calibration)
    cluster = load_cluster(name_or_path, gpus=gpus, gpus_per_node=gpus_per_node)
    constants = PROFILES_OWN if calibration is None else _own(calibration, framework, cluster)
    spec, cluster = in_place(load_framework(framework), cluster, constants, is_part=is_part)
    if framework != SCRIPT:
        cluster = replace(cluster, step_time_errors=())
    if calibration is None:
        return spec, replace(cluster, uncalibrated_error=spec.uncalibrated_error)
    if "reserve_gib" in constants.framework.get(framework, {}):
        reserve_bytes = max(0, round(spec.reserve_bytes or 0))
        cluster = replace(cluster, device=replace(cluster.device, reserve_bytes=reserve_bytes))
    return spec, replace(cluster, step_time_errors=())


def _on_parts(
    framework: str, parts: Sequence[tuple[str, int]], calibration: str | None
) -> tuple[FrameworkSpec, ClusterSpec]:
    """A framework on devices of several kinds."""
    return on_parts(
        [
            framework_on_cluster(framework, name, gpus=gpus, calibration=calibration, is_part=True)
            for name, gpus in parts
        ]
    )


def on_parts(
    parts: Sequence[tuple[FrameworkSpec, ClusterSpec]],
) -> tuple[FrameworkSpec, ClusterSpec]:
    """Join clusters of one kind of device each with what a framework reaches of them.

    Raises:
        RequestError: They cannot be joined.
    """
    slowest = max(parts, key=lambda each: each[1].host_time_factor)
    return slowest[0], joined([each for _, each in parts])


def _own(calibration: str, framework: str, cluster: ClusterSpec) -> Constants:
    """What a file holds; some of it must be for the framework or the cluster."""
    constants = load_calibration(Path(calibration).expanduser())
    if not (
        framework in constants.framework
        or cluster.name in constants.cluster
        or cluster.device.name in constants.device
    ):
        raise ProfileError(
            f"{calibration}: holds no constants of framework {framework!r}, of cluster "
            f"{cluster.name!r} or of device {cluster.device.name!r}",
            hint=f"fit them to runs of it (rows whose framework is {framework!r}), or to those of "
            "another framework on that cluster",
        )
    return constants
