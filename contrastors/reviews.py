"""Reviews of candidates: the rows they belong to, the journal they are kept in, and the files made of them.

The reviews file is the journal: one line per reviewed candidate, appended as soon as it is there, so that a run can be
killed at any moment. A line belongs to a row by the row's number and key, a hash of all that the review depends on.
Both scripts that filter write their results with `write_results`, so that chunks merge to the bytes of a single run.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from contrastors.candidates import MISSING, UNREADABLE
from contrastors.records import (
    CANDIDATES,
    NEGATIVES,
    POSITIVE,
    BadRow,
    PathResolver,
    atomic_output,
    dump_json,
    relocate_row,
    write_jsonl,
)
from contrastors.verdicts import CANNOT_ANSWER, CORRECT, UNKNOWN, WRONG
from contrastors.vlm import REFUSED

KEPT = (WRONG, CANNOT_ANSWER)
NOT_JUDGED = (MISSING, UNREADABLE, REFUSED)  # nobody has looked at the picture: tried again by --resume
SKIP_REASONS = (
    "too_few_negatives",
    "candidates_missing",
    "positive_missing",
    "positive_unreadable",
    "positive_not_confirmed",
)
LOST_FRACTION_HELP = (
    "stop before any request when more positives are missing; exit code 1 when more rows are lost, "
    "or when most verdicts are unknown; 1 = never"
)
PARENT_VARIABLE = "CONTRASTORS_FILTER_PARENT"  # process number of the chunk runner; a filter ends with its runner
_LOCK_WAIT_S = 5.0  # a run that was told to stop may need a moment


class Journal:
    """The reviews file while a run is at work: lines are appended, and found again by their row.

    Args:
        path: The reviews file.
        resume: Keep what is there; a torn last line is dropped.

    Raises:
        ValueError: Another process is writing the file, or a line other than the last is no review.
    """

    def __init__(self, path: str | Path, resume: bool):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path, "a+b")
        self._lock()
        self._offsets: dict[int, list[int]] = {}
        self.keys: dict[int, str] = {}
        self.has_torn_line = False
        if resume:
            self._load()
        else:
            self._file.truncate(0)

    def _lock(self) -> None:
        end_s = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path)):
                    return
                self._file = open(self.path, "a+b")  # the run that held it has just put the final file in its place
            except BlockingIOError:
                if time.monotonic() > end_s:
                    raise ValueError(f"{self.path}: another run is writing it; wait for it or stop it") from None
                time.sleep(0.2)

    def _load(self) -> None:
        self._file.seek(0)
        offset = 0
        for number, raw in enumerate(self._file, start=1):
            if not raw.endswith(b"\n"):
                self.has_torn_line = True
                self._file.truncate(offset)
                break
            try:
                review = json.loads(raw)
                index, key = review["row_index"], review["row_key"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{self.path}, line {number}: no review ({error}); mend or remove the line") from error
            self._offsets.setdefault(index, []).append(offset)
            self.keys[index] = key
            offset += len(raw)

    def append(self, review: dict[str, Any]) -> None:
        """Writes one line, at once."""
        self._file.seek(0, os.SEEK_END)
        self._offsets.setdefault(review["row_index"], []).append(self._file.tell())
        self._file.write(dump_json(review).encode() + b"\n")
        self._file.flush()

    def reviews(self, index: int) -> dict[int | None, dict[str, Any]]:
        """Returns the reviews of a row by their position among its candidates (None = its positive), last one wins."""
        return {review["position"]: review for review in map(self._read, self._offsets.get(index, ()))}

    def _read(self, offset: int) -> dict[str, Any]:
        self._file.seek(offset)
        return json.loads(self._file.readline())

    def keep_only(self, index: int, positions: set[int | None]) -> None:
        """Forgets the reviews of a row that its present run had no use for."""
        if len(self._offsets.get(index, ())) != len(positions):
            latest = {self._read(offset)["position"]: offset for offset in self._offsets.get(index, ())}
            self._offsets[index] = [offset for position, offset in latest.items() if position in positions]

    def close(self) -> None:
        """Closes the file and frees it for other runs."""
        self._file.close()


def kept_positions(reviews: Iterable[dict[str, Any]], num_hard_negatives: int) -> list[int] | None:
    """Returns the positions of the candidates that become hard negatives, or None where there are too few."""
    kept = [review["position"] for review in reviews if review["role"] == "candidate" and review["verdict"] in KEPT]
    return kept[:num_hard_negatives] if len(kept) >= num_hard_negatives else None


def moved_path(path: str, resolver: PathResolver, folder: str | Path) -> str:
    """Returns a path of the input as a file in `folder` must write it to find the same image."""
    return relocate_row({POSITIVE: path}, resolver, folder)[POSITIVE]


def write_results(
    rows: Iterable[tuple[dict[str, Any], Iterable[dict[str, Any]]]],
    resolver: PathResolver,
    output: str | Path,
    reviews_output: str | Path,
    num_hard_negatives: int,
) -> int:
    """Writes the filtered rows and the reviews, both in the order given, and returns the number of rows written.

    Args:
        rows: Every row of the input, in order, with its reviews.
        resolver: Of the input.
        output: JSONL of the rows that have enough hard negatives.
        reviews_output: JSONL of all reviews.
        num_hard_negatives: `--num-hard-negatives`.
    """
    num_rows = 0
    output, reviews_output = Path(output), Path(reviews_output)
    with atomic_output(reviews_output) as reviews_path, atomic_output(output) as rows_path:
        with open(reviews_path, "wb") as reviews_file, open(rows_path, "wb") as rows_file:
            for row, row_reviews in rows:
                reviews = sorted(
                    row_reviews, key=lambda review: (review["role"] == "candidate", review["position"] or 0)
                )
                for review in reviews:
                    entry = row if review["position"] is None else row[CANDIDATES][review["position"]]
                    review["path"] = entry[POSITIVE] if entry is row else entry["path"]
                    for name, path in ((POSITIVE, row[POSITIVE]), ("path", review["path"])):
                        review[name] = moved_path(path, resolver, reviews_output.parent)
                    reviews_file.write(dump_json(review).encode() + b"\n")
                kept = kept_positions(reviews, num_hard_negatives)
                if kept is not None:
                    negatives = [row[CANDIDATES][position]["path"] for position in kept]
                    moved = relocate_row(row | {NEGATIVES: negatives}, resolver, output.parent)
                    rows_file.write(dump_json(moved).encode() + b"\n")
                    num_rows += 1
    return num_rows


def empty_counts() -> dict[str, Any]:
    """Returns the counts of a summary, all zero."""
    verdicts = (CORRECT, *KEPT, UNKNOWN, *NOT_JUDGED)
    return {
        "num_rows": 0,
        "num_rows_done": 0,
        "num_rows_written": 0,
        "num_rows_skipped": 0,
        "num_rows_failed": 0,
        "skip_reasons": dict.fromkeys(SKIP_REASONS, 0),
        "candidates": dict.fromkeys(("retrieved", "known_positives", "duplicates", "looked_at", "kept", "dropped"), 0),
        "verdicts": dict.fromkeys(verdicts, 0),
        "unknown_reasons": {},
        "positive_verdicts": dict.fromkeys(verdicts, 0),
        "tokens": {"prompt": 0, "completion": 0},
        "calls": 0,
        "retries": 0,
        "reasks": 0,
    }


def add_counts(total: dict[str, Any], more: dict[str, Any]) -> None:
    """Adds the counts of another summary, in place; everything but counts is passed over."""
    for name in empty_counts():
        if isinstance(total[name], dict):
            for key, count in more[name].items():
                total[name][key] = total[name].get(key, 0) + count
        else:
            total[name] += more[name]


def make_summary(counts: dict[str, Any], settings: dict[str, Any], digest: str, completed: bool) -> dict[str, Any]:
    """Returns the summary of a run: whether it is completed, the settings, the counts and the ratios made of them."""

    def ratio(part: int, whole: int) -> float:
        return round(part / whole, 6) if whole else 0.0

    num_positives, looked_at = counts["num_rows_done"], counts["candidates"]["looked_at"]
    positives_missing, candidates_missing = counts["skip_reasons"]["positive_missing"], counts["verdicts"][MISSING]
    return {
        "completed": completed,
        "settings": settings,
        "input_digest": digest,
        **counts,
        "unknown_reasons": dict(sorted(counts["unknown_reasons"].items())),
        "positive_missing_ratio": ratio(positives_missing, num_positives),
        "candidate_missing_ratio": ratio(candidates_missing, looked_at),
        "missing_path_ratio": ratio(positives_missing + candidates_missing, num_positives + looked_at),
    }


def check_lost_rows(
    source: str | Path, lost: list[BadRow], num_rows: int, max_fraction: float, report: Path, flag: str
) -> ValueError | None:
    """Returns the error to raise where too many rows were lost on the way; all of them are written to `report`.

    Args:
        source: The JSONL they come from.
        lost: Sorted here.
        num_rows: Rows of the input.
        max_fraction: `--max-bad-fraction`.
        report: bad_rows.jsonl.
        flag: With which the script tries them again.
    """
    lost.sort(key=lambda row: row.line)
    report.unlink(missing_ok=True)
    if lost:
        write_jsonl(report, map(asdict, lost))
    if len(lost) <= max_fraction * num_rows:
        return None
    return ValueError(
        f"{source}: {len(lost)} of {num_rows} rows are lost (--max-bad-fraction {max_fraction:g}), first line "
        f"{lost[0].line}: {lost[0].path}: {lost[0].reason}; all of them are in {report}, {flag} tries them again"
    )


def check_understood(counts: dict[str, Any], reviews_file: str | Path, max_fraction: float) -> ValueError | None:
    """Returns the error to raise where most verdicts are UNKNOWN; with `--max-bad-fraction` 1 that is a warning.

    Args:
        counts: Of the whole input.
        reviews_file: Where the replies can be read.
        max_fraction: `--max-bad-fraction`.
    """
    verdicts = Counter(counts["verdicts"]) + Counter(counts["positive_verdicts"])
    num_judged = sum(verdicts[verdict] for verdict in (CORRECT, *KEPT, UNKNOWN))
    if verdicts[UNKNOWN] <= num_judged / 2:
        return None
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(counts["unknown_reasons"].items()))
    text = f"{verdicts[UNKNOWN]} of {num_judged} verdicts are UNKNOWN ({reasons}), see {reviews_file}; "
    text += "--overwrite with another --model, --judge-model or --prompt-file may help"
    if max_fraction < 1:
        return ValueError(f"{text}, --max-bad-fraction 1 takes what there is")
    print(f"warning: {text}", file=sys.stderr, flush=True)
    return None


def check_outputs(paths: Iterable[str | Path], flag: str) -> None:
    """Raises ValueError for an output that exists; `flag` is the one that goes on with it."""
    for path in paths:
        if os.path.exists(path):
            raise ValueError(f"{path} exists; {flag} goes on with it, --overwrite starts anew")


def refuse_equal_files(parser: ArgumentParser, files: Mapping[str, str | Path | None]) -> None:
    """Ends with a usage error where two flags name one file; None = not given."""
    flags: dict[str, str] = {}
    for flag, path in files.items():
        other = flags.setdefault(os.path.realpath(path), flag) if path else flag
        if other != flag:
            parser.error(f"{other} and {flag} name one file ({path}); give each its own")


def count_review(counts: dict[str, Any], found: dict[str, Any]) -> None:
    """Adds one review to the counts of its row."""
    is_candidate, verdict = found["role"] == "candidate", found["verdict"]
    counts["verdicts" if is_candidate else "positive_verdicts"][verdict] += 1
    if is_candidate:
        counts["candidates"]["kept"] += verdict in KEPT
        counts["candidates"]["dropped"] += verdict == CORRECT
    if verdict == UNKNOWN:
        counts["unknown_reasons"][found["reason"]] = counts["unknown_reasons"].get(found["reason"], 0) + 1
    for kind in ("prompt", "completion"):
        counts["tokens"][kind] += found[f"{kind}_tokens"]


def read_earlier(summary_file: str | Path, reviews_file: str | Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the summary of the run to go on with, None where there is none.

    Args:
        summary_file: Where it is.
        reviews_file: The reviews it tells of.
        settings: Of the present run.

    Raises:
        ValueError: It was made with other settings, or its settings are lost.
    """
    if not os.path.exists(summary_file):
        if os.path.exists(reviews_file) and os.path.getsize(reviews_file):  # empty: it was killed before it asked
            raise ValueError(f"{reviews_file}: its summary {summary_file} is gone; --overwrite starts anew")
        return None
    summary = json.loads(Path(summary_file).read_text(encoding="utf-8"))
    for name, value in settings.items():
        earlier = summary["settings"].get(name)
        if earlier != value:
            flag = "--prompt-file (hash)" if name == "prompt_hash" else "--" + name.replace("_", "-")
            raise ValueError(
                f"--resume: {flag} was {earlier} and is {value} now, and the reviews in {reviews_file} hold for "
                "the former only; give it again, or --overwrite, or another output"
            )
    return summary
