"""Paths and bounds against the action list itself."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.shared_cores import times_of
from planner.search.bounds import (
    bounding_paths,
    counts_by_rank,
    least_of_kinds_s,
    least_s,
    paths_of_rank,
)
from planner.strategy.configuration import Configuration
from planner.strategy.mesh import ParallelDegrees
from planner.vocabulary import SHARED_SCHEDULES, V_SCHEDULES, ZERO_BUBBLE_SCHEDULES

seconds = st.floats(0.1, 3.0)


def configuration(schedule, pp, virtual_stages, num_microbatches, ranks_per_core=1.0):
    return Configuration(
        ranks_per_core=ranks_per_core,
        degrees=ParallelDegrees(pp=pp),
        schedule=schedule,
        virtual_stages=virtual_stages,
        microbatch_size=1,
        num_microbatches=num_microbatches,
        reshard_after_forward=False,
        sequence_parallel=False,
    )


@st.composite
def pipelines(draw):
    schedule = draw(st.sampled_from(["none", "GPipe", "1F1B", *SHARED_SCHEDULES]))
    pp = 1 if schedule == "none" else draw(st.integers(2, 6))
    virtual_stages = draw(st.integers(2, 4)) if schedule in SHARED_SCHEDULES else 1
    number = draw(st.integers(1 if schedule == "GPipe" else pp, 80))
    if schedule in V_SCHEDULES:
        virtual_stages, number = 2, max(number, 2 * pp)
    elif schedule in SHARED_SCHEDULES:
        number -= number % pp
    stages = pp * virtual_stages
    times = st.lists(seconds, min_size=stages, max_size=stages)
    share = draw(st.floats(0.0, 0.9)) if schedule in ZERO_BUBBLE_SCHEDULES else 0.0
    forward, backward = draw(times), draw(times)
    weight = [share * each for each in backward]
    ranks_per_core = draw(st.sampled_from([1.0, 1.0, 1.3, 2.0, 4.0, 16.0])) if pp > 1 else 1.0
    config = configuration(schedule, pp, virtual_stages, number, ranks_per_core)
    return config, forward, backward, weight


def time_s(config, forward, backward, weight=None):
    return times_of(config, forward_s=forward, backward_s=backward, weight_backward_s=weight).step_s


@given(pipelines())
def test_no_path_is_longer_than_the_list(pipeline):
    config, *times = pipeline
    whole_s = time_s(config, *times)
    for path in bounding_paths(config):
        assert path.seconds(*times) <= whole_s * (1 + 1e-10)


@given(pipelines())
def test_no_cut_is_faster_than_the_bound(pipeline):
    config, forward, backward, weight = pipeline
    inputs = [b - w for b, w in zip(backward, weight, strict=True)]
    sums = sum(forward), sum(inputs), sum(weight)
    free = least_s(config, parts_s=sums)
    shares = least_s(config, parts_s=sums, least_parts_s=(min(forward), min(inputs), 0.0))
    assert free <= shares * (1 + 1e-10)
    assert shares <= time_s(config, forward, backward, weight) * (1 + 1e-10)


@given(pipelines(), st.floats(0.0, 10.0), st.integers(0, 2**32 - 1))
def test_no_transfers_are_faster_than_the_bound(pipeline, most_s, seed):
    config, forward, backward, weight = pipeline
    inputs = [b - w for b, w in zip(backward, weight, strict=True)]
    draw = random.Random(seed)
    transfers = [draw.uniform(0.0, most_s) for _ in forward]
    bound = least_s(config, parts_s=(sum(forward), sum(inputs), sum(weight)), transfers_s=transfers)
    sent = [[each + half / 2 for each, half in zip(part, transfers, strict=True)]
            for part in (forward, backward)]  # fmt: skip
    assert bound <= time_s(config, *sent, weight) * (1 + 1e-10)


@pytest.mark.parametrize(
    ("schedule", "virtual_stages", "number"),
    [
        ("GPipe", 1, 12),
        ("GPipe", 1, 2),
        ("1F1B", 1, 12),
        ("1F1B", 1, 4),
        ("Interleaved1F1B", 3, 12),
    ],
)
def test_the_paths_of_even_stages_are_exact(schedule, virtual_stages, number):
    config = configuration(schedule, 4, virtual_stages, number)
    stages = 4 * virtual_stages
    forward, backward = [1.0] * stages, [2.0] * stages
    found = max(path.seconds(forward, backward) for path in bounding_paths(config))
    assert found == pytest.approx(time_s(config, forward, backward))


@given(
    st.integers(2, 7), st.integers(0, 30), st.integers(0, 6), st.floats(1.0, 1.5),
    st.floats(0.2, 0.8),
)  # fmt: skip
def test_the_paths_of_one_slow_stage_are_exact(pp, more, slow, times, share):
    """Wherever it is: what weaves between ranks is in the path around it."""
    config = configuration("1F1B", pp, 1, pp + more)
    seconds = [times if stage == slow % pp else 1.0 for stage in range(pp)]
    forward, backward = [share * s for s in seconds], [(1 - share) * s for s in seconds]
    found = max(path.seconds(forward, backward) for path in bounding_paths(config))
    assert found == pytest.approx(time_s(config, forward, backward))


@given(pipelines())
def test_counts_are_those_of_each_ranks_paths(pipeline):
    """Also where ranks share cores, and one path tells of all their work."""
    config, *_ = pipeline
    found = counts_by_rank(config)
    for rank in range(config.degrees.pp):
        paths = [path.counts for path in paths_of_rank(config, rank)]
        assert found[rank].tolist() == [[[*part] for part in path] for path in paths]


@given(pipelines().filter(lambda each: each[0].virtual_stages == 1), st.data())
def test_no_cut_is_faster_than_the_bound_on_several_kinds_of_devices(pipeline, data):
    """Units that take other times in each stage, cut anywhere."""
    config, *_ = pipeline
    stages = config.num_stages
    num_units = data.draw(st.integers(stages, stages + 5))
    cuts = sorted(data.draw(st.permutations(range(1, num_units)))[: stages - 1])
    shape = stages, 3, num_units
    units_s = np.array(data.draw(st.lists(seconds, min_size=stages, max_size=stages)))
    units_s = np.broadcast_to(units_s[:, None, None], shape) * [[[1.0], [1.5], [0.0]]]
    runs = zip([0, *cuts], [*cuts, num_units], strict=True)
    parts = np.array(
        [units_s[at][:, first:end].sum(axis=1) for at, (first, end) in enumerate(runs)]
    )
    forward, inputs, weights = parts.T.tolist()
    backward = [i + w for i, w in zip(inputs, weights, strict=True)]
    bound_s = least_of_kinds_s(config, units_s, [0.0] * stages)
    assert bound_s <= time_s(config, forward, backward, weights) * (1 + 1e-9)
