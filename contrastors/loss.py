"""InfoNCE over all ranks, and GradCache: the gradients of a large batch with the memory of a small chunk.

Shapes: N queries in the local batch, K hard negatives a query, M = N(1 + K) document slots of this rank, W world size,
D embedding size, C = W M columns (the documents of all ranks).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from contrastors.distributed import gather_with_grad, rank
from contrastors.rand_state import RandContext

# Logits of a matrix that is formed whole, and of a tile of a larger one: 256 MiB and 64 MiB in fp32, and a few times
# that while the softmax is at work. On a CPU tiles below 32 MiB would take more memory, not less: glibc keeps such
# blocks in its heap and cannot fit them together again (a 65,536 batch with tiles of 31 MiB took all of 24 GiB).
WHOLE_LOGITS, TILE_LOGITS = 2**26, 2**24

Chunk = Mapping[str, torch.Tensor]  # keyword arguments of one forward of the model


class LossOutput(NamedTuple):
    """What one step's contrast gives.

    Attributes:
        loss: Scalar, mean over the local queries.
        accuracy: Scalar, share of local queries whose positive scores strictly above every other unmasked document.
    """

    loss: torch.Tensor
    accuracy: torch.Tensor


class ColumnMask(NamedTuple):
    """Columns that stay out of the softmax; sparse, since false negatives are few.

    Attributes:
        missing: (C,) bool, slots that hold no document: out for every query.
        pairs: (P, 2) int64, (local query, column): a document that is known to answer that query.
    """

    missing: torch.Tensor
    pairs: torch.Tensor


def clip_loss(
    queries: torch.Tensor,
    documents: torch.Tensor,
    logit_scale: Callable[[torch.Tensor], torch.Tensor],
    num_hard_negatives: int = 0,
    mask: ColumnMask | None = None,
    tile: int = 0,
) -> LossOutput:
    """Returns InfoNCE of the local queries against the documents of all ranks.

    Documents are interleaved [positive, negative 1..K] per query: the label of query i on rank r is (i + r N)(1 + K).
    Computed in at least fp32, outside autocast. Collective: every rank must call it, with equal shapes.

    Above a size the logits are formed in tiles of some queries against all columns, one at a time, and formed again in
    the backward: memory stays that of a tile. Loss and gradients are the same up to the order of sums.

    Args:
        queries: (N, D) L2-normalised.
        documents: (M, D) L2-normalised, M = N(1 + K).
        logit_scale: Turns similarities into logits, usually a `LogitScale`.
        num_hard_negatives: K.
        mask: Columns to leave out.
        tile: Queries of a tile; 0 = all, or as many as make a tile of 2^24 logits.

    Raises:
        ValueError: The number of documents is not N(1 + K).
    """
    num_queries, group = len(queries), 1 + num_hard_negatives
    if len(documents) != num_queries * group:
        raise ValueError(
            f"{len(documents)} documents do not divide into {num_queries} queries with 1 positive and "
            f"{num_hard_negatives} hard negatives each"
        )
    with torch.autocast(queries.device.type, enabled=False):
        dtype = torch.promote_types(queries.dtype, torch.float32)
        queries, columns = queries.to(dtype), gather_with_grad(documents.to(dtype))
        labels = (torch.arange(num_queries, device=queries.device) + rank() * num_queries) * group
        tile = tile or (
            num_queries if num_queries * len(columns) <= WHOLE_LOGITS else max(1, TILE_LOGITS // len(columns))
        )
        losses, hits = [], []
        for start in range(0, num_queries, tile):
            rows = slice(start, start + tile)
            inputs = queries[rows], columns, labels[rows], logit_scale, _rows_of(mask, start, tile)
            if tile >= num_queries:
                found = _query_losses(*inputs)
            else:
                found = checkpoint(_query_losses, *inputs, use_reentrant=False, preserve_rng_state=False)
            losses.append(found[0])
            hits.append(found[1])
    return LossOutput(torch.cat(losses).mean(), torch.cat(hits).to(dtype).mean())


def _rows_of(mask: ColumnMask | None, start: int, tile: int) -> ColumnMask | None:
    """Returns the mask of some of its queries."""
    if mask is None:
        return None
    inside = (mask.pairs[:, 0] >= start) & (mask.pairs[:, 0] < start + tile)
    return ColumnMask(mask.missing, mask.pairs[inside] - torch.tensor([start, 0], device=mask.pairs.device))


def _query_losses(
    queries: torch.Tensor,
    columns: torch.Tensor,
    labels: torch.Tensor,
    logit_scale: Callable[[torch.Tensor], torch.Tensor],
    mask: ColumnMask | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the (n,) losses of some queries against all columns, and (n,) whether the positive scores highest."""
    logits = logit_scale(queries @ columns.T)
    if mask is not None:
        # After scaling: -inf times a learned scale would give that scale a NaN gradient.
        logits = logits.masked_fill(mask.missing, -torch.inf)
        logits[mask.pairs[:, 0], mask.pairs[:, 1]] = -torch.inf
    losses = F.cross_entropy(logits, labels, reduction="none")
    with torch.no_grad():
        positive = logits.gather(1, labels[:, None])
        best_other = logits.scatter(1, labels[:, None], -torch.inf).max(dim=1, keepdim=True).values
    # A query that is left with nothing to beat is no hit: its loss is 0 whatever the model does.
    return losses, ((positive > best_other) & best_other.isfinite()).squeeze(1)


