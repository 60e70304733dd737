"""run_filter_hard_negatives_chunks.py: chunks merge to the bytes of a single run, whatever happened on the way."""

from __future__ import annotations

import builtins
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import run_filter_hard_negatives_chunks as script
from tests.conftest import ROOT, write_rows
from tests.filtering import many_rows, mixed, rows_of, run
from tests.judge_server import JudgeServer, Played, Request, chat, error

MERGED = ("filtered_hn.jsonl", "candidate_reviews.jsonl", "summary.json")


def command(source: Path, output_dir: Path, server: JudgeServer, **flags: Any) -> list[str]:
    words = ["--input", str(source), "--output-dir", str(output_dir), "--base-url", server.url]
    for name, value in flags.items():
        words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
    return words


def run_chunks(source: Path, output_dir: Path, server: JudgeServer, **flags: Any) -> int:
    return script.main(command(source, output_dir, server, **flags))


def single_run(source: Path, server: JudgeServer, folder: Path, **flags: Any) -> list[bytes]:
    """Returns the files of a run without chunks; its folder lies as deep as the other's, so that paths are equal."""
    names = dict(zip(("reviews_output", "summary_output"), [folder / MERGED[1], folder / MERGED[2]], strict=True))
    assert run(source, server, folder / MERGED[0], **names, **flags) == 0
    return files(folder)


def files(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in MERGED]


def chunk_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("chunk_*"))


@pytest.fixture
def rows_with_shared_queries(colour_set: Path) -> Path:
    """15 rows; query 0 stands in the first and in the last chunk, with different positives."""
    source = many_rows(colour_set, 15)
    rows = rows_of(source)
    rows[14]["query"] = rows[0]["query"]
    rows[14]["chunk_path"] = "./c02.png"
    return write_rows(source, rows)


