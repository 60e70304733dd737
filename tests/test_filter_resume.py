"""filter_hard_negatives_vqa.py stopped and started again: nothing is lost, nothing asked twice, changes are noticed."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import filter_hard_negatives_vqa as script
from contrastors.reviews import Journal
from tests.conftest import write_rows
from tests.filtering import (
    check_sums,
    command,
    file_bytes,
    many_rows,
    mixed,
    results,
    results_so_far,
    rows_of,
    run,
    start,
)
from tests.judge_server import JudgeServer, Played, Request, chat


def stop_after(num_calls: int, number: signal.Signals, source: Path, server: JudgeServer, **flags: Any) -> int:
    """Starts the script, sends the signal when the server has got so many calls, and returns the exit code."""
    process = start(*command(source, server, **flags))
    until = server.num_calls + num_calls
    while server.num_calls < until and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(number)
    _, message = process.communicate(timeout=300)
    assert "Traceback" not in message, message
    return process.returncode


def slowly(reply: Callable[[Request], str]) -> Callable[[Request], Played]:
    return lambda request: Played(chat(reply(request)).body, delay_s=0.03)


def test_stopped_runs_go_on_and_end_byte_equal(colour_set: Path):
    source = many_rows(colour_set)
    with JudgeServer(mixed) as server:
        assert run(source, server, colour_set / "calm.jsonl") == 0
        least = server.num_calls
    dice = random.Random(5)
    with JudgeServer(slowly(mixed)) as server:
        for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)):
            moment = dice.randrange(20, 40)
            assert stop_after(moment, number, source, server, concurrency=4, resume=True) == code
            journal = (colour_set / "out.reviews.jsonl").read_bytes()
            assert len([line for line in journal.split(b"\n") if line]) >= 5
            assert results_so_far(colour_set)["completed"] is False and not (colour_set / "out.jsonl").exists()
        assert run(source, server, concurrency=4, resume=True) == 0
        # A stop loses what is in flight: at most one answered and one open request for each of 4 rows.
        assert least <= server.num_calls <= least + 3 * 4 * 2
    assert file_bytes(colour_set) == file_bytes(colour_set, "calm")
    check_sums(results(colour_set)[2])


def test_every_verdict_is_on_disk_before_the_next_question(colour_set: Path):
    source, found = many_rows(colour_set, 6), []

    def reply(request: Request) -> str:
        found.append((colour_set / "out.reviews.jsonl").read_bytes().count(b"\n") == request.number)
        return "CANNOT_ANSWER"

    with JudgeServer(reply) as server:
        assert run(source, server, concurrency=1) == 0
    assert len(found) == 12 and all(found)


def test_journal_with_a_torn_line_stays_readable_after_the_next_line(tmp_path: Path):
    lines = [{"row_index": n, "row_key": "k", "position": 0} for n in range(3)]
    journal = Journal(tmp_path / "r.jsonl", resume=False)
    journal.append(lines[0])
    journal.close()
    with open(tmp_path / "r.jsonl", "ab") as file:
        file.write(json.dumps(lines[1]).encode())  # whole, but for its line end
    journal = Journal(tmp_path / "r.jsonl", resume=True)
    assert journal.has_torn_line and journal.reviews(1) == {}
    journal.append(lines[2])
    journal.close()
    journal = Journal(tmp_path / "r.jsonl", resume=True)
    assert [journal.reviews(n) for n in range(3)] == [{0: lines[0]}, {}, {0: lines[2]}]
    journal.close()


def test_torn_last_line_is_dropped_and_redone(colour_set: Path, capsys: pytest.CaptureFixture):
    source = many_rows(colour_set, 8)
    with JudgeServer(mixed) as server:
        assert run(source, server) == 0
        whole, calls = file_bytes(colour_set), server.num_calls
        (colour_set / "out.reviews.jsonl").write_bytes(whole[1][:-150])
        summary = results_so_far(colour_set) | {"completed": False}
        (colour_set / "out.summary.json").write_text(json.dumps(summary))
        assert run(source, server, resume=True) == 0
        assert "torn" in capsys.readouterr().out and 1 <= server.num_calls - calls <= 2
    assert file_bytes(colour_set) == whole


def test_broken_line_in_the_middle_of_the_reviews_is_named(colour_set: Path, capsys: pytest.CaptureFixture):
    source = many_rows(colour_set, 4)
    with JudgeServer(mixed) as server:
        assert run(source, server) == 0
        lines = (colour_set / "out.reviews.jsonl").read_bytes().split(b"\n")
        (colour_set / "out.reviews.jsonl").write_bytes(b"\n".join([lines[0], lines[1][:30], *lines[2:]]))
        assert run(source, server, resume=True) == 1
    assert "out.reviews.jsonl, line 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ({"model": "other"}, "--model was gpt-4.1-mini and is other"),
        ({"judge_model": "other"}, "--judge-model"),
        ({"candidate_k": 5}, "--candidate-k"),
        ({"num_hard_negatives": 1}, "--num-hard-negatives"),
        ({"check_positive": True}, "--check-positive"),
        ({"max_image_side": 32}, "--max-image-side"),
        ({"prompt_file": "prompts.json"}, "--prompt-file"),
    ],
)
def test_changed_setting_is_noticed(
    colour_set: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], part: str
):
    monkeypatch.chdir(colour_set)
    (colour_set / "prompts.json").write_text(json.dumps({"answer": "Query: {query}"}))
    source = many_rows(colour_set, 3)
    with JudgeServer(mixed) as server:
        assert run(source, server) == 0
        calls = server.num_calls
        assert run(source, server, resume=True, **flags) == 1
        assert part in capsys.readouterr().err and server.num_calls == calls


@pytest.mark.parametrize("change", ["order", "query", "candidates", "fewer", "positive"])
def test_changed_input_is_noticed(colour_set: Path, capsys: pytest.CaptureFixture, change: str):
    source = many_rows(colour_set, 4)
    rows = rows_of(source)
    with JudgeServer(mixed) as server:
        assert run(source, server) == 0
        calls = server.num_calls
        changed = {
            "order": rows[::-1],
            "query": [*rows[:3], rows[3] | {"query": "new"}],
            "candidates": [*rows[:3], rows[3] | {"retrieve_top20": rows[3]["retrieve_top20"][::-1]}],
            "fewer": rows[:3],
            "positive": [*rows, {"query": "query 2", "chunk_path": "c09.png", "retrieve_top20": []}],
        }[change]
        write_rows(source, changed)
        assert run(source, server, resume=True) == 1
        assert "--resume: " in capsys.readouterr().err and server.num_calls == calls


def test_more_rows_are_only_asked_for_what_is_new(colour_set: Path):
    source = many_rows(colour_set, 12)
    with JudgeServer(mixed) as server:
        assert run(source, server, colour_set / "calm.jsonl") == 0
        calls = server.num_calls
        assert run(source, server, limit=5) == 0
        assert run(source, server, resume=True) == 0
        assert server.num_calls == 2 * calls
    assert file_bytes(colour_set) == file_bytes(colour_set, "calm")


def test_mended_file_is_looked_at_by_resume(colour_set: Path):
    source = many_rows(colour_set, 12)
    with JudgeServer(mixed) as server:
        assert run(source, server, colour_set / "calm.jsonl") == 0
        (colour_set / "c03.png").rename(colour_set / "away.png")
        assert run(source, server, max_bad_fraction=0.99) == 0
        assert file_bytes(colour_set) != file_bytes(colour_set, "calm")
        (colour_set / "away.png").rename(colour_set / "c03.png")
        assert run(source, server, resume=True) == 0
    assert file_bytes(colour_set) == file_bytes(colour_set, "calm")


@pytest.mark.parametrize("check_positive", [False, True])
def test_another_picture_under_an_old_name_is_asked_about_anew(colour_set: Path, check_positive: bool):
    source, flags = many_rows(colour_set, 12), {"check_positive": True} if check_positive else {}
    with JudgeServer(mixed) as server:
        assert run(source, server, limit=8, **flags) == 0
        Image.new("RGB", (40, 40), (9, 99, 199)).save(colour_set / "c05.png")
        first = server.num_calls
        assert run(source, server, resume=True, **flags) == 0
        resumed = server.num_calls - first
        assert run(source, server, colour_set / "calm.jsonl", **flags) == 0
        assert resumed < server.num_calls - first - resumed  # what did not change was not asked about again
    assert file_bytes(colour_set) == file_bytes(colour_set, "calm")


def test_a_picture_that_is_gone_keeps_its_review(colour_set: Path):
    source = many_rows(colour_set, 3)
    with JudgeServer(mixed) as server:
        assert run(source, server, limit=2) == 0
        before = rows_of(colour_set / "out.reviews.jsonl")
        gone = next(review for review in before if review["row_index"] == 0)
        (colour_set / gone["path"]).unlink()
        run(source, server, resume=True, max_bad_fraction=1)
    assert gone in rows_of(colour_set / "out.reviews.jsonl")


def test_positive_that_vanished_takes_its_row_along(colour_set: Path):
    source = many_rows(colour_set, 12)
    with JudgeServer(mixed) as server:
        assert run(source, server, limit=11) == 0
        calls = server.num_calls
        (colour_set / "c03.png").unlink()
        assert run(source, server, resume=True, max_bad_fraction=1) == 0
        assert server.num_calls > calls
    written, reviews, summary = results(colour_set)
    assert all(row["id"] != 3 for row in written) and all(r["row_index"] != 3 for r in reviews)
    check_sums(summary)


def test_reviews_without_their_summary_are_not_trusted(colour_set: Path, capsys: pytest.CaptureFixture):
    source = many_rows(colour_set, 2)
    with JudgeServer(mixed) as server:
        assert run(source, server) == 0
        (colour_set / "out.summary.json").unlink()
        assert run(source, server, resume=True) == 1
    assert "its summary" in capsys.readouterr().err


def test_a_run_killed_before_its_first_summary_simply_begins(colour_set: Path, monkeypatch: pytest.MonkeyPatch):
    def killed(run: Any) -> None:
        raise KeyboardInterrupt

    source = many_rows(colour_set, 2)
    with monkeypatch.context() as patched:
        patched.setattr(script, "check_keys", killed)
        with pytest.raises(KeyboardInterrupt):
            run(source, "http://127.0.0.1:9/v1", resume=True)
    left = colour_set / "out.reviews.jsonl"
    assert left.read_bytes() == b"" and not (colour_set / "out.summary.json").exists()
    with JudgeServer(mixed) as server:
        assert run(source, server, resume=True) == 0
        assert run(source, server, colour_set / "calm.jsonl") == 0
    assert file_bytes(colour_set) == file_bytes(colour_set, "calm")


def test_two_runs_never_write_one_file(
    colour_set: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("contrastors.reviews._LOCK_WAIT_S", 0.1)
    source = many_rows(colour_set, 2)
    journal = Journal(colour_set / "out.reviews.jsonl", resume=False)
    with JudgeServer(mixed) as server:
        assert run(source, server, overwrite=True) == 1
        assert "another run is writing it" in capsys.readouterr().err
        journal.close()
        assert run(source, server, overwrite=True) == 0
