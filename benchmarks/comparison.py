"""How honest are the intervals and tests of verify_embeddings.py? Simulated queries with a known difference.

python -m benchmarks.comparison --queries 400 --simulations 500
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

import numpy as np

from contrastors.comparison import compare


@dataclass(frozen=True, slots=True)
class Simulated:
    """Shares over simulations: intervals that hold the true difference, verdicts other than "not distinguishable"."""

    coverage: float
    alarms: float


def draw_hits(generator: np.random.Generator, num_queries: int, gain: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns recall@1 of two models on the same queries; the true difference of the population is `gain`.

    Queries differ in difficulty; the second model loses 15 % of the first one's answers and wins some of the rest.
    """
    chance = 1 / (1 + np.exp(-generator.normal(size=num_queries)))  # 1/2 on average
    first = generator.random(num_queries) < chance
    flips = generator.random(num_queries)
    second = np.where(first, flips >= 0.15, flips < 0.15 + 2 * gain)
    return first.astype(float), second.astype(float)


def draw_reciprocal_ranks(
    generator: np.random.Generator, num_queries: int, gain: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns reciprocal ranks of two models on the same queries, of one law, plus `gain` for the second."""
    difficulty = generator.normal(1, 1, num_queries)
    ranks = np.maximum(1, np.round(np.exp(difficulty + generator.normal(0, 0.5, (2, num_queries)))))
    return 1 / ranks[0], 1 / ranks[1] + gain


DRAWS = {"recall@1": draw_hits, "mrr": draw_reciprocal_ranks}


def simulate(num_queries: int, gain: float, num: int = 500, metric: str = "recall@1", seed: int = 0) -> Simulated:
    """Returns coverage and alarms over `num` simulated evaluations with a true difference of `gain`."""
    generator = np.random.default_rng(seed)
    found = [compare(metric, *DRAWS[metric](generator, num_queries, gain)) for _ in range(num)]
    covered = sum(one.low <= gain <= one.high for one in found)
    return Simulated(covered / num, sum(not one.verdict.startswith("not") for one in found) / num)


def main(argv: list[str] | None = None) -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.comparison", description=__doc__.split("\n")[0])
    parser.add_argument("--queries", type=int, default=400, help="queries of an evaluation")
    parser.add_argument("--simulations", type=int, default=500, help="evaluations")
    args = parser.parse_args(argv)
    print(f"n = {args.queries}, {args.simulations} simulations")
    print("| metric | true difference | interval covers it | called better or worse |\n|---|---|---|---|")
    for metric in DRAWS:
        for gain in (0.0, 0.04, 0.08):
            found = simulate(args.queries, gain, args.simulations, metric)
            print(f"| {metric} | {gain:.2f} | {100 * found.coverage:.1f} % | {100 * found.alarms:.1f} % |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
