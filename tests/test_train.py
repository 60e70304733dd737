"""train_contrastors.py in one process: what a run leaves, resume, equivalence classes, what it refuses."""

from __future__ import annotations

import json
import os
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

from contrastors.biqwen3 import BiQwen3
from contrastors.checkpoint import adapter_tensors, load_adapter, save_checkpoint
from contrastors.demo import make_model
from tests.conftest import make_colour_set, write_rows
from tests.gradients import build_model
from tests.runs import (
    ROOT,
    arguments,
    environment,
    finish,
    largest_difference,
    losses,
    metrics,
    same_weights,
    start,
    train,
    weights,
)


@pytest.fixture
def args(tiny_model, colour_set):
    """args(output, **flags) -> argv of a quick run; `colour_set` is the folder of its data."""

    def build(output: str, **flags) -> list[str]:
        return arguments(tiny_model, colour_set, colour_set / output, **flags)

    return build


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


# ------------------------------------------------------------------------------------------------------------- resume


def test_resume_is_bit_identical_to_the_uninterrupted_run(args, colour_set):
    """O23, O24: 12 rows, 3 steps an epoch, stopped inside the third epoch; dropout, hard negatives, vision on."""
    flags = {"num_hard_negatives": 2, "sample_negatives": True, "lora_vit": True, "eval_steps": 3, "save_steps": 4}
    assert train(args("whole", max_steps=10, **flags)) == 0
    assert train(args("parts", max_steps=10, **flags)) == 0
    for step in (8, 10):
        shutil.rmtree(colour_set / "parts" / f"checkpoint-{step}", ignore_errors=True)
    assert train(["--resume", str(colour_set / "parts" / "checkpoint-4")]) == 0
    assert metrics(colour_set / "whole") == metrics(colour_set / "parts")
    assert same_weights(colour_set / "whole" / "checkpoint-10", colour_set / "parts" / "checkpoint-10")
    first, second = (
        torch.load(colour_set / name / "checkpoint-10" / "optimizer.pt", weights_only=True)["state"]
        for name in ("whole", "parts")
    )
    assert all(torch.equal(first[k]["exp_avg_sq"], second[k]["exp_avg_sq"]) for k in first)
    scales = [load_file(colour_set / n / "checkpoint-10" / "logit_scale.safetensors") for n in ("whole", "parts")]
    assert torch.equal(scales[0]["log_scale"], scales[1]["log_scale"])


def test_resume_does_not_repeat_an_evaluation_or_skip_a_due_one(args, colour_set):
    assert train(args("run")) == 0
    shutil.rmtree(colour_set / "run" / "checkpoint-4")
    assert train(["--resume", "latest", "--output-dir", str(colour_set / "run")]) == 0
    assert [row["step"] for row in metrics(colour_set / "run") if "eval/recall@1" in row] == [0, 2, 4]


def test_a_typed_flag_that_alters_training_is_refused_on_resume(args, colour_set, capsys):
    assert train(args("run")) == 0
    checkpoint = str(colour_set / "run" / "checkpoint-2")
    assert train(["--resume", checkpoint, "--lr", "0.5"]) == 1
    error = capsys.readouterr().err
    assert "--lr 0.5 (checkpoint: 0.01)" in error and "--allow-changed-args" in error
    assert train(["--resume", checkpoint, "--lora-r", "8", "--allow-changed-args"]) == 1
    assert "--lora-r 8" in capsys.readouterr().err
    assert train(["--resume", checkpoint, "--lr", "0.5", "--allow-changed-args"]) == 0
    assert metrics(colour_set / "run")[-1]["step"] == 4
    assert any(row.get("train/lr", 0) > 0.01 for row in metrics(colour_set / "run"))


def test_another_base_model_is_noticed_by_its_weights_and_a_moved_one_is_the_same(args, colour_set, tiny_model, capsys):
    base = shutil.copytree(tiny_model, colour_set / "base")
    assert train(args("run", model=base)) == 0
    whole = losses(colour_set / "run")
    checkpoint = str(colour_set / "run" / "checkpoint-2")
    base.rename(colour_set / "moved")
    assert train(["--resume", checkpoint]) == 1 and "no such folder" in capsys.readouterr().err
    assert train(["--resume", checkpoint, "--model", str(colour_set / "moved")]) == 0
    assert losses(colour_set / "run") == whole
    make_model(base, seed=2, hidden=64, layers=2, vision_hidden=32, vision_layers=3)  # where the old one was
    for more in ([], ["--eval-only", "--output-dir", str(colour_set / "measured")]):
        assert train(["--resume", checkpoint, *more]) == 1
        assert "has other weights than those that this checkpoint was trained on" in capsys.readouterr().err
    assert train(["--resume", checkpoint, "--allow-changed-args"]) == 1


