"""What the doctor measures, on the user's own model, data and flags: one `Check` a line, with its bound.

A patient is made as training makes its run: same rows, same order, same adapter, same seeds, same chunks.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import dataclass

import torch

from contrastors.batches import Batch, StepDataset, contrast_batch, load_batches
from contrastors.biqwen3 import BiQwen3
from contrastors.chunking import Chunking, cut_batch
from contrastors.data import BatchOrder, TrainingSet, build_training_set
from contrastors.distributed import GradientBucket, World
from contrastors.evaluation import COLLAPSED, mean_pairwise_cosine
from contrastors.gates import (
    LARGEST_DEVIATION,
    compare_with_transformers,
    embed_probes,
    largest,
    make_probes,
    measure_invariance,
    rope_keepers,
)
from contrastors.images import open_image
from contrastors.loading import load_bi_encoder
from contrastors.logit_scale import LogitScale
from contrastors.loss import LossOutput
from contrastors.processing import BiQwen3Processor
from contrastors.records import read_pairs
from contrastors.validation import check_images, image_paths

NUM_PROBES = 3
MOVED_B = 0.02  # standard deviation: B starts at zero, which hides every gradient of A


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table.

    Attributes:
        name: What was measured.
        figure: What was found.
        bound: What it must be; "" = it is told and not judged.
        is_ok: Whether it holds; None = not done.
        sentence: Where something is off what that means, where it was not done why.
    """

    name: str
    figure: str
    bound: str = ""
    is_ok: bool | None = True
    sentence: str = ""


def judge(name: str, figure: str, bound: str, is_ok: bool, sentence: str) -> Check:
    """Returns the line of a check; the sentence stays only where it is off."""
    return Check(name, figure, bound, is_ok, "" if is_ok else sentence)


# -------------------------------------------------------------------------------------------------------------- patient


@dataclass(slots=True)
class Patient:
    """Model, data and flags as one rank of a training run holds them.

    Attributes:
        args: Flags.
        world: This rank.
        data: The rows that were read.
        model: With an adapter whose B has moved.
        processor: Its processor.
        logit_scale: Its temperature.
        bucket: Gradients of all that trains.
    """

    args: argparse.Namespace
    world: World
    data: TrainingSet
    model: BiQwen3
    processor: BiQwen3Processor
    logit_scale: LogitScale
    bucket: GradientBucket | None = None

    def dataset(self, num_rows: int, num_ranks: int = 1) -> StepDataset:
        """Returns the batches of a rank with `num_rows` rows of each global batch of num_rows x num_ranks."""
        args = self.args
        order = BatchOrder(len(self.data.rows), num_rows * num_ranks, args.seed)
        return StepDataset(
            self.data, order, self.processor, args.num_hard_negatives, num_rows, self.world.rank,
            max_image_pixels=args.max_image_pixels,
        )  # fmt: skip

    def first_batch(self, num_rows: int, num_ranks: int = 1) -> Batch:
        """Returns the batch of step 0, on the device."""
        (batch,) = load_batches(self.dataset(num_rows, num_ranks), 0, 1, 0, self.world.device)
        return batch.to(self.world.device)

    def chunks(self, batch: Batch) -> list[dict[str, torch.Tensor]]:
        """Returns query chunks, then document chunks, of the sizes that training takes."""
        chunking = Chunking(self.args.grad_cache_chunk, queries=self.args.query_chunk)
        return cut_batch(batch.queries, batch.documents, chunking, self.processor.merge_size).chunks

    def contrast(self, embeddings: torch.Tensor, batch: Batch) -> LossOutput:
        """Returns the loss of the embeddings [queries, distinct documents] of a batch."""
        places = torch.arange(len(batch.documents), device=embeddings.device)
        return contrast_batch(batch, places, self.logit_scale, self.args.num_hard_negatives, 0, embeddings)


