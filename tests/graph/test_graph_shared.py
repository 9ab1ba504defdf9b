"""Activations that units share."""

from real_runs import load

from planner.graph.analysis.shared import passing_storages, shared_activations
from planner.graph.operator_graph import UnitKind
from planner.graph.trace import trace_model


def shared_of(name):
    graph, shared = all_shared_of(name)
    return graph, tuple(each for each in shared if not is_input(graph, each))


def all_shared_of(name):
    graph = trace_model(load(name), microbatch_size=2, dtype="float32")
    return graph, shared_activations(graph, {unit.structure: unit for unit in graph.units})


def is_input(graph, shared):
    return graph.storages[shared.storage].kind.is_of_batch


def test_inputs_are_kept_by_who_saves_them():
    graph, shared = all_shared_of("gpt")
    tokens, targets = (each for each in shared if is_input(graph, each))
    assert (tokens.units, targets.units) == ({0}, {len(graph.units) - 1})
    assert tokens.size_bytes == targets.size_bytes == 2 * 64 * 8
    assert tokens.owners == targets.owners == frozenset()


def test_blocks_of_a_plain_stack_share_nothing():
    for name in ("gpt", "llama"):
        assert shared_of(name)[1] == ()


def test_what_two_neighbours_keep_counts_with_the_one_behind():
    graph, shared = shared_of("resnet")  # whose blocks end in a function that keeps its output
    blocks = [unit.index for unit in graph.units if unit.kind is UnitKind.BLOCK]
    assert [each.handed for each in shared] == [{block} for block in blocks[:-1]]
    for each in shared:
        (block,) = each.units
        assert each.owners == {block + 1}
        assert each.counts(0, block + 1)  # without the unit behind, the stage has it by itself
        assert not each.counts(0, block + 2)
        assert not each.counts(block + 1, len(graph.units))
        assert not each.is_sent_far


def test_a_condition_is_shared_by_all_blocks_and_the_head():
    graph, (time, label, condition) = shared_of("dit")
    assert condition.units == set(range(1, len(graph.units)))
    # One row of the model's width for each sample.
    assert condition.size_bytes == 2 * 64 * 4
    # It is a sum that each stage makes again, of what stages only pass on.
    for term in (time, label):
        assert (term.units, term.owners) == (set(), set())
        assert term.received == condition.units


def test_each_skip_connection_is_shared_by_two_units():
    graph, shared = shared_of("unet")
    names = [unit.name for unit in graph.units]
    skips = [each for each in shared if len(each.units) == 1]
    ends = [(names[min(each.owners)], names[min(each.units)]) for each in skips]
    assert ends == [
        *((f"down.{place}", f"up.{5 - place}") for place in range(5)),
        ("middle.0", "up.0"),
    ]
    (first, last) = (names.index(name) for name in ends[0])
    assert not skips[0].counts(0, len(names))  # the unit that gets it first counts it
    assert skips[0].counts(last, last + 1)
    assert not skips[0].counts(first + 1, last)


def test_what_a_stage_sends_on_and_keeps_itself_is_known():
    graph, shared = shared_of("unet")
    names = [unit.name for unit in graph.units]
    skip = min((each for each in shared if len(each.units) == 1), key=lambda s: min(s.owners))
    cut, end = names.index("middle.0"), names.index("up.5")
    assert {cut, end} <= skip.received
    assert skip.is_sent_and_held(0, cut)  # the unit that gets it first keeps it
    assert skip.is_sent_and_held(cut, end)  # it was received, and is sent on
    assert not skip.is_sent_and_held(min(skip.owners) + 1, cut) or (
        min(skip.owners) + 1 in skip.received
    )
    assert not skip.is_sent_and_held(0, len(names))  # the last stage sends nothing


def test_an_encoders_memory_is_counted_once_on_each_stage_of_the_decoder():
    graph, shared = shared_of("t5")
    names = [unit.name for unit in graph.units]
    decoder = {index for index, name in enumerate(names) if name.startswith("decoder.")}
    memory = max((each for each in shared if each.units == decoder), key=lambda x: x.size_bytes)
    assert memory.size_bytes == 2 * 32 * 64 * 4
    assert not memory.counts(0, min(decoder))
    assert memory.counts(0, len(names))
    assert memory.counts(max(decoder), len(names))


def test_what_the_unit_before_hands_over_passes_nobody():
    graph, _ = shared_of("gpt")
    assert all(passing_storages(graph, unit) == frozenset() for unit in graph.units)
