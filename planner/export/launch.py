"""Files that start a script on many nodes: torchrun, Slurm, Kubernetes, SkyPilot.

One of them, ``torchrun.sh``, starts the processes of a node; the others start it on each node, and
start again what ended because it was asked to.
"""

from collections.abc import Mapping

from planner.hardware.nodes import numbering_words, smaller_nodes
from planner.hardware.spec import ClusterSpec
from planner.rendering import render
from planner.version import VERSION

FOLDER = "launch"
"""Folder of these files beside the script."""

_SKYPILOT_NAMES: Mapping[str, str] = {
    "a100-40gb-sxm": "A100",
    "a100-80gb-sxm": "A100-80GB",
    "a10g": "A10G",
    "a40": "A40",
    "b200-sxm": "B200",
    "h100-pcie": "H100",
    "h100-sxm": "H100",
    "h200-sxm": "H200",
    "l40s": "L40S",
    "mi300x": "MI300X",
    "rtx4090": "RTX4090",
    "v100-16gb-sxm": "V100",
    "v100-32gb-sxm": "V100-32GB",
}
"""Accelerators of SkyPilot's catalog, by the device profiles that ship."""

_ANY_NODES = ("torchrun.sh",)
"""Templates where each node is told its number."""

_LIKE_NODES = (*_ANY_NODES, "slurm.sh", "trainjob.yaml", "skypilot.yaml")
"""Those that start where all nodes are of one kind: schedulers number them as they come."""


def launch_files(cluster: ClusterSpec) -> dict[str, str]:
    """Give the launch files of a plan, text by file name; none where the host is the device.

    Args:
        cluster: What the plan is for.
    """
    if cluster.host_is_device:
        return {}
    values = {
        "planner_version": VERSION,
        "nodes": cluster.num_nodes,
        "gpus_per_node": cluster.gpus_per_node,
        "smaller_nodes": smaller_nodes(cluster),
        "idle_gpus": cluster.gpus_per_node - cluster.last_node_gpus,
        "numbering": ", ".join(numbering_words(cluster)),
        "nodes_words": cluster.nodes_words,
        "is_flat": cluster.is_flat,
        "accelerator": _SKYPILOT_NAMES.get(cluster.device.name, "NAME_OF_THE_GPU"),
        "resource": "amd.com/gpu" if cluster.device.name.startswith("mi") else "nvidia.com/gpu",
    }
    names = _ANY_NODES if cluster.parts else _LIKE_NODES
    return {f"{FOLDER}/{name}": render(f"export/{name}.j2", **values) for name in names}
