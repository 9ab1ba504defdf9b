"""Products of linear layers in float8, as ``planner.runtime.float8`` takes them.

Of (m, k) @ (k, n) each product rounds both operands: a kernel finds the largest element, of which
small ones make a power of two; others multiply by it and round. Products take their second operand
column after column, so that backward copies what lies otherwise. What is rounded lives as long as
its product.

Where ranks gather what is rounded (``GatheredRows``), each rounds its part before.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from planner.cost.fusion import Kernel
from planner.cost.op import OpWork
from planner.cost.unit_comm import scattered_values
from planner.cost.unit_work import CommWork
from planner.cost.work import forward_work, makes_weight_gradient
from planner.framework.spec import KernelForms
from planner.graph.analysis.float8 import is_float8_product
from planner.graph.operator_graph import OperatorGraph, OpNode, Phase
from planner.strategy.nodes import NodeStrategy
from planner.strategy.problem import ShardingProblem
from planner.units import DTYPE_BYTES

_SCALE_KERNELS, _INVERSE_KERNELS = 5, 1
"""Kernels that make a power of two of a largest element, and that invert one."""
_SCALAR = OpWork(kind="memory", flop=0.0, read_bytes=4.0, write_bytes=4.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredRows:
    """Operands that ranks round before they gather them."""

    ranks: int = 1
    """How many have a part."""
    rounded_by: Mapping[int, int] = field(default_factory=dict)
    """Storages of inputs, each with the forward product with which it is counted."""
    results: Set[int] = frozenset()
    """Storages of outputs whose gradients are."""
    itemsize: int = 1
    """Bytes of an element of what would be gathered otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8Products:
    """The products of a graph's linear layers that are taken in float8."""

    graph: OperatorGraph
    """The model."""
    rounds_at_once: bool
    """Whether one kernel multiplies by a scale and rounds."""
    gathered: GatheredRows = GatheredRows()
    """What ranks round before they gather it."""

    def sent(self, comm: Iterable[CommWork]) -> tuple[CommWork, ...]:
        """Collectives of the block as ranks send what they carry."""
        size = self.gathered.itemsize

        def sent(work: CommWork) -> CommWork:
            copied = tuple(each / size for each in work.copied_bytes)
            return replace(work, num_bytes=work.num_bytes / size, copied_bytes=copied)

        return tuple(sent(each) if each.kind == "all_gather" else each for each in comm)

    def has(self, kernel: Kernel) -> bool:
        """Whether a kernel is such a product, forward or backward."""
        forward = kernel.forward
        return (
            kernel.work.kind == "matmul"
            and forward is not None
            and is_float8_product(self.graph, forward)
        )

    def works(self, kernel: Kernel) -> list[OpWork]:
        """The kernels that a product consists of, forward or backward.

        The one that makes the gradient of the weight takes what that of the input has rounded.
        """
        rows, weight, result = self._sizes(kernel)
        itemsize = self._itemsize(kernel)
        if kernel.op.phase is Phase.FORWARD:
            rounds = [*self._entering(kernel, rows, itemsize), *self._scaled(weight, itemsize)]
            adds = [_pointwise(result, itemsize)] if kernel.op.name == "addmm" else []
            return [*rounds, _product(kernel.work, rows + weight), *adds]
        if makes_weight_gradient(self.graph, kernel.op):
            again = [_copied(rows)] if self._is_gathered(kernel) else self._turned(rows, itemsize)
            return [_copied(result), *again, _product(kernel.work, result + rows)]
        own = result / self.gathered.ranks if self._sends_part(kernel) else result
        rounds = [*self._scaled(own, itemsize), *self._turned(weight, itemsize)]
        return [*rounds, _product(kernel.work, result + weight)]

    def held_bytes(self, kernel: Kernel) -> int:
        """Most that a product holds beside what it reads and makes (``works``)."""
        rows, weight, result = self._sizes(kernel)
        # Of what is being rounded there is a multiplied copy, too, unless that is one kernel.
        copies = 1 if self.rounds_at_once else 1 + self._itemsize(kernel)
        if kernel.op.phase is Phase.FORWARD:
            return round(max(copies * rows, rows + copies * weight))
        if makes_weight_gradient(self.graph, kernel.op):
            return round(2 * result + copies * rows)
        return round(max(copies * result, result + copies * weight))

    def _entering(self, kernel: Kernel, rows: float, itemsize: int) -> list[OpWork]:
        """Round what a forward product reads, or the part that a rank has before it is gathered."""
        if not self._is_gathered(kernel):
            return self._scaled(rows, itemsize)
        first = self.gathered.rounded_by[self._storage(_rows_of(kernel.op))]
        return self._scaled(rows / self.gathered.ranks, itemsize) if first == kernel.op.id else []

    def _is_gathered(self, kernel: Kernel) -> bool:
        assert kernel.forward is not None
        return self._storage(_rows_of(kernel.forward)) in self.gathered.rounded_by

    def _sends_part(self, kernel: Kernel) -> bool:
        """Whether a product's output is scattered, so that the gradient of it is gathered."""
        assert kernel.forward is not None
        return self._storage(kernel.forward.outputs[0]) in self.gathered.results

    def _storage(self, value: int) -> int:
        return self.graph.values[value].storage

    def _sizes(self, kernel: Kernel) -> tuple[float, float, float]:
        """Elements of a layer's input, its weight and its output on a rank."""
        assert kernel.forward is not None
        work = forward_work(self.graph, kernel.forward, kernel.share)
        return float(work.m * work.k), float(work.k * work.n), float(work.m * work.n)

    def _itemsize(self, kernel: Kernel) -> int:
        return DTYPE_BYTES[self.graph.values[kernel.op.outputs[0]].dtype]

    def _scaled(self, size: float, itemsize: int) -> list[OpWork]:
        """Find the largest of so many elements, and round them."""
        largest = OpWork(kind="reduction", flop=0.0, read_bytes=size * itemsize, write_bytes=0.0)
        scalars = [_SCALAR] * (1 if self.rounds_at_once else _SCALE_KERNELS)
        return [largest, *scalars, *self._rounded(size, itemsize)]

    def _turned(self, size: float, itemsize: int) -> list[OpWork]:
        """Round elements whose scale is known, and lay columns after one another."""
        scalars = [_SCALAR] * _INVERSE_KERNELS
        return [*scalars, *self._rounded(size, itemsize), _copied(size)]

    def _rounded(self, size: float, itemsize: int) -> list[OpWork]:
        rounds = OpWork(kind="memory", flop=0.0, read_bytes=size * itemsize, write_bytes=size)
        return [rounds] if self.rounds_at_once else [_pointwise(size, itemsize), rounds]


