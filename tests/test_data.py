from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from contrastors.batches import (
    LONGEST_SOCKET_FOLDER,
    BatchFailure,
    ItemDataset,
    StepDataset,
    load_batches,
    load_items,
)
from contrastors.data import BatchOrder, DocumentTable, build_training_set, validate_images
from contrastors.distributed import World, pick_device
from contrastors.images import MAX_IMAGE_PIXELS, open_image
from contrastors.processing import BiQwen3Processor
from contrastors.records import Pair, read_pairs
from contrastors.validation import CACHE_NAME, ImageFact, check_image, image_paths
from tests.conftest import ROOT

EXAMPLES = settings(max_examples=50)
CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)


@pytest.fixture(scope="module")
def processor(tiny_model: Path) -> BiQwen3Processor:
    return BiQwen3Processor.from_pretrained(str(tiny_model), max_num_visual_tokens=4)


@pytest.fixture(scope="module")
def tiles(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Twelve documents; tile 12 has the bytes of tile 0 under another name, tile 13 is no picture."""
    folder = tmp_path_factory.mktemp("tiles")
    paths = [str(folder / f"{number}.png") for number in range(14)]
    for number, path in enumerate(paths[:12]):
        Image.new("RGB", (32, 32), (20 * number, 255 - 20 * number, 7)).save(path)
    shutil.copy(paths[0], paths[12])
    Path(paths[13]).write_bytes(b"no picture")
    return paths


def make_pairs(tiles: list[str], rows: list[tuple[str, int, list[int]]]) -> list[Pair]:
    """Rows of (query, tile of the positive, tiles of the negatives); lines count from 1."""
    return [Pair(i, i + 1, query, tiles[p], [tiles[n] for n in ns]) for i, (query, p, ns) in enumerate(rows)]


def know(pairs: list[Pair]) -> dict[str, ImageFact]:
    return {path: check_image(path) for path in image_paths(pairs)}


def build(processor, pairs, num_negatives=0, global_batch=None, seed=0, **options) -> StepDataset:
    """The dataset of one rank that takes the whole global batch."""
    drop = options.pop("drop_incomplete", False)
    masks = options.get("mask_false_negatives", True)
    data = build_training_set(pairs, know(pairs), num_negatives, drop, masks)
    order = BatchOrder(len(data.rows), global_batch or len(data.rows), seed)
    return StepDataset(data, order, processor, num_negatives, order.global_batch, **options)


def as_ranks(dataset: StepDataset, num_ranks: int) -> list[StepDataset]:
    size = dataset.order.global_batch // num_ranks
    return [replace(dataset, batch_size=size, rank=rank) for rank in range(num_ranks)]


def flatten(batch) -> list[torch.Tensor]:
    """Everything tensor-like of a batch, for bitwise comparison."""
    parts = [batch.slots, *batch.mask, torch.tensor(batch.lines), torch.tensor(batch.num_truncated)]
    for inputs in (batch.queries, batch.documents):
        parts += [inputs.token_ids, torch.tensor(inputs.lengths), inputs.patches, inputs.grids]
    return [part for part in parts if part is not None]


def assert_equal_batches(found, wanted) -> None:
    for a, b in zip(flatten(found), flatten(wanted), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def pixels_of_slots(batch) -> list[bytes]:
    """The pixels behind each document slot of a batch."""
    vectors = [chunk["pixel_values"].numpy().tobytes() for chunk in batch.documents.chunks(1)]
    return [vectors[slot] for slot in batch.slots.tolist()]


def pixels_of_tile(processor, path: str) -> bytes:
    return processor.encode_document(open_image(path)).patches.numpy().tobytes()


# --- order ---


@EXAMPLES
@given(
    num_rows=st.integers(1, 60), batch=st.integers(1, 60), seed=st.integers(0, 2**31), steps=st.permutations(range(9))
)
def test_order_is_a_pure_function_of_seed_and_epoch(num_rows, batch, seed, steps):
    batch = min(batch, num_rows)
    order = BatchOrder(num_rows, batch, seed)
    forward = [order.rows(step).tolist() for step in range(9)]
    fresh = {step: BatchOrder(num_rows, batch, seed).rows(step).tolist() for step in steps}
    assert forward == [fresh[step] for step in range(9)]


@EXAMPLES
@given(num_rows=st.integers(1, 60), batch=st.integers(1, 60), seed=st.integers(0, 99), epoch=st.integers(0, 5))
def test_a_row_comes_at_most_once_an_epoch_and_only_the_short_last_batch_is_dropped(num_rows, batch, seed, epoch):
    order = BatchOrder(num_rows, min(batch, num_rows), seed)
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    assert {order.epoch(step) for step in steps} == {epoch}
    rows = np.concatenate([order.rows(step) for step in steps]).tolist()
    assert len(set(rows)) == len(rows) == num_rows - num_rows % order.global_batch
    assert set(rows) <= set(range(num_rows))


def test_each_epoch_and_each_seed_has_another_order():
    orders = [np.concatenate([BatchOrder(12, 2, seed).rows(6 * epoch + i) for i in range(6)]).tolist()
              for seed in range(3) for epoch in range(4)]  # fmt: skip
    assert all(a != b for a, b in itertools.combinations([list(range(12)), *orders], 2))


def test_every_row_has_its_turn_although_each_epoch_drops_some():
    order = BatchOrder(num_rows=11, global_batch=4, seed=0)
    seen = Counter(row for step in range(2 * 30) for row in order.rows(step).tolist())
    assert set(seen) == set(range(11)) and max(seen.values()) <= 30


def test_fewer_rows_than_one_global_batch_is_an_error():
    assert BatchOrder(8, 8, 0).steps_per_epoch == 1
    with pytest.raises(ValueError) as caught:
        BatchOrder(7, 8, 0)
    assert str(caught.value) == (
        "7 usable rows do not fill one global batch of 8 (--batch-size x ranks); "
        "use a smaller --batch-size or more rows"
    )
    with pytest.raises(ValueError, match="^0 usable rows"):
        BatchOrder(0, 1, 0)


# --- ranks and resuming ---

TWELVE = [(f"q{i}", i, [(i + 1) % 12, (i + 3) % 12, (i + 5) % 12]) for i in range(12)]


def test_slices_of_the_ranks_partition_the_global_batch_for_every_world_size(processor, tiles):
    whole = build(processor, make_pairs(tiles, TWELVE), 2, global_batch=6)
    for step in (0, 1, 2, 5):
        rows = whole.order.rows(step)
        for num_ranks in (1, 2, 3, 6):
            batches = [dataset[step] for dataset in as_ranks(whole, num_ranks)]
            assert [line - 1 for batch in batches for line in batch.lines] == rows.tolist()
            pixels = [tile for batch in batches for tile in pixels_of_slots(batch)]
            assert pixels == pixels_of_slots(whole[step])
            assert all(torch.equal(batch.mask.missing, whole[step].mask.missing) for batch in batches)
            size = 6 // num_ranks
            moved = [[rank * size + q, c] for rank, b in enumerate(batches) for q, c in b.mask.pairs.tolist()]
            assert moved == whole[step].mask.pairs.tolist() and moved


def test_resuming_at_any_step_yields_the_batches_of_an_undisturbed_run(processor, tiles):
    pairs = make_pairs(tiles, TWELVE)
    options = {"global_batch": 5, "sample_negatives": True}  # 2 steps an epoch, 2 rows dropped
    undisturbed = list(load_batches(build(processor, pairs, 1, **options), 0, 8, 0, CPU))
    for first in (1, 3, 7):
        resumed = list(load_batches(build(processor, pairs, 1, **options), first, 8, 0, CPU))
        for found, wanted in zip(resumed, undisturbed[first:], strict=True):
            assert_equal_batches(found, wanted)


def test_workers_yield_the_batches_of_this_process_in_order(processor, tiles):
    dataset = build(processor, make_pairs(tiles, TWELVE), 2, global_batch=4)
    alone, workers = (list(load_batches(dataset, 1, 6, num_workers, CPU)) for num_workers in (0, 2))
    assert len(alone) == 5
    for found, wanted in zip(workers, alone, strict=True):
        assert_equal_batches(found, wanted)


# --- rows ---


def test_a_bad_positive_is_a_bad_row_with_line_path_and_reason(tiles):
    pairs = make_pairs(tiles, [("a", 1, []), ("b", 13, [2]), ("c", 3, []), ("d", 4, [])])
    pairs[2].positive = str(Path(tiles[0]).with_name("gone.png"))
    data = build_training_set(pairs, know(pairs), 1)
    assert [row.line for row in data.rows] == [1, 4]
    assert [(bad.line, bad.path) for bad in data.bad_rows] == [(2, tiles[13]), (3, pairs[2].positive)]
    assert "not a picture" in data.bad_rows[0].reason and "No such file" in data.bad_rows[1].reason


def test_a_bad_negative_leaves_an_empty_slot_that_is_masked_for_all(processor, tiles):
    dataset = build(processor, make_pairs(tiles, [("a", 1, [13, 2]), ("b", 3, [13]), ("c", 4, [])]), 2)
    assert dataset.data.num_bad_negatives == 2 and not dataset.data.bad_rows
    batch = dataset[0]
    for place, line in enumerate(batch.lines):
        missing = batch.mask.missing.view(3, 3)[place].tolist()
        assert missing == {1: [False, False, True], 2: [False, True, True], 3: [False, True, True]}[line]
    assert not batch.mask.missing.view(3, 3)[:, 0].any(), "a label must never be masked"
    assert set(range(len(batch.documents))) >= set(batch.slots.tolist()), "an empty slot must still have a vector"


def test_known_positives_of_the_same_query_are_never_negatives(tiles):
    rows = [("same", 0, [1, 12, 2]), ("same", 1, [0, 3]), ("other", 2, [0, 1])]
    pairs = make_pairs(tiles, rows)
    data = build_training_set(pairs, know(pairs), 3)
    numbers = {n: data.documents.number(tiles[n]) for n in range(4)}
    assert [row.negatives for row in data.rows] == [[numbers[2]], [numbers[3]], [numbers[0], numbers[1]]]
    assert data.num_positive_negatives == 3  # 1 and the copy of 0 in the first row, 0 in the second
    off = build_training_set(pairs, know(pairs), 3, mask_false_negatives=False)
    assert [len(row.negatives) for row in off.rows] == [2, 2, 2], "the own positive is no negative even when off"


def test_a_negative_listed_twice_counts_once(tiles):
    pairs = make_pairs(tiles, [("a", 1, [0, 0, 12, 2])])
    assert len(build_training_set(pairs, know(pairs), 4).rows[0].negatives) == 2


def test_negatives_are_not_looked_at_without_hard_negatives(tiles):
    pairs = make_pairs(tiles, [("a", 1, [13, 2])])
    facts = {tiles[1]: check_image(tiles[1])}
    data = build_training_set(pairs, facts, 0)
    assert data.rows[0].negatives == [] and len(data.documents) == 1 and data.num_bad_negatives == 0


def test_drop_row_leaves_out_rows_with_too_few_usable_negatives(tiles):
    pairs = make_pairs(tiles, [("a", 1, [2, 3]), ("b", 4, [13, 5]), ("c", 6, [6, 7]), ("d", 8, [9, 10, 11])])
    kept = build_training_set(pairs, know(pairs), 2, drop_incomplete=True)
    assert [row.line for row in kept.rows] == [1, 4] and kept.num_dropped == 2
    assert len(build_training_set(pairs, know(pairs), 2).rows) == 4


def test_the_positive_of_a_dropped_row_still_answers_its_query(tiles):
    pairs = make_pairs(tiles, [("same", 1, []), ("same", 2, [1, 3])])
    (row,) = build_training_set(pairs, know(pairs), 1, drop_incomplete=True).rows
    assert (row.line, len(row.negatives)) == (2, 1)


def test_equal_bytes_under_two_names_are_one_document(tiles):
    table = DocumentTable({path: check_image(path) for path in tiles})
    assert table.number(tiles[0]) == table.number(tiles[12]) == 0 and table.paths == [tiles[0]]
    assert table.number(tiles[1]) == 1 and len(table) == 2


# --- negatives of a step ---


def test_the_first_usable_negatives_are_taken_in_file_order(processor, tiles):
    dataset = build(processor, make_pairs(tiles, [("a", 0, [13, 12, 5, 3, 4])]), 2, seed=3)
    wanted = [pixels_of_tile(processor, tiles[n]) for n in (0, 5, 3)]
    assert [pixels_of_slots(dataset[step]) for step in (0, 4)] == [wanted, wanted]


def test_sampled_negatives_are_seeded_and_differ_between_epochs_and_rows(processor, tiles):
    pairs = make_pairs(tiles, [("a", 0, list(range(2, 12))), ("b", 1, list(range(2, 12)))])

    def chosen(seed: int, epoch: int) -> dict[int, list[bytes]]:
        batch = build(processor, pairs, 3, seed=seed, sample_negatives=True)[epoch]
        slots = pixels_of_slots(batch)
        return {line: slots[4 * place : 4 * place + 4] for place, line in enumerate(batch.lines)}

    usable = {pixels_of_tile(processor, tiles[n]) for n in range(2, 12)}
    every = []
    for seed, epoch in itertools.product((0, 1), range(3)):
        found = chosen(seed, epoch)
        assert found == chosen(seed, epoch)
        for line, tile in ((1, 0), (2, 1)):
            assert found[line][0] == pixels_of_tile(processor, tiles[tile])
            assert len(set(found[line][1:])) == 3 and set(found[line][1:]) <= usable
            every.append(tuple(found[line][1:]))
    assert len(set(every)) >= 11, "12 draws of 3 in order out of 10 nearly all differ"


def test_sampled_negatives_are_the_same_on_all_ranks(processor, tiles):
    rows = [(f"q{i}", i, [n for n in range(12) if n != i]) for i in range(6)]
    whole = build(processor, make_pairs(tiles, rows), 2, sample_negatives=True)
    for step in (0, 3):
        ranks = [dataset[step] for dataset in as_ranks(whole, 3)]
        assert [tile for batch in ranks for tile in pixels_of_slots(batch)] == pixels_of_slots(whole[step])
        pairs = [[2 * rank + q, c] for rank, batch in enumerate(ranks) for q, c in batch.mask.pairs.tolist()]
        assert pairs == whole[step].mask.pairs.tolist() and pairs, "another rank's mask would hide the wrong column"


def test_sampling_with_too_few_negatives_takes_them_all(processor, tiles):
    dataset = build(processor, make_pairs(tiles, [("a", 0, [5, 3])]), 3, sample_negatives=True)
    batch = dataset[2]
    wanted = [pixels_of_tile(processor, tiles[n]) for n in (0, 5, 3)]
    assert pixels_of_slots(batch)[:3] == wanted and batch.mask.missing.tolist() == [False, False, False, True]


# --- the column mask ---

ROW = st.tuples(st.sampled_from("abc"), st.integers(0, 13), st.lists(st.integers(0, 13), max_size=4))


@EXAMPLES
@given(rows=st.lists(ROW, min_size=1, max_size=6), num_negatives=st.integers(0, 2), seed=st.integers(0, 5))
def test_the_mask_hides_known_positives_and_empty_slots_and_nothing_else(processor, tiles, rows, num_negatives, seed):
    rows = [row for row in rows if row[1] != 13] or [("a", 0, [])]
    pairs = make_pairs(tiles, rows)
    dataset = build(processor, pairs, num_negatives, seed=seed)
    batch, group = dataset[0], 1 + num_negatives
    content = {path: Path(path).read_bytes() for path in tiles}
    known = {q: {content[p.positive] for p in pairs if p.query == q} for q in "abc"}
    chosen = [pairs[line - 1] for line in batch.lines]
    columns = []  # what stands in each column, worked out from the rows alone
    for pair in chosen:
        usable = dict.fromkeys(content[n] for n in pair.negatives if n != tiles[13])
        usable = [c for c in usable if c not in known[pair.query]][:num_negatives]
        columns += [content[pair.positive], *usable, *[None] * (num_negatives - len(usable))]
    assert batch.mask.missing.tolist() == [column is None for column in columns]
    hidden = [
        [query, place]
        for query, pair in enumerate(chosen)
        for place, column in enumerate(columns)
        if column in known[pair.query] and place != query * group
    ]
    assert batch.mask.pairs.tolist() == hidden
    by_content = {content[path]: pixels_of_tile(processor, path) for path in tiles[:12]}
    for column, pixels in zip(columns, pixels_of_slots(batch), strict=True):
        assert column is None or pixels == by_content[column], "a slot holds another document than its mask thinks"


def test_copies_of_the_own_positive_and_other_positives_of_the_query_are_masked(processor, tiles):
    rows = [("same", 0, []), ("copy", 12, []), ("same", 1, []), ("far", 2, [])]
    batch = build(processor, make_pairs(tiles, rows))[0]
    place = {line: where for where, line in enumerate(batch.lines)}
    hidden = {(1, 2), (1, 3), (3, 1), (3, 2), (2, 1)}  # (line of the query, line of the column's positive)
    assert {tuple(p) for p in batch.mask.pairs.tolist()} == {(place[q], place[c]) for q, c in hidden}


def test_without_masking_only_empty_slots_are_hidden(processor, tiles):
    rows = [("same", 0, [1]), ("same", 1, []), ("copy", 12, [2])]
    batch = build(processor, make_pairs(tiles, rows), 1, mask_false_negatives=False)[0]
    assert batch.mask.pairs.shape == (0, 2) and batch.mask.pairs.dtype == torch.int64
    assert int(batch.mask.missing.sum()) == 1


# --- encoding ---


def test_equal_documents_are_encoded_once(processor, tiles, monkeypatch):
    rows = [("a", 0, [5, 6]), ("b", 12, [5, 0]), ("c", 1, [6, 5])]
    dataset = build(processor, make_pairs(tiles, rows), 2)
    calls, encode = [], BiQwen3Processor.encode_document
    monkeypatch.setattr(BiQwen3Processor, "encode_document", lambda self, i: calls.append(i) or encode(self, i))
    batch = dataset[0]
    assert len(calls) == len(batch.documents) == 4 and len(batch.slots) == 9
    rank = replace(dataset, batch_size=1, rank=1)
    assert len(rank[0].documents) <= 3, "a rank encodes its own documents only"


def test_queries_that_are_cut_are_counted(tiny_model, tiles):
    processor = BiQwen3Processor.from_pretrained(str(tiny_model), 4, max_query_tokens=80)
    batch = build(processor, make_pairs(tiles, [("a " * 300, 0, []), ("short", 1, []), ("b " * 300, 2, [])]))[0]
    assert batch.num_truncated == 2 and sorted(batch.queries.lengths)[1:] == [80, 80]


def test_a_batch_moves_whole(processor, tiles):
    batch = build(processor, make_pairs(tiles, TWELVE), 1)[0]
    moved = batch.to(torch.device("meta"))
    assert len(flatten(moved)) == len(flatten(batch)) and (moved.lines, moved.num_truncated) == (batch.lines, 0)
    tensors = [moved.slots, *moved.mask, moved.queries.token_ids, moved.documents.patches, moved.documents.grids]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


# --- images that vanish ---


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_image_that_vanishes_after_validation_is_one_sentence_with_its_path(processor, tiles, tmp_path, num_workers):
    gone = str(shutil.copy(tiles[3], tmp_path / "going.png"))
    dataset = build(processor, make_pairs([gone, *tiles[4:6]], [("a", 0, []), ("b", 1, []), ("c", 2, [])]))
    os.unlink(gone)
    wanted = (
        f"{gone} can no longer be read (No such file or directory); it was good when the run began; mend it and go on"
    )
    with pytest.raises(ValueError) as caught:
        list(load_batches(dataset, 0, 1, num_workers, CPU))
    assert str(caught.value) == wanted
    items = ItemDataset(processor, "document", [tiles[4], gone], MAX_IMAGE_PIXELS)
    with pytest.raises(ValueError) as caught:
        list(load_items(items, range(2), 2, num_workers, CPU))
    assert str(caught.value) == wanted


def test_the_pixel_limit_reaches_the_batches(processor, tiles):
    dataset = build(processor, make_pairs(tiles, [("a", 0, [])]), max_image_pixels=400)
    failure = dataset[0]
    assert isinstance(failure, BatchFailure) and "over twice the limit of 400 pixels" in failure.reason


# --- items of an evaluation ---


@pytest.mark.parametrize("num_workers", [0, 2])
def test_items_come_in_the_order_of_their_places(processor, tiles, num_workers):
    dataset = ItemDataset(processor, "document", tiles[:12], MAX_IMAGE_PIXELS)
    places = [7, 0, 3, 11, 5]
    found = list(load_items(dataset, places, 2, num_workers, CPU))
    assert [len(inputs) for inputs in found] == [2, 2, 1]
    pixels = [chunk["pixel_values"] for inputs in found for chunk in inputs.chunks(1)]
    for place, one in zip(places, pixels, strict=True):
        assert torch.equal(one, processor.encode_document(open_image(tiles[place])).patches)


def test_no_items_yield_no_batches(processor):
    assert list(load_items(ItemDataset(processor, "query", [], 1), range(0), 4, 2, CPU)) == []


def test_what_workers_receive_can_be_pickled(processor, tiles, monkeypatch):
    """Where workers are spawned (macOS, Windows, Python 3.14) the dataset and the collation travel as pickles."""
    sent = []

    class Loader(torch.utils.data.DataLoader):
        def __init__(self, dataset, **options):
            sent.append((dataset, options.get("collate_fn")))
            super().__init__(dataset, **options)

    monkeypatch.setattr("contrastors.batches.DataLoader", Loader)
    items = ItemDataset(processor, "query", ["a", "b"], 1)
    list(load_items(items, range(2), 2, 0, CPU))
    list(load_batches(build(processor, make_pairs(tiles, TWELVE)), 0, 1, 0, CPU))
    assert len(sent) == 2
    for parts in sent:
        pickle.loads(pickle.dumps(parts))


def test_a_worker_that_hangs_neither_outlives_its_loader_nor_is_waited_for_without_end(processor, tiles, monkeypatch):
    dataset, whole = build(processor, make_pairs(tiles, TWELVE)), StepDataset.__getitem__

    def hang(self, step):
        if step >= 1:
            time.sleep(600)
        return whole(self, step)

    monkeypatch.setattr(StepDataset, "__getitem__", hang)
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.3)  # how long torch waits for a worker
    batches = load_batches(dataset, 0, 9, 1, CPU)
    next(batches)
    assert multiprocessing.active_children()
    batches.close()
    assert not multiprocessing.active_children()
    monkeypatch.setattr("contrastors.batches.LOADER_TIMEOUT_S", 2)
    with pytest.raises(ValueError, match="gave nothing for 2 s: does the storage hang"):
        list(load_batches(dataset, 0, 9, 1, CPU))
    assert not multiprocessing.active_children()


WAITING = """
import sys, time, torch
from contrastors.batches import _take_all
from contrastors.cli import run_script

class Slow(torch.utils.data.Dataset):
    def __getitem__(self, place):
        time.sleep(0.1 if place < 4 else 4)
        return torch.zeros(1)

def work():
    for batch in _take_all(Slow(), 2, torch.device("cpu"), {"batch_size": None, "sampler": range(99)}):
        print("batch", flush=True)
    return 0

sys.exit(run_script(work))
"""


def test_a_signal_while_a_batch_is_awaited_ends_the_process_with_its_own_code():
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    for _ in range(4):
        assert process.stdout.readline() == b"batch\n"
    time.sleep(0.5)  # it waits for the fifth now
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM, err.decode()[-2000:]
    assert b"Error" not in err


def test_a_name_that_is_no_unicode_is_a_bad_image_and_stops_nothing(tmp_path):
    paths = [f"{tmp_path}/\ud800.png", f"{tmp_path}/\udc80.png"]
    facts = validate_images(paths, tmp_path, MAX_IMAGE_PIXELS, 0, ALONE)
    assert [facts[path].ok for path in paths] == [False, False]


def test_more_ranks_than_cuda_devices_are_told_before_torch_fails(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert pick_device("auto") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="this machine has 2 cuda devices for more ranks than that"):
        pick_device("auto")


@pytest.mark.parametrize(("num_more", "code"), [(0, 0), (1, 1)])
def test_a_name_too_long_for_sockets_of_workers_is_told_and_the_longest_works(tmp_path_factory, num_more, code):
    """Beyond it the worker's thread that sends batches dies alone, and the rank would wait for half an hour."""
    folder = tmp_path_factory.mktemp("long")
    length = LONGEST_SOCKET_FOLDER - len("/pymp-12345678") + num_more
    if length - len(str(folder)) < 2:
        pytest.skip(f"{folder} is too long itself")
    folder /= "x" * (length - len(str(folder)) - 1)
    folder.mkdir()
    whole = WAITING.replace("range(99)", "range(3)")
    command, environment = [sys.executable, "-c", whole], os.environ | {"TMPDIR": str(folder)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr[-2000:]
    assert done.stdout.count("batch") == (0 if code else 3)
    assert ("set TMPDIR to a shorter one" in done.stderr) == bool(code) and "Traceback" not in done.stderr


# --- validation ---


def test_validation_finds_good_and_bad_images_and_reports_progress(tiles, tmp_path):
    calls: list[int] = []
    facts = validate_images(tiles, tmp_path, MAX_IMAGE_PIXELS, 0, ALONE, calls.append)
    assert facts == {path: check_image(path) for path in tiles} and calls == [1] * len(tiles)
    assert [path for path, fact in facts.items() if not fact.ok] == [tiles[13]]


def test_a_second_validation_opens_bad_images_only(tiles, tmp_path):
    first = validate_images(tiles, tmp_path, MAX_IMAGE_PIXELS, 0, ALONE)
    assert (tmp_path / CACHE_NAME).exists()
    calls: list[int] = []
    again = validate_images(tiles, tmp_path, MAX_IMAGE_PIXELS, 0, ALONE, calls.append)
    assert again == first and calls == [1]


def test_a_changed_image_is_validated_again(colour_set):
    pairs, _ = read_pairs(colour_set / "rows.jsonl")
    paths = image_paths(pairs)
    before = validate_images(paths, colour_set, MAX_IMAGE_PIXELS, 0, ALONE)
    Path(paths[3]).write_bytes(b"cut off in the middle")
    after = validate_images(paths, colour_set, MAX_IMAGE_PIXELS, 0, ALONE)
    assert before[paths[3]].ok and not after[paths[3]].ok
    assert [bad.line for bad in build_training_set(pairs, after).bad_rows] == [4]


def test_the_pixel_limit_of_today_judges_remembered_images(tiles, tmp_path):
    validate_images(tiles[:2], tmp_path, MAX_IMAGE_PIXELS, 0, ALONE)
    facts = validate_images(tiles[:2], tmp_path, 1000, 0, ALONE)
    assert not any(fact.ok for fact in facts.values())


def test_a_folder_that_cannot_be_written_only_costs_the_cache(tiles, tmp_path):
    facts = validate_images(tiles[:2], tmp_path / "gone", MAX_IMAGE_PIXELS, 0, ALONE)
    assert all(fact.ok for fact in facts.values()) and not (tmp_path / "gone").exists()
