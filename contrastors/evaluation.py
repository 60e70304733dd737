"""Retrieval evaluation: embed queries and corpus over all ranks, rank the corpus for each query, put numbers on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from contrastors.batches import ItemDataset, load_items
from contrastors.biqwen3 import BiQwen3
from contrastors.data import NO_DOCUMENT, DocumentTable
from contrastors.distributed import World, from_main, gather_rows
from contrastors.metrics import NDCG_AT, RECALL_AT, query_metrics, summarize
from contrastors.processing import BiQwen3Processor
from contrastors.records import BadRow, Pair
from contrastors.validation import ImageFact

METRICS = (*(f"recall@{k}" for k in RECALL_AT), "mrr", f"ndcg@{NDCG_AT}")
COLLAPSED = 0.999  # mean cosine of different documents from which on a model no longer tells them apart
SMALLEST_NORM = 0.5  # of an embedding, which has length 1 unless the model's output was zero
_QUERY_BLOCK = 256


@dataclass(slots=True)
class EvalSet:
    """One query per distinct text with its positives merged over rows, and the corpus of all distinct documents.

    Attributes:
        queries: Distinct query texts, in order of first use.
        positives: Document numbers of each query, sorted.
        documents: The corpus: positives and listed negatives.
        num_rows: Rows of the file.
        bad_rows: Those skipped, since the positive cannot be used.
        num_bad_negatives: Listed negatives, and further images of a corpus, that cannot be read: the corpus lacks them.
    """

    queries: list[str]
    positives: list[list[int]]
    documents: DocumentTable
    num_rows: int
    bad_rows: list[BadRow]
    num_bad_negatives: int


def build_eval_set(pairs: Sequence[Pair], facts: dict[str, ImageFact], more: Sequence[str] = ()) -> EvalSet:
    """Returns the queries and the corpus of an evaluation file.

    Args:
        pairs: Its rows.
        facts: Of every image.
        more: Images that join the corpus.
    """
    table = DocumentTable(facts)
    bad_rows: list[BadRow] = []
    num_bad = 0
    positives: dict[str, set[int]] = {}
    for pair in pairs:
        number = table.number(pair.positive)
        if number == NO_DOCUMENT:
            bad_rows.append(BadRow(pair.line, pair.positive, table.reason(pair.positive)))
        else:
            positives.setdefault(pair.query, set()).add(number)
        num_bad += sum(table.number(path) == NO_DOCUMENT for path in pair.negatives)
    num_bad += sum(table.number(path) == NO_DOCUMENT for path in more)
    numbers = [sorted(found) for found in positives.values()]
    return EvalSet(list(positives), numbers, table, len(pairs), bad_rows, num_bad)


@dataclass(slots=True)
class EvalResult:
    """Numbers of one evaluation.

    Attributes:
        metrics: Flat names -> means with `_low` and `_high` ends of their 95 % intervals, and counts.
        per_query: One object a query, in order of the evaluation set.
    """

    metrics: dict[str, float]
    per_query: list[dict[str, Any]]


class EvaluationStopped(Exception):
    """A signal arrived while embedding, on any rank; all ranks know of it.

    Attributes:
        signal: Its number.
    """

    def __init__(self, signal: int):
        super().__init__(f"stopped by signal {signal}")
        self.signal = signal


@contextmanager
def evaluating(model: BiQwen3) -> Iterator[None]:
    """Turns dropout off inside the block."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@torch.no_grad()
def embed(
    model: BiQwen3,
    dataset: ItemDataset,
    world: World,
    batch_size: int,
    num_workers: int,
    stop_signal: Callable[[], int] = lambda: 0,
    on_progress: Callable[[int], None] = lambda n: None,
) -> torch.Tensor:
    """Returns the (n, D) fp32 embeddings of all items, on the CPU of every rank; each rank embeds its share.

    Collective: every rank must call it, with equal arguments.

    Args:
        model: In eval mode, or dropout would blur the vectors.
        dataset: Queries or documents.
        world: Ranks.
        batch_size: Items of one forward.
        num_workers: Loader processes of this rank.
        stop_signal: Asked before each batch; a signal's number ends the work.
        on_progress: Called with the number of items after each batch.

    Raises:
        EvaluationStopped: On every rank, if one of them received a signal.
    """
    assert not model.training, "embed() needs model.eval()"
    places = range(world.rank, len(dataset), world.size)
    # One more column than the embedding: it carries the wish to stop, so that all ranks learn of it in the one gather.
    rows = torch.zeros(len(places), model.embedding_size + 1, device=world.device)
    done = 0
    for inputs in load_items(dataset, places, batch_size, num_workers, world.device):
        if number := stop_signal():
            rows[:, -1] = number
            break
        (chunk,) = inputs.to(world.device).chunks(len(inputs))
        rows[done : done + len(inputs), :-1] = model(**chunk).float()
        done += len(inputs)
        on_progress(len(inputs))
    gathered = gather_rows(rows, len(dataset)).cpu()
    if gathered[:, -1].any():
        raise EvaluationStopped(int(gathered[:, -1].max()))
    return gathered[:, :-1].contiguous()


