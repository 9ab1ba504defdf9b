"""The layouts of a model's units under each choice: solved, and tried by the script's runtime."""

from collections.abc import Callable, Mapping
from functools import partial

from planner.cost.node_pricing import RankSpec
from planner.errors import SolverError
from planner.graph.analysis.loss_rows import LossRows
from planner.graph.operator_graph import Unit, UnitKind
from planner.graph.sizes.family import GraphFamily
from planner.graph.trial import LayoutTrial, Refusal, TriedLayout
from planner.pricing.choice import Axes, ShardingChoice, choice_of_unit, unit_problem
from planner.pricing.graph_sizes import GraphSizes
from planner.pricing.instructions import (
    RunnableUnit,
    context_layouts,
    module_shardings,
    runnable_block,
    tried_over,
)
from planner.pricing.sharding_ilp import ShardingSolution, is_solvable, solve_sharding
from planner.strategy.sharding import ModuleSharding, WholeModule
from planner.vocabulary import split_styles


class UnitSolver:
    """The best layouts of units, whether or not they run; equal questions are answered once."""

    def __init__(self, graphs: GraphFamily, rank: Callable[[ShardingChoice], RankSpec]) -> None:
        """Keep what layouts depend on.

        Args:
            graphs: The model at every microbatch size.
            rank: Prices by which layouts are chosen under a choice.
        """
        self._graphs = graphs
        self._rank = rank
        self._sizes: dict[int, GraphSizes] = {}
        self._solved: dict[_Question, ShardingSolution | None] = {}

    def sizes(self, microbatch_size: int) -> GraphSizes:
        """The graph at a microbatch size, with what is read off it once."""
        if microbatch_size not in self._sizes:
            self._sizes[microbatch_size] = GraphSizes(self._graphs.at(microbatch_size))
        return self._sizes[microbatch_size]

    def solve(
        self,
        unit: Unit,
        choice: ShardingChoice,
        whole: frozenset[str] = frozenset(),
        around: ShardingSolution | None = None,
    ) -> ShardingSolution | None:
        """The best layouts of a unit, None where there are none.

        Args:
            unit: The unit.
            choice: What they are chosen under.
            whole: Modules that are not split.
            around: Its layouts over cp where the choice has tp inside its parts; None for the best.
        """
        sizes = self.sizes(choice.microbatch_size)
        if choice.context is not None and around is None:
            around = self.solve(unit, choice.context)
            if around is None:
                return None
        question = (unit.structure, choice_of_unit(sizes, unit, choice), whole, id(around))
        if question not in self._solved:
            problem = unit_problem(
                sizes.graph, sizes.folded(unit), choice, whole,
                None if around is None else context_layouts(around),
            )  # fmt: skip
            try:
                solvable = is_solvable(problem)
                found = solve_sharding(problem, self._rank(choice)) if solvable else None
            except SolverError:  # no consistent choice
                found = None
            self._solved[question] = found
        return self._solved[question]

    def obstacle(self, unit: Unit, choice: ShardingChoice) -> str:
        """What of a unit has no layout under a choice; "" where all of it together has none."""
        sizes = self.sizes(choice.microbatch_size)
        return unit_problem(sizes.graph, sizes.folded(unit), choice).obstacle


_Question = tuple[str, ShardingChoice, frozenset[str], int]
"""Of a unit's structure; the last tells its layouts over cp, which are kept, apart."""

_NO_RULE = "no rule says how all of it runs on a part of the sequence"


