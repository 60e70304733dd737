"""mine_hard_negatives.py: known answers, positives that are never negatives, filters, services, ranks and stops."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
import unicodedata
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from contrastors.loading import load_encoder
from contrastors.negatives import Hit, Positive, choose_negatives
from contrastors.records import read_pairs
from mine_hard_negatives import main
from tests.conftest import ROOT, write_rows
from tests.mining import (
    WORLD,
    check_spellings,
    embed_all,
    flags_of,
    read,
    same_but_scores,
    write_spellings,
)
from tests.runs import finish, spawn, warm_torchrun


@pytest.fixture
def known(colour_set, tiny_model):
    """Names of the tiles, and the similarities of all queries to all of them, computed plainly."""
    rows = read(colour_set / "rows.jsonl")
    names = [row["chunk_path"] for row in rows]
    queries = embed_all(tiny_model, "query", [row["query"] for row in rows])
    return names, queries @ embed_all(tiny_model, "document", [colour_set / name for name in names]).T


# -------------------------------------------------------------------------------------------------------- known answers


def test_rows_ranks_scores_and_negatives_are_those_of_the_plain_computation(mine, known, colour_set):
    names, table = known
    before = read(colour_set / "rows.jsonl")
    rows, stats = mine(n_docs=5)
    assert [{k: row[k] for k in ("query", "chunk_path")} for row in rows] == [
        {k: row[k] for k in ("query", "chunk_path")} for row in before
    ]
    for number, (row, scores) in enumerate(zip(rows, table, strict=True)):
        order = np.argsort(-scores, kind="stable").tolist()
        entries = row["retrieve_top20"]
        assert [entry["path"] for entry in entries] == [names[place] for place in order[:5]]
        assert [entry["rank"] for entry in entries] == [1, 2, 3, 4, 5]
        assert [entry["score"] for entry in entries] == pytest.approx(scores[order[:5]].tolist(), abs=1e-5)
        assert row["neg_chunk_paths"] == [names[place] for place in order if place != number][:3]
        position = order.index(number)
        assert row["positive_rank"] == (position + 1 if position < 5 else None)
        assert row["positive_score"] == pytest.approx(float(scores[number]), abs=1e-5)
    assert any(row["positive_rank"] is None for row in rows)  # both kinds were there
    assert stats["rows"]["positive_retrieved"] == sum(row["positive_rank"] is not None for row in rows) > 0
    assert stats["documents"]["distinct"] == 12 and stats["queries"]["distinct"] == 12


def test_every_other_key_and_the_order_of_rows_are_kept(mine, colour_set):
    rows = [
        row | {"id": n, "note": "é\u2028", "meta": {"a": [n]}} for n, row in enumerate(read(colour_set / "rows.jsonl"))
    ]
    text = "\ufeff" + "\r\n\r\n".join(json.dumps(row, ensure_ascii=False) for row in reversed(rows))  # no last newline
    (colour_set / "rows.jsonl").write_text(text, encoding="utf-8", newline="")
    mined, _ = mine()
    kept = ("query", "chunk_path", "id", "note", "meta")
    assert [{k: row[k] for k in kept} for row in mined] == [{k: row[k] for k in kept} for row in reversed(rows)]


def test_more_negatives_than_there_are_tiles_are_written_as_they_are_and_counted(mine):
    rows, stats = mine(num_negatives=20)
    assert all(len(row["neg_chunk_paths"]) == 11 and len(row["retrieve_top20"]) == 12 for row in rows)
    assert stats["rows"]["with_too_few_negatives"] == 12 and stats["rows"]["without_negatives"] == 0


@pytest.mark.parametrize("index", ["exact", "faiss-ivf", "faiss-hnsw"])
@pytest.mark.parametrize("size", [1, 2, 5, 12])
def test_small_corpora_work_with_every_index(mine, colour_set, index, size):
    """O22: min(20, corpus) entries, fewer negatives, never a document that is not there."""
    write_rows(colour_set / "rows.jsonl", read(colour_set / "rows.jsonl")[:size])
    rows, stats = mine(index=index)
    for row in rows:
        assert len(row["retrieve_top20"]) == size
        assert len(row["neg_chunk_paths"]) == min(3, size - 1) and row["chunk_path"] not in row["neg_chunk_paths"]
    assert stats["rows"]["without_negatives"] == (size == 1)


def test_faiss_gives_the_rows_of_exact_search(mine, colour_set, monkeypatch):
    pytest.importorskip("faiss")
    monkeypatch.setattr("contrastors.index.SMALL_CORPUS", 0)
    wanted, _ = mine(output=colour_set / "exact.jsonl")
    for index in ("faiss-ivf", "faiss-hnsw"):
        found, _ = mine(index=index, output=colour_set / f"{index}.jsonl")
        same_but_scores(found, wanted)


def test_a_query_with_four_positives_still_gets_its_negatives(mine, colour_set):
    """O22: the positives take no places of the candidates."""
    rows = read(colour_set / "rows.jsonl")
    for row in rows[:4]:
        row["query"] = "one of four"
    write_rows(colour_set / "rows.jsonl", rows)
    mined, _ = mine(n_docs=8, num_negatives=8)
    positives = {row["chunk_path"] for row in rows[:4]}
    for row in mined[:4]:
        assert len(row["neg_chunk_paths"]) == 8 and not positives & set(row["neg_chunk_paths"])
        assert len(row["retrieve_top20"]) == 8


# ---------------------------------------------------------------------------------------------------- never a positive


def test_no_spelling_copy_or_other_positive_of_the_query_is_a_negative(mine, colour_set):
    write_spellings(colour_set)
    rows, stats = mine(corpus=colour_set, num_negatives=20)
    check_spellings(colour_set, rows)
    assert stats["documents"]["copies"] == 2 and stats["documents"]["tiles"] == 14


def test_a_positive_that_is_a_copy_of_a_tile_has_its_rank(mine, colour_set):
    shutil.copy(colour_set / "c00.png", colour_set / "other_name.png")
    rows = read(colour_set / "rows.jsonl")
    write_rows(colour_set / "corpus.jsonl", [{"chunk_path": row["chunk_path"]} for row in rows])
    rows[0]["chunk_path"] = "other_name.png"
    write_rows(colour_set / "rows.jsonl", rows)
    mined, _ = mine(corpus=colour_set / "corpus.jsonl")
    assert mined[0]["positive_rank"] is not None and "c00.png" not in mined[0]["neg_chunk_paths"]


def test_a_tile_that_may_be_the_positive_of_an_unusable_row_is_no_negative_of_its_query(mine, colour_set):
    (colour_set / "tiles").mkdir()
    for name in ("c05.png", "c06.png"):
        shutil.copy(colour_set / name, colour_set / "tiles" / f"of_{name}")
    rows = read(colour_set / "rows.jsonl")
    lost = {"query": rows[0]["query"], "chunk_path": "gone/of_c05.png"}
    write_rows(colour_set / "rows.jsonl", [lost, *rows])
    names = [*(f"c{n:02d}.png" for n in range(12)), "of_c05.png"]  # the copy comes after the tile that stands for it
    write_rows(colour_set / "tiles" / "corpus.jsonl", [{"chunk_path": "../" + name} for name in names[:-1]])
    with open(colour_set / "tiles" / "corpus.jsonl", "a", encoding="utf-8") as file:
        file.write('{"chunk_path": "of_c05.png"}\n')
    mined, _ = mine(corpus=colour_set / "tiles" / "corpus.jsonl", num_negatives=20, max_bad_fraction=0.1)
    found = [{Path(path).name for path in row["neg_chunk_paths"]} for row in mined]
    assert found[0] == {f"c{n:02d}.png" for n in range(12)} - {"c00.png", "c05.png"}
    assert all(len(names) == 11 for names in found[1:])


# -------------------------------------------------------------------------------------------------------------- filters


def hit(path: str, score: float, documents=(), articles=()) -> Hit:
    return Hit({"path": path, "score": score}, path, documents, articles)


def kept(mode: str, margin: float, positive: float | None, scores: list[float]) -> list[float]:
    hits = [hit(str(score), score) for score in scores]
    chosen = choose_negatives(hits, {0}, Positive(0, positive), mode, margin, 20, 20, Counter())
    return [candidate.score for candidate in chosen]


@pytest.mark.parametrize(
    ("mode", "margin", "positive", "scores", "wanted"),
    [
        ("perc", 0.95, 0.8, [0.79, 0.7601, 0.7599, 0.1], [0.7599, 0.1]),
        ("perc", 0.95, -0.8, [-0.7, -0.83, -0.8399, -0.8401, -0.9], [-0.8401, -0.9]),
        ("perc", 0.95, 0.0, [0.1, 0.0, -0.1], [0.0, -0.1]),
        ("perc", 0.0, 0.8, [0.1, 0.0, -0.1], [0.0, -0.1]),
        ("perc", 1.0, -0.5, [-0.4, -0.5, -0.6], [-0.5, -0.6]),
        ("margin", 0.05, 0.8, [0.79, 0.76, 0.74], [0.74]),
        ("margin", 0.05, -0.1, [-0.1, -0.14, -0.16], [-0.16]),
        ("skip_top1", 0.0, 0.8, [0.7, 0.6, 0.5], [0.6, 0.5]),
        ("none", 0.0, 0.8, [0.9, 0.8], [0.9, 0.8]),
        ("perc", 0.95, None, [0.9, 0.8], [0.9, 0.8]),
        ("margin", 0.05, None, [0.9, 0.8], [0.9, 0.8]),
    ],
)
def test_filters_keep_what_the_rule_says_for_scores_of_either_sign(mode, margin, positive, scores, wanted):
    assert kept(mode, margin, positive, scores) == wanted


def test_too_few_negatives_after_a_filter_point_to_the_filter(mine, colour_set, capsys):
    mine(filter_mode="perc", margin=0.01)
    assert re.search(r"--filter-mode perc dropped \d+ candidates; look at --margin", capsys.readouterr().out)
    mine(num_negatives=12, n_docs=12, output=colour_set / "more.jsonl")
    said = capsys.readouterr().out
    assert "raise --n-docs, or use a larger corpus" in said and "dropped" not in said


def test_skip_top1_drops_the_first_candidate_and_not_the_positive_or_a_copy():
    hits = [hit("p", 0.9, (0,)), hit("a", 0.8), hit("a", 0.8), hit("b", 0.7)]
    funnel: Counter[str] = Counter()
    chosen = choose_negatives(hits, {0}, Positive(0, 0.9), "skip_top1", 0.0, 20, 20, funnel)
    assert [candidate.entry["path"] for candidate in chosen] == ["b"]
    assert funnel == {
        "retrieved": 4, "positives": 1, "copies": 1, "dropped_by_skip_top1": 1, "kept": 1, "written": 1, "surplus": 0,
    }  # fmt: skip


@pytest.mark.parametrize(("mode", "margin"), [("perc", None), ("perc", 0.999), ("margin", None), ("margin", 0.001)])
def test_score_filters_apply_to_every_row_even_where_the_positive_was_not_retrieved(mine, known, mode, margin):
    names, table = known
    m = margin if margin is not None else {"perc": 0.95, "margin": 0.05}[mode]
    rows, stats = mine(filter_mode=mode, margin=margin, n_docs=3)
    for number, (row, scores) in enumerate(zip(rows, table, strict=True)):
        positive = float(scores[number])
        bound = positive - (1 - m) * abs(positive) if mode == "perc" else positive - m
        candidates = [place for place in np.argsort(-scores, kind="stable").tolist() if place != number][:3]
        assert row["neg_chunk_paths"] == [names[place] for place in candidates if scores[place] <= bound]
    assert stats["rows"]["unfiltered"] == 0 and stats["rows"]["positive_retrieved"] < 12
    assert stats["funnel"][f"dropped_by_{mode}"] > 0


def test_the_article_filter_drops_the_article_of_the_positive(mine, colour_set):
    tiles = [{"chunk_path": f"c{n:02d}.png", "article_id": n // 3 if n < 9 else str(n // 3)} for n in range(12)]
    write_rows(colour_set / "corpus.jsonl", tiles)
    rows, stats = mine(corpus=colour_set / "corpus.jsonl", filter_mode="article", num_negatives=20)
    for number, row in enumerate(rows):
        assert {int(path[1:3]) // 3 for path in row["neg_chunk_paths"]} == set(range(4)) - {number // 3}
        assert all(entry["article_id"] == int(entry["path"][1:3]) // 3 or isinstance(entry["article_id"], str)
                   for entry in row["retrieve_top20"])  # fmt: skip
    assert stats["funnel"]["dropped_by_article"] == 24


def test_the_article_filter_is_refused_where_no_article_is_known(tiny_model, colour_set, capsys):
    assert main(flags_of(colour_set, tiny_model, filter_mode="article")) == 1
    assert "no article_id is known of any positive" in capsys.readouterr().err
    assert not (colour_set / "hn.jsonl").exists()


# ------------------------------------------------------------------------------------------------------ corpus and rows


def test_folder_glob_text_file_and_jsonl_are_the_same_corpus(mine, colour_set):
    names = [f"c{n:02d}.png" for n in range(12)]
    (colour_set / "tiles.txt").write_text("\ufeff" + "\r\n".join([*names, ""]), encoding="utf-8")
    write_rows(colour_set / "tiles.jsonl", [{"chunk_path": name} for name in names])
    wanted, _ = mine()
    absolute = [
        {**row, "neg_chunk_paths": [str(colour_set / path) for path in row["neg_chunk_paths"]],
         "retrieve_top20": [e | {"path": str(colour_set / e["path"])} for e in row["retrieve_top20"]]}
        for row in wanted
    ]  # fmt: skip
    for corpus, rows in {"tiles.txt": wanted, "tiles.jsonl": wanted, ".": absolute, "c*.png": absolute}.items():
        found, _ = mine(corpus=colour_set / corpus if corpus != "." else colour_set, overwrite=True)
        same_but_scores(found, rows)


def test_a_positive_outside_of_the_corpus_is_named(tiny_model, colour_set, capsys):
    write_rows(colour_set / "corpus.jsonl", [{"chunk_path": f"c{n:02d}.png"} for n in range(11)])
    assert main(flags_of(colour_set, tiny_model, corpus=colour_set / "corpus.jsonl")) == 1
    error = capsys.readouterr().err
    assert "1 of 12 rows" in error and f"line 12: {colour_set / 'c11.png'}: is no tile of --corpus" in error
    assert main(flags_of(colour_set, tiny_model, corpus=colour_set / "corpus.jsonl", max_bad_fraction=0.1)) == 0
    assert len(read(colour_set / "hn.jsonl")) == 11
    assert read(colour_set / "hn.bad_rows.jsonl")[0]["line"] == 12


def test_bad_rows_and_bad_tiles_are_named_counted_and_limited(mine, tiny_model, colour_set, capsys):
    rows = [*read(colour_set / "rows.jsonl"), {"query": "torn", "chunk_path": "torn.png"}]
    write_rows(colour_set / "rows.jsonl", rows)
    (colour_set / "torn.png").write_bytes((colour_set / "c00.png").read_bytes()[:100])
    assert main(flags_of(colour_set, tiny_model)) == 1
    assert "torn.png" in capsys.readouterr().err
    mined, stats = mine(max_bad_fraction=0.1, corpus=colour_set, overwrite=True)
    assert len(mined) == 12 and stats["rows"]["bad"] == 1 and stats["documents"]["bad_tiles"] == 1
    assert "torn.png" in (colour_set / "hn.bad_corpus.jsonl").read_text()
    assert not any("torn" in path for row in mined for path in row["neg_chunk_paths"])


def test_the_same_from_any_folder_and_paths_of_the_output_find_the_same_images(colour_set, tiny_model, tmp_path):
    """O07: an odd name written decomposed on the disk and composed in the rows; output in another folder."""
    data = colour_set / "data"
    data.mkdir()
    odd = "\u00e9 #1 50%.png"
    for n in range(12):
        name = odd if n == 3 else f"c{n:02d}.png"
        shutil.copy(colour_set / f"c{n:02d}.png", data / unicodedata.normalize("NFD", name))
    shutil.copy(colour_set / "c07.png", colour_set / "out.png")
    rows = [
        {**row, "chunk_path": odd if n == 3 else row["chunk_path"]}
        for n, row in enumerate(read(colour_set / "rows.jsonl"))
    ]
    for row in rows:
        del row["neg_chunk_paths"]
    write_rows(data / "rows.jsonl", rows)
    argv = flags_of(data, tiny_model, output=colour_set / "out" / "hn.jsonl")
    relative = ["rows.jsonl" if part == str(data / "rows.jsonl") else part for part in argv]
    before = os.getcwd()
    results = []
    for folder, command in ((data, relative), (Path("/"), argv)):
        os.chdir(folder)
        try:
            assert main([*command, "--overwrite"]) == 0
        finally:
            os.chdir(before)
        results.append((colour_set / "out" / "hn.jsonl").read_bytes())
    assert results[0] == results[1]
    pairs, _ = read_pairs(colour_set / "out" / "hn.jsonl")
    for pair, row in zip(pairs, read(colour_set / "out" / "hn.jsonl"), strict=True):
        assert all(os.path.samefile(os.path.dirname(path), data) and os.path.exists(path)
                   for path in (pair.positive, *pair.negatives))  # fmt: skip
        assert row["chunk_path"].startswith("../data/")
        assert all(entry["path"].startswith("../data/") for entry in row["retrieve_top20"])


# --------------------------------------------------------------------------------------------------------------- images


def test_sixteen_bit_ramps_differ_and_two_reds_are_alike(tmp_path, tiny_model):
    """O01."""
    ramp = np.linspace(0, 65535, 64).astype(np.uint16)
    Image.fromarray(np.broadcast_to(ramp, (64, 64)).copy()).save(tmp_path / "across.png")
    Image.fromarray(np.broadcast_to(ramp[:, None], (64, 64)).copy()).save(tmp_path / "down.png")
    Image.new("CMYK", (64, 64), (0, 255, 255, 0)).save(tmp_path / "cmyk.jpg", quality=100, subsampling=0)
    Image.new("RGB", (64, 64), (255, 0, 0)).save(tmp_path / "rgb.png")
    names = ["across.png", "down.png", "cmyk.jpg", "rgb.png"]
    scores = mined_similarities(tmp_path, tiny_model, names)
    # Clipped to white, the ramps would be one picture; random weights tell even different ones apart a little only.
    assert scores["cmyk.jpg", "rgb.png"] > 0.9999 and scores["across.png", "down.png"] < 0.998


def test_a_turned_photo_embeds_like_the_upright_one(tmp_path, tiny_model):
    """O02."""
    image = Image.new("RGB", (80, 40), "red")
    image.paste("blue", (0, 0, 40, 40))
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "tagged.png", exif=exif)
    image.transpose(Image.Transpose.ROTATE_270).save(tmp_path / "turned.png")
    image.save(tmp_path / "lying.png")
    scores = mined_similarities(tmp_path, tiny_model, ["tagged.png", "turned.png", "lying.png"])
    assert scores["tagged.png", "turned.png"] > 0.9999 > scores["tagged.png", "lying.png"]


def mined_similarities(folder: Path, model: Path, names: list[str]) -> dict[tuple[str, str], float]:
    """Runs mining over the files and returns the similarities of the embeddings that it kept."""
    from contrastors.embeddings import EmbeddingStore
    from contrastors.validation import check_image

    write_rows(folder / "rows.jsonl", [{"query": name, "chunk_path": name} for name in names])
    assert main(flags_of(folder, model)) == 0
    encoder = load_encoder(str(model), None, WORLD, "fp32", 16, 512)
    store = EmbeddingStore(folder / "hn.embeddings", encoder.identity_of("document"), encoder.model.embedding_size)
    store.scan()
    vectors = store.matrix([bytes.fromhex(check_image(str(folder / name)).content) for name in names])[:]
    table = vectors @ vectors.T
    return {(a, b): float(table[i, j]) for i, a in enumerate(names) for j, b in enumerate(names)}


def test_strips_and_dots_embed_or_are_named_with_their_size(tmp_path, tiny_model, capsys):
    """O03, with the smallest pixel budget there is."""
    sizes = [(31, 639), (1, 1), (1, 200), (1, 201), (3, 3), (10, 2500)]
    for width, height in sizes:
        Image.new("RGB", (width, height), (width % 256, height % 256, 7)).save(tmp_path / f"{width}x{height}.png")
    write_rows(tmp_path / "rows.jsonl", [{"query": f"{w} by {h}", "chunk_path": f"{w}x{h}.png"} for w, h in sizes])
    assert main(flags_of(tmp_path, tiny_model, max_num_visual_tokens=4, max_bad_fraction=0.5)) == 0
    bad = read(tmp_path / "hn.bad_rows.jsonl")
    assert [Path(row["path"]).name for row in bad] == ["1x201.png", "10x2500.png"]
    assert all("aspect ratio" in row["reason"] and row["reason"].startswith(("1x201", "10x2500")) for row in bad)
    rows = read(tmp_path / "hn.jsonl")
    assert len(rows) == 4 and all(math.isfinite(e["score"]) for row in rows for e in row["retrieve_top20"])


def test_near_duplicates_in_bf16_keep_several_scores_and_no_order_of_the_file(tmp_path, tiny_model):
    """O10: 60 tiles whose colour differs by one, the positive last and then first."""
    names = []
    for n in range(60):
        names.append(f"{n:02d}.png")
        Image.new("RGB", (32, 32), (100 + n % 4, 100 + n // 4 % 4, 100 + n // 16)).save(tmp_path / names[-1])
    write_rows(tmp_path / "rows.jsonl", [{"query": "grey", "chunk_path": "59.png"}])
    found = []
    for order in (names, names[::-1]):
        write_rows(tmp_path / "corpus.jsonl", [{"chunk_path": name} for name in order])
        assert main(flags_of(tmp_path, tiny_model, corpus=tmp_path / "corpus.jsonl", dtype="bf16", n_docs=60,
                             batch_size=60, overwrite=True, embeddings_dir=tmp_path / "kept")) == 0  # fmt: skip
        found.append(read(tmp_path / "hn.jsonl")[0])
    scores = [entry["score"] for entry in found[0]["retrieve_top20"]]
    assert len(set(scores)) > 20 and scores == sorted(scores, reverse=True)
    assert found[0]["positive_rank"] == found[1]["positive_rank"]
    assert found[0]["positive_score"] == found[1]["positive_score"]


# ------------------------------------------------------------------------------------------------- embeddings that stay


def test_embeddings_are_made_once_for_a_model_and_its_limits_and_never_shared_beyond(
    mine, colour_set, tiny_model, tmp_path
):
    where = {"embeddings_dir": colour_set / "kept", "overwrite": True}

    def made(**flags) -> tuple[int, int]:
        stats = mine(**where, **flags)[1]
        return stats["queries"]["embedded"], stats["documents"]["embedded"]

    assert made() == (12, 12) and made() == (0, 0)
    assert made(batch_size=5, num_negatives=1, n_docs=4) == (0, 0)
    assert made(max_num_visual_tokens=4) == (0, 12)
    assert made(max_query_tokens=40) == (12, 0)
    assert made(dtype="bf16") == (12, 12)
    other = tmp_path / "other_model"
    shutil.copytree(tiny_model, other)
    assert made(model=other) == (0, 0)  # the same bytes elsewhere
    weights = bytearray((other / "model.safetensors").read_bytes())
    weights[-4:] = np.float32(1.0).tobytes()
    (other / "model.safetensors").write_bytes(weights)
    assert made(model=other) == (12, 12)
    Image.new("RGB", (64, 64), (1, 2, 3)).save(colour_set / "c04.png")
    assert made() == (0, 1)


def test_an_adapter_changes_the_embeddings_and_has_its_own(mine, colour_set, tiny_model, capsys):
    from contrastors.biqwen3 import BiQwen3

    model = BiQwen3.from_pretrained(str(tiny_model), [0.5] * 3, [0.5] * 3)
    model.add_adapter(4, 8, 0.0, True)
    torch.manual_seed(0)
    for name, parameter in model.trainable_parameters().items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.backbone.save_pretrained(colour_set / "adapter")
    where = {"embeddings_dir": colour_set / "kept", "overwrite": True}
    (colour_set / "adapter" / "trainer_state.json").write_text('{"processor": {"max_num_visual_tokens": 64}}')
    base, _ = mine(**where)
    adapted, stats = mine(**where, adapter=colour_set / "adapter")
    assert "was trained with --max-num-visual-tokens 64, this run has 16" in capsys.readouterr().out
    assert stats["documents"]["embedded"] == 12 and stats["settings"]["adapter"]
    assert [row["positive_score"] for row in base] != [row["positive_score"] for row in adapted]
    assert mine(**where)[1]["documents"]["embedded"] == 0


SLOWED = """
import runpy, sys, time
import contrastors.embeddings as embeddings
real, log = embeddings.EmbeddingStore.append, open(sys.argv[1], "a")
def append(self, keys, vectors):
    print(len(keys), file=log, flush=True)  # the forward of this batch is done
    real(self, keys, vectors)
    time.sleep(0.3)
