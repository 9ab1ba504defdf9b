"""How a model's step grows, told by steps of the same model with fewer of its blocks.

A deep model is a few kinds of blocks many times over. One step of all of it tells which blocks
are alike; how their numbers grow with the microbatch is then read off a model that has each kind
at least once, and traced in a fraction of the time. A unit of the whole model is taken to grow as
a unit of the short one of the same structure (the same ops, shapes, arguments and wiring), and
only where what units hand each other grows alike for who makes it and for all who read it.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby

from planner.errors import PlannerError
from planner.graph.division.structure import structure_hashes
from planner.graph.division.units import UnitSpan, find_layout
from planner.graph.loading.loaded_model import LoadedModel
from planner.graph.recording.recording import Recording
from planner.graph.sizes.affine import AffineSteps, NotAffineError
from planner.graph.trace import record_step

LEAST_SAVED = 0.5
"""Share of the ops that a short model must leave out, else its steps are not worth tracing."""

PROVING_SIZES = {1: 1, 4: 2}
"""Sizes at which an evaluated step is held to a traced one, and the smallest for which it then
holds: a batch of one can be a program of its own."""


def steps_of_fewer_blocks(
    model: LoadedModel,
    dtype: str,
    whole: Recording,
    units: Sequence[UnitSpan],
    hashes: Mapping[int, str],
) -> tuple[AffineSteps, int] | None:
    """Fit how a model grows by steps of one with fewer blocks, and prove it at another size.

    Args:
        model: The model.
        dtype: Compute dtype.
        whole: A step of all of it.
        units: Its units.
        hashes: The structure of each (``structure_hashes``).

    Returns:
        The whole model's steps, and the smallest size for which they hold; None where too few of
        its blocks are alike, or the short model does not run, is not the whole one with fewer
        blocks, or is another program at some size.
    """
    is_told_by_data = whole.data_reads or whole.asked_places or whole.decisions
    spare = _spare_blocks(whole, units, hashes)
    if is_told_by_data or not spare:
        return None

    def step(size: int) -> Recording:
        return record_step(model, microbatch_size=size, dtype=dtype, without=spare)

    try:
        low, high = (step(whole.microbatch_size + more) for more in (0, 1))
        steps = AffineSteps(low, high)
        proven = (least for size, least in PROVING_SIZES.items() if steps.at(size) == step(size))
        least = next(proven, None)
        if least is None:
            return None
        return steps.of_whole(whole, _twins(units, hashes, low, high)), least
    except (PlannerError, NotAffineError):
        return None


def _spare_blocks(
    whole: Recording, units: Sequence[UnitSpan], hashes: Mapping[int, str]
) -> tuple[str, ...]:
    """Modules that can be left out; () where that saves too little.

    Of each list those behind the first of each structure, but for as many as have one of their own
    at its end: those that are left take it on, since it comes of their place.
    """
    lists = {each.path for each in whole.lists}
    blocks = [(position, unit) for position, unit in enumerate(units) if unit.block is not None]
    spare: list[int] = []
    for path, members in groupby(blocks, key=lambda block: block[1].path.rpartition(".")[0]):
        places = [position for position, _ in members]
        if path in lists:
            spare += places[_num_kept([hashes[place] for place in places]) :]
    num_ops = sum(len(units[each].forward_ops) + len(units[each].backward_ops) for each in spare)
    if num_ops < LEAST_SAVED * len(whole.ops):
        return ()
    return tuple(units[each].path for each in spare)


def _num_kept(kinds: Sequence[str]) -> int:
    """How many of a list's blocks show all of their structures, and that some are alike."""
    end = len(kinds)
    while end > 1 and kinds[end - 1] not in kinds[: end - 1]:
        end -= 1
    return len(kinds) - end + max(kinds.index(kind) + 2 for kind in kinds[:end])


def _twins(
    units: Sequence[UnitSpan], hashes: Mapping[int, str], low: Recording, high: Recording
) -> dict[int, int]:
    """For each op of the whole model its like in the short one.

    Raises:
        NotAffineError: A unit has no like, or units alike at one size differ at another.
    """
    short = dict(enumerate(find_layout(low).units))
    at_low, at_high = structure_hashes(low, short), structure_hashes(high, short)
    if len({*at_low.values()}) != len({(at_low[each], at_high[each]) for each in short}):
        raise NotAffineError
    like = {at_low[position]: span for position, span in short.items()}
    twins: dict[int, int] = {}
    for position, span in enumerate(units):
        twin = like.get(hashes[position])
        if twin is None:
            raise NotAffineError
        twins |= zip(span.forward_ops, twin.forward_ops, strict=True)
        twins |= zip(span.backward_ops, twin.backward_ops, strict=True)
    return twins
