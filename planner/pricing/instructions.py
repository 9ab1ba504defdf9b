"""The instructions for the script that a choice of layouts amounts to, tried before they are given.

A layout is given only after the script's own runtime has run it (``graph.trial``). What it refuses
is whole in the next try: the modules around the place that failed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from planner.graph.operator_graph import OperatorGraph, Unit, UnitKind
from planner.graph.trial import LayoutTrial, Refusal, TriedLayout, TriedModule
from planner.pricing.choice import ShardingChoice
from planner.pricing.sharding_ilp import ShardingSolution
from planner.runtime.layout import REPLICATE, Layout
from planner.strategy.nodes import NodeKind, NodeStrategy
from planner.strategy.problem import ContextLayouts
from planner.strategy.sharding import ModuleSharding, SplitParameter, WholeModule
from planner.vocabulary import Style, split_styles

Solve = Callable[[frozenset[str]], ShardingSolution | None]
"""Solves a unit with modules left whole, by their paths in it; None where that has no layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnableUnit:
    """Layouts of a unit that the script can run."""

    solution: ShardingSolution
    """The layouts."""
    whole: tuple[WholeModule, ...]
    """What is whole because the script could not run it split."""


def runnable_block(
    trial: LayoutTrial,
    unit: Unit,
    solve: Solve,
    layouts: Callable[[Sequence[ModuleSharding]], Sequence[TriedLayout]],
) -> RunnableUnit | Refusal | None:
    """Find the best layout of a block that runs.

    Args:
        trial: Tries layouts.
        unit: The block.
        solve: Solves its problem.
        layouts: Gives what is to be tried for instructions, over one axis or two.

    Returns:
        The layout, or why none runs; None where there is none to run.
    """
    whole: dict[str, str] = {}
    refusal: Refusal | None = None
    while True:
        solution = solve(frozenset(whole))
        if solution is None:
            return refusal
        modules = module_shardings(solution)
        found = trial.block(unit, layouts(modules))
        if found is None:
            kept = [WholeModule(module=path, reason=reason) for path, reason in whole.items()]
            return RunnableUnit(solution=solution, whole=tuple(kept))
        refusal = found
        split = _split_modules(solution, modules)
        assert whole.keys().isdisjoint(split), "what is to be whole was split again"
        failed = _around(unit.path_of(found.module), split)
        if not failed:
            return refusal
        whole |= dict.fromkeys(failed, found.reason)


def context_layouts(solution: ShardingSolution) -> ContextLayouts:
    """A unit's layouts over cp as those over tp inside its parts take them."""
    problem, chosen = solution.problem, solution.chosen
    conversions: dict[int, list[tuple[int, Layout, Layout]]] = {}
    for value, source, target in solution.conversions:
        reader = next(
            node.index
            for node, each in zip(problem.folded.nodes, chosen, strict=True)
            if node.kind is NodeKind.MODULE and each.inputs.get(value) == target
        )
        conversions.setdefault(reader, []).append((value, source, target))
    return ContextLayouts(
        ranks=problem.context.ranks,
        chosen=chosen,
        boundary=problem.boundary,
        left={value: layout for each in chosen for value, layout in each.outputs.items()},
        conversions={node: tuple(changes) for node, changes in conversions.items()},
    )


def _split_modules(solution: ShardingSolution, modules: Sequence[ModuleSharding]) -> list[str]:
    """Paths of the modules that are split."""
    axis = solution.problem.context.axis
    return [each.module for each in modules if each.style in split_styles(axis)]


def _around(module: str, split: list[str]) -> list[str]:
    """Split modules nearest to a path: those below it, or below the next module around it."""
    while module:
        below = [path for path in split if f"{path}.".startswith(f"{module}.")]
        if below:
            return below
        module = module.rpartition(".")[0]
    return split


