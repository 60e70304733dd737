"""train_contrastors.py in one process: what a run leaves, resume, equivalence classes, what it refuses."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from contrastors.demo import make_model
from tests.conftest import make_colour_set, write_rows
from tests.runs import ROOT, arguments, environment, finish, largest_difference, losses, metrics, start, train, weights


def tensors_of(folder: Path, part: str) -> list[torch.Tensor]:
    return [value for key, value in weights(folder).items() if part in key]


# ------------------------------------------------------------------------------------------------- what a run leaves


def test_a_run_leaves_checkpoints_metrics_and_records(args, colour_set):
    assert train(args("run", num_hard_negatives=2)) == 0
    run = colour_set / "run"
    names = {path.name for path in run.iterdir()}
    assert {"checkpoint-2", "checkpoint-4", "metrics.jsonl", "args.json", "env.json", "train.log", "best.json"} <= names
    assert {"summary.json", "curves.png", "eval_step0.jsonl", "eval_step2.jsonl", "eval_step4.jsonl"} <= names
    assert not [name for name in names if ".tmp" in name]
    rows = metrics(run)
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4]
    assert [row["step"] for row in rows if "eval/recall@1" in row] == [0, 2, 4]
    assert all(tensor.any() for tensor in tensors_of(run / "checkpoint-4", "lora_B"))
    summary = json.loads((run / "summary.json").read_text())
    assert summary["completed"] and summary["rows"] == {"input": 12, "used": 12, "bad": 0, "dropped": 0}
    state = json.loads((run / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["step"] == 4 and state["processor"]["max_num_visual_tokens"] == 16 and state["versions"]["torch"]
    config = json.loads((run / "checkpoint-4" / "adapter_config.json").read_text())
    assert config["task_type"] == "FEATURE_EXTRACTION" and not config.get("auto_mapping")
    assert not [path for path in (run / "checkpoint-4").iterdir() if path.stat().st_size > 2_000_000]  # no base weights
    card = (run / "checkpoint-4" / "README.md").read_text()
    assert "| base |" in card and "recall@1" in card


def test_the_loss_falls_and_learning_rate_follows_its_schedule(args, colour_set):
    assert train(args("run", max_steps=30, warmup_steps=3, batch_size=12, grad_cache_chunk=12, eval_steps=0)) == 0
    run = colour_set / "run"
    found = losses(run)
    assert np.mean(found[-5:]) < 0.5 * found[0], found
    rates = [row["train/lr"] for row in metrics(run)]
    assert rates[:3] == pytest.approx([0.01 / 3, 0.02 / 3, 0.01]) and rates[-1] < 1e-4
    assert all(a >= b for a, b in zip(rates[3:], rates[4:], strict=False))


def test_eval_steps_zero_means_no_evaluation_at_all(args, colour_set):
    assert train(args("run", eval_steps=0)) == 0
    assert not list((colour_set / "run").glob("eval_*"))


def test_eval_only_evaluates_and_never_trains(args, colour_set):
    assert train(args("run")) == 0
    shutil.rmtree(colour_set / "run" / "checkpoint-2")
    before = sorted(path.name for path in (colour_set / "run").iterdir())
    assert train(args("base", eval_only=True)) == 0
    names = {path.name for path in (colour_set / "base").iterdir()}
    assert names == {"eval_step0.json", "eval_step0.jsonl", "train.log"}
    argv = [
        "--eval-only",
        "--resume",
        str(colour_set / "run" / "checkpoint-4"),
        "--output-dir",
        str(colour_set / "again"),
    ]
    assert train(argv) == 0
    again = json.loads((colour_set / "again" / "eval_step4.json").read_text())
    in_run = json.loads((colour_set / "run" / "eval_step4.json").read_text())
    assert again == in_run
    assert before == sorted(path.name for path in (colour_set / "run").iterdir())


def test_what_an_evaluation_could_not_use_is_counted_beside_its_numbers(args, colour_set):
    rows = [json.loads(line) for line in (colour_set / "rows.jsonl").read_text().splitlines()]
    rows[3]["neg_chunk_paths"] = ["nowhere.png"]
    write_rows(colour_set / "eval.jsonl", [*rows, {"query": "lost", "chunk_path": "nowhere.png"}])
    assert train(args("run", eval_jsonl=colour_set / "eval.jsonl", eval_only=True, max_bad_fraction=0.1)) == 0
    found = json.loads((colour_set / "run" / "eval_step0.json").read_text())
    counts = ("num_rows", "num_bad_rows", "num_queries", "num_bad_negatives", "corpus_size")
    assert [found[name] for name in counts] == [13, 1, 12, 1, 12]


# ------------------------------------------------------------------------------------------------- equivalence classes


def test_chunk_one_walks_the_path_of_chunk_four_at_dropout_zero(args, colour_set):
    flags = {
        "lora_dropout": 0.0,
        "max_steps": 8,
        "num_hard_negatives": 2,
        "lora_vit": True,
        "eval_steps": 0,
        "lr": 1e-3,
    }
    for chunk in (1, 4):
        assert train(args(f"chunk{chunk}", grad_cache_chunk=chunk, **flags)) == 0
    first, second = losses(colour_set / "chunk1"), losses(colour_set / "chunk4")
    assert np.abs(np.subtract(first, second)).max() < 1e-5
    assert largest_difference(colour_set / "chunk1" / "checkpoint-8", colour_set / "chunk4" / "checkpoint-8") < 1e-5


def test_workers_change_nothing(args, colour_set):
    for workers in (0, 2):
        assert train(args(f"w{workers}", num_workers=workers)) == 0
    assert metrics(colour_set / "w0") == metrics(colour_set / "w2")


@pytest.mark.golden
def test_golden_trajectory_of_twenty_steps(args, colour_set):
    """A change of numerics updates tests/golden.json in a commit of its own (python -m tests.test_train writes it)."""
    assert train(args("run", **GOLDEN_FLAGS)) == 0
    golden = json.loads((ROOT / "tests" / "golden.json").read_text())
    assert np.abs(np.subtract(losses(colour_set / "run"), golden["losses"])).max() < 2e-3


GOLDEN_FLAGS = {
    "max_steps": 20, "lora_dropout": 0.0, "num_hard_negatives": 2, "lora_vit": True, "eval_steps": 0, "save_steps": 0,
    "lr": 3e-3,
}  # fmt: skip


# ------------------------------------------------------------------------------------------------- flags have an effect

EFFECTS = [
    ("num_hard_negatives", {"num_hard_negatives": 1}), ("lora_r", {"lora_r": 2}), ("lora_alpha", {"lora_alpha": 16}),
    ("lora_dropout", {"lora_dropout": 0.4}), ("lora_vit", {"lora_vit": True}), ("temperature", {"temperature": 0.5}),
    ("logit_scale_lr", {"logit_scale_lr": 0.1}), ("batch_size", {"batch_size": 3}), ("lr", {"lr": 1e-3}),
    ("weight_decay", {"weight_decay": 10.0}), ("warmup_steps", {"warmup_steps": 3}), ("seed", {"seed": 1}),
    ("scheduler", {"scheduler": "constant"}), ("num_cycles", {"scheduler": "cosine-restarts", "num_cycles": 3}),
    ("max_grad_norm", {"max_grad_norm": 1e-3}), ("max_train_rows", {"max_train_rows": 5}),
    ("max_query_tokens", {"max_query_tokens": 28}), ("max_num_visual_tokens", {"max_num_visual_tokens": 4}),
    ("dtype", {"dtype": "bf16"}), ("grad_cache_chunk", {"grad_cache_chunk": 4}), ("query_chunk", {"query_chunk": 5}),
    ("chunk_tokens", {"chunk_tokens": 16}),
]  # fmt: skip


@pytest.fixture(scope="module")
def plain_losses(tiny_model, tmp_path_factory):
    """Losses and logs by flags, one short run each; long queries and two-row queries so that every flag can act."""
    folder = tmp_path_factory.mktemp("effects")
    rows = []
    for number in range(12):
        pixels = np.random.default_rng(number).integers(0, 255, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((128, 128)).save(folder / f"c{number}.png")
        rows.append({"query": f"{number} " + "red header dot " * 4, "chunk_path": f"c{number}.png"})
    for number, row in enumerate(rows):
        row["neg_chunk_paths"] = [f"c{(number + k) % 12}.png" for k in (1, 2, 3)]
    rows[1]["query"] = rows[0]["query"]
    write_rows(folder / "rows.jsonl", rows)
    found = {}

    def run(**flags):
        key = json.dumps(flags, sort_keys=True)
        if key not in found:
            base = {"eval_steps": 0, "save_steps": 0, "max_steps": 6, "batch_size": 5}
            output = folder / f"run{len(found)}"
            assert train(arguments(tiny_model, folder, output, **(base | flags))) == 0
            last = max(output.glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
            found[key] = [row["train/loss"] for row in metrics(output)], weights(last)
        return found[key]

    return run


@pytest.mark.parametrize(("name", "flags"), EFFECTS, ids=[name for name, _ in EFFECTS])
def test_every_training_flag_changes_the_run(plain_losses, name, flags):
    base = {"scheduler": "cosine-restarts"} if name == "num_cycles" else {}
    changed, _ = plain_losses(**flags)
    plain, _ = plain_losses(**base)
    assert changed != plain


def test_flags_on_negatives_and_masks_change_the_run(plain_losses):
    two = {"num_hard_negatives": 2}
    assert plain_losses(**two) != plain_losses(**two, sample_negatives=True)
    assert plain_losses(**two)[0] != plain_losses(**two, mask_false_negatives=False)[0]
    four = {"num_hard_negatives": 4, "missing_negatives": "mask"}
    assert len(plain_losses(**four)[0]) == 6  # rows list three: their fourth slot is masked


def test_gradient_checkpointing_trains_the_same_weights(plain_losses):
    """O16: every B matrix moves."""
    plain, with_checkpointing = plain_losses(lora_vit=True), plain_losses(lora_vit=True, gradient_checkpointing=True)
    assert np.abs(np.subtract(plain[0], with_checkpointing[0])).max() < 1e-4
    assert all(value.any() for key, value in with_checkpointing[1].items() if "lora_B" in key)


def test_loss_tile_is_the_number_of_queries_of_a_tile(args, monkeypatch):
    from contrastors import loss

    sizes, whole = [], loss._query_losses
    monkeypatch.setattr(
        loss, "_query_losses", lambda queries, *rest: sizes.append(len(queries)) or whole(queries, *rest)
    )
    assert train(args("run", loss_tile=3, batch_size=4, max_steps=1, eval_steps=0)) == 0
    assert sizes == [3, 1, 1, 3]  # forward, and backward


def test_constant_temperature_with_rate_zero(args, colour_set):
    assert train(args("run", logit_scale_lr=0)) == 0
    temperatures = [row["train/temperature"] for row in metrics(colour_set / "run") if "train/temperature" in row]
    assert temperatures == pytest.approx([0.07] * 4)
    assert train(args("learned", logit_scale_lr=1e-9)) == 0
    norms = [metrics(colour_set / name)[1]["train/grad_norm"] for name in ("run", "learned")]
    assert norms[0] < norms[1]  # what stands still takes no part in clipping


# ------------------------------------------------------------------------------------------------------------ refusals

REFUSED = [
    ({"temperature": 0}, 2, "not a number above 0"),
    ({"temperature": -1}, 2, "not a number above 0"),
    ({"temperature": 1e-9}, 2, "stays within"),
    ({"batch_size": 0}, 2, "at least 1"),
    ({"batch_size": 1}, 2, "nothing to contrast"),
    ({"batch_size": 64}, 1, "do not fill one global batch of 64"),
    ({"num_cycles": 3}, 2, "cosine-restarts only"),
    ({"sample_negatives": True}, 2, "--num-hard-negatives"),
    ({"eval_steps": 0, "best_metric": "mrr"}, 2, "--eval-steps 0"),
    ({"attn_implementation": "flash_attention_2"}, 2, "--device cuda"),
    ({"allow_changed_args": True}, 2, "--resume only"),
    ({"lora_dropout": 1}, 2, "nothing to train"),
    ({"lora_vit": True, "reuse_vision_features": True}, 2, "needs a frozen vision part"),
    ({"retain_graphs": 2, "memory_budget_gb": 1}, 2, "acts on --retain-graphs auto only, not on 2"),
    ({"retain_graphs": "some"}, 2, "'some' is not a whole number of at least 0"),
    ({"chunk_tokens": 15}, 2, "--chunk-tokens 15 holds no tile of --max-num-visual-tokens 16"),
    ({"lr": "nan"}, 2, "not a number"),
    ({"max_num_visual_tokens": 2}, 2, "at least 4"),
    ({"max_query_tokens": 5}, 1, "at least"),
    ({"train_jsonl": "nowhere.jsonl"}, 1, "nowhere.jsonl: cannot be read"),
    ({"model": "nobody/nothing"}, 1, "--model nobody/nothing"),
    ({"model": "./nowhere"}, 1, "--model ./nowhere: no such folder"),
    ({"device": "cuda"}, 1, "no such device"),
    ({"resume": "nowhere"}, 1, "no such folder"),
    ({"run_name": "first"}, 2, "--run-name acts with --report-to only"),
    ({"resume": "latest", "batch_size": 1}, 2, "nothing to contrast"),
    ({"resume": "latest", "eval_only": True}, 1, "no whole checkpoint to evaluate"),
]


@pytest.mark.parametrize(("flags", "code", "text"), REFUSED, ids=[str(flags) for flags, _, _ in REFUSED])
def test_silly_flags_get_one_sentence(args, colour_set, capsys, flags, code, text):
    if flags.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has a cuda device")
    assert train(args("run", **flags)) == code
    error = capsys.readouterr().err
    assert text in error and "Traceback" not in error
    assert not list((colour_set / "run").glob("checkpoint-*"))


def test_a_batch_of_one_row_without_a_negative_is_refused(args, colour_set, capsys):
    rows = [json.loads(line) for line in (colour_set / "rows.jsonl").read_text().splitlines()]
    rows[3]["neg_chunk_paths"] = ["nowhere.png"]
    write_rows(colour_set / "rows.jsonl", rows)
    flags = {"batch_size": 1, "num_hard_negatives": 1, "eval_steps": 0}
    assert train(args("run", **flags)) == 1
    assert "nothing to contrast where the row has no usable negative" in capsys.readouterr().err
    assert train(args("run", **flags, missing_negatives="drop-row")) == 0
    assert min(losses(colour_set / "run")) > 0


def test_an_existing_run_is_refused_without_overwrite_and_replaced_with_it(args, colour_set, capsys):
    assert train(args("run")) == 0
    (colour_set / "run" / "notes.txt").write_text("mine")
    assert train(args("run")) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert train(args("run", overwrite=True, max_steps=2)) == 0
    assert not (colour_set / "run" / "checkpoint-4").exists() and (colour_set / "run" / "notes.txt").exists()
    assert [row["step"] for row in metrics(colour_set / "run") if "train/loss" in row] == [1, 2]


def test_overwriting_deletes_nothing_when_the_new_run_cannot_start(args, colour_set):
    assert train(args("run")) == 0
    assert train(args("run", overwrite=True, train_jsonl="nowhere.jsonl")) == 1
    assert train(args("run", overwrite=True, model="nobody/nothing")) == 1
    assert train(args("run", overwrite=True, batch_size=64)) == 1
    assert (colour_set / "run" / "checkpoint-4").exists()


def test_bad_rows_stop_the_run_above_the_fraction_and_are_listed(args, colour_set, capsys):
    (colour_set / "c03.png").write_bytes((colour_set / "c03.png").read_bytes()[:60])
    assert train(args("run")) == 1
    error = capsys.readouterr().err
    assert "1 of 12 rows" in error and "c03.png" in error and "line 4" in error
    assert train(args("run", max_bad_fraction=0.2, eval_steps=0)) == 0
    listed = [json.loads(line) for line in (colour_set / "run" / "bad_rows.jsonl").read_text().splitlines()]
    assert [row["line"] for row in listed] == [4]
    assert json.loads((colour_set / "run" / "summary.json").read_text())["rows"]["bad"] == 1


def test_a_not_finite_loss_stops_with_step_and_rows_and_keeps_the_last_checkpoint(args, colour_set, tiny_model, capsys):
    broken = colour_set / "model"
    shutil.copytree(tiny_model, broken)
    tensors = load_file(broken / "model.safetensors")
    name = next(key for key in tensors if "layers.1" in key and "down_proj" in key)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    assert train(args("run", model=broken)) == 1
    captured = capsys.readouterr()
    assert "step 1: loss nan" in captured.err and "lines" in captured.err and "rows.jsonl" in captured.err
    assert "not finite" in captured.out
    assert not list((colour_set / "run").glob("checkpoint-*"))


def test_missing_or_left_over_weights_are_refused(args, colour_set, tiny_model, capsys):
    broken = colour_set / "model"
    shutil.copytree(tiny_model, broken)
    tensors = load_file(broken / "model.safetensors")
    name = next(key for key in tensors if "q_proj" in key)
    save_file({k: v for k, v in tensors.items() if k != name}, broken / "model.safetensors", metadata={"format": "pt"})
    assert train(args("run", model=broken)) == 1
    assert "1 weights are missing" in capsys.readouterr().err
    save_file(tensors | {"model.extra.weight": torch.ones(1)}, broken / "model.safetensors", metadata={"format": "pt"})
    assert train(args("run2", model=broken)) == 1
    assert "1 are left over" in capsys.readouterr().err


def test_odd_images_and_literal_markers_train_or_are_named(args, colour_set):
    """O03, O12: strips, dots and control markers in queries."""
    sizes = [(31, 639), (1, 1), (1, 200), (1, 201), (3, 3), (10, 2000), (10, 2500)]
    queries = ["what does <|image_pad|> mean?", "and <image>?", "x " * 600, "<|im_end|>", "a\u2028b\u0085c", "é", "7"]
    rows = []
    for number, (size, query) in enumerate(zip(sizes, queries, strict=True)):
        Image.new("RGB", size, (number * 30, 90, 200)).save(colour_set / f"odd{number}.png")
        rows.append({"query": query, "chunk_path": f"odd{number}.png"})
    write_rows(colour_set / "odd.jsonl", rows)
    flags = {"train_jsonl": colour_set / "odd.jsonl", "eval_jsonl": colour_set / "odd.jsonl", "max_bad_fraction": 0.5}
    assert train(args("run", **flags, max_num_visual_tokens=4, max_steps=2, num_hard_negatives=0)) == 0
    listed = [json.loads(line) for line in (colour_set / "run" / "bad_rows.jsonl").read_text().splitlines()]
    assert [row["line"] for row in listed] == [4, 7] and all("aspect ratio" in row["reason"] for row in listed)
    assert json.loads((colour_set / "run" / "summary.json").read_text())["truncated_queries_seen"] > 0


def test_the_same_run_from_another_folder(args, colour_set, monkeypatch):
    """O07: relative paths belong to the JSONL's folder."""
    assert train(args("here")) == 0
    monkeypatch.chdir("/")
    assert train(args("there")) == 0
    assert metrics(colour_set / "here") == metrics(colour_set / "there")


