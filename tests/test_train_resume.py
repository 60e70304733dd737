"""Going on from a checkpoint of train_contrastors.py, in one process: what is the same, refused, told or set aside."""

from __future__ import annotations

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file

from contrastors.biqwen3 import BiQwen3
from contrastors.checkpoint import adapter_tensors, load_adapter, save_checkpoint
from contrastors.demo import make_model
from tests.conftest import write_rows
from tests.gradients import build_model
from tests.runs import losses, metrics, same_weights, train, weights


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
