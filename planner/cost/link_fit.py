"""Pricing measured collectives, and fitting the numbers of a link to them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from planner.cost.collective import (
    all_gather_s,
    all_reduce_s,
    point_to_point_s,
    reduce_scatter_s,
)
from planner.cost.device_fit import bounded_shares, mean_log_error
from planner.cost.pattern_search import pattern_search
from planner.cost.tables import CollectiveSample
from planner.hardware.spec import ClusterSpec, LinkSpec
from planner.hardware.topology import CommGroup, Crossing


def fit_link_to(
    cluster: ClusterSpec,
    index: int,
    samples: Sequence[CollectiveSample],
    *,
    fixed: Sequence[str] = (),
) -> dict[str, float]:
    """Search the parameters of a link.

    Args:
        cluster: Has the link; the search starts at its numbers.
        index: Position of the link.
        samples: Collectives that cross it.
        fixed: Parameters that keep their values.

    Returns:
        Values by their keys in the profile, the bandwidth as "gb_per_s" instead of a fraction.
    """
    link = cluster.links[index]
    start = {
        "gb_per_s": link.bandwidth_bytes_per_s * 1e-9,
        "latency_us_per_hop": link.latency_s * 1e6,
        "latency_us_per_collective": link.base_latency_s * 1e6,
        "ramp_mib_per_rank": link.ramp_bytes / 2**20,
    }
    if link.switch_all_reduce_fraction:
        start["switch_all_reduce_fraction"] = link.switch_all_reduce_fraction

    def loss(values: Mapping[str, float]) -> float:
        changed = with_link(cluster, index, values)
        return mean_log_error((price_collective(s, changed), s.measured_s) for s in samples)

    return pattern_search(loss, start, fixed=fixed, most=bounded_shares(start))


def price_collective(sample: CollectiveSample, cluster: ClusterSpec) -> float:
    """Predict the time of a measured collective, seconds."""
    group = sample_group(sample, cluster)
    if sample.collective == "send_recv":
        return point_to_point_s(sample.payload_bytes, group.slowest)
    if sample.collective == "all_reduce":
        if "ring" in sample.setting:
            group = without_switch(group)
        return all_reduce_s(sample.payload_bytes, group)
    if sample.collective == "all_gather":
        return all_gather_s(sample.payload_bytes, group)
    return reduce_scatter_s(sample.payload_bytes, group)


def sample_group(sample: CollectiveSample, cluster: ClusterSpec) -> CommGroup:
    """Lay the ranks of a measurement out on the cluster's links."""
    per_node = sample.num_ranks // sample.num_nodes
    inner, outer = cluster.links[0], cluster.links[-1]
    crossings = []
    if per_node > 1 or sample.num_nodes == 1:
        crossings.append(Crossing(link=inner, num_parts=sample.num_ranks, in_node=True))
    if sample.num_nodes > 1:
        crossings.append(Crossing(link=outer, num_parts=sample.num_nodes, ranks_per_part=per_node))
    return CommGroup(
        num_ranks=sample.num_ranks,
        crossings=tuple(crossings),
        reduces_whole=not cluster.hides_traffic,
    )


def without_switch(group: CommGroup) -> CommGroup:
    """The same ranks, no switch of which reduces."""
    return replace(
        group,
        crossings=tuple(
            replace(each, link=replace(each.link, switch_all_reduce_fraction=0.0))
            for each in group.crossings
        ),
    )


def with_link(cluster: ClusterSpec, index: int, values: Mapping[str, float]) -> ClusterSpec:
    """The cluster with other numbers of one link."""
    link: LinkSpec = replace(
        cluster.links[index],
        bandwidth_bytes_per_s=values["gb_per_s"] * 1e9,
        latency_s=values["latency_us_per_hop"] * 1e-6,
        base_latency_s=values["latency_us_per_collective"] * 1e-6,
        ramp_bytes=values["ramp_mib_per_rank"] * 2**20,
        switch_all_reduce_fraction=values.get("switch_all_reduce_fraction", 0.0),
    )
    links = (*cluster.links[:index], link, *cluster.links[index + 1 :])
    return replace(cluster, links=links)
