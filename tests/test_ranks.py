"""train_contrastors.py on several ranks: equal paths, agreed stops, restarts, and ends without a hang."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.torch import load_file, save_file

from tests.conftest import ROOT, make_colour_set, write_rows
from tests.runs import (
    arguments,
    finish,
    largest_difference,
    losses,
    metrics,
    run_on_ranks,
    same_weights,
    start,
    train,
    warm_torchrun,
)

pytestmark = pytest.mark.dist

PATH = {
    "lora_dropout": 0.0, "grad_reduction": "mean", "max_steps": 20, "num_hard_negatives": 2, "lora_vit": True,
    "lr": 1e-3, "eval_steps": 20, "save_steps": 0, "sample_negatives": True, "max_grad_norm": 0.5,
}  # fmt: skip


# A run that three tests disturb in their ways; one xdist worker for all three, or each would make it anew.
WHOLE = {"max_steps": 60, "eval_steps": 30}
shares_whole = pytest.mark.xdist_group("whole")


@pytest.fixture(scope="module")
def whole(tiny_model, tmp_path_factory) -> Path:
    folder = make_colour_set(tmp_path_factory.mktemp("whole"))
    code, text = run_on_ranks(arguments(tiny_model, folder, folder / "run", **WHOLE, save_steps=0), 2)
    assert code == 0, text[-3000:]
    return folder / "run"


def wait_for_step(folder: Path, step: int, process) -> None:
    """Waits until metrics.jsonl has come to a step."""
    log = folder / "metrics.jsonl"
    while not log.exists() or not any(f'"step":{step},' in line.replace(" ", "") for line in log.open()):
        assert process.poll() is None, finish(process)[1][-3000:]
        time.sleep(0.02)


def workers_of(process) -> list[psutil.Process]:
    """The ranks under a torchrun agent, by rank."""
    children = [p for p in psutil.Process(process.pid).children() if "train_contrastors.py" in " ".join(p.cmdline())]
    return sorted(children, key=lambda p: int(p.environ()["RANK"]))


def test_one_rank_of_eight_walks_the_path_of_two_of_four_and_four_of_two(args, colour_set):
    """--grad-reduction mean, dropout 0, clipping on: 20 steps, by value."""
    assert train(args("one", batch_size=8, **PATH)) == 0
    for num_ranks in (2, 4):
        code, text = run_on_ranks(args(f"ranks{num_ranks}", batch_size=8 // num_ranks, **PATH), num_ranks)
        assert code == 0, text[-3000:]
        found, wanted = losses(colour_set / f"ranks{num_ranks}"), losses(colour_set / "one")
        assert np.abs(np.subtract(found, wanted)).max() < 1e-4
        last = colour_set / f"ranks{num_ranks}" / "checkpoint-20"
        assert largest_difference(last, colour_set / "one" / "checkpoint-20") < 1e-4
        evaluations = [json.loads((colour_set / n / "eval_step20.json").read_text()) for n in ("one", last.parent.name)]
        assert evaluations[0]["recall@1"] == pytest.approx(evaluations[1]["recall@1"])
        assert evaluations[0]["loss"] == pytest.approx(evaluations[1]["loss"], abs=1e-4)


def test_another_number_of_ranks_resumes_with_the_same_rows_and_global_batch(args, colour_set):
    assert run_on_ranks(args("run", batch_size=2, **(PATH | {"save_steps": 8})), 2)[0] == 0
    whole = losses(colour_set / "run")
    shutil.rmtree(colour_set / "run" / "checkpoint-16")
    shutil.rmtree(colour_set / "run" / "checkpoint-20")
    assert train(["--resume", str(colour_set / "run" / "checkpoint-8")]) == 0
    assert np.abs(np.subtract(losses(colour_set / "run"), whole)).max() < 1e-4
    assert "2 -> 1 ranks: --batch-size 4" in (colour_set / "run" / "train.log").read_text()


@shares_whole
def test_sigterm_to_one_rank_stops_all_after_the_step_and_the_run_resumes_bit_identically(args, colour_set, whole):
    process = start(args("stopped", **WHOLE, save_steps=0), 2)
    wait_for_step(colour_set / "stopped", 3, process)
    workers_of(process)[1].send_signal(signal.SIGTERM)
    code, text = finish(process, 300)
    assert code == 1 and "exitcode  : 143" in text, text[-3000:]
    (checkpoint,) = (colour_set / "stopped").glob("checkpoint-*")
    code, text = run_on_ranks(["--resume", str(checkpoint)], 2)
    assert code == 0, text[-3000:]
    assert metrics(whole) == metrics(colour_set / "stopped")
    assert same_weights(whole / "checkpoint-60", colour_set / "stopped" / "checkpoint-60")


def test_sigterm_to_the_launcher_saves_with_loader_workers_too(args, colour_set):
    """torchrun signals the whole process group of a rank, and loader workers must not die of it."""
    process = start(args("run", max_steps=4000, eval_steps=0, save_steps=0, num_workers=1), 2)
    wait_for_step(colour_set / "run", 3, process)
    process.send_signal(signal.SIGTERM)
    _, text = finish(process, 300)
    assert list((colour_set / "run").glob("checkpoint-*")), text[-3000:]
    assert 'train_contrastors.py", line' not in text, text[-3000:]


def test_a_killed_rank_ends_all_within_a_minute(args, colour_set):
    process = start(args("run", max_steps=2000, eval_steps=0, save_steps=2), 2)
    wait_for_step(colour_set / "run", 3, process)
    ranks = workers_of(process)
    ranks[1].kill()
    code, text = finish(process, 60)
    assert code == 1 and 'train_contrastors.py", line' not in text, text  # torchrun shows a traceback of its own
    assert text.count("error: ") <= 1 and "rank 1" not in text.split("Failures:")[0], text
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in ranks)


@shares_whole
def test_restarts_after_a_dead_worker_end_with_the_weights_of_an_undisturbed_run(args, colour_set, whole):
    process = start(args("restarted", **WHOLE, save_steps=3, resume="latest"), 2, ["--standalone", "--max-restarts=3"])
    wait_for_step(colour_set / "restarted", 7, process)
    workers_of(process)[1].kill()
    code, text = finish(process)
    assert code == 0, text[-3000:]
    assert same_weights(whole / "checkpoint-60", colour_set / "restarted" / "checkpoint-60")
    assert metrics(whole) == metrics(colour_set / "restarted")


@shares_whole
def test_two_agents_equal_one_agent_with_two_processes(args, colour_set, whole):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rendezvous = ["--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=test"]
    flags = WHOLE | {"save_steps": 0}
    agents = [start(args("two_agents", **flags), 1, [*rendezvous, "--local-addr=127.0.0.1"]) for _ in range(2)]
    for agent in agents:
        code, text = finish(agent)
        assert code == 0, text[-3000:]
    assert metrics(whole) == metrics(colour_set / "two_agents")
    assert same_weights(whole / "checkpoint-60", colour_set / "two_agents" / "checkpoint-60")


# Rank 1 is started otherwise than rank 0: what several machines with a command line each may come to.
OTHERWISE = """
import os, sys
import train_contrastors
argv, more = sys.argv[1:], os.environ["OTHERWISE"].split()
sys.exit(train_contrastors.main(argv + more * (os.environ["RANK"] == "1")))
"""


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ("--lr 0.5", "--lr is 0.5 on rank 1 and 0.01 on rank 0"),
        ("--train-jsonl {}/other_pages.jsonl", "the list of images is "),
        ("--train-jsonl {}/other_order.jsonl", "--train-jsonl is "),
        ("--model {}/other_model", "--model is "),
    ],
)
def test_ranks_that_were_started_otherwise_are_told_apart(args, colour_set, tiny_model, monkeypatch, more, sentence):
    rows = [json.loads(line) for line in (colour_set / "rows.jsonl").read_text().splitlines()]
    write_rows(colour_set / "other_pages.jsonl", rows[:8])
    for first, last in zip(rows[:6], rows[:5:-1], strict=True):
        first["query"], last["query"] = last["query"], first["query"]
    write_rows(colour_set / "other_order.jsonl", rows)
    shutil.copytree(tiny_model, colour_set / "other_model")
    file = colour_set / "other_model" / "model.safetensors"
    held = load_file(file)
    name = next(name for name in held if name.endswith("mlp.up_proj.weight"))
    save_file(held | {name: held[name] + 1e-3}, file, metadata={"format": "pt"})
    (colour_set / "otherwise.py").write_text(OTHERWISE)
    monkeypatch.setenv("OTHERWISE", more.format(colour_set))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    code, text = warm_torchrun(2, colour_set / "otherwise.py", *args("run", eval_steps=0))
    assert code == 1 and f"ranks must do the same, but {sentence}" in text, text[-3000:]
    assert text.count("error: ") == 1 and not (colour_set / "run").exists()


OTHER_DEVICE = """
import os, torch
from contrastors import distributed
distributed.pick_device = lambda name: torch.device("cpu" if os.environ["RANK"] == "0" else "mps")
from train_contrastors import main
raise SystemExit(main())
"""


def test_ranks_on_devices_of_two_kinds_end_at_once(args, colour_set, monkeypatch):
    """As where --device auto finds a broken driver on one machine: gloo there would wait for nccl elsewhere."""
    (colour_set / "other_device.py").write_text(OTHER_DEVICE)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    code, text = warm_torchrun(2, colour_set / "other_device.py", *args("run"))
    assert code == 1 and "rank 0 computes on cpu and rank 1 on mps; all must compute on one kind" in text, text[-3000:]


def test_thirteen_rows_a_damaged_image_and_a_rank_without_negatives_train_on(args, colour_set):
    """O08, O09: 13 rows, batch 4 on 2 ranks: one step an epoch, the rest is dropped."""
    rows = [json.loads(line) for line in (colour_set / "rows.jsonl").read_text().splitlines()]
    rows.append({"query": "damaged", "chunk_path": "damaged.png"})
    for row in rows[::2]:
        row["neg_chunk_paths"] = []
    (colour_set / "damaged.png").write_bytes(b"\x89PNG\r\n\x1a\nno")
    write_rows(colour_set / "thirteen.jsonl", rows)
    flags = {"train_jsonl": colour_set / "thirteen.jsonl", "max_bad_fraction": 0.1, "num_hard_negatives": 2}
    code, text = run_on_ranks(args("run", **flags, max_steps=3, lora_vit=True, eval_steps=0), 2)
    assert code == 0, text[-3000:]
    assert "skipped 1 of 13 rows" in text
    code, text = run_on_ranks(args("refused", **(flags | {"max_bad_fraction": 0.01}), eval_steps=0), 2)
    assert code == 1 and "damaged.png" in text and text.count("error: ") == 1
    assert not os.path.exists(colour_set / "refused" / "checkpoint-2")
