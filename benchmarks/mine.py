"""Exact search of mining against faiss.IndexFlatIP: seconds, peak memory, and whether both find the same documents.

Random unit vectors. Each figure comes from a fresh process, the two ways by turns: seconds from vectors in memory to
the result (with faiss also of filling its index), bytes beyond the vectors. Both have as many threads as torch
(OMP_NUM_THREADS); the last but one column compares CPU seconds, which other work changes less. A million documents
and 100,000 queries take half an hour on one idle core.

  python -m benchmarks.mine --queries 20000 --documents 200000
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import PeakMemory, Times, alternate, describe_machine, make_parser, show
from contrastors.index import search

ROOT = Path(__file__).resolve().parent.parent
MIB = 2**20
SIZES = ("queries", "documents", "dim", "top")
TIE = 1e-6  # scores nearer than this are in an order that rounding gave them


def make_vectors(count: int, dim: int, seed: int) -> np.ndarray:
    """Random unit vectors (count, dim), fp32."""
    vectors = np.random.default_rng(seed).standard_normal((count, dim), dtype=np.float32)
    return np.divide(vectors, np.linalg.norm(vectors, axis=1, keepdims=True), out=vectors)


def search_ours(queries: np.ndarray, documents: np.ndarray, top: int) -> np.ndarray:
    return search("exact", queries, documents, top)[1]


def search_faiss(queries: np.ndarray, documents: np.ndarray, top: int) -> np.ndarray:
    import faiss

    faiss.omp_set_num_threads(torch.get_num_threads())
    index = faiss.IndexFlatIP(documents.shape[1])
    index.add(documents)
    return index.search(queries, top)[1]


WAYS = {"ours": search_ours, "IndexFlatIP": search_faiss}


def run_way(name: str, queries: np.ndarray, documents: np.ndarray, top: int, output: str) -> dict[str, float]:
    """Seconds and bytes of one search in this process; the numbers it finds go to a file."""
    WAYS[name](queries[:8], documents[:64], top)  # what libraries take at the first call does not count
    found: list[np.ndarray] = []
    with PeakMemory() as peak:
        times = alternate({name: lambda: found.append(WAYS[name](queries, documents, top))}, 1)[name]
    np.save(output, found[0])
    return times._asdict() | {"bytes": peak.bytes}


def run_fresh(args: argparse.Namespace, name: str, output: Path) -> dict[str, float]:
    """The same in a process of its own."""
    sizes = [part for size in SIZES for part in (f"--{size}", str(getattr(args, size)))]
    command = [sys.executable, "-m", "benchmarks.mine", *sizes, "--case", name, str(output)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def compare_found(
    queries: np.ndarray, documents: np.ndarray, ours: np.ndarray, other: np.ndarray, block: int = 1024
) -> dict[str, float]:
    """How far two results are apart, by scores computed afresh from the numbers; documents found twice count as far."""
    differing, largest = 0, 0.0
    for start in range(0, len(queries), block):
        rows = slice(start, start + block)
        scores = [np.einsum("qd,qkd->qk", queries[rows], documents[n[rows]]) for n in (ours, other)]
        differing += int((ours[rows] != other[rows]).sum())
        largest = max(largest, float(np.abs(scores[0] - scores[1]).max()))
    if any((np.diff(np.sort(numbers, axis=1), axis=1) == 0).any() for numbers in (ours, other)):
        largest = float("inf")
    return {"places": ours.size, "places that differ": differing, "largest difference of scores": largest}


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__, "mine")
    parser.add_argument("--queries", type=int, default=20_000, help="queries")
    parser.add_argument("--documents", type=int, default=200_000, help="documents")
    parser.add_argument("--dim", type=int, default=64, help="numbers of a vector")
    parser.add_argument("--top", type=int, default=20, help="documents looked for")
    parser.add_argument("--rounds", type=int, default=2, help="alternating runs of each; the fastest counts")
    parser.add_argument("--case", nargs=2, metavar=("WAY", "FILE"), help="one way in this process")
    args = parser.parse_args(argv)
    queries, documents = make_vectors(args.queries, args.dim, 1), make_vectors(args.documents, args.dim, 2)
    if args.case:
        print(json.dumps(run_way(args.case[0], queries, documents, args.top, args.case[1])))
        return 0
    if not args.json:
        print(f"{describe_machine()}\n")
    ways = [name for name in WAYS if name == "ours" or find_spec("faiss")]
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / f"{name}.npy" for name in ways}

        def run(name: str) -> None:
            runs[name].append(run_fresh(args, name, files[name]))

        alternate({name: functools.partial(run, name) for name in ways}, args.rounds)
        found = {name: np.load(files[name]) for name in ways}
    sizes = {size: getattr(args, size) for size in SIZES}
    best = {name: {key: min(run[key] for run in runs[name]) for key in Times._fields} for name in ways}
    rows = [
        {
            **sizes, "way": name, "seconds": times["seconds"], "CPU seconds": times["cpu_seconds"],
            f"of {ways[-1]}": times["cpu_seconds"] / best[ways[-1]]["cpu_seconds"],
            "MiB beyond the vectors": max(run["bytes"] for run in runs[name]) / MIB,
        }
        for name, times in best.items()
    ]  # fmt: skip
    show("mine: exact search", rows, args.json)
    if len(ways) < 2:
        return 0
    compared = compare_found(queries, documents, *found.values())
    show("mine: ours against IndexFlatIP", [compared], args.json)
    return 0 if compared["largest difference of scores"] <= TIE else 1


if __name__ == "__main__":
    sys.exit(main())
