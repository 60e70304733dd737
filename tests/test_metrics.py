from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from contrastors.metrics import (
    TIE_WIDTH,
    bootstrap_interval,
    format_interval,
    format_metric,
    query_metrics,
    summarize,
    wilson_interval,
)
from contrastors.records import dump_json

EXAMPLES = settings(max_examples=80)
NAN = math.nan
SCORE = st.sampled_from([0.1, 0.2, 0.3, NAN])


@st.composite
def cases(draw, largest: int, scores: st.SearchStrategy[float] = SCORE):
    """Draws (scores, positives) of a small corpus with many ties."""
    values = draw(st.lists(scores, min_size=1, max_size=largest))
    positives = draw(st.sets(st.integers(0, len(values) - 1), min_size=1))
    return np.array(values, dtype=np.float32), sorted(positives)


def rank_by_hand(scores: np.ndarray, positives: list[int], order: tuple[int, ...]) -> dict[str, float]:
    """Returns the textbook metrics of one ranking: by score, ties in the given order, NaN last and never found."""
    ranking = sorted(order, key=lambda d: math.inf if math.isnan(scores[d]) else -scores[d])
    hits = [place for place, d in enumerate(ranking, 1) if d in positives and not math.isnan(scores[d])]
    ideal = sum(1 / math.log2(place + 1) for place in range(1, min(10, len(positives)) + 1))
    return {
        "rank": hits[0] if hits else len(scores),
        "recall@1": float(any(place <= 1 for place in hits)),
        "recall@5": float(any(place <= 5 for place in hits)),
        "recall@10": float(any(place <= 10 for place in hits)),
        "mrr": 1 / hits[0] if hits else 0.0,
        "ndcg@10": sum(1 / math.log2(place + 1) for place in hits if place <= 10) / ideal,
    }


def assert_equal(found: dict[str, float], wanted: dict[str, float], tolerance: float = 1e-9) -> None:
    assert list(found) == list(wanted)
    assert found == pytest.approx(wanted, abs=tolerance)


# --- against brute force ---


@EXAMPLES
@given(case=cases(largest=6))
@example(case=(np.float32([NAN] * 3), [0, 2]))
@example(case=(np.float32([0.5] * 6), [1, 4]))
def test_metrics_are_the_mean_over_all_orders_of_the_ties(case):
    scores, positives = case
    every = [rank_by_hand(scores, positives, order) for order in itertools.permutations(range(len(scores)))]
    mean = {name: float(np.mean([one[name] for one in every])) for name in every[0]}
    assert_equal(query_metrics(scores, positives), mean)


def test_larger_ties_across_the_tenth_place_agree_with_random_shuffles():
    generator = np.random.default_rng(0)
    scores = np.float32([0.9] * 3 + [0.5] * 14 + [NAN] * 2 + [0.1] * 6)
    for positives in ([3, 4, 20], [16], [0, 5, 6, 7, 18], [22, 23]):
        shuffles = [rank_by_hand(scores, positives, tuple(generator.permutation(25))) for _ in range(4000)]
        mean = {name: float(np.mean([one[name] for one in shuffles])) for name in shuffles[0]}
        found = query_metrics(scores, positives)
        assert found["rank"] == pytest.approx(mean["rank"], rel=0.03)
        assert_equal(found | {"rank": 0}, mean | {"rank": 0}, tolerance=0.03)


@EXAMPLES
@given(case=cases(60, st.one_of(SCORE, st.floats(-1, 1, width=32))), seed=st.integers(0, 99))
def test_the_order_of_the_corpus_does_not_matter(case, seed):
    scores, positives = case
    order = np.random.default_rng(seed).permutation(len(scores))
    moved = np.argsort(order)[positives]  # where the positives went
    assert query_metrics(scores[order], moved.tolist()) == query_metrics(scores, positives)


@EXAMPLES
@given(case=cases(60, st.one_of(SCORE, st.floats(-1, 1, width=32))))
def test_metrics_stay_in_range_and_recall_grows_with_k(case):
    found = query_metrics(*case)
    assert 1 <= found["rank"] <= len(case[0])
    assert all(type(value) is float for value in found.values())
    shares = [found["recall@1"], found["recall@5"], found["recall@10"]]
    assert all(0 <= value <= 1 + 1e-12 for value in (*shares, found["mrr"], found["ndcg@10"]))
    assert shares == sorted(shares)


# --- ties ---


@pytest.mark.parametrize("place", [0, 9, 4])
def test_a_constant_model_scores_as_chance_wherever_the_positive_stands(place):
    found = query_metrics(np.full(10, 0.37, dtype=np.float32), [place])
    assert found["rank"] == 5.5
    assert found["recall@1"] == pytest.approx(0.1) and found["recall@5"] == pytest.approx(0.5)
    assert found["recall@10"] == 1.0


@EXAMPLES
@given(base=st.floats(-1, 1), place=st.integers(0, 9))
@example(base=1000.5 * TIE_WIDTH, place=9)
def test_noise_of_fp32_around_one_score_is_a_tie(base, place):
    scores = base + np.linspace(-2e-7, 2e-7, 10)
    assert query_metrics(scores, [place])["recall@1"] == pytest.approx(0.1)


def test_a_difference_over_the_tie_width_is_no_tie():
    scores = 0.3 + 2 * TIE_WIDTH * np.arange(10)
    assert [query_metrics(scores, [place])["rank"] for place in range(10)] == list(range(10, 0, -1))


# --- NaN, sizes, positives ---


