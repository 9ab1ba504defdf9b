"""Which links a mesh axis crosses."""

import math
from dataclasses import dataclass

from planner.errors import RequestError
from planner.hardware.spec import ClusterSpec, LinkSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class CommGroup:
    """The ranks of one mesh axis that communicate, and the links between them.

    All groups of the axis run at once, so a link's bandwidth is per rank throughout.
    """

    num_ranks: int
    """Ranks in the group."""
    ranks_per_node: int
    """Ranks of the group that share the inner link; divides ``num_ranks``."""
    inner: LinkSpec
    """Link between ranks of one node (or of the larger unit below ``outer``)."""
    outer: LinkSpec | None
    """Link between nodes, None where the group stays inside one."""
    reduces_whole: bool = False
    """A reduce-scatter is an all-reduce of which each rank takes its part, as gloo does it."""

    @property
    def num_nodes(self) -> int:
        """Nodes (units joined by ``outer``) that the group spans."""
        return self.num_ranks // self.ranks_per_node

    @property
    def slowest(self) -> LinkSpec:
        """The link that a transfer between neighbours must expect."""
        return self.inner if self.outer is None else self.outer


def comm_group(cluster: ClusterSpec, *, degree: int, stride: int) -> CommGroup:
    """Find the links that a mesh axis crosses.

    The axis has ``degree`` ranks that lie ``stride`` apart in rank order, as in a mesh whose
    inner axes hold ``stride`` ranks in all. Groups that straddle units unevenly (3 ranks on
    nodes of 8) are priced by the worst of them: as if each node held only as many ranks as
    every node can hold alike.

    Args:
        cluster: Links and nodes.
        degree: Ranks of the axis.
        stride: Product of the degrees of all axes inside it.

    Raises:
        RequestError: The axis does not fit into the cluster.
    """
    if degree < 1 or stride < 1 or degree * stride > cluster.num_gpus:
        raise RequestError(
            f"a mesh axis of {degree} ranks, {stride} apart, does not fit into "
            f"{cluster.num_gpus} ranks",
            hint="the product of all degrees must equal the number of GPUs",
        )
    inner = cluster.links[0]
    ranks_inside = 1
    for link in cluster.links:
        joined = _ranks_joined(link, cluster, degree=degree, stride=stride)
        if joined == degree:
            inside = link is cluster.links[0]
            return CommGroup(
                num_ranks=degree,
                ranks_per_node=degree if inside else ranks_inside,
                inner=inner,
                outer=None if inside else link,
                reduces_whole=not cluster.hides_traffic,
            )
        if joined > 1:
            inner, ranks_inside = link, joined
    raise RequestError(f"no link of cluster {cluster.name!r} joins {degree} ranks")


def _ranks_joined(link: LinkSpec, cluster: ClusterSpec, *, degree: int, stride: int) -> int:
    """Count the ranks of each group that one unit of the link holds, alike in all units."""
    if link.ranks is None or link.ranks >= cluster.num_gpus:
        return degree
    if link.ranks % stride:
        return 1
    return math.gcd(degree, link.ranks // stride)


def link_between(cluster: ClusterSpec, first: int, second: int) -> LinkSpec:
    """The innermost link that joins two ranks."""
    for link in cluster.links:
        if link.ranks is None or first // link.ranks == second // link.ranks:
            return link
    return cluster.links[-1]


def shares_link(one: CommGroup, other: CommGroup) -> bool:
    """Whether the slowest link of one group is among those that another's traffic crosses."""
    crossed = [other.slowest]
    if other.ranks_per_node > 1:
        crossed.append(other.inner)
    return other.num_ranks > 1 and one.slowest in crossed
