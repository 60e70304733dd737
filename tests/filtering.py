"""What the tests of the filter share: rows, judges that always say the same, and ways to run the script."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import filter_hard_negatives_vqa as script
from tests.conftest import COLOURS, ROOT, write_rows
from tests.judge_server import JudgeServer, Request

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


def results_so_far(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "out.summary.json").read_text())
