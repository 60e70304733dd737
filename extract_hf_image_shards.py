"""Unpacks the image shards of a downloaded data set, so that its JSONL files find their images.

Reads shards/*.tar and SHA256SUMS of --dataset-dir; writes images/ and extract_summary.json there. Every checksum and
every member's name is checked before the first file is written; after a stop the next run keeps what is there.

    python extract_hf_image_shards.py --dataset-dir DOWNLOADED
"""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from contrastors.cli import make_parser, run_script
from contrastors.records import dump_json, write_text
from contrastors.runlog import progress
from contrastors.shards import IMAGES, SHARDS, check_name, file_sha256, read_checksums

PARTIAL = ".extract.tmp-partial"  # one name, so that a killed run leaves one file, and the next run uses it up
SUMMARY = "extract_summary.json"
BLOCK = 1 << 20


def build_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = make_parser(__doc__)
    data = parser.add_argument_group("data")
    data.add_argument("--dataset-dir", required=True, metavar="DIR", help="the downloaded data set")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--overwrite", action=argparse.BooleanOptionalAction, default=False,
        help="replace files under images/ that differ from the shards; off stops at the first",
    )  # fmt: skip
    return parser


def find_shards(folder: Path) -> list[str]:
    """Returns the names of the shards, every file of the checksum list having been checked.

    Raises:
        ValueError: There is nothing to extract; a file is missing, not listed, or has another checksum.
    """
    found = sorted(f"{SHARDS}/{path.name}" for path in (folder / SHARDS).glob("*.tar"))
    if not found:
        raise ValueError(f"{folder}: nothing to extract, {SHARDS}/ holds no .tar; is this the downloaded data set?")
    checksums = read_checksums(folder)
    if unlisted := set(found) - set(checksums):
        raise ValueError(f"{folder / min(unlisted)}: not in the checksum list; it is no part of this data set")
    with progress(len(checksums), "checksums", enabled=True) as bar:
        for name, digest in checksums.items():
            if not (folder / name).is_file():
                raise ValueError(f"{folder / name}: missing, the checksum list names it; download it again")
            if file_sha256(folder / name) != digest:
                raise ValueError(f"{folder / name}: wrong checksum; download it again")
            bar.update(1)
    return found


def open_shard(path: Path) -> tarfile.TarFile:
    """Returns the open tar.

    Raises:
        ValueError: It is no plain tar.
    """
    try:
        return tarfile.open(path, "r:")
    except tarfile.TarError as error:
        raise ValueError(f"{path}: no plain tar file ({error})") from error


def check_members(path: Path, seen: set[str]) -> None:
    """Checks every member of a shard; adds the names to `seen`.

    Raises:
        ValueError: A member is no plain file, would land outside images/, or stands twice.
    """
    with open_shard(path) as tar:
        try:
            for member in tar:
                check_name(member.name, path)
                if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.sparse is not None:
                    raise ValueError(f"{path}: member {member.name!r} is refused: only plain files are extracted")
                if not member.name.startswith(f"{IMAGES}/"):
                    raise ValueError(f"{path}: member {member.name!r} is refused: outside {IMAGES}/")
                if member.name in seen:
                    raise ValueError(f"{path}: member {member.name!r} is refused: the name stands twice")
                seen.add(member.name)
                tar.members = []  # tarfile keeps every header otherwise
        except tarfile.TarError as error:
            raise ValueError(f"{path}: damaged tar ({error})") from error


def make_parent(folder: Path, name: str) -> None:
    """Makes the folders above a member.

    Raises:
        ValueError: One of them, or the member's own place, is a link, which could lead out of the data set.
    """
    place = folder
    for part in name.split("/"):
        place = place / part
        if place.is_symlink():
            raise ValueError(f"{place}: is a link, and nothing is written through links; remove it")
    place.parent.mkdir(parents=True, exist_ok=True)


def same_bytes(one: BinaryIO, other: BinaryIO) -> bool:
    """Returns whether both files hold the same from here on."""
    while True:
        block = one.read(BLOCK)
        if block != other.read(BLOCK):
            return False
        if not block:
            return True


def extract_shard(folder: Path, name: str, overwrite: bool) -> Iterator[str]:
    """Writes the members of one shard; yields "kept" or "written" for each.

    Raises:
        ValueError: A file is there already, with other contents.
    """
    with open_shard(folder / name) as tar:
        for member in tar:
            make_parent(folder, member.name)
            target, content = folder / member.name, tar.extractfile(member)
            if target.exists():
                with open(target, "rb") as present:
                    same = os.fstat(present.fileno()).st_size == member.size and same_bytes(present, content)
                if same:
                    yield "kept"
                    continue
                if not overwrite:
                    raise ValueError(f"{target}: exists and differs from {name}; --overwrite replaces such files")
                content.seek(0)
            (folder / PARTIAL).unlink(missing_ok=True)  # a killed run's, or a link that came with the data set
            with open(folder / PARTIAL, "xb") as file:
                shutil.copyfileobj(content, file, BLOCK)
            os.replace(folder / PARTIAL, target)  # no fsync: after a power cut the next run compares and finds it
            tar.members = []
            yield "written"


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Waits until no other extraction is at work in a folder: each rank or job may begin with one.

    Raises:
        ValueError: There is no such folder.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    place = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # some mounts know no locks
            fcntl.flock(place, fcntl.LOCK_EX)
        yield
    finally:
        os.close(place)


def extract(folder: Path, overwrite: bool) -> dict[str, int]:
    """Extracts every shard; returns the counts of the summary."""
    names = find_shards(folder)
    seen: set[str] = set()
    for name in names:
        check_members(folder / name, seen)
    counts: Counter[str] = Counter()
    try:
        with progress(len(seen), "images", enabled=True) as bar:
            for name in names:
                for outcome in extract_shard(folder, name, overwrite):
                    counts[outcome] += 1
                    bar.update(1)
    finally:
        (folder / PARTIAL).unlink(missing_ok=True)
    return {
        "num_shards": len(names),
        "num_images": len(seen),
        "num_written": counts["written"],
        "num_kept": counts["kept"],
    }


def main(argv: list[str] | None = None) -> int:
    """Runs the script and returns its exit code."""
    args = build_parser().parse_args(argv)

    def work() -> int:
        folder = Path(args.dataset_dir)
        with alone_in(folder):
            counts = extract(folder, args.overwrite)
            write_text(folder / SUMMARY, dump_json(counts, indent=1) + "\n")
        print(
            f"{args.dataset_dir}: {counts['num_images']} images of {counts['num_shards']} shards in {IMAGES}/: "
            f"{counts['num_written']} written, {counts['num_kept']} there already"
        )
        return 0

    return run_script(work)


if __name__ == "__main__":
    sys.exit(main())