def get_chunked_embeddings(
    model: nn.Module, chunks: Sequence[Chunk], num_retained: int = 0
) -> tuple[torch.Tensor, list[RandContext | torch.Tensor]]:
    """Step 1 of GradCache: forwards every chunk, all but the last `num_retained` without graph.

    Args:
        model: Encoder; `model(**chunk)` gives (n, D).
        chunks: Inputs, in order.
        num_retained: Chunks, counted from the end, whose graph stays in memory.

    Returns:
        (sum of n, D) embeddings without graph, and for each chunk what step 3 takes: the random state before it, or,
        where the graph is retained, its embeddings with graph.
    """
    embeddings, states = [], []
    device = next(model.parameters()).device
    for place, chunk in enumerate(chunks):
        is_retained = place >= len(chunks) - num_retained
        before = RandContext(device)
        with torch.set_grad_enabled(is_retained):
            found = model(**chunk)
        embeddings.append(found.detach())
        states.append(found if is_retained else before)
    return torch.cat(embeddings), states


def get_cached_gradients(
    contrast: Callable[[torch.Tensor], LossOutput], embeddings: torch.Tensor, loss_factor: float
) -> tuple[LossOutput, torch.Tensor]:
    """Step 2: the loss on all embeddings as leaves, and the gradient of loss_factor x loss with respect to them.

    Parameters inside `contrast` (the logit scale) receive their gradients here.

    Returns:
        The loss without graph, and the (n, D) cached gradients.
    """
    leaves = embeddings.detach().requires_grad_()
    output = contrast(leaves)
    (output.loss * loss_factor).backward()
    return LossOutput(output.loss.detach(), output.accuracy), leaves.grad


def replay_chunks(
    model: nn.Module, chunks: Sequence[Chunk], states: Sequence[RandContext | torch.Tensor], gradients: torch.Tensor
) -> None:
    """Step 3: pulls the cached gradient of each chunk through its graph; a chunk without one is forwarded again.

    By the chain rule the parameter gradients, summed over chunks, are those of the full batch.

    Args:
        model: Encoder.
        chunks: Inputs, in order.
        states: Of step 1.
        gradients: (sum of n, D) of step 2.
    """
    end = len(gradients)
    # From the last chunk on, so that retained graphs are gone before the first replay needs memory; and always in this
    # order, so that sums round alike however many are retained.
    for chunk, state in zip(reversed(chunks), reversed(states), strict=True):
        if isinstance(state, torch.Tensor):
            embeddings = state
        else:
            with state.replay():
                embeddings = model(**chunk)
        embeddings.backward(gradients[end - len(embeddings) : end])
        end -= len(embeddings)
    assert end == 0, end


class ChunkOutOfMemory(RuntimeError):
    """A chunk did not fit into memory, so the gradients are worth nothing.

    Attributes:
        is_loss_done: Whether the loss, and with it every collective of `contrast`, is behind this rank.
    """

    def __init__(self, is_loss_done: bool):
        super().__init__("a chunk did not fit into memory")
        self.is_loss_done = is_loss_done


@contextmanager
def _naming_out_of_memory(is_loss_done: bool) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ChunkOutOfMemory(is_loss_done) from error


def grad_cache_loss(
    model: nn.Module,
    chunks: Sequence[Chunk],
    contrast: Callable[[torch.Tensor], LossOutput],
    loss_factor: float = 1.0,
    num_retained: int = 0,
    encode_images: Callable[[Chunk], Chunk] | None = None,
) -> LossOutput:
    """Adds the gradients of the full batch to `.grad` with the memory of few chunks; returns the loss without graph.

    It neither zeroes gradients nor averages them over ranks: that is the caller's. Collective where `contrast` is.

    Args:
        model: Encoder, bare or wrapped in DistributedDataParallel; all its backwards run under `no_sync`.
        chunks: Query chunks, then document chunks; each holds the keyword arguments of one forward.
        contrast: Maps the (n, D) embeddings of all chunks, in order, to the loss.
        loss_factor: Multiplies the gradients, not the returned loss (W for `--grad-reduction sum`).
        num_retained: Chunks, counted from the end, whose graph is retained and which are forwarded once; 0 = memory of
            one chunk. A single chunk is always retained: there is nothing to save.
        encode_images: Gives a chunk with features in place of pixels, for both forwards of a chunk that is not
            retained; None = the vision part runs in both.

    Raises:
        ChunkOutOfMemory: In a forward or backward of a chunk.

    Source: GradCache, arXiv 2101.06983, section 3; retained graphs and features computed once are additions.
    """
    num_retained = min(num_retained, len(chunks)) if len(chunks) > 1 else 1
    with model.no_sync() if hasattr(model, "no_sync") else nullcontext():
        with _naming_out_of_memory(is_loss_done=False):
            if encode_images is not None:
                num_replayed = len(chunks) - num_retained
                chunks = [*map(encode_images, chunks[:num_replayed]), *chunks[num_replayed:]]
            embeddings, states = get_chunked_embeddings(model, chunks, num_retained)
        output, gradients = get_cached_gradients(contrast, embeddings, loss_factor)
        with _naming_out_of_memory(is_loss_done=True):
            replay_chunks(model, chunks, states, gradients)
    return output
