"""What a run will take, told before it begins: parameters, tokens, FLOP, memory by chunk, disk, collectives.

From the checkpoint's config alone, in seconds: the model is built on the meta device, and no weight is read.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from transformers import AutoModel

from contrastors.biqwen3 import BiQwen3, read_config
from contrastors.chunking import FREE_SHARE, GIB, count_fitting_graphs, count_free_bytes
from contrastors.cli import require_model_folder
from contrastors.costs import (
    DOCUMENT_PROMPT,
    QUERY_TOKENS,
    Setting,
    estimate_chunk,
    language_flop,
    loss_bytes,
    step_flop,
    vision_flop,
)

CHUNKS_SHOWN = (1, 2, 4, 8, 16, 32, 64)
CAVEAT = (
    "FLOP are relative to the least in the table. All tiles are taken to be of the largest size, all documents of a "
    "step to be different; what an allocator wastes comes on top."
)


class Sizes(NamedTuple):
    """Parameters of each part, and tensors of the adapter."""

    language: int
    vision: int
    adapter: int
    tensors: int


def count_parameters(config: Any, lora_r: int, lora_vit: bool) -> Sizes:
    """Returns what the real model, built on the meta device, is made of."""
    with torch.device("meta"):
        model = BiQwen3(AutoModel.from_config(config).requires_grad_(False), [0.5] * 3, [0.5] * 3)
        vision = sum(p.numel() for p in model.base.visual.parameters())
        language = sum(p.numel() for p in model.parameters()) - vision
        model.add_adapter(lora_r, lora_r, 0.0, lora_vit)
    adapter = model.trainable_parameters().values()
    return Sizes(language, vision, sum(p.numel() for p in adapter), len(adapter))


class ChunkRow(NamedTuple):
    """The costs of a step at one size of chunk.

    Attributes:
        documents: Of a chunk.
        chunks: Of a step, queries' chunks included.
        graph: Bytes of the graph of one full chunk.
        features: Bytes of vision features kept through a step.
        retained: Graphs that fit into the budget.
        total: Bytes of everything, at the worst moment.
        flop: Of a step.
    """

    documents: int
    chunks: int
    graph: int
    features: int
    retained: int
    total: int
    flop: int


def fixed_bytes(sizes: Sizes, setting: Setting) -> dict[str, int]:
    """Returns what is in memory all the time: adapter, gradients and optimizer are fp32."""
    return {
        "weights": setting.width * (sizes.language + sizes.vision),
        "adapter": 4 * sizes.adapter,
        "gradient bucket": 4 * sizes.adapter,
        "optimizer": 8 * sizes.adapter,
    }


def plan_chunk(config: Any, sizes: Sizes, setting: Setting, budget: int, wanted: int | str) -> ChunkRow:
    """Returns the costs of a step.

    Args:
        config: Of the model.
        sizes: Of the model.
        setting: Of the run, with its chunk.
        budget: Bytes for graphs and features, which `auto` fills.
        wanted: Graphs to retain, or `auto`.
    """
    cost = estimate_chunk(config, setting, sizes.adapter)
    chunks, visual = sum(setting.num_chunks), setting.documents * setting.visual
    if wanted == "auto":
        if cost.working + cost.graph + visual * cost.features > budget:
            cost, setting = cost._replace(features=0), replace(setting, reuse_features=False)
        wanted = count_fitting_graphs(cost, budget, visual, chunks)
    retained = chunks if chunks == 1 else min(chunks, wanted)
    replayed = max(0, setting.num_chunks[1] - retained) * setting.documents_chunk
    features = min(setting.documents, replayed) * setting.visual * cost.features
    peak = features + max(retained * cost.graph + loss_bytes(setting), max(1, retained) * cost.graph + cost.working)
    total = sum(fixed_bytes(sizes, setting).values()) + peak
    flop = sum(step_flop(config, setting, retained).values())
    return ChunkRow(setting.documents_chunk, chunks, cost.graph, features, retained, total, flop)


def count_collectives(sizes: Sizes, setting: Setting, embedding_size: int) -> dict[str, int]:
    """Returns the collectives of a step, with the bytes that each rank hands in; none in one process."""
    if setting.world_size == 1:
        return {}
    own = 4 * setting.documents * embedding_size
    return {
        "gather of document embeddings": own,
        "its backward (reduce-scatter)": own * setting.world_size,
        "sum of gradients, loss and stop signals": 4 * (sizes.adapter + 1 + 8),
    }


def show_bytes(number: float) -> str:
    """Returns a size in the unit that suits it."""
    return f"{number / GIB:,.2f} GiB" if number >= GIB else f"{number / 2**20:,.1f} MiB"


def make_table(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    """Returns a markdown table."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * lines[0].count(" | ") + "---|", *lines[1:]])


