"""Training rows: documents by content, what can be trained on, and the order of rows.

Every rank holds all rows and knows the whole global batch of a step, so positives of other ranks are masked without
asking them. The order is a pure function of (seed, epoch): nothing of it needs saving.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from contrastors.distributed import World, from_main, gather_objects, require_agreement
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
        paths: Distinct files; ranks that see others are told apart.
        cache_folder: Folder of the JSONL, where facts are remembered.
        max_image_pixels: Larger pictures are bad images.
        num_workers: Processes of this rank.
        world: Ranks.
        on_progress: Called with 1 after each file of this rank.
    """
    require_agreement({"the list of images": _hash_paths(paths)})
    cache = FactCache(cache_folder)
    known = from_main({path: fact for path in paths if (fact := cache.get(path, max_image_pixels))})
    unknown = [path for path in paths if path not in known]
    facts = check_images(unknown[world.rank :: world.size], max_image_pixels, num_workers, on_progress)
    found = [fact for share in gather_objects(facts) for fact in share]
    if world.is_main:
        cache.add(found)
    return known | {fact.path: fact for fact in found}


def _hash_paths(paths: Sequence[str]) -> str:
    return hashlib.blake2b("\0".join(paths).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


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


def digest_rows(documents: DocumentTable, rows: Iterable[tuple[str, Sequence[int]]]) -> str:
    """Returns a hash of queries with the numbers of their documents, and of the documents' contents."""
    digest = hashlib.blake2b(digest_size=16)
    for number in range(len(documents)):
        digest.update(bytes.fromhex(documents.content(number)))
    for query, numbers in rows:
        digest.update(query.encode() + b"\0")
        digest.update(np.array([*numbers, NO_DOCUMENT], dtype="<i8").tobytes())
    return digest.hexdigest()


@functools.lru_cache(maxsize=2)
def _shuffle(seed: int, epoch: int, num_rows: int) -> np.ndarray:
    """Returns the order of an epoch; kept, since each of its steps asks for a few of its rows."""
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


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
        order = _shuffle(self.seed, epoch, self.num_rows)
        return order[place * self.global_batch : (place + 1) * self.global_batch]
