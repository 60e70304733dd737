"""Damaged and silly inputs without end: each target makes one from a seed, and raises where a promise breaks.

    python -m tests.fuzz SECONDS [TARGET ...]      new seeds until the time is over; prints inputs, outcomes, crashes

`tests/test_fuzz.py` runs a few fixed seeds of each.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import json
import random
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from contrastors.cli import typed_flags
from contrastors.images import BadImage, open_image
from contrastors.records import RecordError, dump_json, read_pairs
from contrastors.search_api import SearchClient, SearchFailed, SearchStopped
from contrastors.verdicts import CANNOT_ANSWER, CORRECT, UNKNOWN, WRONG, parse_verdict
from tests.conftest import make_colour_set
from tests.judge_server import Played
from tests.runs import arguments, signals_kept, train
from tests.search_server import SearchServer

FORMATS = {
    "PNG": ("1", "L", "P", "RGB", "RGBA", "I;16"), "JPEG": ("L", "RGB", "CMYK"), "WEBP": ("RGB", "RGBA"),
    "GIF": ("P", "L"), "TIFF": ("1", "L", "RGB", "CMYK", "I;16", "F"), "BMP": ("1", "L", "P", "RGB"),
}  # fmt: skip
VERDICT_PIECES = (
    "CORRECT", "INCORRECT", "WRONG", "not ", "<think>", "</think>", "{", "}", '"verdict"', ": ", '"', "cannot answer",
    "**", "The answer is ", "yes", "no", "\n", "\u2028", "```json", "```", "[", "]", "\\boxed{", "true", "false",
    "null", ", ", "é", "Verdict: ", "I'm sorry, I can't", "\0", "\ud83d", "correct", "in", "A: ", "9" * 400, "[THINK]",
    "[/THINK]",
)  # fmt: skip
SILLY = (
    "", " ", "-1", "0", "1", "2", "nan", "inf", "-inf", "1e400", "0.5", "1e-300", "0x10", "1_0", "\u0663", "+1", "None",
    "auto", "true", "é ü", "a" * 300, "missing/x", ".", "rows.jsonl", "c00.png", "recall@1=2", "*", "[", "\\", "$HOME",
    "-", "a\nb",
)  # fmt: skip
# Values of these are left alone in real runs: they end the machine's patience, not the promise.
PATIENCE = {
    "--num-workers",
    "--max-steps",
    "--timeout",
    "--concurrency",
    "--nproc-per-node",
    "--processes",
    "--max-retries",
}
SCRIPTS = sorted(
    path.stem
    for path in Path(__file__).resolve().parent.parent.glob("*.py")
    if path.stem != "run_filter_hard_negatives_chunks"
)


class Fuzz:
    """The targets, and what they need, in a folder of their own.

    Args:
        folder: Empty.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "data").mkdir()
        self.data = make_colour_set(folder / "data")

    @cached_property
    def model(self) -> Path:
        from contrastors.demo import make_model

        return make_model(self.folder / "model", seed=1, hidden=64, layers=2, vision_hidden=32, vision_layers=3)

    @cached_property
    def run(self) -> Path:
        with contextlib.redirect_stdout(io.StringIO()):
            assert train(arguments(self.model, self.data, self.folder / "run", max_steps=2)) == 0
        return self.folder / "run"

    @cached_property
    def base(self) -> Any:
        import torch

        from contrastors.loading import load_bi_encoder

        return load_bi_encoder(str(self.model), torch.device("cpu"))[0]

    # -------------------------------------------------------------------------------------------------- floor 0

    def images(self, source: random.Random) -> str:
        """A damaged file is a picture within the limit, or a BadImage of one line."""
        kind = source.choice(sorted(FORMATS))
        mode = source.choice(FORMATS[kind])
        size = source.choice(((1, 1), (7, 3), (40, 20), (64, 64), (1, 150)))
        picture = Image.new(mode, size) if mode == "F" else Image.effect_noise(size, 80).convert(mode)
        written = io.BytesIO()
        exif = Image.Exif()
        exif[0x0112] = source.randrange(1, 9)
        picture.save(written, kind, **({"exif": exif} if kind in ("PNG", "JPEG", "WEBP", "TIFF") else {}))
        data = damage(source, written.getvalue())
        try:
            opened = open_image(data or b"\0", max_image_pixels=100_000)
        except BadImage as error:
            assert str(error) and "\n" not in str(error), error
            return "bad image"
        assert opened.mode == "RGB" and len(opened.tobytes()) == 3 * opened.width * opened.height <= 300_000
        return "picture"

    def records(self, source: random.Random) -> str:
        """A damaged JSONL gives rows of texts, or an error with its line."""
        data = damage(source, (self.data / "rows.jsonl").read_bytes())
        file = self.folder / "damaged.jsonl"
        file.write_bytes(data)
        try:
            pairs, _ = read_pairs(file)
        except RecordError as error:
            assert str(file) in str(error), error
            return "refused"
        assert pairs and all(isinstance(text, str) for p in pairs for text in (p.query, p.positive, *p.negatives))
        dump_json([pair.query for pair in pairs]).encode()
        return "read"

    def verdicts(self, source: random.Random) -> str:
        """Any text has a verdict, UNKNOWN with a reason where it tells none."""
        text = "".join(source.choice(VERDICT_PIECES) for _ in range(source.randrange(12)))
        verdict, reason = parse_verdict(text)
        assert verdict in (CORRECT, WRONG, CANNOT_ANSWER, UNKNOWN), verdict
        assert isinstance(reason, str) and (reason or verdict != UNKNOWN)
        return verdict

    def replies(self, source: random.Random) -> str:
        """A search service that answers anything at all: hits, or one of two errors."""
        hits = [{"path": f"t/{n}.png", "score": 1 - n / 10, "article_id": n} for n in range(3)]
        body = mutate(source, {"results": [{"hits": copy.deepcopy(hits)}, {"hits": copy.deepcopy(hits)}]})
        raw = damage(source, json.dumps(body).encode()) if source.random() < 0.3 else json.dumps(body).encode()
        status = source.choice((200, 200, 200, 200, 204, 301, 400, 404, 500, 503))
        self.service.reply = lambda request: Played(raw.decode(errors="replace"), status=status)
        try:
            found = self.client.search([[1.0], [2.0]])
        except SearchStopped as error:
            assert self.service.url in str(error), error
            return "stopped"
        except SearchFailed:
            return "failed"
        assert len(found) == 2 and all(isinstance(hit["path"], str) for hits in found for hit in hits)
        assert all(a["score"] >= b["score"] - 1e-5 for hits in found for a, b in zip(hits, hits[1:], strict=False))
        return "hits"

    @cached_property
    def service(self) -> SearchServer:
        server = SearchServer(lambda request: [])
        server.__enter__()
        return server

    @cached_property
    def client(self) -> SearchClient:
        return SearchClient(self.service.url, 10, 1, max_retries=0, timeout_s=10)

    # ---------------------------------------------------------------------------------------------- checkpoints, flags

    def checkpoints(self, source: random.Random) -> str:
        """A damaged checkpoint is named, or loads as what its files say."""
        import torch
        from safetensors.torch import load_file

        from contrastors.checkpoint import (
            ADAPTER_FILE,
            BadCheckpoint,
            adapter_tensors,
            load_adapter,
            read_args,
            read_state,
        )

        whole, folder = self.run / "checkpoint-2", self.folder / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(whole, folder)
        name = source.choice(sorted(path.name for path in whole.iterdir()))
        what = source.randrange(4)
        if what == 0:
            (folder / name).unlink()
        elif what == 1:
            shutil.copy(whole / source.choice(sorted(path.name for path in whole.iterdir())), folder / name)
        elif name.endswith(".json") and what == 2:
            (folder / name).write_text(json.dumps(mutate(source, json.loads((whole / name).read_text()))))
        else:
            (folder / name).write_bytes(damage(source, (whole / name).read_bytes()))
        try:
            read_state(folder)
            read_args(folder)
            model = copy.deepcopy(self.base)
            load_adapter(model, folder, trainable=True)
        except BadCheckpoint as error:
            assert str(folder) in str(error) and "\n" not in str(error), error
            return "refused"
        saved = load_file(folder / ADAPTER_FILE)
        assert all(torch.equal(value, saved[key]) for key, value in adapter_tensors(model).items())
        return "loaded"

    def flags(self, source: random.Random) -> str:
        """Any flags of any script parse, or end with a usage error."""
        script = importlib.import_module(source.choice(SCRIPTS))
        argv = silly_flags(source, script.build_parser(), source.randrange(1, 5), leave=())
        with quiet():
            try:
                parser = script.build_parser()
                args = parser.parse_args(argv)
                if hasattr(script, "validate"):
                    takes_typed = script.validate.__code__.co_argcount == 3
                    script.validate(parser, args, *([typed_flags(script.build_parser(), argv)] if takes_typed else []))
            except SystemExit as stop:
                assert stop.code in (0, 2), stop.code
                return "usage"
        return "parsed"

    def runs(self, source: random.Random) -> str:
        """Real runs of training and mining with silly flags end with an exit code, never with a traceback."""
        shutil.rmtree(self.folder / "out", ignore_errors=True)
        if source.random() < 0.6:
            script = importlib.import_module("train_contrastors")
            argv = arguments(self.model, self.data, self.folder / "out" / "run", max_steps=1, eval_steps=1)
        else:
            script = importlib.import_module("mine_hard_negatives")
            argv = ["--input", self.data / "rows.jsonl", "--output", self.folder / "out" / "mined.jsonl"]
            argv += ["--model", self.model, "--max-num-visual-tokens", 16, "--num-workers", 0, "--device", "cpu"]
        argv = [*map(str, argv), *silly_flags(source, script.build_parser(), source.randrange(1, 3), leave=PATIENCE)]
        (self.folder / "out").mkdir()
        try:
            with quiet() as printed, contextlib.chdir(self.folder / "out"), signals_kept():
                code = script.main(argv)
        except SystemExit as stop:
            code = stop.code
        assert code in (0, 1, 2), (code, argv)
        assert code == 0 or printed.getvalue().strip(), argv
        return f"exit {code}"