embeddings.EmbeddingStore.append = append
script, sys.argv = sys.argv[2], sys.argv[2:]
runpy.run_path(script, run_name="__main__")
"""


@pytest.fixture
def one_thread():
    """Sums in the order of a process that torchrun starts, which has one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
def test_killed_while_embedding_and_started_again_at_most_one_batch_is_embedded_twice(
    colour_set, tiny_model, one_thread, monkeypatch
):
    from contrastors.embeddings import EmbeddingStore

    argv, log = flags_of(colour_set, tiny_model, batch_size=2), colour_set / "forwards.txt"
    log.touch()
    process = spawn("-c", SLOWED, log, ROOT / "mine_hard_negatives.py", *argv, PYTHONPATH=str(ROOT))
    while len(log.read_text().splitlines()) < 9:  # 6 batches of queries, then tiles
        assert process.poll() is None, finish(process)
        time.sleep(0.02)
    process.kill()
    finish(process)
    assert not (colour_set / "hn.jsonl").exists()
    forwarded = list(map(int, log.read_text().split()))
    real = EmbeddingStore.append
    monkeypatch.setattr(EmbeddingStore, "append", lambda *a: (forwarded.append(len(a[1])), real(*a)))
    assert main([*argv, "--resume"]) == 0
    assert 24 <= sum(forwarded) <= 24 + 2
    resumed = (colour_set / "hn.jsonl").read_bytes()
    assert main([*argv, "--overwrite", "--embeddings-dir", str(colour_set / "fresh")]) == 0
    assert (colour_set / "hn.jsonl").read_bytes() == resumed


