"""The numbers of the links from measured collectives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from planner.cost.link_fit import fit_link_to, price_collective, with_link
from planner.cost.tables import CollectiveSample
from planner.hardware.spec import ClusterSpec, DeviceSpec, LinkSpec
from planner.profiling.points import Point, Settings

_START = LinkSpec(
    name="measured",
    ranks=None,
    bandwidth_bytes_per_s=1e9,
    latency_s=100e-6,
    base_latency_s=100e-6,
    ramp_bytes=0.0,
    switch_all_reduce_fraction=0.0,
    numbers={},
)

_FIXED = ("ramp_mib_per_rank",)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFound:
    """A link and how well it prices what it was fitted to."""

    values: Mapping[str, float]
    """By the keys of the profile, with "gb_per_s" for the bandwidth that is reached."""
    error: float
    """Median of |predicted / measured - 1|."""
    spread: float
    """Median of the 90th over the 10th percentile of the repeats of a collective."""
    num_points: int
    """Collectives and transfers it is fitted to."""


def fit_links(
    device: DeviceSpec,
    settings: Settings,
    points: Sequence[Point],
    *,
    hides_traffic: bool,
    turns: float,
) -> tuple[LinkFound, ...]:
    """Find the numbers of the link inside a host, and of the one between hosts.

    A host of one rank has none inside, and such a host alone none at all.

    Args:
        device: Of each rank.
        settings: How it was measured.
        points: What was measured.
        hides_traffic: Whether a rank computes while it sends.
        turns: How much longer work of all ranks of a host at once takes than that of one.
    """
    cluster = ClusterSpec(
        name="measured",
        device=device,
        gpus_per_node=settings.processes,
        links=(_START,)
        if settings.hosts == 1
        else (replace(_START, ranks=settings.processes), _START),
        num_gpus=settings.processes * settings.hosts,
        hides_traffic=hides_traffic,
        numbers={},
    )
    found = []
    for index in range(len(cluster.links)):
        own = [p for p in points if p["kind"] == "collective" and (p["nodes"] > 1) == (index > 0)]
        if not own:
            continue
        samples = [_sample(point, turns) for point in own]
        values = fit_link_to(cluster, index, samples, fixed=_FIXED)
        cluster = with_link(cluster, index, values)
        errors = sorted(abs(price_collective(s, cluster) / s.measured_s - 1) for s in samples)
        spreads = sorted(p["seconds_p90"] / p["seconds_p10"] for p in own)
        found.append(
            LinkFound(
                values=values,
                error=errors[len(errors) // 2],
                spread=spreads[len(spreads) // 2],
                num_points=len(own),
            )
        )
    return tuple(found)


def _sample(point: Point, turns: float) -> CollectiveSample:
    """A collective as it takes in a step, where ranks come to it from their work."""
    seconds = point["seconds"]
    if "both_s" in point:
        seconds = max(seconds, point["both_s"] - turns * point["own_s"])
    return CollectiveSample(
        table="measured",
        system="measured",
        collective=point["collective"],
        num_ranks=point["ranks"],
        num_nodes=point["nodes"],
        payload_bytes=point["payload_bytes"],
        setting="ring",
        measured_s=seconds,
    )