class UnitLayouts:
    """Layouts on demand; equal questions are answered once."""

    def __init__(self, graphs: GraphFamily, solver: UnitSolver, *, is_tried: bool) -> None:
        """Keep what layouts depend on.

        Args:
            graphs: The model at every microbatch size.
            solver: Gives the best layouts.
            is_tried: Give only layouts that the script's own runtime has run.
        """
        self._graphs = graphs
        self._solver = solver
        self._is_tried = is_tried
        self._whole: dict[tuple[ShardingChoice, str], tuple[WholeModule, ...]] = {}
        self._solutions: dict[ShardingChoice, dict[str, ShardingSolution] | None] = {}
        self._units: dict[tuple[str, ShardingChoice], RunnableUnit | Refusal | None] = {}
        self._confirmed: set[ShardingChoice] = set()
        self.reasons: dict[Axes, str] = {}
        """Why the script cannot run a layout over axes, where it was tried and refused."""
        self.unpaid: set[Axes] = set()
        """Axes over which modules could be split, and each is faster whole."""

    def of(self, choice: ShardingChoice) -> dict[str, ShardingSolution] | None:
        """Layouts by unit structure, None where some unit cannot run under the choice."""
        if choice not in self._solutions:
            self._solutions[choice] = self._solve(choice)
        return self._solutions[choice]

    def confirm(self, choice: ShardingChoice) -> bool:
        """Try a choice at its own microbatch size, and say whether its layouts stay as they are.

        Sizes whose graphs follow from those of others are tried at one of them for all.
        """
        if not self._is_tried or self._size_of_trial(choice) == choice.microbatch_size:
            return True
        before = self._solutions.pop(choice)
        self._confirmed.add(choice)
        self._units = {
            key: each
            for key, each in self._units.items()
            if key[1].microbatch_size != choice.microbatch_size
        }
        after = self.of(choice)
        return _instructions(before) == _instructions(after)

    def _size_of_trial(self, choice: ShardingChoice) -> int:
        size = choice.microbatch_size
        return size if choice in self._confirmed else self._graphs.size_of_trial(size)

    def _trial(self, choice: ShardingChoice) -> LayoutTrial:
        return self._graphs.trial(self._size_of_trial(choice), float8=choice.float8)

    def whole(self, choice: ShardingChoice, structure: str) -> tuple[WholeModule, ...]:
        """Modules of a unit that the script could not run split."""
        return self._whole.get((choice, structure), ())

    def _solve(self, choice: ShardingChoice) -> dict[str, ShardingSolution] | None:
        sizes = self._solver.sizes(choice.microbatch_size)
        solutions: dict[str, ShardingSolution] = {}
        if choice.context is not None and self.of(choice.context) is None:
            self._blame(choice)
            return None
        if not self._may_solve(sizes, choice):
            return None
        for unit in sizes.representatives:
            solution = self._solve_unit(sizes, unit, choice)
            if solution is None:
                return None
            solutions[unit.structure] = solution
        if choice.ranks == 1:
            return solutions
        if not _shards_anything(solutions):
            self.unpaid |= {choice.axes} if _could_shard(solutions) else set()
            return None
        return solutions if self._ends_run(choice, solutions) else None

    def _may_solve(self, sizes: GraphSizes, choice: ShardingChoice) -> bool:
        """Whether every unit has layouts, run or not: to try those of others would be in vain."""
        around = self.around(choice)
        for unit in sizes.representatives:
            if self._solver.solve(unit, choice, around=around.get(unit.structure)) is None:
                if choice.over.is_context:
                    reason = self._solver.obstacle(unit, choice) or _NO_RULE
                    self._note(choice, unit.name, Refusal(module="", reason=reason))
                return False
        return True

    def _solve_unit(
        self, sizes: GraphSizes, unit: Unit, choice: ShardingChoice
    ) -> ShardingSolution | None:
        """The best layouts of a unit that the script can run, None where there are none."""
        key = (unit.structure, choice_of_unit(sizes, unit, choice))
        if key not in self._units:
            self._units[key] = self._found(unit, choice)
        found = self._units[key]
        if isinstance(found, Refusal):
            self._note(choice, unit.name, found)
        if not isinstance(found, RunnableUnit):
            return None
        self._whole[choice, unit.structure] = found.whole
        return found.solution

    def _found(self, unit: Unit, choice: ShardingChoice) -> RunnableUnit | Refusal | None:
        """Layouts of a unit, or why none runs; None where there are none to run."""
        around = self.around(choice).get(unit.structure)
        solve = partial(self._solver.solve, unit, choice, around=around)
        if choice.ranks == 1 or not self._is_tried or unit.kind is not UnitKind.BLOCK:
            solution = solve()
            return None if solution is None else RunnableUnit(solution=solution, whole=())
        outer = [] if around is None else [_tried_context(choice, around)]
        return runnable_block(
            self._trial(choice), unit, solve,
            lambda modules: (tried_over(choice, modules), *outer),
        )  # fmt: skip

    def around(self, choice: ShardingChoice) -> Mapping[str, ShardingSolution]:
        """Layouts over cp around those of a choice, by unit structure; none where none is."""
        return (self.of(choice.context) or {}) if choice.context is not None else {}

    def _blame(self, choice: ShardingChoice) -> None:
        """Take over why the layouts over cp do not run that a choice needs."""
        context = choice.context
        if context is not None and context.axes in self.reasons:
            self.reasons.setdefault(choice.axes, self.reasons[context.axes])

    def _ends_run(self, choice: ShardingChoice, solutions: dict[str, ShardingSolution]) -> bool:
        """Whether what lies around the blocks runs as it was chosen."""
        if not self._is_tried or choice.over.is_inside_blocks:
            return True
        layouts = [tried_over(choice, _around_blocks(solutions))]
        if choice.context is not None:
            layouts.append(tried_over(choice.context, _around_blocks(self.around(choice))))
        rows = self._solver.sizes(choice.microbatch_size).loss_rows
        logits = rows.module if isinstance(rows, LossRows) and choice.loss_chunks > 1 else ""
        found = self._trial(choice).ends(layouts, logits)
        if found is not None:
            self._note(choice, found.module or "the model around its blocks", found)
        return found is None

    def _note(self, choice: ShardingChoice, place: str, found: Refusal) -> None:
        self.reasons.setdefault(choice.axes, f"{found.module or place}: {found.reason}")


def _around_blocks(solutions: Mapping[str, ShardingSolution]) -> list[ModuleSharding]:
    """Instructions for what lies around the blocks."""
    ends = [each for each in solutions.values() if each.problem.unit.kind is not UnitKind.BLOCK]
    return [module for each in ends for module in module_shardings(each)]


def _tried_context(choice: ShardingChoice, around: ShardingSolution) -> TriedLayout:
    """A block's layout over cp around that of a choice."""
    assert choice.context is not None
    return tried_over(choice.context, module_shardings(around))


def _instructions(
    solutions: dict[str, ShardingSolution] | None,
) -> dict[str, tuple[ModuleSharding, ...]] | None:
    if solutions is None:
        return None
    return {structure: module_shardings(each) for structure, each in solutions.items()}


def _could_shard(solutions: dict[str, ShardingSolution]) -> bool:
    return any(
        strategy.style in split_styles(solution.problem.context.axis)
        for solution in solutions.values()
        for strategies in solution.problem.strategies
        for strategy in strategies
    )


def _shards_anything(solutions: dict[str, ShardingSolution]) -> bool:
    return any(
        strategy.style in split_styles(solution.problem.context.axis)
        for solution in solutions.values()
        for strategy in solution.chosen
    )
