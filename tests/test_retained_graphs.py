"""Retained graphs, vision features computed once, chunks by tokens, less memory on the way: gradients stay the same."""

from __future__ import annotations

import itertools
import json
import math
import random
import weakref
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from contrastors.biqwen3 import BiQwen3, PatchProjection
from contrastors.chunking import (
    GIB,
    MAX_PADDED_TO_REAL,
    ChunkCost,
    Chunking,
    SavedBytes,
    add_gradients,
    choose_retained,
    count_fitting_graphs,
    count_free_bytes,
    count_retained,
    cut_batch,
    make_full_chunk,
    measure_chunk,
    pack_by_tokens,
)
from contrastors.images import open_image
from contrastors.loss import get_chunked_embeddings, grad_cache_loss
from contrastors.records import Pair
from contrastors.validation import image_paths
from tests.gradients import (
    build_model,
    clear_gradients,
    compare,
    embed_by_hand,
    make_pairs,
    reference_loss,
    split_groups,
)
from tests.runs import losses, metrics, same_weights, train
from tests.test_grad_equivalence import contrast, make_batch

NUM_ROWS, NUM_NEGATIVES = 6, 2
SOME, ALL = 3, 99


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    return make_pairs(tmp_path_factory.mktemp("tiles"), NUM_ROWS, NUM_NEGATIVES)


def build(folder, pairs, chunking, **options):
    """Model, logit scale, processor, the step cut by `chunking`, and its contrast."""
    model, scale, processor = build_model(folder, **options)
    batch, ordered = make_batch(pairs, processor, NUM_NEGATIVES)
    cut = cut_batch(batch.queries, batch.documents, chunking, processor.merge_size)

    def work(embeddings):
        documents = embeddings[cut.num_queries :][cut.places]
        return contrast(torch.cat([embeddings[: cut.num_queries], documents]), batch, scale, NUM_NEGATIVES)

    return model, scale, processor, cut, work, ordered


def gradients_of(model, scale, run):
    clear_gradients(model, scale)
    torch.manual_seed(99)
    run()
    return split_groups(model, scale)


# ------------------------------------------------------------------------------------------------------ equal gradients


@pytest.mark.parametrize(
    ("tokens", "checkpointing", "dropout", "vision"),
    list(itertools.product((0, 24), (False, True), (0.0, 0.2), (False, True))),
)
def test_gradients_are_those_of_one_graph_however_many_are_retained(
    tiny_model, pairs, tokens, checkpointing, dropout, vision
):
    chunking = Chunking(documents=3, tokens=tokens)
    model, scale, _, cut, work, _ = build(tiny_model, pairs, chunking, dropout=dropout, vision=vision)
    if checkpointing:
        model.enable_gradient_checkpointing()
    wanted = gradients_of(model, scale, lambda: work(torch.cat([model(**c) for c in cut.chunks])).loss.backward())
    classic = None
    for retained, reuse in itertools.product((0, SOME, ALL), (False,) if vision else (False, True)):
        encode = model.encode_images if reuse else None
        found = gradients_of(model, scale, partial(grad_cache_loss, model, cut.chunks, work, 1.0, retained, encode))
        for group, (difference, cosine, _) in compare(found, wanted).items():
            assert difference < 1e-5 and cosine >= 0.9999, (retained, reuse, group, difference)
        classic = classic or found
        assert all(torch.equal(found[group], classic[group]) for group in classic), (retained, reuse)


def test_chunks_by_tokens_give_the_gradients_of_the_full_batch(tiny_model, pairs):
    """Against a reference that shares no code: embeddings went back to their order."""
    model, scale, processor, cut, work, ordered = build(tiny_model, pairs, Chunking(documents=4, tokens=24))
    assert cut.places.tolist() != list(range(len(cut.places)))
    found = gradients_of(model, scale, partial(grad_cache_loss, model, cut.chunks, work))
    paths = image_paths(ordered)

    def reference():
        queries = embed_by_hand(model, processor, [processor.encode_query(p.query) for p in ordered])
        vectors = embed_by_hand(model, processor, [processor.encode_document(open_image(p)) for p in paths])
        by_path = dict(zip(paths, vectors, strict=True))
        reference_loss(queries, by_path.__getitem__, ordered, NUM_NEGATIVES, scale).backward()

    assert max(row[0] for row in compare(found, gradients_of(model, scale, reference)).values()) < 1e-5


