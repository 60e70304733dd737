"""Paired comparison of two models on the same queries: intervals of the difference, tests, and a plain sentence."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from contrastors.metrics import bootstrap_interval

ALPHA = 0.05  # of the tests; the intervals are its 95 % counterparts
NOT_A_GOAL = ("positive_similarity", "negative_similarity", "hardest_negative")  # all cosines may shift together
# Higher is better in all the others.
COMPARED = ("recall@1", "recall@5", "recall@10", "mrr", "ndcg@10", *NOT_A_GOAL, "margin")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric of two models.

    Attributes:
        metric: Its name.
        num_queries: Queries that both models have a value for.
        difference: Mean of the second minus mean of the first; NaN, as its interval, where no query has a value.
        low: Lower end of its 95 % interval (bootstrap over queries).
        high: Upper end.
        p_value: Of McNemar's exact test for recall; None for other metrics and with ties, where the interval decides.
        verdict: better, worse, higher, lower, or not distinguishable at n = ...
    """

    metric: str
    num_queries: int
    difference: float
    low: float
    high: float
    p_value: float | None
    verdict: str


def mcnemar_p(first: np.ndarray, second: np.ndarray) -> float:
    """Returns the two-sided p-value of McNemar's exact test: among queries where the models differ, is it a fair coin?

    Args:
        first: (Q,) hits of one model, 0 or 1.
        second: (Q,) hits of the other on the same queries.

    Source: McNemar, "Note on the sampling error of the difference between correlated proportions", 1947.
    """
    wins, losses = int((second > first).sum()), int((second < first).sum())
    count = wins + losses
    # Sum of binomial(count, 1/2) up to the smaller side, by logarithms: thousands of queries overflow no float.
    terms = (
        math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1) for k in range(min(wins, losses) + 1)
    )
    tail = math.fsum(math.exp(term - count * math.log(2)) for term in terms)
    return min(1.0, 2 * tail)


def compare(metric: str, first: np.ndarray, second: np.ndarray) -> Comparison:
    """Returns how the second model does against the first on one metric.

    Args:
        metric: Name; recall without ties gets McNemar's test, the rest is decided by the interval.
        first: (Q,) values of one model, one a query; NaN = none.
        second: (Q,) values of the other, the same queries in the same order.
    """
    both = np.isfinite(first) & np.isfinite(second)
    first, second = np.asarray(first, np.float64)[both], np.asarray(second, np.float64)[both]
    difference = second - first
    low, high = bootstrap_interval(difference)
    # McNemar counts who wins. Where ties give fractions of a hit, most may win by little and the mean lose by much.
    are_hits = metric.startswith("recall@") and np.isin([first, second], (0.0, 1.0)).all()
    p_value = mcnemar_p(first, second) if are_hits else None
    differs = p_value < ALPHA if p_value is not None else low > 0 or high < 0
    mean = float(difference.mean()) if len(difference) else math.nan
    if not differs:
        verdict = f"not distinguishable at n = {len(first)}"
    elif metric in NOT_A_GOAL:
        verdict = "higher" if mean > 0 else "lower"
    else:
        verdict = "better" if mean > 0 else "worse"
    return Comparison(metric, len(first), mean, low, high, p_value, verdict)
