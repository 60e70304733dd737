"""How a step is cut into forwards, and how many of their graphs stay in memory: speed and memory, never gradients."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image
from torch import nn

from contrastors.biqwen3 import BiQwen3
from contrastors.distributed import gather_objects
from contrastors.images import MAX_ASPECT_RATIO, MIN_VISUAL_TOKENS
from contrastors.loss import Chunk, ChunkOutOfMemory, LossOutput, get_cached_gradients, grad_cache_loss
from contrastors.processing import BiQwen3Processor, Inputs
from contrastors.rand_state import RandContext

MAX_PADDED_TO_REAL = 1.05  # of a chunk that is packed by tokens
FREE_SHARE = 0.8  # of free memory, for graphs; the rest is for the optimizer, the loss and what allocators waste
GIB = 2**30


@dataclass(slots=True)
class Chunking:
    """How this rank cuts its steps; a checkpoint records it.

    Attributes:
        documents: Most documents of a chunk.
        tokens: Most visual tokens of a chunk of documents; 0 = documents are not packed by tokens.
        queries: Queries of a chunk; 0 = as many as have no more tokens than one document chunk.
        num_retained: Chunks, counted from the end, whose graph is retained.
        retained_tokens: A chunk with more padded tokens than this is not retained, nor are those before it; 0 = any
            is. It is the size for which `num_retained` was chosen.
        reuse_features: Whether the vision part runs once for a chunk that is forwarded twice.
        query_tokens: Beside frozen documents: most padded tokens of a chunk of queries, where `queries` is 0.
    """

    documents: int
    tokens: int = 0
    queries: int = 0
    num_retained: int = 0
    retained_tokens: int = 0
    reuse_features: bool = False
    query_tokens: int = 0

    def use_less_memory(self, num_retained: int) -> bool:
        """Retains half as many graphs or, at none, no features; returns False where neither is left to give up.

        Args:
            num_retained: Graphs that were retained when memory ran out.
        """
        if num_retained:
            self.num_retained = num_retained // 2
        elif self.reuse_features:
            self.reuse_features = False
        else:
            return False
        return True

    def halve(self) -> bool:
        """Halves the chunks; returns False where they cannot be smaller. All ranks must do it in the same step."""
        if self.documents == 1 and self.queries <= 1 and self.query_tokens <= 1:
            return False
        self.query_tokens //= 2
        if self.tokens:  # never to 0, which would mean no limit
            self.documents = min(self.documents, self.tokens // MIN_VISUAL_TOKENS)
            self.tokens = max(MIN_VISUAL_TOKENS, self.tokens // 2)
        self.documents = max(1, self.documents // 2)
        self.queries = max(1, self.queries // 2) if self.queries else 0
        return True


def pack_by_tokens(lengths: Sequence[int], visual: Sequence[int], size: int, max_visual: int) -> list[list[int]]:
    """Returns the places of the documents of each chunk, largest documents first.

    Small tiles do not ride padded beside full ones: the padded tokens of a chunk are at most 1.05 times its real ones.

    Args:
        lengths: Tokens of each document, prompt included.
        visual: Visual tokens of each document.
        size: Most documents of a chunk.
        max_visual: Most visual tokens of a chunk; a larger document stands alone.
    """
    plan: list[list[int]] = []
    for place in sorted(range(len(lengths)), key=lambda p: (-lengths[p], p)):
        chunk = [*plan[-1], place] if plan else [place]
        fits = len(chunk) <= size and sum(visual[p] for p in chunk) <= max_visual
        padded, real = len(chunk) * lengths[chunk[0]], sum(lengths[p] for p in chunk)
        if plan and fits and padded <= MAX_PADDED_TO_REAL * real:
            plan[-1] = chunk
        else:
            plan.append([place])
    return plan


class Cut(NamedTuple):
    """A step of one rank, cut into chunks.

    Attributes:
        chunks: Query chunks, then document chunks.
        num_queries: Rows of the query chunks.
        places: (documents,) int64, row of each document among those of the document chunks.
    """

    chunks: list[Chunk]
    num_queries: int
    places: torch.Tensor


def cut_batch(queries: Inputs, documents: Inputs | torch.Tensor, chunking: Chunking, merge_size: int) -> Cut:
    """Returns the chunks of a step.

    Args:
        queries: Of this rank.
        documents: Of this rank, each once; vectors of a frozen document side are not cut, but leave the queries alone.
        chunking: Sizes.
        merge_size: A visual token stands for merge_size^2 patches.
    """
    if isinstance(documents, torch.Tensor):
        size = chunking.queries or max(1, chunking.query_tokens // max(queries.lengths))
        return Cut(queries.chunks(size), len(queries), torch.empty(0, dtype=torch.int64, device=documents.device))
    room = chunking.documents * max(documents.lengths)
    if chunking.tokens:
        visual = (documents.grids.prod(dim=1) // merge_size**2).tolist()
        plan = pack_by_tokens(documents.lengths, visual, chunking.documents, chunking.tokens)
        room = max(len(chunk) * documents.lengths[chunk[0]] for chunk in plan)
        document_chunks = documents.make_chunks(plan)
        order = torch.tensor([place for chunk in plan for place in chunk])
    else:
        document_chunks = documents.chunks(chunking.documents)
        order = torch.arange(len(documents))
    query_chunk = chunking.queries or max(1, room // max(queries.lengths))
    places = order.argsort().to(documents.token_ids.device)
    return Cut(queries.chunks(query_chunk) + document_chunks, len(queries), places)


def count_retained(chunks: Sequence[Chunk], chunking: Chunking) -> int:
    """Returns how many chunks of a step, counted from the end, keep their graph."""
    count = 0
    for chunk in reversed(chunks[max(0, len(chunks) - chunking.num_retained) :]):
        if chunking.retained_tokens and chunk["input_ids"].numel() > chunking.retained_tokens:
            break
        count += 1
    return count


class Outcome(NamedTuple):
    """What became of a rank's part of a step.

    Attributes:
        output: Loss and accuracy; not a number where memory ran out.
        gave_up_own: This rank ran out of memory, and will do with less of its own: the step must be done again.
        needs_halves: This rank ran out of memory, and only smaller chunks, on all ranks, will do.
    """

    output: LossOutput
    gave_up_own: bool = False
    needs_halves: bool = False


def add_gradients(
    model: BiQwen3,
    cut: Cut,
    contrast: Callable[[torch.Tensor], LossOutput],
    loss_factor: float,
    chunking: Chunking,
) -> Outcome:
    """Adds this rank's gradients of a step to `.grad`. Collective, also on a rank that runs out of memory.

    Args:
        model: Encoder.
        cut: Of the step.
        contrast: As in `grad_cache_loss`.
        loss_factor: As in `grad_cache_loss`.
        chunking: Of this rank; where memory runs out, changed to what needs less.
    """
    retained = count_retained(cut.chunks, chunking)
    encode_images = model.encode_images if chunking.reuse_features else None
    try:
        return Outcome(grad_cache_loss(model, cut.chunks, contrast, loss_factor, retained, encode_images))
    except ChunkOutOfMemory as error:
        is_loss_done = error.is_loss_done
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if not is_loss_done:  # the other ranks wait in the collectives of the loss
        shape = cut.num_queries + len(cut.places), model.embedding_size
        get_cached_gradients(contrast, torch.zeros(shape, device=cut.places.device), loss_factor)
    nothing = torch.full((), torch.nan, device=cut.places.device)
    is_enough = chunking.use_less_memory(retained)
    return Outcome(LossOutput(nothing, nothing), gave_up_own=is_enough, needs_halves=not is_enough)


# -------------------------------------------------------------------------------------------------------- measured cost


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts the bytes that graphs save for their backward inside the block: each storage once, parameters not at all.

    Args:
        model: Its parameters and buffers are in memory anyway.

    Attributes:
        total: Bytes so far.
    """

    def __init__(self, model: nn.Module):
        self.total = 0
        self._seen = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        super().__init__(self._count, lambda tensor: tensor)

    def __enter__(self) -> SavedBytes:
        super().__enter__()
        return self

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.total += storage.nbytes()
        return tensor


