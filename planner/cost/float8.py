"""Products of linear layers in float8, as ``planner.runtime.float8`` takes them.

Of (m, k) @ (k, n) each product rounds both operands: a kernel finds the largest element, of which
small ones make a power of two; others multiply by it and round. Products take their second operand
column after column, so that backward copies what lies otherwise. What is rounded lives as long as
its product.
"""

from dataclasses import dataclass, replace

from planner.cost.fusion import Kernel
from planner.cost.op import OpWork
from planner.cost.work import forward_work
from planner.graph.analysis.float8 import is_float8_product
from planner.graph.operator_graph import OperatorGraph, Phase
from planner.units import DTYPE_BYTES

_SCALE_KERNELS, _INVERSE_KERNELS = 5, 1
"""Kernels that make a power of two of a largest element, and that invert one."""
_SCALAR = OpWork(kind="memory", flop=0.0, read_bytes=4.0, write_bytes=4.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8Products:
    """The products of a graph's linear layers that are taken in float8."""

    graph: OperatorGraph
    """The model."""
    rounds_at_once: bool
    """Whether one kernel multiplies by a scale and rounds."""

    def has(self, kernel: Kernel) -> bool:
        """Whether a kernel is such a product, forward or backward."""
        forward = kernel.forward
        return (
            kernel.work.kind == "matmul"
            and forward is not None
            and is_float8_product(self.graph, forward)
        )

    def works(self, kernel: Kernel, *, for_weight: bool) -> list[OpWork]:
        """The kernels that a product consists of.

        Args:
            kernel: A product, forward or backward.
            for_weight: It makes the gradient of the weight, of what that of the input has rounded.
        """
        rows, weight, result = self._sizes(kernel)
        itemsize = self._itemsize(kernel)
        if kernel.op.phase is Phase.FORWARD:
            rounds = [*self._scaled(rows, itemsize), *self._scaled(weight, itemsize)]
            adds = [_pointwise(result, itemsize)] if kernel.op.name == "addmm" else []
            return [*rounds, _product(kernel.work, rows + weight), *adds]
        if for_weight:
            rounds = [_copied(result), *self._turned(rows, itemsize)]
            return [*rounds, _product(kernel.work, result + rows)]
        rounds = [*self._scaled(result, itemsize), *self._turned(weight, itemsize)]
        return [*rounds, _product(kernel.work, result + weight)]

    def held_bytes(self, kernel: Kernel, *, for_weight: bool) -> int:
        """Most that a product holds beside what it reads and makes (``works``)."""
        rows, weight, result = self._sizes(kernel)
        # Of what is being rounded there is a multiplied copy, too, unless that is one kernel.
        copies = 1 if self.rounds_at_once else 1 + self._itemsize(kernel)
        if kernel.op.phase is Phase.FORWARD:
            return round(max(copies * rows, rows + copies * weight))
        if for_weight:
            return round(2 * result + copies * rows)
        return round(max(copies * result, result + copies * weight))

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


def _pointwise(size: float, itemsize: int) -> OpWork:
    moved_bytes = size * itemsize
    return OpWork(kind="memory", flop=0.0, read_bytes=moved_bytes, write_bytes=moved_bytes)


def _copied(size: float) -> OpWork:
    return _pointwise(size, itemsize=1)


def _product(work: OpWork, operands: float) -> OpWork:
    """The product itself, of so many elements of a byte; measured curves are of other products."""
    return replace(work, name="", float8=True, read_bytes=operands, alignment_share=1.0)
