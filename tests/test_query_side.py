"""--mode query-side-tune: documents that never move, queries that do, the cache, gradients of both backward paths."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from PIL import Image

from contrastors.batches import DocumentVectors, ItemDataset, StepDataset, contrast_batch
from contrastors.biqwen3 import BiQwen3
from contrastors.checkpoint import load_adapter
from contrastors.chunking import Chunking, add_gradients, cut_batch
from contrastors.data import BatchOrder, build_training_set
from contrastors.distributed import World
from contrastors.evaluation import embed
from contrastors.images import open_image
from contrastors.loading import Encoder, load_bi_encoder, load_encoder
from contrastors.query_side import Wanted, freeze_documents
from contrastors.validation import check_image, image_paths
from tests.gradients import (
    build_model,
    clear_gradients,
    compare,
    embed_by_hand,
    make_pairs,
    reference_loss,
    split_groups,
)
from tests.runs import arguments, largest_difference, losses, metrics, run_on_ranks, same_weights, train

ALONE = World(0, 1, torch.device("cpu"))
MODE = "query-side-tune"


@pytest.fixture
def args(tiny_model, colour_set):
    """args(output, **flags) -> argv of a quick query-side run; `colour_set` is the folder of its data."""

    def build(output: str, **flags) -> list[str]:
        defaults = {"mode": MODE, "grad_cache_chunk": None}
        return arguments(tiny_model, colour_set, colour_set / output, **(defaults | flags))

    return build


def tile_paths(folder: Path) -> list[str]:
    return sorted(map(str, folder.glob("c*.png")))


def vectors_of(model, processor, kind: str, sources: list[str]) -> torch.Tensor:
    return embed(model.eval(), ItemDataset(processor, kind, sources, 2**62), ALONE, 16, 0)


# ------------------------------------------------------------------------------------------------- what moves and not


def test_documents_stay_bit_identical_and_queries_move_wherever_the_adapter_is_loaded(args, tiny_model, colour_set):
    assert train(args("run", lr=1e-2, max_steps=6)) == 0
    base, processor = load_bi_encoder(str(tiny_model), ALONE.device, max_num_visual_tokens=16)
    tiles, queries = tile_paths(colour_set), ["red", "green", "blue"]
    before = [vectors_of(base, processor, *both) for both in (("document", tiles), ("query", queries))]
    tuned = load_encoder(str(tiny_model), str(colour_set / "run" / "checkpoint-6"), ALONE, "fp32", 16, 512)
    after = [vectors_of(tuned.model, processor, *both) for both in (("document", tiles), ("query", queries))]
    assert torch.equal(before[0], after[0])
    assert (1 - (before[1] * after[1]).sum(dim=1)).min() > 1e-3
    assert "**For queries alone**" in (colour_set / "run" / "checkpoint-6" / "README.md").read_text()
    # An index, or a cache, of the base model's documents is the one that belongs to this adapter.
    untuned = load_encoder(str(tiny_model), None, ALONE, "fp32", 16, 512)
    assert tuned.identity_of("document") == untuned.identity_of("document")
    assert tuned.identity_of("query") != untuned.identity_of("query")


def test_the_evaluation_of_the_run_is_the_base_s_documents_against_the_tuned_queries(args, tiny_model, colour_set):
    assert train(args("run", max_steps=6, eval_steps=6)) == 0
    run = colour_set / "run"
    found = json.loads((run / "eval_step6.json").read_text())
    assert (
        train(args("again", max_steps=None, resume=run / "checkpoint-6", eval_only=True, output_dir=colour_set / "b"))
        == 0
    )
    assert json.loads((colour_set / "b" / "eval_step6.json").read_text()) == found
    assert found != json.loads((run / "eval_step0.json").read_text())


def test_switching_the_adapter_off_gives_the_base_and_leaves_what_trains_as_it_was(tiny_model, tmp_path):
    model, _, processor = build_model(tiny_model)
    plain, _ = load_bi_encoder(str(tiny_model), ALONE.device, max_num_visual_tokens=16)
    tile = tmp_path / "tile.png"
    Image.radial_gradient("L").convert("RGB").resize((64, 64)).save(tile)
    wanted, adapted = (vectors_of(m, processor, "document", [str(tile)]) for m in (plain, model))
    assert not torch.equal(wanted, adapted)
    for trainable in (True, False):
        for parameter in model.trainable_parameters().values() if not trainable else ():
            parameter.requires_grad_(False)
        names = list(model.trainable_parameters())
        model.documents_by_base = True
        assert torch.equal(vectors_of(model, processor, "document", [str(tile)]), wanted)
        model.documents_by_base = False
        assert torch.equal(vectors_of(model, processor, "document", [str(tile)]), adapted)
        assert list(model.trainable_parameters()) == names and bool(names) == trainable


def test_no_second_copy_of_the_base_model_is_in_memory(args, monkeypatch):
    sizes = {}
    whole = BiQwen3.train
    for mode in ("standard", MODE):

        def note(model, on=True, mode=mode):
            parameters = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
            sizes.setdefault(mode, []).append(sum(parameters.values()))
            return whole(model, on)

        monkeypatch.setattr(BiQwen3, "train", note)
        loads = []
        monkeypatch.setattr(BiQwen3, "from_pretrained", counting(BiQwen3.from_pretrained, loads))
        assert train(args(f"run_{mode}", mode=mode)) == 0
        assert len(loads) == 1
    assert max(sizes[MODE]) == max(sizes["standard"])


def counting(function, calls: list):
    def call(*args, **options):
        calls.append(args)
        return function(*args, **options)

    return call


# ------------------------------------------------------------------------------------------------------- gradients


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return make_pairs(tmp_path_factory.mktemp("pairs"), 8, 2)


def frozen_batch(model, processor, pairs, num_negatives: int, cache: Path):
    """A batch of query-side tuning, its documents embedded by the base model through the cache."""
    data = build_training_set(pairs, {p: check_image(p) for p in image_paths(pairs)}, num_negatives)
    dataset = StepDataset(data, BatchOrder(len(pairs), len(pairs), 0), processor, num_negatives, len(pairs))
    model.documents_by_base = True
    encoder = Encoder(model, processor, {"model": "x", "adapter": None, "dtype": "x"})
    wanted = [Wanted(data.documents, dataset.documents_of(0, 1))]
    dataset.vectors = freeze_documents(encoder, cache, wanted, ALONE, 4, 0, 2**62).vectors[0]
    return dataset, dataset[0], [pairs[row] for row in dataset.order.rows(0)]


@pytest.mark.parametrize("num_negatives", [0, 2])
@pytest.mark.parametrize(
    "chunking",
    [
        Chunking(1, queries=8),
        Chunking(1, queries=1),
        Chunking(1, queries=3, num_retained=1),
        Chunking(1, query_tokens=90),
    ],
    ids=["direct", "gradcache 1", "gradcache 3, one retained", "gradcache by tokens"],
)
def test_both_backward_paths_give_the_gradients_of_a_plain_backward(
    tiny_model, tmp_path, pairs, num_negatives, chunking
):
    model, scale, processor = build_model(tiny_model, torch.float64)
    dataset, batch, ordered = frozen_batch(model, processor, pairs, num_negatives, tmp_path / "cache")
    assert batch.is_frozen and not batch.documents.requires_grad
    cut = cut_batch(batch.queries, batch.documents, chunking, processor.merge_size)
    assert len(cut.chunks) == {8: 1, 1: 8, 3: 3}.get(chunking.queries, len(cut.chunks)) and len(cut.chunks) <= 8
    contrast = partial(contrast_batch, batch, cut.places, scale, num_negatives, 0)
    outcome = add_gradients(model, cut, contrast, 1.0, chunking)
    found = split_groups(model, scale)
    clear_gradients(model, scale)
    tiles = {path: processor.encode_document(open_image(path)) for path in image_paths(ordered, num_negatives > 0)}
    table = dataset.data.documents
    frozen = {path: dataset.vectors[[table.number(path)]][0] for path in tiles}
    with torch.no_grad(), model.without_adapter():
        by_hand = torch.cat([embed_by_hand(model, processor, [tile]) for tile in tiles.values()])
    assert (torch.stack([*frozen.values()]) - by_hand).abs().max() < 1e-5  # other neighbours in the batch: rounding
    queries = embed_by_hand(model, processor, [processor.encode_query(pair.query) for pair in ordered])
    loss = reference_loss(queries, lambda path: frozen[path].double(), ordered, num_negatives, scale)
    loss.backward()
    assert outcome.output.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    for group, (relative, cosine, _) in compare(found, split_groups(model, scale)).items():
        assert relative < 1e-6 and cosine > 0.999999, (group, relative, cosine)


def test_memory_that_runs_out_cuts_the_queries_and_ends_where_one_is_too_much(tiny_model, tmp_path, pairs, monkeypatch):
    model, scale, processor = build_model(tiny_model)
    _, batch, _ = frozen_batch(model, processor, pairs, 0, tmp_path / "cache")
    whole = BiQwen3.forward

    def fail_above_two(self, **inputs):
        if len(inputs["input_ids"]) > 2:
            raise torch.OutOfMemoryError("simulated")
        return whole(self, **inputs)

    monkeypatch.setattr(BiQwen3, "forward", fail_above_two)
    chunking, sizes = Chunking(1, queries=8), []
    while True:
        cut = cut_batch(batch.queries, batch.documents, chunking, processor.merge_size)
        contrast = partial(contrast_batch, batch, cut.places, scale, 0, 0)
        outcome = add_gradients(model, cut, contrast, 1.0, chunking)
        sizes.append(chunking.queries)
        if not outcome.needs_halves:
            break
        assert chunking.halve()
    assert sizes == [8, 4, 2] and torch.isfinite(outcome.output.loss)
    assert not Chunking(1, queries=1).halve()


# ------------------------------------------------------------------------------------------------------------ cache


def documents_line(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith("documents:"))


def test_vectors_are_computed_once_and_anew_for_what_changed(args, colour_set, tiny_model, capsys, tmp_path):
    cache = colour_set / "cache"

    def embedded(output: str, **flags) -> str:
        assert train(args(output, document_cache=cache, max_steps=6, eval_steps=0, **flags)) == 0
        return documents_line(capsys.readouterr().out)

    assert embedded("first").startswith("documents: 12 of 12 embedded")
    assert embedded("second").startswith("documents: 0 of 12 embedded")
    # The same bytes under another name are the same document.
    (colour_set / "c00.png").rename(colour_set / "other.png")
    rows = (colour_set / "rows.jsonl").read_text()
    (colour_set / "rows.jsonl").write_text(rows.replace("c00.png", "other.png"))
    assert embedded("renamed").startswith("documents: 0 of 12 embedded")
    Image.new("RGB", (64, 64), (1, 2, 3)).save(colour_set / "c01.png")
    assert embedded("changed").startswith("documents: 1 of 12 embedded")
    assert embedded("pixels", max_num_visual_tokens=9).startswith("documents: 12 of 12 embedded")
    other = tmp_path / "other_model"
    shutil.copytree(tiny_model, other)
    assert embedded("copied", model=other).startswith("documents: 0 of 12 embedded")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"_note": "another checkpoint"}))
    assert embedded("model", model=other).startswith("documents: 12 of 12 embedded")
    assert len(list(cache.iterdir())) == 3


def test_vectors_that_mining_kept_need_not_be_embedded_again(args, colour_set, tiny_model, capsys):
    from mine_hard_negatives import main as mine

    argv = ["--input", colour_set / "rows.jsonl", "--output", colour_set / "mined.jsonl", "--model", tiny_model]
    more = [
        "--embeddings-dir",
        colour_set / "kept",
        "--max-num-visual-tokens",
        16,
        "--num-workers",
        0,
        "--device",
        "cpu",
    ]
    assert mine([*map(str, [*argv, *more])]) == 0
    assert train(args("run", document_cache=colour_set / "kept", max_steps=2, eval_steps=0)) == 0
    assert documents_line(capsys.readouterr().out).startswith("documents: 0 of ")


def test_only_documents_that_the_steps_need_are_embedded(args, colour_set, capsys):
    assert train(args("run", batch_size=2, max_steps=3, eval_steps=0, num_hard_negatives=1)) == 0
    count = int(documents_line(capsys.readouterr().out).split()[1])
    assert 6 <= count < 12
    assert (
        train(
            args("more", batch_size=2, max_steps=6, eval_steps=0, document_cache=colour_set / "run" / "document_cache")
        )
        == 0
    )
    assert documents_line(capsys.readouterr().out).startswith(f"documents: {12 - count} of 12")


@pytest.mark.parametrize("sample", [False, True])
def test_the_documents_of_the_steps_are_those_of_their_batches(tiny_model, pairs, sample):
    processor = build_model(tiny_model)[2]
    data = build_training_set(pairs, {p: check_image(p) for p in image_paths(pairs)}, 2)
    dataset = StepDataset(data, BatchOrder(8, 2, 7), processor, 1, 2, sample_negatives=sample)
    asked: set[int] = set()

    class Noting:
        def __getitem__(self, numbers):
            asked.update(numbers.tolist())
            return torch.zeros(len(numbers), 4)

    dataset.vectors = Noting()
    for first, last in ((0, 3), (2, 9)):
        asked.clear()
        for step in range(first, last):
            dataset[step]
        assert sorted(asked) == dataset.documents_of(first, last)


@pytest.mark.parametrize("damage", [0.0, 3.0, float("nan")])
def test_damaged_vectors_are_named_and_not_trained_on(args, colour_set, capsys, damage):
    import numpy as np

    cache = colour_set / "cache"
    assert train(args("whole", document_cache=cache, max_steps=2, eval_steps=0)) == 0
    (file,) = cache.glob("*/*.vectors")
    (np.fromfile(file, dtype="<f4") * np.float32(damage)).tofile(file)
    assert train(args("damaged", document_cache=cache, max_steps=2, eval_steps=0)) == 1
    assert f"{file.parent}: " in (err := capsys.readouterr().err) and "the cache is damaged (delete the folder)" in err
    assert train(args("evaluated", document_cache=cache, max_steps=2)) == 1
    file.unlink()
    assert train(args("mended", document_cache=cache, max_steps=2)) == 0


def test_an_adapter_knows_what_it_is_for_without_the_rest_of_its_folder(args, tiny_model, colour_set):
    assert train(args("run", max_steps=2, eval_steps=0)) == 0
    bare = colour_set / "bare"
    bare.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(colour_set / "run" / "checkpoint-2" / name, bare)
    model, _ = load_bi_encoder(str(tiny_model), ALONE.device, max_num_visual_tokens=16)
    load_adapter(model, bare, trainable=False)
    assert model.documents_by_base


def test_a_gradcache_of_tokens_is_halved_down_to_one_query():
    chunking = Chunking(1, query_tokens=512)
    rooms = []
    while chunking.halve():
        rooms.append(chunking.query_tokens)
    assert rooms == [256, 128, 64, 32, 16, 8, 4, 2, 1]


def test_a_document_without_a_vector_is_a_fault_of_ours():
    import numpy as np

    vectors = DocumentVectors(np.eye(3, dtype=np.float32), [4, 0, 2])
    assert torch.equal(vectors[[2, 4]], torch.eye(3)[[2, 0]])
    with pytest.raises(AssertionError, match="1 documents have no vector"):
        vectors[[0, 1]]


# ------------------------------------------------------------------------------------------------------------- runs


def test_direct_and_gradcache_walk_one_path_and_a_resumed_run_is_bit_identical(args, colour_set):
    common = {"lora_dropout": 0.0, "num_hard_negatives": 2, "max_steps": 4}
    assert train(args("direct", **common)) == 0
    assert train(args("cached", query_side_backward="gradcache", query_chunk=1, **common)) == 0
    assert losses(colour_set / "direct") == pytest.approx(losses(colour_set / "cached"), abs=1e-6)
    assert train(args("whole", max_steps=4)) == 0
    assert train(args("half", max_steps=4)) == 0
    shutil.rmtree(colour_set / "half" / "checkpoint-4")
    assert train(["--resume", "latest", "--output-dir", str(colour_set / "half"), "--device", "cpu"]) == 0
    assert metrics(colour_set / "half") == metrics(colour_set / "whole")
    assert same_weights(colour_set / "half" / "checkpoint-4", colour_set / "whole" / "checkpoint-4")
    assert json.loads((colour_set / "half" / "checkpoint-4" / "trainer_state.json").read_text())["args"]["mode"] == MODE


def test_a_mode_cannot_change_on_resume(args, colour_set, capsys):
    assert train(args("run", max_steps=2)) == 0
    argv = ["--resume", str(colour_set / "run" / "checkpoint-2"), "--mode", "standard", "--max-steps", "4"]
    assert train([*argv, "--allow-changed-args"]) == 1
    assert "--mode standard (checkpoint: query-side-tune)" in capsys.readouterr().err


def test_a_checkpoint_of_before_there_were_modes_is_of_the_standard_one(args, colour_set, capsys):
    assert train(args("run", mode="standard", max_steps=2)) == 0
    file = colour_set / "run" / "checkpoint-2" / "trainer_state.json"
    state = json.loads(file.read_text())
    del state["args"]["mode"]
    file.write_text(json.dumps(state))
    argv = ["--resume", str(file.parent), "--max-steps", "4", "--allow-changed-args"]
    assert train([*argv, "--mode", MODE]) == 1
    assert "--mode query-side-tune (checkpoint: standard)" in capsys.readouterr().err
    assert train(argv) == 0


SLOW_RANK = """
import os, random, torch
if os.environ.get("RANK") == "1":
    import time
    whole = torch.optim.AdamW.step
    def step(self, *args, **options):
        time.sleep(random.random() * {longest})
        return whole(self, *args, **options)
    torch.optim.AdamW.step = step
