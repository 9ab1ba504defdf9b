"""The layouts of a model's units under each choice: solved, and tried by the script's runtime."""

from collections.abc import Callable
from functools import partial

from planner.cost.node_pricing import RankSpec
from planner.errors import SolverError
from planner.graph.operator_graph import Unit, UnitKind
from planner.graph.sizes.family import GraphFamily
from planner.graph.trial import Refusal
from planner.pricing.choice import ShardingChoice, choice_of_unit, unit_problem
from planner.pricing.graph_sizes import GraphSizes
from planner.pricing.instructions import RunnableUnit, module_shardings, runnable_block, tried
from planner.pricing.sharding_ilp import ShardingSolution, is_solvable, solve_sharding
from planner.runtime.layout import SplitAxis
from planner.strategy.facts import SEQUENCE_DIM
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
            evaluates = self._graphs.evaluates
            alike = (known for size, known in self._sizes.items() if evaluates(size))
            like = next(alike, None) if evaluates(microbatch_size) else None
            self._sizes[microbatch_size] = GraphSizes(self._graphs.at(microbatch_size), like)
        return self._sizes[microbatch_size]

    def solve(
        self, unit: Unit, choice: ShardingChoice, whole: frozenset[str] = frozenset()
    ) -> ShardingSolution | None:
        """The best layouts of a unit with some modules left whole, None where there are none."""
        sizes = self.sizes(choice.microbatch_size)
        question = (unit.structure, choice_of_unit(sizes, unit, choice), whole)
        if question not in self._solved:
            problem = unit_problem(sizes.graph, sizes.folded(unit), choice, whole)
            try:
                solvable = is_solvable(problem)
                found = solve_sharding(problem, self._rank(choice)) if solvable else None
            except SolverError:  # no consistent choice
                found = None
            self._solved[question] = found
        return self._solved[question]


_Question = tuple[str, ShardingChoice, frozenset[str]]

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
        self.reasons: dict[SplitAxis, str] = {}
        """Why the script cannot run a layout over an axis, where it was tried and refused."""
        self.unpaid: set[SplitAxis] = set()
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

    def whole(self, choice: ShardingChoice, structure: str) -> tuple[WholeModule, ...]:
        """Modules of a unit that the script could not run split."""
        return self._whole.get((choice, structure), ())

    def _solve(self, choice: ShardingChoice) -> dict[str, ShardingSolution] | None:
        sizes = self._solver.sizes(choice.microbatch_size)
        solutions: dict[str, ShardingSolution] = {}
        for unit in sizes.representatives:
            solution = self._solve_unit(sizes, unit, choice)
            if solution is None:
                if choice.cp > 1:
                    found = Refusal(module="", reason=_NO_RULE)
                    self._note(choice, unit.name, found)
                return None
            solutions[unit.structure] = solution
        if choice.ranks == 1:
            return solutions
        if not _shards_anything(solutions):
            self.unpaid |= {choice.over} if _could_shard(solutions) else set()
            return None
        return solutions if self._ends_run(choice, solutions) else None

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
        solve = partial(self._solver.solve, unit, choice)
        if choice.ranks == 1 or not self._is_tried or unit.kind is not UnitKind.BLOCK:
            solution = solve()
            return None if solution is None else RunnableUnit(solution=solution, whole=())
        return runnable_block(
            self._graphs.trial(self._size_of_trial(choice)), unit, solve,
            over=choice.over, sequence_dim=SEQUENCE_DIM if choice.splits_stream else None,
        )  # fmt: skip

    def _ends_run(self, choice: ShardingChoice, solutions: dict[str, ShardingSolution]) -> bool:
        """Whether what lies around the blocks runs as it was chosen."""
        if not self._is_tried or choice.over.is_inside_blocks:
            return True
        ends = [each for each in solutions.values() if each.problem.unit.kind is not UnitKind.BLOCK]
        modules = [module for each in ends for module in module_shardings(each)]
        found = self._graphs.trial(self._size_of_trial(choice)).ends(
            tried(modules), choice.over, SEQUENCE_DIM if choice.cp > 1 else None
        )
        if found is not None:
            self._note(choice, found.module or "the model around its blocks", found)
        return found is None

    def _note(self, choice: ShardingChoice, place: str, found: Refusal) -> None:
        self.reasons.setdefault(choice.over, f"{found.module or place}: {found.reason}")


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
