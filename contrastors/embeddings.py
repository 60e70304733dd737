"""Embeddings kept as they are made, found again by the content they were made from.

A store is one folder for one model, adapter and set of limits. Each process appends to a shard of its own, batch by
batch: `NAME.vectors` (n x D fp32) first, then `NAME.keys` (n x 16 bytes). What a kill tears off at the end of either
file is not counted, so that at most one batch of each process is embedded twice.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from contrastors.batches import ItemDataset, load_items
from contrastors.biqwen3 import BiQwen3
from contrastors.distributed import World, barrier, from_main
from contrastors.records import dump_json, write_text

FORMAT = 1
KEY_BYTES = 16
_KEY = np.dtype(("S", KEY_BYTES))  # compared byte by byte; the zeros that numpy hides at an end are compared too


def text_key(text: str) -> bytes:
    """Returns the key of a query's text."""
    return hashlib.blake2b(text.encode(), digest_size=KEY_BYTES).digest()


class EmbeddingMatrix:
    """Embeddings of a list of keys; a slice reads these rows from the shards, so memory holds no more of them.

    Args:
        shards: (n, D) memory maps.
        places: (len, 2) shard and row of each embedding.
        size: D.
    """

    def __init__(self, shards: Sequence[np.ndarray], places: np.ndarray, size: int):
        self._shards, self._places = shards, places
        self.shape = (len(places), size)

    def __len__(self) -> int:
        return self.shape[0]

    def __getstate__(self) -> dict[str, Any]:
        """Returns names of files in place of their content: what workers are sent where they are spawned."""
        files = [(str(shard.filename), shard.shape) for shard in self._shards]
        return {"files": files, "places": self._places, "shape": self.shape}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._shards = [np.memmap(file, dtype="<f4", mode="r", shape=shape) for file, shape in state["files"]]
        self._places, self.shape = state["places"], state["shape"]

    def __getitem__(self, rows: slice | Sequence[int]) -> np.ndarray:
        """Returns the (rows, D) fp32 embeddings of a slice or list of rows, a copy."""
        places = self._places[rows]
        vectors = np.empty((len(places), self.shape[1]), dtype=np.float32)
        for shard in np.unique(places[:, 0]):
            chosen = places[:, 0] == shard
            vectors[chosen] = self._shards[shard][places[chosen, 1]]
        return vectors