"""


@pytest.mark.dist
def test_ranks_with_mixed_negatives_and_a_slow_one_do_the_same_steps(args, colour_set, monkeypatch):
    """Both backward paths; the run walks the path of one process on the global batch."""
    rows = [json.loads(line) for line in (colour_set / "rows.jsonl").read_text().splitlines()]
    for place, row in enumerate(rows):
        row["neg_chunk_paths"] = row["neg_chunk_paths"][: place % 3]
    (colour_set / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (colour_set / "site").mkdir()
    (colour_set / "site" / "sitecustomize.py").write_text(SLOW_RANK.format(longest=0.1))
    common = {"max_steps": 12, "num_hard_negatives": 2, "lora_dropout": 0.0, "grad_reduction": "mean", "lr": 1e-3}
    assert train(args("one", batch_size=8, **common)) == 0
    monkeypatch.setenv("PYTHONPATH", str(colour_set / "site"))
    for backward in ("direct", "gradcache"):
        code, text = run_on_ranks(args(backward, batch_size=4, query_side_backward=backward, **common), 2)
        assert code == 0, text[-3000:]
        assert losses(colour_set / backward) == pytest.approx(losses(colour_set / "one"), abs=2e-5)
        assert len(losses(colour_set / backward)) == 12
        last = [colour_set / name / "checkpoint-12" for name in (backward, "one")]
        assert largest_difference(*last) < 1e-4  # they have moved by 1e-2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"lora_vit": True}, "they have no pixels"),
        ({"query_side_backward": "gradcache", "retain_graphs": "auto"}, "give a number of chunks"),
        ({"query_chunk": 2}, "--query-chunk acts on --query-side-backward gradcache only"),
        ({"grad_cache_chunk": 2}, "--grad-cache-chunk acts on --query-side-backward gradcache only"),
        ({"chunk_tokens": 64}, "--chunk-tokens is about chunks of documents"),
        (
            {"query_side_backward": "gradcache", "query_chunk": 2, "grad_cache_chunk": 2},
            "--grad-cache-chunk and --query-chunk both say how many queries a forward has; give one",
        ),
        ({"test_jsonl": "x"}, "--test-jsonl needs --search-api-url"),
        ({"search_api_url": "http://127.0.0.1:9", "eval_steps": 0}, "--eval-steps 0 has none"),
        ({"plan": True}, "--plan knows --mode standard only"),
        ({"mode": "standard", "query_side_backward": "direct"}, "acts on --mode query-side-tune only"),
        ({"mode": "standard", "document_cache": "x"}, "--document-cache acts on --mode query-side-tune only"),
        ({"mode": "standard", "search_api_url": "http://x"}, "--search-api-url acts on --mode query-side-tune only"),
    ],
)
def test_flags_that_could_not_act_are_refused(args, flags, message, capsys):
    assert train(args("run", **flags)) == 2
    assert message in capsys.readouterr().err


def test_a_cache_that_ranks_do_not_share_is_named(tiny_model, tmp_path, pairs, monkeypatch):
    from contrastors import query_side

    model, _, processor = build_model(tiny_model)
    monkeypatch.setattr(query_side, "embed_missing", lambda *rest: 0)  # another rank's work, which never arrives here
    with pytest.raises(ValueError, match="a folder that all ranks share"):
        frozen_batch(model, processor, pairs, 0, tmp_path / "cache")


def test_an_adapter_of_the_standard_mode_acts_on_documents(args, tiny_model, colour_set):
    assert train(args("run", mode="standard", max_steps=2)) == 0
    model, _ = load_bi_encoder(str(tiny_model), ALONE.device, max_num_visual_tokens=16)
    load_adapter(model, colour_set / "run" / "checkpoint-2", trainable=False)
    assert not model.documents_by_base
