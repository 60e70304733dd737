"""Embedding, ranking and scoring on a tiny model; over two ranks too, for which this file starts itself.

torchrun --nproc_per_node=2 tests/test_evaluation.py MODEL_FOLDER DATA_FOLDER
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from contrastors.batches import ItemDataset
from contrastors.data import validate_images
from contrastors.distributed import World, start, stop
from contrastors.evaluation import (
    METRICS,
    EvaluationStopped,
    build_eval_set,
    collapse_warnings,
    embed,
    evaluate,
    mean_pairwise_cosine,
    score_embeddings,
)
from contrastors.images import MAX_IMAGE_PIXELS, open_image
from contrastors.processing import Inputs
from contrastors.records import Pair, dump_json, read_pairs
from contrastors.validation import check_image, image_paths
from tests.gradients import build_model, embed_by_hand
from tests.runs import warm_torchrun

EXAMPLES = settings(max_examples=25)
ALONE = World(0, 1, torch.device("cpu"))
SCALE = 1 / 0.07
NAN = math.nan


@pytest.fixture(scope="module")
def parts(tiny_model: Path):
    """Model and processor; the adapter has moved and has dropout, so that an evaluation with dropout would show."""
    model, _, processor = build_model(tiny_model, dropout=0.5)
    return model.eval(), processor


def run(parts, pairs: list[Pair], batch_size: int = 16, scale: float = SCALE, **options):
    """Evaluates the pairs; the data set is made anew, as a file read from disk would be."""
    data = build_eval_set(pairs, {path: check_image(path) for path in image_paths(pairs)})
    return evaluate(parts[0], parts[1], data, ALONE, scale, batch_size, 0, MAX_IMAGE_PIXELS, **options)


def save_page(path: Path, colour, size=(64, 64), note: str = "") -> str:
    """A page of one colour; another note gives other bytes and the same picture."""
    extra = PngImagePlugin.PngInfo()
    extra.add_text("note", note)
    Image.new("RGB", size, colour).save(path, pnginfo=extra)
    return str(path)


def embed_all(parts, kind: str, sources: list[str], batch_size: int = 16) -> torch.Tensor:
    return embed(parts[0], ItemDataset(parts[1], kind, sources, MAX_IMAGE_PIXELS), ALONE, batch_size, 0)


def unit_rows(count: int, size: int = 8, seed: int = 0) -> torch.Tensor:
    vectors = torch.randn(count, size, generator=torch.Generator().manual_seed(seed))
    return vectors / vectors.norm(dim=1, keepdim=True)


# --- queries and corpus ---


def test_positives_are_merged_over_rows_and_the_corpus_holds_each_document_once(tmp_path):
    page = {name: save_page(tmp_path / f"{name}.png", i * 30) for i, name in enumerate("abcd")}
    copy = save_page(tmp_path / "copy.png", 0)
    Path(copy).write_bytes(Path(page["a"]).read_bytes())
    (tmp_path / "bad.png").write_bytes(b"no picture")
    bad = str(tmp_path / "bad.png")
    rows = [("one", "a", [page["c"], bad]), ("two", "b", [copy]), ("one", "b", [page["d"]]), ("one", "a", [])]
    pairs = [Pair(i, i + 1, query, page[name], negatives) for i, (query, name, negatives) in enumerate(rows)]
    pairs += [Pair(4, 5, "two", copy, []), Pair(5, 7, "lost", bad, [])]
    data = build_eval_set(pairs, {path: check_image(path) for path in image_paths(pairs)})
    assert data.queries == ["one", "two"]
    assert data.documents.paths == [page["a"], page["c"], page["b"], page["d"]]
    assert data.positives == [[0, 2], [0, 2]]
    assert [(row.line, row.path) for row in data.bad_rows] == [(7, bad)]


def test_a_query_with_several_positives_is_one_query_and_any_of_them_is_a_hit(parts, colour_set):
    pairs, _ = read_pairs(colour_set / "rows.jsonl")
    single = run(parts, pairs).per_query
    merged = run(parts, [*pairs, Pair(12, 13, pairs[0].query, pairs[7].positive, [])])
    assert merged.metrics["num_queries"] == 12 and merged.metrics["corpus_size"] == 12
    first = merged.per_query[0]
    assert first["positives"] == [pairs[0].positive, pairs[7].positive]
    scores = embed_all(parts, "query", [pairs[0].query]) @ embed_all(parts, "document", [p.positive for p in pairs]).T
    best = int((scores > scores[0, [0, 7]].max()).sum()) + 1
    assert first["rank"] == best == min(first["rank"], single[0]["rank"])


# --- embeddings ---


def test_embeddings_equal_those_of_the_model_run_by_hand_in_the_order_of_the_sources(parts, colour_set):
    model, processor = parts
    paths = sorted(str(path) for path in colour_set.glob("*.png"))[::-1]
    texts = ["red", "a much longer query about a header that is blue", "x"]
    with torch.no_grad():
        pages = embed_by_hand(model, processor, [processor.encode_document(open_image(path)) for path in paths])
        queries = embed_by_hand(model, processor, [processor.encode_query(text) for text in texts])
    assert torch.allclose(embed_all(parts, "document", paths, 5), pages, atol=1e-5)
    assert torch.allclose(embed_all(parts, "query", texts, 2), queries, atol=1e-5)


def test_batch_sizes_one_and_sixteen_embed_alike(parts, tmp_path):
    sizes = [(64, 64), (200, 40), (33, 97), (128, 128), (20, 20)] * 4
    pages = [save_page(tmp_path / f"{i}.png", (9 * i, 250 - 9 * i, 80), size) for i, size in enumerate(sizes)]
    texts = [" ".join(["red dot"] * (1 + i % 7)) + f" {i}" for i in range(20)]
    for kind, sources in (("document", pages), ("query", texts)):
        one, sixteen = (embed_all(parts, kind, sources, size) for size in (1, 16))
        assert one.shape == (20, 64) and one.dtype == torch.float32
        assert torch.allclose(one, sixteen, rtol=0, atol=1e-5)
        assert torch.allclose(one.norm(dim=1), torch.ones(20), atol=1e-5)
        assert len({tuple(row) for row in one.tolist()}) == 20


def test_a_batch_embeds_alike_whatever_came_before_it(parts, tmp_path):
    model, processor = parts
    pages = [save_page(tmp_path / f"{i}.png", (30 * i, 9, 99), (64 + 32 * (i % 3), 64)) for i in range(7)]
    encoded = [processor.encode_document(open_image(page)) for page in pages]
    (four,), (three,) = (Inputs.from_items(items, processor.pad_id).chunks(4) for items in (encoded[:4], encoded[4:]))
    texts = [processor.encode_query(text) for text in ("red", "blue header " * 9)]
    one_text, two_texts = (Inputs.from_items(items, processor.pad_id).chunks(2)[0] for items in (texts[1:], texts))
    with torch.no_grad():
        first, first_text = model(**four), model(**two_texts)
        for before in ([one_text], [three], [two_texts], [one_text, three], [three, one_text]):
            for chunk in before:
                model(**chunk)
            assert torch.allclose(model(**four), first, rtol=0, atol=1e-5)
            for chunk in reversed(before):
                model(**chunk)
            assert torch.allclose(model(**two_texts), first_text, rtol=0, atol=1e-5)


def test_no_forward_starts_with_the_position_offsets_of_the_one_before(parts, tmp_path):
    model, processor = parts
    pages = [save_page(tmp_path / f"{i}.png", 90 * i, (64 + 64 * i, 64)) for i in range(3)]
    seen = []
    hook = model.backbone.register_forward_pre_hook(lambda *_: seen.append(model.base.rope_deltas))
    try:
        embed_all(parts, "document", pages, 2)
        assert model.base.rope_deltas is not None, "else the model keeps no offsets and this test shows nothing"
        embed_all(parts, "query", ["red", "blue"], 1)
        embed_all(parts, "document", pages, 3)
    finally:
        hook.remove()
    assert seen == [None] * 5


def test_near_duplicate_pages_have_distinct_fp32_scores(parts, tmp_path):
    colours = [(100 + i % 6, 100 + i // 6 % 6, 100 + i // 36) for i in range(200)]
    pages = [save_page(tmp_path / f"{i:03d}.png", colour) for i, colour in enumerate(colours)]
    documents = embed_all(parts, "document", pages)
    (scores,) = embed_all(parts, "query", ["grey page"]) @ documents.T
    assert len(scores.unique()) >= 190
    assert len(scores.bfloat16().unique()) < 100, "else the pages are no near duplicates and fp32 proves nothing"


# --- ranking ---


def orders(pairs: list[Pair]) -> dict[str, list[Pair]]:
    """The same rows with the first row first, last, and in the middle of a shuffle."""
    rest = np.random.default_rng(0).permutation(len(pairs) - 1) + 1
    middle = [pairs[i] for i in rest]
    return {"first": pairs, "last": [*pairs[1:], pairs[0]], "shuffled": [*middle[:5], pairs[0], *middle[5:]]}


def numbers(row: dict) -> dict[str, float]:
    return {name: value for name, value in row.items() if isinstance(value, float)}


def test_numbers_do_not_depend_on_where_a_positive_stands_among_near_duplicates(parts, tmp_path):
    pages = [save_page(tmp_path / f"{i:02d}.png", (120 + i % 3, 90 + i // 3, 60)) for i in range(24)]
    pairs = [Pair(i, i + 1, f"brown page {i}", page, []) for i, page in enumerate(pages)]
    results = {name: run(parts, rows, batch_size=7) for name, rows in orders(pairs).items()}
    tables = {name: {row["query"]: row for row in found.per_query} for name, found in results.items()}
    for name in ("last", "shuffled"):
        for query, row in tables["first"].items():
            assert numbers(tables[name][query]) == pytest.approx(numbers(row), abs=1e-5)
        for metric in METRICS:
            assert results[name].metrics[metric] == pytest.approx(results["first"].metrics[metric], abs=1e-6)


@pytest.mark.parametrize("order", ["first", "last", "shuffled"])
def test_pages_that_all_look_alike_give_recall_of_chance(parts, tmp_path, order):
    pages = [save_page(tmp_path / f"{i}.png", "white", note=str(i)) for i in range(10)]
    pairs = [Pair(i, i + 1, f"query {i}", page, []) for i, page in enumerate(pages)]
    found = run(parts, orders(pairs)[order], batch_size=3)
    assert found.metrics["recall@1"] == pytest.approx(0.1) and found.metrics["recall@5"] == pytest.approx(0.5)
    assert found.metrics["num_queries"] == len(found.per_query) == found.metrics["corpus_size"] == 10
    assert {row["rank"] for row in found.per_query} == {5.5}
    assert found.metrics["loss"] == pytest.approx(math.log(10), abs=1e-4)
    (warning,) = collapse_warnings(found.metrics)
    assert "have collapsed" in warning and "1.0000" in warning


def test_queries_that_all_look_alike_are_told():
    metrics, _ = score_embeddings(unit_rows(1).repeat(20, 1), unit_rows(20, seed=1), [[i] for i in range(20)], SCALE)
    (warning,) = collapse_warnings(metrics)
    assert "have collapsed: two queries have a mean cosine of 1.0000" in warning


def test_pages_and_queries_that_differ_give_no_warning():
    metrics, _ = score_embeddings(unit_rows(3), unit_rows(5, seed=1), [[0], [1], [2]], SCALE)
    assert collapse_warnings(metrics) == []


def test_k_above_the_corpus_is_cut_and_reported_as_asked(parts, tmp_path):
    pairs = [Pair(i, i + 1, f"q{i}", save_page(tmp_path / f"{i}.png", 80 * i), []) for i in range(3)]
    found = run(parts, pairs)
    assert found.metrics["recall@5"] == found.metrics["recall@10"] == 1
    assert found.metrics["corpus_size"] == 3
    assert dump_json([found.metrics, found.per_query])


def test_an_evaluation_without_queries_is_an_error(parts):
    with pytest.raises(ValueError, match="no queries to evaluate"):
        run(parts, [])


# --- NaN ---


@pytest.fixture
def break_page(parts, monkeypatch):
    """Makes the model embed one page to NaN, as a model that overflows on it would."""

    def apply(path: str) -> None:
        model, processor = parts
        broken = processor.encode_document(open_image(path)).patches
        forward = model.forward

        def stub(**chunk):
            vectors = forward(**chunk)
            if "pixel_values" in chunk:
                patches = chunk["pixel_values"].split(chunk["image_grid_thw"].prod(dim=1).tolist())
                for row, own in enumerate(patches):
                    if torch.equal(own, broken):
                        vectors[row] = NAN
            return vectors

        monkeypatch.setattr(model, "forward", stub)

    return apply


@pytest.mark.parametrize("place", [0, 5, 11])
def test_a_page_that_embeds_to_nan_is_counted_and_never_ranks_first(parts, colour_set, break_page, place):
    pairs, _ = read_pairs(colour_set / "rows.jsonl")
    sound = run(parts, pairs)
    break_page(pairs[place].positive)
    found = run(parts, pairs)
    assert (sound.metrics["num_not_finite"], found.metrics["num_not_finite"]) == (0, 1)
    assert any("1 embeddings are not finite" in line for line in collapse_warnings(found.metrics))
    for number, (before, after) in enumerate(zip(sound.per_query, found.per_query, strict=True)):
        if number == place:
            assert after["rank"] == 12 and after["recall@10"] == after["mrr"] == after["ndcg@10"] == 0
        else:
            assert after["rank"] in (before["rank"], before["rank"] - 1)
            assert all(math.isfinite(value) for value in numbers(after).values())
    assert all(math.isfinite(value) for value in found.metrics.values())
    assert '"margin": null' in dump_json(found.per_query[place])


def test_a_query_that_embeds_to_nan_is_counted_and_finds_nothing():
    queries, documents = unit_rows(3), unit_rows(4, seed=1)
    queries[1] = NAN
    metrics, per_query = score_embeddings(queries, documents, [[0], [1], [2]], SCALE)
    assert metrics["num_not_finite"] == 1 and per_query["recall@10"].tolist() == [1, 0, 1]
    assert math.isfinite(metrics["loss"]) and math.isnan(per_query["loss"][1])


# --- loss and similarities ---


def loss_by_hand(queries, documents, positives, scale: float) -> list[float]:
    """Mean over a query's positives of InfoNCE against the corpus without the other positives, in float64."""
    losses = []
    for query, own in zip(queries.double(), positives, strict=True):
        logits = documents.double() @ query * scale
        parts = []
        for label in own:
            kept = [i for i in range(len(documents)) if i == label or i not in own]
            parts.append(float(torch.logsumexp(logits[kept], dim=0) - logits[label]))
        losses.append(sum(parts) / len(parts))
    return losses


