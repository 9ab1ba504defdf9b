"""What bounds configurations at once is no slower and no larger than any of them."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from instances import FRAMEWORK, clusters, configurations, enumerated_s, models, search_of

from planner.cost.stage_costs import StageCosts
from planner.search.column_maker import ColumnMaker
from planner.search.columns import KnownMixes
from planner.search.decide import Decision
from planner.search.relaxation import Relaxation, widest
from planner.vocabulary import RECOMPUTATIONS


def sharings(model):
    """Configurations that differ only in how many data-parallel ranks share their state."""
    for configuration in configurations(model):
        if configuration.cpu_offload:
            continue  # never relaxed
        dp = configuration.degrees.dp
        shards = [size for size in (1, 2, 4, 8) if dp % size == 0]
        if configuration.reshard_after_forward:
            shards.remove(1)
        if len(shards) > 1:
            yield [
                replace(
                    configuration,
                    degrees=replace(configuration.degrees, dp_replicate=dp // size, dp_shard=size),
                )
                for size in shards
            ]


def relaxation_of(model, alike, cluster):
    members = {each: search_of(model, each, cluster) for each in alike}
    table = StageCosts(model, widest(alike), cluster, FRAMEWORK, moves_state=False)
    maker = ColumnMaker(table, kinds=RECOMPUTATIONS, known=KnownMixes())
    priced = next(iter(members.values())).priced
    return Relaxation(alike, priced, table, maker, search=members.__getitem__)


@settings(max_examples=100)
@given(models(), clusters(), st.data())
def test_no_member_is_better_than_the_relaxation(model, cluster, data):
    alike = data.draw(st.sampled_from(list(sharings(model))))
    least_s = enumerated_s(relaxation_of(model, alike, cluster))
    for configuration in alike:
        found_s = enumerated_s(search_of(model, configuration, cluster))
        assert least_s <= found_s * (1 + 1e-9), configuration


@settings(max_examples=60)
@given(models(), clusters(), st.data())
def test_relaxations_decide_as_their_members_do(model, cluster, data):
    """The same best step is found and proven, and nothing is left unsaid."""
    known = list(sharings(model))
    places = data.draw(st.sets(st.integers(0, len(known) - 1), max_size=3))
    groups = [known[at] for at in sorted(places)]
    each = [configuration for alike in groups for configuration in alike]
    best_s = min(
        (enumerated_s(search_of(model, configuration, cluster)) for configuration in each),
        default=float("inf"),
    )
    decision = Decision(
        [relaxation_of(model, alike, cluster) for alike in groups], top=2, time_limit_s=None
    )
    report = decision.decide()
    if best_s == float("inf"):
        assert not decision.incumbents.solved
        return
    assert report.status == "optimal"
    assert report.objective_s == pytest.approx(best_s, rel=1e-6)
    solved = {id(found.search.configuration) for found in decision.incumbents.solved}
    refused = list(decision.visits.rejections())
    assert len(solved) + len(refused) == len(each)
    assert {rejection.rule for rejection in refused} <= {"memory", "host memory", "slower"}
