"""One HTML page to look at hard negatives: pictures, scores, verdicts, and the false-negative rate over a threshold.

The page is one file that asks no network for anything: `report.html` is its template, the rows are a JSON block in it,
the pictures are data URLs, each distinct one once. The page's script writes texts of the rows as text, never as HTML.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import quote

from contrastors.candidates import MISSING, UNREADABLE, file_content
from contrastors.images import MAX_IMAGE_PIXELS, BadImage, open_image
from contrastors.records import CANDIDATES, NEGATIVES, POSITIVE, QUERY, PathResolver, dump_json, write_text
from contrastors.verdicts import CORRECT, VERDICTS

MAX_ROWS = 300
THUMBNAIL_SIDE = 128
MAX_PICTURES_SIZE = 13_000_000  # characters of all data URLs: 1,700 tiles of dense text, more of calmer ones
MAX_ANSWER_LENGTH = 400
_QUALITY = 60  # WebP: about 5 kB for a tile of dense text, which nobody can read at 128 pixels anyway

# What became of a document; the page filters by these words.
HARD_NEGATIVE, DROPPED, KNOWN_POSITIVE, NOT_USED = "hard negative", "dropped", "positive", "not used"
NOT_JUDGED = "not judged"


@dataclass(slots=True)
class Card:
    """One document of a row as the page shows it.

    Attributes:
        file: Where it lies; not on the page.
        path: As the row writes it.
        position: Place among the retrieved documents, from 1; None for the positive and where it was not retrieved.
        score: Similarity to the query, where known.
        use: What became of it.
        verdict: Of the judge; `not judged` where nobody asked it.
        is_false_negative: Verdict as the estimate counts it; None = does not count.
        remark: Why there is no verdict, or the answer that was judged.
        link: The file, relative to the folder of the page; "" where there is none.
        picture: Number of the thumbnail; None where there is none.
        problem: Why there is none.
    """

    file: str
    path: str
    position: int | None
    score: float | None
    use: str
    verdict: str = NOT_JUDGED
    is_false_negative: bool | None = None
    remark: str = ""
    link: str = ""
    picture: int | None = None
    problem: str = ""

    def add_review(self, review: dict[str, Any] | None) -> None:
        """Takes over what the judge said, if it was asked."""
        if review is None:
            return
        self.verdict = review["verdict"]
        if self.verdict in VERDICTS and self.use != KNOWN_POSITIVE:
            self.is_false_negative = self.verdict == CORRECT
        if self.verdict not in (MISSING, UNREADABLE):  # the place of the picture tells what is wrong with these
            self.remark = review["reason"] or review["answer"]
        if self.remark == self.verdict:
            self.remark = ""
        if len(self.remark) > MAX_ANSWER_LENGTH:
            self.remark = self.remark[:MAX_ANSWER_LENGTH] + "…"

    def add_picture(self, thumbnails: Thumbnails, folder: str) -> None:
        """Looks for the thumbnail; links to the file from a page in `folder`."""
        self.picture, self.problem = thumbnails.add(self.file)
        if os.path.isfile(self.file):
            # Quoted, a colon or quotation mark in a name can be no scheme and end no attribute.
            self.link = quote(os.fsencode(os.path.relpath(os.path.realpath(self.file), folder)))

    def shown(self) -> dict[str, Any]:
        """Returns what the page holds."""
        found = asdict(self)
        del found["file"]
        return found


class Thumbnails:
    """Small copies of pictures as data URLs, one for all files of equal content, until they fill the page."""

    def __init__(self, side: int, max_image_pixels: int):
        self.urls: list[str] = []
        self._side, self._max_image_pixels = side, max_image_pixels
        self._size_left = MAX_PICTURES_SIZE
        self._found: dict[str, tuple[int | None, str]] = {}

    def add(self, path: str) -> tuple[int | None, str]:
        """Returns the number of a file's thumbnail, or None and the reason why there is none."""
        content = file_content(path)
        if content not in self._found:
            if self._size_left <= 0:
                return None, "left out to keep this page small"
            try:
                url = self._encode(path)
            except BadImage as error:
                self._found[content] = None, str(error)
            else:
                self._size_left -= len(url)
                self._found[content] = len(self.urls), ""
                self.urls.append(url)
        return self._found[content]

    def _encode(self, path: str) -> str:
        image, data = open_image(path, self._max_image_pixels), BytesIO()
        image.thumbnail((self._side, self._side))
        image.save(data, "WEBP", quality=_QUALITY)
        return "data:image/webp;base64," + base64.b64encode(data.getvalue()).decode()