def read_rows(args: argparse.Namespace) -> tuple[TrainingSet, list[Check]]:
    """Returns the first rows of `--train-jsonl`, and a line about them. Every image of them is decoded."""
    pairs, _ = read_pairs(args.train_jsonl, args.max_train_rows)
    paths = image_paths(pairs, args.num_hard_negatives > 0)
    facts = {fact.path: fact for fact in check_images(paths, args.max_image_pixels, args.num_workers)}
    data = build_training_set(pairs, facts, args.num_hard_negatives)
    wanted, bad = args.num_hard_negatives, data.bad_rows
    filled = sum(min(wanted, len(row.negatives)) for row in data.rows)
    slots = f", {filled} of {wanted * len(data.rows)} slots for hard negatives filled" if wanted else ""
    figure = f"{len(pairs)} read, {len(data.rows)} usable, {len(data.documents)} documents{slots}"
    reason = f"first line {bad[0].line}: {bad[0].path}: {bad[0].reason}" if bad else ""
    if wanted and not filled:
        reason = f"no row has a usable neg_chunk_paths, so --num-hard-negatives {wanted} has nothing to take"
    is_ok = len(bad) <= args.max_bad_fraction * len(pairs) and (not wanted or filled > 0)
    return data, [judge("rows", figure, f"bad <= {args.max_bad_fraction:.0%}", is_ok, f"{args.train_jsonl}: {reason}")]


def load_patient(args: argparse.Namespace, world: World, data: TrainingSet) -> Patient:
    """Returns the base model with its data; no adapter yet."""
    model, processor = load_bi_encoder(
        args.model, world.device, args.dtype, args.attn_implementation, args.max_num_visual_tokens,
        args.max_query_tokens,
    )  # fmt: skip
    return Patient(args, world, data, model, processor, LogitScale(args.temperature).to(world.device))


