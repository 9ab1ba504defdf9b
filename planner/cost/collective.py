"""Seconds of collectives and transfers: alpha-beta per algorithm on the links of a group.

With P payload bytes, n ranks in N nodes, r of them in each, a ring moves T = P (n - 1) / n
through every rank and takes (Thakur et al. 2005)

    t = base + (N - 1) latency_outer + (n - N) latency_inner + T / bandwidth * ramp

twice the hops and the traffic for an all-reduce. Where a group spans nodes, its rings leave a
node through the ports of all r ranks: bandwidth = min(inner, r * outer). More levels of links (a
rack, a pod) add a term of each kind; units that hold different numbers of ranks are as fast as the
one with fewest. Bandwidth rises with the chunk P / n that each hop carries:
ramp = sqrt(1 + ramp_bytes / (P / n)), which leaves 71% of the bandwidth at a chunk of ramp_bytes.

An all-reduce takes the best of the algorithms that NCCL has: the ring; a tree, with
2 log2(N) hops between nodes at the ring's bandwidth cost or above; and, inside a node whose
switch reduces (NVLink SHARP), P / (fraction * bandwidth). It is never priced below an
all-gather of its payload.
"""

import math

from planner.hardware.spec import LinkSpec
from planner.hardware.topology import CommGroup, Crossing

_TREE_TRAFFIC = 2.0
"""Payloads that a tree moves through every rank, up and down."""


def all_gather_s(output_bytes: float, group: CommGroup) -> float:
    """Time until every rank holds the whole output.

    Args:
        output_bytes: Bytes of the gathered tensor on one rank.
        group: Ranks and links.
    """
    if group.num_ranks == 1:
        return 0.0
    traffic_bytes = output_bytes * (group.num_ranks - 1) / group.num_ranks
    return (
        group.slowest.base_latency_s
        + _ring_latency_s(group)
        + traffic_bytes / _bandwidth(group) * _ramp(output_bytes, group)
    )


def reduce_scatter_s(input_bytes: float, group: CommGroup) -> float:
    """Time until every rank holds its shard of the sum; the ring of an all-gather, reversed.

    Args:
        input_bytes: Bytes of the unreduced tensor on one rank.
        group: Ranks and links.
    """
    if group.reduces_whole:
        return all_reduce_s(input_bytes, group)
    return all_gather_s(input_bytes, group)


def all_reduce_s(payload_bytes: float, group: CommGroup) -> float:
    """Time until every rank holds the whole sum.

    Args:
        payload_bytes: Bytes of the tensor on one rank.
        group: Ranks and links.
    """
    if group.num_ranks == 1:
        return 0.0
    base_s = group.slowest.base_latency_s
    bandwidth = _bandwidth(group)
    ramp = _ramp(payload_bytes, group)
    ring_bytes = 2 * payload_bytes * (group.num_ranks - 1) / group.num_ranks
    ring_s = base_s + 2 * _ring_latency_s(group) + ring_bytes / bandwidth * ramp
    tree_s = base_s + _tree_latency_s(group) + _TREE_TRAFFIC * payload_bytes / bandwidth * ramp
    best_s = min(ring_s, tree_s)
    link = group.slowest
    switch = link.switch_all_reduce_fraction
    if switch and len(group.crossings) == 1:
        switch_s = base_s + 2 * link.latency_s + payload_bytes / (bandwidth * switch) * ramp
        best_s = min(best_s, switch_s)
    return max(best_s, all_gather_s(payload_bytes, group))


def all_to_all_s(input_bytes: float, group: CommGroup) -> float:
    """Time until every rank has exchanged an equal share of its input with every other.

    Each rank sends (n - 1) / n of its input. What stays in a node goes over the links inside it,
    the rest leaves through the rank's own port, and crosses all links up to the one that joins it
    to the other rank.

    Args:
        input_bytes: Bytes of the tensor that one rank hands out.
        group: Ranks and links.
    """
    n = group.num_ranks
    if n == 1:
        return 0.0
    base_s = group.slowest.base_latency_s + _ring_latency_s(group)
    in_node = n
    for crossing in group.crossings:
        if not crossing.in_node:  # ranks of the fullest node
            in_node = n - (crossing.num_parts - 1) * crossing.ranks_per_part
            break
    seconds = 0.0
    for crossing in group.crossings:
        reached = in_node if crossing.in_node else n
        sent_bytes = input_bytes * (reached - crossing.ranks_per_part) / n
        seconds = max(seconds, sent_bytes / crossing.link.bandwidth_bytes_per_s)
    return base_s + seconds * _ramp(input_bytes, group)


def broadcast_s(payload_bytes: float, group: CommGroup) -> float:
    """Time until every rank holds what one rank had: a pipelined ring.

    Args:
        payload_bytes: Bytes of the tensor.
        group: Ranks and links.
    """
    if group.num_ranks == 1:
        return 0.0
    return (
        group.slowest.base_latency_s
        + _ring_latency_s(group)
        + payload_bytes / _bandwidth(group) * _ramp(payload_bytes, group)
    )


def point_to_point_s(payload_bytes: float, link: LinkSpec) -> float:
    """Time of one transfer between two ranks.

    Args:
        payload_bytes: Bytes sent.
        link: Link between sender and receiver.
    """
    return (
        link.base_latency_s
        + link.latency_s
        + payload_bytes / link.bandwidth_bytes_per_s * _ramp_of(payload_bytes, link.ramp_bytes)
    )


def _bandwidth(group: CommGroup) -> float:
    """Bytes per second that a ring moves through one rank."""
    return min(each.link.bandwidth_bytes_per_s * each.ranks_per_part for each in group.crossings)


def _hops(group: CommGroup) -> list[tuple[Crossing, int]]:
    """How often a message crosses each link on its way once around the ring, less one hop."""
    parts = [*(each.num_parts for each in group.crossings), 1]
    return [
        (each, each.num_parts - rest) for each, rest in zip(group.crossings, parts[1:], strict=True)
    ]


def _ring_latency_s(group: CommGroup) -> float:
    """Latency of a message that goes once around the ring, less one hop."""
    return sum(hops * crossing.link.latency_s for crossing, hops in _hops(group))


def _tree_latency_s(group: CommGroup) -> float:
    """Latency of a message up and down a tree of nodes, chains inside the nodes."""
    seconds = 0.0
    for crossing, hops in _hops(group):
        joined = crossing.num_parts / (crossing.num_parts - hops)
        deep = joined - 1 if crossing.in_node else math.ceil(math.log2(joined))
        seconds += 2 * deep * crossing.link.latency_s
    return seconds


def _ramp(payload_bytes: float, group: CommGroup) -> float:
    """Slow-down from small chunks."""
    return _ramp_of(payload_bytes / group.num_ranks, group.slowest.ramp_bytes)


def _ramp_of(chunk_bytes: float, ramp_bytes: float) -> float:
    """1 for endless chunks, rising as the inverse root of small ones."""
    return math.sqrt(1 + ramp_bytes / max(chunk_bytes, 1.0))
