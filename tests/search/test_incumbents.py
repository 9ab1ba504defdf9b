"""What a configuration must beat to be worth a look."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from planner.search.incumbents import Incumbents, Solved
from planner.strategy.configuration import Configuration
from planner.strategy.mesh import ParallelDegrees

ONE = Configuration(
    degrees=ParallelDegrees(pp=4),
    schedule="1F1B",
    virtual_stages=1,
    microbatch_size=1,
    num_microbatches=8,
    reshard_after_forward=False,
    sequence_parallel=False,
)
VARIANT = replace(ONE, microbatch_size=2, num_microbatches=4)
OTHER = replace(ONE, schedule="GPipe")
NEW = replace(ONE, degrees=ParallelDegrees(pp=2, tp=2))


@pytest.fixture
def incumbents():
    found = Incumbents(3)
    for configuration, objective_s in ((ONE, 1.0), (OTHER, 4.0)):
        search = SimpleNamespace(configuration=configuration)
        found.add(Solved(search=search, columns=(), objective_s=objective_s))
    return found


def test_a_layout_that_is_not_known_may_be_shown_however_slow(incumbents):
    assert incumbents.limit_s([NEW], near=0.5) == float("inf")
    assert incumbents.limit_s([VARIANT, NEW], near=0.5) == float("inf")


def test_a_variant_beats_its_layout_or_is_near_to_the_best(incumbents):
    assert incumbents.limit_s([VARIANT], near=0.5) == 1.5
    assert incumbents.limit_s([replace(OTHER, microbatch_size=2)], near=0.5) == 4.0


def test_nothing_slower_than_all_that_is_shown_is_worth_it(incumbents):
    for objective_s in (1.1, 1.2):
        degrees = ParallelDegrees(pp=1, dp_shard=round(10 * objective_s))
        search = SimpleNamespace(configuration=replace(ONE, degrees=degrees))
        incumbents.add(Solved(search=search, columns=(), objective_s=objective_s))
    assert incumbents.limit_s([NEW], near=0.5) == 1.2
    assert incumbents.limit_s([VARIANT], near=0.5) == 1.2
