"""What a run of units holds outside its blocks: of the prologue and of units behind the blocks."""

from dataclasses import dataclass

from planner.cost.stage_costs import StageCosts
from planner.vocabulary import Recomputation


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnds:
    """What prologue and epilogue add to the blocks of a run that has them, bytes."""

    kept: int
    """Activations kept."""
    highest: int
    """Highest transient of the epilogue, or of what a forward has held to its end."""
    released: int
    """What the epilogue has released when the blocks run their backward."""
    prologue: int
    """Highest transient of the prologue."""
    early_prologue: int
    """The same among the last of a backward."""
    left: int
    """What is left outside the blocks when they end their backward (``left_bytes``)."""


def ends_of(table: StageCosts, first: int, end: int) -> RunEnds:
    """What prologue and epilogue add to a run of a configuration's units."""
    transients, last = table.memory.transients, len(table.units) - 1
    kept = {i: table.units[i].activation_bytes[Recomputation.NONE] for i in (0, last)}
    highest, released, prologue, early_prologue = transients.before_bytes(first, end), 0, 0, 0
    if end == last + 1:
        highest = max(highest, transients.unit_bytes(last, Recomputation.NONE))
        released = transients.released_bytes(last)
    if first == 0 < last:
        prologue = transients.prologue_bytes(end)
    if first == 0:
        own = transients.end_bytes(0, 1, (Recomputation.NONE,))
        early_prologue = own + transients.joined_bytes(0, 0, end)
    return RunEnds(
        kept=sum(kept[index] for index in kept if first <= index < end),
        highest=highest,
        released=released,
        prologue=prologue,
        early_prologue=early_prologue,
        left=(0 if first else kept[0]) + transients.left_gradient_bytes(first, end),
    )
