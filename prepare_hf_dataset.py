"""Turns a split folder (rows that name images anywhere on this machine) into a self-contained data set folder.

Reads train_hn.jsonl, eval_hn.jsonl, test_hn.jsonl of --split-dir (or train.jsonl, eval.jsonl, test.jsonl) and the
images they name; writes <split>.jsonl, images/, dataset_summary.json and a data card README.md into --output-dir.

    python prepare_hf_dataset.py --split-dir chunks/split --image-root tiles/ --output-dir export/screenshot-training
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contrastors.cli import add_image_flags, fraction, make_parser, natural_int, run_script
from contrastors.datacard import render_card
from contrastors.records import dump_json, write_jsonl, write_text
from contrastors.runlog import progress
from contrastors.shards import SUMMARY, folder_output
from contrastors.sources import Exporter, Source, read_source, skip_bad_rows
from contrastors.splits import SPLITS, draw_splits, group_rows, own_documents
from contrastors.validation import FactCache, ImageFact, check_images

# What mining and filtering leave beside their rows.
BY_PRODUCTS = (".reviews.jsonl", ".bad_rows.jsonl", ".bad_corpus.jsonl", ".hits.jsonl", "candidate_reviews.jsonl")


def build_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = make_parser(__doc__)
    data = parser.add_argument_group("data")
    data.add_argument("--split-dir", required=True, metavar="DIR", help="folder with the JSONL files")
    data.add_argument("--image-root", required=True, metavar="DIR", help="folder that holds every image of the rows")
    data.add_argument(
        "--make-split", action=argparse.BooleanOptionalAction, default=False,
        help="pool all rows of the split files (or of the one JSONL there) and split them anew, by document",
    )  # fmt: skip
    data.add_argument("--eval-fraction", type=fraction, help="share of rows for eval, with --make-split (default: 0.1)")
    data.add_argument("--test-fraction", type=fraction, help="share of rows for test, with --make-split (default: 0.1)")
    data.add_argument(
        "--group-field", metavar="NAME",
        help="with --make-split: rows with the same value of this field (a page, a site) stay in one split",
    )  # fmt: skip
    data.add_argument("--seed", type=int, help="of --make-split (default: 0)")
    add_image_flags(data)
    output = parser.add_argument_group("output")
    output.add_argument("--output-dir", required=True, metavar="DIR", help="the data set folder to make")
    output.add_argument(
        "--link-mode", choices=("hardlink", "copy", "symlink"), default="hardlink",
        help="how images get there; copied where the file system makes no links",
    )  # fmt: skip
    output.add_argument("--license", default="", metavar="ID", help="licence for the data card, as the hub spells it")
    output.add_argument("--overwrite", action=argparse.BooleanOptionalAction, default=False, help="replace the output")
    runtime = parser.add_argument_group("runtime")
    runtime.add_argument("--num-workers", type=natural_int, default=4, help="processes that decode; 0 = this one")
    return parser


def validate(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Fills the defaults of --make-split; refuses flags that would be ignored and outputs that would eat an input."""
    defaults = {"eval_fraction": 0.1, "test_fraction": 0.1, "group_field": "", "seed": 0}
    for name, default in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
        elif not args.make_split:
            parser.error(f"--{name.replace('_', '-')} is used by --make-split only")
    if args.eval_fraction + args.test_fraction >= 1:
        parser.error("--eval-fraction and --test-fraction leave no row for train")
    output = os.path.realpath(args.output_dir)
    for flag, folder in (("--split-dir", args.split_dir), ("--image-root", args.image_root)):
        if not os.path.isdir(folder):
            parser.error(f"{flag} {folder}: no such folder")
        if os.path.commonpath([output, os.path.realpath(folder)]) == output:
            parser.error(f"--output-dir {args.output_dir} holds {flag} {folder}; choose another")


def find_files(folder: Path, make_split: bool) -> dict[str, Path]:
    """Returns split -> JSONL of a split folder, `<split>_hn.jsonl` before `<split>.jsonl`.

    Raises:
        ValueError: There is none, or, for --make-split, more than one of no known name.
    """
    found = {}
    for split in SPLITS:
        files = [folder / name for name in (f"{split}_hn.jsonl", f"{split}.jsonl") if (folder / name).is_file()]
        if files:
            found[split] = files[0]
    others = sorted(folder.glob("[!.]*.jsonl")) if make_split and not found else []
    others = [file for file in others if not file.name.endswith(BY_PRODUCTS)]
    if len(others) > 1:
        names = ", ".join(file.name for file in others)
        raise ValueError(f"{folder}: which of {names} holds the rows? Leave one, or name it train.jsonl")
    if not found and not others:
        raise ValueError(f"{folder}: holds no train_hn.jsonl, eval_hn.jsonl, test_hn.jsonl, nor train.jsonl and so on")
    return found or {"train": others[0]}


def check_facts(paths: list[str], args: argparse.Namespace) -> dict[str, ImageFact]:
    """Returns the fact of every image; facts remembered beside the rows are not decoded again."""
    cache = FactCache(args.split_dir)
    facts = {path: cache.get(path, args.max_image_pixels) for path in paths}
    unknown = [path for path, fact in facts.items() if fact is None]
    with progress(len(unknown), "images", enabled=True) as bar:
        fresh = check_images(unknown, args.max_image_pixels, args.num_workers, bar.update)
    cache.add(fresh)
    return facts | {fact.path: fact for fact in fresh}


