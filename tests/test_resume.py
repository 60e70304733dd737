"""Flags on resume: what is taken from the checkpoint, what may differ, what is refused."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from contrastors.checkpoint import absolute_args
from contrastors.chunking import Chunking
from contrastors.cli import typed_flags
from contrastors.resume import OF_THIS_CALL, locate_checkpoint, recorded_chunking, restore_state, take_flags
from contrastors.runlog import RunLog
from train_contrastors import build_parser

CHECKPOINT = Path("/somewhere/run/checkpoint-4")


def parse(*words: object) -> tuple[argparse.Namespace, set[str]]:
    argv = list(map(str, words))
    return build_parser().parse_args(argv), typed_flags(build_parser(), argv)


def state_of(*words: object, world_size: int = 2) -> dict:
    """What a run with these flags on two ranks leaves in trainer_state.json."""
    args, _ = parse(*words)
    kept = {name: value for name, value in vars(args).items() if name not in OF_THIS_CALL}
    chunking = {"documents": 2, "num_retained": 3}
    sizes = {"world_size": world_size, "global_batch": args.batch_size * world_size}
    return {"step": 4, "run_id": "a", "args": absolute_args(kept), "chunking": chunking} | sizes


def resume(state: dict, *words: object, world_size: int = 2) -> tuple[argparse.Namespace, list[str]]:
    args, typed = parse("--resume", CHECKPOINT, *words)
    return args, take_flags(args, typed, CHECKPOINT, state, world_size)


def test_untyped_flags_and_the_folder_are_those_of_the_checkpoint():
    args, notes = resume(state_of("--lr", 3e-4, "--seed", 7, "--batch-size", 8), "--seed", 7, "--save-steps", 5)
    assert (args.lr, args.seed, args.batch_size, args.save_steps) == (3e-4, 7, 8, 5)
    assert args.output_dir == str(CHECKPOINT.parent) and notes == []


def test_an_untyped_batch_follows_the_number_of_ranks_so_that_the_global_batch_stays():
    args, notes = resume(state_of("--batch-size", 8), world_size=4)
    assert args.batch_size == 4
    assert notes[0].startswith("2 -> 4 ranks: --batch-size 4") and "2 times as large" in notes[1]
    args, notes = resume(state_of("--batch-size", 8, "--grad-reduction", "mean"), world_size=1)
    assert args.batch_size == 16 and len(notes) == 1


def test_ranks_that_cannot_share_the_global_batch_are_refused():
    with pytest.raises(ValueError, match="global batch of 16, which 3 ranks cannot share"):
        resume(state_of("--batch-size", 8), world_size=3)


def test_another_global_batch_needs_the_flag_that_allows_it():
    with pytest.raises(ValueError, match=r"--batch-size 4 x 2 ranks \(checkpoint: global batch 16\)"):
        resume(state_of("--batch-size", 8), "--batch-size", 4)
    args, notes = resume(state_of("--batch-size", 8), "--batch-size", 4, "--allow-changed-args")
    assert args.batch_size == 4 and notes == [
        "changed on resume: --batch-size 4 x 2 ranks (checkpoint: global batch 16)"
    ]
    assert resume(state_of("--batch-size", 8), "--batch-size", 4, world_size=4)[0].batch_size == 4  # the same 16


def test_a_flag_that_alters_training_is_named_and_one_of_the_adapter_never_changes():
    with pytest.raises(ValueError, match=r"--lr 0.1 \(checkpoint: 2e-05\); add --allow-changed-args"):
        resume(state_of(), "--lr", 0.1)
    for words in (["--lora-r", 4], ["--mode", "query-side-tune"], ["--temperature", 0.5]):
        with pytest.raises(ValueError, match="adapter and temperature of a checkpoint are in its files"):
            resume(state_of(), *words, "--allow-changed-args")


def test_a_run_goes_on_in_its_own_folder():
    with pytest.raises(ValueError, match="--resume continues in /somewhere/run; leave --output-dir out"):
        resume(state_of(), "--output-dir", "/elsewhere")
    assert resume(state_of(), "--output-dir", "/somewhere/run/../run")[0].output_dir == "/somewhere/run/../run"


def test_the_recorded_chunking_holds_as_long_as_the_flags_that_it_was_chosen_for():
    state = state_of("--batch-size", 8)
    args, _ = resume(state)
    assert recorded_chunking(args, state) == Chunking(documents=2, num_retained=3)
    for words in (
        ["--retain-graphs", 1], ["--grad-cache-chunk", 8], ["--memory-budget-gb", 1], ["--gradient-checkpointing"],
        ["--max-num-visual-tokens", 512], ["--num-hard-negatives", 2], ["--dtype", "fp32"],
    ):  # fmt: skip
        args, _ = resume(state, *words, "--allow-changed-args")
        assert recorded_chunking(args, state) is None, words
    assert recorded_chunking(args, {}) is None
    state = state_of("--mode", "query-side-tune", "--batch-size", 8)
    assert recorded_chunking(resume(state)[0], state) is not None
    assert recorded_chunking(resume(state, world_size=4)[0], state) is None  # `direct` is all queries of a rank


def test_a_best_checkpoint_that_is_gone_is_forgotten(tmp_path):
    state = state_of() | {"best_step": 2, "best_value": 0.5}
    args, _ = resume(state)
    args.output_dir = str(tmp_path)
    (tmp_path / "checkpoint-2").mkdir()
    log = RunLog(tmp_path, is_main=False)
    assert restore_state(args, state, log).best_value == 0.5
    (tmp_path / "checkpoint-2").rmdir()
    found = restore_state(args, state, log)
    assert (found.step, found.best_step, found.best_value) == (4, None, None)


def test_what_is_no_checkpoint_is_named(tmp_path):
    args, _ = parse("--resume", tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no such folder"):
        locate_checkpoint(args)
    args, _ = parse("--resume", "latest", "--output-dir", tmp_path, "--eval-only")
    with pytest.raises(ValueError, match="holds no whole checkpoint to evaluate"):
        locate_checkpoint(args)
    assert locate_checkpoint(parse("--resume", "latest", "--output-dir", tmp_path)[0]) == (None, {}, [])
    (tmp_path / "run" / "checkpoint-3").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "run" / "checkpoint-3")
    with pytest.raises(ValueError, match=f"{tmp_path}/run/checkpoint-3: adapter_model.safetensors is missing"):
        locate_checkpoint(parse("--resume", tmp_path / "link")[0])  # goes on where the checkpoint is
    (tmp_path / "checkpoint-3").mkdir()
    with pytest.raises(ValueError, match="is a run folder; give a checkpoint in it"):
        locate_checkpoint(parse("--resume", tmp_path)[0])
