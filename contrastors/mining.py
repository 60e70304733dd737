"""What mining works on: rows and corpus by document number, and what a search of the corpus found for each query."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from contrastors.corpus import ARTICLE, Tile, read_article_id, read_corpus
from contrastors.data import NO_DOCUMENT, DocumentTable, validate_images
from contrastors.distributed import World
from contrastors.embeddings import EmbeddingMatrix
from contrastors.index import search
from contrastors.negatives import Hit
from contrastors.records import POSITIVE, BadRow, Pair, PathResolver, read_jsonl, read_pairs, relocate_row
from contrastors.runlog import progress
from contrastors.served import PositiveMatcher, ServedPositive, read_ids


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a query that can be mined for.

    Attributes:
        line: Line of the file, from 1.
        query: Number of its text.
        document: Number of its positive; below NO_DOCUMENT where its image cannot be used.
        path: Of the positive, can be opened.
        text: The same as the row has it.
        ids: (article_id, tile_index, chunk_index) of the positive, or None.
    """

    line: int
    query: int
    document: int
    path: str
    text: str
    ids: tuple[str, ...] | None


@dataclass(slots=True)
class MiningData:
    """The rows, and the corpus where it is here.

    Attributes:
        num_rows: Rows of the file.
        resolver: Finds the paths of the rows.
        table: Numbers of documents: the corpus first, then positives outside of it.
        tile_resolver: Finds the paths of the corpus.
        num_tiles: Entries of the corpus, with copies and unusable ones.
        tiles: The first tile of each document of the corpus.
        contents: Content hash of each document of the corpus.
        rows: Row number of the file -> usable row.
        unreadable: Rows whose image cannot be used and whose query has others; each positive has a number of its own.
        doubtful: Query -> tiles that may be one of those positives under another path.
        queries: Distinct texts.
        positives: Documents known to answer each query.
        articles: Document -> every article_id known of it, text -> as written.
        bad_rows: Rows whose positive cannot be used, or is not in the corpus.
        failed_rows: Rows whose search failed.
        bad_tiles: Unusable tiles of the corpus.
    """

    num_rows: int
    resolver: PathResolver
    table: DocumentTable
    tile_resolver: PathResolver
    num_tiles: int
    tiles: list[Tile] = field(default_factory=list)
    contents: list[str] = field(default_factory=list)
    rows: dict[int, Row] = field(default_factory=dict)
    unreadable: list[Row] = field(default_factory=list)
    doubtful: dict[int, set[int]] = field(default_factory=dict)
    queries: list[str] = field(default_factory=list)
    positives: list[set[int]] = field(default_factory=list)
    articles: dict[int, dict[str, Any]] = field(default_factory=dict)
    bad_rows: list[BadRow] = field(default_factory=list)
    failed_rows: list[BadRow] = field(default_factory=list)
    bad_tiles: list[BadRow] = field(default_factory=list)

    def name_article(self, document: int, article_id: str | int | None) -> None:
        """Notes the article of a document; 7 and "7" are one."""
        if article_id is not None:
            self.articles.setdefault(document, {}).setdefault(str(article_id), article_id)

    def served_positive(self, row: Row) -> ServedPositive:
        """Returns what is known of a row's positive."""
        content = self.table.content(row.document) if row.document > NO_DOCUMENT else ""
        return ServedPositive(row.path, row.text, row.ids, content)


