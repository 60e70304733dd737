"""The frozen half of query-side tuning: the base model's vectors of documents, kept by content, embedded where missing.

An index that was built with the base model stays valid, since nothing here ever changes a document's vector: it is
computed once, by the model with its adapter switched off, and read from the cache in every later step and run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from contrastors.batches import DocumentVectors, ItemDataset
from contrastors.data import DocumentTable
from contrastors.distributed import World
from contrastors.embeddings import EmbeddingStore, embed_missing
from contrastors.evaluation import evaluating
from contrastors.loading import Encoder


class Wanted(NamedTuple):
    """Documents of one data set.

    Attributes:
        table: Its documents.
        numbers: Those whose vectors are wanted.
    """

    table: DocumentTable
    numbers: Sequence[int]


class Frozen(NamedTuple):
    """Vectors of documents that no training changes.

    Attributes:
        vectors: For each data set asked for, by its document numbers.
        folder: Of the cache.
        num_documents: Distinct ones.
        num_embedded: Of them, those that the cache did not have.
    """

    vectors: list[DocumentVectors]
    folder: Path
    num_documents: int
    num_embedded: int


def freeze_documents(
    encoder: Encoder,
    cache: str | Path,
    wanted: Sequence[Wanted],
    world: World,
    batch_size: int,
    num_workers: int,
    max_image_pixels: int,
    on_progress: Callable[[int], None] = lambda n: None,
) -> Frozen:
    """Returns the base model's vectors of documents, embedding those that the cache lacks. Training mode is kept.

    A vector is found by the bytes of its image, within a folder for all that it depends on beside them: weights, dtype,
    pixel limits, instruction. What has changed has another name and is embedded anew.

    Collective: every rank must call it, with equal arguments.

    Args:
        encoder: Its model has `documents_by_base` set.
        cache: `--document-cache`, a folder that all ranks share.
        wanted: Documents.
        world: Ranks; each embeds a share.
        batch_size: Documents of one forward.
        num_workers: Loader processes of each rank.
        max_image_pixels: Of the image opener.
        on_progress: Called with the number of documents after each batch of this rank.

    Raises:
        ValueError: An image can no longer be read, or ranks do not share the cache.
    """
    model = encoder.model
    assert model.documents_by_base, "documents would be embedded with the adapter"
    keys = [[bytes.fromhex(table.content(number)) for number in numbers] for table, numbers in wanted]
    paths: dict[bytes, str] = {}
    for (table, numbers), own in zip(wanted, keys, strict=True):
        for number, key in zip(numbers, own, strict=True):
            paths.setdefault(key, table.paths[number])
    store = EmbeddingStore(cache, encoder.identity_of("document"), model.embedding_size)
    dataset = ItemDataset(encoder.processor, "document", list(paths.values()), max_image_pixels)
    with evaluating(model):
        num_embedded = embed_missing(model, dataset, list(paths), store, world, batch_size, num_workers, on_progress)
    if not world.is_main:
        store.scan()
    vectors = [
        DocumentVectors(store.matrix(own), numbers, str(store.folder))
        for own, (_, numbers) in zip(keys, wanted, strict=True)
    ]
    return Frozen(vectors, store.folder, len(paths), num_embedded)