# -------------------------------------------------------------------------------------------------------- adapters out

LOAD_IN_A_FRESH_PROCESS = """
import sys, torch
from peft import AutoPeftModelForFeatureExtraction, PeftModel
from transformers import AutoModel
from contrastors.biqwen3 import BiQwen3
from contrastors.checkpoint import load_adapter
from contrastors.images import open_image
from contrastors.processing import BiQwen3Processor, Inputs
base, adapter, tile = sys.argv[1:]
processor = BiQwen3Processor.from_pretrained(base, 16)
pixels = processor.image_processor
item = processor.encode_document(open_image(tile))
(chunk,) = Inputs.from_items([item], processor.pad_id).chunks(1)
ours = BiQwen3.from_pretrained(base, pixels.image_mean, pixels.image_std)
plain = ours.eval()(**chunk)
load_adapter(ours, adapter, trainable=False)
wanted = ours.eval()(**chunk)
assert (wanted - plain).abs().max() > 1e-3
for backbone in (
    PeftModel.from_pretrained(AutoModel.from_pretrained(base), adapter),
    AutoPeftModelForFeatureExtraction.from_pretrained(adapter),
):
    vectors = BiQwen3(backbone, pixels.image_mean, pixels.image_std).eval()(**chunk)
    print(float((vectors - wanted).detach().abs().max()))
"""


