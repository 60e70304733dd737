"""Paired statistics: McNemar by hand, intervals that cover, sentences that claim no more than the data."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contrastors.comparison import compare, mcnemar_p

EXAMPLES = settings(max_examples=100)


def hits(*counts: int) -> tuple[np.ndarray, np.ndarray]:
    """Two models' hits from the counts both, only the second, only the first, neither."""
    pairs = [(1, 1)] * counts[0] + [(0, 1)] * counts[1] + [(1, 0)] * counts[2] + [(0, 0)] * counts[3]
    first, second = np.asarray(pairs, dtype=float).T
    return first, second


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (1, 0), (5, 0), (8, 2), (2, 8), (30, 12), (600, 500)])
def test_mcnemar_is_the_two_sided_binomial_test_of_the_queries_that_differ(wins, losses):
    count, smaller = wins + losses, min(wins, losses)
    by_hand = min(1.0, 2 * sum(math.comb(count, k) for k in range(smaller + 1)) / 2**count)
    assert mcnemar_p(*hits(7, wins, losses, 9)) == pytest.approx(by_hand, rel=1e-9)


def test_queries_that_agree_do_not_change_the_test():
    assert mcnemar_p(*hits(0, 9, 2, 0)) == mcnemar_p(*hits(1000, 9, 2, 1000))


@EXAMPLES
@given(st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_swapping_the_models_mirrors_the_comparison(values, random):
    first = np.asarray(values)
    second = np.asarray(random.sample(values, len(values)))
    one, other = compare("recall@1", first, second), compare("recall@1", second, first)
    assert one.difference == pytest.approx(-other.difference)
    assert one.p_value == pytest.approx(other.p_value)
    assert {one.verdict, other.verdict} in ({"better", "worse"}, {f"not distinguishable at n = {len(values)}"})


def test_equal_models_are_not_distinguishable():
    values = np.linspace(0, 1, 50)
    found = compare("mrr", values, values)
    assert (found.difference, found.low, found.high, found.verdict) == (0, 0, 0, "not distinguishable at n = 50")


def test_similarities_are_higher_or_lower_never_better():
    low, high = np.zeros(30), np.linspace(0.1, 0.2, 30)
    assert compare("hardest_negative", low, high).verdict == "higher"
    assert compare("negative_similarity", low, high).verdict == "higher"
    assert compare("positive_similarity", high, low).verdict == "lower"
    assert compare("margin", low, high).verdict == "better"


def test_queries_without_a_value_of_both_are_left_out():
    first, second = np.asarray([np.nan, 0.1, 0.2, 0.3]), np.asarray([0.5, np.nan, 0.3, 0.4])
    found = compare("margin", first, second)
    assert found.num_queries == 2 and found.difference == pytest.approx(0.1)


@pytest.mark.filterwarnings("error")
def test_a_metric_that_no_query_has_of_both_models_is_told_with_n_0():
    found = compare("margin", np.asarray([np.nan, 0.1]), np.asarray([0.5, np.nan]))
    assert (found.num_queries, found.verdict) == (0, "not distinguishable at n = 0")
    assert math.isnan(found.difference) and math.isnan(found.low) and math.isnan(found.high)


def test_a_win_of_most_queries_by_little_is_no_gain_where_the_mean_says_otherwise():
    """A base that gives every page one vector: each query of ten documents is a tenth of a hit."""
    base = np.full(100, 0.1)
    for num_hits, verdict in ((12, "not distinguishable at n = 100"), (40, "better"), (1, "worse")):
        found = compare("recall@1", base, np.arange(100) < num_hits)
        assert (found.verdict, found.p_value) == (verdict, None) and (found.difference > 0) == (num_hits > 10)


def test_intervals_cover_and_false_alarms_stay_rare():
    """120 simulations here; benchmarks.comparison does 500 and keeps the figures."""
    from benchmarks.comparison import simulate

    null, effect = simulate(num_queries=400, gain=0.0, num=120), simulate(num_queries=400, gain=0.08, num=120)
    assert 0.89 <= null.coverage <= 1 and 0.89 <= effect.coverage <= 1
    assert null.alarms <= 0.11  # 5 % promised; 120 draws
    assert effect.alarms >= 0.75
