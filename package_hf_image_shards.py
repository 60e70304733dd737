r"""Packs the images of a prepared data set folder into tar shards, with a checksum list.

Reads the folder that prepare_hf_dataset.py made; writes shards/images-00000.tar and so on, shard_summary.json and
SHA256SUMS into --output-dir, beside a copy of the JSONL files and README.md. The same input gives the same bytes.

    python package_hf_image_shards.py --source-dir export/screenshot-training \
        --output-dir export_sharded/screenshot-training
"""

from __future__ import annotations

import argparse
import os
import posixpath
import shutil
import sys
import tarfile
from itertools import groupby
from pathlib import Path
from typing import Any

from contrastors.cli import make_parser, natural_float, run_script
from contrastors.records import RecordError, dump_json, read_jsonl, write_text
from contrastors.runlog import progress
from contrastors.shards import (
    IMAGES,
    SHARD_SUMMARY,
    SHARDS,
    file_sha256,
    folder_output,
    list_files,
    row_paths,
    shard_name,
    write_checksums,
)

FIXED_TIME = 946684800  # 2000-01-01; tar programs warn about 1970


def build_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = make_parser(__doc__)
    data = parser.add_argument_group("data")
    data.add_argument("--source-dir", required=True, metavar="DIR", help="folder made by prepare_hf_dataset.py")
    data.add_argument(
        "--follow-links", action=argparse.BooleanOptionalAction, default=False,
        help="pack the targets of links (after --link-mode symlink); off refuses links, since they may lead anywhere",
    )  # fmt: skip
    output = parser.add_argument_group("output")
    output.add_argument("--output-dir", required=True, metavar="DIR", help="the packaged folder to make")
    output.add_argument(
        "--shard-size-mb", type=natural_float, default=0.0,
        help="images per shard, in MB of 10^6 bytes; 0 = one shard a folder, whatever its size",
    )  # fmt: skip
    output.add_argument("--overwrite", action=argparse.BooleanOptionalAction, default=False, help="replace the output")
    return parser


def validate(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuses an input that is none, and an output inside the input or around it."""
    source, output = os.path.realpath(args.source_dir), os.path.realpath(args.output_dir)
    if not os.path.isdir(source):
        parser.error(f"--source-dir {args.source_dir}: no such folder")
    if not os.path.isdir(os.path.join(source, IMAGES)):
        parser.error(f"--source-dir {args.source_dir}: holds no {IMAGES}/ (prepare_hf_dataset.py makes one)")
    if os.path.commonpath([source, output]) in (source, output):
        parser.error(f"--output-dir {args.output_dir} and --source-dir {args.source_dir} lie in one another")


def find_contents(source: Path, follow_links: bool) -> tuple[list[str], list[str]]:
    """Returns the names of the texts at the top of the folder, and of the images, sorted by (folder, name).

    Raises:
        ValueError: Something else lies there, or a row names an image that does not.
    """
    files = list_files(source, follow_links)
    images = [name for name in files if name.startswith(f"{IMAGES}/")]
    texts = [name for name in files if "/" not in name]
    if others := set(files) - set(images) - set(texts):
        raise ValueError(f"{source}: {min(others)!r} lies outside {IMAGES}/ and would be lost; move it")
    if not images:
        raise ValueError(f"{source}: {IMAGES}/ holds no file")
    known = set(images)
    for text in texts:
        for record in read_jsonl(source / text) if text.endswith(".jsonl") else ():
            where = f"{source / text}, line {record.line}"
            for path in row_paths(record.data, where):
                if path not in known:
                    raise RecordError(f"{where}: image {path!r} is not in the folder; run prepare_hf_dataset.py again")
    return texts, images


def plan_shards(images: list[tuple[str, int]], max_bytes: float) -> list[list[str]]:
    """Returns the members of each shard.

    Args:
        images: (name, size in bytes), sorted by (folder, name).
        max_bytes: Close a shard before it holds more, unless one image alone does; 0 = one shard a folder.
    """
    if not max_bytes:
        return [list(names) for _, names in groupby((name for name, _ in images), key=posixpath.dirname)]
    shards, room = [], -1.0
    for name, size in images:
        if size > room:
            shards.append([])
            room = max_bytes
        shards[-1].append(name)
        room -= size
    return shards


def write_shard(source: Path, names: list[str], path: Path) -> int:
    """Writes one tar whose bytes depend on names and contents alone; returns the bytes of its images."""
    num_bytes = 0
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name in names:
            with open(source / name, "rb") as file:
                member = tarfile.TarInfo(name)
                member.size = os.fstat(file.fileno()).st_size
                member.mtime, member.mode = FIXED_TIME, 0o644
                tar.addfile(member, file)
                tar.members = []  # tarfile keeps every header otherwise
                num_bytes += member.size
    return num_bytes


def package(source: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Fills the packaged folder; returns its summary."""
    texts, images = find_contents(source, args.follow_links)
    plan = plan_shards([(name, (source / name).stat().st_size) for name in images], args.shard_size_mb * 1e6)
    (folder / SHARDS).mkdir()
    shards, checksums = [], {}
    with progress(len(images), "images", enabled=True) as bar:
        for number, names in enumerate(plan):
            name = shard_name(number)
            num_bytes = write_shard(source, names, folder / name)
            checksums[name] = file_sha256(folder / name)
            shards.append(
                {"name": name, "first": names[0], "num_images": len(names), "num_image_bytes": num_bytes}
                | {"num_bytes": (folder / name).stat().st_size, "sha256": checksums[name]}
            )
            bar.update(len(names))
    for name in texts:
        shutil.copyfile(source / name, folder / name)
        if name.endswith(".jsonl"):
            checksums[name] = file_sha256(folder / name)
    write_checksums(folder, checksums)
    summary = {
        "num_shards": len(shards),
        "num_images": len(images),
        "num_image_bytes": sum(shard["num_image_bytes"] for shard in shards),
        "num_bytes": sum(shard["num_bytes"] for shard in shards),
        "shards": shards,
    }
    write_text(folder / SHARD_SUMMARY, dump_json(summary, indent=1) + "\n")
    return summary


def main(argv: list[str] | None = None) -> int:
    """Runs the script and returns its exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    validate(parser, args)

    def work() -> int:
        with folder_output(args.output_dir, args.overwrite, marker=SHARD_SUMMARY) as folder:
            summary = package(Path(args.source_dir), folder, args)
        print(
            f"{args.output_dir}: {summary['num_images']} images, number of shards {summary['num_shards']}, "
            f"{summary['num_bytes'] / 1e6:.1f} MB"
        )
        return 0

    return run_script(work)


if __name__ == "__main__":
    sys.exit(main())
