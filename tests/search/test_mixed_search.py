"""Stages on devices of several kinds, against enumeration of all cuts, recomputations and orders of
the kinds."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from instances import check, clusters, configurations, enumerated_s, models, search_of

from planner.cost.kinds import kinds_of_stages, links_between
from planner.hardware.mixed import as_if_all, in_order, joined, orders
from planner.search.mixed_search import MixedSearch


@st.composite
def devices(draw, model):
    """The model on another kind of device: each unit is faster or slower, by its own factor."""
    factors = st.sampled_from([0.4, 0.8, 1.0, 1.5, 3.0])
    changed = {}
    for unit in model.units:
        factor = draw(factors)
        changed[unit.structure] = replace(
            unit,
            forward_s=unit.forward_s * factor,
            weight_backward_s=unit.weight_backward_s * factor,
            backward_s=unit.backward_s * factor,
        )
    return replace(model, units=tuple(changed[unit.structure] for unit in model.units))


@st.composite
def mixed(draw):
    """Two kinds of device with memory and links of their own, four ranks or six and two of each."""
    sizes = draw(st.sampled_from([(4, 4), (6, 2)]))
    parts = []
    for place, size in enumerate(sizes):
        cluster = draw(clusters())
        device = replace(cluster.device, name=f"kind-{place}")
        parts.append(
            replace(
                cluster,
                name=device.name,
                device=device,
                num_gpus=size,
                gpus_per_node=2,
                links=(
                    replace(cluster.links[0], ranks=2),
                    replace(cluster.links[-1], ranks=None),
                ),
            )
        )
    return joined(parts)


def searches_of(by_name, cluster, configuration):
    for order in orders(cluster):
        placed = replace(configuration, device_order=order)
        ordered = in_order(cluster, order)
        between = links_between(ordered, placed)
        by_kind = [
            search_of(by_name[name], placed, as_if_all(ordered, place), between)
            for place, name in enumerate(order)
        ]
        yield MixedSearch(by_kind, kinds_of_stages(ordered, placed))


def some(cluster, model):
    """Configurations whose stages lie on one kind of device each."""
    for each in configurations(model):
        ranks = 8 // each.degrees.pp
        if each.virtual_stages == 1 and all(part.num_gpus % ranks == 0 for part in cluster.parts):
            yield each


@settings(max_examples=200)
@given(models(), mixed(), st.data())
def test_the_search_over_kinds_of_device_equals_enumeration(model, cluster, data):
    by_name = {"kind-0": model, "kind-1": data.draw(devices(model))}
    known = list(some(cluster, model))
    places = data.draw(st.sets(st.integers(0, len(known) - 1), min_size=1, max_size=3))
    check([s for place in places for s in searches_of(by_name, cluster, known[place])])


@settings(max_examples=100)
@given(models(), mixed(), st.data())
def test_no_cut_over_kinds_of_device_is_faster_than_the_first_bound(model, cluster, data):
    by_name = {"kind-0": model, "kind-1": data.draw(devices(model))}
    configuration = data.draw(st.sampled_from(list(some(cluster, model))))
    for search in searches_of(by_name, cluster, configuration):
        assert search.bound_s <= enumerated_s(search) * (1 + 1e-9)
