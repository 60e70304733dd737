"""Exact search equals the plain computation; FAISS gives the same on small corpora, and no -1 is ever a document."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from contrastors.index import INDEXES, NO_RESULT, count_not_finite, search, search_exact

ROOT = Path(__file__).resolve().parent.parent
FAISS_INDEXES = INDEXES[1:]


def plain(queries: np.ndarray, corpus: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The whole table, sorted by falling score and then by number."""
    with np.errstate(invalid="ignore"):
        scores = queries.astype(np.float32) @ corpus.astype(np.float32).T
    scores = np.where(np.isfinite(scores), scores, -np.inf)
    numbers = np.lexsort((np.broadcast_to(np.arange(len(corpus)), scores.shape), -scores), axis=1)[:, :k]
    scores = np.take_along_axis(scores, numbers, axis=1)
    return scores, np.where(np.isneginf(scores), NO_RESULT, numbers)


def unit_vectors(count: int, size: int, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).normal(size=(count, size)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


class Slices:
    """A corpus that can be read in slices alone, and remembers the longest."""

    def __init__(self, vectors: np.ndarray):
        self.vectors, self.longest = vectors, 0

    def __len__(self) -> int:
        return len(self.vectors)

    def __getitem__(self, rows: slice) -> np.ndarray:
        part = self.vectors[rows]
        self.longest = max(self.longest, len(part))
        return part


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 40), st.integers(1, 45), st.integers(1, 45))
def test_blocks_of_any_size_give_the_plain_result_with_ties_by_number(seed, query_block, corpus_block, size, k):
    """Whole numbers multiply without rounding, so that values are equal and not merely near; ties abound."""
    generator = np.random.default_rng(seed)
    queries = generator.integers(-2, 3, (generator.integers(1, 20), 3)).astype(np.float32)
    corpus = generator.integers(-2, 3, (size, 3)).astype(np.float32)
    corpus[generator.random(size) < 0.1] = [np.nan, 1, np.inf]
    k = min(k, size)
    found = search_exact(queries, corpus, k, query_block=query_block, corpus_block=corpus_block)
    wanted = plain(queries, corpus, k)
    assert np.array_equal(found[0], wanted[0]) and np.array_equal(found[1], wanted[1])


def test_exact_search_of_real_vectors_over_several_blocks_equals_the_plain_result():
    queries, corpus = unit_vectors(1100, 32, 1), unit_vectors(9000, 32, 2)
    scores, numbers = search("exact", queries, corpus, 20)
    wanted = plain(queries, corpus, 20)
    assert np.array_equal(numbers, wanted[1]) and np.abs(scores - wanted[0]).max() < 1e-6
    assert scores.dtype == np.float32


def test_equal_documents_come_in_the_order_of_their_numbers():
    corpus = np.ones((20_000, 4), dtype=np.float32)
    scores, numbers = search("exact", np.ones((3, 4), dtype=np.float32), corpus, 5)
    assert (numbers == np.arange(5)).all() and (scores == 4).all()


def test_the_corpus_is_read_in_slices_once_and_progress_counts_every_document():
    corpus, counted = Slices(unit_vectors(20_000, 8)), []
    search("exact", unit_vectors(1100, 8, 1), corpus, 5, on_progress=counted.append)
    assert sum(counted) == 20_000 and corpus.longest < 10_000


def test_near_duplicates_keep_their_order_in_fp32():
    """O10: in bf16 these 200 scores would fall into one bucket."""
    corpus = np.zeros((200, 2), dtype=np.float32)
    corpus[:, 0] = 0.9 + np.arange(200) * 1e-6
    scores, numbers = search("exact", np.array([[1.0, 0.0]], dtype=np.float32), corpus, 200)
    assert numbers[0].tolist() == list(range(199, -1, -1)) and len(set(scores[0].tolist())) == 200


@pytest.mark.parametrize("kind", INDEXES)
@pytest.mark.parametrize("size", [1, 2, 5, 19])
def test_every_index_gives_all_documents_of_a_small_corpus(kind, size):
    queries, corpus = unit_vectors(4, 8, 1), unit_vectors(size, 8, 2)
    scores, numbers = search(kind, queries, corpus, 20)
    assert numbers.shape == (4, size) and np.array_equal(numbers, plain(queries, corpus, size)[1])
    assert np.array_equal(scores, search("exact", queries, corpus, 20)[0])


@pytest.mark.parametrize("kind", FAISS_INDEXES)
@pytest.mark.parametrize("size", [1, 19, 1500])
def test_faiss_itself_finds_the_same_where_it_looks_everywhere(kind, size):
    pytest.importorskip("faiss")
    queries, corpus = unit_vectors(20, 16, 1), unit_vectors(size, 16, 2)
    scores, numbers = search(kind, queries, corpus, 10, nprobe=1500, small_corpus=0)
    wanted = plain(queries, corpus, min(10, size))
    assert np.array_equal(numbers, wanted[1]) and np.abs(scores - wanted[0]).max() < 1e-6


def test_what_an_index_does_not_find_is_marked_at_the_end_and_nprobe_acts():
    pytest.importorskip("faiss")
    queries, corpus = unit_vectors(20, 16, 1), unit_vectors(2000, 16, 2)
    narrow = search("faiss-ivf", queries, corpus, 1000, nprobe=1)[1]
    assert (narrow == NO_RESULT).any()
    for numbers in narrow:
        num_found = int((numbers != NO_RESULT).sum())
        assert (numbers[num_found:] == NO_RESULT).all() and len(set(numbers[:num_found].tolist())) == num_found
    assert (search("faiss-ivf", queries, corpus, 1000, nprobe=31)[1] != NO_RESULT).all()


def test_the_seed_of_the_clustering_acts_and_repeats():
    pytest.importorskip("faiss")
    queries, corpus = unit_vectors(20, 16, 1), unit_vectors(2000, 16, 2)
    first, again, other = (search("faiss-ivf", queries, corpus, 50, nprobe=2, seed=seed)[1] for seed in (0, 0, 1))
    assert np.array_equal(first, again) and not np.array_equal(first, other)


@pytest.mark.parametrize("kind", INDEXES)
def test_a_document_that_is_not_finite_is_never_found(kind):
    if kind != "exact":
        pytest.importorskip("faiss")
    corpus = unit_vectors(1500, 8)
    corpus[7], corpus[11, 3] = np.nan, np.inf
    assert count_not_finite(corpus) == 2
    numbers = search(kind, unit_vectors(10, 8, 1) * -1, corpus, 1500, nprobe=1500)[1]
    assert not np.isin(numbers, (7, 11)).any() and (numbers[:, -2:] == NO_RESULT).all()


def test_without_faiss_the_message_names_package_and_way_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ValueError, match=r"--index faiss-ivf needs its package: pip install '.\[faiss\]'"):
        search("faiss-ivf", unit_vectors(2, 8), unit_vectors(2000, 8), 5)


def test_memory_never_holds_the_table_of_queries_and_corpus():
    """2,500 x 100,000 scores would be 1 GB."""
    code = """
import resource, numpy as np
from contrastors.index import search
generator = np.random.default_rng(0)
queries, corpus = generator.normal(size=(2500, 8)), generator.normal(size=(100_000, 8))
search("exact", queries[:2].astype(np.float32), corpus[:10].astype(np.float32), 2)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
search("exact", queries.astype(np.float32), corpus.astype(np.float32), 20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) < 400_000  # KB
