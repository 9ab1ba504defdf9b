"""Seconds of collectives and transfers: alpha-beta per algorithm on the links of a group.

With P payload bytes, n ranks, r of them in each of N nodes, a ring moves T = P (n - 1) / n
through every rank and takes (Thakur et al. 2005)

    t = base + (N - 1) latency_outer + (n - N) latency_inner + T / bandwidth * ramp

twice the hops and the traffic for an all-reduce. Where a group spans nodes, its rings leave a
node through the ports of all r ranks: bandwidth = min(inner, r * outer). Bandwidth rises with
the chunk P / n that each hop carries: ramp = sqrt(1 + ramp_bytes / (P / n)), which leaves 71% of
the bandwidth at a chunk of ramp_bytes.

An all-reduce takes the best of the algorithms that NCCL has: the ring; a tree, with
2 log2(N) hops between nodes at the ring's bandwidth cost or above; and, inside a node whose
switch reduces (NVLink SHARP), P / (fraction * bandwidth). It is never priced below an
all-gather of its payload.
"""

import math

from planner.hardware.spec import LinkSpec
from planner.hardware.topology import CommGroup

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
    switch = group.inner.switch_all_reduce_fraction
    if switch and group.outer is None:
        switch_s = base_s + 2 * group.inner.latency_s + payload_bytes / (bandwidth * switch) * ramp
        best_s = min(best_s, switch_s)
    return max(best_s, all_gather_s(payload_bytes, group))


def all_to_all_s(input_bytes: float, group: CommGroup) -> float:
    """Time until every rank has exchanged an equal share of its input with every other.

    Each rank sends (n - 1) / n of its input; what goes to other nodes leaves through its own
    port of the outer link while the rest stays inside.

    Args:
        input_bytes: Bytes of the tensor that one rank hands out.
        group: Ranks and links.
    """
    n = group.num_ranks
    if n == 1:
        return 0.0
    base_s = group.slowest.base_latency_s + _ring_latency_s(group)
    ramp = _ramp(input_bytes, group)
    inside_bytes = input_bytes * (group.ranks_per_node - 1) / n
    inside_s = inside_bytes / group.inner.bandwidth_bytes_per_s
    if group.outer is None:
        return base_s + inside_s * ramp
    outside_bytes = input_bytes * (n - group.ranks_per_node) / n
    outside_s = outside_bytes / group.outer.bandwidth_bytes_per_s
    return base_s + max(inside_s, outside_s) * ramp


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
    inner = group.inner.bandwidth_bytes_per_s
    if group.outer is None:
        return inner
    outer = group.outer.bandwidth_bytes_per_s * group.ranks_per_node
    return min(inner, outer) if group.ranks_per_node > 1 else outer


def _ring_latency_s(group: CommGroup) -> float:
    """Latency of a message that goes once around the ring, less one hop."""
    inside_s = (group.num_ranks - group.num_nodes) * group.inner.latency_s
    if group.outer is None:
        return inside_s
    return inside_s + (group.num_nodes - 1) * group.outer.latency_s


def _tree_latency_s(group: CommGroup) -> float:
    """Latency of a message up and down a tree of nodes, chains inside the nodes."""
    inside_s = 2 * (group.ranks_per_node - 1) * group.inner.latency_s
    if group.outer is None:
        return inside_s
    return inside_s + 2 * math.ceil(math.log2(group.num_nodes)) * group.outer.latency_s


def _ramp(payload_bytes: float, group: CommGroup) -> float:
    """Slow-down from small chunks."""
    return _ramp_of(payload_bytes / group.num_ranks, group.slowest.ramp_bytes)


def _ramp_of(chunk_bytes: float, ramp_bytes: float) -> float:
    """1 for endless chunks, rising as the inverse root of small ones."""
    return math.sqrt(1 + ramp_bytes / max(chunk_bytes, 1.0))