# ------------------------------------------------------------------------------------------------------- forwards, once


def count_calls(module, calls):
    module.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    return calls


@pytest.mark.parametrize("reuse", [False, True])
@pytest.mark.parametrize("retained", [0, 2, ALL])
def test_a_retained_chunk_is_forwarded_once_and_reused_features_are_computed_once(tiny_model, pairs, retained, reuse):
    model, _, _, cut, work, _ = build(tiny_model, pairs, Chunking(documents=3))
    language, vision = count_calls(model.base.language_model, []), count_calls(model.base.visual, [])
    grad_cache_loss(model, cut.chunks, work, 1.0, retained, model.encode_images if reuse else None)
    total, with_images = len(cut.chunks), sum("pixel_values" in chunk for chunk in cut.chunks)
    replayed, replayed_images = max(0, total - retained), max(0, with_images - retained)
    assert with_images > 3
    assert len(language) == total + replayed and sum(language) == total
    assert len(vision) == with_images + (0 if reuse else replayed_images)


def test_one_chunk_is_never_forwarded_twice():
    encoder = nn.Linear(3, 4)
    calls = count_calls(encoder, [])
    output = grad_cache_loss(encoder, [{"input": torch.ones(2, 3)}], lambda e: FakeLoss(e.sum(), e.sum().detach()))
    assert calls == [True] and encoder.weight.grad is not None and not output.loss.requires_grad


class FakeLoss(tuple):
    def __new__(cls, loss, accuracy):
        return super().__new__(cls, (loss, accuracy))

    loss = property(lambda self: self[0])
    accuracy = property(lambda self: self[1])


def test_features_in_place_of_pixels_give_the_same_bits_and_draw_no_random_number(tiny_model, pairs):
    model, _, _, cut, _, _ = build(tiny_model, pairs, Chunking(documents=3), dropout=0.2)
    text, images = cut.chunks[0], cut.chunks[-1]
    torch.manual_seed(4)
    wanted, before = model(**images), torch.get_rng_state()
    torch.manual_seed(4)
    encoded = model.encode_images(images)
    assert "pixel_values" not in encoded and model.encode_images(text) is text
    assert torch.equal(model(**encoded), wanted) and torch.equal(torch.get_rng_state(), before)


def test_no_features_outlive_the_step(tiny_model, pairs):
    model, _, _, cut, work, _ = build(tiny_model, pairs, Chunking(documents=3))
    alive = []

    def encode(chunk):
        encoded = model.encode_images(chunk)
        if "image_features" in encoded:
            alive.extend(map(weakref.ref, encoded["image_features"].pooler_output))
        return encoded

    grad_cache_loss(model, cut.chunks, work, 1.0, 0, encode)
    assert alive and not any(reference() is not None for reference in alive)


def test_features_of_a_vision_part_that_trains_are_refused(tiny_model, pairs):
    model, _, _, cut, _, _ = build(tiny_model, pairs, Chunking(documents=3), vision=True)
    assert model.trains_vision
    with pytest.raises(AssertionError, match="have no gradient"):
        model.encode_images(cut.chunks[-1])


def test_patch_embedding_equals_its_convolution_and_keeps_its_keys():
    convolution = nn.Conv3d(3, 20, kernel_size=(2, 4, 4), stride=(2, 4, 4))
    patches = torch.randn(50, 3, 2, 4, 4)
    projection = PatchProjection(convolution)
    difference = projection(patches) - convolution(patches).flatten(1)
    assert difference.norm() / projection(patches).norm() < 1e-6
    assert projection.state_dict().keys() == convolution.state_dict().keys()
    assert projection.weight is convolution.weight


