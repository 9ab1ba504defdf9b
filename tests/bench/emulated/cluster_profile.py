"""Measures emulated clusters with ``plan profile``."""

import os
import subprocess
import sys
from pathlib import Path

from measure import CLUSTERS
from network import INTERFACE, emulated


def profile(name: str, folder: Path, *, quick: bool) -> Path:
    """Measure a cluster, and return its profile."""
    file = folder / f"{name}.toml"
    network = CLUSTERS[name]
    with emulated(network) as hosts:
        command = [
            *(sys.executable, "-c", "from planner.cli.main import main; main()", "profile"),
            *("--processes", str(network.ranks_per_host), "--out", str(file), "--force", "-v"),
        ]
        if len(hosts) == 1:
            command = hosts[0].command(*command)
        else:
            command += ["--hosts", ",".join(host.address for host in hosts)]
            command += ["--remote", f"ip netns exec {hosts[0].owner}{{host}}"]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE}
        subprocess.run([*command, *["--quick"] * quick], check=True, env=environment)
    return file