def write_report(
    path: str | Path,
    rows: Iterable[dict[str, Any]],
    resolver: PathResolver,
    reviews: Iterable[Iterable[dict[str, Any]]] | None = None,
    *,
    title: str,
    positives_of: Callable[[str], Iterable[str]] | None = None,
    num_rows: int | None = None,
    max_rows: int = MAX_ROWS,
    thumbnail_side: int = THUMBNAIL_SIDE,
    max_image_pixels: int = MAX_IMAGE_PIXELS,
) -> int:
    """Writes the page and returns the number of rows on it.

    Args:
        path: The HTML file.
        rows: Rows with `query`, `chunk_path`, `retrieve_top20` and, for what was chosen, `neg_chunk_paths`.
        resolver: Of the file that the rows come from.
        reviews: For each row, in the same order, its reviews; None = nothing was judged.
        title: What the rows are, for people.
        positives_of: Returns the paths of all positives of a query (default: the row's own).
        num_rows: How many rows there are in all, where that is known.
        max_rows: Rows on the page; the first ones.
        thumbnail_side: Pixels of a thumbnail's longer side.
        max_image_pixels: Larger pictures are not shown.
    """
    shown: list[tuple[str, list[Card]]] = []
    groups = itertools.repeat(()) if reviews is None else reviews
    for row, row_reviews in itertools.islice(zip(rows, groups, strict=False), max_rows):
        positives = {row[POSITIVE], *(positives_of(row[QUERY]) if positives_of else ())}
        shown.append((row[QUERY], _make_cards(row, row_reviews, resolver, positives)))
    thumbnails, folder = Thumbnails(thumbnail_side, max_image_pixels), os.path.dirname(os.path.abspath(path))
    for card in sorted(itertools.chain.from_iterable(cards for _, cards in shown), key=_importance):
        card.add_picture(thumbnails, folder)
    data = {
        "title": title,
        "num_rows": num_rows,
        "is_judged": reviews is not None,
        "rows": [
            {"query": query, "positive": cards[0].shown(), "candidates": [card.shown() for card in cards[1:]]}
            for query, cards in shown
        ],
        "pictures": thumbnails.urls,
    }
    write_text(path, _fill_template(data))
    return len(shown)


def _make_cards(
    row: dict[str, Any], reviews: Iterable[dict[str, Any]], resolver: PathResolver, positives: Iterable[str]
) -> list[Card]:
    """Returns the cards of a row: its positive, its candidates in order, hard negatives from elsewhere."""

    def card(path: str, position: int | None, score: float | None, use: str) -> Card:
        return Card(resolver(path), path, position, score, use)

    known = {file_content(resolver(path)) for path in positives}
    chosen = list(row.get(NEGATIVES) or ())
    cards = [card(row[POSITIVE], None, row.get("positive_score"), KNOWN_POSITIVE)]
    by_position = {review["position"]: review for review in reviews}
    cards[0].add_review(by_position.get(None))
    for place, entry in enumerate(row.get(CANDIDATES) or ()):
        path, use = entry["path"], NOT_USED
        if path in chosen:
            chosen.remove(path)
            use = HARD_NEGATIVE
        elif file_content(resolver(path)) in known:
            use = KNOWN_POSITIVE
        rank = entry.get("rank")  # other tools may give it as text
        cards.append(card(path, rank if isinstance(rank, int) else place + 1, entry.get("score"), use))
        cards[-1].add_review(by_position.get(place))
        if cards[-1].is_false_negative and use == NOT_USED:
            cards[-1].use = DROPPED
    return cards + [card(path, None, None, HARD_NEGATIVE) for path in chosen]


def _importance(card: Card) -> tuple[bool, int]:
    """Returns a key that sorts first what must have its picture if not all of them fit: what was used or judged."""
    return card.use == NOT_USED and card.verdict == NOT_JUDGED, card.position or 0


def _fill_template(data: dict[str, Any]) -> str:
    template = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    parts = {"data": dump_json(data).replace("<", "\\u003c")}  # without a < no text can end the block it stands in
    for name in ("style", "script"):
        source = re.search(rf"<{name}>(.*?)</{name}>", template, re.DOTALL)[1]
        parts[f"{name}_hash"] = "sha256-" + base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)