def add_moved_adapter(patient: Patient) -> list[Check]:
    """Puts on the adapter of a fresh training run, and moves its B matrices away from zero. Collective."""
    args, model = patient.args, patient.model
    torch.manual_seed(args.seed)
    model.add_adapter(args.lora_r, args.lora_alpha, args.lora_dropout, args.lora_vit)
    if args.gradient_checkpointing:
        model.enable_gradient_checkpointing()
    generator = torch.Generator().manual_seed(args.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(MOVED_B * torch.randn(parameter.shape, generator=generator))
    trainable = model.trainable_parameters().values()
    patient.bucket = GradientBucket([*trainable, *patient.logit_scale.parameters()])
    patient.bucket.share_parameters()
    figure = f"LoRA r {args.lora_r}, dropout {args.lora_dropout:g}; B drawn with deviation {MOVED_B:g}, not zero"
    return [Check("adapter", figure)]


# ------------------------------------------------------------------------------------------- inputs and embeddings


def show_prompt(processor: BiQwen3Processor, token_ids: list[int]) -> str:
    """Returns the decoded prompt in one line; a run of image slots becomes `<|image_pad|> x 64`."""
    parts = []
    for is_slot, run in itertools.groupby(token_ids, key=lambda token: token == processor.image_token_id):
        ids = list(run)
        if is_slot:
            parts.append(f"{processor.tokenizer.decode(ids[:1])} x {len(ids)}")
        else:
            parts.append(processor.tokenizer.decode(ids, clean_up_tokenization_spaces=False))
    return " ".join(parts).replace("\n", "\\n")


def check_inputs(patient: Patient) -> list[Check]:
    """Tells token ids and pixels as the model sees them."""
    args, processor, rows = patient.args, patient.processor, patient.data.rows
    queries = [processor.encode_query(row.query) for row in rows]
    truncated = sum(query.truncated for query in queries)
    longest = max(len(query.token_ids) for query in queries)
    row = rows[0]
    path = patient.data.documents.paths[row.positive]
    image = open_image(path, args.max_image_pixels)
    document = processor.encode_document(image)
    num_slots = document.token_ids.count(processor.image_token_id)
    frames, height, width = document.grid
    num_tokens = frames * height * width // processor.merge_size**2
    size = processor.patch_size
    pixels = f"{image.width} x {image.height} -> {width * size} x {height * size} pixels, {num_tokens} visual tokens"
    limit = args.max_num_visual_tokens
    is_ok = num_slots == num_tokens <= limit
    sentence = f"{path}: {num_slots} image slots, {num_tokens} visual tokens, --max-num-visual-tokens {limit}"
    return [
        Check("queries", f"{truncated} of {len(queries)} cut, the longest has {longest} tokens"),
        judge("image", f"{pixels}, {num_slots} slots", f"<= {limit}, equal", is_ok, sentence),
        Check("query as seen", show_prompt(processor, queries[0].token_ids)),
        Check("document as seen", show_prompt(processor, document.token_ids)),
    ]


def probe_sources(patient: Patient) -> tuple[list[str], list]:
    """Returns the queries, each once, and the pictures of a few documents."""
    rows, documents = patient.data.rows, patient.data.documents
    paths = list(dict.fromkeys(documents.paths[row.positive] for row in rows))[:NUM_PROBES]
    images = [open_image(path, patient.args.max_image_pixels) for path in paths]
    return list(dict.fromkeys(row.query for row in rows)), images


@torch.no_grad()
def check_base_embeddings(patient: Patient) -> list[Check]:
    """Tells whether the base model's vectors are finite, apart, and those that plain transformers gives."""
    model = patient.model.eval()
    batch = patient.first_batch(patient.args.batch_size)
    vectors = torch.cat([model(**chunk) for chunk in patient.chunks(batch)])
    num_bad = int((~torch.isfinite(vectors).all(dim=1)).sum())
    queries, documents = vectors[: len(batch.queries)], vectors[len(batch.queries) :]
    likeness = max(mean_pairwise_cosine(v) if len(v) > 1 else 0.0 for v in (queries, documents))
    sentence = "embeddings hardly differ, or are not finite: random or damaged weights, or a wrong dtype"
    figure = f"{num_bad} not finite, mean cosine of different inputs {likeness:.4f}"
    is_ok = num_bad == 0 and likeness <= COLLAPSED
    scores = queries @ documents.T
    own = scores.gather(1, batch.slots[:: 1 + patient.args.num_hard_negatives, None])
    others = (scores.sum() - own.sum()) / max(1, scores.numel() - len(own))
    found = compare_with_transformers(model, patient.args.model, patient.processor, *probe_sources(patient))
    deviation = largest(list(found.values()))
    second = "prompt, pixels or pooling are not those of plain transformers with the checkpoint's own processor"
    return [
        judge("embeddings", figure, f"0, <= {COLLAPSED:g}", is_ok, sentence),
        Check("base similarity", f"positives {own.mean():.4f}, other documents {others:.4f}"),
        judge_deviation("against plain transformers", deviation, LARGEST_DEVIATION[model.base.dtype], second),
    ]


def judge_deviation(name: str, deviation: float, bound: float, sentence: str) -> Check:
    """Returns the line of a cosine deviation."""
    sentence = f"{sentence} (largest cosine deviation {deviation:.1e})"
    return judge(name, f"largest 1 - cosine {deviation:.1e}", f"<= {bound:g}", deviation <= bound, sentence)


def check_invariance(patient: Patient) -> list[Check]:
    """Tells whether an embedding depends on its input alone."""
    model = patient.model.eval()
    queries, images = probe_sources(patient)
    probes = make_probes(patient.processor, queries[:NUM_PROBES], images)
    found = measure_invariance(model, probes)
    bound = LARGEST_DEVIATION[model.base.dtype]
    meaning = {
        "batch": ("alone / beside others", "embeddings depend on their neighbours: padding is pooled or attended to"),
        "padding side": ("right / left padding", "embeddings depend on the side of the padding"),
        "order": ("first / after others", "embeddings depend on what was embedded before: a stale rope state"),
    }
    checks = [judge_deviation(meaning[key][0], value, bound, meaning[key][1]) for key, value in found.items()]
    embed_probes(model, probes.documents, probes.pad_id)
    embed_probes(model, probes.queries, probes.pad_id)
    kept = rope_keepers(model)
    sentence = f"{', '.join(kept)} keeps the rope offsets of images through a forward of texts: they can go stale"
    figure = f"offsets of {len(kept)} modules left after a forward of texts"
    return [*checks, judge("rope state", figure, "0", not kept, sentence)]