@EXAMPLES
@given(data=st.data(), corpus=st.integers(1, 9), count=st.integers(1, 5), scale=st.sampled_from([1.0, SCALE, 100.0]))
def test_loss_and_similarities_equal_a_computation_by_hand(data, corpus, count, scale):
    queries, documents = unit_rows(count, seed=corpus), unit_rows(corpus, seed=count + 50)
    positives = [sorted(data.draw(st.sets(st.integers(0, corpus - 1), min_size=1))) for _ in range(count)]
    metrics, per_query = score_embeddings(queries, documents, positives, scale)
    wanted = loss_by_hand(queries, documents, positives, scale)
    assert per_query["loss"] == pytest.approx(np.array(wanted), abs=1e-4)
    assert metrics["loss"] == pytest.approx(float(np.mean(wanted)), abs=1e-4)
    for place, own in enumerate(positives):
        similarities = (documents @ queries[place]).tolist()
        others = [similarities[i] for i in range(corpus) if i not in own]
        mine = sum(similarities[i] for i in own) / len(own)
        rest = sum(others) / len(others) if others else NAN
        found = {name: column[place] for name, column in per_query.items()}
        wanted = {"positive_similarity": mine, "negative_similarity": rest, "margin": mine - rest}
        wanted["hardest_negative"] = max(others) if others else NAN
        assert {name: found[name] for name in wanted} == pytest.approx(wanted, abs=1e-5, nan_ok=True)


