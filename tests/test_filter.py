"""filter_hard_negatives_vqa.py against a local server: what is kept, what is asked, and what a stop leaves behind."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import unicodedata
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import filter_hard_negatives_vqa as script
from contrastors.reviews import Journal
from tests.conftest import COLOURS, ROOT, write_rows
from tests.judge_server import JudgeServer, Played, Request, chat, error

NAMES = list(COLOURS)


def candidates(*numbers: int) -> list[dict[str, Any]]:
    return [{"rank": r, "path": f"c{n:02d}.png", "score": round(1 - r / 10, 3)} for r, n in enumerate(numbers, start=1)]


def colour(request: Request) -> str:
    """Names the page by its pixels."""
    pixel = request.image.getpixel((1, 1))
    return next(name for name, rgb in COLOURS.items() if rgb == pixel)


def truthful(request: Request) -> str:
    """Says that a page answers a query that names its colour; "red pink" is answered by two pages."""
    if not request.is_verdict:
        return colour(request)
    return '{"verdict": "CORRECT"}' if request.answer in request.query else '{"verdict": "WRONG"}'


def mixed(request: Request) -> str:
    """Says something that depends on query and page alone."""
    number = int(hashlib.md5(request.query.encode() + request.image_bytes).hexdigest(), 16) % 4
    if not request.is_verdict:
        return "CANNOT_ANSWER" if number == 0 else f"answer {number}"
    return ["", "CORRECT", "WRONG", '{"verdict": "WRONG"}'][number]


def many_rows(folder: Path, num_rows: int = 40) -> Path:
    rows = [
        {"id": n, "query": f"query {n}", "chunk_path": f"c{n % 12:02d}.png",
         "retrieve_top20": candidates(*((n + k) % 12 for k in range(6)))}
        for n in range(num_rows)
    ]  # fmt: skip
    return write_rows(folder / "in.jsonl", rows)


def command(source: Path, server: JudgeServer | str, output: Path | None = None, **flags: Any) -> list[str]:
    url = server if isinstance(server, str) else server.url
    words = ["--input", str(source), "--output", str(output or source.parent / "out.jsonl"), "--base-url", url]
    for name, value in flags.items():
        words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return words


def run(source: Path, server: JudgeServer | str, output: Path | None = None, **flags: Any) -> int:
    return script.main(command(source, server, output, **flags))


def start(*words: str, cwd: Path = ROOT) -> subprocess.Popen:
    program = [sys.executable, str(ROOT / "filter_hard_negatives_vqa.py"), *words]
    return subprocess.Popen(program, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().split(b"\n") if line]


def results(folder: Path, stem: str = "out") -> tuple[list[dict], list[dict], dict]:
    summary = json.loads((folder / f"{stem}.summary.json").read_text())
    return rows_of(folder / f"{stem}.jsonl"), rows_of(folder / f"{stem}.reviews.jsonl"), summary


def file_bytes(folder: Path, stem: str = "out") -> list[bytes]:
    return [(folder / f"{stem}{end}").read_bytes() for end in (".jsonl", ".reviews.jsonl")]


def check_sums(summary: dict[str, Any]) -> None:
    done = summary["num_rows_written"] + summary["num_rows_skipped"] + summary["num_rows_failed"]
    assert summary["num_rows"] == summary["num_rows_done"] == done
    assert sum(summary["skip_reasons"].values()) == summary["num_rows_skipped"]
    assert sum(summary["verdicts"].values()) == summary["candidates"]["looked_at"]


# What is kept


def test_false_negatives_are_dropped_and_the_next_candidates_kept(colour_set: Path):
    rows = [
        {"query": "red pink", "chunk_path": "c00.png", "neg_chunk_paths": ["c01.png"], "extra": {"a": 1.5},
         "retrieve_top20": candidates(0, 9, 3, 4, 5)},
        {"query": "blue", "chunk_path": "c02.png", "retrieve_top20": candidates(2, 1)},
    ]  # fmt: skip
    with JudgeServer(truthful) as server:
        assert run(write_rows(colour_set / "in.jsonl", rows), server) == 0
    written, reviews, summary = results(colour_set)
    assert written == [rows[0] | {"neg_chunk_paths": ["c03.png", "c04.png"]}]
    assert [(r["row_index"], r["path"], r["rank"], r["verdict"], r["answer"]) for r in reviews] == [
        (0, "c09.png", 2, "CORRECT", "pink"), (0, "c03.png", 3, "WRONG", "white"), (0, "c04.png", 4, "WRONG", "black"),
        (1, "c01.png", 2, "WRONG", "green"),
    ]  # fmt: skip
    assert reviews[0]["score"] == 0.8 and reviews[0]["model"] == "gpt-4.1-mini" and reviews[0]["prompt_tokens"] == 200
    assert summary["skip_reasons"]["too_few_negatives"] == 1 and summary["completed"] is True
    assert summary["tokens"] == {"prompt": 800, "completion": 40} and summary["calls"] == 8
    check_sums(summary)


def test_no_positive_of_the_query_is_asked_or_kept_under_any_name(colour_set: Path):
    shutil.copy(colour_set / "c00.png", colour_set / "copy.png")
    entries = [
        {"path": p} for p in ("./c00.png", str(colour_set / "c00.png"), "copy.png", "c07.png", "c01.png", "c01.png")
    ]
    shutil.copy(colour_set / "c01.png", colour_set / "twice.png")
    entries += [{"path": "twice.png"}, {"path": "c02.png"}]
    rows = [
        {"query": "same", "chunk_path": "c00.png", "retrieve_top20": entries},
        {"query": "same", "chunk_path": "c07.png", "retrieve_top20": candidates(0, 3, 4)},
    ]
    with JudgeServer(lambda request: "CANNOT_ANSWER") as server:
        assert run(write_rows(colour_set / "in.jsonl", rows), server) == 0
        assert Counter(colour(r) for r in server.requests) == Counter(["green", "blue", "white", "black"])
    written, _, summary = results(colour_set)
    assert [row["neg_chunk_paths"] for row in written] == [["c01.png", "c02.png"], ["c03.png", "c04.png"]]
    assert summary["candidates"]["known_positives"] == 5 and summary["candidates"]["duplicates"] == 2


def test_missing_unreadable_and_unknown_candidates_count_towards_k(colour_set: Path):
    (colour_set / "broken.png").write_bytes(b"no image")
    entries = [{"path": "gone.png"}, {"path": "broken.png"}, *candidates(1, 2, 3, 4)]
    rows = [{"query": "q", "chunk_path": "c00.png", "retrieve_top20": entries}]
    source = write_rows(colour_set / "in.jsonl", rows)

    def reply(request: Request) -> Played | str:
        return chat(None, "length") if colour(request) == "green" else "CANNOT_ANSWER"

    with JudgeServer(reply) as server:
        assert run(source, server, candidate_k=4, max_bad_fraction=1) == 0
        assert run(source, server, candidate_k=5, overwrite=True) == 0
    written, reviews, summary = results(colour_set)
    assert written[0]["neg_chunk_paths"] == ["c02.png", "c03.png"]
    assert [r["verdict"] for r in reviews] == ["MISSING", "UNREADABLE", "UNKNOWN", "CANNOT_ANSWER", "CANNOT_ANSWER"]
    assert str(colour_set / "gone.png") in reviews[0]["reason"] and reviews[2]["reason"] == "length"
    assert summary["unknown_reasons"] == {"length": 1} and summary["candidate_missing_ratio"] == 0.2
    assert summary["missing_path_ratio"] == pytest.approx(1 / 6, abs=1e-6)
    check_sums(summary)


def test_rows_lost_to_missing_candidates_never_look_like_success(colour_set: Path, capsys: pytest.CaptureFixture):
    entries = [{"path": f"gone/{n}.png"} for n in range(3)]
    rows = [{"query": "q", "chunk_path": "c00.png", "retrieve_top20": entries}]
    with JudgeServer(mixed) as server:
        assert run(write_rows(colour_set / "in.jsonl", rows), server) == 1
    assert "1 of 1 rows are lost" in capsys.readouterr().err
    assert results(colour_set)[2]["skip_reasons"]["candidates_missing"] == 1
    assert results(colour_set)[2]["completed"] is False


def test_missing_positives_stop_the_run_before_any_request(colour_set: Path, capsys: pytest.CaptureFixture):
    rows = [{"query": f"q{n}", "chunk_path": f"x{n}.png", "retrieve_top20": candidates(1, 2)} for n in range(2)]
    source = write_rows(colour_set / "in.jsonl", rows + [dict(rows[0], query="z", chunk_path="c00.png")])
    with JudgeServer(mixed) as server:
        assert run(source, server) == 1
        assert "2 of 3 rows cannot be used" in capsys.readouterr().err and server.num_calls == 0
        assert run(source, server, max_bad_fraction=0.7) == 0
    summary = results(colour_set)[2]
    assert summary["skip_reasons"]["positive_missing"] == 2 and summary["positive_missing_ratio"] == pytest.approx(
        2 / 3, abs=1e-6
    )
    assert [row["line"] for row in rows_of(colour_set / "out.bad_rows.jsonl")] == [1, 2]


def test_check_positive_skips_rows_whose_positive_does_not_answer(colour_set: Path):
    rows = [
        {"query": "red", "chunk_path": "c00.png", "retrieve_top20": candidates(1, 2)},
        {"query": "red", "chunk_path": "c05.png", "retrieve_top20": candidates(1, 2)},
    ]
    with JudgeServer(truthful) as server:
        assert run(write_rows(colour_set / "in.jsonl", rows), server, check_positive=True) == 0
    written, reviews, summary = results(colour_set)
    assert len(written) == 1 and written[0]["chunk_path"] == "c00.png"
    assert [(r["role"], r["position"], r["verdict"]) for r in reviews if r["row_index"] == 1] == [
        ("positive", None, "WRONG")
    ]
    assert summary["skip_reasons"]["positive_not_confirmed"] == 1
    assert summary["positive_verdicts"]["CORRECT"] == 1 == summary["positive_verdicts"]["WRONG"]


def test_query_repeated_in_three_rows_is_reviewed_in_each(colour_set: Path):
    rows = [{"query": "same", "chunk_path": f"c0{n}.png", "retrieve_top20": candidates(5, 6)} for n in range(3)]
    with JudgeServer(lambda request: "CANNOT_ANSWER") as server:
        assert run(write_rows(colour_set / "in.jsonl", rows), server) == 0
    written, reviews, _ = results(colour_set)
    assert len(written) == 3 and Counter(r["row_index"] for r in reviews) == Counter({0: 2, 1: 2, 2: 2})


# Files


def test_odd_jsonl_files_give_the_results_of_the_clean_one(colour_set: Path):
    rows = [
        {"query": "red\u2028or\x85pink", "chunk_path": "c00.png", "retrieve_top20": candidates(1, 2, 3)},
        {"query": "blue", "chunk_path": "c02.png", "retrieve_top20": candidates(4, 5, 6)},
    ]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    forms = {
        "clean": "\n".join(lines) + "\n", "bom": "\ufeff" + "\n".join(lines) + "\n",
        "crlf": "\r\n\r\n" + "\r\n\r\n".join(lines) + "\r\n", "cut": "\n".join(lines),
    }  # fmt: skip
    found = []
    with JudgeServer(truthful) as server:
        for name, text in forms.items():
            (colour_set / f"{name}.in").write_bytes(text.encode())
            assert run(colour_set / f"{name}.in", server, colour_set / f"{name}.jsonl") == 0
            found.append(file_bytes(colour_set, name))
    assert all(files == found[0] for files in found) and "\u2028or\x85" in found[0][0].decode()


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ('{"query": "q"', ["line 2", "not a JSON object"]),
        ('{"query": 3, "chunk_path": "c00.png", "retrieve_top20": []}', ["line 2", "'query'", "a number"]),
        ('{"query": "q", "chunk_path": "", "retrieve_top20": []}', ["line 2", "'chunk_path'", "empty"]),
        ('{"query": "q", "chunk_path": "c00.png"}', ["line 2", "'retrieve_top20'", "mine_hard_negatives.py"]),
        ('{"query": "q", "chunk_path": "c00.png", "retrieve_top20": "c01.png"}', ["'retrieve_top20'", "a string"]),
        ('{"query": "q", "chunk_path": "c00.png", "retrieve_top20": ["c01.png"]}', ["'retrieve_top20'", "a string"]),
        ('{"query": "q", "chunk_path": "c00.png", "retrieve_top20": [{"path": 1}]}', ["'retrieve_top20'", "a number"]),
    ],
)
def test_broken_row_is_named_before_any_request(
    colour_set: Path, capsys: pytest.CaptureFixture, line: str, parts: list[str]
):
    good = json.dumps({"query": "q", "chunk_path": "c00.png", "retrieve_top20": candidates(1, 2)})
    (colour_set / "in.jsonl").write_text(f"{good}\n{line}\n")
    with JudgeServer(mixed) as server:
        assert run(colour_set / "in.jsonl", server) == 1
        assert server.num_calls == 0
    message = capsys.readouterr().err
    assert all(part in message for part in ["in.jsonl", *parts]) and "Traceback" not in message


def test_paths_belong_to_the_folder_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    name = "é #1 50%.png"
    data, other = tmp_path / "data", tmp_path / "other"
    for folder, rgb in ((data, COLOURS["pink"]), (other, COLOURS["blue"])):
        folder.mkdir()
        Image.new("RGB", (64, 64), rgb).save(folder / unicodedata.normalize("NFD", name))
        Image.new("RGB", (64, 64), COLOURS["red"]).save(folder / "p.png")
        Image.new("RGB", (64, 64), COLOURS["white"]).save(folder / "n.png")
    entries = [{"path": unicodedata.normalize("NFC", name)}, {"path": "n.png"}]
    source = write_rows(data / "in.jsonl", [{"query": "red", "chunk_path": "p.png", "retrieve_top20": entries}])
    found = []
    with JudgeServer(truthful) as server:
        for place in (data, other, Path("/")):
            monkeypatch.chdir(place)
            assert run(source, server, tmp_path / "deep" / "er" / "out.jsonl", overwrite=True) == 0
            found.append(file_bytes(tmp_path / "deep" / "er"))
        assert {colour(request) for request in server.requests} == {"pink", "white"}
    assert found[0] == found[1] == found[2]
    row = rows_of(tmp_path / "deep" / "er" / "out.jsonl")[0]
    paths = [row["chunk_path"], *row["neg_chunk_paths"], *(entry["path"] for entry in row["retrieve_top20"])]
    assert len(paths) == 5 and all((tmp_path / "deep" / "er" / path).is_file() for path in paths)
    review = rows_of(tmp_path / "deep" / "er" / "out.reviews.jsonl")[0]
    assert (tmp_path / "deep" / "er" / review["path"]).samefile(data / unicodedata.normalize("NFD", name))


def test_existing_outputs_are_refused_without_a_flag(colour_set: Path, capsys: pytest.CaptureFixture):
    source = many_rows(colour_set, 2)
    with JudgeServer(mixed) as server:
        assert run(source, server) == 0
        calls = server.num_calls
        assert run(source, server) == 1
        assert "--resume" in capsys.readouterr().err and server.num_calls == calls
        assert run(source, server, resume=True) == 0 and server.num_calls == calls
        assert run(source, server, overwrite=True) == 0 and server.num_calls == 2 * calls


def test_offset_and_limit_keep_the_row_numbers_of_the_file(colour_set: Path):
    source = many_rows(colour_set, 10)
    with JudgeServer(mixed) as server:
        assert run(source, server, offset=4, limit=3) == 0
    written, reviews, summary = results(colour_set)
    assert {row["id"] for row in written} <= {4, 5, 6} and {r["row_index"] for r in reviews} == {4, 5, 6}
    assert summary["num_rows"] == 3


def test_dry_run_counts_and_sends_nothing(colour_set: Path, capsys: pytest.CaptureFixture):
    source = many_rows(colour_set, 10)
    before = set(os.listdir(colour_set))
    with JudgeServer(mixed) as server:
        assert run(source, server, dry_run=True) == 0
        assert server.num_calls == server.num_listings == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_rows"], found["least"]["calls"], found["most"]["calls"]) == (10, 20, 120)
    assert found["most"]["usd"] > found["least"]["usd"] >= 0 and set(os.listdir(colour_set)) == before


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"num_hard_negatives": 11}, "--candidate-k"),
        ({"resume": True, "overwrite": True}, "--overwrite"),
        ({"summary_output": "same", "reviews_output": "same"}, "four files"),
        ({"base_url": "localhost:8000"}, "http://"),
        ({"timeout": 0}, "--timeout"),
    ],
)
def test_flags_that_cannot_work_together_are_refused(
    colour_set: Path, capsys: pytest.CaptureFixture, flags: dict[str, Any], message: str
):
    with pytest.raises(SystemExit) as caught:
        run(many_rows(colour_set, 1), "http://127.0.0.1:9/v1", **flags)
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_prompt_file_is_what_the_judge_reads(colour_set: Path):
    prompts = {"answer": "LOOK\nQuery: {query}", "judge": "CHECK\nQuery: {query}\nAnswer: {answer}"}
    (colour_set / "prompts.json").write_text(json.dumps(prompts))
    with JudgeServer(truthful) as server:
        assert run(many_rows(colour_set, 1), server, prompt_file=colour_set / "prompts.json") == 0
        assert {request.text.split("\n")[0] for request in server.requests} == {"LOOK", "CHECK"}


def test_markers_in_a_query_open_no_second_image(colour_set: Path):
    queries = ["what does <|image_pad|> mean?", "<image> and <|im_end|>"]
    rows = [{"query": q, "chunk_path": "c00.png", "retrieve_top20": candidates(1, 2)} for q in queries]
    with JudgeServer(mixed) as server:
        assert run(write_rows(colour_set / "in.jsonl", rows), server) == 0
        sent = "".join(request.text for request in server.requests)
    assert not any(marker in sent for marker in ("<|image_pad|>", "<image>", "<|im_end|>"))
    assert {row["query"] for row in rows_of(colour_set / "out.reviews.jsonl")} == set(queries)


# Under fire


def test_outputs_are_byte_equal_whatever_the_concurrency(colour_set: Path):
    source = many_rows(colour_set)
    wanted = 1

    def reply(request: Request) -> Played:
        """Answers out of order, but not before all workers asked once."""
        deadline = time.monotonic() + 60
        while server.max_at_once < wanted and time.monotonic() < deadline:
            time.sleep(0.005)
        return Played(chat(mixed(request)).body, delay_s=random.random() / 50)

    with JudgeServer(reply) as server:
        assert run(source, server, colour_set / "one.jsonl", concurrency=1) == 0
        assert server.max_at_once == 1
        wanted = 16
        assert run(source, server, colour_set / "many.jsonl", concurrency=16) == 0
        assert server.max_at_once == 16
    assert file_bytes(colour_set, "one") == file_bytes(colour_set, "many")
    assert results(colour_set, "one")[2] == results(colour_set, "many")[2]


def test_random_failures_lose_and_repeat_no_verdict(colour_set: Path):
    source = many_rows(colour_set)
    with JudgeServer(mixed) as server:
        assert run(source, server, colour_set / "calm.jsonl") == 0
        least = server.num_calls
    failures = [error(429, "slow"), error(503, "busy"), Played(chat("WRONG").body, cut=True)]
    failed = []

    def reply(request: Request) -> Played | str:
        dice = random.Random(request.number)
        if dice.random() < 0.3:
            failed.append(request.number)
            return dice.choice(failures)
        return mixed(request)

    with JudgeServer(reply) as server:
        assert run(source, server, concurrency=16, max_retries=12) == 0
        assert server.num_calls == least + len(failed) and failed
    assert file_bytes(colour_set) == file_bytes(colour_set, "calm")
    assert results(colour_set)[2]["retries"] == len(failed)


def test_picture_that_the_server_refuses_is_recorded_and_the_rest_goes_on(colour_set: Path):
    source = many_rows(colour_set, 12)

    def reply(request: Request) -> Played | str:
        dark = request.image.getpixel((1, 1))
        return error(400, "image tokens exceed the context") if dark == COLOURS["blue"] else "CANNOT_ANSWER"

    with JudgeServer(reply) as server:
        assert run(source, server) == 0
        refused = [request.image.size for request in server.requests if colour(request) == "blue"]
    written, reviews, summary = results(colour_set)
    num_refused = summary["verdicts"]["REFUSED"]
    assert len(written) == 12 and Counter(refused) == {(64, 64): num_refused, (32, 32): num_refused} and num_refused
    assert {r["verdict"] for r in reviews if r["path"] == "c02.png"} == {"REFUSED"}
    assert all("c02.png" not in row["neg_chunk_paths"] for row in written)


def test_row_that_only_refused_pictures_kept_short_is_lost(colour_set: Path, capsys: pytest.CaptureFixture):
    rows = [{"query": f"q{n}", "chunk_path": "c00.png", "retrieve_top20": candidates(1, 2)} for n in range(2)]
    rows[1]["retrieve_top20"] = candidates(3, 4)
    source = write_rows(colour_set / "in.jsonl", rows)
    with JudgeServer(lambda r: error(400, "no") if colour(r) == "green" else "CANNOT_ANSWER") as server:
        assert run(source, server) == 1
        assert f"{colour_set / 'c01.png'}: 400 no" in capsys.readouterr().err
    written, reviews, summary = results(colour_set)
    assert len(written) == 1 and summary["num_rows_failed"] == 1
    assert [r["verdict"] for r in reviews if r["row_index"] == 0] == ["REFUSED", "CANNOT_ANSWER"]


def test_failed_rows_are_listed_apart_and_asked_again_by_resume(colour_set: Path, capsys: pytest.CaptureFixture):
    source = many_rows(colour_set, 12)
    with JudgeServer(mixed) as server:
        assert run(source, server, colour_set / "calm.jsonl") == 0
    is_ill = True

    def reply(request: Request) -> Played | str:
        return error(500, "decoder crashed") if is_ill and request.query == "query 4" else mixed(request)

    with JudgeServer(reply) as server:
        assert run(source, server, max_retries=1) == 1
        message = capsys.readouterr().err
        assert "1 of 12 rows are lost" in message and "decoder crashed" in message and "c05.png" in message
        summary = results(colour_set)[2]
        assert summary["num_rows_failed"] == 1 and summary["completed"] is False
        assert [row["line"] for row in rows_of(colour_set / "out.bad_rows.jsonl")] == [5]
        assert all(row["id"] != 4 for row in results(colour_set)[0])
        is_ill, server.requests[:] = False, []
        assert run(source, server, resume=True) == 0
        assert {request.query for request in server.requests} == {"query 4"}
    assert file_bytes(colour_set) == file_bytes(colour_set, "calm")
    assert not (colour_set / "out.bad_rows.jsonl").exists()


def test_few_failed_rows_are_listed_without_failing_the_run(colour_set: Path):
    source = many_rows(colour_set, 12)
    with JudgeServer(lambda r: error(500) if r.query == "query 4" else mixed(r)) as server:
        assert run(source, server, max_retries=0, max_bad_fraction=0.1) == 0
    assert results(colour_set)[2]["completed"] is True
    assert len(rows_of(colour_set / "out.bad_rows.jsonl")) == 1


@pytest.mark.parametrize(
    ("reply", "part"),
    [(error(401, "bad key sk-very-secret"), "$MY_KEY"), (error(404, "no such route"), "/v1"), (error(403), "$MY_KEY")],
)
def test_error_that_no_retry_cures_stops_the_run_with_a_sentence(
    colour_set: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, reply: Played, part: str
):
    monkeypatch.setenv("MY_KEY", "sk-very-secret")
    with JudgeServer(lambda request: reply) as server:
        assert run(many_rows(colour_set), server, api_key_env="MY_KEY") == 1
        assert server.num_calls <= 8
    printed = capfd.readouterr()
    assert part in printed.err and server.url in printed.err and len(printed.err.splitlines()) == 1
    assert "secret" not in printed.out + printed.err
    assert not any(b"secret" in file.read_bytes() for file in colour_set.iterdir())


def test_missing_key_for_a_hosted_server_is_said_at_once(
    colour_set: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    assert script.main(["--input", str(many_rows(colour_set, 1)), "--output", str(colour_set / "out.jsonl")]) == 1
    assert "no key in $OPENAI_API_KEY" in capsys.readouterr().err


def test_server_that_dies_for_good_ends_the_run(colour_set: Path, capsys: pytest.CaptureFixture):
    def reply(request: Request) -> Played | str:
        return mixed(request) if request.number < 30 else error(503, "gone")

    with JudgeServer(reply) as server:
        assert run(many_rows(colour_set), server, concurrency=2, max_retries=0) == 1
        assert 30 + 7 <= server.num_calls <= 30 + 7 + 2  # what was in flight
    assert "7 requests in a row failed" in capsys.readouterr().err
    assert results_so_far(colour_set)["num_rows_done"] >= 5


def results_so_far(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out.summary.json").read_text())


# Stop and go on


def stop_after(num_calls: int, number: signal.Signals, source: Path, server: JudgeServer, **flags: Any) -> int:
    """Starts the script, sends the signal when the server has got so many calls, and returns the exit code."""
    process = start(*command(source, server, **flags))
    until = server.num_calls + num_calls
    while server.num_calls < until and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(number)
    _, message = process.communicate(timeout=60)
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


def test_help_is_quick_to_import():
    code = "import sys, filter_hard_negatives_vqa as s; print({'torch', 'openai', 'transformers'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_a_run_that_never_reached_its_judge_leaves_nothing_in_the_way(colour_set: Path):
    source, output = many_rows(colour_set, 3), colour_set / "out" / "kept.jsonl"
    output.parent.mkdir()
    with JudgeServer(lambda request: error(401, "no such key")) as server:
        assert run(source, server, output) == 1
    assert not list(output.parent.iterdir())
    with JudgeServer(mixed) as server:
        assert run(source, server, output) == 0
