"""Clusters on one machine: each host is a network namespace, and token buckets shape its links.

Hosts are joined by veth pairs at one switch. What a host sends, and what the switch sends to it,
passes the rate between hosts times its ranks; ranks of one host talk over its loopback, which
passes the rate inside times its ranks. So each rate is per rank while all ranks send, as profiles
have it, and is set without the other. Hosts have equal shares of the machine's cores (``cores``);
ranks of a host share them.

    python network.py NAMESPACE COMMAND ...    # run a command on a host of a cluster that there is

Namespaces are named after the process that made them. Those of processes that are gone, killed ones
for example, are removed with all that runs in them when the next cluster is made.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import cores

INTERFACE = "eth0"
"""Of each host, for ``GLOO_SOCKET_IFNAME``."""

_PREFIX = "emulated-"
_CLONE_NEWNET = 0x40000000
_MTU = 9000
"""A bucket cuts what is larger than its burst into packets of this size: fewer take less time."""
_QUEUE_BYTES = 64 * 2**20
"""More than sockets have under way: nothing is dropped."""
_BURST_S = 0.6e-3
_LEAST_BURST_BYTES = 2 * _MTU


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Hosts and the rates of their links."""

    hosts: int
    """Hosts."""
    ranks_per_host: int
    """Ranks on each."""
    inside_mbit_per_s: float
    """Each rank to and from ranks of its host, while all send."""
    between_mbit_per_s: float
    """Each rank to and from ranks of other hosts, while all send."""

    @property
    def num_ranks(self) -> int:
        """Ranks in all."""
        return self.hosts * self.ranks_per_host


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Where ranks live."""

    owner: str
    """Begins the names of all namespaces of its cluster."""
    number: int
    """Position among the hosts."""

    @property
    def address(self) -> str:
        """Of its interface."""
        return f"10.77.0.{self.number + 1}"

    @property
    def namespace(self) -> str:
        """Network namespace."""
        return f"{self.owner}{self.address}"

    @property
    def switch(self) -> str:
        """Network namespace of the switch."""
        return f"{self.owner}switch"

    @property
    def port(self) -> str:
        """Its interface at the switch."""
        return f"port{self.number}"

    def command(self, *words: str) -> list[str]:
        """A command line, run there."""
        return [sys.executable, __file__, self.namespace, *words]

    def enter(self) -> None:
        """Move this process there; gloo then talks over its interface."""
        enter(self.namespace)


def enter(namespace: str) -> None:
    """Move this process to a host."""
    cores.enter(namespace)
    with Path("/run/netns", namespace).open() as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def why_not() -> str:
    """Say why no cluster can be made here, "" where one can."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} of iproute2 not found"
    probe = Network(hosts=2, ranks_per_host=1, inside_mbit_per_s=100, between_mbit_per_s=100)
    try:
        with emulated(probe):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return f"hosts cannot be made of namespaces and control groups: {said.strip()}"


@contextlib.contextmanager
def emulated(network: Network) -> Iterator[tuple[Host, ...]]:
    """Make a cluster, yield its hosts, and remove it with all that runs in it."""
    remove_leftovers()
    own = f"{_PREFIX}{os.getpid()}-{_started(os.getpid())}-"
    hosts = tuple(Host(owner=own, number=number) for number in range(network.hosts))
    try:
        switch = hosts[0].switch
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "switch", "up")
        for host in hosts:
            _join(host)
            if network.hosts > 1:
                cores.give(host.namespace, len(os.sched_getaffinity(0)) / network.hosts)
        shape(hosts, network)
        yield hosts
    finally:
        for namespace in _made():
            if namespace.startswith(own):
                _remove(namespace)


def shape(hosts: Sequence[Host], network: Network) -> None:
    """Give the links of hosts the rates of a network, in the place of those that they have."""
    ranks = network.ranks_per_host
    for host in hosts:
        _limit(host.namespace, "lo", ranks * network.inside_mbit_per_s)
        _limit(host.namespace, INTERFACE, ranks * network.between_mbit_per_s)
        _limit(host.switch, host.port, ranks * network.between_mbit_per_s)


def remove_leftovers() -> list[str]:
    """Remove what processes that are gone have made, and return the names."""
    left = [each for each in _made() if _is_leftover(each)]
    for namespace in left:
        _remove(namespace)
    return left


def _is_leftover(namespace: str) -> bool:
    if not namespace.startswith(_PREFIX):
        return False
    pid, started, _ = namespace.removeprefix(_PREFIX).split("-")
    return _started(int(pid)) != started


def _started(pid: int) -> str:
    """When a process was started, "" where it is gone: its number may be another's by now."""
    try:
        fields = Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] == "Z" else fields[19]


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line]


def _made() -> list[str]:
    """Names of namespaces, and of control groups whose namespace is gone."""
    return sorted({*_namespaces(), *cores.names(_PREFIX)})


def _remove(name: str) -> None:
    if name in _namespaces():
        for pid in _run("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _run("ip", "netns", "del", name)
    cores.remove(name)


def _join(host: Host) -> None:
    """Connect a host to the switch."""
    inside, switch = host.namespace, host.switch
    _run("ip", "netns", "add", inside)
    _run("ip", "-n", inside, "link", "set", "lo", "mtu", str(_MTU), "up")
    pair = ("type", "veth", "peer", "name", INTERFACE, "netns", inside)
    _run("ip", "-n", switch, "link", "add", host.port, "mtu", str(_MTU), *pair)
    _run("ip", "-n", inside, "link", "set", INTERFACE, "mtu", str(_MTU))
    _run("ip", "-n", inside, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
    _run("ip", "-n", switch, "link", "set", host.port, "master", "switch", "up")
    _run("ip", "-n", inside, "link", "set", INTERFACE, "up")


def _limit(namespace: str, device: str, mbit_per_s: float) -> None:
    """Let a device send at a rate, after a short burst."""
    burst = max(_LEAST_BURST_BYTES, round(mbit_per_s * 1e6 / 8 * _BURST_S))
    bucket = ("rate", f"{mbit_per_s}mbit", "burst", str(burst), "limit", str(_QUEUE_BYTES))
    _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *bucket)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    enter(sys.argv[1])
    os.execvp(sys.argv[2], sys.argv[2:])