def test_the_loss_of_a_model_equals_a_computation_by_hand_and_no_batch_size_changes_it(parts, colour_set):
    pairs, _ = read_pairs(colour_set / "rows.jsonl")
    pairs.append(Pair(12, 13, pairs[2].query, pairs[8].positive, []))
    paths = image_paths(pairs)
    texts = list(dict.fromkeys(pair.query for pair in pairs))
    positives = [[i] if i != 2 else [2, 8] for i in range(12)]
    assert [paths.index(pair.positive) for pair in pairs[:12]] == list(range(12)), "the corpus is in order of use"
    queries, documents = embed_all(parts, "query", texts), embed_all(parts, "document", paths)
    wanted = float(np.mean(loss_by_hand(queries, documents, positives, SCALE)))
    for batch_size in (1, 5, 16):
        assert run(parts, pairs, batch_size).metrics["loss"] == pytest.approx(wanted, abs=1e-4)
    assert run(parts, pairs, scale=1.0).metrics["loss"] == pytest.approx(
        float(np.mean(loss_by_hand(queries, documents, positives, 1.0))), abs=1e-5
    )


def test_more_queries_than_one_block_are_all_scored():
    documents = unit_rows(40, seed=3)
    queries = documents.repeat(15, 1)[:600]
    metrics, per_query = score_embeddings(queries, documents, [[i % 40] for i in range(600)], SCALE)
    assert metrics["num_queries"] == 600 and per_query["rank"].tolist() == [1.0] * 600
    assert per_query["positive_similarity"] == pytest.approx(np.ones(600), abs=1e-6)