def load_mining_data(
    source: str, corpus: str | None, max_image_pixels: int, num_workers: int, world: World
) -> MiningData:
    """Returns rows and corpus, the same on every rank, after looking at each image.

    Collective: every rank must call it, with equal arguments.

    Args:
        source: JSONL of the rows.
        corpus: What `read_corpus` takes; None = all positives.
        max_image_pixels: Larger pictures are bad images.
        num_workers: Processes of this rank.
        world: Ranks.

    Raises:
        RecordError: A file breaks the data format.
    """
    pairs, resolver = read_pairs(source)
    records = [
        (r.data[POSITIVE], read_article_id(f"{source}, line {r.line}", r.data), read_ids(r.data))
        for r in read_jsonl(source)
    ]
    given = [Tile(p.line, text, p.positive, article) for p, (text, article, _) in zip(pairs, records, strict=True)]
    tiles, tile_resolver = read_corpus(corpus) if corpus else (given, resolver)
    paths = list(dict.fromkeys(tile.path for tile in [*tiles, *given]))
    with progress(len(paths) // world.size, "checking images", world.is_main) as bar:
        facts = validate_images(paths, resolver.folder, max_image_pixels, num_workers, world, bar.update)
    data = MiningData(len(pairs), resolver, DocumentTable(facts), tile_resolver, len(tiles))
    for tile in tiles:
        document = data.table.number(tile.path)
        if document == NO_DOCUMENT:
            data.bad_tiles.append(BadRow(tile.line, tile.path, data.table.reason(tile.path)))
            continue
        if document == len(data.tiles):
            data.tiles.append(tile)
            data.contents.append(facts[tile.path].content)
        data.name_article(document, tile.article_id)
    numbers: dict[str, int] = {}
    unreadable = []
    for pair, (text, article, ids) in zip(pairs, records, strict=True):
        document = data.table.number(pair.positive)
        if document == NO_DOCUMENT:
            data.bad_rows.append(BadRow(pair.line, pair.positive, data.table.reason(pair.positive)))
            unreadable.append((pair, text, ids))
            continue
        data.name_article(document, article)
        query = numbers.setdefault(pair.query, len(numbers))
        if query == len(data.queries):
            data.queries.append(pair.query)
            data.positives.append(set())
        data.positives[query].add(document)
        if document >= len(data.tiles):
            data.bad_rows.append(BadRow(pair.line, pair.positive, f"is no tile of --corpus {corpus}"))
            continue
        data.rows[pair.index] = Row(pair.line, query, document, pair.positive, text, ids)
    _add_unreadable(data, numbers, unreadable)
    if corpus:
        _find_doubtful(data, tiles)
    return data


def _add_unreadable(data: MiningData, numbers: dict[str, int], unreadable: list[tuple[Pair, str, Any]]) -> None:
    """Notes the rows whose image cannot be used, where other rows have their query."""
    for number, (pair, text, ids) in enumerate(unreadable, start=1):
        if pair.query in numbers:
            row = Row(pair.line, numbers[pair.query], NO_DOCUMENT - number, pair.positive, text, ids)
            data.unreadable.append(row)
            data.positives[row.query].add(row.document)


def _find_doubtful(data: MiningData, tiles: list[Tile]) -> None:
    """Notes which tiles have the end of the path of an unreadable positive: its file may have moved, or be broken."""
    matcher = PositiveMatcher(map(data.served_positive, data.unreadable))
    for tile in tiles if data.unreadable else ():
        for number in matcher.find({"path": tile.text}):
            data.doubtful.setdefault(data.unreadable[number].query, set()).add(data.table.number(tile.path))


class LocalHits:
    """What a search of the corpus found.

    Args:
        data: Rows and corpus.
        queries: (Q, D) fp32.
        documents: (C, D) fp32.
        n_docs: Hits of a query that are no positives.
        output_folder: Relative paths of the corpus lead there from here.
        options: Of `contrastors.index.search`.
    """

    def __init__(
        self, data: MiningData, queries: np.ndarray, documents: EmbeddingMatrix, n_docs: int, output_folder: str,
        **options: Any,
    ):  # fmt: skip
        self.data, self.queries, self.documents, self.output_folder = data, queries, documents, output_folder
        # Positives are no candidates: as many more are looked for as a query has.
        self.depths = [n_docs + len(positives) for positives in data.positives]
        self.scores, self.numbers = search(queries=queries, corpus=documents, k=max(self.depths), **options)
        self._paths: dict[int, str] = {}

    def hits(self, query: int) -> list[Hit]:
        """Returns the hits of a query, best first."""
        found = []
        rows = slice(0, self.depths[query])
        for number, score in zip(self.numbers[query, rows].tolist(), self.scores[query, rows].tolist(), strict=True):
            if number >= 0:
                articles = self.data.articles.get(number, {})
                entry = {"path": self._path(number), "score": score}
                entry |= {ARTICLE: next(iter(articles.values()))} if articles else {}
                found.append(Hit(entry, number, (number,), articles))
        return found

    def score(self, row: Row) -> float | None:
        """Returns the score of a row's positive, whether it was retrieved or not."""
        score = float(self.queries[row.query] @ self.documents[[row.document]][0])
        return score if math.isfinite(score) else None

    def _path(self, number: int) -> str:
        if number not in self._paths:
            row = {POSITIVE: self.data.tiles[number].text}
            self._paths[number] = relocate_row(row, self.data.tile_resolver, self.output_folder)[POSITIVE]
        return self._paths[number]
