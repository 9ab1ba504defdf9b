"""What a framework's selective recomputation keeps of a block."""

from planner.framework.spec import KernelForms
from planner.graph.analysis.retained import KEPT_BY_SELECTIVE, block_ops
from planner.graph.operator_graph import OperatorGraph, Unit

_PLAIN_PRODUCTS = frozenset({"mm", "addmm"})
"""Matmuls of which torchtitan's selective recomputation keeps every second one."""


def kept_ops(kernels: KernelForms, graph: OperatorGraph, unit: Unit) -> frozenset[int]:
    """Ops of a block whose outputs selective recomputation keeps."""
    kept = [op for op in block_ops(unit) if graph.nodes[op].name in KEPT_BY_SELECTIVE]
    if kernels.selective == "every_second_matmul":
        products = [op for op in kept if graph.nodes[op].name in _PLAIN_PRODUCTS]
        kept = sorted(set(kept) - set(products[1::2]))
    return frozenset(kept)
