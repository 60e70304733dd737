"""Nearest documents by inner product: exact in blocks, or through FAISS. Never a table of queries x corpus.

Q queries, C documents, D embedding size, k results. A corpus is anything with a length whose slices are (n, D) fp32
arrays, so a memory map will do. Ties go to the lower document number; a vector that is not finite is never found.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

INDEXES = ("exact", "faiss-ivf", "faiss-hnsw")
NO_RESULT = -1
SMALL_CORPUS = 1_000  # below, exact search is as fast as any index, and none of them could be trained well
_QUERY_BLOCK, _CORPUS_BLOCK = 1024, 8192
_HNSW_LINKS, _HNSW_BUILD = 32, 200
_FILLED, _TRAINED_ON = 64, 256  # vectors of a list at least (FAISS warns below 39), vectors of a list that train it


def search(
    kind: str,
    queries: np.ndarray,
    corpus: Any,
    k: int,
    *,
    nprobe: int = 128,
    seed: int = 0,
    device: torch.device | None = None,
    on_progress: Callable[[int], None] = lambda n: None,
    small_corpus: int = SMALL_CORPUS,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the k nearest documents of each query, best first.

    Args:
        kind: exact, faiss-ivf or faiss-hnsw.
        queries: (Q, D) fp32.
        corpus: (C, D) fp32, read in slices.
        k: Results of a query; cut to C.
        nprobe: Lists that faiss-ivf looks at; candidates that faiss-hnsw keeps.
        seed: Of the clustering of faiss-ivf.
        device: Where exact search computes; None = cpu.
        on_progress: Called with the number of documents after each block.
        small_corpus: Fewer documents are searched exactly, whatever the kind.

    Returns:
        Scores (Q, k) fp32 and document numbers (Q, k) int64. Where fewer were found the last ones are -inf and
        NO_RESULT.

    Raises:
        ValueError: FAISS is asked for and not installed.
    """
    k = min(k, len(corpus))
    if kind == "exact" or len(corpus) < small_corpus:
        return search_exact(queries, corpus, k, device, on_progress)
    return _search_faiss(kind, queries, corpus, k, nprobe, seed, on_progress)


