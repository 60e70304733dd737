"""The data sets of a run, from its flags: every image looked at, every row that cannot be used told."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contrastors.data import TrainingSet, build_training_set, validate_images
from contrastors.distributed import World
from contrastors.evaluation import EvalSet, build_eval_set
from contrastors.records import check_bad_rows, read_pairs
from contrastors.runlog import RunLog, progress
from contrastors.validation import image_paths


def load_data(
    args: argparse.Namespace, world: World, log: RunLog, folder: Path, on_image: Callable[[], None] = lambda: None
) -> tuple[TrainingSet | None, EvalSet | None]:
    """Returns training and evaluation set (None where not asked for), the same on every rank; looks at each image.

    Args:
        args: Flags of training.
        world: Ranks.
        log: Of the run.
        folder: Of the run.
        on_image: Called after each image of this rank.
    """

    def load(source: str, max_rows: int, with_negatives: bool, build: Callable, report: str) -> Any:
        pairs, resolver = read_pairs(source, max_rows)
        paths = image_paths(pairs, with_negatives)
        with progress(len(paths) // world.size, "checking images", world.is_main) as bar:

            def count(number: int) -> None:
                bar.update(number)
                on_image()

            facts = validate_images(paths, resolver.folder, args.max_image_pixels, args.num_workers, world, count)
        data = build(pairs, facts)
        if world.is_main:
            check_bad_rows(source, data.bad_rows, len(pairs), args.max_bad_fraction, folder / report)
        if resolver.num_renamed:
            log.say(f"{source}: {resolver.num_renamed} paths were found under their other Unicode form")
        if data.bad_rows:
            log.say(f"{source}: skipped {len(data.bad_rows)} of {len(pairs)} rows, listed in {folder / report}")
        return data

    train = evaluation = None
    if not args.eval_only:
        drop = args.missing_negatives == "drop-row"
        options = (args.num_hard_negatives, drop, args.mask_false_negatives)
        with_negatives = args.num_hard_negatives > 0
        build = lambda pairs, facts: build_training_set(pairs, facts, *options)  # noqa: E731
        train = load(args.train_jsonl, args.max_train_rows, with_negatives, build, "bad_rows.jsonl")
        report_training_set(args, train, log)
        if args.batch_size * world.size == 1 and not all(row.negatives for row in train.rows):
            raise ValueError(
                "a global batch of one row has nothing to contrast where the row has no usable negative; use a larger "
                "--batch-size, or --missing-negatives drop-row"
            )
    if args.eval_steps or args.eval_only:
        evaluation = load(args.eval_jsonl, args.max_eval_rows, True, build_eval_set, "bad_eval_rows.jsonl")
        missing = f", {evaluation.num_bad_negatives} negatives unreadable" if evaluation.num_bad_negatives else ""
        log.say(
            f"evaluation: {len(evaluation.queries)} queries, corpus of {len(evaluation.documents)} documents{missing}"
        )
    return train, evaluation


def report_training_set(args: argparse.Namespace, train: TrainingSet, log: RunLog) -> None:
    """Says what the rows hold; refuses a file without the hard negatives that were asked for."""
    wanted = args.num_hard_negatives
    slots = wanted * len(train.rows)
    filled = sum(min(wanted, len(row.negatives)) for row in train.rows)
    if wanted and not filled:
        raise ValueError(
            f"--num-hard-negatives {wanted}, but no row of {args.train_jsonl} has a usable neg_chunk_paths"
        )
    log.say(f"training: {len(train.rows)} rows, {len(train.documents)} distinct documents")
    if wanted:
        log.say(
            f"hard negatives: {filled} of {slots} slots filled, {train.num_bad_negatives} unreadable, "
            f"{train.num_positive_negatives} known positives left out, {train.num_dropped} rows dropped"
        )
