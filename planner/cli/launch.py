"""The command that starts an emitted script."""

import shlex
from pathlib import Path

from planner.hardware.spec import ClusterSpec

RENDEZVOUS_PORT = 29500
"""Port of torchrun's rendezvous, its own default."""


def launch_command(cluster: ClusterSpec, script: Path) -> str:
    """Write the torchrun command for a script, one process per device."""
    target = shlex.quote(str(script))
    if cluster.num_nodes == 1:
        return f"torchrun --standalone --nproc-per-node {cluster.num_gpus} {target}"
    return (
        f"torchrun --nnodes {cluster.num_nodes} --nproc-per-node {cluster.gpus_per_node} "
        f"--rdzv-backend c10d --rdzv-endpoint HOST:{RENDEZVOUS_PORT} {target}"
    )