@pytest.mark.slow
@pytest.mark.dist
def test_two_processes_mine_what_one_mines_row_by_row(colour_set, tiny_model, one_thread):
    def argv(name: str) -> list[str]:
        return flags_of(
            colour_set, tiny_model, output=colour_set / name, batch_size=2, filter_mode="perc", corpus=colour_set
        )

    assert main(argv("one.jsonl")) == 0
    code, text = warm_torchrun(2, ROOT / "mine_hard_negatives.py", *argv("two.jsonl"))
    assert code == 0, text[-3000:]
    assert (colour_set / "one.jsonl").read_bytes() == (colour_set / "two.jsonl").read_bytes()
    shards = [file.stat().st_size // 16 for file in (colour_set / "two.embeddings").glob("*/*.keys")]
    assert sorted(shards) == [6, 6, 6, 6]  # each rank embedded its half of the queries and of the tiles


# -------------------------------------------------------------------------------------------------- resume and outputs


def test_an_output_is_never_replaced_unasked(colour_set, tiny_model, capsys):
    argv = flags_of(colour_set, tiny_model)
    assert main(argv) == 0
    before = (colour_set / "hn.jsonl").read_bytes()
    assert main(argv) == 1 and "hn.jsonl exists; use --overwrite, --resume" in capsys.readouterr().err
    assert main([*argv, "--resume"]) == 0 and "is complete; nothing to mine" in capsys.readouterr().out
    assert main([*argv, "--resume", "--num-negatives", "1"]) == 1
    assert "had num_negatives 3, now it is 1; --overwrite starts anew" in capsys.readouterr().err
    assert (colour_set / "hn.jsonl").read_bytes() == before
    rows = read(colour_set / "rows.jsonl")
    write_rows(colour_set / "rows.jsonl", rows[:-1])
    assert main([*argv, "--resume"]) == 1 and "had input" in capsys.readouterr().err
    assert main([*argv, "--overwrite"]) == 0 and len(read(colour_set / "hn.jsonl")) == 11


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"num_negatives": 21}, "--num-negatives 21 is more than --n-docs 20"),
        ({"resume": True, "overwrite": True}, "give one"),
        ({"corpus": "x", "search_api_url": "http://localhost:1"}, "the service has its own corpus"),
        ({"index": "exact", "search_api_url": "http://localhost:1"}, "--index is idle"),
        ({"min_positive_found": 0.1}, "acts on --search-api-url only"),
        ({"nprobe": 3}, "--nprobe acts on"),
        ({"margin": 0.1}, "--margin acts on --filter-mode margin or perc only, not on none"),
        ({"margin": 1.5, "filter_mode": "perc"}, "a share of at most 1"),
        ({"search_api_url": "localhost:1"}, "must start with http"),
        ({"output": "rows.jsonl", "input": "rows.jsonl"}, "neither --input nor --corpus"),
        ({"report": "rows.jsonl", "input": "rows.jsonl"}, "neither --input nor --corpus"),
        ({"report": "tiles.txt", "corpus": "tiles.txt"}, "neither --input nor --corpus"),
        ({"report": "hn.jsonl", "output": "./hn.jsonl"}, "must be files of their own"),
        ({"report": "page", "stats_output": "page"}, "must be files of their own"),
        ({"output": "hn.jsonl", "stats_output": "hn.jsonl"}, "must be files of their own"),
    ],
)
def test_flags_that_would_be_ignored_or_fail_later_are_usage_errors(colour_set, tiny_model, capsys, flags, message):
    with pytest.raises(SystemExit) as ended:
        main(flags_of(colour_set, tiny_model, **flags))
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_literal_control_markers_in_queries_are_text(mine, colour_set):
    """O12."""
    rows = read(colour_set / "rows.jsonl")
    rows[0]["query"], rows[1]["query"] = "what does <|image_pad|> mean?", "<image> <|im_end|>"
    write_rows(colour_set / "rows.jsonl", rows)
    mined, _ = mine(max_query_tokens=60)
    assert [row["query"] for row in mined[:2]] == [row["query"] for row in rows[:2]]