@torch.no_grad()
def search_exact(
    queries: np.ndarray,
    corpus: Any,
    k: int,
    device: torch.device | None = None,
    on_progress: Callable[[int], None] = lambda n: None,
    query_block: int = _QUERY_BLOCK,
    corpus_block: int = _CORPUS_BLOCK,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns what `search` promises; each block of the corpus is read once, its scores are fp32.

    Args:
        queries: (Q, D) fp32.
        corpus: (C, D) fp32, read in slices.
        k: At most C.
        device: None = cpu.
        on_progress: Called with the number of documents after each block.
        query_block: Queries of one product.
        corpus_block: Documents of one product; memory holds query_block x corpus_block scores.
    """
    vectors = torch.from_numpy(np.ascontiguousarray(queries, dtype=np.float32)).to(device)
    scores = torch.full((len(vectors), k), -torch.inf, device=vectors.device)
    numbers = torch.full((len(vectors), k), NO_RESULT, dtype=torch.int64, device=vectors.device)
    for first, rows_of_block in _blocks(corpus, corpus_block):
        block = torch.from_numpy(rows_of_block).to(vectors)
        for start in range(0, len(vectors), query_block):
            rows = slice(start, start + query_block)
            _merge(scores[rows], numbers[rows], vectors[rows] @ block.T, first)
        on_progress(len(block))
    return scores.cpu().numpy(), numbers.cpu().numpy()


def _merge(best: torch.Tensor, numbers: torch.Tensor, scores: torch.Tensor, first: int) -> None:
    """Takes a block of scores into the running top-k of its queries, in place.

    Only scores above the last of the running top-k can enter it: an equal one belongs to a later document and loses.

    Args:
        best: (q, k) running scores, falling.
        numbers: (q, k) their documents.
        scores: (q, c) of documents first .. first + c - 1.
        first: Number of the block's first document.
    """
    k = best.shape[1]
    lowest = best[:, -1:]
    if scores.shape[1] > k and bool(torch.isneginf(lowest).any()):  # not full yet: nearly everything would enter
        finite = torch.where(torch.isfinite(scores), scores, -torch.inf)
        within = finite.topk(k, sorted=False).values.amin(dim=1, keepdim=True)
        enters = (finite > lowest) & (finite >= within)
    else:
        enters = scores > lowest
    rows, columns = enters.nonzero(as_tuple=True)
    entering = scores[rows, columns]
    finite = torch.isfinite(entering)
    rows, columns, entering = rows[finite], columns[finite], entering[finite]
    held_rows, held = (numbers >= 0).nonzero(as_tuple=True)
    all_rows = torch.cat([held_rows, rows])
    all_scores = torch.cat([best[held_rows, held], entering])
    all_numbers = torch.cat([numbers[held_rows, held], columns + first])
    # Two stable sorts: within a query by score, equal scores in order of number, as they stand.
    order = all_scores.argsort(descending=True, stable=True)
    order = order[all_rows[order].argsort(stable=True)]
    all_rows = all_rows[order]
    counts = torch.bincount(all_rows, minlength=len(best))
    positions = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[all_rows]
    kept = positions < k
    target = all_rows[kept], positions[kept]
    best[target], numbers[target] = all_scores[order][kept], all_numbers[order][kept]


def count_not_finite(corpus: Any) -> int:
    """Returns the number of documents that are never found, since their embedding is not finite."""
    return sum(int((~np.isfinite(block).all(axis=1)).sum()) for _, block in _blocks(corpus))


def _search_faiss(
    kind: str, queries: np.ndarray, corpus: Any, k: int, nprobe: int, seed: int, on_progress: Callable[[int], None]
) -> tuple[np.ndarray, np.ndarray]:
    try:
        import faiss
    except ImportError as error:
        raise ValueError(f"--index {kind} needs its package: pip install '.[faiss]', or use --index exact") from error
    size = queries.shape[1]
    if kind == "faiss-ivf":
        num_lists = max(1, min(round(4 * math.sqrt(len(corpus))), len(corpus) // _FILLED))
        # The quantizer must outlive the index, which does not hold it.
        quantizer = faiss.IndexFlatIP(size)
        index = faiss.IndexIVFFlat(quantizer, size, num_lists, faiss.METRIC_INNER_PRODUCT)
        index.cp.seed = seed
        index.nprobe = min(nprobe, num_lists)
        index.train(_sample(corpus, num_lists * _TRAINED_ON, seed))
    else:
        index = faiss.IndexHNSWFlat(size, _HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = _HNSW_BUILD
        index.hnsw.efSearch = max(nprobe, k)
    lost = []
    for first, block in _blocks(corpus):
        broken = ~np.isfinite(block).all(axis=1)  # FAISS knows no NaN: added as zeros, and taken out of what it finds
        lost.append(first + np.flatnonzero(broken))
        index.add(np.where(broken[:, None], np.float32(0), block))
        on_progress(len(block))
    scores, numbers = index.search(np.ascontiguousarray(queries, dtype=np.float32), k)
    return _order(scores, numbers, np.concatenate(lost))


def _blocks(corpus: Any, size: int = _CORPUS_BLOCK) -> Iterator[tuple[int, np.ndarray]]:
    for first in range(0, len(corpus), size):
        yield first, np.array(corpus[first : first + size], dtype=np.float32)  # torch wants it writable


def _sample(corpus: Any, num_rows: int, seed: int) -> np.ndarray:
    """Returns (num_rows, D) random rows, finite ones."""
    chosen = np.sort(np.random.default_rng(seed).choice(len(corpus), min(len(corpus), num_rows), replace=False))
    parts = []
    for first, block in _blocks(corpus):
        start, stop = np.searchsorted(chosen, (first, first + len(block)))
        parts.append(block[chosen[start:stop] - first])
    rows = np.concatenate(parts)
    return rows[np.isfinite(rows).all(axis=1)]


def _order(scores: np.ndarray, numbers: np.ndarray, lost: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sorts what FAISS found like exact search does: ties by number, what is no document last."""
    numbers = np.where(np.isin(numbers, lost), NO_RESULT, numbers)
    scores = np.where(numbers == NO_RESULT, -np.inf, scores).astype(np.float32)
    order = np.lexsort((numbers, -scores), axis=1)
    return np.take_along_axis(scores, order, axis=1), np.take_along_axis(numbers, order, axis=1)