# ----------------------------------------------------------------------------------------------------- chunks by tokens

PROMPT = 20


def padded_to_real(plan, lengths):
    return sum(len(c) * max(lengths[p] for p in c) for c in plan) / sum(lengths)


@settings(max_examples=200)
@given(st.lists(st.integers(4, 256), min_size=1, max_size=80), st.integers(1, 20), st.integers(256, 2048))
def test_packing_keeps_every_document_once_within_all_limits(visual, size, limit):
    lengths = [v + PROMPT for v in visual]
    plan = pack_by_tokens(lengths, visual, size, limit)
    assert sorted(place for chunk in plan for place in chunk) == list(range(len(visual)))
    assert all(len(chunk) <= size and sum(visual[p] for p in chunk) <= limit for chunk in plan)
    assert padded_to_real(plan, lengths) <= MAX_PADDED_TO_REAL


@pytest.mark.parametrize("full", [256, 1024])
def test_half_full_tiles_and_half_of_part_height_are_padded_by_less_than_five_percent(full):
    source = random.Random(0)
    visual = [full] * 32 + [int(full * source.uniform(0.1, 0.9)) for _ in range(32)]
    source.shuffle(visual)
    lengths = [v + PROMPT for v in visual]
    plan = pack_by_tokens(lengths, visual, size=16, max_visual=4 * full)
    in_order = [range(start, start + 4) for start in range(0, 64, 4)]
    assert padded_to_real(plan, lengths) <= 1.05 < padded_to_real(in_order, lengths)
    assert len(plan) <= 64 / 2


def test_a_document_above_the_limit_stands_alone():
    assert pack_by_tokens([320, 30, 30], [300, 10, 10], 8, 100) == [[0], [1, 2]]


# --------------------------------------------------------------------------------------------------------------- budget


def test_saved_bytes_count_each_storage_once_and_no_parameter():
    layers = nn.ModuleList([nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False)])
    inputs = torch.randn(7, 10)
    with SavedBytes(layers) as saved:
        (layers[0](inputs) + layers[1](inputs)).sum()
    assert saved.total == 7 * 10 * 4


def test_budgets_are_kept_and_larger_ones_retain_more(tiny_model, pairs):
    counts = []
    for size in (3, 5, 9):
        chunking = Chunking(documents=2, reuse_features=True)
        model, _, processor, cut, _, _ = build(tiny_model, pairs, chunking, dropout=0.1)
        cost = measure_chunk(model, make_full_chunk(processor, chunking), reuse_features=True)
        budget = size * cost.graph
        choose_retained(model, processor, chunking, budget / GIB, NUM_ROWS, 1 + NUM_NEGATIVES)
        retained = count_retained(cut.chunks, chunking)
        assert retained == min(chunking.num_retained, len(cut.chunks))
        with SavedBytes(model) as saved:
            chunks = [*map(model.encode_images, cut.chunks[: len(cut.chunks) - retained]), *cut.chunks[-retained:]]
            embeddings, states = get_chunked_embeddings(model, chunks, retained)
        features = [c["image_features"] for c in chunks if "image_features" in c]
        kept = sum(t.numel() * 4 for f in features for t in (*f.pooler_output, *itertools.chain(*f.deepstack_features)))
        assert 0 < saved.total + kept <= budget, (size, retained)
        assert sum(isinstance(state, torch.Tensor) for state in states) == retained and len(embeddings)
        counts.append(retained)
    assert counts[0] < counts[1] < counts[2]


@pytest.mark.parametrize(
    ("budget", "wanted"),
    [(0, 0), (349, 0), (350, 1), (549, 2), (550, 3), (1049, 7), (1050, 10)],  # all ten retained keep no features
)
def test_features_and_the_work_of_a_backward_count_in_the_budget(budget, wanted):
    cost = ChunkCost(graph=100, working=50, features=10, tokens=1)
    assert count_fitting_graphs(cost, budget, num_visual=20, num_chunks=10) == wanted


