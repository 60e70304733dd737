"""verify_embeddings.py on a trained tiny adapter: its numbers, and each gate tripped by a real fault."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from contrastors.biqwen3 import BiQwen3
from contrastors.comparison import COMPARED
from contrastors.demo import make_model
from contrastors.gates import (
    Probes,
    check_effect,
    check_invariance,
    embed_by_transformers,
    embed_probes,
    largest_deviation,
    make_probes,
    measure_invariance,
    pad_left,
)
from contrastors.loading import load_bi_encoder
from contrastors.plots import recall_curve
from tests.conftest import COLOURS, ROOT, make_colour_set, write_rows
from tests.runs import arguments, train, warm_torchrun

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the colour set and, in `run`, a short training with checkpoints 2 and 4."""
    folder = make_colour_set(tmp_path_factory.mktemp("verify"))
    assert train(arguments(tiny_model, folder, folder / "run", lora_vit=True)) == 0
    return folder


def verify(folder: Path, *adapters: Path, **flags: object) -> int:
    """Runs the script in this process; --output is out.json in the folder."""
    from verify_embeddings import main

    given = {"eval_jsonl": folder / "rows.jsonl", "num_workers": 0, "output": folder / "out.json", "overwrite": True}
    argv = [word for adapter in adapters for word in ("--adapter", str(adapter))]
    for name, value in (given | flags).items():
        flag = "--" + name.replace("_", "-")
        argv += [flag] if value is True else [flag, str(value)]
    try:
        return main(argv)
    except SystemExit as stop:
        return int(stop.code or 0)


def report(folder: Path) -> dict:
    return json.loads((folder / "out.json").read_text())


