"""The demo's data and its judge: what the table at the end of `make demo` stands on."""

from __future__ import annotations

import base64
import io
import json
import threading
from pathlib import Path

import pytest
from PIL import Image

import filter_hard_negatives_vqa as filter_script
from contrastors.demo import main, make_data, print_filter_quality
from contrastors.demo_judge import MODEL, hash_pixels, make_server, read_facts
from contrastors.images import open_image
from contrastors.vlm_messages import encode_image
from tests.conftest import write_rows


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    assert make_data(folder, seed=3) == {"train": 336, "eval": 75, "eval_hard": 300, "corpus": 1344}
    return folder


@pytest.fixture
def judge(data):
    server = make_server(read_facts(data / "facts.jsonl"))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    server.server_close()
    thread.join()


def test_no_tile_of_the_evaluations_is_seen_or_searched_in_training(data):
    files = {name: read(data / f"{name}.jsonl") for name in ("train", "corpus", "eval", "eval_hard")}
    paths = {name: {row["chunk_path"] for row in rows} for name, rows in files.items()}
    queries = {name: {row["query"] for row in rows} for name, rows in files.items() if name != "corpus"}
    assert paths["train"] < paths["corpus"]
    for name in ("eval", "eval_hard"):
        assert not paths[name] & paths["corpus"] and not queries[name] & queries["train"]
        assert len(paths[name]) == len(queries[name]) == len(files[name])  # one tile a query, one query a tile
    siblings = [row["article_id"] for row in files["eval_hard"]]
    assert {siblings.count(topic) for topic in siblings} == {4}


def test_a_twin_shows_what_its_training_row_asks_for_in_other_pixels(data):
    shown = {row["chunk_path"]: row for row in read(data / "facts.jsonl")}
    for row in read(data / "train.jsonl"):
        twin = shown[row["chunk_path"].replace("train_", "twin_")]
        assert twin["query"] == row["query"] and twin["pixels"] != shown[row["chunk_path"]]["pixels"]


def test_the_same_seed_draws_the_same_files_and_another_one_others(data, tmp_path):
    make_data(tmp_path / "again", seed=3)
    make_data(tmp_path / "other", seed=4)

    def files(folder: Path) -> dict[str, bytes]:
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    assert files(tmp_path / "again") == files(data)
    assert files(tmp_path / "other")["facts.jsonl"] != files(data)["facts.jsonl"]


def test_the_demo_makes_a_model_and_data_and_spares_what_is_there(tmp_path, capsys):
    assert main(["--output", str(tmp_path / "demo")]) == 0
    assert (tmp_path / "demo" / "model" / "config.json").is_file()
    assert "336 train, 75 eval, 300 eval_hard, 1344 corpus rows" in capsys.readouterr().out
    assert main(["--output", str(tmp_path / "demo")]) == 1
    assert "use --overwrite" in capsys.readouterr().err
    assert main(["--output", str(tmp_path / "demo"), "--overwrite"]) == 0


def test_the_demo_replaces_no_data_of_others(tmp_path, capsys):
    (tmp_path / "training" / "data").mkdir(parents=True)
    own = write_rows(tmp_path / "training" / "data" / "train.jsonl", [{"query": "mine", "chunk_path": "mine.png"}])
    before = own.read_bytes()
    for flags in ([], ["--overwrite"]):
        assert main(["--output", str(tmp_path / "training"), *flags]) == 1
        assert "data exists, and is no demo's; use another --output" in capsys.readouterr().err
    assert own.read_bytes() == before and len(list((tmp_path / "training").rglob("*"))) == 2


def test_the_judge_drops_twins_alone_and_the_demo_counts_them(data, judge, tmp_path, monkeypatch):
    """The real filter over HTTP; every second row has its twin among the candidates, the siblings do not answer."""
    rows = []
    for number, row in enumerate(read(data / "train.jsonl")[:6]):
        siblings = sorted(map(str, (data / "tiles").glob(f"other_{row['article_id']:03d}_*.png")))
        positive = str(data / row["chunk_path"])
        found = [positive.replace("train_", "twin_"), *siblings[:2]] if number % 2 else siblings[:2]
        candidates = [{"rank": rank, "path": path, "score": 0.9} for rank, path in enumerate(found, start=1)]
        rows.append({"query": row["query"], "chunk_path": positive, "neg_chunk_paths": found[:2]})
        rows[-1]["retrieve_top20"] = candidates
    write_rows(tmp_path / "mined.jsonl", rows)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    argv = ["--input", tmp_path / "mined.jsonl", "--output", tmp_path / "filtered.jsonl", "--base-url", judge]
    argv += ["--model", MODEL, "--num-hard-negatives", 2, "--candidate-k", 3]
    assert filter_script.main([*map(str, argv)]) == 0
    verdicts = {Path(r["path"]).name[:4]: r["verdict"] for r in read(tmp_path / "filtered.reviews.jsonl")}
    assert verdicts == {"twin": "CORRECT", "othe": "WRONG"}
    assert len(read(tmp_path / "filtered.jsonl")) == 6
    (tmp_path / "data").symlink_to(data)
    out = io.StringIO()
    print_filter_quality(tmp_path, out)
    assert "3 of 6 rows have a false negative" in out.getvalue()
    assert "removed 3 of 3 false negatives" in out.getvalue() and "lost 0 of 12 true ones" in out.getvalue()


def test_the_judge_refuses_what_it_does_not_know(data, judge, tmp_path, capsys):
    Image.new("RGB", (128, 128), (1, 2, 3)).save(tmp_path / "strange.png")
    row = read(data / "train.jsonl")[0] | {"chunk_path": str(data / "tiles" / "train_000_0.png")}
    candidates = [{"rank": 1, "path": str(tmp_path / "strange.png"), "score": 0.9}]
    write_rows(tmp_path / "mined.jsonl", [row | {"retrieve_top20": candidates}])
    argv = ["--input", tmp_path / "mined.jsonl", "--output", tmp_path / "filtered.jsonl", "--base-url", judge]
    argv += ["--model", MODEL, "--num-hard-negatives", 1, "--max-bad-fraction", 0.5]
    assert filter_script.main([*map(str, argv)]) == 1
    assert "knows the demo's tiles and queries only" in capsys.readouterr().err


def test_a_tile_survives_the_re_encoding_of_the_filter(data):
    row = read(data / "facts.jsonl")[0]
    sent = encode_image((data / row["chunk_path"]).read_bytes())
    assert hash_pixels(open_image(base64.b64decode(sent.url.partition(",")[2]))) == row["pixels"]
