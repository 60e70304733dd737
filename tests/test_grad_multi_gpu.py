"""Gradients over ranks (gloo) against a single-process reference that shares no code.

The pytest half starts this file once per world size under torchrun; every rank runs `worker`, the main rank writes what
it found as JSON, and the tests below judge it.

    torchrun --nproc_per_node=2 tests/test_grad_multi_gpu.py MODEL_FOLDER WORK_FOLDER      prints the table
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.gradients import (
    build_model,
    clear_gradients,
    compare,
    embed_by_hand,
    make_pairs,
    reference_loss,
    split_groups,
)
from tests.runs import warm_torchrun

NUM_ROWS = 8
SEED = 123


def build_dataset(pairs, processor, num_negatives, world):
    from contrastors.batches import StepDataset
    from contrastors.data import BatchOrder, build_training_set
    from contrastors.validation import check_image, image_paths

    data = build_training_set(pairs, {p: check_image(p) for p in image_paths(pairs)}, num_negatives)
    order = BatchOrder(NUM_ROWS, NUM_ROWS, seed=0)
    return StepDataset(data, order, processor, num_negatives, NUM_ROWS // world.size, world.rank), order


def contrast(embeddings, batch, scale, num_negatives):
    from contrastors.loss import clip_loss

    queries, documents = embeddings[: len(batch.queries)], embeddings[len(batch.queries) :]
    # Some in tiles, so that tiles are compared over ranks too: their gathers must stay one.
    return clip_loss(queries, documents[batch.slots], scale, num_negatives, batch.mask, tile=3 if num_negatives else 0)


def cached_gradients(model, scale, batch, num_negatives, world, reduction):
    """What the trainer does in one step: GradCache, one flat bucket, average."""
    from contrastors.distributed import GradientBucket
    from contrastors.loss import grad_cache_loss
    from contrastors.rand_state import seed_step

    bucket = GradientBucket([*model.trainable_parameters().values(), *scale.parameters()])
    seed_step(SEED, 0, world.rank)
    chunks = batch.queries.chunks(2) + batch.documents.chunks(2)
    factor = world.size if reduction == "sum" else 1
    run = partial(contrast, batch=batch, scale=scale, num_negatives=num_negatives)
    grad_cache_loss(model, chunks, run, factor)
    bucket.reduce()
    return bucket


def reference_gradients(model, scale, processor, pairs, num_negatives, num_ranks):
    """One process, the concatenated batch, one graph, no GradCache; the sum over ranks of their mean losses."""
    from contrastors.images import open_image
    from contrastors.validation import image_paths

    clear_gradients(model, scale)
    queries = embed_by_hand(model, processor, [processor.encode_query(p.query) for p in pairs])
    paths = image_paths(pairs)
    vectors = embed_by_hand(model, processor, [processor.encode_document(open_image(p)) for p in paths])
    by_path = dict(zip(paths, vectors, strict=True))
    reference_loss(queries, by_path.__getitem__, pairs, num_negatives, scale, num_ranks).backward()
    return split_groups(model, scale)


def reference_with_dropout(model, scale, processor, pairs, num_negatives, world):
    """Each rank's chunks with that rank's random states, all graphs kept, in this one process."""
    from contrastors.distributed import World
    from contrastors.rand_state import seed_step

    clear_gradients(model, scale)
    queries, documents, seen = [], {}, set()
    for rank in range(world.size):
        dataset, order = build_dataset(pairs, processor, num_negatives, World(rank, world.size, world.device))
        batch = dataset[0]
        seed_step(SEED, 0, rank)
        vectors = torch.cat([model(**c) for c in batch.queries.chunks(2) + batch.documents.chunks(2)])
        size = len(batch.queries)
        queries.append(vectors[:size])
        # A document that two ranks hold has another vector on each of them: keep them apart by slot.
        rows = order.rows(0)[rank * size : (rank + 1) * size]
        for place, row in enumerate(rows):
            for slot in range(1 + num_negatives):
                documents[row, slot] = vectors[size:][batch.slots[place * (1 + num_negatives) + slot]]
        seen |= set(rows.tolist())
    assert seen == set(range(NUM_ROWS))
    order_rows = order.rows(0)
    slot_pairs, slot_of = give_slots_paths(pairs, order_rows, num_negatives)
    table = {path: documents[slot] for path, slot in slot_of.items()}
    loss = reference_loss(torch.cat(queries), table.__getitem__, slot_pairs, num_negatives, scale, world.size)
    loss.backward()
    return split_groups(model, scale)


def give_slots_paths(pairs, rows, num_negatives):
    """Rows whose every slot has a path of its own (a hard link), and path -> (row, slot): copies can be told apart."""
    slot_pairs, slot_of = [], {}
    for row in rows:
        pair, links = pairs[row], []
        for slot, path in enumerate([pair.positive, *pair.negatives[:num_negatives]]):
            link = f"{path}.{row}.{slot}.{os.getpid()}.png"
            Path(link).unlink(missing_ok=True)
            os.link(path, link)
            links.append(link)
            slot_of[link] = (row, slot)
        slot_pairs.append(type(pair)(pair.index, pair.line, pair.query, links[0], links[1:]))
    return slot_pairs, slot_of


def check_gather(world) -> dict:
    from contrastors.distributed import gather_objects, gather_with_grad

    ones = torch.ones(3, 2, requires_grad=True)
    gathered = gather_with_grad(ones * (world.rank + 1))
    gathered.sum().backward()
    wanted = torch.arange(1, world.size + 1).repeat_interleave(3)[:, None].expand(-1, 2).float()
    backward = [
        torch.equal(gradient, torch.full((3, 2), float(world.size * (rank + 1))))
        for rank, gradient in enumerate(gather_objects(ones.grad))
    ]
    return {"gather_order": torch.equal(gathered.detach(), wanted), "gather_backward": backward}


def check_case(model_folder, pairs, num_negatives, vision, dropout, reduction, world) -> dict:
    from contrastors.distributed import gather_objects

    model, scale, processor = build_model(Path(model_folder), torch.float64, dropout, vision)
    dataset, order = build_dataset(pairs, processor, num_negatives, world)
    batch = dataset[0]
    bucket = cached_gradients(model, scale, batch, num_negatives, world, reduction)
    copies = gather_objects(bucket.flat.clone())
    case = {
        "ranks_agree": all(torch.equal(copies[0], copy) for copy in copies),
        "norm": float(bucket.flat.norm()),
        "missing_slots": int(batch.mask.missing.sum()),
        "masked_pairs": sum(gather_objects(len(batch.mask.pairs))),
    }
    if world.is_main:
        cached = split_groups(model, scale)
        if dropout:
            total = reference_with_dropout(model, scale, processor, pairs, num_negatives, world)
        else:
            ordered = [pairs[row] for row in order.rows(0)]
            total = reference_gradients(model, scale, processor, ordered, num_negatives, world.size)
        # The mean over ranks of their mean losses is the loss of one process on the whole batch.
        one_process = {name: gradient / world.size for name, gradient in total.items()}
        case["groups"] = compare(cached, one_process)
    return case


def check_query_side(model_folder, pairs, num_negatives, reduction, queries_of_a_chunk, world) -> dict:
    """Query-side tuning: documents are constants; the rest of the step is the trainer's."""
    from contrastors import distributed
    from contrastors.batches import DocumentVectors, contrast_batch
    from contrastors.chunking import Chunking, add_gradients, cut_batch
    from contrastors.distributed import GradientBucket, gather_objects
    from contrastors.images import open_image

    model, scale, processor = build_model(Path(model_folder), torch.float64)
    dataset, order = build_dataset(pairs, processor, num_negatives, world)
    paths = dataset.data.documents.paths
    with torch.no_grad(), model.without_adapter():
        items = [processor.encode_document(open_image(path)) for path in paths]
        vectors = embed_by_hand(model, processor, items)
    dataset.vectors = DocumentVectors(vectors.numpy(), range(len(paths)))
    batch = dataset[0]
    bucket = GradientBucket([*model.trainable_parameters().values(), *scale.parameters()])
    chunking = Chunking(documents=1, queries=queries_of_a_chunk)
    cut = cut_batch(batch.queries, batch.documents, chunking, processor.merge_size)
    work = partial(contrast_batch, batch, cut.places, scale, num_negatives, 0)
    whole, distributed._reduce_scatter = distributed._reduce_scatter, None  # frozen documents want no gradient back
    add_gradients(model, cut, work, world.size if reduction == "sum" else 1, chunking)
    distributed._reduce_scatter = whole
    bucket.reduce()
    copies = gather_objects(bucket.flat.clone())
    case = {"ranks_agree": all(torch.equal(copies[0], copy) for copy in copies), "chunks": len(cut.chunks)}
    if world.is_main:
        cached = split_groups(model, scale)
        clear_gradients(model, scale)
        ordered = [pairs[row] for row in order.rows(0)]
        by_content = {Path(path).read_bytes(): vector for path, vector in zip(paths, vectors, strict=True)}
        queries = embed_by_hand(model, processor, [processor.encode_query(p.query) for p in ordered])
        find = lambda path: by_content[Path(path).read_bytes()]  # noqa: E731
        (reference_loss(queries, find, ordered, num_negatives, scale, world.size) / world.size).backward()
        case["groups"] = compare(cached, split_groups(model, scale))
    return case


