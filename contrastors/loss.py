"""InfoNCE over all ranks, and GradCache: the gradients of a large batch with the memory of a small chunk.

Shapes: N queries in the local batch, K hard negatives a query, M = N(1 + K) document slots of this rank, W world size,
D embedding size, C = W M columns (the documents of all ranks).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from contrastors.distributed import gather_with_grad, rank
from contrastors.rand_state import RandContext

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
) -> LossOutput:
    """Returns InfoNCE of the local queries against the documents of all ranks.

    Documents are interleaved [positive, negative 1..K] per query: the label of query i on rank r is (i + r N)(1 + K).
    Computed in at least fp32, outside autocast. Collective: every rank must call it, with equal shapes.

    Args:
        queries: (N, D) L2-normalised.
        documents: (M, D) L2-normalised, M = N(1 + K).
        logit_scale: Turns similarities into logits, usually a `LogitScale`.
        num_hard_negatives: K.
        mask: Columns to leave out.

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
        columns = gather_with_grad(documents.to(dtype))
        logits = logit_scale(queries.to(dtype) @ columns.T)
        labels = (torch.arange(num_queries, device=logits.device) + rank() * num_queries) * group
        if mask is not None:
            # After scaling: -inf times a learned scale would give that scale a NaN gradient.
            logits = logits.masked_fill(mask.missing, -torch.inf)
            out = torch.zeros_like(logits, dtype=torch.bool)
            out[mask.pairs[:, 0], mask.pairs[:, 1]] = True
            logits = logits.masked_fill(out, -torch.inf)
        loss = F.cross_entropy(logits, labels)
        with torch.no_grad():
            positive = logits.gather(1, labels[:, None])
            best_other = logits.scatter(1, labels[:, None], -torch.inf).max(dim=1, keepdim=True).values
            accuracy = (positive > best_other).to(dtype).mean()
    return LossOutput(loss, accuracy)


def get_chunked_embeddings(model: nn.Module, chunks: Sequence[Chunk]) -> tuple[torch.Tensor, list[RandContext]]:
    """Step 1 of GradCache: forwards every chunk without graph.

    Args:
        model: Encoder; `model(**chunk)` gives (n, D).
        chunks: Inputs, in order.

    Returns:
        (sum of n, D) embeddings without graph, and the random state before each chunk.
    """
    embeddings, states = [], []
    device = next(model.parameters()).device
    for chunk in chunks:
        states.append(RandContext(device))
        with torch.no_grad():
            embeddings.append(model(**chunk))
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
    model: nn.Module, chunks: Sequence[Chunk], states: Sequence[RandContext], gradients: torch.Tensor
) -> None:
    """Step 3: forwards each chunk again from its random state, and pulls its cached gradient through the graph.

    The surrogate is dot(embedding, cached gradient): by the chain rule its parameter gradients, summed over chunks, are
    those of the full batch.
    """
    start = 0
    for chunk, state in zip(chunks, states, strict=True):
        with state.replay():
            embeddings = model(**chunk)
        surrogate = torch.sum(embeddings * gradients[start : start + len(embeddings)])
        surrogate.backward()
        start += len(embeddings)
    assert start == len(gradients), (start, len(gradients))


def grad_cache_loss(
    model: nn.Module,
    chunks: Sequence[Chunk],
    contrast: Callable[[torch.Tensor], LossOutput],
    loss_factor: float = 1.0,
) -> LossOutput:
    """Adds the gradients of the full batch to `.grad` with the memory of one chunk; returns the loss without graph.

    It neither zeroes gradients nor averages them over ranks: that is the caller's. Collective where `contrast` is.

    Args:
        model: Encoder, bare or wrapped in DistributedDataParallel; all its backwards run under `no_sync`.
        chunks: Query chunks, then document chunks; each holds the keyword arguments of one forward.
        contrast: Maps the (n, D) embeddings of all chunks, in order, to the loss.
        loss_factor: Multiplies the gradients, not the returned loss (W for `--grad-reduction sum`).

    Source: GradCache, arXiv 2101.06983, section 3.
    """
    with model.no_sync() if hasattr(model, "no_sync") else nullcontext():
        embeddings, states = get_chunked_embeddings(model, chunks)
        output, gradients = get_cached_gradients(contrast, embeddings, loss_factor)
        replay_chunks(model, chunks, states, gradients)
    return output
