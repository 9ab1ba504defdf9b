"""Clusters of several kinds of device: parts whose ranks follow one another.

``h100-sxm:16,a100-80gb-sxm:16`` is 16 devices of one profile beside 16 of another. Inside a part
links are those of its profile; between parts traffic takes the slower one of their outermost links,
since it crosses both.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, permutations
from pathlib import Path

from planner.errors import RequestError
from planner.hardware.spec import ClusterSpec, LinkSpec

MOST_KINDS = 5
"""Kinds of device up to which all their orders are looked at: 120."""

_PART_SIGN = ","
_NUMBER_SIGN = ":"


def parse_parts(cluster: str) -> tuple[tuple[str, int], ...]:
    """Read the parts of "h100-sxm:16,a100-80gb-sxm:16": profiles with their numbers of devices.

    Args:
        cluster: What names a cluster.

    Returns:
        () where it names one profile, or the path of one.

    Raises:
        RequestError: A part lacks its number of devices, or comes twice, or there are too many.
    """
    words = cluster.split(_PART_SIGN)
    if len(words) == 1 or Path(cluster).expanduser().is_file():  # whose name may have the sign
        return ()
    if len(words) > MOST_KINDS:
        raise RequestError(
            f"--cluster {cluster}: {len(words)} kinds of device, and plans are made for "
            f"{MOST_KINDS} at most",
            hint="leave some out",
        )
    parts = []
    for word in words:
        name, sign, number = word.strip().rpartition(_NUMBER_SIGN)
        if not (sign and name and number.isdecimal() and int(number)):
            raise RequestError(
                f"--cluster {cluster}: {word!r} is no profile with a number of devices",
                hint="of several kinds of device, each has its number: "
                "--cluster h100-sxm:16,a100-80gb-sxm:16",
            )
        parts.append((name, int(number)))
    names = [name for name, _ in parts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        total = sum(number for name, number in parts if name == twice)
        raise RequestError(
            f"--cluster {cluster}: {twice} comes twice", hint=f"name it once: {twice}:{total}"
        )
    return tuple(parts)


def check_total(cluster: str, parts: Sequence[tuple[str, int]], gpus: int) -> None:
    """Hold the number of devices asked for to that of the parts.

    Raises:
        RequestError: They differ.
    """
    total = sum(number for _, number in parts)
    if gpus != total:
        numbers = " + ".join(str(number) for _, number in parts)
        raise RequestError(
            f"--gpus {gpus} with --cluster {cluster}, which has {numbers} = {total}",
            hint=f"--gpus {total}, or other numbers in --cluster",
        )


def joined(parts: Sequence[ClusterSpec]) -> ClusterSpec:
    """Join clusters of one kind of device each, in the order of their ranks.

    Raises:
        RequestError: Two have devices of one name, or CPUs stand beside GPUs.
    """
    names = [part.device.name for part in parts]
    if len(set(names)) < len(names):
        raise RequestError(
            f"the clusters {', '.join(part.name for part in parts)} have devices of one name: "
            f"{', '.join(names)}",
            hint="one kind of device is one part",
        )
    if len({part.host_is_device for part in parts}) > 1:
        raise RequestError(
            f"{' beside '.join(names)}: a run is on GPUs or on CPUs", hint="leave one out"
        )
    first = parts[0]
    return ClusterSpec(
        name=_PART_SIGN.join(f"{part.name}{_NUMBER_SIGN}{part.num_gpus}" for part in parts),
        device=first.device,
        gpus_per_node=max(part.gpus_per_node for part in parts),
        links=(_slowest(parts),),
        num_gpus=sum(part.num_gpus for part in parts),
        host_time_factor=max(part.host_time_factor for part in parts),
        hides_traffic=all(part.hides_traffic for part in parts),
        script_host=first.script_host,
        uncalibrated_error=_worst_error(parts),
        parts=tuple(parts),
        numbers={},
    )


def orders(cluster: ClusterSpec) -> tuple[tuple[str, ...], ...]:
    """Orders of the parts, by the names of their devices.

    ((),) where all devices are alike.
    """
    if not cluster.parts:
        return ((),)
    names = [part.device.name for part in cluster.parts]
    return tuple(permutations(names))


def in_order(cluster: ClusterSpec, order: Sequence[str]) -> ClusterSpec:
    """The same parts in one of these orders."""
    if tuple(part.device.name for part in cluster.parts) == tuple(order):
        return cluster
    by_name = {part.device.name: part for part in cluster.parts}
    return joined([by_name[name] for name in order])


def part_of_rank(cluster: ClusterSpec, rank: int) -> int:
    """Place of the part that holds a rank."""
    ends = accumulate(kind.num_gpus for kind in cluster.kinds)
    return next(place for place, end in enumerate(ends) if rank < end)


def as_if_all(cluster: ClusterSpec, place: int) -> ClusterSpec:
    """A cluster whose devices, nodes and links are all like those of one part.

    Ranks are counted from the first of the part. Groups of ranks inside its stages lie among those
    of this cluster, since all stages have as many.
    """
    if not cluster.parts:
        return cluster
    return replace(cluster.parts[place], num_gpus=cluster.num_gpus)


def between_parts(cluster: ClusterSpec) -> LinkSpec:
    """The link between two parts."""
    return cluster.links[-1]


def _slowest(parts: Sequence[ClusterSpec]) -> LinkSpec:
    """What traffic between parts takes: the slowest of the links that leave nodes."""
    return min((part.links[-1] for part in parts), key=lambda link: link.bandwidth_bytes_per_s)


def _worst_error(parts: Sequence[ClusterSpec]) -> float | None:
    errors = [part.uncalibrated_error for part in parts]
    known = [error for error in errors if error is not None]
    return max(known) if len(known) == len(errors) else None
