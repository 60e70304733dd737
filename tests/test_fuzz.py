"""A few seeds of every fuzzing target; `python -m tests.fuzz SECONDS` goes on from there."""

from __future__ import annotations

import random

import pytest

from tests.fuzz import TARGETS, Fuzz

NUM_SEEDS = {
    "images": 400,
    "records": 300,
    "verdicts": 2000,
    "replies": 150,
    "checkpoints": 60,
    "flags": 300,
    "runs": 12,
}


@pytest.fixture(scope="module")
def fuzzing(tmp_path_factory):
    made = Fuzz(tmp_path_factory.mktemp("fuzz"))
    yield made
    made.service.__exit__(None, None, None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", TARGETS)
def test_damaged_and_silly_inputs_break_no_promise(fuzzing, target):
    outcomes = {getattr(fuzzing, target)(random.Random(f"{target} {seed}")) for seed in range(NUM_SEEDS[target])}
    assert len(outcomes) > 1, f"{target}: every input ended as {outcomes}: the damage reaches nothing"
