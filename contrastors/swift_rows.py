"""Rows of ms-swift's embedding task: how a query and its tiles become one, and what must hold of them before training.

A row has `messages` (system = query instruction, user = query), `positive_messages` and `positive_images`, and where it
has hard negatives `negative_messages` and `negative_images`; one conversation and one list of images a document.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from PIL.ExifTags import Base as ExifTag

from contrastors.images import BadImage, check_size
from contrastors.records import Record, RecordError, read_jsonl

# What swift's template reads in a user's text: control tokens, <img>FILE</img> (it opens the file and adds slots), a
# last <start-image> (it vanishes), its own placeholders. A literal <image> stays text where the row has no image.
_MARKER = re.compile(r"<(?=\|[^<>\s]*\|>|img>|start-image>)|\{(?=\{ROUND[01]\}\})")


def break_markers(text: str) -> str:
    """Returns the text with a space inside everything that swift would not read as text."""
    return _MARKER.sub(r"\g<0> ", text)


def make_row(query: str, documents: list[str], query_instruction: str, document_instruction: str) -> dict[str, Any]:
    """Returns the row of one query.

    Args:
        query: Its text.
        documents: Paths: the positive, then the hard negatives.
        query_instruction: System message of the query.
        document_instruction: System message of every document.
    """

    def conversation(instruction: str, text: str) -> list[dict[str, str]]:
        return [{"role": "system", "content": instruction}, {"role": "user", "content": text}]

    row: dict[str, Any] = {"messages": conversation(query_instruction, break_markers(query))}
    for kind, paths in (("positive", documents[:1]), ("negative", documents[1:])):
        if paths:
            row[f"{kind}_messages"] = [conversation(document_instruction, "<image>") for _ in paths]
            row[f"{kind}_images"] = [[path] for path in paths]
    return row


def opens_alike(path: str) -> bool:
    """Tells whether swift, which converts to RGB and no more, shows the picture that `open_image` does.

    It knows nothing of orientation, lays transparency on whatever colour lies under it, and clips 16-bit samples. It
    also strips paths, and its data loader takes no name that is not UTF-8.

    Args:
        path: A good image.
    """
    try:
        path.encode("utf-8")
    except UnicodeEncodeError:
        return False
    with Image.open(path) as image:
        is_upright = image.getexif().get(ExifTag.Orientation, 1) == 1
        return is_upright and not image.has_transparency_data and image.mode[0] != "I" and path == path.strip()


@dataclass(frozen=True, slots=True)
class SwiftRow:
    """What the checks need of a row.

    Attributes:
        line: Line of the file, from 1.
        query: Text of the query.
        images: Paths of the positive, then of the hard negatives.
        data: The row itself.
    """

    line: int
    query: str
    images: list[str]
    data: dict[str, Any]


def read_swift_rows(path: str | Path, num_hard_negatives: int) -> list[SwiftRow]:
    """Returns the rows of a converted JSONL after checking what swift would stumble over in mid-training, or hide.

    Args:
        path: JSONL of convert_data_for_swift.py.
        num_hard_negatives: Every row needs so many: with fewer swift repeats some, with none it fails.

    Raises:
        RecordError: The file holds no row, or a row has another form, too few negatives, or an image that is missing.
    """
    rows, known = [], set()
    for record in read_jsonl(path):
        row = _parse(path, record)
        found = len(row.images) - 1
        if found < num_hard_negatives:
            raise RecordError(
                f"{path}, line {row.line}: {found} hard negatives, --num-hard-negatives {num_hard_negatives} needs as "
                f"many in every row; convert it with python convert_data_for_swift.py --num-hard-negatives "
                f"{num_hard_negatives}"
            )
        for image in row.images:
            if image not in known:
                _check_image(path, row.line, image)
                known.add(image)
        rows.append(row)
    if not rows:
        raise RecordError(f"{path}: holds no rows")
    return rows


def _parse(path: str | Path, record: Record) -> SwiftRow:
    data = record.data
    try:
        query = data["messages"][-1]["content"]
        images = [image for (image,) in [*data["positive_images"], *(data.get("negative_images") or [])]]
        counts = [len(data.get(f"{kind}_messages") or []) for kind in ("positive", "negative")]
    except (KeyError, TypeError, ValueError, IndexError):
        query, images, counts = None, [], [0, 0]
    texts = [query, *images]
    if not all(isinstance(text, str) for text in texts) or counts[0] != 1 or sum(counts) != len(images):
        raise RecordError(
            f"{path}, line {record.line}: not a row of convert_data_for_swift.py (messages, positive_messages with "
            "positive_images, negative_messages with negative_images, one image each); convert the file first"
        )
    return SwiftRow(record.line, query, images, data)


def _check_image(path: str | Path, line: int, image: str) -> None:
    """Looks at the file's header only: the converter has decoded every image."""
    try:
        with Image.open(image) as opened:
            check_size(*opened.size)
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        reason = str(error) if isinstance(error, BadImage) else getattr(error, "strerror", None) or "no picture"
        raise RecordError(
            f"{path}, line {line}: {image} cannot be used ({reason}); convert the file again, or remove the row"
        ) from error
