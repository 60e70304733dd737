"""Training rows, their order, and the batches that loader workers make of them.

Every rank holds all rows and knows the whole global batch of a step, so positives of other ranks are masked without
asking them. The order is a pure function of (seed, epoch): nothing of it needs saving.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from contrastors.distributed import World, from_main, gather_objects
from contrastors.images import BadImage, open_image
from contrastors.loss import ColumnMask, LossOutput, clip_loss
from contrastors.processing import BiQwen3Processor, Inputs, Item
from contrastors.records import BadRow, Pair
from contrastors.validation import FactCache, ImageFact, check_images

NO_DOCUMENT = -1


def validate_images(
    paths: Sequence[str],
    cache_folder: str | Path,
    max_image_pixels: int,
    num_workers: int,
    world: World,
    on_progress: Callable[[int], None] = lambda n: None,
) -> dict[str, ImageFact]:
    """Returns the facts of all images, the same on every rank; each rank decodes its share of the unknown ones.

    Collective: every rank must call it, with equal arguments.

    Args:
        paths: Distinct files.
        cache_folder: Folder of the JSONL, where facts are remembered.
        max_image_pixels: Larger pictures are bad images.
        num_workers: Processes of this rank.
        world: Ranks.
        on_progress: Called with 1 after each file of this rank.
    """
    cache = FactCache(cache_folder)
    known = from_main({path: fact for path in paths if (fact := cache.get(path, max_image_pixels))})
    unknown = [path for path in paths if path not in known]
    facts = check_images(unknown[world.rank :: world.size], max_image_pixels, num_workers, on_progress)
    found = [fact for share in gather_objects(facts) for fact in share]
    if world.is_main:
        cache.add(found)
    return known | {fact.path: fact for fact in found}


class DocumentTable:
    """Documents by content: equal bytes under two names are one document.

    Attributes:
        paths: One path of each document; its place in the list is the document's number.
    """

    def __init__(self, facts: dict[str, ImageFact]):
        self.paths: list[str] = []
        self._facts = facts
        self._numbers: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.paths)

    def number(self, path: str) -> int:
        """Returns the number of a file's document, NO_DOCUMENT where the image cannot be used."""
        fact = self._facts[path]
        if not fact.ok:
            return NO_DOCUMENT
        if fact.content not in self._numbers:
            self._numbers[fact.content] = len(self.paths)
            self.paths.append(path)
        return self._numbers[fact.content]

    def content(self, number: int) -> str:
        """Returns the content hash of a document."""
        return self._facts[self.paths[number]].content

    def reason(self, path: str) -> str:
        """Returns why a file cannot be used."""
        return self._facts[path].reason


@dataclass(slots=True)
class TrainingRow:
    """A usable row: document numbers in place of paths."""

    line: int
    query: str
    positive: int
    negatives: list[int]


@dataclass(slots=True)
class TrainingSet:
    """Rows that can be trained on, and what was left out of them.

    Attributes:
        rows: In file order.
        documents: All documents of the rows.
        positives: Query text -> numbers of the documents known to answer it.
        bad_rows: Skipped, since the positive cannot be used.
        num_bad_negatives: Listed negatives that cannot be read.
        num_positive_negatives: Listed negatives that are known positives of the same query.
        num_dropped: Rows left out by `--missing-negatives drop-row`.
    """

    rows: list[TrainingRow]
    documents: DocumentTable
    positives: dict[str, set[int]]
    bad_rows: list[BadRow]
    num_bad_negatives: int = 0
    num_positive_negatives: int = 0
    num_dropped: int = 0


