"""From the documents found for a query to the hard negatives of a row: candidates, and the rules that drop them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

FILTER_MODES = ("none", "article", "margin", "perc", "skip_top1")


@dataclass(frozen=True, slots=True)
class Hit:
    """A document found for a query.

    Attributes:
        entry: `path`, `score`, and what else is known, as it goes into `retrieve_top20`.
        identity: Equal for copies of one document.
        documents: Numbers of the positives that it is, or might be.
        articles: Every article_id known of it, as texts.
    """

    entry: dict[str, Any]
    identity: Hashable
    documents: Collection[int]
    articles: Collection[str] = ()

    @property
    def score(self) -> float:
        """Its similarity to the query."""
        return self.entry["score"]


@dataclass(frozen=True, slots=True)
class Positive:
    """The row's own positive.

    Attributes:
        document: Its number.
        score: Its similarity to the query; None where it is not known.
        articles: Its article_ids, as texts.
    """

    document: int
    score: float | None
    articles: Collection[str] = ()


def find_position(hits: Sequence[Hit], document: int) -> int | None:
    """Returns the place of a document among the hits, from 0; None where it is not there."""
    return next((place for place, hit in enumerate(hits) if document in hit.documents), None)


def applies(mode: str, positive: Positive) -> bool:
    """Tells whether a filter has what it needs to know of the positive."""
    if mode in ("margin", "perc"):
        return positive.score is not None
    return mode != "article" or bool(positive.articles)


def keeps(mode: str, margin: float, candidate: Hit, place: int, positive: Positive) -> bool:
    """Tells whether a filter keeps a candidate.

    The bound of `perc` is a share below the positive's score whatever its sign: m x p would lie above a negative p.

    Args:
        mode: One of FILTER_MODES.
        margin: m of `margin` (difference of scores) and `perc` (share of the positive's score).
        candidate: It.
        place: Its place among the candidates, from 0.
        positive: The row's positive.
    """
    if not applies(mode, positive):
        return True
    match mode:
        case "article":
            return not set(candidate.articles) & set(positive.articles)
        case "margin":
            return candidate.score <= positive.score - margin
        case "perc":
            return candidate.score <= positive.score - (1 - margin) * abs(positive.score)
        case "skip_top1":
            return place > 0
    return True


def choose_negatives(
    hits: Sequence[Hit],
    positives: Collection[int],
    positive: Positive,
    mode: str,
    margin: float,
    num_candidates: int,
    num_negatives: int,
    funnel: Counter[str],
) -> list[Hit]:
    """Returns the hard negatives of a row, best first.

    Args:
        hits: Best first.
        positives: Documents known to answer the query.
        positive: The row's own.
        mode: One of FILTER_MODES.
        margin: Of the filter.
        num_candidates: Hits that are neither positives nor copies are looked at up to this number.
        num_negatives: Taken of what the filter keeps.
        funnel: Counts, added to: retrieved = positives + copies + dropped + kept, kept = written + surplus.
    """
    kept, seen = [], set()
    for hit in hits:
        if len(seen) == num_candidates:
            break
        funnel["retrieved"] += 1
        if any(document in positives for document in hit.documents):
            funnel["positives"] += 1
        elif hit.identity in seen:
            funnel["copies"] += 1
        else:
            if keeps(mode, margin, hit, len(seen), positive):
                kept.append(hit)
            else:
                funnel[f"dropped_by_{mode}"] += 1
            seen.add(hit.identity)
    chosen = kept[:num_negatives]
    funnel["kept"] += len(kept)
    funnel["written"] += len(chosen)
    funnel["surplus"] += len(kept) - len(chosen)
    return chosen
