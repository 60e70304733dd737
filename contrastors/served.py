"""What a search service returned, as hits of a query: positives recognised, files found, copies told apart.

A served index may return relative paths, other spellings, or files that are not on this machine at all.
"""

from __future__ import annotations

import functools
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from contrastors.candidates import content_now, file_content
from contrastors.negatives import Hit
from contrastors.records import POSITIVE, PathResolver, relocate_row

IDS = ("article_id", "tile_index", "chunk_index")


@dataclass(frozen=True, slots=True)
class ServedPositive:
    """What is known of a row's positive.

    Attributes:
        path: That can be opened.
        text: As the row has it.
        ids: (article_id, tile_index, chunk_index), or None.
        content: Content hash of its image; "" where it is not known.
    """

    path: str
    text: str
    ids: tuple[str, ...] | None
    content: str = ""


def read_ids(data: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Returns (article_id, tile_index, chunk_index) of a row or hit as texts; None where one is missing."""
    values = [data.get(name) for name in IDS]
    return None if any(value is None for value in values) else tuple(map(str, values))


def normal_path(path: str) -> str:
    """Returns a path without `.`, leading `..` and doubled slashes, in Unicode's composed form."""
    path = unicodedata.normalize("NFC", os.path.normpath(path))
    while path.startswith("../"):
        path = path[3:]
    return path


def _suffixes(path: str) -> list[str]:
    parts = normal_path(path).strip("/").split("/")
    return ["/".join(parts[start:]) for start in range(len(parts))]


class PositiveMatcher:
    """Recognises positives among hits, whose paths may be relative to a folder we do not know.

    The ids decide where both sides have them. Otherwise the path of the hit must be the end of the positive's path, or
    the path that the row gives relatively must be the end of the hit's. Then only the bytes of the hit's file, if it is
    here, tell that it is another document.
    """

    def __init__(self, positives: Iterable[ServedPositive]):
        self.positives = list(positives)
        self._by_end: dict[str, set[int]] = {}
        self._by_text: dict[str, set[int]] = {}
        for number, positive in enumerate(self.positives):
            for path in {positive.path, os.path.realpath(positive.path)}:
                for end in _suffixes(path):
                    self._by_end.setdefault(end, set()).add(number)
            if not os.path.isabs(positive.text):
                self._by_text.setdefault(normal_path(positive.text), set()).add(number)

    def find(self, hit: Mapping[str, Any], file: str | None = None) -> set[int]:
        """Returns the numbers of the positives that a hit is, or might be, in order of construction.

        Args:
            hit: As the service sent it.
            file: Of the hit; None where it is not on this machine.
        """
        ids, path = read_ids(hit), hit["path"]
        found = set(self._by_end.get(normal_path(path).strip("/"), ()))
        # The folder of a relative path is a guess: where the whole path fits, it may just have missed the positive's.
        sure = set() if os.path.isabs(path) else set(found)
        for end in _suffixes(path):
            found |= self._by_text.get(end, set())
        if file is not None:
            found = {number for number in found if number in sure or not _differs(file, self.positives[number])}
        if ids is not None:
            found = {number for number in found if self.positives[number].ids in (None, ids)}
            found |= {number for number, positive in enumerate(self.positives) if positive.ids == ids}
        return found


class HitResolver:
    """Finds the files of hits with relative paths: where recognised positives lie, else in the given folder."""

    def __init__(self, folder: str):
        self.folder = folder
        self._learned: Counter[str] = Counter()
        self._known: dict[str, str | None] = {}

    def learn(self, path: str, positive: str) -> None:
        """Notes that a hit with this path is the file of this positive."""
        end, whole = normal_path(path), os.path.normpath(positive)
        if not os.path.isabs(end) and unicodedata.normalize("NFC", whole).endswith("/" + end):
            self._learned[os.sep.join(whole.split(os.sep)[: -len(end.split("/"))]) or os.sep] += 1

    def __call__(self, path: str) -> str | None:
        """Returns the file of a hit, None where it is not on this machine."""
        if path not in self._known:
            folders = [""] if os.path.isabs(path) else [*(f for f, _ in self._learned.most_common(3)), self.folder]
            found = (os.path.join(folder, path) for folder in folders)
            self._known[path] = next((file for file in found if os.path.isfile(file)), None)
        return self._known[path]


class ServedHits:
    """The replies of a service, one list a query.

    Args:
        replies: Hits of each query, best first; None where the search failed.
        positives: Positives of each query.
        documents: Document number of each of them.
        folder: Folder of the input, where relative paths are looked for first.
        output_folder: Relative paths of files that are found lead there from here.
    """

    def __init__(
        self,
        replies: Sequence[list[dict[str, Any]] | None],
        positives: Sequence[Sequence[ServedPositive]],
        documents: Sequence[Sequence[int]],
        folder: str,
        output_folder: str,
    ):
        self.replies, self.documents, self.output_folder = replies, documents, output_folder
        self.matchers = [PositiveMatcher(known) for known in positives]
        self.resolve = HitResolver(folder)
        for matcher, reply in zip(self.matchers, replies, strict=True):
            for hit in reply or ():
                for number in matcher.find(hit):
                    self.resolve.learn(hit["path"], matcher.positives[number].path)
        self._moved: dict[str, str] = {}

    def hits(self, query: int) -> list[Hit]:
        """Returns the hits of a query, best first."""
        matcher, reply = self.matchers[query], self.replies[query]
        files = [self.resolve(hit["path"]) for hit in reply]
        contents = equal_sized_contents([*files, *(positive.path for positive in matcher.positives)])
        found = []
        for hit, file in zip(reply, files, strict=True):
            content = contents.get(file)
            same = {n for n, p in enumerate(matcher.positives) if content and contents.get(p.path) == content}
            documents = {self.documents[query][number] for number in matcher.find(hit, file) | same}
            entry = {"path": self._move(hit["path"]), "score": hit["score"]}
            entry |= {name: hit[name] for name in IDS if hit.get(name) is not None}
            identity = content or normal_path(os.path.realpath(file) if file else hit["path"])
            articles = [str(hit["article_id"])] if hit.get("article_id") is not None else []
            found.append(Hit(entry, identity, documents, articles))
        return found

    def score(self, row: Any) -> None:
        """Returns None: the score of a positive that was not retrieved is not known here."""
        return None

    def _move(self, path: str) -> str:
        if path not in self._moved:
            file = self.resolve(path)
            if file is not None and not os.path.isabs(path):
                resolver = PathResolver(file.removesuffix(path) + "x")
                self._moved[path] = relocate_row({POSITIVE: path}, resolver, self.output_folder)[POSITIVE]
            else:
                self._moved[path] = path
        return self._moved[path]


def _differs(file: str, positive: ServedPositive) -> bool:
    """Tells whether a file and a positive are both known by content, and are not the same."""
    if not positive.content or os.path.realpath(file) == os.path.realpath(positive.path):
        return False
    return content_now(file) not in ("", positive.content)


def equal_sized_contents(files: Iterable[str | None]) -> dict[str, str]:
    """Returns the content hashes of those files that share their size with another one: only they can be copies."""
    by_size: dict[int, set[str]] = {}
    for file in files:
        size = None if file is None else _file_size(file)
        if size is not None:
            by_size.setdefault(size, set()).add(file)
    return {file: file_content(file) for group in by_size.values() if len(group) > 1 for file in group}


@functools.lru_cache(maxsize=1_000_000)
def _file_size(file: str) -> int | None:
    return os.path.getsize(file) if os.path.isfile(file) else None
