r"""Filter a large file in chunks of rows: each chunk in a folder of its own, at the end one file as of a single run.

reads   --input: JSONL with query, chunk_path and retrieve_top20, in one pass
writes  --output-dir: chunk_000000_009999/ and so on, then filtered_hn.jsonl, candidate_reviews.jsonl, summary.json

    OPENAI_API_KEY=... python run_filter_hard_negatives_chunks.py --input hn.jsonl --output-dir filtered \
        --chunk-size 10000 --skip-existing --candidate-k 10 --num-hard-negatives 2

All other flags go through to filter_hard_negatives_vqa.py (its --help lists them).
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contrastors.candidates import KnownPositives, read_rows, row_key
from contrastors.cli import add_image_flags, make_parser, natural_int, positive_int, run_script
from contrastors.records import (
    CANDIDATES,
    NEGATIVES,
    POSITIVE,
    QUERY,
    BadRow,
    PathResolver,
    check_bad_rows,
    dump_json,
    read_jsonl,
    write_jsonl,
    write_text,
)
from contrastors.report import MAX_ROWS, write_report
from contrastors.reviews import (
    LOST_FRACTION_HELP,
    PARENT_VARIABLE,
    add_counts,
    check_lost_rows,
    check_outputs,
    check_understood,
    empty_counts,
    kept_positions,
    make_summary,
    refuse_equal_files,
    write_results,
)

FILTER = Path(__file__).resolve().parent / "filter_hard_negatives_vqa.py"
OUTPUT, REVIEWS, SUMMARY, BAD_ROWS = (
    "filtered_hn.jsonl", "candidate_reviews.jsonl", "summary.json", "filtered_hn.bad_rows.jsonl",
)  # fmt: skip
CHUNK_NAME = re.compile(r"chunk_\d{6,}_\d{6,}")
ROWS, KNOWN_POSITIVES = "rows.jsonl", "known_positives.jsonl"  # as long as the chunks are at work
SET_HERE = (
    "--output", "--reviews-output", "--summary-output", "--offset", "--limit", "--resume", "--relative-to",
    "--known-positives",
)  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line; flags of the filter are left over."""
    parser = make_parser(__doc__)
    parser.add_argument("--input", required=True, help="JSONL with retrieve_top20")
    parser.add_argument("--output-dir", required=True, help="folder of the chunks and of the merged files")
    parser.add_argument("--chunk-size", type=positive_int, default=10000, help="rows of a chunk")
    parser.add_argument("--report", metavar="FILE.html", help="one page of the first rows to look at")
    parser.add_argument("--start-offset", type=natural_int, default=0, help="rows to pass over at the start")
    parser.add_argument("--limit-total", type=natural_int, default=0, help="rows to filter in all; 0 = all")
    parser.add_argument("--parallel-chunks", type=positive_int, default=1, help="chunks at work at once")
    parser.add_argument(
        "--requests-per-minute", type=natural_int, default=0, help="of all chunks together; 0 = no limit"
    )
    parser.add_argument("--skip-existing", action="store_true", help="go on: finished chunks are left, others resumed")
    parser.add_argument("--overwrite", action="store_true", help="remove existing chunks and start anew")
    add_image_flags(parser, LOST_FRACTION_HELP)
    return parser


@dataclass
class Chunk:
    """A range of rows: its folder and the number of its first row in the input."""

    folder: Path
    start: int


@dataclass
class Plan:
    """What one pass over the input finds.

    Attributes:
        chunks: In order of their rows.
        lines: Line of the input for each selected row.
        positives: Of every query text of the whole input.
        resolver: Of the input.
    """

    resolver: PathResolver
    chunks: list[Chunk] = field(default_factory=list)
    lines: array = field(default_factory=lambda: array("Q"))
    positives: KnownPositives = field(default_factory=KnownPositives)


def split(args: argparse.Namespace, folder: Path) -> Plan:
    """Reads the input once, writes the rows of each chunk into `folder` under the chunk's name, and returns the plan.

    Raises:
        ValueError: No rows, or too many whose positive is missing.
        RecordError: A row breaks the format.
    """
    plan, missing, output_dir = Plan(PathResolver(args.input)), [], Path(args.output_dir)

    def selected() -> Iterator[tuple[int, dict[str, Any]]]:
        for record in read_rows(args.input):  # to the end: the positives of later rows count for earlier chunks too
            plan.positives.add(record.data[QUERY], record.data[POSITIVE])
            if record.index < args.start_offset or (args.limit_total and len(plan.lines) == args.limit_total):
                continue
            plan.lines.append(record.line)
            path = plan.resolver(record.data[POSITIVE])
            if not os.path.isfile(path):
                missing.append(BadRow(record.line, path, "the positive is missing"))
            yield record.index, record.data

    rows = selected()
    while (first := next(rows, None)) is not None:
        start, row = first
        others = (row for _, row in itertools.islice(rows, args.chunk_size - 1))
        num_rows = write_jsonl(folder / ROWS, itertools.chain([row], others))
        name = f"chunk_{start:06d}_{start + num_rows - 1:06d}"
        os.replace(folder / ROWS, folder / name)
        plan.chunks.append(Chunk(output_dir / name, start))
    if not plan.chunks:
        raise ValueError(f"{args.input}: holds no rows from --start-offset {args.start_offset} on")
    if args.max_bad_fraction < 1:
        check_bad_rows(args.input, missing, len(plan.lines), args.max_bad_fraction, output_dir / BAD_ROWS)
    return plan


