"""A cluster on one machine: each rank in a network namespace of its own, with shaped links.

All ranks are on one switch. What a rank sends to ranks of its own host passes a token bucket with
the rate inside a host, all else one with the rate between hosts, and the switch shapes what comes
back alike: every rank has a port of its own to either link, as a GPU with its own adapter has.

Namespaces are named after the process that made them. Those of processes that are gone, killed ones
for example, are removed with all that runs in them when the next network is made.
"""

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

INTERFACE = "eth0"
"""Of each rank, for ``GLOO_SOCKET_IFNAME``."""

_PREFIX = "emulated-"
_CLONE_NEWNET = 0x40000000
_MTU = 1500
_QUEUE_PACKETS = 20_000
"""More than sockets have under way: nothing is dropped."""
_BURST_S = 0.5e-3
_LEAST_BURST_BYTES = 4 * _MTU


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """Hosts and the rates of their links."""

    hosts: int
    """Hosts."""
    ranks_per_host: int
    """Ranks on each."""
    inside_mbit_per_s: float
    """Each rank to and from ranks of its host."""
    between_mbit_per_s: float
    """Each rank to and from ranks of other hosts."""

    @property
    def num_ranks(self) -> int:
        """Ranks in all."""
        return self.hosts * self.ranks_per_host


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Where a rank lives."""

    namespace: str
    """Network namespace."""
    switch: str
    """That of the switch."""
    rank: int
    """Rank."""

    @property
    def address(self) -> str:
        """Of its interface."""
        return f"10.77.0.{self.rank + 1}"

    @property
    def port(self) -> str:
        """Its interface at the switch."""
        return f"port{self.rank}"

    def command(self, *words: str) -> list[str]:
        """A command line, run there."""
        return ["ip", "netns", "exec", self.namespace, *words]

    def enter(self) -> None:
        """Move this process there; gloo then talks over its interface."""
        with Path("/run/netns", self.namespace).open() as file:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(file.fileno(), _CLONE_NEWNET):
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code), self.namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def why_not() -> str:
    """Say why no network can be made here, "" where one can."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} of iproute2 not found"
    probe = Network(hosts=2, ranks_per_host=1, inside_mbit_per_s=100, between_mbit_per_s=100)
    try:
        with emulated(probe):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        return f"network namespaces with token buckets cannot be made: {said.strip()}"


@contextlib.contextmanager
def emulated(network: Network) -> Iterator[tuple[RankPlace, ...]]:
    """Make a network, yield the place of each rank, and remove it with all that runs in it."""
    remove_leftovers()
    own = f"{_PREFIX}{os.getpid()}-{_started(os.getpid())}-"
    switch = f"{own}switch"
    places = tuple(
        RankPlace(namespace=f"{own}{rank}", switch=switch, rank=rank)
        for rank in range(network.num_ranks)
    )
    try:
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "switch", "up")
        for place in places:
            _join(place)
        shape(places, network)
        yield places
    finally:
        for namespace in _namespaces():
            if namespace.startswith(own):
                _remove(namespace)


def remove_leftovers() -> list[str]:
    """Remove the namespaces of processes that are gone, and return their names."""
    left = [each for each in _namespaces() if _is_leftover(each)]
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


def _remove(namespace: str) -> None:
    for pid in _run("ip", "netns", "pids", namespace).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    _run("ip", "netns", "del", namespace)


def _join(place: RankPlace) -> None:
    """Connect a rank to the switch."""
    inside, switch = place.namespace, place.switch
    _run("ip", "netns", "add", inside)
    _run("ip", "-n", inside, "link", "set", "lo", "up")
    pair = ("type", "veth", "peer", "name", INTERFACE, "netns", inside)
    _run("ip", "-n", switch, "link", "add", place.port, "mtu", str(_MTU), *pair)
    _run("ip", "-n", inside, "link", "set", INTERFACE, "mtu", str(_MTU))
    _run("ip", "-n", inside, "addr", "add", f"{place.address}/24", "dev", INTERFACE)
    _run("ip", "-n", switch, "link", "set", place.port, "master", "switch", "up")
    _run("ip", "-n", inside, "link", "set", INTERFACE, "up")


def shape(places: Sequence[RankPlace], network: Network) -> None:
    """Give ranks the hosts and rates of a network, in the place of those that they have."""
    for place in places:
        host = place.rank // network.ranks_per_host
        near = [
            other.address
            for other in places
            if other is not place and other.rank // network.ranks_per_host == host
        ]
        _limit(place.namespace, INTERFACE, [f"dst {address}" for address in near], network)
        _limit(place.switch, place.port, [f"src {address}" for address in near], network)


def _limit(namespace: str, device: str, inside: Sequence[str], network: Network) -> None:
    """Give what a device sends one token bucket inside the host, another one for all else."""
    tc = ("tc", "-n", namespace)
    where = ("dev", device, "parent")
    if " htb " in _run(*tc, "qdisc", "show", "dev", device, "root"):
        _run(*tc, "qdisc", "del", "dev", device, "root")
    _run(*tc, "qdisc", "add", "dev", device, "root", "handle", "1:", "htb", "default", "2")
    rates = (network.inside_mbit_per_s, network.between_mbit_per_s)
    for link, rate in enumerate(rates, start=1):
        burst = str(max(_LEAST_BURST_BYTES, round(rate * 1e6 / 8 * _BURST_S)))
        bucket = ("rate", f"{rate}mbit", "burst", burst, "cburst", burst, "quantum", str(_MTU))
        _run(*tc, "class", "add", *where, "1:", "classid", f"1:{link}", "htb", *bucket)
        _run(*tc, "qdisc", "add", *where, f"1:{link}", "pfifo", "limit", str(_QUEUE_PACKETS))
    for address in inside:
        match = ("u32", "match", "ip", *address.split(), "flowid", "1:1")
        _run(*tc, "filter", "add", *where, "1:", "protocol", "ip", *match)


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