class EmbeddingStore:
    """Embeddings of one kind by one model, on disk.

    Args:
        folder: `--embeddings-dir`, shared by many stores.
        identity: Everything the numbers depend on beside the content; another value is another store.
        size: D.
    """

    def __init__(self, folder: str | Path, identity: dict[str, Any], size: int):
        text = dump_json(identity | {"format": FORMAT, "embedding_size": size}, indent=1) + "\n"
        self.folder = Path(folder) / hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        self.size = size
        self._identity = text
        self._shards: list[np.ndarray] = []
        self._starts = np.zeros(1, dtype=np.int64)  # first row of each shard, counted over all of them
        self._keys = np.empty(0, dtype=_KEY)  # of all rows, sorted: a Python dict would take seven times as much
        self._rows = np.empty(0, dtype=np.int64)  # of these keys
        self._files: tuple[Any, Any] | None = None

    def scan(self) -> None:
        """Looks up what all processes have written so far; 24 bytes a key stay in memory."""
        self._shards, keys = [], [np.empty(0, dtype=_KEY)]
        for file in sorted(self.folder.glob("*.keys")):
            written = file.read_bytes()
            vectors = file.with_suffix(".vectors")
            if not vectors.is_file():
                continue
            num_rows = min(len(written) // KEY_BYTES, vectors.stat().st_size // (4 * self.size))
            if not num_rows:
                continue
            keys.append(np.frombuffer(written, dtype=_KEY, count=num_rows))
            self._shards.append(np.memmap(vectors, dtype="<f4", mode="r", shape=(num_rows, self.size)))
        self._starts = np.cumsum([len(found) for found in keys])
        self._keys = np.concatenate(keys)
        self._rows = np.argsort(self._keys, kind="stable")  # of equal keys the one that was found first leads
        self._keys = self._keys[self._rows]

    def _find(self, keys: Sequence[bytes]) -> np.ndarray:
        """Returns the (len,) int64 row of each key, counted over all shards; -1 where there is none."""
        wanted = np.array(keys, dtype=_KEY)
        places = np.searchsorted(self._keys, wanted)
        rows = np.full(len(wanted), -1, dtype=np.int64)
        inside = places < len(self._keys)
        inside[inside] = self._keys[places[inside]] == wanted[inside]
        rows[inside] = self._rows[places[inside]]
        return rows

    def find_missing(self, keys: Sequence[bytes]) -> list[int]:
        """Returns the places of those keys that `scan` has not found."""
        return np.flatnonzero(self._find(keys) < 0).tolist()

    def matrix(self, keys: Sequence[bytes]) -> EmbeddingMatrix:
        """Returns the embeddings of these keys.

        Raises:
            ValueError: `scan` has not found all of them.
        """
        rows = self._find(keys)
        if num_missing := int((rows < 0).sum()):
            raise ValueError(
                f"{self.folder}: {num_missing} embeddings of other ranks are not here; it must be "
                "a folder that all ranks share"
            )
        shards = np.searchsorted(self._starts, rows, side="right") - 1
        return EmbeddingMatrix(self._shards, np.stack([shards, rows - self._starts[shards]], axis=1), self.size)

    def append(self, keys: Sequence[bytes], vectors: np.ndarray) -> None:
        """Writes one batch through to the disk; vectors before keys, so that a key never lacks its vector."""
        if self._files is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not (self.folder / "identity.json").exists():
                write_text(self.folder / "identity.json", self._identity)
            name = uuid.uuid4().hex  # never an older shard: its end may be torn, or another process writes there
            self._files = tuple(open(self.folder / f"{name}.{kind}", "wb") for kind in ("vectors", "keys"))
        for file, data in zip(self._files, (vectors.astype("<f4").tobytes(), b"".join(keys)), strict=True):
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        """Closes the shard of this process."""
        for file in self._files or ():
            file.close()
        self._files = None


@torch.no_grad()
def embed_missing(
    model: BiQwen3,
    dataset: ItemDataset,
    keys: Sequence[bytes],
    store: EmbeddingStore,
    world: World,
    batch_size: int,
    num_workers: int,
    on_progress: Callable[[int], None] = lambda n: None,
) -> int:
    """Embeds what the store lacks, each rank its share of whole batches; returns the number of items of all ranks.

    The batches do not depend on the number of ranks, nor on where an earlier run was stopped. Collective: every rank
    must call it, with equal arguments.

    Args:
        model: In eval mode, or dropout would blur the vectors.
        dataset: Queries or documents.
        keys: Key of each item, all different.
        store: In a folder that all ranks share; the main rank's is scanned afterwards.
        world: Ranks.
        batch_size: Items of one forward.
        num_workers: Loader processes of this rank.
        on_progress: Called with the number of items after each batch of this rank.
    """
    assert not model.training, "embed_missing() needs model.eval()"
    if world.is_main:
        store.scan()
    missing = from_main(store.find_missing(keys) if world.is_main else None)
    starts = range(world.rank * batch_size, len(missing), world.size * batch_size)
    batches = [missing[start : start + batch_size] for start in starts]
    places = [place for batch in batches for place in batch]
    for batch, inputs in zip(
        batches, load_items(dataset, places, batch_size, num_workers, world.device) if places else (), strict=True
    ):
        (chunk,) = inputs.to(world.device).chunks(len(inputs))
        store.append([keys[place] for place in batch], model(**chunk).float().cpu().numpy())
        on_progress(len(batch))
    store.close()
    barrier()
    if world.is_main:
        store.scan()
    return len(missing)
