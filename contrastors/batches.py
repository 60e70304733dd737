"""Batches that loader workers make of training rows, and items of an evaluation: encoded, or looked up where frozen."""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.util import get_temp_dir
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from contrastors.data import NO_DOCUMENT, BatchOrder, TrainingRow, TrainingSet
from contrastors.images import MAX_IMAGE_PIXELS, BadImage, open_image
from contrastors.loss import ColumnMask, LossOutput, clip_loss
from contrastors.processing import BiQwen3Processor, Inputs, Item

LARGEST_OFF_UNIT = 1e-3  # of the length of an embedding that was stored in fp32
LONGEST_SOCKET_FOLDER = 107 - len("/listener-12345678")  # Linux: 107 bytes for the name of a socket
LOADER_TIMEOUT_S = 1800  # a batch that storage does not give in half an hour never comes


@dataclass(slots=True)
class Batch:
    """What one rank needs for one step.

    Attributes:
        queries: N encoded queries.
        documents: The distinct documents of this rank, each once: encoded, or (documents, D) fp32 vectors of a frozen
            document side.
        slots: (M,) int64, place in `documents` of each slot [positive, negative 1..K] of each query.
        mask: Columns, over all ranks, that stay out of the softmax.
        lines: File lines of the rows, for messages.
        num_truncated: Queries that were cut.
    """

    queries: Inputs
    documents: Inputs | torch.Tensor
    slots: torch.Tensor
    mask: ColumnMask
    lines: list[int]
    num_truncated: int = 0

    def pin_memory(self) -> Batch:
        """Returns a copy in pinned memory (DataLoader calls this)."""
        mask = ColumnMask(*(t.pin_memory() for t in self.mask))
        queries, documents = self.queries.pin_memory(), self.documents.pin_memory()
        return Batch(queries, documents, self.slots.pin_memory(), mask, self.lines, self.num_truncated)

    def to(self, device: torch.device) -> Batch:
        """Returns a copy on the device."""
        mask = ColumnMask(*(t.to(device, non_blocking=True) for t in self.mask))
        slots = self.slots.to(device, non_blocking=True)
        documents = self.documents.to(device, non_blocking=True) if self.is_frozen else self.documents.to(device)
        return Batch(self.queries.to(device), documents, slots, mask, self.lines, self.num_truncated)

    @property
    def is_frozen(self) -> bool:
        """Whether the documents are vectors, which no gradient reaches."""
        return isinstance(self.documents, torch.Tensor)


def contrast_batch(
    batch: Batch,
    places: torch.Tensor,
    logit_scale: Callable[[torch.Tensor], torch.Tensor],
    num_hard_negatives: int,
    tile: int,
    embeddings: torch.Tensor,
) -> LossOutput:
    """Returns the loss of a batch. Collective: every rank must call it.

    Args:
        batch: Of this rank.
        places: (documents,) int64, row of each document among those of `embeddings`; not read for frozen documents.
        logit_scale: Turns similarities into logits.
        num_hard_negatives: K.
        tile: Queries of a tile of logits; 0 = automatic.
        embeddings: (queries + documents, D), queries first, of frozen documents the queries alone; last, so that
            `partial` makes a contrast of the rest.
    """
    queries, documents = embeddings[: len(batch.queries)], embeddings[len(batch.queries) :]
    slots = batch.documents[batch.slots] if batch.is_frozen else documents[places[batch.slots]]
    return clip_loss(queries, slots, logit_scale, num_hard_negatives, batch.mask, tile)


class DocumentVectors:
    """The vectors of a frozen document side, by document number.

    Args:
        matrix: Its slices and lists of rows are (rows, D) fp32 arrays; an `EmbeddingMatrix`, so that they stay on disk.
        numbers: Document number of each of its rows.
        name: Of the cache, for messages.
    """

    def __init__(self, matrix: Any, numbers: Sequence[int], name: str = "cache"):
        self.matrix, self.name = matrix, name
        self._rows = np.full(max(numbers, default=-1) + 1, -1, dtype=np.int64)
        self._rows[list(numbers)] = np.arange(len(numbers))

    def __getitem__(self, numbers: Sequence[int] | np.ndarray) -> torch.Tensor:
        """Returns the (documents, D) fp32 vectors of document numbers.

        Raises:
            ValueError: One has not the length of an embedding.
        """
        rows = self._rows[np.asarray(numbers)]
        assert (rows >= 0).all(), f"{(rows < 0).sum()} documents have no vector"
        vectors = torch.from_numpy(self.matrix[rows])
        is_unit = (torch.linalg.vector_norm(vectors, dim=1) - 1).abs() < LARGEST_OFF_UNIT
        if not is_unit.all():  # NaN is off too
            raise ValueError(
                f"{self.name}: {int((~is_unit).sum())} vectors have not length 1: the cache is damaged (delete the "
                "folder), or the model gives no direction to its images"
            )
        return vectors