def copy_of(adapter: Path, folder: Path, change) -> Path:
    """A copy of a checkpoint with its adapter tensors changed by `change(key, tensor) -> (key, tensor)`."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(adapter, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    changed = dict(change(key, value) for key, value in tensors.items())
    save_file({key: value.contiguous() for key, value in changed.items()}, folder / "adapter_model.safetensors")
    return folder


def model_with(tiny_model: Path, folder: Path, change) -> Path:
    """A copy of the base checkpoint whose input embeddings went through `change(matrix, tokenizer)`."""
    from transformers import AutoTokenizer

    shutil.copytree(tiny_model, folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    (key,) = (key for key in tensors if key.endswith("embed_tokens.weight"))
    change(tensors[key], AutoTokenizer.from_pretrained(folder))
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


# Numbers


def test_numbers_are_those_of_the_last_evaluation_of_training(trained: Path):
    assert verify(trained, trained / "run" / "checkpoint-4") == 0
    base, adapted = report(trained)["models"]
    assert base["metrics"] == json.loads((trained / "run" / "eval_step0.json").read_text())
    assert adapted["metrics"] == json.loads((trained / "run" / "eval_step4.json").read_text())


def test_per_query_ranks_and_differences_belong_to_the_metrics(trained: Path):
    assert verify(trained, trained / "run" / "checkpoint-4") == 0
    found = report(trained)
    base, adapted = found["models"]
    ranks = {name: np.asarray([row["rank"][name] for row in found["queries"]]) for name in ("base", adapted["name"])}
    assert len(found["queries"]) == found["num_queries"] == found["corpus_size"] == 12
    for model in (base, adapted):
        assert (ranks[model["name"]] <= 5).mean() == pytest.approx(model["metrics"]["recall@5"], abs=0.05)
    for row in adapted["against_base"]:
        difference = adapted["metrics"][row["metric"]] - base["metrics"][row["metric"]]
        assert row["difference"] == pytest.approx(difference, abs=1e-9) and row["low"] <= row["high"]


def test_every_metric_is_shown_with_its_interval_for_base_and_adapter(trained: Path, capsys):
    assert verify(trained, trained / "run" / "checkpoint-4") == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    models = report(trained)["models"]
    for name in COMPARED:
        cells = [m["metrics"][f"{name}{end}"] for m in models for end in ("", "_low", "_high")]
        shown = [float(text) for text in re.findall(r"-?\d+\.\d{4}", lines[name])[:6]]
        assert shown == pytest.approx(cells, abs=1e-4), name
    assert [row["metric"] for row in models[1]["against_base"]] == list(COMPARED)
    assert {"positive_similarity", "negative_similarity", "hardest_negative", "margin"} < set(COMPARED)


def test_a_corpus_of_one_document_is_compared_as_far_as_it_goes(trained: Path, capsys):
    row = json.loads((trained / "rows.jsonl").read_text().splitlines()[0])
    (trained / "one.jsonl").write_text(json.dumps(row | {"neg_chunk_paths": []}) + "\n")
    flags = {"eval_jsonl": trained / "one.jsonl", "plot": trained / "one.png"}
    assert verify(trained, trained / "run" / "checkpoint-4", **flags) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "hardest_negative" in line)
    assert line.split() == ["hardest_negative", "–", "–", "–", *"not distinguishable at n = 0".split()]
    assert report(trained)["models"][1]["metrics"]["hardest_negative"] is None


def test_adapters_are_switched_on_one_base_and_leave_no_trace(trained: Path):
    run = trained / "run"
    alone = {}
    for step in (2, 4):
        assert verify(trained, run / f"checkpoint-{step}") == 0
        alone[step] = report(trained)["models"][1]["metrics"]
    assert verify(trained, run / "checkpoint-2", run / "checkpoint-4") == 0
    base, second, fourth = report(trained)["models"]
    assert second["metrics"] == alone[2] and fourth["metrics"] == alone[4] and second["metrics"] != fourth["metrics"]
    assert base["metrics"] == json.loads((run / "eval_step0.json").read_text())
    (recall, mrr) = report(trained)["between_adapters"]
    assert (recall["metric"], mrr["metric"]) == ("recall@1", "mrr")
    gain = fourth["metrics"]["mrr"] - second["metrics"]["mrr"]
    assert mrr["first"] == second["name"] and mrr["difference"] == pytest.approx(gain)


def test_two_ranks_find_the_same(trained: Path):
    argv = ["--adapter", str(trained / "run" / "checkpoint-4"), "--eval-jsonl", str(trained / "rows.jsonl")]
    output = ["--output", trained / "two.json", "--overwrite"]
    code, text = warm_torchrun(2, ROOT / "verify_embeddings.py", *argv, *output)
    assert code == 0, text[-2000:]
    assert text.count("recall@10") == 1  # the main rank alone speaks
    expected = json.loads((trained / "run" / "eval_step4.json").read_text())
    found = json.loads((trained / "two.json").read_text())["models"][1]["metrics"]
    assert found == pytest.approx(expected, abs=1e-6)


def test_only_the_first_rows_are_opened(trained: Path, tmp_path: Path):
    folder = make_colour_set(tmp_path)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps({k: r[k] for k in ("query", "chunk_path")}) + "\n" for r in rows)
    )
    for number in range(5, 12):
        (folder / f"c{number:02d}.png").write_bytes(b"no image")
    assert verify(folder, trained / "run" / "checkpoint-4", max_pairs=5) == 0
    assert report(folder)["num_queries"] == report(folder)["corpus_size"] == 5
    assert verify(folder, trained / "run" / "checkpoint-4") == 1  # seven of twelve rows are bad


def test_more_tiles_join_the_corpus(trained: Path, tmp_path: Path):
    Image.new("RGB", (64, 64), (1, 2, 3)).save(tmp_path / "other.png")
    assert verify(trained, trained / "run" / "checkpoint-4", corpus=tmp_path) == 0
    assert report(trained)["corpus_size"] == 13 and report(trained)["num_queries"] == 12


def test_a_corpus_that_cannot_be_read_is_refused_as_in_mining(trained: Path, tmp_path: Path, capsys):
    corpus, adapter = tmp_path / "corpus.txt", trained / "run" / "checkpoint-4"
    corpus.write_text("a.png\nb.png\nc.png\nd.png\n")
    assert verify(trained, adapter, corpus=corpus, max_bad_fraction=1) == 1
    sentence = capsys.readouterr().err
    assert f"--corpus {corpus}: 4 of 4 rows cannot be used" in sentence and "out.bad_corpus.jsonl" in sentence
    lost = [json.loads(line) for line in (trained / "out.bad_corpus.jsonl").read_text().splitlines()]
    assert [(row["line"], row["path"]) for row in lost] == [
        (n, str(tmp_path / f"{x}.png")) for n, x in enumerate("abcd", 1)
    ]
    for name in "abc":
        Image.new("RGB", (64, 64), (ord(name), 2, 3)).save(tmp_path / f"{name}.png")
    assert verify(trained, adapter, corpus=corpus, max_bad_fraction=0.2) == 1
    assert verify(trained, adapter, corpus=corpus, max_bad_fraction=0.25) == 0
    assert report(trained)["corpus_size"] == 15 and report(trained)["unreadable_images"] == 1


def test_plot_is_drawn(trained: Path):
    assert verify(trained, trained / "run" / "checkpoint-4", plot=trained / "out.png") == 0
    with Image.open(trained / "out.png") as picture:
        assert picture.width > 1000
        assert len(set(picture.convert("RGB").resize((200, 60)).getdata())) > 20


def test_recall_curve_is_monotone_and_ends_at_the_corpus():
    depths, recall, (low, high) = recall_curve(np.asarray([1, 2.5, 4, 9]), corpus_size=8)
    assert depths.tolist() == list(range(1, 9))
    assert recall.tolist() == [0.25, 0.25, 0.5, 0.75, 0.75, 0.75, 0.75, 0.75]
    assert (low <= recall).all() and (recall <= high).all()


def test_limits_come_from_the_adapter_and_must_agree(trained: Path, tiny_model: Path, capsys):
    other = trained / "limits"
    if not other.exists():
        shutil.copytree(trained / "run" / "checkpoint-4", other)
        state = json.loads((other / "trainer_state.json").read_text())
        state["args"]["max_num_visual_tokens"] = 8
        (other / "trainer_state.json").write_text(json.dumps(state))
    assert verify(trained, trained / "run" / "checkpoint-4") == 0
    assert report(trained)["settings"]["max_num_visual_tokens"] == 16
    assert verify(trained, trained / "run" / "checkpoint-4", other) == 1
    assert "different --max-num-visual-tokens: 16" in capsys.readouterr().err
    assert verify(trained, trained / "run" / "checkpoint-4", other, max_num_visual_tokens=16) == 0


def test_a_folder_given_twice_and_an_adapter_that_names_no_base_are_refused(trained: Path, tmp_path: Path, capsys):
    adapter = trained / "run" / "checkpoint-4"
    assert verify(trained, adapter, adapter) == 2
    assert "is given twice" in capsys.readouterr().err
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(adapter / name, tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": None}))
    assert verify(trained, tmp_path) == 1
    assert f"{tmp_path} does not name its base model; give --model" in capsys.readouterr().err
    (tmp_path / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter_config.json").unlink()
    assert verify(trained, tmp_path) == 1
    assert "adapter_config.json is missing, so this is no adapter" in capsys.readouterr().err


def test_existing_results_are_kept(trained: Path, capsys):
    from verify_embeddings import main

    (trained / "held.json").write_text("{}")
    argv = ["--adapter", str(trained / "run" / "checkpoint-4"), "--eval-jsonl", str(trained / "rows.jsonl")]
    assert main([*argv, "--output", str(trained / "held.json")]) == 1
    assert "held.json exists; use --overwrite" in capsys.readouterr().err
    assert (trained / "held.json").read_text() == "{}"


def test_results_never_go_over_one_another_or_over_what_is_read(trained: Path, tmp_path: Path, capsys):
    adapter, rows, corpus = trained / "run" / "checkpoint-4", trained / "rows.jsonl", tmp_path / "corpus.txt"
    kept = rows.read_bytes()
    corpus.write_text(str(trained / "c00.png"))
    (tmp_path / "link.json").symlink_to(trained / "out.json")
    for flags in ({"plot": trained / "out.json"}, {"plot": tmp_path / "link.json"}, {"output": rows}, {"plot": corpus}):
        assert verify(trained, adapter, corpus=corpus, **flags) == 2
        assert "--output and --plot must be two files" in capsys.readouterr().err
    assert rows.read_bytes() == kept


# Gates


def refuse(capsys, folder: Path, adapter: Path, *words: str, **flags: object) -> None:
    """Asserts exit code 1 and one sentence that names the adapter and holds the words."""
    assert verify(folder, adapter, **flags) == 1
    sentence = capsys.readouterr().err.strip().splitlines()[-1]
    assert sentence.startswith("error: ") and str(adapter) in sentence, sentence
    for word in words:
        assert word in sentence, sentence


def test_renamed_keys_are_refused(trained: Path, tmp_path: Path, capsys):
    wrong = copy_of(
        trained / "run" / "checkpoint-4", tmp_path / "a", lambda k, v: (k.replace("layers.0", "layers.7"), v)
    )
    refuse(capsys, trained, wrong, "adapter keys do not match this model")


def test_an_adapter_with_one_more_level_is_refused(trained: Path, tmp_path: Path, capsys):
    level = lambda k, v: (k.replace("base_model.model.", "base_model.model.model.", 1), v)  # noqa: E731
    wrong = copy_of(trained / "run" / "checkpoint-4", tmp_path / "a", level)
    refuse(capsys, trained, wrong, "one more `model.` level", "no effect", "python train_swift.py --remap DIR")


def test_an_adapter_of_zeros_is_refused(trained: Path, tmp_path: Path, capsys):
    zero = copy_of(trained / "run" / "checkpoint-4", tmp_path / "a", lambda k, v: (k, v * 0 if ".lora_B." in k else v))
    refuse(capsys, trained, zero, "every B matrix is zero")


def test_an_adapter_too_small_to_act_is_refused(trained: Path, tmp_path: Path, capsys):
    tiny = copy_of(trained / "run" / "checkpoint-4", tmp_path / "a", lambda k, v: (k, v * 1e-20))
    refuse(capsys, trained, tiny, "no effect")


def test_an_adapter_of_another_base_is_refused(trained: Path, tmp_path: Path, capsys):
    other = make_model(tmp_path / "wide", seed=1, hidden=128, layers=2, vision_hidden=32, vision_layers=3)
    refuse(capsys, trained, trained / "run" / "checkpoint-4", "does not fit this model", model=other)


def test_an_adapter_of_other_weights_of_the_same_shape_is_refused(trained: Path, tiny_model: Path, tmp_path, capsys):
    """Every key and shape fits; the numbers would be those of a model that nobody trained."""
    adapter = trained / "run" / "checkpoint-4"
    other = make_model(tmp_path / "twin", seed=2, hidden=64, layers=2, vision_hidden=32, vision_layers=3)
    refuse(capsys, trained, adapter, "was trained on other weights than those of --model", model=other)
    moved = shutil.copytree(tiny_model, tmp_path / "moved")
    assert verify(trained, adapter, model=moved) == 0  # the same weights elsewhere
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(adapter / name, bare)
    assert verify(trained, bare, model=other, max_num_visual_tokens=16) == 0  # it does not tell, so nobody can


def test_an_adapter_that_is_not_finite_is_refused(trained: Path, tmp_path: Path, capsys):
    nan = copy_of(trained / "run" / "checkpoint-4", tmp_path / "a", lambda k, v: (k, v * float("nan")))
    refuse(capsys, trained, nan, "40 adapter tensors are not finite")


def test_a_finite_adapter_whose_embeddings_are_not_is_refused_with_their_number(trained: Path, tmp_path, capsys):
    scale = lambda k, v: (k, v * 1e20 if ".lora_B." in k else v)  # noqa: E731
    huge = copy_of(trained / "run" / "checkpoint-4", tmp_path / "a", scale)
    assert verify(trained, huge, plot=tmp_path / "out.png", require="margin=0") == 1
    out, err = capsys.readouterr()
    assert re.match(rf"error: {huge}: \d+ embeddings are not finite", err) and "--require margin=0: it is –" in err
    assert out.index("embeddings are not finite") < out.index("  recall@1"), "the gates speak before the numbers"
    (margin,) = (row for row in report(trained)["models"][1]["against_base"] if row["metric"] == "margin")
    assert (margin["num_queries"], margin["difference"]) == (0, None)


def test_one_embedding_that_is_not_finite_is_counted_and_refused(trained: Path, tiny_model: Path, tmp_path, capsys):
    def poison(matrix: torch.Tensor, tokenizer) -> None:
        last = list(COLOURS)[-1]
        others = {i for name in list(COLOURS)[:-1] for i in tokenizer(name)["input_ids"]}
        matrix[next(i for i in tokenizer(last)["input_ids"] if i not in others)] = float("nan")

    broken = model_with(tiny_model, tmp_path / "model", poison)
    refuse(capsys, trained, trained / "run" / "checkpoint-4", "1 embeddings are not finite", model=broken)
    assert "NaN" not in (trained / "out.json").read_text() and report(trained)["num_queries"] == 12


def test_a_collapsed_model_is_refused(trained: Path, tiny_model: Path, tmp_path: Path, capsys):
    def collapse(matrix: torch.Tensor, tokenizer) -> None:
        matrix[tokenizer("\n")["input_ids"][-1]] *= 100  # the token that is pooled, whatever came before

    flat = model_with(tiny_model, tmp_path / "model", collapse)
    refuse(capsys, trained, trained / "run" / "checkpoint-4", "collapsed", model=flat)


def test_a_requirement_that_is_not_met_fails(trained: Path, capsys):
    refuse(capsys, trained, trained / "run" / "checkpoint-4", "--require recall@5=1.01", require="recall@5=1.01")
    assert report(trained)["models"][1]["off"] == [
        f"--require recall@5=1.01: it is {report(trained)['models'][1]['metrics']['recall@5']:.4f}"
    ]
    assert verify(trained, trained / "run" / "checkpoint-4", require="recall@5=0.0") == 0
    assert verify(trained, trained / "run" / "checkpoint-4", require="recall=1") == 2


# Invariance


@pytest.fixture(scope="module")
def encoder(tiny_model: Path):
    model, processor = load_bi_encoder(str(tiny_model), CPU, max_num_visual_tokens=16)
    return model.eval(), processor


@pytest.fixture(scope="module")
def probes(encoder) -> Probes:
    images = [Image.new("RGB", (64, 64), rgb) for rgb in list(COLOURS.values())[:4]]
    return make_probes(encoder[1], ["a short one", "a query with rather more words than the other one"], images)


@pytest.mark.parametrize(("dtype", "bound"), [("fp32", 1e-6), ("bf16", 5e-3)])
def test_embeddings_depend_on_their_input_alone(tiny_model: Path, probes: Probes, dtype: str, bound: float):
    """O11, O27: neighbours, side of the padding, what was embedded before."""
    model, _ = load_bi_encoder(str(tiny_model), CPU, dtype, max_num_visual_tokens=16)
    found = measure_invariance(model.eval(), probes)
    assert max(found.values()) <= bound and check_invariance(found, model.base.dtype) == []


def test_pooling_the_last_place_is_caught(encoder, probes: Probes, monkeypatch):
    monkeypatch.setattr("contrastors.biqwen3.pool_last_token", lambda hidden, mask: hidden[:, -1])
    off = check_invariance(measure_invariance(encoder[0], probes), torch.float32)
    assert any("neighbours" in text for text in off) and any("padding" in text for text in off)


def test_rope_offsets_that_stay_and_act_are_caught(encoder, probes: Probes, monkeypatch):
    """O27: nothing clears the offsets, and the model adds them to the vector as a stale position would."""
    forward = BiQwen3.forward

    def stale(self, **inputs):
        kept = [
            float(m.rope_deltas.float().sum()) for m in self.modules() if getattr(m, "rope_deltas", None) is not None
        ]
        return forward(self, **inputs) + 0.01 * sum(kept)

    monkeypatch.setattr("contrastors.biqwen3._clear_rope_deltas", lambda model: None)
    monkeypatch.setattr(BiQwen3, "forward", stale)
    off = check_invariance(measure_invariance(encoder[0], probes), torch.float32)
    assert any("embedded before" in text for text in off)


def test_vectors_that_are_not_finite_are_off(encoder, probes: Probes, monkeypatch):
    forward = BiQwen3.forward
    monkeypatch.setattr(BiQwen3, "forward", lambda self, **inputs: forward(self, **inputs) * float("nan"))
    assert len(check_invariance(measure_invariance(encoder[0], probes), torch.float32)) == 3


def test_padding_moves_left_and_nothing_else_changes():
    chunk = {
        "input_ids": torch.tensor([[5, 6, 0, 0], [7, 8, 9, 4]]),
        "attention_mask": torch.tensor([[1, 1, 0, 0], [1] * 4]),
    }
    moved = pad_left(chunk, pad_id=0)
    assert moved["input_ids"].tolist() == [[0, 0, 5, 6], [7, 8, 9, 4]]
    assert moved["attention_mask"].tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]


def test_plain_transformers_gives_the_same_vectors(encoder, probes: Probes, tiny_model: Path):
    """The whole way from text and pixels on, by code that shares nothing with ours but the weights."""
    model, processor = encoder
    queries = ["a short one", "a query with rather more words than the other one"]
    images = [Image.new("RGB", size, (200, 30, 90)) for size in ((64, 64), (96, 64), (300, 200))]
    own = make_probes(processor, queries, images)
    theirs = embed_by_transformers(model, str(tiny_model), processor, queries, images)
    assert largest_deviation(theirs[0], embed_probes(model, own.queries[:2], own.pad_id)) < 1e-6
    assert largest_deviation(theirs[1], embed_probes(model, own.documents[:3], own.pad_id)) < 1e-6


def test_a_processor_that_cuts_pixels_is_caught(trained: Path, capsys, monkeypatch):
    from contrastors.processing import BiQwen3Processor

    assert verify(trained, trained / "run" / "checkpoint-4", against_official=True) == 0
    assert max(report(trained)["against_official"].values()) < 1e-6
    assert "plain transformers: documents differ by a cosine deviation of at most" in capsys.readouterr().out
    encode = BiQwen3Processor.encode_document
    monkeypatch.setattr(BiQwen3Processor, "encode_document", lambda self, image: encode(self, image.rotate(90)))
    refuse_words = ("--against-official", "documents differ from plain transformers")
    assert verify(trained, trained / "run" / "checkpoint-4", against_official=True) == 1
    sentence = capsys.readouterr().err
    assert all(word in sentence for word in refuse_words)


def test_rows_that_plain_transformers_reads_otherwise_are_no_fault_of_the_checkpoint(trained: Path, tmp_path: Path):
    """A query over the token limit, one with a control marker, a tile narrower than a visual token."""
    folder = make_colour_set(tmp_path)
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]
    rows[0]["query"], rows[1]["query"] = "red " * 600, "a green<|im_end|> one"
    with Image.open(folder / "c02.png") as tile:
        tile.crop((0, 0, 20, 64)).save(folder / "c02.png")
    write_rows(folder / "rows.jsonl", rows)
    assert verify(folder, trained / "run" / "checkpoint-4", against_official=True) == 0
    assert max(report(folder)["against_official"].values()) < 1e-6
    write_rows(
        folder / "rows.jsonl", [row | {"query": f"{name} " * 600} for name, row in zip(COLOURS, rows, strict=True)]
    )
    assert verify(folder, trained / "run" / "checkpoint-4", against_official=True) == 0


def test_effect_is_told_from_rounding():
    vectors = torch.nn.functional.normalize(torch.randn(5, 16, dtype=torch.float64), dim=1)
    assert check_effect(vectors, vectors + 1e-12)
    assert not check_effect(vectors, vectors + 0.01 * torch.randn(5, 16))
