"""A model with fewer of its blocks, which tells of the whole in a fraction of the time.

A deep model is a few kinds of blocks many times over. One step of all of it tells which blocks
are alike. How their numbers grow with the microbatch, and how they run under a layout, is then
told by a model that has each kind at least once.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from torch import nn

from planner.graph.division.structure import structure_hashes
from planner.graph.division.units import Layout, UnitSpan
from planner.graph.loading.loaded_model import LoadedModel
from planner.graph.recording.recording import Recording
from planner.graph.sizes.affine import AffineSteps

LEAST_SAVED = 0.6
"""Share of the ops that a short model must leave out, else it is not worth tracing."""


def short_model(
    model: LoadedModel, whole: Recording, units: Sequence[UnitSpan], hashes: Mapping[int, str]
) -> LoadedModel | None:
    """The model without some of its blocks; None where that saves too little.

    Of each list it lacks those behind the first of each structure, but for as many as have one of
    their own at its end: those that are left take it on, since it comes of their place.

    Args:
        model: The model.
        whole: A step of all of it.
        units: Its units.
        hashes: The structure of each (``structure_hashes``).
    """
    spare = _spare_blocks(whole, units, hashes)
    num_ops = sum(len(units[each].forward_ops) + len(units[each].backward_ops) for each in spare)
    if not spare or num_ops < LEAST_SAVED * len(whole.ops):
        return None
    paths = [units[each].path for each in spare]

    def made() -> nn.Module:
        module = model.make_model()
        for path in paths:
            parent, _, name = path.rpartition(".")
            delattr(module.get_submodule(parent), name)
        return module

    return replace(model, make_model=made)


def _spare_blocks(
    whole: Recording, units: Sequence[UnitSpan], hashes: Mapping[int, str]
) -> list[int]:
    lists = {each.path for each in whole.lists}
    blocks = [(position, unit) for position, unit in enumerate(units) if unit.block is not None]
    spare: list[int] = []
    for path, members in groupby(blocks, key=lambda block: block[1].path.rpartition(".")[0]):
        places = [position for position, _ in members]
        if path in lists:
            spare += places[_num_kept([hashes[place] for place in places]) :]
    return spare


def _num_kept(kinds: Sequence[str]) -> int:
    """How many of a list's blocks show all of their structures, and that some are alike."""
    end = len(kinds)
    while end > 1 and kinds[end - 1] not in kinds[: end - 1]:
        end -= 1
    return len(kinds) - end + max(kinds.index(kind) + 2 for kind in kinds[:end])


def likes(
    short: Recording, division: Layout, units: Sequence[UnitSpan], hashes: Mapping[int, str]
) -> list[UnitSpan] | None:
    """For each unit of the whole model one of the short model with its structure.

    Args:
        short: A step of the short model.
        division: Of the short model.
        units: Units of the whole model.
        hashes: The structure of each, for as many samples.

    Returns:
        None where a unit has no like.
    """
    spans = dict(enumerate(division.units))
    kinds = structure_hashes(short, spans)
    like = {kinds[position]: span for position, span in reversed(spans.items())}
    named = {(span.name, kinds[position]): span for position, span in spans.items()}
    if not {*hashes.values()} <= like.keys():
        return None
    return [
        named.get((unit.name, hashes[position]), like[hashes[position]])
        for position, unit in enumerate(units)
    ]


def steps_of_whole(
    short: AffineSteps, whole: Recording, pairs: Iterable[tuple[UnitSpan, UnitSpan]]
) -> AffineSteps:
    """How a model grows, told by one with fewer of its blocks.

    A unit is taken to grow as its like, which has its structure (the same ops, shapes, arguments
    and wiring at one size), if what units hand each other grows alike for who makes it and for all
    who read it.

    Args:
        short: How the short model grows.
        whole: A step of the whole model, of as many samples as ``short.low``.
        pairs: Its units, each with its like (``likes``).

    Raises:
        NotAffineError: Something does not grow alike.
    """
    twins: dict[int, int] = {}
    for unit, like in pairs:
        twins |= zip(unit.forward_ops, like.forward_ops, strict=True)
        twins |= zip(unit.backward_ops, like.backward_ops, strict=True)
    return short.of_whole(whole, twins)