TARGETS = ("images", "records", "verdicts", "replies", "checkpoints", "flags", "runs")


@contextlib.contextmanager
def quiet():
    """Yields what is printed to stderr inside the block; nothing is shown."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(printed):
        yield printed


def silly_flags(source: random.Random, parser: Any, count: int, leave: Any) -> list[str]:
    """Some flags of a parser, each with a silly value; now and then one of another spelling."""
    argv = []
    for _ in range(count):
        action = source.choice([a for a in parser._actions if a.option_strings and a.option_strings[0] not in leave])
        name = source.choice(action.option_strings)
        if name in ("-h", "--help"):
            continue
        value = source.choice(SILLY)
        if action.nargs == 0 or action.const is not None:
            argv.append(name)
        else:
            argv += [f"{name}={value}"] if source.random() < 0.7 else [name, value]
    return argv


def damage(source: random.Random, data: bytes) -> bytes:
    """Bytes changed, cut, put in twice or taken out."""
    changed = bytearray(data)
    for _ in range(source.randrange(1, 5)):
        place = (
            source.randrange(len(changed) + 1)
            if source.random() < 0.6
            else source.randrange(min(200, len(changed)) + 1)
        )
        what = source.randrange(5)
        if what == 0 and place < len(changed):
            changed[place] = source.randrange(256)
        elif what == 1:
            changed[place:place] = source.randbytes(source.randrange(1, 9))
        elif what == 2:
            del changed[place : place + source.randrange(1, 40)]
        elif what == 3:
            changed[place:place] = changed[place : place + source.randrange(1, 40)]
        elif source.random() < 0.3:
            del changed[place:]
    return bytes(changed)


def mutate(source: random.Random, value: Any) -> Any:
    """JSON with one part exchanged, taken out or doubled."""
    odd = (None, True, -1, 0.5, "", "x", [], {}, [None], {"a": 1}, 10**30, "\ud83d", float("nan"), [[[]]])
    if isinstance(value, dict) and value and source.random() < 0.85:
        key = source.choice(sorted(value))
        if source.random() < 0.15:
            return {name: part for name, part in value.items() if name != key}
        return value | {key: mutate(source, value[key])}
    if isinstance(value, list) and value and source.random() < 0.85:
        place = source.randrange(len(value))
        if source.random() < 0.2:
            return value + value[place:]
        return [*value[:place], mutate(source, value[place]), *value[place + 1 :]]
    return source.choice(odd)


def fuzz(targets: list[str], seconds: float, first_seed: int) -> int:
    """Runs targets in turn until the time is over; prints outcomes and returns the number of crashes."""
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in targets}
    crashes, seed, ends = 0, first_seed, time.monotonic() + seconds
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        fuzzing = Fuzz(Path(folder))
        while time.monotonic() < ends:
            for name in targets:
                work: Callable[[random.Random], str] = getattr(fuzzing, name)
                try:
                    outcomes[name][work(random.Random(f"{name} {seed}"))] += 1
                except Exception:
                    crashes += 1
                    outcomes[name]["CRASH"] += 1
                    print(f"{name}, seed {seed}:\n{traceback.format_exc(limit=-6)}", flush=True)
            seed += 1
    for name, found in outcomes.items():
        print(
            f"{name}: {found.total():,} inputs: "
            + ", ".join(f"{count:,} {what}" for what, count in found.most_common())
        )
    return crashes


if __name__ == "__main__":
    chosen = sys.argv[2:] or list(TARGETS)
    sys.exit(min(1, fuzz(chosen, float(sys.argv[1]), first_seed=1_000_000)))