def check_ddp(model_folder, pairs, world) -> dict:
    """Wrapped in DDP no reducer may run inside the driver, so every rank keeps its own gradient."""
    from contrastors.distributed import gather_objects

    gradients = []
    for wrapped in (False, True):
        model, scale, processor = build_model(Path(model_folder), vision=True)
        encoder = torch.nn.parallel.DistributedDataParallel(model) if wrapped else model
        dataset, _ = build_dataset(pairs, processor, 0, world)
        gradients.append(local_gradients(encoder, model, scale, dataset[0], world))
    return {
        "ddp_keeps_local_gradients": torch.equal(*gradients),
        "local_gradients_differ_between_ranks": not torch.equal(*gather_objects(gradients[0])[:2]),
    }


def check_out_of_memory(model_folder, pairs, world) -> dict:
    """The last rank runs out of memory in its first forward, then in a replay; the others must not wait for ever."""
    from contrastors.biqwen3 import BiQwen3
    from contrastors.chunking import Chunking, add_gradients, cut_batch
    from contrastors.distributed import barrier, gather_objects

    model, scale, processor = build_model(Path(model_folder))
    dataset, _ = build_dataset(pairs, processor, 0, world)
    batch, whole, outcomes = dataset[0], BiQwen3.forward, []
    for fails_with_grad in (False, True):

        def fail(self, fails=fails_with_grad, **inputs):
            if torch.is_grad_enabled() == fails:
                raise torch.OutOfMemoryError("simulated")
            return whole(self, **inputs)

        BiQwen3.forward = fail if world.rank == world.size - 1 else whole
        cut = cut_batch(batch.queries, batch.documents, Chunking(documents=2), processor.merge_size)
        work = partial(contrast, batch=batch, scale=scale, num_negatives=0)
        outcome = add_gradients(model, cut, work, 1.0, Chunking(documents=2))
        outcomes.append(gather_objects(outcome.needs_halves))
        barrier()
    BiQwen3.forward = whole
    return {"out_of_memory": outcomes}