def score_embeddings(
    queries: torch.Tensor, documents: torch.Tensor, positives: Sequence[Sequence[int]], scale: float
) -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Returns mean metrics and per-query values of embedded queries against an embedded corpus.

    The loss of a query is the mean over its positives, each against the whole corpus without the other positives, so it
    does not depend on a batch size. A document or query that is not finite is counted and never ranks first.

    Args:
        queries: (Q, D) fp32.
        documents: (C, D) fp32.
        positives: Document numbers of each query.
        scale: 1 / temperature.

    Raises:
        ValueError: No queries.
    """
    names = ("rank", *METRICS, "positive_similarity", "negative_similarity", "hardest_negative", "margin", "loss")
    values: dict[str, list[float]] = {name: [] for name in names}
    for start in range(0, len(queries), _QUERY_BLOCK):
        block = (queries[start : start + _QUERY_BLOCK] @ documents.T).numpy()
        for offset, scores in enumerate(block):
            found = _one_query(scores, positives[start + offset], scale)
            for name in names:
                values[name].append(found[name])
    per_query = {name: np.asarray(column, dtype=np.float64) for name, column in values.items()}
    summary = summarize({name: per_query[name] for name in names[1:]})
    summary["num_queries"], summary["corpus_size"] = len(queries), len(documents)
    return summary | describe_vectors(queries, documents), per_query


def describe_vectors(queries: torch.Tensor, documents: torch.Tensor) -> dict[str, float]:
    """Returns what tells of a broken model: `num_not_finite`, `num_zero`, and of each kind the mean cosine.

    Args:
        queries: (Q, D) fp32 of distinct texts: equal texts have equal vectors, and rightly so.
        documents: (C, D) fp32 of distinct documents.
    """
    found: dict[str, float] = {"num_not_finite": 0, "num_zero": 0}
    for kind, vectors in (("document", documents), ("query", queries)):
        finite = torch.isfinite(vectors).all(dim=1)
        found["num_not_finite"] += int((~finite).sum())
        found["num_zero"] += int((vectors.square().sum(dim=1) < SMALLEST_NORM**2).sum())
        found[f"mean_{kind}_similarity"] = mean_pairwise_cosine(vectors[finite])
    return found


def _one_query(scores: np.ndarray, positives: Sequence[int], scale: float) -> dict[str, float]:
    found = query_metrics(scores, positives)
    others = np.delete(scores, positives).astype(np.float64)
    others = others[np.isfinite(others)]
    own = scores[list(positives)].astype(np.float64)
    found["positive_similarity"] = float(own.mean())
    found["negative_similarity"] = float(others.mean()) if len(others) else float("nan")
    found["hardest_negative"] = float(others.max()) if len(others) else float("nan")
    found["margin"] = found["positive_similarity"] - found["negative_similarity"]
    top = max(float(own.max()), found["hardest_negative"] if len(others) else -np.inf) * scale
    rest = np.exp(others * scale - top).sum()
    found["loss"] = float(np.mean([np.log(np.exp(s * scale - top) + rest) + top - s * scale for s in own]))
    return found


def mean_pairwise_cosine(vectors: torch.Tensor) -> float:
    """Returns the mean cosine of different rows; near 1 the model has collapsed. NaN for fewer than two rows."""
    count = len(vectors)
    if count < 2:
        return float("nan")
    total = vectors.double().sum(dim=0).square().sum()
    return float((total - vectors.double().square().sum()) / (count * (count - 1)))


def evaluate(
    model: BiQwen3,
    processor: BiQwen3Processor,
    data: EvalSet,
    world: World,
    scale: float,
    batch_size: int,
    num_workers: int,
    max_image_pixels: int,
    stop_signal: Callable[[], int] = lambda: 0,
    on_progress: Callable[[int], None] = lambda n: None,
    document_vectors: torch.Tensor | None = None,
) -> EvalResult:
    """Returns the metrics of a model on an evaluation set, equal on every rank. Dropout is off; training mode is kept.

    Collective: every rank must call it.

    Args:
        model: With or without adapter.
        processor: Its processor.
        data: Queries, positives and corpus.
        world: Ranks; each embeds a share.
        scale: 1 / temperature, for the loss.
        batch_size: Items of one forward.
        num_workers: Loader processes of each rank.
        max_image_pixels: Of the image opener.
        stop_signal: Asked between batches; a signal's number ends the work.
        on_progress: Called with the number of items after each batch.
        document_vectors: (C, D) fp32 of a frozen corpus; None = the model embeds it.

    Raises:
        EvaluationStopped: On every rank, if one of them received a signal.
    """
    with evaluating(model):
        options = world, batch_size, num_workers, stop_signal, on_progress
        queries = embed(model, ItemDataset(processor, "query", data.queries), *options)
        if document_vectors is None:
            dataset = ItemDataset(processor, "document", data.documents.paths, max_image_pixels)
            document_vectors = embed(model, dataset, *options)
    # One rank computes: two machines may round differently, and ranks must agree on what is best.
    scored = score_embeddings(queries, document_vectors, data.positives, scale) if world.is_main else None
    metrics, per_query = from_main(scored)
    metrics |= {"num_rows": data.num_rows, "num_bad_rows": len(data.bad_rows)}
    metrics["num_bad_negatives"] = data.num_bad_negatives
    metrics["num_truncated_queries"] = sum(processor.encode_query(query).truncated for query in data.queries)
    rows = []
    for place, (query, positives) in enumerate(zip(data.queries, data.positives, strict=True)):
        values = {name: float(column[place]) for name, column in per_query.items()}
        rows.append({"query": query, "positives": [data.documents.paths[p] for p in positives], **values})
    return EvalResult(metrics, rows)


def collapse_warnings(metrics: dict[str, float]) -> list[str]:
    """Returns a sentence for embeddings that are not finite, for those that are zero, and for all alike."""
    warnings = []
    if metrics["num_not_finite"]:
        warnings.append(f"{metrics['num_not_finite']} embeddings are not finite; they rank last")
    if metrics["num_zero"]:
        warnings.append(f"{metrics['num_zero']} embeddings are zero: the model gives their inputs no direction")
    for kind, pair in (("document", "two documents"), ("query", "two queries")):
        if (found := metrics[f"mean_{kind}_similarity"]) > COLLAPSED:
            warnings.append(f"the embeddings have collapsed: {pair} have a mean cosine of {found:.4f}")
    return warnings