@dataclass(frozen=True, slots=True)
class BatchFailure:
    """Why a worker could not make a batch; travels as a value, so that the message stays one sentence."""

    reason: str


def _unreadable(path: str, error: BadImage) -> BatchFailure:
    return BatchFailure(f"{path} can no longer be read ({error}); it was good when the run began; mend it and go on")


@dataclass(slots=True)
class StepDataset(Dataset):
    """Item `step` is the `Batch` of this rank for that step.

    Attributes:
        data: Rows.
        order: Rows of each step.
        processor: Encodes queries and documents.
        num_hard_negatives: K.
        batch_size: N.
        rank: This rank.
        sample_negatives: Choose K of a row's negatives anew each epoch; otherwise the first K.
        mask_false_negatives: Mask documents known to answer a query.
        max_image_pixels: Of the image opener.
        vectors: Vectors of a frozen document side; None = documents are encoded, to be embedded in the step.
    """

    data: TrainingSet
    order: BatchOrder
    processor: BiQwen3Processor
    num_hard_negatives: int
    batch_size: int
    rank: int = 0
    sample_negatives: bool = False
    mask_false_negatives: bool = True
    max_image_pixels: int = field(default=2**62)
    vectors: DocumentVectors | None = None

    def __getitem__(self, step: int) -> Batch | BatchFailure:
        chosen = self.order.rows(step)
        columns = np.concatenate([self._slots(row, step) for row in chosen])
        first = self.rank * self.batch_size
        local = [self.data.rows[row] for row in chosen[first : first + self.batch_size]]
        group = 1 + self.num_hard_negatives
        own = columns[first * group : (first + self.batch_size) * group]
        documents, slots = np.unique(own, return_inverse=True)
        if documents[0] == NO_DOCUMENT:  # an empty slot borrows a vector that its mask then hides
            documents, slots = documents[1:], np.maximum(slots - 1, 0)
        try:
            encoded = self._encode(documents) if self.vectors is None else self.vectors[documents]
        except ValueError as error:
            return BatchFailure(str(error))
        if isinstance(encoded, BatchFailure):
            return encoded
        queries = [self.processor.encode_query(row.query) for row in local]
        return Batch(
            Inputs.from_items(queries, self.processor.pad_id),
            encoded,
            torch.from_numpy(slots.reshape(-1).astype(np.int64)),
            self._mask(columns, local, first),
            [row.line for row in local],
            sum(query.truncated for query in queries),
        )

    def documents_of(self, first_step: int, last_step: int) -> list[int]:
        """Returns the numbers of the documents that steps first_step .. last_step - 1 of all ranks need, sorted."""
        needed: set[int] = set()
        for step in range(first_step, last_step):
            if len(needed) == len(self.data.documents):
                break
            for row in self.order.rows(step):
                needed.update(self._slots(row, step).tolist())
            needed.discard(NO_DOCUMENT)
        return sorted(needed)

    def _encode(self, documents: np.ndarray) -> Inputs | BatchFailure:
        items = []
        for number in documents:
            path = self.data.documents.paths[number]
            try:
                items.append(self.processor.encode_document(open_image(path, self.max_image_pixels)))
            except BadImage as error:
                return _unreadable(path, error)
        return Inputs.from_items(items, self.processor.pad_id)

    def _slots(self, row_number: int, step: int) -> np.ndarray:
        """Returns the (1 + K,) document numbers of a row: positive, negatives, NO_DOCUMENT in empty slots."""
        row = self.data.rows[row_number]
        negatives = row.negatives
        if self.sample_negatives and len(negatives) > self.num_hard_negatives:
            # + 1: numpy takes [seed, epoch, 0] for the [seed, epoch] of the order of rows
            generator = np.random.default_rng([self.order.seed, self.order.epoch(step), row_number + 1])
            negatives = generator.permutation(negatives)
        slots = np.full(1 + self.num_hard_negatives, NO_DOCUMENT, dtype=np.int64)
        slots[0] = row.positive
        taken = negatives[: self.num_hard_negatives]
        slots[1 : 1 + len(taken)] = taken
        return slots

    def _mask(self, columns: np.ndarray, local: list[TrainingRow], first: int) -> ColumnMask:
        pairs = []
        if self.mask_false_negatives:
            places: dict[int, list[int]] = {}
            for column, number in enumerate(columns.tolist()):
                places.setdefault(number, []).append(column)
            for query, row in enumerate(local):
                label = (first + query) * (1 + self.num_hard_negatives)
                for number in self.data.positives[row.query]:
                    pairs += [(query, column) for column in places.get(number, ()) if column != label]
        missing = torch.from_numpy(columns == NO_DOCUMENT)
        return ColumnMask(missing, torch.tensor(sorted(pairs), dtype=torch.int64).reshape(-1, 2))


