"""Splits rows into train, eval and test so that no document stands in two of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

SPLITS = ("train", "eval", "test")


def group_rows(documents: Sequence[str], labels: Sequence[str]) -> list[str]:
    """Returns the group of each row: rows that share a document or a label, directly or in a chain, share a group.

    Args:
        documents: Content hash of each row's positive.
        labels: What else keeps rows together, such as the page; "" = nothing.
    """
    parent: dict[str, str] = {}

    def find(key: str) -> str:
        parent.setdefault(key, key)
        while parent[key] != key:
            parent[key] = parent[parent[key]]
            key = parent[key]
        return key

    for document, label in zip(documents, labels, strict=True):
        if label:
            parent[find(document)] = find(f"label {label}")
    return [find(document) for document in documents]


def draw_splits(groups: Sequence[str], eval_fraction: float, test_fraction: float, seed: int) -> list[str]:
    """Returns the split of each row; groups stay whole, eval and test never get more rows than their share.

    Args:
        groups: Group of each row.
        eval_fraction: Share of rows for eval; 0 = no such split.
        test_fraction: Share of rows for test; 0 = no such split.
        seed: Of the shuffle of groups.

    Raises:
        ValueError: A split that was asked for stays empty.
    """
    sizes = Counter(groups)
    order = sorted(sizes)
    random.Random(seed).shuffle(order)
    room = {"eval": eval_fraction * len(groups), "test": test_fraction * len(groups)}
    wanted = {"train"} | {split for split, rows in room.items() if rows}
    drawn = {}
    for group in order:
        drawn[group] = next((split for split, rows in room.items() if sizes[group] <= rows), "train")
        if drawn[group] in room:
            room[drawn[group]] -= sizes[group]
    missing = wanted.difference(drawn.values())
    if missing:
        raise ValueError(
            f"--make-split leaves no row for {', '.join(sorted(missing))}: {len(groups)} rows in {len(sizes)} groups "
            f"that stay whole, the largest of {max(sizes.values(), default=0)}; change the fractions or --group-field"
        )
    return [drawn[group] for group in groups]


def own_documents(splits: Sequence[str], documents: Sequence[Sequence[str]]) -> dict[str, str]:
    """Returns the one split that may show each document.

    A row's positive belongs to the row's split; a document that is no row's positive goes to the first split that
    names it, in the order train, eval, test, so that training keeps its hard negatives.

    Args:
        splits: Split of each row; "" = the row is skipped.
        documents: Documents of each row, the positive first.
    """
    owners = {row[0]: split for split, row in zip(splits, documents, strict=True) if split}
    for wanted in SPLITS:
        for split, row in zip(splits, documents, strict=True):
            if split == wanted:
                for document in row:
                    owners.setdefault(document, split)
    return owners