def test_changed_rows_are_refused_on_resume_and_a_picture_that_went_bad_is_told(args, colour_set, capsys):
    rows = (colour_set / "rows.jsonl").read_text().splitlines()
    assert train(args("run", max_bad_fraction=0.5)) == 0
    resume = ["--resume", str(colour_set / "run" / "checkpoint-2"), "--eval-steps", "0"]
    (colour_set / "rows.jsonl").write_text("\n".join(rows[:-1]) + "\n")
    assert train(resume) == 1
    assert "rows.jsonl are not those of the checkpoint, so they come in another order" in capsys.readouterr().err
    (colour_set / "rows.jsonl").write_text("\n".join(rows) + "\n\n")  # other bytes, the same rows
    assert train(resume) == 0 and "another order" not in capsys.readouterr().out
    (colour_set / "rows.jsonl").write_text("\n".join(rows) + "\n")
    (colour_set / "c03.png").write_bytes(b"no picture")
    shutil.rmtree(colour_set / "run" / "checkpoint-4")
    assert train(resume) == 0
    assert "come in another order (the file is the same: pictures or flags are others)" in capsys.readouterr().out


def test_files_of_a_checkpoint_can_be_read_by_whom_the_umask_lets(args, colour_set):
    before = os.umask(0o027)
    try:
        assert train(args("run", max_steps=1, eval_steps=0)) == 0
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (colour_set / "run" / "checkpoint-1").iterdir()}
    assert set(modes.values()) == {"0o640"}, modes


def test_what_would_stop_a_run_later_is_told_before_any_image_is_opened(args, colour_set, capsys):
    (colour_set / "file").write_text("mine")
    for flags, sentence in (
        ({"model": colour_set / "nowhere"}, f"--model {colour_set / 'nowhere'}: no such folder"),
        (
            {"attn_implementation": "flash_attention_2", "dtype": "auto", "device": "auto"},
            "flash_attention_2 needs cuda",
        ),
        ({"output_dir": colour_set / "file" / "run"}, f"{colour_set / 'file'} is a file; give a folder"),
    ):
        if "device" in flags and torch.cuda.is_available():
            continue
        assert train(args("run", **flags)) == 1
        assert sentence in capsys.readouterr().err
    assert not (colour_set / ".image_facts.jsonl").exists() and not (colour_set / "run").exists()


def test_a_finished_run_says_that_it_is_and_how_to_train_longer(args, colour_set, capsys):
    assert train(args("run", max_steps=2)) == 0
    assert train(["--resume", "latest", "--output-dir", str(colour_set / "run")]) == 0
    assert "step 2 of 2 is done; for more: --max-steps N --allow-changed-args" in capsys.readouterr().out


def test_a_typed_flag_that_equals_the_checkpoints_is_no_change(args, colour_set):
    assert train(args("run")) == 0
    shutil.rmtree(colour_set / "run" / "checkpoint-4")
    assert train(["--resume", str(colour_set / "run" / "checkpoint-2"), "--lr", "0.01", "--num-workers", "1"]) == 0


def test_a_run_folder_is_no_checkpoint_and_the_message_says_what_to_do(args, colour_set, capsys):
    assert train(args("run")) == 0
    assert train(["--resume", str(colour_set / "run")]) == 1
    assert "is a run folder; give a checkpoint in it" in capsys.readouterr().err


def test_resume_latest_in_an_empty_folder_starts_anew(args, colour_set):
    assert train(args("run", resume="latest")) == 0
    assert (colour_set / "run" / "checkpoint-4").exists()


