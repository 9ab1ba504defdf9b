"""What a causal mask spares a fused attention kernel."""

from planner.graph.operator_graph import OperatorGraph, OpNode, Phase

_CAUSAL_ARGUMENT = {
    "_scaled_dot_product_flash_attention": 4,
    "_scaled_dot_product_flash_attention_backward": 11,
    "_scaled_dot_product_efficient_attention": 6,
    "_scaled_dot_product_efficient_attention_backward": 11,
    "_scaled_dot_product_cudnn_attention": 6,
    "_scaled_dot_product_cudnn_attention_backward": 14,
}
"""Position of ``is_causal`` among the positional arguments of each kernel."""


def is_causal(op: OpNode) -> bool:
    """Tell whether an op is a fused attention kernel, forward or backward, under a causal mask."""
    position = _CAUSAL_ARGUMENT.get(op.name)
    if position is None:
        return False
    named = dict(op.keyword_arguments).get("is_causal")
    if named is not None:
        return bool(named)
    return position < len(op.arguments) and bool(op.arguments[position])


def masked_pairs(num_queries: int, num_keys: int) -> int:
    """Count the pairs of a query and a key that lies in its future.

    torch aligns the mask of ``is_causal`` at the top left: query i of q reads keys 0 to i of k.
    So the sum of k - 1 - i over the first n = min(q, k) queries: n (2 k - n - 1) / 2, which is
    s (s - 1) / 2 where both are s.
    """
    bounded = min(num_queries, num_keys)
    return bounded * (2 * num_keys - bounded - 1) // 2


def masked_flop(graph: OperatorGraph, op: OpNode) -> int:
    """Count the FLOPs of an op that a causal kernel need not run.

    They are ``op.flop * masked_pairs(q, k) / (q k)``, 0 where nothing is masked. A kernel that
    works in tiles runs some of them on the diagonal.

    Args:
        graph: The op's graph.
        op: Any op of it.
    """
    if not is_causal(op):
        return 0
    first = 1 if op.name.endswith("_backward") else 0  # the gradient comes before the query
    query, key = (graph.values[value].shape for value in op.inputs[first : first + 2])
    num_queries, num_keys = query[-2], key[-2]
    return op.flop // (num_queries * num_keys) * masked_pairs(num_queries, num_keys)


def phase_masked_flop(graph: OperatorGraph, phase: Phase) -> int:
    """Sum ``masked_flop`` over the ops of forward or of backward."""
    return sum(masked_flop(graph, op) for op in graph.nodes if op.phase is phase)