def make_setting(args: argparse.Namespace, config: Any, world_size: int, on_cuda: bool) -> Setting:
    """Returns the setting of the training script's flags."""
    limit = args.max_num_visual_tokens
    documents = args.batch_size * (1 + args.num_hard_negatives)
    chunk = min(args.grad_cache_chunk, args.chunk_tokens // limit if args.chunk_tokens else documents, documents)
    return Setting(
        queries=args.batch_size, group=1 + args.num_hard_negatives, visual=limit,
        query_tokens=min(QUERY_TOKENS, args.max_query_tokens), world_size=world_size, documents_chunk=max(1, chunk),
        queries_chunk=args.query_chunk, lora_r=args.lora_r, dropout=args.lora_dropout > 0, lora_vit=args.lora_vit,
        checkpointing=args.gradient_checkpointing, reuse_features=args.reuse_vision_features and not args.lora_vit,
        half=args.dtype == "bf16" or (args.dtype == "auto" and on_cuda), on_cuda=on_cuda, loss_tile=args.loss_tile,
    )  # fmt: skip


def make_plan(args: argparse.Namespace, world_size: int) -> str:
    """Returns the plan of a run as text.

    Args:
        args: Of the training script.
        world_size: W.

    Raises:
        ValueError: The model's config cannot be used.
    """
    require_model_folder(args.model)
    config = read_config(args.model)
    on_cuda = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    setting = make_setting(args, config, world_size, on_cuda)
    sizes = count_parameters(config, args.lora_r, args.lora_vit)
    budget, note = find_budget(args.memory_budget_gb, on_cuda, sum(fixed_bytes(sizes, setting).values()))
    wanted = args.retain_graphs
    if wanted is None:
        wanted = "auto" if on_cuda or args.memory_budget_gb else 0
    shown = sorted({*(c for c in CHUNKS_SHOWN if c <= setting.documents), setting.documents_chunk})
    rows = [plan_chunk(config, sizes, replace(setting, documents_chunk=chunk), budget, wanted) for chunk in shown]
    own = rows[shown.index(setting.documents_chunk)]
    ending = f"--retain-graphs {wanted}" + (f": {note}" if wanted == "auto" else "")
    return "\n".join(
        [*describe(config, sizes, setting, own), "", tabulate_chunks(rows, own), "", f"{ending}. {CAVEAT}"]
    )


def find_budget(budget_gb: float, on_cuda: bool, fixed: int) -> tuple[int, str]:
    """Returns the bytes that `--retain-graphs auto` may fill, and where they come from.

    Args:
        budget_gb: `--memory-budget-gb`.
        on_cuda: Whether the run computes on cuda.
        fixed: Bytes that weights and optimizer will take first.
    """
    if budget_gb:
        return round(budget_gb * GIB), f"--memory-budget-gb {budget_gb:g}"
    if on_cuda and not torch.cuda.is_available():
        return 0, "no cuda device is here to ask for its memory, so none is counted; give --memory-budget-gb"
    free = count_free_bytes(torch.device("cuda" if on_cuda else "cpu"))
    budget = max(0, int(FREE_SHARE * (free - fixed)))
    return budget, f"{budget / GIB:,.1f} GiB, 80 % of what the model leaves free here"


def describe(config: Any, sizes: Sizes, setting: Setting, own: ChunkRow) -> list[str]:
    """Returns the lines above the table of chunks."""
    flop, fixed = step_flop(config, setting, own.retained), fixed_bytes(sizes, setting)
    visual = setting.documents * setting.visual
    tokens = setting.queries * setting.query_tokens + setting.documents * setting.document_tokens
    one = vision_flop(config.vision_config, setting.visual * config.vision_config.spatial_merge_size**2, setting)
    share = one.forward / (one + language_flop(config.text_config, setting.document_tokens, setting)).forward
    collectives = count_collectives(sizes, setting, config.text_config.hidden_size)
    handed = ", ".join(f"{name} {show_bytes(size)}" for name, size in collectives.items())
    passes = ", ".join(f"{name} {number / 1e12:,.2f}" for name, number in flop.items())
    memory = ", ".join(f"{name} {show_bytes(size)}" for name, size in fixed.items())
    return [
        f"model: {sizes.language / 1e6:,.2f} M parameters in the language part, {sizes.vision / 1e6:,.2f} M in the "
        f"vision part, {'bf16' if setting.half else 'fp32'}",
        f"adapter: {sizes.adapter / 1e6:,.2f} M parameters in {sizes.tensors} tensors",
        f"step of a rank: {setting.queries} queries of {setting.query_tokens} tokens, {setting.documents} documents of "
        f"{setting.visual} visual and {DOCUMENT_PROMPT} other tokens; {tokens:,} tokens, {visual:,} of them visual",
        f"global batch: {setting.queries * setting.world_size} queries against "
        f"{setting.documents * setting.world_size} columns, world size {setting.world_size}",
        f"TFLOP of a step of a rank: {sum(flop.values()) / 1e12:,.2f} ({passes}); "
        f"vision is {share:.0%} of a document's forward",
        f"memory of a rank all the time: {show_bytes(sum(fixed.values()))} ({memory})",
        f"logits in the loss: {show_bytes(loss_bytes(setting))}",
        f"disk of a checkpoint: {show_bytes(12 * sizes.adapter)} (adapter and optimizer)",
        f"collectives of a step: {len(collectives)}{' (' + handed + ')' if handed else ''}",
    ]


def tabulate_chunks(rows: list[ChunkRow], own: ChunkRow) -> str:
    """Returns the table of chunks; the run's own is marked."""
    least = min(row.flop for row in rows)
    cells = [
        (
            f"{row.documents}{' (this run)' if row is own else ''}", row.chunks, show_bytes(row.graph),
            show_bytes(row.features), row.retained, show_bytes(row.total), f"{row.flop / least:.2f}",
        )
        for row in rows
    ]  # fmt: skip
    head = ("documents a chunk", "chunks", "a graph", "vision features", "graphs retained", "memory in all", "FLOP")
    return make_table(head, cells)