def build_training_set(
    pairs: Sequence[Pair],
    facts: dict[str, ImageFact],
    num_hard_negatives: int = 0,
    drop_incomplete: bool = False,
    mask_false_negatives: bool = True,
) -> TrainingSet:
    """Returns the usable rows. A usable negative can be read, is listed once, and is no known positive of the query.

    Args:
        pairs: Rows of the file.
        facts: Of every image in them.
        num_hard_negatives: K; 0 = negatives are not looked at.
        drop_incomplete: Leave out rows with fewer than K usable negatives, in place of masking their empty slots.
        mask_false_negatives: Leave known positives out of the negatives.
    """
    table = DocumentTable(facts)
    result = TrainingSet([], table, {}, [])
    usable = []
    for pair in pairs:
        number = table.number(pair.positive)
        if number == NO_DOCUMENT:
            result.bad_rows.append(BadRow(pair.line, pair.positive, table.reason(pair.positive)))
            continue
        result.positives.setdefault(pair.query, set()).add(number)
        usable.append((pair, number))
    for pair, positive in usable:
        negatives: dict[int, None] = {}
        for path in pair.negatives if num_hard_negatives else ():
            number = table.number(path)
            if number == NO_DOCUMENT:
                result.num_bad_negatives += 1
            elif number == positive or (mask_false_negatives and number in result.positives[pair.query]):
                result.num_positive_negatives += 1
            else:
                negatives[number] = None
        if drop_incomplete and len(negatives) < num_hard_negatives:
            result.num_dropped += 1
            continue
        result.rows.append(TrainingRow(pair.line, pair.query, positive, list(negatives)))
    return result


@dataclass(frozen=True, slots=True)
class BatchOrder:
    """Which rows make up the global batch of a step: a pure function of (seed, epoch).

    Attributes:
        num_rows: Rows of the training set.
        global_batch: Rows of a step, all ranks together.
        seed: Of the shuffles.
    """

    num_rows: int
    global_batch: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_rows < self.global_batch:
            raise ValueError(
                f"{self.num_rows} usable rows do not fill one global batch of {self.global_batch} "
                "(--batch-size x ranks); use a smaller --batch-size or more rows"
            )

    @property
    def steps_per_epoch(self) -> int:
        """Whole global batches in an epoch; the short last one is dropped."""
        return self.num_rows // self.global_batch

    def epoch(self, step: int) -> int:
        """Returns the epoch of a step, both from 0."""
        return step // self.steps_per_epoch

    def rows(self, step: int) -> np.ndarray:
        """Returns the (global_batch,) row numbers of a step; rank r takes the r-th slice of --batch-size rows."""
        epoch, place = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng([self.seed, epoch]).permutation(self.num_rows)
        return order[place * self.global_batch : (place + 1) * self.global_batch]


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
    """

    def __init__(self, matrix: Any, numbers: Sequence[int]):
        self.matrix = matrix
        self._rows = np.full(max(numbers, default=-1) + 1, -1, dtype=np.int64)
        self._rows[list(numbers)] = np.arange(len(numbers))

    def __getitem__(self, numbers: Sequence[int] | np.ndarray) -> torch.Tensor:
        """Returns the (documents, D) fp32 vectors of document numbers."""
        rows = self._rows[np.asarray(numbers)]
        assert (rows >= 0).all(), f"{(rows < 0).sum()} documents have no vector"
        return torch.from_numpy(self.matrix[rows])


@dataclass(frozen=True, slots=True)
class BatchFailure:
    """Why a worker could not make a batch; travels as a value, so that the message stays one sentence."""

    reason: str


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
        encoded = self._encode(documents) if self.vectors is None else self.vectors[documents]
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
                return BatchFailure(f"{path} can no longer be read ({error}); it was good when the run began")
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


def load_batches(
    dataset: StepDataset, first_step: int, last_step: int, num_workers: int, device: torch.device
) -> Iterator[Batch]:
    """Yields the batches of steps first_step .. last_step - 1, decoded and encoded ahead in worker processes.

    Raises:
        ValueError: A worker could not make a batch.
    """
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=range(first_step, last_step),
        num_workers=num_workers,
        worker_init_fn=leave_signals_to_the_rank,
        pin_memory=device.type == "cuda",
    )
    for batch in loader:
        if isinstance(batch, BatchFailure):
            raise ValueError(batch.reason)
        yield batch


class ItemDataset(Dataset):
    """Encoded queries or documents, one a place; what cannot be read is a `BatchFailure`."""

    def __init__(self, processor: BiQwen3Processor, kind: str, sources: Sequence[str], max_image_pixels: int):
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
            return BatchFailure(f"{source} can no longer be read ({error}); it was good when the run began")

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
    loader = DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=places,
        num_workers=min(num_workers, -(-len(places) // batch_size)),
        collate_fn=dataset.collate,
        worker_init_fn=leave_signals_to_the_rank,
        pin_memory=device.type == "cuda",
    )
    for inputs in loader:
        if isinstance(inputs, BatchFailure):
            raise ValueError(inputs.reason)
        yield inputs
