"""The figures, held to cases that are worked out by hand, and to what must hold for all."""

import math
from itertools import pairwise, permutations

import numpy as np
import pandas as pd
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from planner.validation.scoring.metrics import (
    area_under_curve,
    best_scale,
    make_sample,
    memory_errors,
    oom_scores,
    rank_correlation,
    time_errors,
)
from planner.validation.scoring.ranking import (
    chance_all_failed,
    expected_best,
    expected_tries,
    group_keys,
    group_scores,
)
from planner.validation.scoring.scores import score_runs

TIMES = st.lists(st.floats(0.01, 1000.0), min_size=3, max_size=8, unique=True)
FEW = st.lists(st.integers(1, 3), min_size=1, max_size=5)


def runs(times, *, gib=None, model="m", **group):
    """A table of one group."""
    count = len(times)
    return pd.DataFrame(
        {
            "model": [model] * count,
            "num_gpus": [group.get("num_gpus", 8)] * count,
            "global_batch": [64] * count,
            "seq_len": [1024] * count,
            "step_time_s": times,
            "peak_mem_gib": gib or [None] * count,
        }
    )


def answers(times, *, gib=None, feasible=None):
    """Predictions of a table."""
    count = len(times)
    return pd.DataFrame(
        {
            "row": range(count),
            "step_time_s": times,
            "peak_mem_gib": gib or [None] * count,
            "feasible": feasible or [True] * count,
        }
    )


def score(*arguments, min_group=1, **options):
    return score_runs(*arguments, min_group=min_group, **options)[0]


def over_orders(predicted, evaluate):
    """Mean over every order of the rows that sorts the predictions."""
    orders = [
        order
        for order in permutations(range(len(predicted)))
        if all(predicted[first] <= predicted[second] for first, second in pairwise(order))
    ]
    return float(np.mean([evaluate(list(order)) for order in orders]))


def test_errors_by_hand():
    # Errors +50%, -20%, +10%, 0%, -40%.
    sample = make_sample(runs([2.0, 5.0, 10.0, 4.0, 5.0]), answers([3.0, 4.0, 11.0, 4.0, 3.0]))
    figures = time_errors(sample)
    assert figures.mape == pytest.approx((0.5 + 0.2 + 0.1 + 0 + 0.4) / 5)
    assert figures.median_ape == pytest.approx(0.2)
    assert figures.bias == pytest.approx(0, abs=1e-12)
    # The 90% quantile of five lies 0.6 of the way from the fourth to the fifth.
    assert figures.p90_ape == pytest.approx(0.4 + 0.6 * 0.1)


def test_the_scale_takes_a_common_factor_away():
    figures = time_errors(make_sample(runs([1.0, 2.0, 4.0]), answers([0.5, 1.0, 2.0])))
    assert figures.mape == pytest.approx(0.5)
    assert figures.best_scale == pytest.approx(2)
    assert figures.scaled_mape == pytest.approx(0, abs=1e-12)
    assert figures.scaled_median_ape == pytest.approx(0, abs=1e-12)
    assert figures.spread == pytest.approx(0, abs=1e-12)


def test_spread_by_hand():
    # ln r is -ln 2, 0, ln 4: the median 0, the deviations ln 2, 0, ln 4, their median ln 2.
    figures = time_errors(make_sample(runs([2.0, 2.0, 2.0]), answers([1.0, 2.0, 8.0])))
    assert figures.spread == pytest.approx(1)


def test_rows_without_both_times_do_not_count():
    measured = runs([2.0, None, 4.0, 5.0])
    scores = score(measured, answers([2.0, 3.0, None, 10.0]).drop(index=2))
    counts = scores.rows
    assert (counts.measured, counts.with_step_time) == (4, 3)
    assert (counts.predicted, counts.missing) == (2, 1)
    assert scores.time.mape == pytest.approx(0.5)


def test_without_a_row_there_are_no_figures():
    scores = score(runs([None]), answers([1.0]))
    assert scores.time.mape is None
    assert scores.time.best_scale is None
    assert scores.ranking.groups == 0
    assert scores.ranking.top1_regret.mean is None
    assert scores.memory.mape is None
    assert scores.oom is None


def test_memory_errors_by_hand():
    sample = make_sample(
        runs([1.0] * 3, gib=[10.0, 20.0, None]), answers([1.0] * 3, gib=[9.0, 26.0, 5.0])
    )
    figures = memory_errors(sample)
    assert (figures.rows_measured, figures.rows_predicted) == (2, 2)
    assert figures.mape == pytest.approx(0.2)
    assert figures.bias == pytest.approx(0.1)


