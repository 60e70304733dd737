"""Turns training rows into rows of ms-swift's embedding task, for train_swift.py.

Reads JSONL with query, chunk_path and neg_chunk_paths; writes rows with messages, positive_messages, positive_images,
negative_messages and negative_images, and OUTPUT.stats.json.

    python convert_data_for_swift.py --input train_hn.jsonl --output train_hn_swift.jsonl --num-hard-negatives 2
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contrastors.cli import add_image_flags, make_parser, natural_int, run_script
from contrastors.images import content_hash, open_image, read_image_bytes
from contrastors.records import atomic_output, check_bad_rows, dump_json, read_pairs, write_jsonl, write_text
from contrastors.runlog import progress
from contrastors.swift_rows import break_markers, make_row, opens_alike
from contrastors.validation import image_paths

if TYPE_CHECKING:
    from contrastors.data import DocumentTable, TrainingSet


def build_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = make_parser(__doc__)
    data = parser.add_argument_group("data")
    data.add_argument("--input", required=True, help="JSONL with query, chunk_path and neg_chunk_paths")
    data.add_argument(
        "--num-hard-negatives", type=natural_int, metavar="N",
        help="hard negatives of every row, the first N usable; rows with fewer are dropped (default: all of a row)",
    )  # fmt: skip
    add_image_flags(data)
    output = parser.add_argument_group("output")
    output.add_argument("--output", required=True, help="JSONL for train_swift.py")
    output.add_argument("--overwrite", action=argparse.BooleanOptionalAction, default=False, help="replace the output")
    runtime = parser.add_argument_group("runtime")
    runtime.add_argument("--num-workers", type=natural_int, default=4, help="processes that decode; 0 = this one")
    return parser


def beside(args: argparse.Namespace, suffix: str) -> Path:
    """Returns a path beside the output that has its name."""
    return Path(args.output.removesuffix(".jsonl") + suffix)


def validate(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuses outputs that exist or would replace the input."""
    if os.path.realpath(args.output) == os.path.realpath(args.input):
        parser.error("--output is --input; choose another")


def load_rows(args: argparse.Namespace) -> TrainingSet:
    """Returns the rows as training sees them: usable images only, no known positive among the hard negatives.

    Raises:
        ValueError: Too many rows cannot be used.
    """
    import torch

    from contrastors.data import build_training_set, validate_images
    from contrastors.distributed import World

    pairs, resolver = read_pairs(args.input)
    world, paths = World(0, 1, torch.device("cpu")), image_paths(pairs, with_negatives=args.num_hard_negatives != 0)
    with progress(len(paths), "checking images", enabled=True) as bar:
        facts = validate_images(paths, resolver.folder, args.max_image_pixels, args.num_workers, world, bar.update)
    most = max(len(pair.negatives) for pair in pairs)
    wanted = most if args.num_hard_negatives is None else args.num_hard_negatives
    data = build_training_set(pairs, facts, wanted, drop_incomplete=args.num_hard_negatives is not None)
    check_bad_rows(args.input, data.bad_rows, len(pairs), args.max_bad_fraction, beside(args, ".bad_rows.jsonl"))
    for row in data.rows:
        del row.negatives[wanted:]
    if not data.rows:
        raise ValueError(
            f"{args.input}: none of its {len(pairs)} rows has {wanted} usable hard negatives; use a smaller "
            "--num-hard-negatives, or mine more"
        )
    return data


class Pictures:
    """Paths that swift can open from anywhere; what it would show otherwise than training does becomes a copy.

    Args:
        documents: Documents of the rows.
        folder: Where copies go, as upright RGB files named by the content of their source.
        max_image_pixels: Of the image opener.
    """

    def __init__(self, documents: DocumentTable, folder: Path, max_image_pixels: int):
        self.documents, self.folder, self.max_image_pixels = documents, folder, max_image_pixels
        self.num_copied = 0
        self._paths: dict[int, str] = {}

    def path(self, number: int) -> str:
        """Returns the absolute path of a document's picture."""
        if number not in self._paths:
            self._paths[number] = self._place(number)
        return self._paths[number]

    def _place(self, number: int) -> str:
        source = self.documents.paths[number]
        if opens_alike(source):
            return source
        data = read_image_bytes(source)
        target = self.folder.absolute() / f"{content_hash(data)}.png"
        with atomic_output(target) as temporary:
            open_image(data, self.max_image_pixels).save(temporary, format="PNG")
        self.num_copied += 1
        return str(target)


def swift_rows(data: TrainingSet, pictures: Pictures, counts: Counter[str]) -> Iterator[dict[str, Any]]:
    """Yields the converted rows in order, and counts what happens to them."""
    from contrastors.processing import DOCUMENT_INSTRUCTION, QUERY_INSTRUCTION

    for row in data.rows:
        counts["num_rows"] += 1
        counts["num_hard_negatives"] += len(row.negatives)
        counts["num_queries_with_broken_markers"] += break_markers(row.query) != row.query
        documents = [pictures.path(number) for number in (row.positive, *row.negatives)]
        yield make_row(row.query, documents, QUERY_INSTRUCTION, DOCUMENT_INSTRUCTION)


def convert(args: argparse.Namespace) -> dict[str, int]:
    """Writes the output and its summary, and returns the summary; the counts of rows add up to those read."""
    data = load_rows(args)
    pictures = Pictures(data.documents, beside(args, ".images"), args.max_image_pixels)
    counts = Counter(num_rows=0, num_hard_negatives=0, num_queries_with_broken_markers=0)
    write_jsonl(args.output, swift_rows(data, pictures, counts))
    stats = {
        "num_rows_read": counts["num_rows"] + len(data.bad_rows) + data.num_dropped,
        "num_bad_rows": len(data.bad_rows),
        "num_rows_with_too_few_negatives": data.num_dropped,
        **counts,
        "num_bad_negatives": data.num_bad_negatives,
        "num_positive_negatives": data.num_positive_negatives,
        "num_copied_images": pictures.num_copied,
    }
    write_text(beside(args, ".stats.json"), dump_json(stats, indent=1) + "\n")
    return stats


def main(argv: list[str] | None = None) -> int:
    """Runs the script and returns its exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    validate(parser, args)

    def work() -> int:
        if os.path.exists(args.output) and not args.overwrite:
            raise ValueError(f"{args.output} exists; use --overwrite or another --output")
        stats = convert(args)
        print(f"{args.output}: {', '.join(f'{name} {count}' for name, count in stats.items())}")
        return 0

    return run_script(work)


if __name__ == "__main__":
    sys.exit(main())
