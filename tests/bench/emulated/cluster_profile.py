"""Measures emulated clusters with ``plan profile``."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

from measure import CLUSTERS
from network import INTERFACE, emulated
from network import __file__ as network_file


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
            there = f"{hosts[0].owner}{{host}}"
            command += ["--remote", shlex.join([sys.executable, network_file, there])]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE}
        subprocess.run([*command, *["--quick"] * quick], check=True, env=environment)
    return file
