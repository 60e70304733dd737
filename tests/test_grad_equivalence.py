"""Cached gradients against full-graph gradients, in one process.

    python tests/test_grad_equivalence.py      prints the table

Bounds are on the relative L2 of each parameter group: fp64 on a plain encoder and on inputs of equal length 1e-10;
fp64 on mixed lengths 1e-6 (norms and rotary of the real classes run in fp32 inside); fp32 1e-5.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from contrastors.batches import StepDataset
from contrastors.biqwen3 import _clear_rope_deltas, pool_last_token
from contrastors.data import BatchOrder, build_training_set
from contrastors.images import open_image
from contrastors.logit_scale import LogitScale
from contrastors.loss import ColumnMask, clip_loss, get_cached_gradients, get_chunked_embeddings, grad_cache_loss
from contrastors.rand_state import RandContext
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

NUM_ROWS = 6
CHUNKS = (1, 2, 5, 64)  # one, two, uneven, everything


def make_batch(pairs, processor, num_negatives):
    facts = {path: check_image(path) for path in image_paths(pairs)}
    data = build_training_set(pairs, facts, num_negatives)
    order = BatchOrder(len(pairs), len(pairs), seed=0)
    dataset = StepDataset(data, order, processor, num_negatives, len(pairs))
    return dataset[0], [pairs[row] for row in order.rows(0)]


def contrast(embeddings, batch, logit_scale, num_negatives):
    queries, documents = embeddings[: len(batch.queries)], embeddings[len(batch.queries) :]
    return clip_loss(queries, documents[batch.slots], logit_scale, num_negatives, batch.mask)


def measure(model_folder, work, dtype, chunk, num_negatives, dropout, vision, equal_lengths=False):
    """Group -> (relative L2, cosine, norm ratio) of GradCache against a reference, and the two losses."""
    model, scale, processor = build_model(model_folder, dtype, dropout, vision)
    pairs = make_pairs(work / f"tiles{num_negatives}", NUM_ROWS, num_negatives)
    if equal_lengths:
        for pair in pairs:
            pair.query = f"{pair.index} red"
        tile = open_image(pairs[0].positive).resize((64, 64))
        for number, path in enumerate(image_paths(pairs)):
            tile.point(lambda v, n=number: (v * (n + 3)) % 251).save(path)
    batch, ordered = make_batch(pairs, processor, num_negatives)
    chunks = batch.queries.chunks(chunk) + batch.documents.chunks(chunk)
    work_fn = partial(contrast, batch=batch, logit_scale=scale, num_negatives=num_negatives)
    torch.manual_seed(99)
    found_loss = grad_cache_loss(model, chunks, work_fn).loss
    found = split_groups(model, scale)
    clear_gradients(model, scale)
    torch.manual_seed(99)
    if dropout:  # a full batch draws other masks: keep all graphs of the same chunks instead
        wanted_loss = work_fn(torch.cat([model(**c) for c in chunks])).loss
    else:
        queries = embed_by_hand(model, processor, [processor.encode_query(p.query) for p in ordered])
        paths = image_paths(ordered)
        vectors = embed_by_hand(model, processor, [processor.encode_document(open_image(p)) for p in paths])
        by_path = dict(zip(paths, vectors, strict=True))
        wanted_loss = reference_loss(queries, by_path.__getitem__, ordered, num_negatives, scale)
    wanted_loss.backward()
    return compare(found, split_groups(model, scale)), found_loss.item(), wanted_loss.item()


COMBINATIONS = list(itertools.product(CHUNKS, (0, 2), (0.0, 0.2), (False, True)))


@pytest.mark.parametrize(("chunk", "num_negatives", "dropout", "vision"), COMBINATIONS)
def test_cached_gradients_equal_full_gradients_fp32(tiny_model, tmp_path, chunk, num_negatives, dropout, vision):
    table, found, wanted = measure(tiny_model, tmp_path, torch.float32, chunk, num_negatives, dropout, vision)
    assert set(table) == {"language A", "language B", "logit scale"} | ({"vision A", "vision B"} if vision else set())
    assert abs(found - wanted) < 1e-5
    for group, (difference, cosine, _) in table.items():
        assert difference < 1e-5, (group, difference)
        assert cosine >= 0.9999, (group, cosine)


@pytest.mark.parametrize(("chunk", "num_negatives"), list(itertools.product(CHUNKS, (0, 2))))
def test_cached_gradients_equal_full_gradients_fp64_mixed_lengths(tiny_model, tmp_path, chunk, num_negatives):
    table, *_ = measure(tiny_model, tmp_path, torch.float64, chunk, num_negatives, 0.0, True)
    assert max(row[0] for row in table.values()) < 1e-6, table


@pytest.mark.parametrize("chunk", CHUNKS)
def test_cached_gradients_equal_full_gradients_fp64_equal_lengths(tiny_model, tmp_path, chunk):
    table, *_ = measure(tiny_model, tmp_path, torch.float64, chunk, 2, 0.0, True, equal_lengths=True)
    assert max(row[0] for row in table.values()) < 1e-10, table


class PlainEncoder(nn.Module):
    """A small fp64 encoder whose arithmetic hides nothing; dropout included."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 5)).double()

    def forward(self, x):
        return nn.functional.normalize(self.net(x), dim=1)