def test_long_queries_are_cut_and_counted(mine, colour_set, capsys):
    rows = read(colour_set / "rows.jsonl")
    rows[0]["query"] = "long " * 200
    write_rows(colour_set / "rows.jsonl", rows)
    _, stats = mine(max_query_tokens=60)
    assert stats["queries"]["truncated"] == 1 and "1 of 12 queries were cut" in capsys.readouterr().out


def test_the_report_shows_the_mined_rows_and_is_an_output_like_the_others(mine, colour_set, tiny_model, capsys):
    page = colour_set / "page.html"
    page.write_text("mine", encoding="utf-8")
    assert main(flags_of(colour_set, tiny_model, report=page)) == 1
    assert "page.html exists; use --overwrite, --resume" in capsys.readouterr().err
    assert page.read_text(encoding="utf-8") == "mine" and not (colour_set / "hn.jsonl").exists()
    rows, _ = mine(report=page, overwrite=True)
    text = page.read_text(encoding="utf-8")
    assert "Hard negatives of" in text and text.count("data:image") >= len(rows)


def test_the_report_of_a_complete_run_is_written_later(mine, colour_set):
    mine()
    before, page = (colour_set / "hn.jsonl").read_bytes(), colour_set / "page.html"
    mine(resume=True, report=page)
    assert "Hard negatives of" in page.read_text(encoding="utf-8")
    assert (colour_set / "hn.jsonl").read_bytes() == before
