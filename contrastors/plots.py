"""The picture of a comparison: similarity histograms and recall curves. Needs matplotlib (extra `plots`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from contrastors.metrics import wilson_interval
from contrastors.records import atomic_output

DEEPEST = 100  # right end of a recall curve


def recall_curve(ranks: np.ndarray, corpus_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns (k,) depths, (k,) recall at each, and (2, k) ends of its 95 % intervals.

    Args:
        ranks: (Q,) rank of the first positive of each query, from 1; within a tie its mean.
        corpus_size: Documents; no deeper k is drawn.
    """
    depths = np.arange(1, min(DEEPEST, corpus_size) + 1)
    recall = np.asarray([(ranks <= k).mean() for k in depths])
    ends = np.asarray([wilson_interval(r, len(ranks)) for r in recall]).T
    return depths, recall, ends


def draw_comparison(
    picture: str | Path, per_query: Mapping[str, Mapping[str, np.ndarray]], corpus_size: int, title: str
) -> None:
    """Draws one histogram panel a model, and recall over k for all of them.

    Args:
        picture: PNG to write.
        per_query: Model name -> per-query `rank`, `positive_similarity`, `hardest_negative`, each (Q,).
        corpus_size: Documents of the corpus.
        title: Above all panels.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # no pyplot: nothing global, no display needed
    except ImportError as error:
        raise ValueError("--plot needs matplotlib: pip install '.[plots]'") from error
    figure = Figure(figsize=(4.2 * (len(per_query) + 1), 3.6), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(1, len(per_query) + 1)
    shown = ("positive_similarity", "hardest_negative")
    similarities = {name: [v[n][np.isfinite(v[n])] for n in shown] for name, v in per_query.items()}
    finite = np.concatenate([values for both in similarities.values() for values in both])
    bins = np.linspace(finite.min() - 1e-6, finite.max() + 1e-6, 41) if len(finite) else 40
    for axes, (name, (positive, hardest)) in zip(panels, similarities.items(), strict=False):
        axes.hist(positive, bins=bins, alpha=0.6, label="positive")
        axes.hist(hardest, bins=bins, alpha=0.6, label="hardest negative")
        axes.set(title=name, xlabel="cosine", ylabel="queries")
        axes.legend(fontsize="small")
    for axes in panels[1:-1]:
        axes.sharey(panels[0])
    for name, values in per_query.items():
        depths, recall, (low, high) = recall_curve(values["rank"], corpus_size)
        (line,) = panels[-1].plot(depths, recall, label=name, linewidth=1.4)
        panels[-1].fill_between(depths, low, high, alpha=0.2, color=line.get_color())
    panels[-1].set(title="recall@k, 95 % intervals", xlabel="k", ylim=(0, 1.02), xscale="log")
    panels[-1].grid(alpha=0.3)
    panels[-1].legend(fontsize="small")
    with atomic_output(picture) as temporary:
        figure.savefig(temporary, format="png", dpi=110)
