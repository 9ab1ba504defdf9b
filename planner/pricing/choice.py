"""What the layouts of a model's units are chosen under."""

from dataclasses import dataclass, replace

from planner.graph.operator_graph import OperatorGraph, Unit, UnitKind
from planner.graph.trial import SOME_RANKS
from planner.pricing.graph_sizes import GraphSizes
from planner.runtime.layout import SplitAxis
from planner.strategy.configuration import Configuration
from planner.strategy.facts import SEQUENCE_DIM
from planner.strategy.inside_context import inside_context
from planner.strategy.mesh import split_axis
from planner.strategy.nodes import FoldedUnit
from planner.strategy.problem import (
    ContextLayouts,
    ShardingProblem,
    sharding_problem,
)
from planner.vocabulary import Axis

Axes = tuple[tuple[str, int], ...]
"""Names of axes with their ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingChoice:
    """What the units' prices depend on."""

    tp: int
    """Tensor-parallel ranks."""
    cp: int = 1
    """Context-parallel ranks, of which each has a part that tp splits in turn."""
    ep: int = 1
    """Expert-parallel ranks, those of tp and cp among them."""
    sequence_parallel: bool
    """The stream is split over the sequence inside blocks."""
    split_tables: bool
    """Rows of vocabulary-sized weights are split over tp."""
    microbatch_size: int
    """Samples per microbatch."""
    compile: bool = False
    """Blocks run compiled."""
    float8: bool = False
    """Linear layers of blocks multiply in float8."""
    loss_chunks: int = 1
    """Chunks of rows that the loss is taken in."""
    activation_offload: bool = False
    """Inputs of blocks that are recomputed in full lie in host memory."""

    @property
    def ranks(self) -> int:
        """Ranks over which modules are split, the inner ones of tp and cp."""
        return int(getattr(self, split_axis(self)))

    @property
    def over(self) -> SplitAxis:
        """The axis over which modules are split."""
        name = split_axis(self)
        return SplitAxis(name, self.ranks, experts=1 if name is Axis.EP else self.ep)

    @property
    def axes(self) -> "Axes":
        """The axes over which modules are split, the inner one first, with their ranks."""
        own = (self.over.name, self.over.size)
        return (own,) if self.context is None else (own, (self.context.over.name, self.cp))

    @property
    def context(self) -> "ShardingChoice | None":
        """The choice of layouts over cp around those over tp, None where there is no such axis."""
        if self.tp == 1 or self.cp == 1:
            return None
        return replace(self, tp=1, sequence_parallel=False, split_tables=False)

    @property
    def sequence_dim(self) -> int | None:
        """Dim of the stream that the axis splits, None where it leaves it whole."""
        is_context = self.over.is_context
        return SEQUENCE_DIM if self.sequence_parallel or is_context else None

    @property
    def stream_parts(self) -> int:
        """Ranks that have different parts of what flows between blocks."""
        return self.cp * (self.tp if self.sequence_parallel else 1)


def unit_problem(
    graph: OperatorGraph,
    folded: FoldedUnit,
    choice: ShardingChoice,
    whole: frozenset[str] = frozenset(),
    around: ContextLayouts | None = None,
) -> ShardingProblem:
    """The sharding problem of a unit under a choice, with some modules left whole."""
    problem = sharding_problem(
        graph,
        folded,
        over=choice.over,
        sequence_dim=choice.sequence_dim,
        split_tables=choice.split_tables if choice.tp > 1 else None,
        whole=whole,
    )
    return problem if around is None else inside_context(problem, around)


def choice_of_unit(sizes: GraphSizes, unit: Unit, choice: ShardingChoice) -> ShardingChoice:
    """What of a choice the layouts of a unit depend on; the rest is as in no choice.

    The sequence is split inside blocks alone. Of tables only units hear that have one; and how many
    ranks share experts, not only whether some do, only those that have some.
    """
    return replace(
        choice,
        sequence_parallel=choice.sequence_parallel and unit.kind is UnitKind.BLOCK,
        split_tables=choice.split_tables and sizes.has_table(unit),
        ep=choice.ep if sizes.has_experts(unit) else min(choice.ep, SOME_RANKS),
        compile=False,
        float8=choice.float8 and unit.kind is UnitKind.BLOCK,
        loss_chunks=1,
        activation_offload=False,
    )


def layout_choice(configuration: Configuration, *, split: bool) -> ShardingChoice:
    """What the layouts of a configuration are chosen under."""
    return ShardingChoice(
        tp=configuration.degrees.tp,
        cp=configuration.degrees.cp,
        ep=configuration.degrees.ep,
        sequence_parallel=configuration.sequence_parallel,
        split_tables=split,
        microbatch_size=configuration.microbatch_size,
        compile=configuration.compile,
        float8=configuration.float8,
        loss_chunks=configuration.loss_chunks,
        activation_offload=configuration.activation_offload,
    )