def test_every_metric_has_an_interval_around_it():
    queries, documents = unit_rows(30), unit_rows(30, seed=1)
    metrics, _ = score_embeddings(queries, documents, [[i] for i in range(30)], SCALE)
    for name in METRICS:
        assert 0 <= metrics[f"{name}_low"] <= metrics[name] <= metrics[f"{name}_high"] <= 1
    for name in ("positive_similarity", "negative_similarity", "hardest_negative", "margin", "loss"):
        assert metrics[f"{name}_low"] < metrics[name] < metrics[f"{name}_high"]


@EXAMPLES
@given(count=st.integers(2, 20), seed=st.integers(0, 99))
def test_the_mean_pairwise_cosine_equals_that_of_the_full_matrix(count, seed):
    vectors = unit_rows(count, seed=seed)
    cosines = vectors.double() @ vectors.double().T
    wanted = cosines[~torch.eye(count, dtype=torch.bool)].mean()
    assert mean_pairwise_cosine(vectors) == pytest.approx(float(wanted), abs=1e-6)


def test_the_mean_pairwise_cosine_of_one_vector_is_unknown():
    assert math.isnan(mean_pairwise_cosine(unit_rows(1))) and math.isnan(mean_pairwise_cosine(unit_rows(0)))


# --- what an evaluation leaves behind ---