@pytest.mark.parametrize(("tokens", "documents"), [(0, 3), (32, 3), (40, 8)])
def test_no_chunk_of_a_step_costs_more_than_the_measured_one(tiny_model, pairs, tokens, documents):
    chunking = Chunking(documents=documents, tokens=tokens)
    model, _, processor, cut, _, _ = build(tiny_model, pairs, chunking)
    choose_retained(model, processor, chunking, 1.0, NUM_ROWS, 1 + NUM_NEGATIVES)
    assert count_retained(cut.chunks, chunking) == len(cut.chunks)
    full = measure_chunk(model, make_full_chunk(processor, chunking), reuse_features=False).graph
    for chunk in cut.chunks:
        assert measure_chunk(model, chunk, reuse_features=False).graph <= full * (MAX_PADDED_TO_REAL if tokens else 1)


def test_a_chunk_above_the_measured_size_ends_the_retaining(tiny_model, pairs):
    chunking = Chunking(documents=3)
    _, _, _, cut, _, _ = build(tiny_model, pairs, chunking)
    sizes = [chunk["input_ids"].numel() for chunk in cut.chunks]
    limit = max(sizes) - 1
    chunking.num_retained, chunking.retained_tokens = ALL, limit
    assert count_retained(cut.chunks, chunking) == len(sizes) - 1 - max(i for i, n in enumerate(sizes) if n > limit)


def test_measuring_draws_no_random_number_and_leaves_no_gradient(tiny_model, pairs):
    model, _, processor, _, _, _ = build(tiny_model, pairs, Chunking(documents=2), dropout=0.2)
    before = torch.get_rng_state()
    choose_retained(model, processor, Chunking(documents=2, reuse_features=True), 0.0, NUM_ROWS, 3)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_features_that_do_not_fit_into_the_budget_are_not_reused(tiny_model, pairs):
    chunking = Chunking(documents=2, reuse_features=True)
    model, _, processor, _, _, _ = build(tiny_model, pairs, chunking)
    choose_retained(model, processor, chunking, 1e-6, NUM_ROWS, 1 + NUM_NEGATIVES)
    assert chunking.num_retained == 0 and not chunking.reuse_features


@pytest.mark.parametrize(("limit", "wanted"), [(4, 4), (16, 16), (251, 250)])  # 251 x 1 is no picture: aspect over 200
def test_the_full_chunk_holds_as_many_visual_tokens_as_allowed(tiny_model, limit, wanted):
    from contrastors.processing import BiQwen3Processor

    processor = BiQwen3Processor.from_pretrained(str(tiny_model), max_num_visual_tokens=limit)
    chunk = make_full_chunk(processor, Chunking(documents=2))
    assert chunk["attention_mask"].sum(dim=1).diff().tolist() == [-1]
    assert (chunk["input_ids"] == processor.image_token_id).sum(dim=1).tolist() == [wanted] * 2


class LiveSavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """The largest number of saved bytes that were alive at once."""

    def __init__(self):
        self.now = self.peak = 0
        super().__init__(self._save, lambda holder: holder.tensor)

    def __enter__(self):
        super().__enter__()
        return self

    def _save(self, tensor):
        holder = type("Holder", (), {"tensor": tensor})()
        size = tensor.numel() * tensor.element_size()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(holder, self._free, size)
        return holder

    def _free(self, size):
        self.now -= size