def test_chunks_merge_to_the_bytes_of_a_single_run_with_one_reading_pass(
    rows_with_shared_queries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    source, chunks, opened, plain_open = rows_with_shared_queries, tmp_path / "chunks", [], builtins.open

    def counted(file: Any, *args: Any, **kwargs: Any) -> Any:
        opened.append(str(file))
        return plain_open(file, *args, **kwargs)

    with JudgeServer(mixed) as server:
        expected = single_run(source, server, tmp_path / "single")
        monkeypatch.setattr(builtins, "open", counted)
        assert run_chunks(source, chunks, server, chunk_size=7, parallel_chunks=2) == 0
    assert files(chunks) == expected and opened.count(str(source)) == 1
    names = ["chunk_000000_000006", "chunk_000007_000013", "chunk_000014_000014"]
    assert chunk_names(chunks) == names
    assert all({path.name for path in (chunks / name).iterdir()} == set(MERGED) for name in names)
    summary = json.loads(expected[2])
    assert summary["num_rows"] == 15 and summary["completed"] is True


def test_merged_file_in_the_folder_of_the_input_keeps_the_spelling_of_paths(rows_with_shared_queries: Path):
    source = rows_with_shared_queries
    with JudgeServer(mixed) as server:
        expected = single_run(source, server, source.parent)
        for name in MERGED:
            (source.parent / name).unlink()
        assert run_chunks(source, source.parent, server, chunk_size=8) == 0
    assert files(source.parent) == expected and b'"./c02.png"' in expected[0] + expected[1]
    chunk = source.parent / "chunk_000000_000007"
    assert all((chunk / row["chunk_path"]).is_file() for row in rows_of(chunk / MERGED[0]))


def test_start_offset_and_limit_total_choose_rows_of_the_whole_input(rows_with_shared_queries: Path, tmp_path: Path):
    with JudgeServer(mixed) as server:
        expected = single_run(rows_with_shared_queries, server, tmp_path / "single", offset=3, limit=7)
        flags = {"start_offset": 3, "limit_total": 7, "chunk_size": 5}
        assert run_chunks(rows_with_shared_queries, tmp_path / "chunks", server, **flags) == 0
    assert files(tmp_path / "chunks") == expected
    assert chunk_names(tmp_path / "chunks") == ["chunk_000003_000007", "chunk_000008_000009"]


def slowly(request: Request) -> Played:
    return Played(chat(mixed(request)).body, delay_s=0.02)


def wait_for_calls(server: JudgeServer, num_calls: int) -> None:
    end_s = time.monotonic() + 300
    while server.num_calls < num_calls:
        assert time.monotonic() < end_s
        time.sleep(0.005)


def child_of(process: subprocess.Popen) -> int:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.exists():
        pytest.skip("needs /proc to find the filter's process")
    return int(children.read_text().split()[0])


def start(source: Path, output_dir: Path, server: JudgeServer, **flags: Any) -> subprocess.Popen:
    words = command(source, output_dir, server, **flags)
    return subprocess.Popen([sys.executable, str(ROOT / "run_filter_hard_negatives_chunks.py"), *words],
                            cwd="/", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip


def test_killed_chunk_is_resumed_and_finished_ones_are_left(rows_with_shared_queries: Path, tmp_path: Path):
    source, chunks = rows_with_shared_queries, tmp_path / "chunks"
    with JudgeServer(mixed) as server:
        expected = single_run(source, server, tmp_path / "single")
        least = server.num_calls
    with JudgeServer(slowly) as server:
        process = start(source, chunks, server, chunk_size=6, concurrency=2)
        wait_for_calls(server, 37)  # the first chunk takes about 29
        os.kill(child_of(process), signal.SIGKILL)
        _, message = process.communicate(timeout=300)
        assert process.returncode == 1 and "chunk_000006_000011" in message and "--skip-existing" in message
        first = [(chunks / "chunk_000000_000005" / name).stat().st_mtime_ns for name in MERGED]
        assert not (chunks / MERGED[0]).exists()
        assert run_chunks(source, chunks, server, chunk_size=6, concurrency=2, skip_existing=True) == 0
        assert server.num_calls <= least + 2 * 2
        assert first == [(chunks / "chunk_000000_000005" / name).stat().st_mtime_ns for name in MERGED]
    assert files(chunks)[:2] == expected[:2]
    counts = json.loads((chunks / "summary.json").read_text())
    assert counts | {"calls": 0} == json.loads(expected[2]) | {"calls": 0}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_stopped_runner_leaves_no_filter_at_work(colour_set: Path, tmp_path: Path, number: signal.Signals, code: int):
    source, chunks, delay_s = many_rows(colour_set, 10), tmp_path / "chunks", 0.2

    def reply(request: Request) -> Played:
        return Played(chat(mixed(request)).body, delay_s=delay_s)

    with JudgeServer(reply) as server:
        process = start(source, chunks, server, chunk_size=10, concurrency=2)
        wait_for_calls(server, 5)
        child = child_of(process)
        process.send_signal(number)
        process.communicate(timeout=300)
        assert process.returncode == code
        end_s = time.monotonic() + 300
        while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
            assert time.monotonic() < end_s
            time.sleep(0.05)
        assert not (chunks / "chunk_000000_000009" / "filtered_hn.jsonl").exists()
        delay_s = 0.0
        assert run_chunks(source, chunks, server, chunk_size=10, skip_existing=True) == 0
    with JudgeServer(mixed) as server:
        assert files(chunks)[:2] == single_run(source, server, tmp_path / "single")[:2]


def test_second_start_needs_a_flag_and_skips_what_is_done(
    colour_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    source, chunks = many_rows(colour_set, 6), tmp_path / "chunks"
    with JudgeServer(mixed) as server:
        assert run_chunks(source, chunks, server, chunk_size=6) == 0
        calls, before = server.num_calls, files(chunks)
        assert run_chunks(source, chunks, server, chunk_size=6) == 1
        assert "--skip-existing goes on with it" in capsys.readouterr().err
        assert run_chunks(source, chunks, server, chunk_size=6, skip_existing=True) == 0
        assert server.num_calls == calls and files(chunks) == before
        assert run_chunks(source, chunks, server, chunk_size=6, overwrite=True) == 0
        assert server.num_calls == 2 * calls and files(chunks) == before


def test_changed_settings_input_or_chunk_size_are_refused(
    colour_set: Path, tmp_path: Path, capfd: pytest.CaptureFixture
):
    source, chunks = many_rows(colour_set, 6), tmp_path / "chunks"
    with JudgeServer(mixed) as server:
        assert run_chunks(source, chunks, server, chunk_size=4) == 0
        calls = server.num_calls
        assert run_chunks(source, chunks, server, chunk_size=4, skip_existing=True, model="other") == 1
        assert "--model was" in capfd.readouterr().err
        assert run_chunks(source, chunks, server, chunk_size=3, skip_existing=True) == 1
        assert "no chunk of this input" in capfd.readouterr().err
        write_rows(source, rows_of(source)[::-1])
        assert run_chunks(source, chunks, server, chunk_size=4, skip_existing=True) == 1
        assert "has changed" in capfd.readouterr().err
        assert server.num_calls == calls


def test_lost_rows_are_judged_over_the_whole_input(colour_set: Path, tmp_path: Path, capfd: pytest.CaptureFixture):
    source, chunks = many_rows(colour_set, 9), tmp_path / "chunks"
    rows = rows_of(source)
    rows[8]["chunk_path"] = "gone.png"  # the whole last chunk
    source.write_text("\n\n" + "".join(json.dumps(row) + "\n" for row in rows))

    def reply(request: Request) -> Played | str:
        return error(500, "crashed") if request.query == "query 3" else mixed(request)

    flags = {"chunk_size": 4, "max_retries": 0, "parallel_chunks": 3}
    with JudgeServer(reply) as server:
        assert run_chunks(source, chunks, server, **flags) == 1  # the missing positive alone is over 1 %
        assert server.num_calls == 0
        assert run_chunks(source, chunks, server, **flags, max_bad_fraction=0.2) == 1
        assert "2 of 9 rows are lost" in capfd.readouterr().err
        assert json.loads((chunks / "summary.json").read_text())["completed"] is False
        flags |= {"max_bad_fraction": 0.3, "skip_existing": True}
        assert run_chunks(source, chunks, server, **flags) == 0
        assert run(source, server, chunks / "single.jsonl", max_retries=0, max_bad_fraction=0.3) == 0
    assert [row["line"] for row in rows_of(chunks / "filtered_hn.bad_rows.jsonl")] == [6, 11]
    assert (chunks / "filtered_hn.bad_rows.jsonl").read_bytes() == (chunks / "single.bad_rows.jsonl").read_bytes()
    assert (chunks / "filtered_hn.jsonl").read_bytes() == (chunks / "single.jsonl").read_bytes()


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("flags", [{}, {"overwrite": True}, {"skip_existing": True, "chunk_size": 3}])
def test_a_run_that_fails_in_planning_leaves_the_folder_as_it_was(colour_set: Path, tmp_path: Path, flags: dict):
    """Also folders that only look like chunks, and the chunk of a filter that died before its first summary."""
    source, chunks = many_rows(colour_set, 3), tmp_path / "chunks"
    if flags:
        with JudgeServer(mixed) as server:
            assert run_chunks(source, chunks, server, chunk_size=2) == 0
    for name in ("chunk_5_9/tile.png", "chunk_000000_000001/mine.txt", "chunk_000007_000009/tile.png"):
        (chunks / name).parent.mkdir(parents=True, exist_ok=True)
        (chunks / name).write_bytes(b"mine")
    if "chunk_size" not in flags:
        source.write_text(source.read_text() + '{"query": 1}\n')
    before = tree(chunks)
    with JudgeServer(mixed) as server:
        assert run_chunks(source, chunks, server, **({"chunk_size": 2} | flags)) == 1
        assert server.num_calls == 0
    assert tree(chunks) == before
    assert sorted(path.name for path in chunks.iterdir() if path.is_dir()) == sorted(
        {Path(n).parts[0] for n in before if "/" in n}
    )


def test_a_chunk_whose_filter_died_before_its_first_summary_is_begun(colour_set: Path, tmp_path: Path):
    source, chunks = many_rows(colour_set, 4), tmp_path / "chunks"
    (chunks / "chunk_000000_000001").mkdir(parents=True)
    (chunks / "chunk_000000_000001" / MERGED[1]).touch()
    with JudgeServer(mixed) as server:
        assert run_chunks(source, chunks, server, chunk_size=2, skip_existing=True) == 0
        assert files(chunks) == single_run(source, server, tmp_path / "single")


def test_existing_files_are_replaced_with_a_flag_only(colour_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    source, chunks, page = many_rows(colour_set, 2), tmp_path / "chunks", tmp_path / "page.html"
    existing = [*(chunks / name for name in MERGED), page]
    chunks.mkdir()
    with JudgeServer(mixed) as server:
        for path in existing:
            path.write_text("{}")
            assert run_chunks(source, chunks, server, report=page) == 1
            assert f"{path} exists; --skip-existing goes on with it" in capsys.readouterr().err
            assert server.num_calls == 0 and path.read_text() == "{}"
            path.unlink()
        for path in existing:
            path.write_text("{}")
        assert run_chunks(source, chunks, server, report=page, overwrite=True) == 0
    assert all(path.stat().st_size > 2 for path in existing)


def test_files_that_would_overwrite_one_another_are_refused(
    colour_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture
):
    source, chunks = many_rows(colour_set, 2), tmp_path / "chunks"
    inside = chunks / "chunk_000000_000001" / "rows.jsonl"
    inside.parent.mkdir(parents=True)
    shutil.copy(source, inside)
    for jsonl, report, part in (
        (source, source, "--input and --report name one file"),
        (source, chunks / MERGED[2], "--report and summary.json of --output-dir name one file"),
        (chunks / "known_positives.jsonl", None, "--input and known_positives.jsonl of --output-dir name one file"),
        (inside, None, "lies in a chunk of --output-dir"),
    ):
        with pytest.raises(SystemExit) as caught, JudgeServer(mixed) as server:
            run_chunks(jsonl, chunks, server, overwrite=True, **({"report": report} if report else {}))
        assert caught.value.code == 2 and part in capsys.readouterr().err
    assert inside.exists() and len(rows_of(source)) == 2


def test_unknown_verdicts_are_judged_over_the_whole_input(
    colour_set: Path, tmp_path: Path, capfd: pytest.CaptureFixture
):
    """A chunk may be hopeless where the input is not."""
    source, chunks, first_unknown = many_rows(colour_set, 3), tmp_path / "chunks", 0

    def reply(request: Request) -> str:
        return "hm" if request.is_verdict and int(request.query.split()[1]) >= first_unknown else "WRONG"

    flags = {"chunk_size": 2, "candidate_k": 1, "num_hard_negatives": 1}
    with JudgeServer(reply) as server:
        assert run_chunks(source, chunks, server, **flags) == 1
        assert "error: 3 of 3 verdicts are UNKNOWN" in capfd.readouterr().err
        assert json.loads((chunks / "summary.json").read_text())["completed"] is False
        first_unknown = 2  # the whole last chunk
        assert run_chunks(source, chunks, server, **flags, overwrite=True) == 0
    assert json.loads((chunks / "summary.json").read_text())["completed"] is True


# In place of the filter: all three must have written down how they were started before one ends and the rest go.
RECORDER = """
import os, pathlib, sys, time
own = pathlib.Path(__file__).with_name(f"{os.getpid()}.words")
own.with_suffix(".tmp").write_text(" ".join(sys.argv))
own.with_suffix(".tmp").rename(own)
while len(list(own.parent.glob("*.words"))) < 3:
    time.sleep(0.01)
sys.exit(3)
"""


def test_chunks_at_work_share_the_requests_per_minute(
    colour_set: Path, tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "recorder.py").write_text(RECORDER)
    monkeypatch.setattr(script, "FILTER", tmp_path / "recorder.py")
    with JudgeServer(mixed) as server:
        flags = {"chunk_size": 2, "parallel_chunks": 3}
        assert run_chunks(many_rows(colour_set, 6), tmp_path / "chunks", server, **flags, requests_per_minute=70) == 1
        words = [file.read_text() for file in tmp_path.glob("*.words")]
        assert len(words) == 3 and all("--requests-per-minute 23 " in text for text in words)
        with pytest.raises(SystemExit):
            run_chunks(many_rows(colour_set, 6), tmp_path / "chunks", server, **flags, requests_per_minute=2)
    assert "--requests-per-minute 2 cannot be shared by --parallel-chunks 3" in capfd.readouterr().err


def test_broken_row_is_named_by_its_line_in_the_input(colour_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    source = many_rows(colour_set, 5)
    source.write_text(source.read_text() + '{"query": 1}\n')
    with JudgeServer(mixed) as server:
        assert run_chunks(source, tmp_path / "chunks", server, chunk_size=2) == 1
    assert f"{source}, line 6" in capsys.readouterr().err


def test_wrong_flags_are_usage_errors(colour_set: Path, tmp_path: Path, capfd: pytest.CaptureFixture):
    source = many_rows(colour_set, 2)
    with JudgeServer(mixed) as server:
        for flags in ({"offset": 1}, {"reviews_output": "x"}, {"skip_existing": True, "overwrite": True}):
            with pytest.raises(SystemExit) as caught:
                run_chunks(source, tmp_path / "chunks", server, **flags)
            assert caught.value.code == 2
        assert run_chunks(source, tmp_path / "chunks", server, no_such_flag=3) == 2
        assert "--no-such-flag" in capfd.readouterr().err


def test_dry_run_estimates_the_whole_input(colour_set: Path, tmp_path: Path, capfd: pytest.CaptureFixture):
    source = many_rows(colour_set, 7)
    with JudgeServer(mixed) as server:
        assert run_chunks(source, tmp_path / "chunks", server, chunk_size=2, dry_run=True) == 0
        assert json.loads(capfd.readouterr().out)["num_rows"] == 7
        assert run_chunks(source, tmp_path / "chunks", server, dry_run=True, report=tmp_path / "page.html") == 2
        assert "--dry-run writes nothing" in capfd.readouterr().err and server.num_calls == 0
    assert not (tmp_path / "chunks").exists()


def test_the_page_of_the_merged_rows_is_that_of_a_single_run(rows_with_shared_queries: Path, tmp_path: Path):
    source, pages = rows_with_shared_queries, [tmp_path / name / "page.html" for name in ("single", "chunks")]
    with JudgeServer(mixed) as server:
        single_run(source, server, tmp_path / "single", report=pages[0])
        assert run_chunks(source, tmp_path / "chunks", server, chunk_size=7, report=pages[1]) == 0
    assert pages[0].read_bytes() == pages[1].read_bytes()
    assert not list((tmp_path / "chunks").glob("chunk_*/*.html"))


def test_the_pixel_limit_reaches_the_page_of_the_merged_rows(colour_set: Path, tmp_path: Path, monkeypatch):
    limits = []
    monkeypatch.setattr(script, "write_report", lambda *args, max_image_pixels, **rest: limits.append(max_image_pixels))
    with JudgeServer(mixed) as server:
        flags = {"report": tmp_path / "page.html", "max_image_pixels": 5000}
        assert run_chunks(many_rows(colour_set, 3), tmp_path / "chunks", server, **flags) == 0
    assert limits == [5000]


def test_an_error_that_no_retry_cures_ends_the_runner_after_one_chunk(
    colour_set: Path, tmp_path: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    source, chunks = many_rows(colour_set, 9), tmp_path / "chunks"
    with JudgeServer(lambda request: error(401, "bad key sk-very-secret")) as server:
        assert run_chunks(source, chunks, server, chunk_size=3) == 1
        assert server.num_calls <= 8  # what one chunk has in flight
    printed = capfd.readouterr()
    assert server.url in printed.err and "$OPENAI_API_KEY" in printed.err and "--skip-existing goes on" in printed.err
    assert "secret" not in printed.out + printed.err and "Traceback" not in printed.err
    with JudgeServer(mixed) as server:
        assert run_chunks(source, chunks, server, chunk_size=3, skip_existing=True) == 0
        assert files(chunks)[:2] == single_run(source, server, tmp_path / "single")[:2]
