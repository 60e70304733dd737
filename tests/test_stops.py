"""What ends a training from outside, at every place where it can: a signal, a killed worker, memory that runs out."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch

import train_contrastors
from contrastors import evaluation
from contrastors.batches import StepDataset
from tests.runs import metrics, same_weights, train


def signal_at_loading(monkeypatch, number: int) -> None:
    """Sends this process SIGTERM when items are loaded for the n-th time; an evaluation does so twice."""
    whole, count = evaluation.load_items, [0]

    def load_items(*options):
        count[0] += 1
        if count[0] == number:
            os.kill(os.getpid(), signal.SIGTERM)
        yield from whole(*options)

    monkeypatch.setattr(evaluation, "load_items", load_items)


@pytest.mark.parametrize("number", [3, 4])
def test_a_signal_in_an_evaluation_ends_it_saves_and_the_run_resumes_bit_identically(
    args, colour_set, monkeypatch, number
):
    """In the queries and in the documents of step 2."""
    with monkeypatch.context() as patch:
        signal_at_loading(patch, number)
        assert train(args("stopped")) == 128 + signal.SIGTERM
    (checkpoint,) = (colour_set / "stopped").glob("checkpoint-*")
    assert checkpoint.name == "checkpoint-2"
    assert not (colour_set / "stopped" / "eval_step2.json").exists()
    assert train(["--resume", str(checkpoint)]) == 0
    assert train(args("whole")) == 0
    assert metrics(colour_set / "stopped") == metrics(colour_set / "whole")
    assert same_weights(colour_set / "stopped" / "checkpoint-4", colour_set / "whole" / "checkpoint-4")


def test_a_run_that_was_stopped_in_its_last_evaluation_is_not_complete(args, colour_set, monkeypatch):
    run = colour_set / "run"
    with monkeypatch.context() as patch:
        signal_at_loading(patch, 5)
        assert train(args("run")) == 128 + signal.SIGTERM
    stopped = json.loads((run / "summary.json").read_text())
    assert stopped["step"] == 4 and not stopped["completed"] and not (run / "eval_step4.json").exists()
    assert train(["--resume", str(run / "checkpoint-4")]) == 0
    assert json.loads((run / "summary.json").read_text())["completed"] and (run / "eval_step4.json").exists()


def test_a_signal_before_the_first_step_says_how_to_begin_anew(args, colour_set, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        signal_at_loading(patch, 1)
        assert train(args("run")) == 128 + signal.SIGTERM
    assert not list((colour_set / "run").glob("checkpoint-*"))
    assert "the same command with --resume latest begins anew" in capsys.readouterr().out
    assert train(args("run", resume="latest")) == 0
    assert [row["step"] for row in metrics(colour_set / "run")] == [0, 1, 2, 2, 3, 4, 4]


def test_a_signal_in_eval_only_ends_it_with_its_code_and_without_numbers(args, colour_set, monkeypatch):
    signal_at_loading(monkeypatch, 2)
    assert train(args("measured", eval_only=True)) == 128 + signal.SIGTERM
    assert not list((colour_set / "measured").glob("eval_step*"))


def test_a_signal_while_documents_are_embedded_keeps_those_that_are_done(args, colour_set, monkeypatch, capsys):
    from contrastors import embeddings

    whole = embeddings.EmbeddingStore.append

    def append(self, keys, vectors):
        whole(self, keys, vectors)
        os.kill(os.getpid(), signal.SIGTERM)

    flags = {
        "mode": "query-side-tune",
        "grad_cache_chunk": None,
        "eval_batch_size": 5,
        "document_cache": colour_set / "kept",
    }
    with monkeypatch.context() as patch:
        patch.setattr(embeddings.EmbeddingStore, "append", append)
        assert train(args("run", **flags)) == 128 + signal.SIGTERM
    capsys.readouterr()
    assert train(args("run", **flags, overwrite=True)) == 0
    assert "documents: 7 of 12 embedded" in capsys.readouterr().out


def test_a_killed_loader_process_is_one_sentence_with_a_way_out(args, monkeypatch, capsys):
    whole, parent = StepDataset.__getitem__, os.getpid()

    def item(self, step):
        if step == 2 and os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does when memory is short
        return whole(self, step)

    monkeypatch.setattr(StepDataset, "__getitem__", item)
    assert train(args("run", num_workers=1)) == 1
    error = capsys.readouterr().err
    assert "a loader process was killed, most likely for memory or shared memory; use fewer --num-workers" in error
    assert "Traceback" not in error


def test_memory_that_runs_out_in_an_evaluation_is_one_sentence(args, monkeypatch, capsys):
    def evaluate(*options, **more):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(evaluation, "evaluate", evaluate)
    assert train(args("run")) == 1
    assert "rank 0 is out of memory at step 1; lower --grad-cache-chunk" in capsys.readouterr().err


def test_a_tracker_that_is_not_installed_is_told_before_any_work(args, colour_set, monkeypatch, capsys):
    monkeypatch.setattr(train_contrastors.importlib.util, "find_spec", lambda name: None)
    assert train(args("run", report_to="trackio")) == 1
    assert "--report-to trackio needs its package" in capsys.readouterr().err
    assert not (colour_set / "run").exists()