def test_memory_of_classic_gradcache_does_not_grow_with_the_batch(tiny_model, tmp_path):
    peaks = {}
    for rows in (16, 64):
        model, scale, processor = build_model(tiny_model)
        pairs = []
        for row in range(rows):
            path = tmp_path / f"{rows}_{row}.png"
            Image.new("RGB", (64, 64), (row * 3, 255 - row, 90)).save(path)
            pairs.append(Pair(row, row + 1, f"{row:02d} red", str(path), []))
        batch, _ = make_batch(pairs, processor, 0)
        cut = cut_batch(batch.queries, batch.documents, Chunking(documents=4), processor.merge_size)
        work = partial(contrast, batch=batch, logit_scale=scale, num_negatives=0)
        for retained in (0, ALL):
            with LiveSavedBytes() as saved:
                grad_cache_loss(model, cut.chunks, work, 1.0, retained)
            peaks[rows, retained] = saved.peak
    assert abs(peaks[64, 0] / peaks[16, 0] - 1) < 0.05, peaks
    assert peaks[64, ALL] > 3 * peaks[16, ALL]  # the counter does see graphs


# -------------------------------------------------------------------------------------------------------- out of memory


def test_memory_that_runs_out_costs_own_graphs_first_then_features_then_asks_for_smaller_chunks(
    tiny_model, pairs, monkeypatch
):
    chunking = Chunking(documents=2, num_retained=4, reuse_features=True)
    model, scale, _, cut, work, _ = build(tiny_model, pairs, chunking)

    def fail(self, **_):
        raise torch.OutOfMemoryError("simulated")

    monkeypatch.setattr(BiQwen3, "forward", fail)
    found = []
    for _ in range(5):
        outcome = add_gradients(model, cut, work, 1.0, chunking)
        found.append((outcome.needs_halves, chunking.num_retained, chunking.reuse_features))
        assert outcome.gave_up_own is not outcome.needs_halves
    assert found == [(False, 2, True), (False, 1, True), (False, 0, True), (False, 0, False), (True, 0, False)]
    assert chunking.halve() and chunking.documents == 1 and not chunking.halve()


@given(documents=st.integers(1, 10**6), tokens=st.integers(4, 10**5), largest=st.integers(4, 1024))
def test_halving_never_makes_a_chunk_larger_and_ends_at_one_document(documents, tokens, largest):
    chunking, sizes = Chunking(documents, tokens), []
    while True:
        plan = pack_by_tokens([largest] * 64, [largest] * 64, chunking.documents, chunking.tokens)
        sizes.append(max(map(len, plan)))
        if not chunking.halve():
            break
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] == 1 and chunking.tokens > 0
    assert len(sizes) <= 2 + math.log2(tokens)