def chunk_folders(output_dir: Path) -> list[Path]:
    """Returns the folders in which a filter has been at work."""
    folders = (path for path in sorted(output_dir.iterdir()) if CHUNK_NAME.fullmatch(path.name))
    return [folder for folder in folders if any((folder / name).exists() for name in (REVIEWS, SUMMARY))]


def make_plan(args: argparse.Namespace) -> Plan:
    """Returns the plan of the run; whatever stops it here leaves the output folder as it was.

    Raises:
        ValueError: There are chunks, and no flag says what to do with them, or they are chunks of something else.
    """
    output_dir = Path(args.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    existing = chunk_folders(output_dir)
    if not (args.skip_existing or args.overwrite):
        outputs = [*existing, *(output_dir / name for name in (OUTPUT, REVIEWS, SUMMARY)), args.report]
        check_outputs(filter(None, outputs), "--skip-existing")
    with tempfile.TemporaryDirectory(prefix="rows-", dir=output_dir) as folder:
        plan = split(args, Path(folder))
        strange = set(existing) - {chunk.folder for chunk in plan.chunks}
        if strange and not args.overwrite:
            raise ValueError(
                f"{min(strange)} is no chunk of this input with --chunk-size {args.chunk_size} and --start-offset "
                f"{args.start_offset}; give the input and flags it was made with, --overwrite, or another --output-dir"
            )
        if args.overwrite:
            (output_dir / SUMMARY).unlink(missing_ok=True)  # it tells of the chunks that go now
            for chunk_folder in existing:
                shutil.rmtree(chunk_folder)
        for chunk in plan.chunks:
            chunk.folder.mkdir(exist_ok=True)
            os.replace(Path(folder) / chunk.folder.name, chunk.folder / ROWS)
    return plan


def words_of(flags: dict[str, Any]) -> list[str]:
    """Returns flags and their values as words of a command line."""
    return [str(word) for flag in flags.items() for word in flag]


def start_filter(args: argparse.Namespace, plan: Plan, folder: Path, filter_flags: list[str]) -> subprocess.Popen:
    """Starts the filter over one chunk; it goes on with whatever is there."""
    print(f"{folder.name}:", flush=True)
    flags = {
        "--input": folder / ROWS,
        "--output": folder / OUTPUT,
        "--reviews-output": folder / REVIEWS,
        "--summary-output": folder / SUMMARY,
        "--relative-to": plan.resolver.folder,
        "--known-positives": Path(args.output_dir) / KNOWN_POSITIVES,
        "--max-image-pixels": args.max_image_pixels,
        "--max-bad-fraction": 1,  # what is too much is decided over the whole input
        "--requests-per-minute": args.requests_per_minute // args.parallel_chunks,
    }
    environment = os.environ | {PARENT_VARIABLE: str(os.getpid())}
    return subprocess.Popen([sys.executable, str(FILTER), *words_of(flags), "--resume", *filter_flags], env=environment)


def run_chunks(args: argparse.Namespace, plan: Plan, filter_flags: list[str]) -> int:
    """Runs the filter over every chunk and returns 0, or the exit code for the first that failed."""
    plan.positives.write(Path(args.output_dir) / KNOWN_POSITIVES)
    waiting, running = [chunk.folder for chunk in reversed(plan.chunks)], {}
    try:
        while waiting or running:
            while waiting and len(running) < args.parallel_chunks:
                folder = waiting.pop()
                running[folder] = start_filter(args, plan, folder, filter_flags)
            time.sleep(0.05)
            ended = {folder: process.returncode for folder, process in running.items() if process.poll() is not None}
            for folder, code in ended.items():
                del running[folder]
                if code:
                    way_on = "" if code in (130, 143) else "once that is mended, "
                    way_on += "--skip-existing goes on"
                    print(f"{folder.name}: the filter ended with code {code}; {way_on}", file=sys.stderr)
                    return code if code in (2, 130, 143) else 1
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
    return 0


def merged_rows(plan: Plan, digest: Any) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Yields every row with its reviews, in order, with row numbers of the whole input; `digest` takes the row keys."""
    for chunk in plan.chunks:
        reviews = (record.data for record in read_jsonl(chunk.folder / REVIEWS))
        groups = itertools.groupby(reviews, lambda review: review["row_index"])
        waiting = next(groups, None)
        for record in read_jsonl(chunk.folder / ROWS):
            digest.update(row_key(record.data, plan.positives.of(record.data[QUERY])).encode())
            found = []
            if waiting is not None and waiting[0] == record.index:
                found = [review | {"row_index": chunk.start + record.index} for review in waiting[1]]
                waiting = next(groups, None)
            yield record.data, found


def merge(args: argparse.Namespace, plan: Plan) -> int:
    """Writes the merged files and returns the exit code.

    Raises:
        ValueError: More rows than allowed were lost, or most verdicts are unknown.
    """
    output_dir, counts, lost, digest = Path(args.output_dir), empty_counts(), [], hashlib.blake2b(digest_size=8)
    for chunk in plan.chunks:
        summary = json.loads((chunk.folder / SUMMARY).read_text(encoding="utf-8"))
        add_counts(counts, summary)
        if (chunk.folder / BAD_ROWS).exists():
            for record in read_jsonl(chunk.folder / BAD_ROWS):
                line = plan.lines[chunk.start - args.start_offset + record.data["line"] - 1]
                lost.append(BadRow(**(record.data | {"line": line})))
    settings = summary["settings"]
    rows = merged_rows(plan, digest)
    write_results(rows, plan.resolver, output_dir / OUTPUT, output_dir / REVIEWS, settings["num_hard_negatives"])
    report = output_dir / BAD_ROWS
    error = check_lost_rows(args.input, lost, len(plan.lines), args.max_bad_fraction, report, "--skip-existing")
    error = error or check_understood(counts, output_dir / REVIEWS, args.max_bad_fraction)
    merged = make_summary(counts, settings, digest.hexdigest(), completed=error is None)
    write_text(output_dir / SUMMARY, dump_json(merged, indent=2) + "\n")
    show(args, plan, settings["num_hard_negatives"])
    if error is not None:
        raise error
    for chunk in plan.chunks:
        (chunk.folder / ROWS).unlink()
    (output_dir / KNOWN_POSITIVES).unlink()
    print(f"{len(plan.lines)} rows: {counts['num_rows_written']} written to {output_dir / OUTPUT}")
    return 0


def show(args: argparse.Namespace, plan: Plan, num_hard_negatives: int) -> None:
    """Writes the page of `--report`, if it was asked for: the first rows of the whole input."""
    if not args.report:
        return
    rows, reviews = [], []
    for row, found in itertools.islice(merged_rows(plan, hashlib.blake2b()), MAX_ROWS):
        kept = kept_positions(found, num_hard_negatives) or []
        rows.append(row | {NEGATIVES: [row[CANDIDATES][position]["path"] for position in kept]})
        reviews.append(found)
    title, num_rows = f"Hard negatives of {os.path.basename(args.input)}", len(plan.lines)
    write_report(
        args.report, rows, plan.resolver, reviews, title=title, positives_of=plan.positives.of, num_rows=num_rows,
        max_image_pixels=args.max_image_pixels,
    )  # fmt: skip


def filter_chunks(args: argparse.Namespace, filter_flags: list[str]) -> int:
    """Does the work of the script and returns its exit code."""
    plan = make_plan(args)
    return run_chunks(args, plan, filter_flags) or merge(args, plan)


def validate(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuses combinations that would fail later, and files that would overwrite one another."""
    if args.skip_existing and args.overwrite:
        parser.error("--skip-existing goes on with the chunks, --overwrite removes them; give one")
    if 0 < args.requests_per_minute < args.parallel_chunks:
        parser.error(
            f"--requests-per-minute {args.requests_per_minute} cannot be shared by --parallel-chunks "
            f"{args.parallel_chunks}; give fewer chunks"
        )
    output_dir = Path(args.output_dir)
    files = {"--input": args.input, "--report": args.report}
    made = (OUTPUT, REVIEWS, SUMMARY, BAD_ROWS, KNOWN_POSITIVES)
    refuse_equal_files(parser, files | {f"{name} of --output-dir": output_dir / name for name in made})
    for flag, path in files.items():
        folders = Path(os.path.realpath(path)).parents if path else ()
        if any(CHUNK_NAME.fullmatch(folder.name) and folder.parent == output_dir.resolve() for folder in folders):
            parser.error(f"{flag} {path} lies in a chunk of --output-dir; give it another place")


def estimate(args: argparse.Namespace, filter_flags: list[str]) -> int:
    """Lets the filter estimate the whole input at once, and returns its exit code."""
    flags = {
        "--input": args.input,
        "--output": os.path.join(args.output_dir, OUTPUT),
        "--offset": args.start_offset,
        "--limit": args.limit_total,
        "--max-image-pixels": args.max_image_pixels,
    } | ({"--report": args.report} if args.report else {})
    return subprocess.run([sys.executable, str(FILTER), *words_of(flags), *filter_flags]).returncode


def main(argv: list[str] | None = None) -> int:
    """Parses the command line and returns the exit code."""
    parser = build_parser()
    args, filter_flags = parser.parse_known_args(argv)
    for flag in filter_flags:
        if flag.partition("=")[0] in SET_HERE:
            parser.error(f"{flag.partition('=')[0]} is set for each chunk by this script")
    validate(parser, args)
    if "--dry-run" in filter_flags:
        return estimate(args, filter_flags)
    return run_script(lambda: filter_chunks(args, filter_flags))


if __name__ == "__main__":
    sys.exit(main())
