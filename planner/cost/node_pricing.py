"""Seconds of a node's strategies and of layout changes: the coefficients of the sharding ILP."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.cost.collective import all_gather_s, all_reduce_s, all_to_all_s, reduce_scatter_s
from planner.cost.float8 import Float8Products
from planner.cost.fusion import Kernel
from planner.cost.op import OpWork, op_s
from planner.cost.unit_comm import conversion_comm, node_comm
from planner.cost.unit_work import CommWork
from planner.cost.work import Shares, backward_work, forward_work, shares_in
from planner.graph.operator_graph import OpNode, Phase, UnitKind
from planner.hardware.spec import DeviceSpec, HostSpec
from planner.hardware.topology import CommGroup
from planner.runtime.layout import Layout
from planner.strategy.nodes import Node, NodeStrategy
from planner.strategy.problem import ShardingProblem
from planner.vocabulary import Axis

_COLLECTIVE_S = {
    "all_gather": all_gather_s,
    "all_reduce": all_reduce_s,
    "reduce_scatter": reduce_scatter_s,
    "all_to_all": all_to_all_s,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """What the price of a unit depends on besides its layouts."""

    device: DeviceSpec
    """Device of each rank."""
    dtype: str
    """Compute dtype."""
    tp_group: CommGroup
    """Ranks and links of the axis over which modules are split: tp, cp or ep."""
    beside: Mapping[Axis, CommGroup] = field(default_factory=dict)
    """The same of the axes beside it (``BESIDE``)."""
    host: HostSpec | None = None
    """What a host gives it, None where nothing is known of it."""
    float8: bool = False
    """Linear layers of blocks multiply in float8, none of them compiled."""
    splits_ops: bool = False
    """Ops run on parts of tensors, over tp or cp."""
    compiled: bool = False
    """Blocks run compiled: the host issues kernels, whatever was split or is recomputed."""
    collective_host_s: float = 0.0
    """Time that the host takes to issue one collective, beyond that of any op."""
    network_host_s: float = 0.0
    """What comes to that where stages exchange activations between nodes."""

    @property
    def host_runs_ops(self) -> bool:
        """Whether the host runs the ops itself: what it does for them comes on top of them."""
        return not self.device.host_dispatch_s

    @property
    def split_op_s(self) -> float:
        """What the host takes more for an op on parts of tensors."""
        return self.device.split_dispatch_s if self.splits_ops and not self.compiled else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePrice:
    """Seconds of one microbatch through one node in one strategy."""

    forward_s: float
    """Forward kernels."""
    backward_s: float
    """Backward kernels."""
    forward_comm_s: float
    """Collectives of the forward pass at the node's ends, inside its loss and its attention."""
    backward_comm_s: float
    """Collectives of the backward pass there."""

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.forward_s + self.backward_s + self.forward_comm_s + self.backward_comm_s


def backward_ops_by_forward(problem: ShardingProblem) -> Mapping[int, list[OpNode]]:
    """Backward ops of the unit under the forward op that each differentiates (-1: none)."""
    graph = problem.context.graph
    found: dict[int, list[OpNode]] = defaultdict(list)
    for op_id in problem.unit.backward_ops:
        op = graph.nodes[op_id]
        found[-1 if op.forward_op is None else op.forward_op].append(op)
    return found


def price_node(
    problem: ShardingProblem,
    node: Node,
    strategy: NodeStrategy,
    rank: RankSpec,
    backward_ops: Mapping[int, list[OpNode]],
) -> NodePrice:
    """Price one strategy of one node.

    The time in which a host issues kernels to a device is left out, and so are copies beside
    collectives: prices of units have both.

    Args:
        problem: The unit.
        node: One of its nodes.
        strategy: One of the node's strategies.
        rank: Device and tp group.
        backward_ops: From ``backward_ops_by_forward``.
    """
    graph = problem.context.graph
    share = shares_in(problem, node, strategy)
    forward_s = backward_s = 0.0
    for op_id in node.ops:
        op = graph.nodes[op_id]
        if not op.is_view:
            forward_s += forward_op_s(problem, op, share, rank)
        for behind in backward_ops.get(op_id, ()):
            if not behind.is_view:
                backward_s += _backward_op_s(problem, behind, op, share, rank)
    entries, exits = node_comm(problem, node, strategy)
    ends = entries + exits
    return NodePrice(
        forward_s=forward_s,
        backward_s=backward_s,
        forward_comm_s=sum(comm_s(comm, rank) for forward, _ in ends for comm in forward),
        backward_comm_s=sum(comm_s(comm, rank) for _, backward in ends for comm in backward),
    )


def forward_op_s(problem: ShardingProblem, op: OpNode, share: Shares, rank: RankSpec) -> float:
    """Seconds of one forward op on one rank."""
    work = forward_work(problem.context.graph, op, share)
    if _rounds(problem, rank):
        return _rounded_s(problem, Kernel(op=op, forward=op, share=share, work=work), rank)
    return _kernel_s(work, rank)


def _backward_op_s(
    problem: ShardingProblem, op: OpNode, forward: OpNode, share: Shares, rank: RankSpec
) -> float:
    assert op.phase is Phase.BACKWARD
    work = backward_work(problem.context.graph, op, forward, share)
    if _rounds(problem, rank):
        return _rounded_s(problem, Kernel(op=op, forward=forward, share=share, work=work), rank)
    return _kernel_s(work, rank)


def _rounds(problem: ShardingProblem, rank: RankSpec) -> bool:
    return rank.float8 and problem.unit.kind is UnitKind.BLOCK


def _rounded_s(problem: ShardingProblem, kernel: Kernel, rank: RankSpec) -> float:
    """Seconds of a kernel, or of those that a product in float8 consists of."""
    products = Float8Products(graph=problem.context.graph, rounds_at_once=False)
    works = products.works(kernel) if products.has(kernel) else [kernel.work]
    return sum(_kernel_s(work, rank) for work in works)


def _kernel_s(work: OpWork, rank: RankSpec) -> float:
    """Seconds of a kernel, with what a host that runs it itself takes for one on parts."""
    more_s = rank.split_op_s if work.is_split and rank.host_runs_ops else 0.0
    return op_s(work, rank.device, rank.dtype) + more_s


def conversion_s(
    problem: ShardingProblem, value: int, source: Layout, target: Layout, rank: RankSpec
) -> tuple[float, float]:
    """Forward and backward seconds of a change of layout of one value."""
    forward, backward = conversion_comm(problem, value, source, target)
    return sum(comm_s(each, rank) for each in forward), sum(comm_s(each, rank) for each in backward)


def comm_s(work: CommWork, rank: RankSpec) -> float:
    """Seconds of one collective over the split axis, or over one beside it."""
    group = rank.tp_group if work.beside is None else rank.beside[work.beside]
    return _COLLECTIVE_S[work.kind](work.num_bytes, group)
