from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from contrastors import runlog
from contrastors.runlog import RunLog, cut_metrics, draw_curves, progress, read_metrics

ROOT = Path(__file__).resolve().parent.parent
NAN = float("nan")


def log_steps(folder: Path, steps: range, name: str = "train/loss") -> Path:
    log = RunLog(folder, is_main=True)
    log.open()
    for step in steps:
        log.metrics(step, {name: 1 / (step + 1)})
    log.close()
    return folder / "metrics.jsonl"


# --- metrics.jsonl ---


def test_metrics_are_strict_json_whatever_the_numbers(tmp_path):
    log = RunLog(tmp_path, is_main=True)
    log.open()
    log.metrics(1, {"a": NAN, "b": np.float32(0.5), "c": torch.tensor(0.25), "d": float("inf"), "e": None, "f": 3})
    log.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line, parse_constant=pytest.fail)
    assert row == {"step": 1, "a": None, "b": 0.5, "c": 0.25, "d": None, "e": None, "f": 3}
    assert read_metrics(tmp_path / "metrics.jsonl") == [row]


def test_lines_are_on_disk_before_the_run_ends(tmp_path):
    log = RunLog(tmp_path, is_main=True)
    log.open()
    log.metrics(1, {"a": 1.0})
    log.say("step 1 é")
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "a": 1.0}]
    assert (tmp_path / "train.log").read_text(encoding="utf-8") == "step 1 é\n"
    log.close()


def test_torn_and_foreign_lines_are_left_out(tmp_path):
    file = log_steps(tmp_path, range(3))
    whole = file.read_bytes()
    file.write_bytes(b'null\n{"no": 1}\n{"step": "x"}\n\xff\n\0\0\n' + whole + b'{"step": 3, "train/lo')
    assert [row["step"] for row in read_metrics(file)] == [0, 1, 2]
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_a_resumed_run_writes_no_step_twice(tmp_path):
    file = log_steps(tmp_path, range(8))
    kept = file.read_bytes().split(b"\n")[:6]
    with open(file, "ab") as torn:
        torn.write(b'{"step": 8, "tr')
    cut_metrics(file, last_step=5)
    assert file.read_bytes() == b"\n".join(kept) + b"\n"
    log_steps(tmp_path, range(6, 10))
    assert [row["step"] for row in read_metrics(file)] == list(range(10))


def test_cutting_a_file_that_is_not_there_makes_none(tmp_path):
    cut_metrics(tmp_path / "metrics.jsonl", last_step=5)
    assert os.listdir(tmp_path) == []


# --- curves.png ---


def test_curves_show_every_metric_that_has_points(tmp_path):
    pytest.importorskip("matplotlib")
    file = log_steps(tmp_path, range(60))
    log_steps(tmp_path, range(0, 60, 20), "eval/mrr")
    pictures = {}
    for names in (["train/loss"], ["train/loss", "eval/mrr"], ["train/loss", "none"]):
        assert draw_curves(file, tmp_path / "curves.png", names) is True
        with Image.open(tmp_path / "curves.png") as picture:
            assert picture.format == "PNG"
            pictures[len(pictures)] = np.asarray(picture.convert("L"))
    assert pictures[1].shape[1] == 2 * pictures[0].shape[1] == 2 * pictures[2].shape[1]
    assert all((picture < 200).mean() > 0.005 for picture in pictures.values())
    assert sorted(os.listdir(tmp_path)) == ["curves.png", "metrics.jsonl", "train.log"]


def test_a_metric_without_a_point_has_no_panel(tmp_path):
    pytest.importorskip("matplotlib")
    log = RunLog(tmp_path, is_main=True)
    log.open()
    log.metrics(1, {"train/loss": 1.0, "eval/mrr": NAN})
    log.close()
    sizes = []
    for names in (["train/loss"], ["train/loss", "eval/mrr"], ["eval/mrr"]):
        assert draw_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png", names)
        with Image.open(tmp_path / "curves.png") as picture:
            sizes.append((picture.size, len(picture.convert("L").getcolors())))
    assert sizes[0] == sizes[1] and sizes[2][1] == 1


def test_without_matplotlib_there_are_no_curves_and_no_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # makes the import fail
    assert draw_curves(tmp_path / "metrics.jsonl", tmp_path / "curves.png", ["train/loss"]) is False
    assert os.listdir(tmp_path) == []


# --- records of a run ---


