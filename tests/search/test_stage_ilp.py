"""The second ILP: exact against enumeration, and joint as good as one per configuration."""

import time
from itertools import combinations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.errors import SolverError
from planner.search.columns import Column, Mix, RunState, step_time_s
from planner.search.stage_ilp import StageProblem, solve_stages
from planner.solver import Effort, Minimisation, NoneFoundError, NoSolutionError
from planner.strategy.configuration import Configuration
from planner.strategy.mesh import ParallelDegrees

ROOM = 1000.0
ENOUGH = Effort(most_checks=100_000)
"""For proofs: a search that ends at its limit says so, and need not have found the best."""


def configuration(pp, virtual_stages, num_microbatches):
    schedule = "Interleaved1F1B" if virtual_stages > 1 else "1F1B" if pp > 1 else "none"
    return Configuration(
        degrees=ParallelDegrees(pp=pp),
        schedule=schedule,
        virtual_stages=virtual_stages,
        microbatch_size=1,
        num_microbatches=num_microbatches,
        reshard_after_forward=False,
        sequence_parallel=False,
    )


def column(
    first, end, time, step, static, kept, kind="none", forward_share=1 / 3, weight_share=0.0
):
    mix = Mix(
        kinds=(kind,) * (end - first),
        recompute_s=0.0,
        kept_bytes=kept,
        left_bytes=kept // 2,
        temporary_bytes=0.0,
        early_temporary_bytes=0.0,
    )
    return Column(
        first=first,
        end=end,
        mix=mix,
        forward_s=time * forward_share,
        backward_s=time * (1 - forward_share),
        weight_s=time * (1 - forward_share) * weight_share,
        step_s=step,
        state=RunState(
            static_bytes=static,
            gradient_bytes=static / 2,
            late_gathered_bytes=round(static / 2),
            reduction_bytes=static,
            beside_bytes=0,
        ),
    )


