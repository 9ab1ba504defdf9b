"""The emitted script as a framework: what it reaches of a cluster."""

from dataclasses import replace
from pathlib import Path

from planner.errors import ProfileError
from planner.framework.calibration import load_calibration
from planner.framework.profiles import load_framework
from planner.framework.tuning import tune
from planner.hardware.profiles import list_clusters, load_cluster
from planner.hardware.spec import ClusterSpec

SCRIPT = "planner"
"""Name of its profile."""


def script_cluster(
    name_or_path: str,
    *,
    gpus: int,
    gpus_per_node: int | None = None,
    calibration: str | None = None,
) -> ClusterSpec:
    """Read a cluster with what the emitted script reaches of its rates.

    A shipped cluster gets the constants of the script's profile, a user's own file is taken as it
    is. What a calibration holds for the script on the cluster comes on top of either, the memory
    that it found in reserve too, and then nothing is known of the error.

    Args:
        name_or_path: Name of a shipped cluster, or path of a TOML file.
        gpus: Ranks in all.
        gpus_per_node: Ranks per node, None for the profile's.
        calibration: Path of a file that ``plan calibrate`` wrote, None for none.

    Raises:
        ProfileError: There is no such profile, or a field of it is wrong.
        RequestError: The ranks do not fill whole nodes.
    """
    cluster = load_cluster(name_or_path, gpus=gpus, gpus_per_node=gpus_per_node)
    script = load_framework(SCRIPT)
    if name_or_path in list_clusters():
        script, cluster = tune(script, cluster, script.tuned.get(cluster.name, {}))
    if calibration is None:
        return cluster
    own = load_calibration(Path(calibration).expanduser()).get((SCRIPT, cluster.name))
    if own is None:
        raise ProfileError(
            f"{calibration}: holds no constants of framework {SCRIPT!r} on cluster "
            f"{cluster.name!r}",
            hint="fit them to runs of the script: rows whose framework is 'planner'",
        )
    script, cluster = tune(script, cluster, own)
    if "reserve_gib" in own:
        reserve_bytes = max(0, round(script.reserve_bytes))
        cluster = replace(cluster, device=replace(cluster.device, reserve_bytes=reserve_bytes))
    return replace(cluster, step_time_error=None)
