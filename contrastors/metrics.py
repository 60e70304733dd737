"""Retrieval metrics of one query against a corpus, honest about ties and NaN, and their intervals.

Documents with equal scores have no order. Every metric here is its expected value when each group of ties is shuffled:
ten equal scores give recall@1 = 0.1 wherever the positive stands in the file. A score that is NaN ranks below all
others, and a positive that has one is not found, however small the corpus.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

RECALL_AT = (1, 5, 10)
NDCG_AT = 10
# Of an evaluation: what a person is shown first, and what may choose the best checkpoint.
HEADLINES = (*(f"recall@{k}" for k in RECALL_AT), "mrr", f"ndcg@{NDCG_AT}", "margin", "loss")
# Cosines closer than this are ties: the same picture in two batches differs by about 1e-7 in fp32, and a ranking made
# of that is noise.
TIE_WIDTH = 2.0**-20
_BLOCK = 2**14  # values of the resamples that are drawn at a time: they stay in the cache


def query_metrics(scores: np.ndarray, positives: Sequence[int]) -> dict[str, float]:
    """Returns rank, recall@1/5/10 (hit rate), reciprocal rank and nDCG@10 of one query.

    Args:
        scores: (C,) fp32 similarities of the query to the whole corpus; finite or NaN.
        positives: Indices of its positives, at least one; each counts once.

    Raises:
        ValueError: No positive, or an index outside the corpus.
    """
    positives = np.unique(np.asarray(positives, dtype=np.int64))
    if not len(positives) or positives[0] < 0 or positives[-1] >= len(scores):
        raise ValueError(f"positives {positives.tolist()} do not lie in a corpus of {len(scores)} documents")
    scores = np.where(np.isnan(scores), -np.inf, scores.astype(np.float64))
    best = scores[positives].max()
    if best == -np.inf:
        unfound = dict.fromkeys([*(f"recall@{k}" for k in RECALL_AT), "mrr", f"ndcg@{NDCG_AT}"], 0.0)
        return {"rank": float(len(scores)), **unfound}
    # Counted from the best positive, so that no border between two levels runs through the noise around it.
    levels = np.round((scores - best) / TIE_WIDTH)
    positive_levels = levels[positives]
    above = int((levels > 0).sum())  # no positive stands above the best one
    tied_positives = int((positive_levels == 0).sum())
    tied_others = int((levels == 0).sum()) - tied_positives
    # Chance that the first positive has exactly j of the tied others before it.
    j = np.arange(tied_others)
    no_positive_before = np.concatenate([[1.0], np.cumprod((tied_others - j) / (tied_others + tied_positives - j))])
    places = np.arange(tied_others + 1)
    first_at = no_positive_before * tied_positives / (tied_others + tied_positives - places)
    result = {"rank": above + 1 + tied_others / (tied_positives + 1)}
    for k in RECALL_AT:
        result[f"recall@{k}"] = min(1.0, float(first_at[: max(0, k - above)].sum()))
    result["mrr"] = float((first_at / (above + 1 + places)).sum())
    result[f"ndcg@{NDCG_AT}"] = _expected_ndcg(levels, positive_levels)
    return result


def _expected_ndcg(levels: np.ndarray, positive_levels: np.ndarray) -> float:
    gain = 0.0
    found = positive_levels[positive_levels > -np.inf]
    for level, num_positives in zip(*np.unique(found, return_counts=True), strict=True):
        above, tied = int((levels > level).sum()), int((levels == level).sum())
        gain += int(num_positives) / tied * _discounts(above + 1, min(above + tied, NDCG_AT))
    return gain / _discounts(1, min(len(positive_levels), NDCG_AT))


def _discounts(first: int, last: int) -> float:
    return sum(1 / math.log2(position + 1) for position in range(first, last + 1))


def wilson_interval(mean: float, count: int, z: float = 1.959964) -> tuple[float, float]:
    """Returns the 95 % Wilson score interval of a proportion.

    Args:
        mean: Observed share, 0 to 1.
        count: Number of trials, at least 1.
        z: Normal quantile.

    Source: Wilson, "Probable inference, the law of succession, and statistical inference", 1927.
    """
    centre = (mean + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(max(0.0, mean * (1 - mean)) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return max(0.0, centre - half), min(1.0, centre + half)


def bootstrap_interval(values: np.ndarray, num_resamples: int = 1000, seed: int = 0) -> tuple[float, float]:
    """Returns the 95 % percentile bootstrap interval of a mean over queries; NaN values are left out.

    Args:
        values: (Q,) one value a query.
        num_resamples: Resamples of the queries.
        seed: Of the resampling; the same values give the same interval.
    """
    values = values[np.isfinite(values)]
    if not len(values):
        return math.nan, math.nan
    generator, count = np.random.default_rng(seed), len(values)
    block = max(1, _BLOCK // count)
    sizes = [min(block, num_resamples - done) for done in range(0, num_resamples, block)]
    means = np.concatenate([values[generator.integers(count, size=(size, count))].mean(axis=1) for size in sizes])
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def summarize(per_query: dict[str, np.ndarray]) -> dict[str, float]:
    """Returns means over queries with `_low` and `_high` ends of their 95 % intervals.

    Args:
        per_query: Name -> (Q,) values; recall gets Wilson intervals, the rest bootstrap.

    Raises:
        ValueError: No queries at all: no data is not a score of 0.
    """
    summary: dict[str, float] = {}
    for name, values in per_query.items():
        if not len(values):
            raise ValueError("no queries to evaluate")
        finite = values[np.isfinite(values)]
        mean = float(finite.mean()) if len(finite) else math.nan
        low, high = wilson_interval(mean, len(values)) if name.startswith("recall@") else bootstrap_interval(values)
        summary |= {name: mean, f"{name}_low": low, f"{name}_high": high}
    return summary


def format_metric(value: float | None, digits: int = 4) -> str:
    """Returns a metric as text; an en dash where it has no value.

    Args:
        value: NaN, or None as strict JSON writes that, = no value.
        digits: After the point.
    """
    return "–" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def format_interval(summary: Mapping[str, float | None], name: str, digits: int = 4) -> str:
    """Returns a metric with its 95 % interval as text, the interval where it is known.

    Args:
        summary: From `summarize`, or read back from a file.
        name: Of the metric.
        digits: After the point.
    """
    ends = [format_metric(summary.get(f"{name}_{end}"), digits) for end in ("low", "high")]
    return format_metric(summary[name], digits) + ("" if "–" in ends else f" [{', '.join(ends)}]")
