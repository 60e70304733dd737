"""filter_hard_negatives_vqa.py against a local server: what is kept, what is asked, and what fails."""

from __future__ import annotations

import json
import os
import random
import shutil
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
from tests.conftest import COLOURS, ROOT, write_rows
from tests.filtering import (
    candidates,
    check_sums,
    colour,
    file_bytes,
    many_rows,
    mixed,
    results,
    results_so_far,
    rows_of,
    run,
    truthful,
)
from tests.judge_server import JudgeServer, Played, Request, chat, error

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
    assert reviews[0]["path"] == "gone.png" and reviews[0]["reason"] == "No such file or directory"
    assert reviews[2]["reason"] == "length"
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


def hums(num_unknown: int) -> Callable[[Request], str]:
    """A judge that is not understood in the first rows."""
    return lambda request: "hm" if request.is_verdict and int(request.query.split()[1]) < num_unknown else "WRONG"


@pytest.mark.parametrize(("num_unknown", "code"), [(3, 0), (4, 1), (6, 1)])
def test_a_judge_that_is_mostly_not_understood_never_looks_like_success(
    colour_set: Path, capsys: pytest.CaptureFixture, num_unknown: int, code: int
):
    source = many_rows(colour_set, 6)
    with JudgeServer(hums(num_unknown)) as server:
        assert run(source, server, candidate_k=1, num_hard_negatives=1) == code
        assert results(colour_set)[2]["completed"] is (code == 0)
        flags = {"candidate_k": 1, "num_hard_negatives": 1, "resume": True, "max_bad_fraction": 1}
        assert run(source, server, **flags) == 0
    said = capsys.readouterr().err
    text = f"{num_unknown} of 6 verdicts are UNKNOWN ({num_unknown} unparsable)"
    assert (f"error: {text}" in said) == (f"warning: {text}" in said) == (code == 1)
    assert results(colour_set)[2]["completed"] is True and len(results(colour_set)[0]) == 6 - num_unknown


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


@pytest.mark.parametrize("is_missing", [False, True])
def test_dry_run_leaves_the_list_of_lost_rows_alone_and_counts_missing_positives(
    colour_set: Path, capsys: pytest.CaptureFixture, is_missing: bool
):
    source, lost = many_rows(colour_set, 3), colour_set / "out.bad_rows.jsonl"
    lost.write_text("of an earlier run")
    if is_missing:
        (colour_set / "c00.png").unlink()
    assert run(source, "http://127.0.0.1:9/v1", dry_run=True) == 0
    assert json.loads(capsys.readouterr().out)["num_positives_missing"] == is_missing
    assert lost.read_text() == "of an earlier run"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"num_hard_negatives": 11}, "--candidate-k"),
        ({"resume": True, "overwrite": True}, "--overwrite"),
        ({"summary_output": "same", "reviews_output": "same"}, "--reviews-output and --summary-output name one file"),
        ({"report": "prompts.json", "prompt_file": "prompts.json"}, "--prompt-file and --report name one file"),
        ({"base_url": "localhost:8000"}, "http://"),
        ({"base_url": ""}, "--base-url is empty"),
        ({"timeout": 0}, "--timeout"),
    ],
)
def test_flags_that_cannot_work_together_are_refused(
    colour_set: Path, capsys: pytest.CaptureFixture, flags: dict[str, Any], message: str
):
    with pytest.raises(SystemExit) as caught:
        run(many_rows(colour_set, 1), "http://127.0.0.1:9/v1", **flags)
    assert caught.value.code == 2 and message in capsys.readouterr().err


def test_the_list_of_lost_rows_never_takes_the_place_of_the_input(colour_set: Path, capsys: pytest.CaptureFixture):
    source = many_rows(colour_set, 1).rename(colour_set / "out.bad_rows.jsonl")
    with pytest.raises(SystemExit):
        run(source, "http://127.0.0.1:9/v1")
    assert "--input and the list of lost rows name one file" in capsys.readouterr().err and source.exists()


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
        deadline = time.monotonic() + 300
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