def test_dropout_is_off_while_evaluating_and_the_training_mode_comes_back(parts, colour_set):
    model, _ = parts
    pairs, _ = read_pairs(colour_set / "rows.jsonl")
    found = {}
    try:
        for training in (True, False):
            model.train(training)
            found[training] = run(parts, pairs).metrics
            assert all(module.training == training for module in model.modules())
    finally:
        model.eval()
    assert found[True] == found[False]


def test_a_signal_stops_an_evaluation_between_batches_and_keeps_the_training_mode(parts, colour_set):
    model, _ = parts
    pairs, _ = read_pairs(colour_set / "rows.jsonl")
    done: list[int] = []
    try:
        model.train()
        with pytest.raises(EvaluationStopped) as caught:
            run(parts, pairs, 4, stop_signal=lambda: 15 * (len(done) == 2), on_progress=done.append)
        assert caught.value.signal == 15 and done == [4, 4] and model.training
    finally:
        model.eval()
    run(parts, pairs, 5, on_progress=done.append)
    assert done[2:] == [5, 5, 2] * 2, "progress over 12 queries, then 12 documents"


def test_embedding_needs_a_model_in_evaluation_mode(parts):
    try:
        parts[0].train()
        with pytest.raises(AssertionError, match="model.eval"):
            embed_all(parts, "query", ["a"])
    finally:
        parts[0].eval()


