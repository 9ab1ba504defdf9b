"""How many parameters of a unit a rank has, with the unit's layouts chosen."""

from collections.abc import Callable

from planner.cost.work import shares_of
from planner.graph.operator_graph import OperatorGraph
from planner.strategy.nodes import NodeStrategy
from planner.strategy.problem import ShardingProblem
from planner.vocabulary import Axis, Style


class UnitParameters:
    """Counts of one unit."""

    def __init__(self, problem: ShardingProblem, chosen: tuple[NodeStrategy, ...]) -> None:
        """Keep the unit.

        Args:
            problem: The unit.
            chosen: The strategy of each node.
        """
        self._unit = problem.unit
        self._graph: OperatorGraph = problem.context.graph
        self._context = problem.context
        self._nodes = tuple(zip(problem.folded.nodes, chosen, strict=True))
        self._shares = self._least_shares()
        self._of_experts = self._read_by(lambda strategy: strategy.routed is not None)

    def elements(self, *, trained: bool, experts: bool = False, outer: bool = False) -> int:
        """Elements on one rank of the trained or of the frozen parameters.

        Args:
            trained: Which of them.
            experts: Those alone that are of experts which other ranks have not.
            outer: Those alone that lie outside of the module whose unit it is.
        """
        total = 0.0
        for index in self._unit.parameters:
            parameter = self._graph.parameters[index]
            if experts and parameter.storage not in self._of_experts:
                continue
            if outer and any(name.startswith(f"{self._unit.name}.") for name in parameter.names):
                continue
            if parameter.requires_grad == trained:
                total += parameter.num_elements * self._shares.get(parameter.storage, 1.0)
        return round(total)

    def trained_tensors(self) -> int:
        """How many trained parameters there are."""
        every = self._graph.parameters
        return sum(every[index].requires_grad for index in self._unit.parameters)

    def last_trained_elements(self) -> int:
        """Elements on one rank of the last trained parameter, in the order that modules have."""
        every = self._graph.parameters
        trained = [index for index in self._unit.parameters if every[index].requires_grad]
        last = every[max(trained)] if trained else None
        return round(last.num_elements * self._shares.get(last.storage, 1.0)) if last else 0

    def summed_gradient_elements(self) -> int:
        """Elements of whole trained parameters that run on a split stream, summed over tp alone.

        Over cp FSDP2 reduces them with those of data parallelism.
        """
        if self._context.axis is not Axis.TP:
            return 0
        storages = self._read_by(lambda strategy: strategy.style == Style.ON_PART)
        if not storages:
            return 0
        trained = (each for each in self._graph.parameters if each.requires_grad)
        return sum(each.num_elements for each in trained if each.storage in storages)

    def _least_shares(self) -> dict[int, float]:
        """Smallest share in which a matmul, gather or add of the unit reads each storage."""
        least: dict[int, float] = {}
        own = set(self._unit.forward_ops)
        for node, strategy in self._nodes:
            share = shares_of(strategy, self._context.ranks)
            for op in (self._graph.nodes[op_id] for op_id in node.ops if op_id in own):
                for value in op.inputs:
                    storage = self._graph.values[value].storage
                    least[storage] = min(least.get(storage, 1.0), share(value))
        return least

    def _read_by(self, is_meant: Callable[[NodeStrategy], bool]) -> frozenset[int]:
        """Storages of the parameters that nodes of some strategies read."""
        return frozenset(
            self._graph.values[value].storage
            for node, strategy in self._nodes
            if is_meant(strategy)
            for op in node.ops
            for value in self._graph.nodes[op].inputs
            if self._context.is_parameter(value)
        )
