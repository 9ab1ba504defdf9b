"""First ILP: the layouts inside one unit, for one tp degree and stream layout.

Sets
    o in O           nodes: modules with parameters, regions of glue between them
    k in K(o)        strategies of a node, each with a layout for every value it reads or leaves
    v in V           values between nodes; v is left by one node (or enters the unit in the
                     stream layout) and read by others
    p, q             layouts: p as v is left, q as a module reads it

Variables
    x[o,k]           1 where node o runs strategy k
    e[v,o,p,q]       1 where v is left in layout p and module o reads it in layout q
    g[v,p,q]         1 where v is brought from p to q: once for all modules that read it so

Objective (seconds of one microbatch, forward and backward)
    sum_o,k cost[o,k] x[o,k]  +  sum_v,p,q convert[v,p,q] g[v,p,q]

Constraints
    one strategy             sum_k x[o,k] = 1                                 ``_choose``
    alike in all calls       x[o,k] = x[p,k] for o, p calls of one module     ``_bind_calls``
    flow out of the value    sum_q e[v,o,p,q] = sum_{k leaves v in p} x[u,k]  ``_link_module``
    flow into the module     sum_p e[v,o,p,q] = sum_{k reads v in q} x[o,k]   ``_link_module``
    paid once                e[v,o,p,q] <= g[v,p,q]                           ``_link_module``
    no change into glue      sum_{k leaves v in p} x[u,k] = sum_{k reads v in p} x[o,k]
                                                                              ``_link_region``

The script can change layouts only at modules with parameters and at the unit's boundary, which
is why a region must take a value as it is left. The flow form (Alpa, 2201.12023, uses the
product form) keeps the relaxation tight: most instances solve without branching.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from planner.cost.node_pricing import (
    NodePrice,
    RankSpec,
    backward_ops_by_forward,
    conversion_s,
    price_node,
)
from planner.runtime.layout import Layout
from planner.solver import Minimisation, Term, is_chosen
from planner.strategy.nodes import Node, NodeKind, NodeStrategy
from planner.strategy.problem import ShardingProblem

_SCALED_OBJECTIVE = 1000.0
"""Coefficients are scaled so that the dearest strategy costs this: tolerances are absolute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingSolution:
    """The best layouts of a unit."""

    problem: ShardingProblem
    """What was decided."""
    chosen: tuple[NodeStrategy, ...]
    """One strategy per node."""
    conversions: tuple[tuple[int, Layout, Layout], ...]
    """Changes of layout on the way into modules: value, from, to."""
    objective_s: float
    """Seconds of one microbatch through the unit, forward and backward."""
    bound_s: float
    """No layouts of the unit take less."""


Prices = tuple[tuple[NodePrice, ...], ...]


def price_strategies(problem: ShardingProblem, rank: RankSpec) -> Prices:
    """Price every strategy of every node."""
    backward_ops = backward_ops_by_forward(problem)
    return tuple(
        tuple(price_node(problem, node, strategy, rank, backward_ops) for strategy in strategies)
        for node, strategies in zip(problem.folded.nodes, problem.strategies, strict=True)
    )


def is_solvable(problem: ShardingProblem) -> bool:
    """Whether every node has a strategy at all."""
    return all(problem.strategies)


def solve_sharding(problem: ShardingProblem, rank: RankSpec) -> ShardingSolution:
    """Choose the layouts of a unit.

    Args:
        problem: A solvable problem (``is_solvable``).
        rank: Device and tp group.

    Raises:
        SolverError: No consistent choice exists, or none was found in time.
    """
    prices = price_strategies(problem, rank)
    if all(len(strategies) == 1 for strategies in problem.strategies):
        return _decode(problem, prices, [0] * len(prices), rank)
    model = _Model(problem, prices, rank)
    bound_s = model.solve()
    return replace(_decode(problem, prices, model.chosen(), rank), bound_s=bound_s)


_MOST_CHECKS = 20_000
"""Work that the solver may take: some hundred times what a block takes."""