def test_per_query_rows_name_query_positives_and_every_number(parts, colour_set):
    pairs, _ = read_pairs(colour_set / "rows.jsonl")
    found = run(parts, pairs)
    assert [row["query"] for row in found.per_query] == [pair.query for pair in pairs]
    assert [row["positives"] for row in found.per_query] == [[pair.positive] for pair in pairs]
    for name in (*METRICS, "loss", "margin", "positive_similarity", "negative_similarity", "hardest_negative"):
        mean = sum(row[name] for row in found.per_query) / 12
        assert found.metrics[name] == pytest.approx(mean)


# --- two ranks ---


def work_as_rank(model_folder: Path, data_folder: Path) -> None:
    """What each rank does; every rank writes what it found."""
    world = start("cpu")
    model, _, processor = build_model(model_folder)
    pairs, _ = read_pairs(data_folder / "rows.jsonl")
    calls: list[int] = []
    facts = validate_images(image_paths(pairs), data_folder, MAX_IMAGE_PIXELS, 0, world, calls.append)
    data = build_eval_set(pairs[:11], facts)  # 11 queries and 12 documents: the shares of the queries differ
    options = (model, processor, data, world, SCALE, 4, 0, MAX_IMAGE_PIXELS)
    found = evaluate(*options)
    try:
        evaluate(*options, stop_signal=lambda: 15 * world.rank)  # only the last rank receives it
        stopped_by = 0
    except EvaluationStopped as error:
        stopped_by = error.signal
    facts = {path: fact.content for path, fact in facts.items()}
    result = [facts, len(calls), found.metrics, found.per_query, stopped_by]
    (data_folder / f"rank{world.rank}.json").write_text(json.dumps(result))
    stop()


@pytest.mark.dist
def test_two_ranks_agree_with_one_and_a_signal_on_one_stops_both(tiny_model, colour_set):
    code, text = warm_torchrun(2, __file__, tiny_model, colour_set)
    assert code == 0, text[-3000:]
    ranks = [json.loads((colour_set / f"rank{rank}.json").read_text()) for rank in range(2)]
    facts, _, metrics, per_query, stopped_by = ranks[0]
    assert ranks[1][0] == facts and [rank[1] for rank in ranks] == [6, 6], "each rank decodes its share of the images"
    assert ranks[1][2:] == ranks[0][2:] and stopped_by == 15
    pairs, _ = read_pairs(colour_set / "rows.jsonl")
    assert facts == {path: check_image(path).content for path in image_paths(pairs)}
    model, _, processor = build_model(tiny_model)
    alone = run((model.eval(), processor), pairs[:11])
    assert metrics == pytest.approx(alone.metrics, abs=1e-5)
    for found, wanted in zip(per_query, alone.per_query, strict=True):
        assert (found["query"], found["positives"]) == (wanted["query"], wanted["positives"])
        assert numbers(found) == pytest.approx(numbers(wanted), abs=1e-5)


if __name__ == "__main__":
    work_as_rank(Path(sys.argv[1]), Path(sys.argv[2]))
