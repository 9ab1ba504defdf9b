"""Choices of recomputation for runs of blocks, against every choice."""

from dataclasses import replace
from itertools import combinations, product

from hypothesis import given, settings
from hypothesis import strategies as st
from instances import clusters, configurations, models, search_of

from planner.vocabulary import RECOMPUTATIONS


@st.composite
def searches(draw):
    """Of all forms of the state, also that of one backward with parameters gathered at once."""
    model = draw(models())
    known = [each for each in configurations(model) if each.virtual_stages == 1]
    alone = next(each for each in known if each.degrees.pp == 1)
    alone = replace(alone, num_microbatches=1, reshard_after_forward=False)
    configuration = alone if draw(st.booleans()) else draw(st.sampled_from(known))
    return search_of(model, configuration, draw(clusters()))


def held(search, first, end, kinds):
    """Seconds, bytes kept, with the highest transient, and the last ones, of a run of blocks."""
    table, transients = search.table, search.table.memory.transients
    of_block = list(zip(range(first, end), kinds, strict=True))
    seconds = sum(table.recompute_s(index, kind) for index, kind in of_block)
    kept = sum(table.units[index].activation_bytes[kind] for index, kind in of_block)
    if more := table.memory.buffers.more_bytes(first):
        kept -= more[RECOMPUTATIONS.index(kinds[0])]
    starting = transients.start_bytes(first, end, kinds)
    return seconds, kept, kept + starting, transients.end_bytes(first, end, kinds)


@settings(max_examples=200)
@given(searches(), st.data())
def test_choices_hold_what_stages_do_and_none_is_better(search, data):
    maker, blocks = search.maker, search.table.model.blocks
    runs = list(combinations(range(blocks.start, blocks.stop + 1), 2))
    first, end = data.draw(st.sampled_from(runs))
    front, least = maker._front(first, end), search.table.memory.transients.before_bytes(first, end)
    listed = []
    for place in range(len(front.kept)):
        kinds = maker._kinds_of(first, end, front.counts_of(place))
        in_order = [kinds[index] for index in sorted(kinds)]
        seconds, kept, fullest, ending = held(search, first, end, in_order)
        assert abs(seconds - front.seconds[place]) < 1e-9
        assert kept == front.kept[place]
        assert fullest == kept + max(front.highest[place, 0], least)
        assert ending == front.highest[place, 1]
        listed.append((seconds, kept, fullest, ending))
    for chosen in product(maker.kinds, repeat=end - first):
        other = held(search, first, end, chosen)
        assert any(
            all(own <= its + 1e-9 for own, its in zip(each, other, strict=True)) for each in listed
        )