def test_ranks_of_a_machine_share_its_memory_and_each_cuda_rank_has_a_device_of_its_own(monkeypatch):
    alone = count_free_bytes(torch.device("cpu"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert count_free_bytes(torch.device("cpu")) == pytest.approx(alone / 4, rel=0.5)


def chunking_of(folder):
    return json.loads((folder / "trainer_state.json").read_text())["chunking"]


def test_out_of_memory_in_a_step_halves_the_chunk_and_trains_the_same_weights(args, colour_set, monkeypatch, capsys):
    flags = {"lora_dropout": 0.0, "eval_steps": 0, "max_steps": 4}
    assert train(args("small", grad_cache_chunk=1, **flags)) == 0
    whole = BiQwen3.forward

    def fail_on_two_images(self, input_ids, image_grid_thw=None, **inputs):
        if image_grid_thw is not None and len(image_grid_thw) > 1 and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("simulated")
        return whole(self, input_ids, image_grid_thw=image_grid_thw, **inputs)

    monkeypatch.setattr(BiQwen3, "forward", fail_on_two_images)
    assert train(args("large", grad_cache_chunk=4, retain_graphs=1, **flags)) == 0
    assert losses(colour_set / "small") == losses(colour_set / "large")
    assert same_weights(colour_set / "small" / "checkpoint-4", colour_set / "large" / "checkpoint-4")
    log = (colour_set / "large" / "train.log").read_text()
    assert log.count("a rank ran out of memory") == 4 and "chunks of 1 documents" in log  # graph, features, 4 -> 2 -> 1
    recorded = chunking_of(colour_set / "large" / "checkpoint-2")
    assert (recorded["documents"], recorded["num_retained"], recorded["reuse_features"]) == (1, 0, False)
    assert train(["--resume", str(colour_set / "large" / "checkpoint-2"), "--grad-cache-chunk", "4"]) == 0
    assert "ran out of memory" not in capsys.readouterr().out.split("checkpoint-4")[-1]
    assert same_weights(colour_set / "small" / "checkpoint-4", colour_set / "large" / "checkpoint-4")


def test_a_single_document_that_does_not_fit_ends_the_run_with_a_sentence(args, colour_set, monkeypatch, capsys):
    whole = BiQwen3.forward

    def fail_with_grad(self, input_ids, **inputs):
        if torch.is_grad_enabled():
            raise torch.OutOfMemoryError("simulated")
        return whole(self, input_ids, **inputs)

    monkeypatch.setattr(BiQwen3, "forward", fail_with_grad)
    assert train(args("run", eval_steps=0)) == 1
    assert "out of memory at step 1 with chunks of one; use --gradient-checkpointing" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------- whole runs


def test_runs_train_the_same_weights_however_much_they_retain(args, colour_set):
    flags = {"num_hard_negatives": 2, "eval_steps": 0, "save_steps": 0}
    settings_of = {
        "classic": {"reuse_vision_features": False}, "once": {}, "some": {"retain_graphs": 2},
        "all": {"retain_graphs": ALL}, "auto": {"retain_graphs": "auto", "memory_budget_gb": 0.01},
    }  # fmt: skip
    for name, more in settings_of.items():
        assert train(args(name, **flags, **more)) == 0
    for name in settings_of:
        assert metrics(colour_set / name) == metrics(colour_set / "classic"), name
        assert same_weights(colour_set / name / "checkpoint-4", colour_set / "classic" / "checkpoint-4")
    found = {name: chunking_of(colour_set / name / "checkpoint-4") for name in settings_of}
    assert [found[name]["num_retained"] for name in ("classic", "once", "some", "all")] == [0, 0, 2, ALL]
    assert found["once"]["reuse_features"] and not found["classic"]["reuse_features"]
    assert 0 < found["auto"]["num_retained"] < ALL


def test_resume_with_automatic_retaining_is_bit_identical_and_measures_nothing_anew(args, colour_set, monkeypatch):
    flags = {"retain_graphs": "auto", "memory_budget_gb": 0.004, "chunk_tokens": 32, "max_steps": 6, "save_steps": 3}
    flags |= {"num_hard_negatives": 1, "eval_steps": 0}
    for name in ("whole", "parts"):
        assert train(args(name, **flags)) == 0
    recorded = chunking_of(colour_set / "whole" / "checkpoint-3")
    assert recorded["num_retained"] > 0 and recorded["tokens"] == 32
    monkeypatch.setattr("contrastors.chunking.choose_retained", None)
    assert train(["--resume", str(colour_set / "parts" / "checkpoint-3")]) == 0
    assert metrics(colour_set / "whole") == metrics(colour_set / "parts")
    assert same_weights(colour_set / "whole" / "checkpoint-6", colour_set / "parts" / "checkpoint-6")
    assert chunking_of(colour_set / "parts" / "checkpoint-6") == recorded
    monkeypatch.undo()
    argv = ["--resume", str(colour_set / "parts" / "checkpoint-3"), "--memory-budget-gb", "0.02"]
    assert train(argv) == 0
    assert chunking_of(colour_set / "parts" / "checkpoint-6")["num_retained"] > recorded["num_retained"]
    assert same_weights(colour_set / "whole" / "checkpoint-6", colour_set / "parts" / "checkpoint-6")


def test_vision_adapters_turn_the_reuse_off(args, colour_set):
    assert train(args("run", lora_vit=True, max_steps=1, eval_steps=0)) == 0
    assert not chunking_of(colour_set / "run" / "checkpoint-1")["reuse_features"]
