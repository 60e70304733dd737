"""The run folder by itself: which checkpoints are found, which go, and what a new start clears away."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

from contrastors.run_folder import (
    clear_results,
    delete_old,
    find_results,
    go_back_to,
    list_checkpoints,
    remove_leftovers,
)


def make_checkpoint(run: Path, step: int, run_id: str | None = "own") -> Path:
    folder = run / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    if run_id is not None:
        (folder / "trainer_state.json").write_text(json.dumps({"run_id": run_id}))
    return folder


def steps(run: Path) -> list[int]:
    return [int(path.name.split("-")[1]) for path in list_checkpoints(run)]


def test_checkpoints_are_listed_by_number_and_nothing_else_is_one(tmp_path):
    for step in (100, 20, 3):
        make_checkpoint(tmp_path, step)
    for name in ("checkpoint-", "checkpoint-4x", "abandoned-checkpoint-7-ab", ".checkpoint-9.tmp-ab"):
        (tmp_path / name).mkdir()
    assert steps(tmp_path) == [3, 20, 100]


def test_the_oldest_of_this_run_go_and_the_best_broken_and_foreign_ones_stay(tmp_path):
    for step in (10, 20, 30, 40, 50):
        make_checkpoint(tmp_path, step)
    make_checkpoint(tmp_path, 5, run_id="another")
    make_checkpoint(tmp_path, 6, run_id=None)
    make_checkpoint(tmp_path, 7, run_id=None).joinpath("trainer_state.json").write_text("[1]")
    deleted = delete_old(tmp_path, keep=2, best_step=20, run_id="own")
    assert [path.name for path in deleted] == ["checkpoint-10", "checkpoint-30"]
    assert steps(tmp_path) == [5, 6, 7, 20, 40, 50]
    assert delete_old(tmp_path, keep=0, best_step=None, run_id="own") == []  # 0 keeps all
    assert not list(tmp_path.glob(".*"))


def test_a_file_that_a_reader_holds_does_not_end_a_run(tmp_path, monkeypatch):
    """On NFS a deleted file that is open stays as .nfsN, and its folder cannot go."""
    for step in (1, 2):
        make_checkpoint(tmp_path, step)

    def rmdir(path, **_):
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", rmdir)
        delete_old(tmp_path, keep=1, best_step=None, run_id="own")
    assert steps(tmp_path) == [2] and len(list(tmp_path.glob(".checkpoint-1.tmp-*"))) == 1
    remove_leftovers(tmp_path)
    assert not list(tmp_path.glob(".*"))


def test_what_stands_where_the_run_will_save_is_set_aside_and_keeps_its_files(tmp_path):
    state = {"step": 20, "evaluated_step": None, "best_step": None, "best_value": None}
    for step in (10, 20, 30):
        make_checkpoint(tmp_path, step).joinpath("file").write_text(str(step))
    make_checkpoint(tmp_path, 40, run_id=None)
    go_back_to(tmp_path, state, "mrr", tmp_path / "checkpoint-20")
    assert steps(tmp_path) == [10, 20]
    (other,) = tmp_path.glob("abandoned-checkpoint-30-*")
    (note,) = go_back_to(tmp_path, state, "mrr", other)  # of another future, at the step of a checkpoint of this one
    assert steps(tmp_path) == [10] and note.startswith("checkpoint-20 is no part of this run")
    assert len(go_back_to(tmp_path, state | {"step": 0}, "mrr", None)) == 1 and steps(tmp_path) == []
    assert sorted(path.read_text() for path in tmp_path.glob("abandoned-*/file")) == ["10", "20", "30"]


def test_leftovers_of_a_killed_save_go_and_hidden_files_of_others_stay(tmp_path):
    (tmp_path / ".checkpoint-4.tmp-12345678" / "deep").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    remove_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".git"]


def test_a_new_start_finds_and_clears_its_own_results_alone(tmp_path):
    make_checkpoint(tmp_path, 4)
    make_checkpoint(tmp_path, 5, run_id=None)  # no checkpoint of ours: somebody's files
    for name in ("metrics.jsonl", "eval_step4.json", "eval_step4.jsonl", "summary.json", "notes.txt"):
        (tmp_path / name).write_text("")
    (tmp_path / "tensorboard").mkdir()
    held = [path.name for path in find_results(tmp_path, eval_only=False)]
    assert held == ["checkpoint-4", "checkpoint-5", "metrics.jsonl", "eval_step4.json"]
    assert [path.name for path in find_results(tmp_path, eval_only=True)] == ["eval_step4.json"]
    clear_results(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-5", "notes.txt"]
