"""Checks every image of a data set once, before the first step, and remembers the result.

A fact is remembered by (path, size, mtime) in `.image_facts.jsonl` in the folder of the JSONL. Only good images are
remembered; a bad one is looked at again on the next start, since people mend files.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from contrastors.images import MAX_IMAGE_PIXELS, BadImage, check_size, content_hash, open_image, read_image_bytes
from contrastors.records import Pair, dump_json

CACHE_NAME = ".image_facts.jsonl"
STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM}
_INLINE = 64  # below so many files starting worker processes costs more than it gives


@dataclass(frozen=True, slots=True)
class ImageFact:
    """What is known of one file.

    Attributes:
        path: As asked for.
        content: Content hash, the identity of the document; "" where the file is bad.
        width: Pixels of the upright picture.
        height: Pixels.
        reason: Why the file cannot be used; "" where it can.
    """

    path: str
    content: str
    width: int
    height: int
    reason: str

    @property
    def ok(self) -> bool:
        """Whether the image can be used."""
        return not self.reason


def check_image(path: str, max_image_pixels: int = MAX_IMAGE_PIXELS) -> ImageFact:
    """Returns the fact of one file, after decoding it whole."""
    try:
        data = read_image_bytes(path)
        width, height = open_image(data, max_image_pixels).size
    except BadImage as error:
        return ImageFact(path, "", 0, 0, str(error))
    return ImageFact(path, content_hash(data), width, height, "")


def _check(task: tuple[str, int]) -> ImageFact:
    return check_image(*task)


def check_images(
    paths: Iterable[str],
    max_image_pixels: int = MAX_IMAGE_PIXELS,
    num_workers: int = 4,
    on_progress: Callable[[int], None] = lambda n: None,
) -> list[ImageFact]:
    """Returns the facts of many files, in order; decoding runs in worker processes where there are many.

    Args:
        paths: Files.
        max_image_pixels: Larger pictures are bad images.
        num_workers: Processes; 0 = in this one.
        on_progress: Called with 1 after each file.

    Raises:
        ValueError: The system killed a worker process.
    """
    tasks = [(path, max_image_pixels) for path in paths]
    facts = []
    if num_workers == 0 or len(tasks) <= _INLINE:
        for task in tasks:
            facts.append(_check(task))
            on_progress(1)
        return facts
    # spawn: this process may hold a CUDA context or communication threads, which do not survive a fork
    pool = ProcessPoolExecutor(num_workers, mp_context=multiprocessing.get_context("spawn"))
    try:
        # Children inherit the mask: a signal to the whole group is this process's to act on, not theirs to print about.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        results = pool.map(_check, tasks, chunksize=16)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        for fact in results:
            facts.append(fact)
            on_progress(1)
    except BrokenProcessPool as error:
        raise ValueError(
            "a process that checks images was killed, most likely for memory; start with fewer --num-workers"
        ) from error
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    return facts


class FactCache:
    """Facts of good images by (path, size, mtime), kept in a JSONL beside the data; an unreadable line is ignored."""

    def __init__(self, folder: str | Path):
        self.file = Path(folder) / CACHE_NAME
        self._facts: dict[tuple[str, int, int], tuple[str, int, int]] = {}
        if self.file.exists():
            for line in self.file.read_bytes().split(b"\n"):
                try:
                    path, size, mtime, content, width, height = json.loads(line)
                    if isinstance(content, str) and type(width) is type(height) is int:
                        self._facts[path, size, mtime] = content, width, height
                except (ValueError, TypeError):
                    continue

    def _key(self, path: str) -> tuple[str, int, int] | None:
        try:
            status = os.stat(path)
        except (OSError, ValueError):
            return None
        return os.path.relpath(path, self.file.parent), status.st_size, status.st_mtime_ns

    def get(self, path: str, max_image_pixels: int) -> ImageFact | None:
        """Returns the remembered fact of an unchanged file, judged against today's pixel limit."""
        found = self._facts.get(self._key(path))
        if found is None:
            return None
        content, width, height = found
        try:
            check_size(width, height, max_image_pixels)
        except BadImage as error:
            return ImageFact(path, "", width, height, str(error))
        return ImageFact(path, content, width, height, "")

    def add(self, facts: Iterable[ImageFact]) -> bool:
        """Appends the good ones to the file; returns False where the folder cannot be written."""
        lines = []
        for fact in facts:
            key = self._key(fact.path) if fact.ok else None
            if key is not None and key not in self._facts:
                self._facts[key] = fact.content, fact.width, fact.height
                lines.append(dump_json([*key, fact.content, fact.width, fact.height]) + "\n")
        if not lines:
            return True
        try:
            with open(self.file, "a", encoding="utf-8") as file:
                file.write("".join(lines))
        except OSError:
            return False
        return True


def image_paths(pairs: Iterable[Pair], with_negatives: bool = True) -> list[str]:
    """Returns every distinct image path of the rows, in the order of first use."""
    paths: dict[str, None] = {}
    for pair in pairs:
        paths[pair.positive] = None
        if with_negatives:
            paths.update(dict.fromkeys(pair.negatives))
    return list(paths)
