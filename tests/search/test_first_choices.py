"""First choices of interleaved stages: they fit, and their step is that of their action list."""

from itertools import accumulate, pairwise, product

import pytest
from hypothesis import given, settings
from instances import (
    clusters,
    configurations,
    enumerated_s,
    model_units,
    models,
    search_of,
)

from planner.cost.unit_pricing import PricedUnit, Recompute
from planner.hardware.profiles import load_cluster
from planner.search.columns import step_time_s
from planner.search.first_choices import FirstChoices
from planner.strategy.configuration import Configuration
from planner.strategy.mesh import ParallelDegrees
from planner.vocabulary import RECOMPUTATIONS


def shared(model, cluster):
    for configuration in configurations(model):
        if configuration.virtual_stages > 1 and configuration.num_microbatches < 100:
            yield search_of(model, configuration, cluster)


def demand_legal(search, partition):
    configuration, columns = search.configuration, partition.columns
    assert [columns[0].first, columns[-1].end] == [0, search.num_units]
    assert all(before.end == behind.first for before, behind in pairwise(columns))
    assert partition.objective_s == pytest.approx(step_time_s(configuration, columns), rel=1e-9)
    for rank in range(configuration.degrees.pp):
        assert search.fits(rank, [columns[stage] for stage in configuration.stages_of(rank)])


@settings(max_examples=60)
@given(models(), clusters())
def test_they_fit_and_no_move_makes_them_worse(model, cluster):
    for search in shared(model, cluster):
        choices = FirstChoices(search)
        first = choices.first()
        if first is None:
            continue
        demand_legal(search, first)
        better = choices.better(first, moves=5)
        demand_legal(search, better)
        best_s = enumerated_s(search)
        assert best_s * (1 - 1e-9) <= better.objective_s <= first.objective_s * (1 + 1e-9)


def test_windows_are_tried_between_ends_of_one_unit_more_or_less():
    """Eighty blocks on 48 stages: a step of no window, wherever it lies, is shorter."""
    model, cluster = alike_blocks(80), load_cluster("h100-sxm", gpus=12)
    configuration = Configuration(
        degrees=ParallelDegrees(pp=12),
        schedule="Interleaved1F1B",
        virtual_stages=4,
        microbatch_size=1,
        num_microbatches=12,
        reshard_after_forward=False,
        sequence_parallel=False,
    )
    search = search_of(model, configuration, cluster)
    choices = FirstChoices(search)
    found = choices.better(choices.first(), moves=0)
    even = search.even_cut()
    ends = [even[1] - even[0], even[-1] - even[-2]]
    best_s = float("inf")
    for first, last in product(*([end - 1, end, end + 1] for end in ends)):
        least, more = divmod(82 - first - last, 46)
        for place in range(46 - more + 1):
            lengths = [least + (place <= stage < place + more) for stage in range(46)]
            cuts = [0, *accumulate((first, *lengths, last))]
            columns = [search.columns(at, *run) for at, run in enumerate(pairwise(cuts))]
            if all(columns):
                step_s = step_time_s(configuration, [each[0] for each in columns])
                best_s = min(best_s, step_s)
    assert found.objective_s == pytest.approx(best_s)


def alike_blocks(number):
    """Blocks of Llama 70B's proportions under 24,576 tokens, between a table and a head."""

    def unit(name, share):
        return PricedUnit(
            structure=name,
            forward_s=8e-3 * share,
            backward_s=16e-3 * share,
            weight_backward_s=8e-3 * share,
            forward_comm_s=0.0,
            backward_comm_s=0.0,
            recompute={k: Recompute(compute_s=0.0, comm_s=0.0) for k in RECOMPUTATIONS},
            activation_bytes=dict.fromkeys(RECOMPUTATIONS, 2**20),
            temporary_bytes=dict.fromkeys(RECOMPUTATIONS, 2**20),
            gradient_temporary_bytes=dict.fromkeys(RECOMPUTATIONS, 2**20),
            added_temporary_bytes=dict.fromkeys(RECOMPUTATIONS, 2**20),
            trained_bytes=2**20,
            gathered_bytes=2**20,
            summed_gradient_bytes=0,
        )

    units = (unit("table", 0.01), *[unit("block", 1.0)] * number, unit("head", 1.2))
    return model_units(units, (0, *[2**20] * (number + 1)), (), ())