def test_resume_latest_skips_broken_checkpoints_with_a_warning(args, colour_set, capsys):
    assert train(args("run")) == 0
    whole = weights(colour_set / "run" / "checkpoint-4")
    file = colour_set / "run" / "checkpoint-4" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    shutil.copytree(colour_set / "run" / "checkpoint-2", colour_set / "run" / "checkpoint-9")
    (colour_set / "run" / "checkpoint-9" / "trainer_state.json").unlink()
    assert train(["--resume", "latest", "--output-dir", str(colour_set / "run")]) == 0
    text = capsys.readouterr().out
    assert text.count("skipped an incomplete checkpoint") == 2
    assert all(torch.equal(value, whole[key]) for key, value in weights(colour_set / "run" / "checkpoint-4").items())


def test_retention_counts_numerically_and_spares_the_best_and_other_runs(args, colour_set):
    run = colour_set / "run"
    flags = {"save_steps": 1, "save_total_limit": 2, "best_metric": "loss", "eval_steps": 1}
    assert train(args("other", max_steps=1)) == 0
    assert train(args("run", max_steps=9, **flags)) == 0
    shutil.copytree(colour_set / "other" / "checkpoint-1", run / "checkpoint-3")
    argv = ["--resume", str(run / "checkpoint-9"), "--max-steps", "12", "--eval-steps", "100", "--allow-changed-args"]
    assert train(argv) == 0
    best = json.loads((run / "best.json").read_text())["checkpoint"]
    assert {path.name for path in run.glob("checkpoint-*")} == {"checkpoint-3", best, "checkpoint-11", "checkpoint-12"}


def test_the_best_checkpoint_is_saved_marked_and_kept(args, colour_set):
    assert train(args("run", max_steps=6, eval_steps=1, save_steps=0, save_total_limit=1)) == 0
    run = colour_set / "run"
    best = json.loads((run / "best.json").read_text())
    values = {row["step"]: row["eval/recall@1"] for row in metrics(run) if "eval/recall@1" in row and row["step"] > 0}
    assert best["value"] == max(values.values()) == values[best["step"]]
    assert (run / best["checkpoint"]).exists()


def test_going_back_sets_later_checkpoints_aside(args, colour_set):
    run = colour_set / "run"
    assert train(args("run", max_steps=6)) == 0
    argv = ["--resume", str(run / "checkpoint-2"), "--max-steps", "3", "--save-total-limit", "1"]
    assert train([*argv, "--allow-changed-args"]) == 0
    names = {
        path.name.rsplit("-", 1)[0] if "abandoned" in path.name else path.name for path in run.glob("*checkpoint-*")
    }
    assert {"checkpoint-3", "abandoned-checkpoint-4", "abandoned-checkpoint-6"} <= names
    assert not {"checkpoint-4", "checkpoint-6"} & names and not (run / "eval_step4.json").exists()
    assert [row["step"] for row in metrics(run) if "train/loss" in row] == [1, 2, 3]


def test_another_measure_on_resume_forgets_the_old_best(args, colour_set, capsys):
    run = colour_set / "run"
    assert train(args("run", max_steps=6, save_steps=2)) == 0
    assert train(["--resume", str(run / "checkpoint-4"), "--best-metric", "loss"]) == 0
    best = json.loads((run / "best.json").read_text())
    values = {row["step"]: row["eval/loss"] for row in metrics(run) if "eval/loss" in row}
    assert best["metric"] == "loss" and best["value"] == values[best["step"]] == min(values[4], values[6])
    assert "earlier bests do not count" in capsys.readouterr().out


def test_what_an_evaluation_could_not_use_is_counted_beside_its_numbers(args, colour_set):
    rows = [json.loads(line) for line in (colour_set / "rows.jsonl").read_text().splitlines()]
    rows[3]["neg_chunk_paths"] = ["nowhere.png"]
    write_rows(colour_set / "eval.jsonl", [*rows, {"query": "lost", "chunk_path": "nowhere.png"}])
    assert train(args("run", eval_jsonl=colour_set / "eval.jsonl", eval_only=True, max_bad_fraction=0.1)) == 0
    found = json.loads((colour_set / "run" / "eval_step0.json").read_text())
    counts = ("num_rows", "num_bad_rows", "num_queries", "num_bad_negatives", "corpus_size")
    assert [found[name] for name in counts] == [13, 1, 12, 1, 12]