def tried_over(choice: ShardingChoice, modules: Sequence[ModuleSharding]) -> TriedLayout:
    """Instructions over the axis of a choice as the runtime takes them."""
    return TriedLayout(
        over=choice.over, sequence_dim=choice.sequence_dim, modules=_tried_modules(modules)
    )


def _tried_modules(modules: Sequence[ModuleSharding]) -> tuple[TriedModule, ...]:
    return tuple(
        TriedModule(
            module=each.module,
            style=each.style,
            split=tuple((part.name, part.dim, part.fused) for part in each.split),
            input_layout=each.input_layout,
            output_layout=each.output_layout,
        )
        for each in modules
    )


def module_shardings(solution: ShardingSolution) -> tuple[ModuleSharding, ...]:
    """Instructions for the modules of a unit that do not simply run whole on what is whole."""
    unit, graph = solution.problem.unit, solution.problem.context.graph
    gathered = {value for value, source, _ in solution.conversions if source.is_shard}
    found: dict[str, ModuleSharding] = {}
    for node, strategy in zip(solution.problem.folded.nodes, solution.chosen, strict=True):
        if node.kind is not NodeKind.MODULE:
            continue
        if _runs_as_is(strategy) and gathered.isdisjoint(node.inputs):
            continue
        (output, leaving), *_ = strategy.outputs.items() or ((-1, REPLICATE),)
        ndim = len(graph.values[output].shape) if output >= 0 else 0
        entering = next(iter(strategy.inputs.values()), strategy.constant_input or REPLICATE)
        path = unit.path_of(node.module)
        found[path] = ModuleSharding(
            module=path,
            style=strategy.style,
            input_layout=_spelled(entering, _input_ndim(graph, strategy)),
            output_layout=_spelled(leaving, ndim),
            split=strategy.split,
        )
        if strategy.split:
            found |= _idle_holders(graph, unit, node.module, found[path])
    return tuple(found.values())


def _idle_holders(
    graph: OperatorGraph, unit: Unit, module: str, sharding: ModuleSharding
) -> dict[str, ModuleSharding]:
    """Instructions for modules that never run but hold what another one splits, by their paths.

    A table that encoder and decoder have modules of their own for, say: their parameter has to be
    the same one afterwards.
    """
    split = {f"{module}.{each.name}": each for each in sharding.split}
    within = f"{unit.name}." if unit.kind is UnitKind.BLOCK else ""
    parts: dict[str, list[SplitParameter]] = {}
    for parameter in (each for each in graph.parameters if len(each.names) > 1):
        mine = split.keys() & set(parameter.names)
        for name in parameter.names if mine else ():
            holder, _, last = name.rpartition(".")
            if not _runs(graph, holder) and f"{holder}.".startswith(within):
                parts.setdefault(holder, []).append(replace(split[min(mine)], name=last))
    return {
        unit.path_of(holder): replace(sharding, module=unit.path_of(holder), split=tuple(held))
        for holder, held in parts.items()
    }


def _runs(graph: OperatorGraph, module: str) -> bool:
    forward = (op for op in graph.nodes if op.phase == "forward")
    return not module or any(f"{op.module}.".startswith(f"{module}.") for op in forward)


def _runs_as_is(strategy: NodeStrategy) -> bool:
    """Whether a module needs no instruction: whole parameters, whole input, whole output."""
    layouts = (*strategy.inputs.values(), *strategy.outputs.values())
    return strategy.style == Style.REPLICATE and all(layout == REPLICATE for layout in layouts)


def _input_ndim(graph: OperatorGraph, strategy: NodeStrategy) -> int:
    return max((len(graph.values[value].shape) for value in strategy.inputs), default=0)


def _spelled(layout: Layout, ndim: int) -> str:
    """Layout as the script spells it; the feature dim counts from the end."""
    if not layout.is_shard:
        return "Replicate"
    return "Shard(-1)" if layout.dim == ndim - 1 else f"Shard({layout.dim})"