def test_rank_correlation_by_hand():
    assert rank_correlation(np.array([1.0, 2.0, 3.0]), np.array([10.0, 30.0, 20.0])) == (
        pytest.approx(0.5)
    )
    # Ranks 1.5, 1.5, 3 against 1, 2, 3: 1.5 / sqrt(1.5 * 2).
    assert rank_correlation(np.array([1.0, 1.0, 3.0]), np.array([1.0, 2.0, 3.0])) == (
        pytest.approx(1.5 / math.sqrt(3))
    )
    assert rank_correlation(np.ones(3), np.array([1.0, 2.0, 3.0])) == 0


def test_regret_by_hand():
    # The first pick takes 12 s, the best of the first three 10 s, the best of all 8 s.
    measured = runs([8.0, 10.0, 12.0, 14.0, 16.0])
    ranking = score(measured, answers([5.0, 2.0, 1.0, 3.0, 4.0])).ranking
    assert ranking.top1_regret.mean == pytest.approx(0.5)
    assert ranking.top3_regret.mean == pytest.approx(0.25)


def test_ties_count_with_their_mean():
    # The first two tie: one pick gives 8 s or 12 s.
    ranking = score(runs([8.0, 12.0, 10.0]), answers([1.0, 1.0 + 1e-12, 2.0])).ranking
    assert ranking.top1_regret.mean == pytest.approx(0.25)
    assert ranking.top3_regret.mean == pytest.approx(0)


def test_only_rows_predicted_to_fit_are_in_the_running():
    measured, predicted = runs([8.0, 12.0, 10.0]), [1.0, 2.0, 3.0]
    scores = score(measured, answers(predicted, feasible=[False, True, True]))
    assert scores.ranking.top1_regret.mean == pytest.approx(0.5)
    scores = score(measured, answers(predicted, gib=[70, 60, 50]), capacity_gib=65.0)
    assert scores.ranking.top1_regret.mean == pytest.approx(0.5)
    scores = score(measured, answers(predicted, feasible=[False] * 3))
    assert scores.ranking.groups_none_fit == 1
    assert scores.ranking.top1_regret.mean == pytest.approx(0)


def test_groups_are_apart_and_small_ones_are_left_out():
    first, second = runs([1.0, 2.0]), runs([5.0, 6.0], num_gpus=16)
    measured = pd.concat([first, runs([3.0], model="alone"), second], ignore_index=True)
    scores, groups = score_runs(measured, answers([1.0, 2.0, 9.0, 2.0, 1.0]), min_group=2)
    assert [(group.num_gpus, group.rows) for group in groups] == [(8, 2), (16, 2)]
    assert [group.top1_regret for group in groups] == pytest.approx([0, 0.2])
    ranking = scores.ranking
    assert (ranking.groups, ranking.rows_in_groups, ranking.groups_without_rho) == (2, 4, 2)
    assert ranking.top1_regret.max == pytest.approx(0.2)
    assert ranking.top1_regret.median == pytest.approx(0.1)


def test_numbers_group_however_they_are_written():
    frame = runs([1.0, 2.0]).assign(num_gpus=["8", "8.0"])
    assert len(set(group_keys(frame))) == 1


def test_a_group_without_a_prediction_has_no_regret():
    scores, (group,) = score_runs(runs([1.0, 2.0]), answers([None, None]), min_group=1)
    assert (group.predicted, group.top1_regret, group.mape) == (0, None, None)
    assert scores.ranking.groups_unpredicted == 1


def test_choosing_among_failed_layouts_by_hand():
    # Picks in order: failed, failed, ran, failed, ran.
    scores = score(
        runs([5.0, 6.0]),
        answers([3.0, 5.0]),
        failed=runs([None] * 3),
        failed_predictions=answers([1.0, 2.0, 4.0]),
    )
    with_failed = scores.ranking.with_failed
    assert with_failed.groups == 1
    assert with_failed.top1_failed == 1
    assert with_failed.top3_all_failed == 0
    assert with_failed.tries_to_first_run == 3


def test_groups_in_which_nothing_that_fits_ran_are_counted():
    scores = score(
        runs([5.0]),
        answers([3.0], feasible=[False]),
        failed=runs([None]),
        failed_predictions=answers([1.0]),
    )
    assert scores.ranking.none_ran == 1
    assert scores.ranking.with_failed.top3_all_failed == 1
    assert scores.ranking.with_failed.tries_to_first_run is None


def test_failed_layouts_of_other_groups_do_not_matter():
    scores = score(
        runs([5.0]),
        answers([3.0]),
        failed=runs([None], num_gpus=16),
        failed_predictions=answers([1.0]),
    )
    assert scores.ranking.with_failed.top1_failed == 0