def test_a_nan_page_never_ranks_first():
    for nan_place in range(3):
        scores = np.float32([0.1, -0.2, -0.9])
        scores[nan_place] = NAN
        for place in range(3):
            found = query_metrics(scores, [place])
            if place == nan_place:
                assert found == {"rank": 3.0} | dict.fromkeys(list(found)[1:], 0.0)
            else:
                assert found["recall@1"] == float(scores[place] == np.nanmax(scores))


@pytest.mark.parametrize("size", [1, 3, 20])
def test_a_model_of_nan_finds_nothing_however_small_the_corpus(size):
    found = query_metrics(np.full(size, NAN, dtype=np.float32), [0])
    assert found == {"rank": float(size)} | dict.fromkeys(list(found)[1:], 0.0)


def test_k_above_the_corpus_is_cut_and_still_reported():
    found = query_metrics(np.float32([0.3, 0.2, 0.1]), [2])
    assert (found["recall@1"], found["recall@5"], found["recall@10"], found["mrr"]) == (0, 1, 1, pytest.approx(1 / 3))
    assert query_metrics(np.float32([0.3]), [0])["ndcg@10"] == 1.0


def test_ndcg_is_one_when_more_positives_than_places_all_lead():
    assert query_metrics(np.float32([0.9] * 12 + [0.1] * 5), list(range(12)))["ndcg@10"] == pytest.approx(1)


def test_a_positive_named_twice_counts_once():
    scores = np.float32([0.1, 0.5, 0.3])
    assert query_metrics(scores, [2, 2, 0]) == query_metrics(scores, [0, 2])


@pytest.mark.parametrize("positives", [[], [3], [-1], [0, 3]])
def test_positives_outside_the_corpus_are_refused(positives):
    with pytest.raises(ValueError, match="do not lie in a corpus of 3 documents"):
        query_metrics(np.float32([0.1, 0.2, 0.3]), positives)


# --- intervals ---


@pytest.mark.parametrize(
    "hits, count, low, high",  # Newcombe, "Two-sided confidence intervals for the single proportion", 1998, table I
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_intervals_agree_with_the_published_ones(hits, count, low, high):
    assert wilson_interval(hits / count, count) == pytest.approx((low, high), abs=5e-5)


@EXAMPLES
@given(count=st.integers(1, 10_000), share=st.floats(0, 1))
def test_a_wilson_interval_holds_its_share_and_mirrors(count, share):
    low, high = wilson_interval(share, count)
    assert 0 <= low <= share + 1e-12 and share - 1e-12 <= high <= 1
    assert wilson_interval(1 - share, count) == pytest.approx((1 - high, 1 - low), abs=1e-9)


def test_a_bootstrap_interval_repeats_and_has_the_width_of_theory():
    values = np.random.default_rng(3).normal(2.0, 1.0, 400)
    low, high = bootstrap_interval(values)
    assert (low, high) == bootstrap_interval(values.copy()) != bootstrap_interval(values, seed=1)
    assert low < values.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.1)


@pytest.mark.parametrize("count", [1, 7, 100, 20_000])  # the last has more values than are drawn at a time
def test_a_bootstrap_interval_is_that_of_resamples_drawn_one_by_one(count):
    values, generator = np.random.default_rng(4).normal(size=count), np.random.default_rng(0)
    means = [generator.choice(values, count).mean() for _ in range(50)]
    assert bootstrap_interval(values, num_resamples=50) == pytest.approx(np.percentile(means, [2.5, 97.5]), abs=1e-12)


def test_a_bootstrap_interval_leaves_nan_out():
    assert bootstrap_interval(np.array([0.5, NAN, 0.5])) == (0.5, 0.5)
    assert all(math.isnan(end) for end in bootstrap_interval(np.array([NAN])))


def test_a_summary_has_intervals_and_is_strict_json():
    rows = [query_metrics(np.float32([0.3, 0.2, 0.1]), [place]) for place in (0, 1, 2, 2)]
    summary = summarize(
        {name: np.array([row[name] for row in rows]) for name in rows[0]} | {"odd": np.array([NAN] * 4)}
    )
    assert (summary["recall@1"], summary["recall@5"], summary["rank"]) == (0.25, 1.0, 2.25)
    assert (summary["recall@1_low"], summary["recall@1_high"]) == wilson_interval(0.25, 4)
    assert summary["rank_low"] <= 2.25 <= summary["rank_high"]
    assert json.loads(dump_json(summary), parse_constant=pytest.fail)["odd"] is None


def test_no_queries_are_an_error_and_not_a_score():
    with pytest.raises(ValueError, match="no queries"):
        summarize({"recall@1": np.array([])})


@pytest.mark.parametrize(("value", "text"), [(0.61234567, "0.6123"), (-1, "-1.0000"), (None, "–"), (NAN, "–")])
def test_a_metric_without_a_value_is_shown_as_a_dash(value, text):
    assert format_metric(value) == text


def test_a_metric_is_shown_with_its_interval_where_there_is_one():
    summary = {"mrr": 0.5, "mrr_low": 0.25, "mrr_high": 1.0, "loss": 2.0}
    assert format_interval(summary, "mrr") == "0.5000 [0.2500, 1.0000]"
    assert format_interval(summary, "loss", digits=1) == "2.0"
    for nothing in (None, NAN):  # as it comes from a file, and as it is computed
        assert format_interval(dict.fromkeys(("margin", "margin_low", "margin_high"), nothing), "margin") == "–"