def test_arguments_and_environment_are_strict_json(tmp_path):
    log = RunLog(tmp_path, is_main=True)
    log.open()
    log.write_records({"lr": 2e-5, "query": "é\u2028", "limit": NAN}, device="cpu")
    log.close()
    args, env = (json.loads((tmp_path / f"{n}.json").read_bytes(), parse_constant=pytest.fail) for n in ("args", "env"))
    assert args == {"lr": 2e-5, "query": "é\u2028", "limit": None}
    assert env["device"] == "cpu" and env["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert env["commit"] is None or len(env["commit"]) == 40


def test_only_the_main_rank_prints_and_writes(tmp_path, capsys):
    for is_main in (False, True):
        log = RunLog(tmp_path / str(is_main), is_main)
        log.open()
        log.say("hello")
        log.metrics(1, {"a": 1.0})
        log.write_records({}, "cpu")
        log.start_tracker("none", "run", {}, "id")
        log.close()
    assert capsys.readouterr().out == "hello\n"
    assert os.listdir(tmp_path) == ["True"]
    assert sorted(os.listdir(tmp_path / "True")) == ["args.json", "env.json", "metrics.jsonl", "train.log"]


def test_train_log_goes_on_after_a_resume(tmp_path):
    for text in ("first", "second"):
        log = RunLog(tmp_path, is_main=True)
        log.open()
        log.say(text)
        log.close()
    assert (tmp_path / "train.log").read_text() == "first\nsecond\n"


def test_no_bar_where_there_is_no_terminal_but_a_line_every_half_minute(capsys, monkeypatch):
    with progress(3, "checking", enabled=True) as bar:
        bar.update(3)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(runlog, "LOG_LINE_S", 0.0)
    for enabled, in_logs in ((True, True), (True, False), (False, True)):
        with progress(2000, "checking", enabled, in_logs) as bar:
            bar.update(1500)
            bar.update()
        said = ("", "checking: 1,500 of 2,000\nchecking: 1,501 of 2,000\n") if enabled and in_logs else ("", "")
        assert capsys.readouterr() == said


# --- trackers ---


def test_tensorboard_mirrors_the_metrics(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = RunLog(tmp_path, is_main=True)
    log.open()
    log.start_tracker("tensorboard", "run", {"lr": 1e-3}, "id")
    for step in range(3):
        log.metrics(step, {"train/loss": 0.5 * step, "eval/mrr": NAN, "eval/none": None})
    log.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert sorted(events.Tags()["scalars"]) == ["eval/mrr", "train/loss"]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3


@pytest.mark.parametrize("name, module", [("wandb", "wandb"), ("trackio", "trackio"), ("tensorboard", "tensorboard")])
def test_a_tracker_that_is_not_installed_is_named_with_its_extra(tmp_path, monkeypatch, name, module):
    for loaded in [m for m in sys.modules if m.split(".")[0] == module or m.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, module, None)
    log = RunLog(tmp_path, is_main=True)
    log.open()
    with pytest.raises(ValueError, match=rf"--report-to {name} needs its package: pip install '.\[tracking\]'"):
        log.start_tracker(name, "run", {}, "id")
    log.close()


RUN = """
import sys
from contrastors import runlog
from contrastors.runlog import RunLog
log = RunLog(sys.argv[2], is_main=True)
log.open()
try:
    log.start_tracker(sys.argv[1], "run", {"lr": 0.001}, "abc123")
except ValueError as error:
    sys.exit(f"refused: {error}")
for step in range(3):
    log.metrics(step, {"train/loss": 1.0 / (step + 1)})
log.close()
"""


def run_tracker(name: str, folder: Path, **env: str) -> subprocess.CompletedProcess:
    """Runs three steps in a process of their own: wandb and trackio start threads and services."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "TRACKIO", "NETRC"))}
    quiet = {"HOME": str(folder), "WANDB_ERROR_REPORTING": "false", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", RUN, name, str(folder / "run")]
    return subprocess.run(command, env=clean | quiet | env, capture_output=True, text=True, timeout=300, cwd=folder)


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb (extra `tracking`) is not installed")
def test_wandb_offline_keeps_the_run_in_the_run_folder(tmp_path):
    done = run_tracker("wandb", tmp_path, WANDB_MODE="offline")
    assert done.returncode == 0, done.stderr
    (record,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-abc123.wandb")
    assert b"train/loss" in record.read_bytes()
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 3


@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb (extra `tracking`) is not installed")
def test_wandb_without_a_key_is_refused_in_one_sentence(tmp_path):
    done = run_tracker("wandb", tmp_path)
    assert done.returncode == 1 and "refused: --report-to wandb: " in done.stderr
    assert "WANDB_MODE=offline" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.skipif(find_spec("trackio") is None, reason="trackio (extra `tracking`) is not installed")
def test_trackio_keeps_the_run_in_its_local_database(tmp_path):
    done = run_tracker("trackio", tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"))
    assert done.returncode == 0, done.stderr
    held = b"".join(p.read_bytes() for p in (tmp_path / "trackio").glob("contrastors.db*"))
    assert b"train/loss" in held and b"run-abc123" in held  # two runs of one name stay two