def make_split(sources: list[Source], facts: dict[str, ImageFact], args: argparse.Namespace) -> dict[str, str]:
    """Gives every usable row its new split; returns the split that owns each document."""
    rows = [(s, index) for s in sources for index, split in enumerate(s.splits) if split]
    documents = [facts[s.paths[index][0]].content for s, index in rows]
    groups = group_rows(documents, [s.labels[index] for s, index in rows])
    drawn = draw_splits(groups, args.eval_fraction, args.test_fraction, args.seed)
    for (source, index), split in zip(rows, drawn, strict=True):
        source.splits[index] = split
    return own_documents(drawn, [[facts[path].content for path in s.paths[index]] for s, index in rows])


def count_shared(sources: list[Source], key: Callable[[Source, int], Any]) -> int:
    """Returns how many values of a key of the rows stand in more than one split: a test on them shows little."""
    splits: dict[Any, set[str]] = {}
    for source in sources:
        for index, split in enumerate(source.splits):
            if split:
                splits.setdefault(key(source, index), set()).add(split)
    return sum(len(found) > 1 for found in splits.values())


def place_images(used: dict[str, str], folder: Path, link_mode: str) -> Counter[str]:
    """Links or copies every used image into the data set folder; returns how many of each kind."""
    kinds: Counter[str] = Counter()
    placed: set[str] = set()
    for path, name in used.items():
        target = folder / name
        if name in placed:  # two spellings of one path
            continue
        placed.add(name)
        if target.exists():
            raise ValueError(f"{path}: {name} is taken by an image whose name differs in case or accents only")
        target.parent.mkdir(parents=True, exist_ok=True)
        kinds[place_image(os.path.realpath(path), target, link_mode)] += 1
    return kinds


def place_image(source: str, target: Path, link_mode: str) -> str:
    """Makes one image at `target`; returns how: the link mode, or "copy" where the file system makes no such link."""
    if link_mode != "copy":
        try:
            (os.link if link_mode == "hardlink" else os.symlink)(source, target)
            return link_mode
        except OSError:
            pass
    shutil.copyfile(source, target)
    return "copy"


def export(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Fills the data set folder; returns its summary."""
    names: dict[str, str] = {}
    root = os.path.realpath(args.image_root)
    sources = [
        read_source(file, split, root, args.group_field, names)
        for split, file in find_files(Path(args.split_dir), args.make_split).items()
    ]
    facts = check_facts(list(names), args)
    for source in sources:
        skip_bad_rows(source, facts, args.output_dir, args.max_bad_fraction)
    exporter = Exporter(names, facts, make_split(sources, facts, args) if args.make_split else {})
    if count := count_shared(sources, lambda source, index: facts[source.paths[index][0]].content):
        print(f"note: {count} positives stand in more than one split; --make-split keeps documents apart")
    if count := count_shared(sources, lambda source, index: source.queries[index]):
        print(f"note: {count} queries stand in more than one split; --make-split --group-field query parts them")
    drawn = {split for source in sources for split in source.splits}
    num_rows = {
        split: write_jsonl(folder / f"{split}.jsonl", exporter.rows(sources, split))
        for split in SPLITS
        if split in drawn
    }
    kinds = place_images(exporter.used, folder, args.link_mode)
    print("images: " + ", ".join(f"{count} by {how}" for how, count in kinds.items()))
    for what in ("num_bad_paths_left_out", "num_paths_of_other_splits_left_out"):
        if count := sum(source.counts[what] for source in sources):
            print(f"note: {what} {count} (hard negatives and candidates; their rows are written)")
    for key, where in exporter.absolute.items():
        print(f"note: field '{key}' names places of this machine, first in {where}; it is published as it is")
    name = os.path.basename(os.path.abspath(args.output_dir))
    images = sorted(set(exporter.used.values()))
    write_text(folder / "README.md", render_card(name, args.license, num_rows, exporter.types.features(), len(images)))
    summary = {
        "sources": [{"file": source.file.name, **source.counts} for source in sources],
        "splits": {split: {"num_rows": rows} for split, rows in num_rows.items()},
        "num_images": len(images),
        "num_image_bytes": sum((folder / image).stat().st_size for image in images),
    }
    if args.make_split:
        summary["seed"] = args.seed
    write_text(folder / SUMMARY, dump_json(summary, indent=1) + "\n")
    return summary


def main(argv: list[str] | None = None) -> int:
    """Runs the script and returns its exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    validate(parser, args)

    def work() -> int:
        with folder_output(args.output_dir, args.overwrite, marker=SUMMARY) as folder:
            summary = export(args, folder)
        rows = ", ".join(f"{split} {counts['num_rows']}" for split, counts in summary["splits"].items())
        print(f"{args.output_dir}: rows {rows}; {summary['num_images']} images")
        return 0

    return run_script(work)


if __name__ == "__main__":
    sys.exit(main())
