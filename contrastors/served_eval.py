"""Evaluation through a search service: the queries' vectors are sent, and what comes back is compared with the rows.

The service holds the index; its documents need not be on this machine. A search that failed says nothing of the model:
such queries are counted apart and are no misses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from contrastors.batches import ItemDataset
from contrastors.biqwen3 import BiQwen3
from contrastors.distributed import World, barrier, from_main
from contrastors.evaluation import EvaluationStopped, embed, evaluating
from contrastors.metrics import NDCG_AT, RECALL_AT, summarize
from contrastors.processing import BiQwen3Processor
from contrastors.records import POSITIVE, read_jsonl, read_pairs
from contrastors.search_api import SearchClient, SearchFailed, SearchStopped
from contrastors.served import PositiveMatcher, ServedPositive, read_ids

N_DOCS, NPROBE = max(*RECALL_AT, NDCG_AT), 128
METRICS = (*(f"recall@{k}" for k in RECALL_AT), f"mrr@{N_DOCS}", f"ndcg@{NDCG_AT}")


@dataclass(slots=True)
class ServedEvalSet:
    """One query per distinct text, with its positives merged over rows.

    Attributes:
        queries: Distinct query texts, in order of first use.
        positives: Of each query, each document once.
    """

    queries: list[str]
    positives: list[list[ServedPositive]]


def read_served_eval_set(source: str | Path, max_rows: int = 0) -> ServedEvalSet:
    """Returns the queries of a file with what is known of their positives; the images are not looked at.

    Args:
        source: JSONL.
        max_rows: Use the first rows only; 0 = all.

    Raises:
        ValueError: The file breaks the data format.
    """
    pairs, _ = read_pairs(source, max_rows)
    found: dict[str, list[ServedPositive]] = {}
    for pair, record in zip(pairs, read_jsonl(source), strict=False):
        new = ServedPositive(pair.positive, record.data[POSITIVE], read_ids(record.data))
        own = found.setdefault(pair.query, [])
        same = [p for p in own if p.path == new.path or (p.ids is not None and p.ids == new.ids)]
        if not same:
            own.append(new)
        elif new.ids is not None and same[0].ids is None:
            own[own.index(same[0])] = new
    return ServedEvalSet(list(found), list(found.values()))


@dataclass(slots=True)
class ServedResult:
    """What an evaluation through a service found.

    Attributes:
        metrics: Means over the queries that were answered, with `_low` and `_high`; none where none was. And the counts
            `num_queries`, `num_failed` (searches that failed), `num_short` (fewer hits than asked for). Empty where
            nothing was measured at all.
        per_query: One object a query, in order; a failed one has its `failure` and no metrics.
        failure: How the last failed search failed; "" where none did.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    per_query: list[dict[str, Any]] = field(default_factory=list)
    failure: str = ""


def hit_metrics(found: Sequence[set[int]], num_positives: int) -> dict[str, float]:
    """Returns recall@1/5/10 (hit rate), mrr@10 and nDCG@10 of one query.

    Args:
        found: Positives that each hit is, best hit first; the rest of the index is not known.
        num_positives: Of the query, at least 1.
    """
    seen: set[int] = set()
    gains = []
    for positives in found[:N_DOCS]:
        gains.append(bool(positives - seen))
        seen |= positives
    first = gains.index(True) + 1 if any(gains) else math.inf
    values = {f"recall@{k}": float(first <= k) for k in RECALL_AT}
    values[f"mrr@{N_DOCS}"] = 1 / first
    discounts = [1 / math.log2(place + 2) for place in range(NDCG_AT)]
    gain = sum(discount for discount, gained in zip(discounts, gains, strict=False) if gained)
    values[f"ndcg@{NDCG_AT}"] = gain / sum(discounts[:num_positives])
    return values


def evaluate_service(
    client: SearchClient,
    data: ServedEvalSet,
    vectors: np.ndarray,
    on_progress: Callable[[int], None] = lambda n: None,
    stop_signal: Callable[[], int] = lambda: 0,
) -> ServedResult:
    """Returns the metrics of queries that a service was asked.

    After two failed batches in a row, or one where the service is no longer well, it is not asked for the rest: each
    batch would wait through all its tries.

    Args:
        client: Asks for `N_DOCS` hits.
        data: Queries and positives.
        vectors: (Q, D) fp32.
        on_progress: Called with the number of queries after each batch.
        stop_signal: Asked before each batch; a signal's number ends the asking.

    Raises:
        SearchStopped: What no later request can cure: wrong address, another dimension, replies of another form.
    """
    if not np.isfinite(vectors).all():
        raise SearchStopped("the embedding of a query is not finite, so it cannot be searched")
    replies: list[list[Mapping[str, Any]] | str] = []
    gone, num_failed = "", 0
    for start in range(0, len(data.queries), client.batch_size):
        batch = vectors[start : start + client.batch_size]
        gone = gone or ("not asked: stopped by a signal" if stop_signal() else "")
        try:
            replies += [gone] * len(batch) if gone else client.search(batch.tolist())
            num_failed = 0
        except SearchFailed as error:
            replies += [str(error)] * len(batch)
            num_failed += 1
            gone = f"not asked: two batches failed, the last: {error}" if num_failed == 2 else _find_illness(client)
        on_progress(len(batch))
    return _score(data, replies)


