"""A rank that stands still tells where; one that comes on says nothing."""

from __future__ import annotations

import re
import threading
import time

import pytest

from contrastors.watch import Watch, find_place
from tests.runs import arguments, losses, run_on_ranks

# Rank 1 waits for its data at step 3, rank 0 for rank 1; both are watched by the tenth of a second.
STANDS_STILL = """
import os
import contrastors.watch
contrastors.watch.SILENCE_S = 1.5
if os.environ.get("RANK") == "1":
    import time
    from contrastors.batches import StepDataset
    whole = StepDataset.__getitem__
    def item(self, step):
        if step == 2:
            time.sleep(8)
        return whole(self, step)
    StepDataset.__getitem__ = item
"""


def test_a_silent_main_thread_is_told_of_with_its_place_again_and_again(capsys):
    with Watch(3, silence_s=0.2) as watch:
        watch.sign("step 7")
        text, deadline = "", time.monotonic() + 30
        while text.count("\n") < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
            text += capsys.readouterr().err
    lines = text.splitlines()
    assert len(lines) >= 2
    assert all(
        re.fullmatch(r"rank 3 \(.+, process \d+\): step 7 has taken .+; it is in .+ \(.+:\d+\)", x) for x in lines
    )
    while any(thread.name == "watch" for thread in threading.enumerate()):
        assert time.monotonic() < deadline + 30
        time.sleep(0.05)


def test_signs_of_life_keep_it_quiet(capsys):
    with Watch(0, silence_s=4.0) as watch:
        for step in range(90):
            watch.sign(f"step {step}")
            time.sleep(0.05)
    assert not capsys.readouterr().err


def test_the_place_is_the_innermost_line_of_the_project():
    ready, done = threading.Event(), threading.Event()

    def wait_in_the_library() -> None:
        from contrastors.records import read_jsonl

        class File:  # open() of the library calls this, in a file of the tests
            def __fspath__(self) -> str:
                ready.set()
                done.wait(100)
                return "nowhere.jsonl"

        with pytest.raises(ValueError):
            list(read_jsonl(File()))

    thread = threading.Thread(target=wait_in_the_library)
    thread.start()
    assert ready.wait(100)
    place = find_place(thread.ident)
    done.set()
    thread.join()
    assert re.fullmatch(r"read_jsonl \(records\.py:\d+\)", place)


@pytest.mark.dist
def test_of_a_rank_that_stands_still_all_ranks_tell_and_the_run_goes_on(tiny_model, colour_set, monkeypatch):
    (colour_set / "site").mkdir()
    (colour_set / "site" / "sitecustomize.py").write_text(STANDS_STILL)
    monkeypatch.setenv("PYTHONPATH", f"{colour_set / 'site'}")
    argv = arguments(tiny_model, colour_set, colour_set / "run", max_steps=4, eval_steps=0)
    code, text = run_on_ranks(argv, 2)
    assert code == 0 and len(losses(colour_set / "run")) == 4, text[-3000:]
    told = re.findall(r"rank (\d) \(.+\): step 3 has taken \S+ minutes so far; it is in (\w+) \(", text)
    assert ("1", "_take_all") in told and any(rank == "0" and place != "_take_all" for rank, place in told), text