def test_an_evaluation_of_other_rows_under_the_same_path_is_not_compared_with_earlier_ones(args, colour_set, capsys):
    run, file = colour_set / "run", colour_set / "eval.jsonl"
    rows = (colour_set / "rows.jsonl").read_text().splitlines()
    file.write_text("\n".join(rows[:2]))
    assert train(args("run", max_steps=2, eval_jsonl=file)) == 0
    assert json.loads((run / "best.json").read_text())["step"] == 2
    file.write_text("\n".join(rows))
    assert train(["--resume", str(run / "checkpoint-2"), "--max-steps", "4", "--allow-changed-args"]) == 0
    assert "changed on resume: the rows of the evaluation; earlier values are not compared" in capsys.readouterr().out
    found = {step: json.loads((run / f"eval_step{step}.json").read_text()) for step in (0, 2, 4)}
    assert [found[step]["num_queries"] for step in (0, 2, 4)] == [2, 12, 12]  # step 2 is evaluated anew
    best = json.loads((run / "best.json").read_text())
    assert best["value"] == max(found[step][best["metric"]] for step in (2, 4))
    card = (run / "checkpoint-4" / "README.md").read_text()
    assert "| last evaluation |" in card and "| base |" not in card  # which was measured on other rows


def test_a_metric_without_a_value_is_a_dash_in_the_card_of_every_later_checkpoint(args, colour_set):
    (row, *_) = (json.loads(line) for line in (colour_set / "rows.jsonl").read_text().splitlines())
    write_rows(colour_set / "one.jsonl", [{**row, "neg_chunk_paths": []}])  # nothing to be less similar than
    assert train(args("run", max_steps=2, eval_jsonl=colour_set / "one.jsonl")) == 0
    resume = ["--resume", "latest", "--output-dir", str(colour_set / "run"), "--max-steps", "4", "--allow-changed-args"]
    assert train(resume) == 0
    assert "| – |" in (colour_set / "run" / "checkpoint-4" / "README.md").read_text()


def test_an_adapter_is_saved_and_loaded_without_asking_the_hub_or_taking_a_device(tiny_model, tmp_path, monkeypatch):
    """Left to itself PEFT looks the base's config.json up at every save, and loads onto the first cuda device."""

    def refuse(*_, **__):
        raise AssertionError("asked")

    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", refuse)
    monkeypatch.setattr("peft.utils.save_and_load.infer_device", refuse)
    monkeypatch.setattr("peft.peft_model.infer_device", refuse)
    model, scale, processor = build_model(tiny_model)
    for config in model.backbone.peft_config.values():
        config.base_model_name_or_path = "Qwen/Qwen3-VL-Embedding-2B"
    optimizer, state = torch.optim.AdamW(model.trainable_parameters().values()), {"step": 1}
    save_checkpoint(tmp_path / "checkpoint-1", model, scale, optimizer, state, "card")
    pixels = processor.image_processor
    base = BiQwen3.from_pretrained(str(tiny_model), pixels.image_mean, pixels.image_std)
    load_adapter(base, tmp_path / "checkpoint-1", trainable=False)
    assert all(torch.equal(value, adapter_tensors(base)[key]) for key, value in adapter_tensors(model).items())


@pytest.mark.parametrize("flags", [{"resume": "latest"}, {"overwrite": True}], ids=str)
def test_a_torso_under_the_name_of_a_checkpoint_is_set_aside_and_never_filled_up(args, colour_set, flags):
    torso = colour_set / "run" / "checkpoint-2"
    assert train(args("other", max_steps=2, seed=3)) == 0
    shutil.copytree(colour_set / "other" / "checkpoint-2", torso)
    (torso / "trainer_state.json").unlink()
    assert train(args("run", max_steps=2, seed=9, **flags)) == 0
    assert train(args("clean", max_steps=2, seed=9)) == 0
    assert same_weights(torso, colour_set / "clean" / "checkpoint-2")
    (aside,) = (colour_set / "run").glob("abandoned-checkpoint-2-*")
    assert same_weights(aside, colour_set / "other" / "checkpoint-2")


def test_max_steps_below_the_checkpoint_is_one_sentence(args, colour_set, capsys):
    assert train(args("run")) == 0
    argv = ["--resume", str(colour_set / "run" / "checkpoint-4"), "--max-steps", "2", "--allow-changed-args"]
    assert train(argv) == 1
    assert "beyond --max-steps 2" in capsys.readouterr().err


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