class ChunkCost(NamedTuple):
    """What one full chunk of documents costs.

    Attributes:
        graph: Bytes that its graph holds from forward to backward.
        working: Bytes that its backward needs beside that.
        features: Bytes of the vision features of one visual token; 0 where they are not reused.
        tokens: Its padded tokens.
    """

    graph: int
    working: int
    features: int
    tokens: int


def make_full_chunk(processor: BiQwen3Processor, chunking: Chunking) -> Chunk:
    """Returns the most expensive chunk of documents that can occur: tiles of as many visual tokens as the limits allow.

    One token counts as padding: attention with a mask keeps more of its inputs than without.
    """
    side = processor.patch_size * processor.merge_size
    limit = processor.max_num_visual_tokens
    if chunking.tokens:
        limit = max(MIN_VISUAL_TOKENS, min(limit, chunking.tokens // chunking.documents))
    narrowest = max(1, math.ceil((limit / MAX_ASPECT_RATIO) ** 0.5))
    rows = max(range(narrowest, math.isqrt(limit) + 1), key=lambda r: (limit // r * r, r))
    item = processor.encode_document(Image.new("RGB", (limit // rows * side, rows * side)))
    chunk = Inputs.from_items([item] * chunking.documents, processor.pad_id).chunks(chunking.documents)[0]
    chunk["attention_mask"][-1, -1] = 0
    return chunk


def measure_chunk(model: BiQwen3, chunk: Chunk, reuse_features: bool) -> ChunkCost:
    """Returns what a chunk costs; draws no random number that a later step could miss, and leaves no gradient.

    On cuda by the allocator, elsewhere by the tensors that autograd saves.
    """
    device = next(model.parameters()).device
    num_tokens, features = chunk["input_ids"].numel(), 0
    with RandContext(device).replay():
        if reuse_features:
            found = model.encode_images(chunk)["image_features"]
            pieces = [*found.pooler_output, *(piece for layer in found.deepstack_features for piece in layer)]
            num_visual = sum(map(len, found.pooler_output))
            features = sum(piece.numel() * piece.element_size() for piece in pieces) // num_visual
            del found, pieces
        if device.type != "cuda":
            with SavedBytes(model) as saved:
                model(**chunk)
            return ChunkCost(saved.total, 0, features, num_tokens)
        with torch.no_grad():
            model(**chunk)  # libraries take their workspaces at the first call
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        embeddings = model(**chunk)
        graph = torch.cuda.memory_allocated(device) - before
        torch.autograd.grad(embeddings.sum(), [*model.trainable_parameters().values()], allow_unused=True)
        working = torch.cuda.max_memory_allocated(device) - before - graph
    return ChunkCost(graph, working, features, num_tokens)


def count_free_bytes(device: torch.device) -> int:
    """Returns the memory that new tensors could take: of the cuda device, or this rank's share of the machine's."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))
    except OSError:  # no Linux
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # a container may have less; "max" is no number
        most, now = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.max", "memory.current"))
        free = min(free, most - now)
    return free // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def count_fitting_graphs(cost: ChunkCost, budget: int, num_visual: int, num_chunks: int) -> int:
    """Returns how many graphs of full chunks fit into a budget, beside the vision features of the chunks replayed.

    Args:
        cost: Of a full chunk.
        budget: Bytes.
        num_visual: Most visual tokens of a step.
        num_chunks: Most chunks of a step.
    """
    room = budget - cost.working
    if room >= num_chunks * cost.graph:
        return num_chunks
    return max(0, (room - num_visual * cost.features) // cost.graph)


def choose_retained(
    model: BiQwen3, processor: BiQwen3Processor, chunking: Chunking, budget_gb: float, batch_size: int, group: int
) -> str:
    """Sets how many graphs are retained, as many as fit, from one measured chunk; returns a line for the log.

    Where the vision features of a step do not fit, they are not reused. Ranks agree on the least of what they found.
    Collective.

    Args:
        model: With its adapter, in train mode.
        processor: Its processor.
        chunking: Changed in place.
        budget_gb: Memory for graphs and features in GiB; 0 = 80 % of what is free.
        batch_size: Queries of this rank in a step.
        group: Documents of a query, 1 + K.
    """
    device = next(model.parameters()).device
    chunk = {name: tensor.to(device) for name, tensor in make_full_chunk(processor, chunking).items()}
    cost = measure_chunk(model, chunk, chunking.reuse_features)
    num_documents = batch_size * group
    num_chunks = num_documents if chunking.tokens else -(-num_documents // chunking.documents)
    if chunking.tokens:  # packing lets a chunk be padded by so much
        graph, tokens = (math.ceil(n * MAX_PADDED_TO_REAL) for n in (cost.graph, cost.tokens))
        cost = cost._replace(graph=graph, tokens=tokens)
    budget = int(budget_gb * GIB) if budget_gb else int(FREE_SHARE * count_free_bytes(device))
    num_visual = num_documents * processor.max_num_visual_tokens
    if cost.working + cost.graph + num_visual * cost.features > budget:
        chunking.reuse_features, cost = False, cost._replace(features=0)
    found = count_fitting_graphs(cost, budget, num_visual, num_chunks + batch_size), chunking.reuse_features
    counts, reuses = zip(*gather_objects(found), strict=True)
    chunking.num_retained, chunking.reuse_features, chunking.retained_tokens = min(counts), all(reuses), cost.tokens
    return (
        f"the graph of a full chunk takes {cost.graph / 2**20:,.1f} MiB (and {cost.working / 2**20:,.1f} MiB in its "
        f"backward), vision features kept in a step {num_visual * cost.features / 2**20:,.1f} MiB at most; of "
        f"{budget / GIB:,.2f} GiB, {chunking.num_retained} graphs are retained"
    )