@st.composite
def problems(draw, *, virtual_stages=1):
    pp = draw(st.integers(2 if virtual_stages > 1 else 1, 3))
    num_stages = pp * virtual_stages
    num_units = draw(st.integers(num_stages, num_stages + 3))
    seconds = draw(st.lists(st.integers(1, 20), min_size=num_units, max_size=num_units))
    kept = draw(st.lists(st.integers(1, 60), min_size=num_units, max_size=num_units))
    static = draw(st.integers(1, 60))
    number = draw(st.integers(pp, 3 * pp)) if virtual_stages == 1 else 2 * pp
    config = configuration(pp, virtual_stages, number)
    stages = []
    for _ in range(num_stages):
        columns = []
        for first, end in combinations(range(num_units + 1), 2):
            time, size = sum(seconds[first:end]) * 1e-3, sum(kept[first:end])
            step, fixed = (end - first) * 2e-3, static * (end - first)
            columns.append(column(first, end, time, step, fixed, size))
            if virtual_stages > 1:
                columns.append(column(first, end, 1.3 * time, step, fixed, size // 4, "full"))
        stages.append(columns)
    stages[0] = [c for c in stages[0] if c.first == 0]
    stages[-1] = [c for c in stages[-1] if c.end == num_units]
    if num_stages == 1:
        stages = [[c for c in stages[0] if c.end == num_units]]
    return StageProblem(
        configuration=config,
        choices=apart(stages),
        room_bytes=ROOM if virtual_stages > 1 else None,
        num_units=None,
    )


def apart(stages):
    """Every stage chosen by itself."""
    return tuple(tuple((column,) for column in columns) for columns in stages)


def fits(problem, chosen):
    config = problem.configuration
    if problem.room_bytes is None:
        return True
    for rank in range(config.degrees.pp):
        held = chosen[rank :: config.degrees.pp]
        for moment in config.fullest_moments(rank):
            size = sum(c.held_bytes(at) for c, at in zip(held, moment, strict=True))
            if size > problem.room_bytes:
                return False
    return True


def enumerated_s(problem):
    best = float("inf")

    def extend(stage, chosen):
        nonlocal best
        if stage == problem.configuration.num_stages:
            if fits(problem, chosen):
                best = min(best, step_time_s(problem.configuration, chosen))
            return
        place = chosen[-1].end if chosen else 0
        for (candidate,) in problem.choices[stage]:
            if candidate.first == place:
                extend(stage + 1, [*chosen, candidate])

    extend(0, [])
    return best


@settings(max_examples=40, deadline=None)
@given(problems())
def test_one_stage_per_rank_equals_enumeration(problem):
    solution = solve_stages([problem], scale_s=0.1, effort=ENOUGH)
    assert solution.objective_s == pytest.approx(enumerated_s(problem), rel=1e-6)
    assert solution.bound_s == pytest.approx(solution.objective_s, rel=1e-6)
    assert solution.status == "optimal"


@settings(max_examples=15, deadline=None)
@given(problems(virtual_stages=2))
def test_stages_that_share_a_rank_equal_enumeration(problem):
    least = enumerated_s(problem)
    if least == float("inf"):
        with pytest.raises(SolverError):
            solve_stages([problem], scale_s=0.1, effort=ENOUGH)
        return
    solution = solve_stages([problem], scale_s=0.1, effort=ENOUGH)
    assert solution.objective_s == pytest.approx(least, rel=1e-6)
    assert fits(problem, solution.columns)


@settings(max_examples=15, deadline=None)
@given(st.lists(problems(), min_size=2, max_size=4))
def test_the_joint_ilp_equals_one_per_configuration(several):
    joint = solve_stages(several, scale_s=0.1, effort=ENOUGH)
    separate = [solve_stages([p], scale_s=0.1, effort=ENOUGH).objective_s for p in several]
    assert joint.objective_s == pytest.approx(min(separate), rel=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.integers(2, 4), st.integers(6, 10), st.integers(4, 9))
def test_alike_blocks_need_only_counts(pp, num_units, number):
    """Where all runs of one length cost the same, lengths that add up replace positions."""

    def columns(stage):
        ends = [0, num_units]
        return [
            column(first, end, 1e-3 * (end - first) + 5e-4 * (stage == 0), 1e-4, 1.0, 1)
            for first, end in combinations(range(num_units + 1), 2)
            if (stage > 0 or first == ends[0]) and (stage < pp - 1 or end == ends[1])
        ]

    assume(number >= pp)
    stages = tuple(tuple(columns(stage)) for stage in range(pp))
    single = tuple(tuple({c.end - c.first: c for c in stage}.values()) for stage in stages)
    config = configuration(pp, 1, number)
    exact = StageProblem(
        configuration=config, choices=apart(stages), room_bytes=None, num_units=None
    )
    counted = StageProblem(
        configuration=config, choices=apart(single), room_bytes=None,
        num_units=num_units,
    )  # fmt: skip
    first = solve_stages([exact], scale_s=0.1, effort=ENOUGH)
    second = solve_stages([counted], scale_s=0.1, effort=ENOUGH)
    assert second.objective_s == pytest.approx(first.objective_s, rel=1e-6)
    assert [c.first for c in second.columns][1:] == [c.end for c in second.columns][:-1]


def test_a_cutoff_below_the_optimum_finds_nothing():
    config = configuration(2, 1, 4)
    stages = (
        tuple(column(0, end, 1e-3 * end, 0.0, 1.0, 1) for end in (1, 2)),
        tuple(column(first, 3, 1e-3 * (3 - first), 0.0, 1.0, 1) for first in (1, 2)),
    )
    problem = StageProblem(
        configuration=config, choices=apart(stages), room_bytes=None, num_units=None
    )
    best = solve_stages([problem], scale_s=0.01, effort=ENOUGH).objective_s
    # The first rank works on its four microbatches and waits once for the first backward.
    assert best == pytest.approx(4 * 2e-3 + 1e-3 / 3)
    with pytest.raises(SolverError):
        solve_stages([problem], scale_s=0.01, effort=ENOUGH, cutoff_s=best * 0.99)


@pytest.mark.parametrize("number", [5, 60])
def test_choices_that_do_not_fit_prove_nothing_of_others(number):
    """Only where all of them were looked at there is none."""
    stages = [[column(0, 1, 1e-3 * (1 + at / 50), 0.0, 1.0, 1) for at in range(number)]]
    problem = StageProblem(
        configuration=configuration(1, 1, 1), choices=apart(stages), room_bytes=ROOM, num_units=None
    )
    limits = {"scale_s": 1e-3, "effort": ENOUGH, "fits": lambda *_: False}
    with pytest.raises(NoSolutionError if number == 5 else NoneFoundError) as caught:
        solve_stages([problem], **limits)
    if number == 60:  # the slowest fits, say
        assert caught.value.bound <= 1e-3 * (1 + 59 / 50)


@settings(max_examples=30)
@given(problems(virtual_stages=2))
def test_no_program_is_begun_after_the_deadline(problem):
    """The first may run; what is not proven by it stays open."""
    best_s, begun = enumerated_s(problem), []
    solve = Minimisation.solve

    def counted(program, **limits):
        begun.append(limits["time_limit_s"])
        return solve(program, **limits)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Minimisation, "solve", counted)
        late = Effort(most_checks=10**6, deadline_s=time.monotonic() - 1)
        try:
            solution = solve_stages([problem], scale_s=0.1, effort=late, fits=fits)
        except NoSolutionError:
            solution, bound_s = None, float("inf")
        except NoneFoundError as error:
            solution, bound_s = None, error.bound
        else:
            bound_s = solution.bound_s
    assert bound_s <= best_s * (1 + 1e-6)
    if solution is not None:
        assert solution.objective_s >= best_s * (1 - 1e-6)
        assert solution.status == "limit" or solution.objective_s == pytest.approx(best_s)
    assert begun == [1.0]