def leave_signals_to_the_rank(worker: int) -> None:
    """Lets loader workers live through a signal to the whole process group (torchrun, schedulers): the rank decides."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _check_sockets() -> None:
    """Refuses a folder of temporary files in which workers cannot open sockets: their batches would never arrive.

    Raises:
        ValueError: The name of the folder is too long.
    """
    folder = get_temp_dir()
    if (
        torch.multiprocessing.get_sharing_strategy() == "file_descriptor"
        and len(os.fsencode(folder)) > LONGEST_SOCKET_FOLDER
    ):
        raise ValueError(
            f"{folder}: the name of this folder is too long for the sockets of loader processes; set TMPDIR to a "
            "shorter one (TMPDIR=/tmp), or use --num-workers 0"
        )


def _take_all(dataset: Dataset, num_workers: int, device: torch.device, options: dict[str, Any]) -> Iterator[Any]:
    """Yields what a loader gives; none of its workers outlives it, whatever they hang in.

    They ignore SIGTERM, all that torch sends to one that does not end, and Python waits for its children at exit.
    """
    if num_workers:
        _check_sockets()
    others = multiprocessing.active_children()
    loader = DataLoader(
        dataset,
        num_workers=num_workers,
        worker_init_fn=leave_signals_to_the_rank,
        pin_memory=device.type == "cuda",
        timeout=LOADER_TIMEOUT_S if num_workers else 0,
        **options,
    )
    made = None
    try:
        made = iter(loader)
        for batch in made:
            if isinstance(batch, BatchFailure):
                raise ValueError(batch.reason)
            yield batch
    except BaseException as error:  # a stop by a signal is one too
        traceback.clear_frames(error.__traceback__)  # they hold the iterator, which ends its workers when it goes
        if "DataLoader timed out" in str(error):
            text = f"a loader process gave nothing for {LOADER_TIMEOUT_S} s: does the storage hang?"
            raise ValueError(text) from None
        raise
    finally:
        del made
        left = set(multiprocessing.active_children()).difference(others)
        for end in (lambda worker: worker.kill(), lambda worker: worker.join(10)):
            for worker in left:
                with suppress(RuntimeError):  # torch's handler, where it still counts on a worker that is gone
                    end(worker)


def load_batches(
    dataset: StepDataset, first_step: int, last_step: int, num_workers: int, device: torch.device
) -> Iterator[Batch]:
    """Yields the batches of steps first_step .. last_step - 1, decoded and encoded ahead in worker processes.

    Raises:
        ValueError: A worker could not make a batch.
    """
    options = {"batch_size": None, "sampler": range(first_step, last_step)}
    yield from _take_all(dataset, num_workers, device, options)


class ItemDataset(Dataset):
    """Encoded queries or documents, one a place; what cannot be read is a `BatchFailure`."""

    def __init__(
        self, processor: BiQwen3Processor, kind: str, sources: Sequence[str], max_image_pixels: int = MAX_IMAGE_PIXELS
    ):
        self.processor, self.kind, self.sources = processor, kind, sources
        self.max_image_pixels = max_image_pixels

    def __len__(self) -> int:
        return len(self.sources)

    def __getitem__(self, place: int) -> Item | BatchFailure:
        source = self.sources[place]
        if self.kind == "query":
            return self.processor.encode_query(source)
        try:
            return self.processor.encode_document(open_image(source, self.max_image_pixels))
        except BadImage as error:
            return _unreadable(source, error)

    def collate(self, items: list[Item | BatchFailure]) -> Inputs | BatchFailure:
        """Returns the items of one batch, or the first failure; a method, since spawned workers need to pickle it."""
        failures = [item for item in items if isinstance(item, BatchFailure)]
        return failures[0] if failures else Inputs.from_items(items, self.processor.pad_id)


def load_items(
    dataset: ItemDataset, places: Sequence[int], batch_size: int, num_workers: int, device: torch.device
) -> Iterator[Inputs]:
    """Yields the items at `places`, in order, in batches.

    Raises:
        ValueError: An item could not be read.
    """
    options = {"batch_size": batch_size, "sampler": places, "collate_fn": dataset.collate}
    yield from _take_all(dataset, min(num_workers, -(-len(places) // batch_size)), device, options)