class _Model:
    """Variables and rows of one instance."""

    def __init__(self, problem: ShardingProblem, prices: Prices, rank: RankSpec) -> None:
        self.minimisation = Minimisation("sharding")
        self._problem = problem
        self._rank = rank
        dearest = max((price.total_s for row in prices for price in row), default=0.0)
        self._scale = _SCALED_OBJECTIVE / dearest if dearest > 0 else 1.0
        self._x = [self._choose(row) for row in prices]
        self._producer = {
            value: node.index for node in problem.folded.nodes for value in node.outputs
        }
        self._paid: dict[tuple[int, Layout, Layout], Term] = {}
        self._bind_calls()
        for node in problem.folded.nodes:
            for value in node.inputs:
                if node.kind is NodeKind.MODULE:
                    self._link_module(node, value)
                else:
                    self._link_region(node, value)

    def _bind_calls(self) -> None:
        """One strategy for all calls of a module: x[o,k] = x[p,k]."""
        first: dict[str, int] = {}
        for node in self._problem.folded.nodes:
            if node.kind is NodeKind.MODULE:
                other = first.setdefault(node.module, node.index)
                if other != node.index:
                    for term, same in zip(self._x[node.index], self._x[other], strict=True):
                        self.minimisation.equal([term], [same])

    def _choose(self, prices: tuple[NodePrice, ...]) -> list[Term]:
        """One strategy: sum_k x[o,k] = 1; its price enters the objective."""
        terms: list[Term] = [(1.0, self.minimisation.binary()) for _ in prices]
        self.minimisation.equal(terms, constant=1)
        self.minimisation.add_cost(
            (price.total_s * self._scale, variable)
            for price, (_, variable) in zip(prices, terms, strict=True)
        )
        return terms

    def _left(self, value: int) -> Mapping[Layout, list[Term]]:
        """For each layout in which a value can be left: the strategies that leave it so."""
        source = self._producer.get(value)
        if source is None:
            return {self._problem.boundary: []}
        found: dict[Layout, list[Term]] = {}
        for strategy, term in zip(self._problem.strategies[source], self._x[source], strict=True):
            found.setdefault(strategy.outputs[value], []).append(term)
        return found

    def _read(self, node: Node, value: int) -> Mapping[Layout, list[Term]]:
        """For each layout in which a node can read a value: the strategies that read it so."""
        found: dict[Layout, list[Term]] = {}
        strategies = self._problem.strategies[node.index]
        for strategy, term in zip(strategies, self._x[node.index], strict=True):
            found.setdefault(strategy.inputs[value], []).append(term)
        return found

    def _link_module(self, node: Node, value: int) -> None:
        """Flow conservation and payment of the changes of layout in front of a module."""
        left, read = self._left(value), self._read(node, value)
        flow = {(p, q): self.minimisation.binary() for p in left for q in read}
        entering = value not in self._producer
        for p, terms in left.items():
            self.minimisation.equal(
                [(1.0, flow[p, q]) for q in read], terms, constant=1 if entering else 0
            )
        for q, terms in read.items():
            self.minimisation.equal([(1.0, flow[p, q]) for p in left], terms)
        for (p, q), variable in flow.items():
            self.minimisation.at_most([(1.0, variable)], [self._payment(value, p, q)])

    def _payment(self, value: int, p: Layout, q: Layout) -> Term:
        """The variable g[v,p,q], made on first use with its price in the objective."""
        if (value, p, q) not in self._paid:
            seconds = sum(conversion_s(self._problem, value, p, q, self._rank))
            term: Term = (1.0, self.minimisation.binary())
            self.minimisation.add_cost([(seconds * self._scale, term[1])])
            self._paid[value, p, q] = term
        return self._paid[value, p, q]

    def _link_region(self, node: Node, value: int) -> None:
        """A region reads a value in the layout in which it is left."""
        left, read = self._left(value), self._read(node, value)
        if value not in self._producer:
            (boundary,) = left
            self.minimisation.equal(read.get(boundary, []), constant=1)
            return
        for layout in {**left, **read}:
            self.minimisation.equal(left.get(layout, []), read.get(layout, []))

    def solve(self) -> float:
        """Solve it; the bound that is proven, in seconds."""
        solution = self.minimisation.solve(most_checks=_MOST_CHECKS, is_mostly_whole=True)
        return solution.bound / self._scale

    def chosen(self) -> list[int]:
        """Position of the chosen strategy of each node."""
        return [
            next(k for k, (_, variable) in enumerate(terms) if is_chosen(variable))
            for terms in self._x
        ]


def _decode(
    problem: ShardingProblem, prices: Prices, positions: list[int], rank: RankSpec
) -> ShardingSolution:
    """Read the choice and re-price it from scratch."""
    chosen = tuple(
        strategies[k] for strategies, k in zip(problem.strategies, positions, strict=True)
    )
    conversions = conversions_of(problem, chosen)
    objective_s = sum(row[k].total_s for row, k in zip(prices, positions, strict=True))
    objective_s += sum(sum(conversion_s(problem, v, p, q, rank)) for v, p, q in conversions)
    return ShardingSolution(
        problem=problem,
        chosen=chosen,
        conversions=conversions,
        objective_s=objective_s,
        bound_s=objective_s,
    )


def conversions_of(
    problem: ShardingProblem, chosen: tuple[NodeStrategy, ...]
) -> tuple[tuple[int, Layout, Layout], ...]:
    """The changes of layout that a choice of strategies implies, each once per value.

    Args:
        problem: The unit.
        chosen: One strategy per node.
    """
    left = {value: layout for strategy in chosen for value, layout in strategy.outputs.items()}
    found: dict[tuple[int, Layout, Layout], None] = {}
    for node, strategy in zip(problem.folded.nodes, chosen, strict=True):
        for value, layout in strategy.inputs.items():
            source = left.get(value, problem.boundary)
            if node.kind is NodeKind.MODULE and source != layout:
                found[value, source, layout] = None
    return tuple(found)