def float8_products(
    problem: ShardingProblem,
    chosen: Sequence[NodeStrategy],
    gathered: Set[int],
    kernels: KernelForms,
) -> Float8Products:
    """Find the products of a block that are taken in float8.

    Args:
        problem: The block.
        chosen: The strategy of each node.
        gathered: Values that are made split and read whole.
        kernels: How a framework computes.
    """
    graph, forward_ops = problem.context.graph, problem.unit.forward_ops
    at_once = kernels.pointwise != "as_written" or kernels.rounds_by_hand
    if not kernels.gathers_float8:
        return Float8Products(graph=graph, rounds_at_once=at_once)
    whole, left = (
        {graph.values[value].storage for value in each}
        for each in (gathered, scattered_values(chosen))
    )
    rounded_by: dict[int, int] = {}
    for op in (graph.nodes[op_id] for op_id in forward_ops):
        if is_float8_product(graph, op) and graph.values[_rows_of(op)].storage in whole:
            rounded_by.setdefault(graph.values[_rows_of(op)].storage, op.id)
    dtype = graph.values[problem.folded.boundary_outputs[0]].dtype
    rows = GatheredRows(
        ranks=problem.context.ranks,
        rounded_by=rounded_by,
        results=frozenset(left),
        itemsize=DTYPE_BYTES[dtype],
    )
    return Float8Products(graph=graph, rounds_at_once=at_once, gathered=rows)


def _rows_of(product: OpNode) -> int:
    """What a forward product multiplies with a weight: ``addmm`` has its summand before it."""
    return product.inputs[-2]


def _pointwise(size: float, itemsize: int) -> OpWork:
    moved_bytes = size * itemsize
    return OpWork(kind="memory", flop=0.0, read_bytes=moved_bytes, write_bytes=moved_bytes)


def _copied(size: float) -> OpWork:
    return _pointwise(size, itemsize=1)


def _product(work: OpWork, operands: float) -> OpWork:
    """The product itself, of so many elements of a byte; measured curves are of other products."""
    return replace(work, name="", float8=True, read_bytes=operands, alignment_share=1.0)