def test_the_adapter_loads_in_a_fresh_process_with_plain_peft(args, colour_set, tiny_model):
    assert train(args("run", lora_vit=True)) == 0
    command = [sys.executable, "-c", LOAD_IN_A_FRESH_PROCESS, tiny_model, colour_set / "run" / "checkpoint-4"]
    done = subprocess.run(
        [*map(str, command), str(colour_set / "c04.png")], capture_output=True, text=True, cwd=ROOT, env=environment()
    )
    assert done.returncode == 0, done.stderr[-2000:]
    differences = [float(line) for line in done.stdout.split()]
    assert len(differences) == 2 and max(differences) == 0.0


# ------------------------------------------------------------------------------------------------------------- signals


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_step_saves_and_the_run_resumes_bit_identically(args, colour_set, number, code):
    flags = {"max_steps": 60, "eval_steps": 30, "save_steps": 0}
    process = start(args("stopped", **flags))
    log = colour_set / "stopped" / "metrics.jsonl"
    while not log.exists() or len(log.read_text().splitlines()) < 4:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    found, text = finish(process)
    assert found == code, text
    (checkpoint,) = (colour_set / "stopped").glob("checkpoint-*")
    assert 3 <= int(checkpoint.name.split("-")[1]) < 60
    assert train(["--resume", str(checkpoint)]) == 0
    assert train(args("whole", **flags)) == 0
    assert metrics(colour_set / "whole") == metrics(colour_set / "stopped")