def _find_illness(client: SearchClient) -> str:
    """Returns why it is no use to ask for the rest, "" where the service says that it is well."""
    try:
        client.check()
    except SearchStopped as error:
        return f"not asked: {error}"
    return ""


def _score(data: ServedEvalSet, replies: Sequence[list[Mapping[str, Any]] | str]) -> ServedResult:
    result = ServedResult()
    columns: dict[str, list[float]] = {name: [] for name in METRICS}
    num_short = 0
    for query, positives, reply in zip(data.queries, data.positives, replies, strict=True):
        if isinstance(reply, str):
            result.failure = reply
            result.per_query.append({"query": query, "failure": reply})
            continue
        num_short += len(reply) < N_DOCS
        matcher = PositiveMatcher(positives)
        values = hit_metrics([matcher.find(hit) for hit in reply], len(positives))
        for name in METRICS:
            columns[name].append(values[name])
        result.per_query.append({"query": query, **values, "hits": [hit["path"] for hit in reply]})
    num_answered = len(columns[METRICS[0]])
    if num_answered:
        result.metrics |= summarize({name: np.asarray(column) for name, column in columns.items()})
    counts = {"num_queries": len(data.queries), "num_failed": len(data.queries) - num_answered, "num_short": num_short}
    result.metrics |= counts
    return result


def service_line(result: ServedResult) -> str:
    """Returns what a person is told of a result: counts and means, failures, and what looks wrong."""
    found = result.metrics
    num_answered = found["num_queries"] - found["num_failed"]
    text = f"search service: {num_answered} of {found['num_queries']} queries answered"
    if num_answered:
        text += " " + " ".join(f"{name} {found[name]:.3f}" for name in METRICS)
        text += f" (recall@1 95% [{found['recall@1_low']:.3f}, {found['recall@1_high']:.3f}])"
        if not found[f"recall@{N_DOCS}"]:
            text += (
                "; no positive was found at all: its paths may not be those of the rows, or its index another model's"
            )
    if found["num_failed"]:
        text += f"; {found['num_failed']} searches failed and are not counted as misses, the last: {result.failure}"
    if found["num_short"]:
        text += f"; {found['num_short']} replies hold fewer than {N_DOCS} hits"
    return text


@dataclass(slots=True)
class ServedIndex:
    """The frozen index behind a search service, and the queries that it is asked at each evaluation of a training.

    The main rank talks to the service, the others wait; so tries are few and short. A service that cannot be used is an
    error as long as nothing would be lost; after that it must not end a training.

    Attributes:
        client: Of the service.
        data: Queries and positives.
        world: Ranks.
    """

    client: SearchClient
    data: ServedEvalSet
    world: World

    @classmethod
    def open(cls, url: str, source: str | Path, max_rows: int, batch_size: int, world: World) -> ServedIndex:
        """Returns the index of a service, with the rows of a file; nothing is asked yet.

        Args:
            url: `--search-api-url`.
            source: JSONL with the queries.
            max_rows: Use the first rows only; 0 = all.
            batch_size: Queries of one request.
            world: Ranks.

        Raises:
            ValueError: The file breaks the data format.
        """
        data = read_served_eval_set(source, max_rows)
        return cls(SearchClient(url, N_DOCS, NPROBE, batch_size, max_retries=3, timeout_s=30.0), data, world)

    def check(self, is_vital: bool) -> str:
        """Returns what is wrong with the service, "" where it is well. Collective.

        Raises:
            SearchStopped: On the main rank, where something is wrong and `is_vital`.
        """
        found = ""
        if self.world.is_main:
            try:
                self.client.check()
            except SearchStopped as error:
                if is_vital:
                    raise
                found = str(error)
        barrier()
        return found

    def evaluate(
        self,
        model: BiQwen3,
        processor: BiQwen3Processor,
        batch_size: int,
        num_workers: int,
        is_vital: bool,
        stop_signal: Callable[[], int] = lambda: 0,
        on_progress: Callable[[int], None] = lambda n: None,
    ) -> ServedResult:
        """Returns what the service finds for the queries as the model embeds them now; empty beside the main rank.

        Collective: every rank must call it. Training mode is kept.

        Args:
            model: With its adapter.
            processor: Its processor.
            batch_size: Queries of one forward.
            num_workers: Loader processes of each rank.
            is_vital: Whether a service that cannot be used is an error.
            stop_signal: Asked between batches; a signal's number ends the work.
            on_progress: Called with the number of queries after each request.

        Raises:
            SearchStopped: On the main rank, where nothing could be measured and `is_vital`.
            EvaluationStopped: On every rank, if the main one received a signal.
        """
        dataset = ItemDataset(processor, "query", self.data.queries)
        with evaluating(model):
            vectors = embed(model, dataset, self.world, batch_size, num_workers, stop_signal).numpy()
        result = ServedResult()
        if self.world.is_main:
            try:
                result = evaluate_service(self.client, self.data, vectors, on_progress, stop_signal)
            except SearchStopped as error:
                if is_vital:
                    raise
                result.failure = str(error)
        if number := from_main(stop_signal()):
            raise EvaluationStopped(number)
        if is_vital and result.metrics.get("num_failed") == len(self.data.queries):
            raise SearchStopped(f"{self.client.url}: not one query was answered, the last: {result.failure}")
        return result