def test_verdicts_by_hand():
    # Of four that ran one is refused; of five that failed four are judged and three refused.
    ran = make_sample(
        runs([1.0] * 4), answers([1.0] * 4, gib=[10, 20, 30, 40], feasible=[True] * 3 + [False])
    )
    failed = make_sample(
        runs([None] * 5),
        answers(
            [1.0] * 4 + [None],
            gib=[45, 50, 35, 5, None],
            feasible=[False, False, False, True, True],
        ),
    )
    figures = oom_scores(ran, failed)
    assert (figures.ok_rows_judged, figures.failed_rows, figures.failed_rows_judged) == (4, 5, 4)
    assert figures.false_alarms == pytest.approx(0.25)
    assert figures.caught == pytest.approx(0.75)
    assert figures.balanced_accuracy == pytest.approx(0.75)
    # 45 and 50 beat all four, 35 three of them, 5 none: 11 of 16 pairs.
    assert figures.auc == pytest.approx(11 / 16)
    # The 99% quantile of 10, 20, 30, 40 is 39.7.
    assert figures.caught_at_1pct == pytest.approx(0.5)


def test_verdicts_by_capacity_alone():
    ran = make_sample(runs([1.0] * 2), answers([1.0] * 2, gib=[10, 90]), capacity_gib=80.0)
    figures = oom_scores(ran, None, capacity_gib=80.0)
    assert figures.false_alarms == pytest.approx(0.5)
    assert figures.caught is None
    assert oom_scores(ran, None) is None


@given(TIMES)
def test_a_perfect_prediction_has_no_error_and_no_regret(times):
    scores = score(runs(times), answers(times))
    assert scores.time.mape == pytest.approx(0, abs=1e-12)
    assert scores.time.best_scale == pytest.approx(1)
    assert scores.ranking.spearman_mean == pytest.approx(1)
    assert scores.ranking.top1_regret.max == pytest.approx(0, abs=2e-9)  # ties are within 1e-9


@given(TIMES, st.randoms(use_true_random=False), st.floats(0.1, 10.0))
def test_a_factor_on_all_predictions_changes_no_choice(times, random, factor):
    predicted = random.sample(times, len(times))
    assume(min(np.diff(sorted(predicted)) / sorted(predicted)[:-1]) > 1e-6)
    plain = score(runs(times), answers(predicted))
    scaled = score(runs(times), answers([factor * each for each in predicted]))
    assert scaled.ranking == plain.ranking
    assert scaled.time.spread == pytest.approx(plain.time.spread)
    assert scaled.time.scaled_mape == pytest.approx(plain.time.scaled_mape)
    assert scaled.time.best_scale * factor == pytest.approx(plain.time.best_scale)


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=9), st.floats(0.05, 20.0))
def test_no_other_scale_has_a_smaller_error(ratios, other):
    ratio = np.array(ratios)
    best = best_scale(ratio)
    assert np.abs(best * ratio - 1).mean() <= np.abs(other * ratio - 1).mean() + 1e-12


@given(FEW, st.data())
def test_regret_is_the_mean_over_all_orders_of_ties(predicted, data):
    times = data.draw(st.lists(st.integers(1, 9), min_size=len(predicted), max_size=len(predicted)))
    for picks in (1, 2, 3):
        expected = over_orders(
            predicted, lambda order, picks=picks: min(times[row] for row in order[:picks])
        )
        found = expected_best(np.array(predicted, float), np.array(times, float), picks)
        assert found == pytest.approx(expected)


@given(FEW, st.data())
def test_failures_are_the_mean_over_all_orders_of_ties(predicted, data):
    failed = data.draw(st.lists(st.booleans(), min_size=len(predicted), max_size=len(predicted)))
    values, flags = np.array(predicted, float), np.array(failed)
    for picks in (1, 3):
        expected = over_orders(
            predicted,
            lambda order, picks=picks: all(failed[row] for row in order[:picks]),
        )
        assert chance_all_failed(values, flags, picks) == pytest.approx(expected)
    if all(failed):
        assert expected_tries(values, flags) is None
    else:
        expected = over_orders(
            predicted, lambda order: 1 + next(i for i, row in enumerate(order) if not failed[row])
        )
        assert expected_tries(values, flags) == pytest.approx(expected)


@given(FEW, FEW)
def test_the_area_is_the_share_of_pairs(above, below):
    pairs = [(first > second) + (first == second) / 2 for first in above for second in below]
    found = area_under_curve(np.array(above, float), np.array(below, float))
    assert found == pytest.approx(np.mean(pairs))


def test_min_group_counts_measured_rows():
    measured = runs([1.0, 2.0, None])
    sample = make_sample(measured, answers([1.0, 2.0, 3.0]))
    assert group_scores(group_keys(measured), sample, min_group=3) == ()
    assert len(group_scores(group_keys(measured), sample, min_group=2)) == 1
