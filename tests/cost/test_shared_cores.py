"""Pipelines whose ranks share cores, against cores that are played out."""

import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import planner
from planner.cost.pipeline import pipeline_s
from planner.cost.shared_cores import path_of, times_of
from planner.hardware.profiles import load_cluster
from planner.strategy.configuration import Configuration
from planner.strategy.mesh import ParallelDegrees
from planner.strategy.placement import ranks_per_core
from planner.strategy.schedules import actions_by_rank


def configuration(schedule, *, pp, number, on_core, virtual_stages=1):
    return Configuration(
        degrees=ParallelDegrees(pp=pp),
        schedule=schedule,
        virtual_stages=virtual_stages,
        microbatch_size=1,
        num_microbatches=number,
        reshard_after_forward=False,
        sequence_parallel=False,
        ranks_per_core=on_core,
    )


def numbered(config):
    """The action list of each rank: forward or backward, stage, microbatch."""
    lists = actions_by_rank(
        config.schedule, pp=config.degrees.pp, virtual_stages=config.virtual_stages,
        num_microbatches=config.num_microbatches,
    )  # fmt: skip
    for row in lists:
        counts, named = {}, []
        for stage, what in row:
            counts[stage, what] = counts.get((stage, what), -1) + 1
            named.append((what, stage, counts[stage, what]))
        yield named


def feeder_of(action, stages):
    """What an action waits for, None for nothing."""
    what, stage, number = action
    if what == "F":
        return ("F", stage - 1, number) if stage else None
    return ("F", stage, number) if stage == stages - 1 else ("B", stage + 1, number)


def played_s(config, forward, backward):
    """The action list on cores that all ranks which run at a moment have even shares of.

    A rank has a core at the most. Times are of ranks that all run.
    """
    pp, stages = config.degrees.pp, config.num_stages
    waiting, done, clock = dict(enumerate(numbered(config))), {None}, 0.0
    left: dict[int, float] = {}
    while waiting:
        for rank, row in waiting.items():
            what, stage, _ = row[0]
            if rank not in left and feeder_of(row[0], stages) in done:
                left[rank] = forward[stage] if what == "F" else backward[stage]
        passed_s = min(left.values())
        clock += passed_s / min(config.ranks_per_core, pp / len(left))
        for rank in list(left):
            left[rank] -= passed_s
            if left[rank] <= 1e-12:
                done.add(waiting[rank].pop(0))
                del left[rank]
        waiting = {rank: row for rank, row in waiting.items() if row}
    return clock


seconds = st.floats(0.5, 2.0)


@st.composite
def pipelines(draw):
    schedule = draw(st.sampled_from(["1F1B", "GPipe", "Interleaved1F1B"]))
    pp, virtual_stages = draw(st.integers(2, 6)), 1 + (schedule == "Interleaved1F1B")
    config = configuration(
        schedule,
        pp=pp,
        number=pp * draw(st.integers(1, 4)),
        on_core=draw(st.sampled_from([1.2, 2.0, 3.0, 8.0])),
        virtual_stages=virtual_stages,
    )
    times = st.lists(seconds, min_size=config.num_stages, max_size=config.num_stages)
    return config, draw(times), draw(times)


@given(pipelines())
def test_any_pipeline_takes_what_cores_that_are_played_out_do(pipeline):
    """The worst of the random ones that the constant was fitted to are 10% off."""
    config, forward, backward = pipeline
    found = times_of(config, forward_s=forward, backward_s=backward).step_s
    assert found == pytest.approx(played_s(config, forward, backward), rel=0.13)


def test_most_pipelines_take_that_closely():
    """A sample of its own: the median and the worst of twenty, and no leaning to one side."""
    drawn, off = random.Random(7), []
    for _ in range(200):
        pp, on_core = drawn.choice([2, 4, 8]), drawn.choice([1.5, 2.0, 4.0])
        number = pp * drawn.choice([1, 2, 4])
        config = configuration("1F1B", pp=pp, number=number, on_core=on_core)
        forward = [drawn.uniform(0.5, 1.5) for _ in range(pp)]
        backward = [2 * each for each in forward]
        found = times_of(config, forward_s=forward, backward_s=backward).step_s
        off.append(found / played_s(config, forward, backward) - 1)
    assert statistics.median(map(abs, off)) < 0.02
    assert sorted(map(abs, off))[189] < 0.06
    assert abs(statistics.mean(off)) < 0.01


