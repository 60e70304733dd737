"""The store of embeddings: found by content, whole rows alone, in little memory."""

from __future__ import annotations

import pickle
import tempfile

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from contrastors.batches import DocumentVectors
from contrastors.embeddings import EmbeddingStore, text_key

KEYS = st.lists(st.sampled_from((0, 1, 255)), min_size=16, max_size=16).map(bytes)  # zeros at the end, high bytes


def test_a_torn_shard_counts_whole_rows_with_keys_alone(tmp_path):
    def store() -> EmbeddingStore:
        return EmbeddingStore(tmp_path, {"model": "m"}, 4)

    keys = [text_key(text) for text in "abc"]
    written = store()
    written.append(keys[:2], np.arange(8, dtype=np.float32).reshape(2, 4))
    written.append(keys[2:], np.full((1, 4), 7, dtype=np.float32))
    written.close()
    (file,) = tmp_path.glob("*/*.keys")
    for cut, num_kept in ((0, 3), (1, 2), (16, 2), (17, 1), (48, 0)):
        data = file.read_bytes()
        file.write_bytes(data[: len(data) - cut])
        found = store()
        found.scan()
        assert found.find_missing(keys) == list(range(num_kept, 3))
        file.write_bytes(data)
    whole = file.with_suffix(".vectors").read_bytes()
    file.with_suffix(".vectors").write_bytes(whole[:-1])
    found = store()
    found.scan()
    assert found.find_missing(keys) == [2] and found.matrix([keys[1], keys[0]])[:].tolist() == [
        [4, 5, 6, 7],
        [0, 1, 2, 3],
    ]
    assert found.matrix([keys[1], keys[0]])[[1]].tolist() == [[0, 1, 2, 3]]


@settings(max_examples=50)
@given(shards=st.lists(st.lists(KEYS, min_size=1, max_size=5), max_size=4), others=st.lists(KEYS, max_size=5))
def test_every_key_finds_its_first_vector_whatever_its_bytes(shards, others):
    with tempfile.TemporaryDirectory() as folder:
        for number, keys in enumerate(shards):
            written = EmbeddingStore(folder, {}, 1)
            written.append(keys, 10 * number + np.arange(len(keys), dtype=np.float32)[:, None])
            written.close()
        store = EmbeddingStore(folder, {}, 1)
        store.scan()
        expected: dict[bytes, float] = {}
        for file in sorted(store.folder.glob("*.keys")):
            data, vectors = file.read_bytes(), np.fromfile(file.with_suffix(".vectors"), dtype="<f4")
            for row, vector in enumerate(vectors.tolist()):
                expected.setdefault(data[16 * row : 16 * row + 16], vector)
        known = [key for keys in shards for key in keys]
        assert store.matrix(known)[:].ravel().tolist() == [expected[key] for key in known]
        wanted = known + others
        assert store.find_missing(wanted) == [place for place, key in enumerate(wanted) if key not in expected]


def test_vectors_travel_to_spawned_workers_as_names_of_files(tmp_path):
    store = EmbeddingStore(tmp_path, {}, 64)
    keys, vectors = [n.to_bytes(16, "big") for n in range(1000)], np.eye(1000, 64, dtype=np.float32)
    store.append(keys, vectors)
    store.close()
    store.scan()
    sent = pickle.dumps(DocumentVectors(store.matrix(keys[10:20]), range(10)))
    assert len(sent) < 5_000
    assert torch.equal(pickle.loads(sent)[[3]], torch.from_numpy(vectors[[13]]))