def plain_case(dropout=0.0):
    torch.manual_seed(0)
    encoder, scale = PlainEncoder(dropout), LogitScale(0.5).double()
    inputs = torch.randn(4 + 12, 7, dtype=torch.float64)

    def contrast_plain(embeddings):
        return clip_loss(embeddings[:4], embeddings[4:], scale, num_hard_negatives=2)

    return encoder, scale, inputs, contrast_plain


def flat_gradient(*modules):
    return torch.cat([p.grad.flatten().clone() for m in modules for p in m.parameters()])


@pytest.mark.parametrize("size", [1, 2, 3, 16])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_plain_encoder_is_exact_to_1e_10(size, dropout):
    encoder, scale, inputs, contrast_plain = plain_case(dropout)
    chunks = [{"x": part} for part in inputs.split(size)]
    torch.manual_seed(7)
    grad_cache_loss(encoder, chunks, contrast_plain)
    found = flat_gradient(encoder, scale)
    clear_gradients(encoder, scale)
    torch.manual_seed(7)
    contrast_plain(torch.cat([encoder(**chunk) for chunk in chunks])).loss.backward()
    wanted = flat_gradient(encoder, scale)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-10


def test_gradients_differ_when_dropout_is_not_replayed(monkeypatch):
    """Negative control: the comparison above can fail."""
    encoder, scale, inputs, contrast_plain = plain_case(dropout=0.3)
    chunks = [{"x": part} for part in inputs.split(4)]
    torch.manual_seed(7)
    grad_cache_loss(encoder, chunks, contrast_plain)
    wanted = flat_gradient(encoder, scale)
    clear_gradients(encoder, scale)
    monkeypatch.setattr(RandContext, "_restore", lambda self, states: None)
    torch.manual_seed(7)
    grad_cache_loss(encoder, chunks, contrast_plain)
    assert float((flat_gradient(encoder, scale) - wanted).norm() / wanted.norm()) > 1e-2


def test_gradients_differ_when_queries_and_documents_swap_places():
    """Negative control: InfoNCE is one-directional, so the other direction is another gradient."""
    encoder, scale, inputs, _ = plain_case()
    gradients = []
    for order in ((0, 4), (4, 0)):
        vectors = encoder(inputs)
        clip_loss(vectors[order[0] : order[0] + 4], vectors[order[1] : order[1] + 4], scale).loss.backward()
        gradients.append(flat_gradient(encoder, scale))
        clear_gradients(encoder, scale)
    assert float((gradients[0] - gradients[1]).norm() / gradients[0].norm()) > 1e-2