@given(pipelines())
def test_the_path_sets_the_time(pipeline):
    config, *times = pipeline
    stages = dict(zip(("forward_s", "backward_s"), times, strict=True))
    found = times_of(config, **stages).step_s
    assert path_of(config, **stages).seconds(*times) == pytest.approx(found, rel=1e-10)


@pytest.mark.parametrize(
    ("pp", "on_core", "number", "schedule"),
    [
        (2, 2.0, 2, "1F1B"), (2, 2.0, 8, "GPipe"), (2, 4.0, 4, "1F1B"), (4, 4.0, 4, "GPipe"),
        (4, 2.0, 4, "1F1B"), (4, 2.0, 16, "1F1B"), (4, 2.0, 8, "Interleaved1F1B"),
        (8, 4.0, 16, "Interleaved1F1B"),
    ],
)  # fmt: skip
def test_alike_stages_take_what_cores_that_are_played_out_do(pp, on_core, number, schedule):
    """Where each rank had a core, they would take longer by a bubble of (pp - 1) / number."""
    config = configuration(
        schedule, pp=pp, number=number, on_core=on_core, virtual_stages=1 + ("Inter" in schedule)
    )
    forward, backward = [1.0] * config.num_stages, [2.0] * config.num_stages
    played = played_s(config, forward, backward)
    found = times_of(config, forward_s=forward, backward_s=backward).step_s
    assert found == pytest.approx(played, rel=0.06)
    apart = replace(config, ranks_per_core=1.0)
    assert times_of(apart, forward_s=forward, backward_s=backward).step_s > 1.05 * played


@given(pipelines())
def test_a_core_for_each_rank_changes_nothing(pipeline):
    config, forward, backward = pipeline
    apart = replace(config, ranks_per_core=1.0)
    found = times_of(apart, forward_s=forward, backward_s=backward).step_s
    assert found == pytest.approx(played_s(apart, forward, backward), rel=1e-9)


@pytest.mark.parametrize(
    ("gpus", "per_node", "degrees", "expected"),
    [
        (4, 4, {"pp": 4}, 2.0),
        (4, 4, {"pp": 2, "dp_shard": 2}, 2.0),
        (4, 4, {"dp_shard": 4}, 1.0),
        (8, 4, {"pp": 2, "dp_shard": 4}, 1.0),
        (2, 2, {"pp": 2}, 1.0),
    ],
)
def test_whole_pipelines_of_a_node_share_its_cores(gpus, per_node, degrees, expected):
    """The CPU profile has two cores; a pipeline of two nodes has a stage on each."""
    cluster = load_cluster("cpu", gpus=gpus, gpus_per_node=per_node)
    assert ranks_per_core(cluster, ParallelDegrees(**degrees)) == expected


@pytest.mark.parametrize(("pp", "ranks_on_core"), [(4, 2.0), (2, 1.0)])
def test_a_plan_is_priced_on_the_cores_that_its_ranks_share(pp, ranks_on_core):
    """The CPU profile has two cores. What the plan says of its stages is of ranks that all run."""
    model = Path(__file__).parents[2] / "examples" / "gpt.py"
    fix = {"pp": pp, "schedule": "1F1B", "microbatch_size": 8}
    plan = planner.plan(str(model), gpus=pp, cluster="cpu", dtype="float32", fix=fix).best
    forward, backward = (
        [getattr(s, f"{p}_s") for s in plan.stages] for p in ("forward", "backward")
    )
    number = plan.num_microbatches
    config = configuration("1F1B", pp=pp, number=number, on_core=ranks_on_core)
    running_s = plan.costs.step_time_s - plan.costs.optimizer_s
    alone_s = pipeline_s(
        "1F1B", pp=pp, num_microbatches=number, forward_s=forward, backward_s=backward
    )
    shared_s = times_of(config, forward_s=forward, backward_s=backward).step_s
    assert shared_s <= running_s * (1 + 1e-9)  # beside it is traffic that comes once a step
    assert running_s <= (shared_s + plan.costs.dp_comm_s) * (1 + 1e-9)
    assert (running_s < 0.9 * alone_s) == (ranks_on_core > 1)
