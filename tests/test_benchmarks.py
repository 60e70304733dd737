"""Every benchmark runs at its smallest size, and what it says of exactness holds. No times are compared."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from benchmarks.common import alternate, fit_exponent
from benchmarks.models import TINY, LiveSavedBytes, build_model, make_inputs
from tests.conftest import ROOT


def rows_of(capsys, name: str, *argv: object) -> dict[str, list[dict]]:
    """Runs a benchmark with `--json` and returns its rows by table."""
    assert importlib.import_module(f"benchmarks.{name}").main(["--json", *map(str, argv)]) == 0
    tables: dict[str, list[dict]] = {}
    for line in capsys.readouterr().out.splitlines():
        row = json.loads(line)
        tables.setdefault(row.pop("benchmark"), []).append(row)
    return tables


def test_loader_ships_an_eighth_of_the_bytes_and_the_same_pixels(capsys):
    tables = rows_of(capsys, "loader", "--number", 2, "--rounds", 1, "--documents", 64)
    _, plain, ours = tables["loader: tiles"]
    assert plain["MB a tile"] == pytest.approx(8 * ours["MB a tile"]) and ours["largest difference"] == 0
    before, after, _ = tables["loader: padding"]
    assert before["padded / real"] > 1.15 and 1 <= after["padded / real"] <= 1.05


def test_loader_prints_markdown_tables(capsys):
    from benchmarks.common import show

    show("a title", [{"way": "x", "value": 1234.5678}, {"way": "y", "value": 2}], as_json=False)
    assert capsys.readouterr().out == "a title\n\n| way | value |\n|---|---|\n| x | 1,235 |\n| y | 2 |\n\n"


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_loss_in_tiles_equals_the_whole_and_takes_less(capsys):
    options = ("--sizes", 3072, "--negatives", 0, "--rounds", 1, "--compare", 256)
    tables = rows_of(capsys, "loss", *options)
    whole, tiles = tables["loss: memory and time"]
    assert (whole["way"], tiles["way"]) == ("whole", "tiles")
    assert tiles["MiB of the loss"] < whole["MiB of the loss"] / 2 and whole["MiB of the loss"] > 2 * 36
    (compared,) = tables["loss: tiles against the whole matrix"]
    assert compared["difference of the loss"] < 1e-6 and compared["relative L2 of the gradients"] < 1e-6


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_exact_search_of_mining_finds_what_faiss_finds(capsys):
    pytest.importorskip("faiss")
    tables = rows_of(capsys, "mine", "--queries", 50, "--documents", 3000, "--dim", 8, "--top", 5, "--rounds", 1)
    ours, other = tables["mine: exact search"]
    assert (ours["way"], other["way"], other["of IndexFlatIP"]) == ("ours", "IndexFlatIP", 1)
    assert all(row["seconds"] > 0 and row["documents"] == 3000 for row in (ours, other))
    (compared,) = tables["mine: ours against IndexFlatIP"]
    assert compared["places"] == 250 and compared["largest difference of scores"] < 1e-6


def test_another_document_or_one_twice_is_no_tie():
    from benchmarks.mine import TIE, compare_found, make_vectors

    queries, documents = make_vectors(3, 4, 1), make_vectors(40, 4, 2)
    found = np.argsort(-(queries @ documents.T), axis=1)
    right, wrong, twice = found[:, :5], found[:, [0, 1, 2, 3, 5]], found[:, [0, 1, 2, 3, 3]]
    assert compare_found(queries, documents, right, right)["largest difference of scores"] == 0
    for other in (wrong, twice):
        compared = compare_found(queries, documents, right, other)
        assert compared["places that differ"] == 3 and compared["largest difference of scores"] > TIE
    assert compare_found(queries, documents, twice, twice)["largest difference of scores"] == float("inf")


@pytest.mark.dist
def test_one_bucket_is_one_call_and_a_step_makes_three(capsys):
    tables = rows_of(capsys, "collectives", "--ranks", 2, "--lora-r", 1, "--rounds", 1)
    flat, single = tables["collectives: gradients"]
    assert (flat["calls"], single["calls"], flat["tensors"]) == (1, 416, 416) and flat["relative L2"] < 1e-6
    (step,) = tables["collectives: a training step"]
    assert step["of a step"] == 3


def test_scaling_finds_flop_and_retained_graphs_in_proportion_to_the_batch_and_classic_memory_constant(capsys):
    options = ("--batches", 4, 8, "--negatives", 0, 1, "--sides", 64, 128, "--batch", 4, "--rounds", 1)
    tables = rows_of(capsys, "scaling", *options)
    batch = tables["scaling: exponents (against the batch, 1 + negatives, the visual tokens of a tile)"][0]
    assert batch["GFLOP"] == pytest.approx(1, abs=0.01) and batch["MiB saved"] == pytest.approx(0, abs=0.01)
    assert batch["MiB saved, all retained"] == pytest.approx(1, abs=0.05)


def test_the_gpu_script_runs_on_the_cpu_and_all_its_ways_give_one_gradient(capsys):
    options = ("--device", "cpu", "--tiny", "--batch", 4, "--chunk", 2, "--side", 64, "--rounds", 1)
    rows = rows_of(capsys, "gpu", *options)["gpu: steps"]
    assert {"classic GradCache", "vision once", "all retained"} <= {row["way"] for row in rows}
    assert max(row["relative L2 to classic"] for row in rows) < 1e-5
    assert all(row["tokens/s"] > 0 for row in rows)


def test_grad_cache_ways_of_a_tiny_model_give_one_gradient():
    from benchmarks.grad_cache import Benchmark

    benchmark = Benchmark(build_model(TINY), make_inputs(4, side=64), 2)
    wanted = benchmark.gradient(benchmark.full_batch)
    for retained, once in ((0, False), (0, True), (2, True), (99, False)):
        found = benchmark.gradient(lambda r=retained, o=once: benchmark.grad_cache(r, o))
        assert (found - wanted).norm() / wanted.norm() < 1e-5


def test_graphs_held_do_not_grow_with_the_batch_and_never_exceed_the_budget(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    options = ("--batches", 8, 16, "--batch", 8, "--rounds", 1, "--plot", tmp_path / "budgets.png")
    tables = rows_of(capsys, "budgets", *options)
    small, large = tables["budgets: by batch, nothing retained"]
    assert large["MiB held"] == pytest.approx(small["MiB held"], rel=0.05)
    assert small["MiB held"] == pytest.approx(small["MiB of the largest graph"], rel=0.05)
    assert large["MiB held, all retained"] > 1.8 * small["MiB held, all retained"]  # the counter does see graphs
    classic, below, *enough = tables["budgets: --retain-graphs auto"]
    assert classic["retained"] == below["retained"] == 0
    assert all(row["MiB held"] <= row["MiB"] for row in enough)
    retained = [row["retained"] for row in enough]
    assert retained == sorted(retained) and retained[0] == 1 and retained[-1] == enough[-1]["chunks"]
    assert enough[-1]["MiB held"] > 2 * classic["MiB held"]
    assert all(row["relative L2 to no retaining"] == 0 for row in (below, *enough))
    assert (tmp_path / "budgets.png").stat().st_size > 10_000


def test_a_counter_of_held_bytes_tells_a_budget_that_is_not_kept():
    from benchmarks.budgets import is_kept

    row = {"MiB": 10.0, "MiB of a full graph": 6.0, "MiB held": 10.1, "retained": 2}
    assert not is_kept(row) and is_kept(row | {"MiB held": 10.0})
    assert not is_kept(row | {"MiB": 5.0}) and is_kept(row | {"MiB": 5.0, "retained": 0})


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=[pytest.mark.dist, pytest.mark.slow])])
def test_every_combination_gives_the_gradients_of_one_process_and_one_graph(capsys, ranks):
    tables = rows_of(capsys, "gradients", "--rows", 4, "--ranks", ranks)
    rows = tables["gradients"]
    assert len({tuple(map(str, list(row.values())[:6])) for row in rows}) == len(rows) == 72
    assert {row["ranks"] for row in rows} == {ranks}
    assert max(row["relative L2"] for row in rows) < 1e-5 and max(row["logit scale"] for row in rows) < 1e-5
    shared, different = (
        {row["documents"] for row in rows if row["slots"] == slots} for slots in ("share documents", "all different")
    )
    assert max(shared) < min(different)
    controls = tables["gradients: least difference of a control, at least 1e-02"]
    assert all(min(row["relative L2"], row["logit scale"]) > 1e-2 for row in controls)
    assert tables["gradients: worst difference by setting, at most 1e-05"][-1]["combinations"] == 72


PEAK = """
import torch
from benchmarks.common import PeakMemory
with PeakMemory() as peak:
    torch.zeros(32 * 2**20).add_(1)
print(peak.bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_peak_memory_sees_what_is_gone_at_the_end():
    """In a fresh process, as the benchmarks use it: what earlier tests left may go in the meantime."""
    done = subprocess.run([sys.executable, "-c", PEAK], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert 64 * 2**20 < int(done.stdout) < 256 * 2**20


def test_alternating_runs_take_turns_and_exponents_are_those_of_powers():
    calls: list[str] = []
    found = alternate({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 2)
    assert calls == ["a", "b", "a", "b"] and set(found) == {"a", "b"}
    assert fit_exponent([1, 2, 8], [5, 20, 320]) == pytest.approx(2)


def test_live_saved_bytes_count_a_storage_once_and_forget_what_is_freed():
    linear = torch.nn.Linear(4, 4)
    with LiveSavedBytes(linear) as saved:
        x = torch.ones(1024, 4, requires_grad=True)
        for _ in range(3):
            (linear(x) * x).sum().backward()
    assert 2 * x.nbytes <= saved.peak < 4 * x.nbytes and saved.now == 0