@pytest.mark.slow
def test_kill_nine_while_saving_leaves_a_whole_checkpoint_to_go_on_from(args, colour_set):
    flags = {"max_steps": 400, "save_steps": 1, "eval_steps": 0, "save_total_limit": 2}
    for delay in (0.0, 0.013, 0.031):
        process = start([*args("run", **flags, resume="latest")])
        state = colour_set / "run"
        before = {path.name for path in state.glob("checkpoint-*")}
        while not {path.name for path in state.glob("checkpoint-*")} - before:
            assert process.poll() is None, finish(process)[1]
            time.sleep(0.01)
        time.sleep(delay)
        process.kill()
        finish(process)
    last = max(int(path.name.split("-")[1]) for path in (colour_set / "run").glob("checkpoint-*"))
    argv = ["--resume", "latest", "--output-dir", str(colour_set / "run"), "--max-steps", str(last + 2)]
    assert train([*argv, "--allow-changed-args"]) == 0
    steps = [row["step"] for row in metrics(colour_set / "run")]
    assert steps == list(range(1, len(steps) + 1))
    assert not list((colour_set / "run").glob(".checkpoint-*"))


if __name__ == "__main__":  # writes the golden file
    import tempfile

    from contrastors.demo import make_model

    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        model = make_model(work / "model", seed=1, hidden=64, layers=2, vision_hidden=32, vision_layers=3)
        make_colour_set(work)
        assert train(arguments(model, work, work / "run", **GOLDEN_FLAGS)) == 0
        golden = {"flags": GOLDEN_FLAGS, "losses": losses(work / "run")}
        (ROOT / "tests" / "golden.json").write_text(json.dumps(golden, indent=1) + "\n")