def test_loss_factor_multiplies_gradients_and_not_the_loss():
    encoder, scale, inputs, contrast_plain = plain_case()
    chunks = [{"x": part} for part in inputs.split(4)]
    once = grad_cache_loss(encoder, chunks, contrast_plain).loss
    single = flat_gradient(encoder, scale)
    clear_gradients(encoder, scale)
    assert grad_cache_loss(encoder, chunks, contrast_plain, loss_factor=4.0).loss == once
    assert torch.equal(flat_gradient(encoder, scale), 4 * single)


def test_the_three_steps_can_be_called_by_name():
    encoder, scale, inputs, contrast_plain = plain_case()
    embeddings, states = get_chunked_embeddings(encoder, [{"x": part} for part in inputs.split(4)])
    assert embeddings.shape == (16, 5) and not embeddings.requires_grad and len(states) == 4
    output, gradients = get_cached_gradients(contrast_plain, embeddings, 1.0)
    assert gradients.shape == embeddings.shape and not output.loss.requires_grad


# ------------------------------------------------------------------------------------------------------------ the loss


def unit(rows, size=8, seed=0):
    vectors = torch.randn(rows, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return nn.functional.normalize(vectors, dim=1)


@pytest.mark.parametrize("num_negatives", [0, 1, 3])
def test_label_of_query_i_is_column_i_times_one_plus_k(num_negatives):
    queries = unit(5)
    documents = unit(5 * (1 + num_negatives), seed=1)
    documents[:: 1 + num_negatives] = queries  # each positive is the query itself
    output = clip_loss(queries, documents, LogitScale(0.01).double(), num_negatives)
    assert output.accuracy == 1.0 and output.loss < 0.01
    wrong = clip_loss(queries, documents.roll(1, dims=0), LogitScale(0.01).double(), num_negatives)
    assert wrong.accuracy == 0.0


def test_loss_equals_cross_entropy_by_hand():
    queries, documents, scale = unit(3), unit(6, seed=1), LogitScale(0.1).double()
    logits = queries @ documents.T * scale.log_scale.exp()
    by_hand = -torch.stack([logits[i, 2 * i] - logits[i].logsumexp(0) for i in range(3)]).mean()
    assert torch.allclose(clip_loss(queries, documents, scale, 1).loss, by_hand, atol=1e-14)


def test_a_document_count_that_does_not_divide_is_an_error():
    with pytest.raises(ValueError, match="7 documents do not divide into 3 queries"):
        clip_loss(unit(3), unit(7), LogitScale(), 1)


def masked_case():
    queries = unit(3).float().requires_grad_()
    documents = unit(9, seed=1).float().requires_grad_()
    missing = torch.zeros(9, dtype=torch.bool)
    missing[[2, 7, 8]] = True  # rows with 1, 2 and 0 negatives
    return queries, documents, ColumnMask(missing, torch.tensor([[0, 3]]))


def test_masked_slot_gets_no_gradient_and_temperature_stays_finite():
    queries, documents, mask = masked_case()
    scale = LogitScale(0.07)
    clip_loss(queries, documents, scale, 2, mask).loss.backward()
    assert documents.grad[[2, 7, 8]].abs().sum() == 0
    assert (documents.grad[[0, 1, 3, 4, 5, 6]].abs().sum(dim=1) > 0).all()
    assert torch.isfinite(scale.log_scale.grad) and scale.log_scale.grad != 0
    assert torch.isfinite(queries.grad).all()


def test_masked_columns_change_nothing_but_their_own_absence():
    queries, documents, mask = masked_case()
    scale = LogitScale(0.07)
    found = clip_loss(queries, documents, scale, 2, mask)
    logits = (queries @ documents.T) * scale.log_scale.exp()
    kept = [[0, 1, 4, 5, 6], [0, 1, 3, 4, 5, 6], [0, 1, 3, 4, 5, 6]]
    losses = [torch.logsumexp(logits[i, kept[i]], 0) - logits[i, 3 * i] for i in range(3)]
    assert torch.allclose(found.loss, torch.stack(losses).mean(), atol=1e-6)


@pytest.mark.parametrize("tile", [1, 3, 5, 12])
@pytest.mark.parametrize("num_negatives", [0, 2])
def test_tiled_loss_is_the_plain_loss_with_its_masks_and_gradients(tile: int, num_negatives: int):
    columns, found = 12 * (1 + num_negatives), []
    missing = torch.zeros(columns, dtype=torch.bool)
    missing[2 :: 1 + max(2, num_negatives) * 2] = bool(num_negatives)
    missing[:: 1 + num_negatives] = False
    mask = ColumnMask(missing, torch.tensor([[0, 1 + num_negatives], [5, 0], [11, 0]]))
    for size in (0, tile):
        queries, documents, scale = (
            unit(12).requires_grad_(),
            unit(columns, seed=1).requires_grad_(),
            LogitScale().double(),
        )
        output = clip_loss(queries, documents, scale, num_negatives, mask, tile=size)
        output.loss.backward()
        found.append((output.loss, output.accuracy, queries.grad, documents.grad, scale.log_scale.grad))
    for plain, tiled in zip(*found, strict=True):
        assert torch.allclose(plain, tiled, rtol=1e-12, atol=1e-14)


def test_large_logits_are_never_whole(monkeypatch):
    """Above the limit no tensor that autograd keeps, and none that a matmul makes, is larger than a tile."""
    monkeypatch.setattr("contrastors.loss.WHOLE_LOGITS", 1000)
    monkeypatch.setattr("contrastors.loss.TILE_LOGITS", 600)
    queries, documents = unit(40).requires_grad_(), unit(120, seed=1).requires_grad_()
    sizes = []

    def scale(similarities: torch.Tensor) -> torch.Tensor:
        sizes.append(similarities.numel())
        return similarities * 10

    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        loss = clip_loss(queries, documents, scale, 2).loss
    loss.backward()
    assert max(sizes) == 600 and sum(sizes) == 2 * 40 * 120  # once in the forward, once in the backward
    assert max(kept) <= max(600, documents.numel())


def test_all_alike_embeddings_score_no_accuracy():
    same = torch.ones(4, 3) / 3**0.5
    assert clip_loss(same, same, LogitScale()).accuracy == 0.0


def test_a_query_with_nothing_to_beat_is_no_hit():
    same = torch.eye(3)
    mask = ColumnMask(torch.zeros(3, dtype=torch.bool), torch.tensor([[0, 1], [0, 2]]))
    found = clip_loss(same, same, LogitScale(), mask=mask)
    assert found.accuracy == pytest.approx(2 / 3) and found.loss > 0


def test_loss_runs_in_fp32_inside_bf16_autocast():
    queries, documents = unit(4).float(), unit(4, seed=1).float()
    plain = clip_loss(queries, documents, LogitScale()).loss
    with torch.autocast("cpu", torch.bfloat16):
        inside = clip_loss(queries.bfloat16(), documents.bfloat16(), LogitScale()).loss
        same = clip_loss(queries, documents, LogitScale()).loss
    assert inside.dtype == torch.float32 and torch.equal(plain, same)


# ----------------------------------------------------------------------------------------------------- model invariants


def items(processor, folder):
    pairs = make_pairs(folder, 5, 0)
    texts = [processor.encode_query(p.query) for p in pairs]
    return texts, [processor.encode_document(open_image(p.positive)) for p in pairs[:4]]


def forward(model, processor, chosen, side="right"):
    from contrastors.processing import Inputs

    (chunk,) = Inputs.from_items(chosen, processor.pad_id).chunks(len(chosen))
    if side == "left":
        for key in ("input_ids", "attention_mask"):
            rows = []
            for row, mask in zip(chunk[key], chunk["attention_mask"].bool(), strict=True):
                rows.append(torch.cat([row[~mask], row[mask]]))
            chunk[key] = torch.stack(rows) if key == "input_ids" else chunk[key]
        chunk["attention_mask"] = chunk["attention_mask"].flip(1)
    with torch.no_grad():
        return model.eval()(**chunk)


def test_embedding_does_not_depend_on_neighbours_or_padding_side(tiny_model, tmp_path):
    model, _, processor = build_model(tiny_model, vision=True)
    for group in items(processor, tmp_path):
        alone = torch.cat([forward(model, processor, [item]) for item in group])
        for side in ("right", "left"):
            together = forward(model, processor, group, side)
            assert torch.allclose(alone, together, atol=2e-6), (side, (alone - together).abs().max())


def test_embedding_does_not_depend_on_what_came_before(tiny_model, tmp_path):
    model, _, processor = build_model(tiny_model)
    texts, images = items(processor, tmp_path)
    first = forward(model, processor, images)
    forward(model, processor, texts[:1])
    forward(model, processor, images[:3])
    assert torch.equal(first, forward(model, processor, images))


def test_clear_rope_deltas_forgets_stale_offsets(tiny_model, tmp_path):
    model, _, processor = build_model(tiny_model)
    texts, images = items(processor, tmp_path)
    clean = forward(model, processor, texts)
    forward(model, processor, images)
    assert model.base.rope_deltas is not None
    _clear_rope_deltas(model)
    assert model.base.rope_deltas is None
    model.base.rope_deltas = torch.full((7, 1), 1000)
    assert torch.equal(clean, forward(model, processor, texts))


def test_permuting_rows_permutes_embeddings_and_keeps_the_loss(tiny_model, tmp_path):
    model, scale, processor = build_model(tiny_model)
    texts, images = items(processor, tmp_path)
    order = [2, 0, 3, 1]
    queries, documents = forward(model, processor, texts[:4]), forward(model, processor, images)
    moved = forward(model, processor, [images[i] for i in order])
    assert torch.allclose(documents[order], moved, atol=2e-6)
    loss = clip_loss(queries, documents, scale).loss
    assert torch.allclose(loss, clip_loss(queries[order], documents[order], scale).loss, atol=1e-6)


def test_pooling_takes_the_last_real_token_on_either_side():
    hidden = torch.arange(12.0).view(2, 6, 1)
    right, left = torch.tensor([[1, 1, 1, 0, 0, 0]] * 2), torch.tensor([[0, 0, 1, 1, 1, 1]] * 2)
    assert pool_last_token(hidden, right).flatten().tolist() == [2, 8]
    assert pool_last_token(hidden, left).flatten().tolist() == [5, 11]


def test_gradient_checkpointing_gives_the_same_gradients(tiny_model, tmp_path):
    gradients = []
    for checkpointing in (False, True):
        model, scale, processor = build_model(tiny_model, dropout=0.2, vision=True)
        if checkpointing:
            model.enable_gradient_checkpointing()
        batch, _ = make_batch(make_pairs(tmp_path, NUM_ROWS, 2), processor, 2)
        chunks = batch.queries.chunks(3) + batch.documents.chunks(3)
        torch.manual_seed(3)
        grad_cache_loss(model, chunks, partial(contrast, batch=batch, logit_scale=scale, num_negatives=2))
        gradients.append(split_groups(model, scale))
    assert max(row[0] for row in compare(gradients[1], gradients[0]).values()) < 1e-5


if __name__ == "__main__":
    from contrastors.demo import make_model

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_model(Path(folder) / "model", seed=1, hidden=64, layers=2, vision_hidden=32, vision_layers=3)
        print(
            f"{'dtype':8}{'chunk':>6}{'K':>3}{'dropout':>9}{'vision':>8}{'worst relative L2':>20}{'worst cosine':>16}"
        )
        for kind in (torch.float32, torch.float64):
            for size, negatives, drop, vit in COMBINATIONS:
                rows, *_ = measure(checkpoint, Path(folder), kind, size, negatives, drop, vit)
                worst, lowest = max(r[0] for r in rows.values()), min(r[1] for r in rows.values())
                print(
                    f"{str(kind)[6:]:8}{size:6}{negatives:3}{drop:9}{vit!s:>8}{worst:20.2e}{lowest:16.10f}", flush=True
                )