def check_reduction(world) -> dict:
    """Arithmetic that rounds nowhere: rank r's loss is the sum of weight x (r + 1)."""
    from contrastors.distributed import GradientBucket

    weight = torch.nn.Parameter(torch.tensor([2.0, 4.0]))
    bucket = GradientBucket([weight])
    ((weight * (world.rank + 1)).sum() * world.size).backward()
    bucket.reduce()
    total = torch.full((2,), float(sum(range(1, world.size + 1))))
    return {"loss_times_w_then_average_is_the_total": torch.equal(weight.grad, total)}


def worker(model_folder: str, work_folder: str) -> dict:
    """Runs every comparison; the reference is computed on the main rank alone."""
    from contrastors import distributed

    world = distributed.start("cpu")
    found: dict = (
        {"world_size": world.size, "cases": {}, "query_side": {}} | check_gather(world) | check_reduction(world)
    )
    for num_negatives in (0, 2):
        pairs = make_pairs(Path(work_folder) / f"rank{world.rank}_{num_negatives}", NUM_ROWS, num_negatives)
        if num_negatives:  # one rank whose rows list no negatives at all
            _, order = build_dataset(pairs, build_model(Path(model_folder))[2], num_negatives, world)
            for row in order.rows(0)[-(NUM_ROWS // world.size) :]:
                pairs[row].negatives.clear()
        for vision, dropout, reduction in itertools.product((False, True), (0.0, 0.2), ("sum", "mean")):
            name = f"K={num_negatives} vision={vision} dropout={dropout} {reduction}"
            case = check_case(model_folder, pairs, num_negatives, vision, dropout, reduction, world)
            found["cases"][name] = case
        for backward, reduction in itertools.product(("direct", "gradcache"), ("sum", "mean")):
            size = NUM_ROWS if backward == "direct" else 1
            case = check_query_side(model_folder, pairs, num_negatives, reduction, size, world)
            found["query_side"][f"K={num_negatives} {backward} {reduction}"] = case
    found |= check_ddp(model_folder, pairs, world) | check_out_of_memory(model_folder, pairs, world)
    distributed.barrier()
    distributed.stop()
    return found


def local_gradients(encoder, model, scale, batch, world):
    from contrastors.loss import grad_cache_loss
    from contrastors.rand_state import seed_step

    seed_step(SEED, 0, world.rank)
    chunks = batch.queries.chunks(2) + batch.documents.chunks(2)
    grad_cache_loss(encoder, chunks, partial(contrast, batch=batch, scale=scale, num_negatives=0))
    gradients = (p.grad if p.grad is not None else torch.zeros_like(p) for p in model.trainable_parameters().values())
    return torch.cat([g.flatten() for g in gradients])


# ---------------------------------------------------------------------------------------------------------- pytest half


# One xdist worker a world size, or each worker would start the ranks anew.
@pytest.fixture(
    scope="module",
    params=[pytest.param(size, marks=pytest.mark.xdist_group(f"ranks{size}")) for size in (2, 4)],
)
def ranks(request, tiny_model, tmp_path_factory):
    work = tmp_path_factory.mktemp(f"ranks{request.param}")
    code, text = warm_torchrun(request.param, __file__, tiny_model, work)
    assert code == 0, text[-3000:]
    return json.loads((work / "found.json").read_text())


pytestmark = pytest.mark.dist


def test_gather_puts_rows_in_rank_order_and_its_backward_sums_over_ranks(ranks):
    assert ranks["gather_order"] and all(ranks["gather_backward"])


def test_all_ranks_hold_equal_non_zero_gradients(ranks):
    for name, case in ranks["cases"].items():
        assert case["ranks_agree"], name
        assert case["norm"] > 0, name


def test_gradients_equal_those_of_one_process(ranks):
    """Norm ratio W for sum, 1 for mean; cosine >= 0.9998, with dropout too."""
    assert len(ranks["cases"]) == 16
    for name, case in ranks["cases"].items():
        factor = ranks["world_size"] if name.endswith("sum") else 1
        for group, (_, cosine, ratio) in case["groups"].items():
            assert cosine >= 0.9998, (name, group, cosine)
            assert abs(ratio / factor - 1) < 1e-5, (name, group, ratio)


def test_query_side_gradients_equal_those_of_one_process_on_both_backward_paths(ranks):
    assert len(ranks["query_side"]) == 8
    for name, case in ranks["query_side"].items():
        assert case["ranks_agree"], name
        assert case["chunks"] == (1 if "direct" in name else NUM_ROWS // ranks["world_size"]), name
        factor = ranks["world_size"] if name.endswith("sum") else 1
        for group, (_, cosine, ratio) in case["groups"].items():
            assert cosine >= 0.999999, (name, group, cosine)
            assert abs(ratio / factor - 1) < 1e-6, (name, group, ratio)


def test_the_cases_held_missing_slots_and_false_negatives(ranks):
    for name, case in ranks["cases"].items():
        assert case["masked_pairs"] > 0, name
        assert (case["missing_slots"] > 0) == name.startswith("K=2"), name


def test_a_ddp_wrapped_model_keeps_local_gradients_under_no_sync(ranks):
    assert ranks["ddp_keeps_local_gradients"] and ranks["local_gradients_differ_between_ranks"]


def test_a_rank_that_runs_out_of_memory_keeps_nobody_waiting(ranks):
    alone = [False] * (ranks["world_size"] - 1) + [True]
    assert ranks["out_of_memory"] == [alone, alone]


def test_loss_times_w_then_average_is_the_gradient_of_the_total(ranks):
    assert ranks["loss_times_w_then_average_is_the_total"]


if __name__ == "__main__":
    results = worker(sys.argv[1], sys.argv[2])
    if int(os.environ.get("RANK", 0)) == 0:
        (Path(sys.argv[2]) / "found.json").write_text(json.dumps(results))
        for title, row in results["cases"].items():
            worst = max(
                abs(r[2] / (results["world_size"] if title.endswith("sum") else 1) - 1) for r in row["groups"].values()
            )
            print(f"{title:44} cosine {min(r[1] for r in row['groups'].values()):.10f}  norm ratio off by {worst:.1e}")
