"""How the nodes of a cluster are numbered, where it matters which has which number."""

from itertools import groupby

from planner.hardware.spec import ClusterSpec


def smaller_nodes(cluster: ClusterSpec) -> tuple[tuple[int, int, int], ...]:
    """Runs of nodes that have fewer ranks than others: first, last, ranks of each."""
    runs, first = [], 0
    for ranks, run in groupby(cluster.nodes):
        last = first + len(tuple(run)) - 1
        if ranks < cluster.gpus_per_node:
            runs.append((first, last, ranks))
        first = last + 1
    return tuple(runs)


def numbering_words(cluster: ClusterSpec) -> tuple[str, ...]:
    """What to mind where it matters which node has which number, from 0 on."""
    words = [] if cluster.is_flat or cluster.parts else ["neighbours on the network in a row"]
    first = 0
    for part in cluster.parts:
        last = first + part.num_nodes - 1
        words.append(f"{nodes_from_to(first, last)} of {part.device.name}")
        first = last + 1
    return tuple(words)


def nodes_from_to(first: int, last: int) -> str:
    """Name nodes by their numbers: "node 2", "nodes 0 to 1"."""
    return f"node {first}" if first == last else f"nodes {first} to {last}"
