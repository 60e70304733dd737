"""The gradients of a step, by every combination of what may change speed and memory only, against one plain graph.

The reference is one process: every slot of the global batch embedded in one graph, no GradCache, the loss written
query by query, fp32. Against it: graphs retained x vision features computed once (where the vision part is frozen) x
chunks by tokens x gradient checkpointing x slots that share documents x ranks (gloo processes under torchrun). There
are two hard negatives a query, some of them missing. The figure of the weights is the relative L2 of the difference,
in the worst of A and B of the language and of the vision part. The gradient of the logit scale is one number, the
mean over queries of numbers of both signs that may cancel: its difference is told against the mean of their sizes.
Without --json only the worst of each setting is printed.

  python -m benchmarks.gradients --json
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image

from benchmarks.common import describe_machine, make_parser, show
from contrastors import distributed
from contrastors.batches import Batch, StepDataset, contrast_batch
from contrastors.biqwen3 import BiQwen3
from contrastors.chunking import Chunking, add_gradients, cut_batch
from contrastors.data import BatchOrder, build_training_set
from contrastors.demo import make_model
from contrastors.distributed import GradientBucket, World, gather_objects
from contrastors.images import open_image
from contrastors.logit_scale import LogitScale
from contrastors.loss import ColumnMask
from contrastors.processing import BiQwen3Processor, Inputs
from contrastors.records import Pair, read_pairs, write_jsonl
from contrastors.validation import check_images, image_paths

BOUND = 1e-5  # relative L2, fp32
NUM_NEGATIVES, CHUNK, CHUNK_TOKENS, ALL = 2, 3, 24, 10**6
WEIGHTS, SCALE = "relative L2", "logit scale"
SHARED, DIFFERENT = "share documents", "all different"
FROZEN, ONCE, TRAINS = "frozen", "frozen, features once", "trains"
SETTINGS = {
    "vision part": (FROZEN, ONCE, TRAINS),
    "gradient checkpointing": (False, True),
    "slots": (SHARED, DIFFERENT),
    "chunks by tokens": (False, True),
    "graphs retained": (0, 2, ALL),
}


class Reference(NamedTuple):
    """Gradients in the order of `Encoder.parameters`, and the mean over queries of the logit scale's |gradient|."""

    gradients: list[torch.Tensor]
    scale_size: float


class Encoder(NamedTuple):
    """A model whose adapter has moved, with what belongs to it."""

    model: BiQwen3
    scale: LogitScale
    processor: BiQwen3Processor

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return self.model.trainable_parameters() | {SCALE: self.scale.log_scale}


def load_encoder(folder: Path, vision_adapter: bool, max_num_visual_tokens: int) -> Encoder:
    """Returns the encoder of a checkpoint folder in train mode, with an adapter whose B is not zero."""
    processor = BiQwen3Processor.from_pretrained(str(folder), max_num_visual_tokens)
    pixels = processor.image_processor
    model = BiQwen3.from_pretrained(str(folder), pixels.image_mean, pixels.image_std)
    torch.manual_seed(0)
    model.add_adapter(r=4, alpha=8, dropout=0.0, vision=vision_adapter)
    for name, parameter in model.trainable_parameters().items():
        if ".lora_B." in name:  # zero at first, which would hide the gradients of A
            torch.nn.init.normal_(parameter, std=0.1)
    return Encoder(model.train(), LogitScale(0.2), processor)


def write_rows(folder: Path, name: str, num_rows: int) -> None:
    """Writes rows of noise tiles of several sizes; of each four, one row lists no negative and one a single one.

    Shared: a row's negatives are the positives of others, and the first and the last row have one positive.
    """
    source, rows = random.Random(name), []
    for row in range(num_rows):
        numbers = [(row + slot) % (num_rows - 1) for slot in range(1 + NUM_NEGATIVES)]
        if name == DIFFERENT:
            numbers = [row * (1 + NUM_NEGATIVES) + slot for slot in range(1 + NUM_NEGATIVES)]
        tiles = [f"{name} {number}.png" for number in numbers[: {1: 1, 2: 2}.get(row % 4, 1 + NUM_NEGATIVES)]]
        for tile in tiles:
            if not (folder / tile).exists():
                noise = Image.frombytes("RGB", (8, 8), source.randbytes(8 * 8 * 3))
                noise.resize((source.choice((64, 96, 128)), source.choice((32, 64, 96)))).save(folder / tile)
        query = " ".join([str(row), *source.choices(("red", "header", "dot", "grey bar:"), k=source.randint(1, 12))])
        rows.append({"query": query, "chunk_path": tiles[0], "neg_chunk_paths": tiles[1:]})
    write_jsonl(folder / f"{name}.jsonl", rows)


def compute_reference(encoder: Encoder, pairs: Sequence[Pair]) -> Reference:
    """The gradients of one graph: no chunks, no column mask, no document embedded once for several slots."""
    model, scale, processor = encoder
    paths = [path for pair in pairs for path in (pair.positive, *pair.negatives)]
    queries = [processor.encode_query(pair.query) for pair in pairs]
    documents = [processor.encode_document(open_image(path)) for path in paths]
    whole = [Inputs.from_items(items, processor.pad_id).chunks(len(items))[0] for items in (queries, documents)]
    logits = model(**whole[0]) @ model(**whole[1]).T * scale.log_scale.exp()
    losses, label = [], 0
    for row, pair in zip(logits, pairs, strict=True):
        columns = [column for column, path in enumerate(paths) if column == label or path != pair.positive]
        losses.append(row[columns].logsumexp(dim=0) - row[label])
        label += 1 + len(pair.negatives)
    terms = [torch.autograd.grad(loss, scale.log_scale, retain_graph=True)[0].abs() for loss in losses]
    gradients = torch.autograd.grad(torch.stack(losses).mean(), [*encoder.parameters.values()])
    return Reference(list(gradients), float(torch.stack(terms).mean()))


def find_differences(encoder: Encoder, wanted: Reference) -> dict[str, float]:
    """Relative differences of `.grad`: of the worst group of weights, and of the logit scale."""
    groups: dict[tuple[bool, str], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for (name, parameter), gradient in zip(encoder.parameters.items(), wanted.gradients, strict=True):
        if name != SCALE:
            key = "visual." in name, ".lora_A." in name
            groups.setdefault(key, []).append((parameter.grad.flatten(), gradient.flatten()))
    worst = 0.0
    for gradients in groups.values():
        a, b = (torch.cat(both).double() for both in zip(*gradients, strict=True))
        assert b.norm() > 0, "a reference of zero would show nothing"
        worst = max(worst, float((a - b).norm() / b.norm()))
    off_scale = float((encoder.scale.log_scale.grad - wanted.gradients[-1]).abs())
    return {WEIGHTS: worst, SCALE: off_scale / wanted.scale_size}


def compute_step(encoder: Encoder, bucket: GradientBucket, batch: Batch, chunking: Chunking) -> int:
    """Fills the bucket as the training script does, averaged over ranks; returns the number of chunks."""
    bucket.zero_()
    cut = cut_batch(batch.queries, batch.documents, chunking, encoder.processor.merge_size)
    contrast = partial(contrast_batch, batch, cut.places, encoder.scale, NUM_NEGATIVES, 0)
    add_gradients(encoder.model, cut, contrast, 1.0, chunking)
    bucket.reduce()
    return len(cut.chunks)


def measure_encoder(
    encoder: Encoder, batches: dict[str, Batch], wanted: dict[str, Reference], fixed: dict
) -> list[dict]:
    """A row for each combination that this encoder allows; `fixed` holds what it settles."""
    bucket, rows = GradientBucket(encoder.parameters.values()), []
    open_settings = {name: values for name, values in SETTINGS.items() if name not in fixed}
    for values in itertools.product(*open_settings.values()):
        row = fixed | dict(zip(open_settings, values, strict=True))
        batch, tokens = batches[row["slots"]], CHUNK_TOKENS * row["chunks by tokens"]
        once = row["vision part"] == ONCE
        chunking = Chunking(CHUNK, tokens, num_retained=row["graphs retained"], reuse_features=once)
        chunks = compute_step(encoder, bucket, batch, chunking)
        ranks = gather_objects(find_differences(encoder, wanted[row["slots"]]))
        row |= {"graphs retained": "all" if row["graphs retained"] == ALL else row["graphs retained"]}
        row |= {"chunks": chunks, "documents": len(batch.documents)}
        rows.append(row | {name: max(found[name] for found in ranks) for name in (WEIGHTS, SCALE)})
    return rows


def measure(folder: Path, world: World) -> dict[str, list[dict]]:
    """Rows of every combination, and of the control, by these ranks together."""
    rows, controls = [], []
    for vision, checkpointing in itertools.product(SETTINGS["vision part"], SETTINGS["gradient checkpointing"]):
        encoder = load_encoder(folder / "model", vision == TRAINS, max_num_visual_tokens=16)
        batches, wanted = {}, {}
        for name in SETTINGS["slots"]:
            pairs, _ = read_pairs(folder / f"{name}.jsonl")
            facts = {fact.path: fact for fact in check_images(image_paths(pairs), num_workers=0)}
            order, size = BatchOrder(len(pairs), len(pairs), seed=0), len(pairs) // world.size
            data = build_training_set(pairs, facts, NUM_NEGATIVES)
            batches[name] = StepDataset(data, order, encoder.processor, NUM_NEGATIVES, size, world.rank)[0]
            wanted[name] = compute_reference(encoder, pairs)  # before checkpointing is on
        if checkpointing:
            encoder.model.enable_gradient_checkpointing()
        fixed = {"ranks": world.size, "vision part": vision, "gradient checkpointing": checkpointing}
        rows += measure_encoder(encoder, batches, wanted, fixed)
        if vision == TRAINS and not checkpointing:
            open_masks = {name: replace(batch, mask=open_mask(batch)) for name, batch in batches.items()}
            found = measure_encoder(encoder, open_masks, wanted, fixed)
            least = {name: min(row[name] for row in found) for name in (WEIGHTS, SCALE)}
            controls.append({"ranks": world.size, "control": "nothing masked", **least})
    return {"rows": rows, "controls": controls}


def open_mask(batch: Batch) -> ColumnMask:
    return ColumnMask(torch.zeros_like(batch.mask.missing), batch.mask.pairs[:0])


def measure_ranks(folder: Path, size: int) -> dict[str, list[dict]]:
    """What `size` ranks find: this process, or this module under torchrun."""
    if size == 1:
        return measure(folder, World(0, 1, torch.device("cpu")))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={size}"]
    command = [sys.executable, *launcher, "-m", "benchmarks.gradients", "--worker", str(folder)]
    subprocess.run(command, check=True, cwd=Path(__file__).resolve().parent.parent)
    return json.loads((folder / "found.json").read_text(encoding="utf-8"))


def run_rank(folder: Path) -> int:
    """One rank under torchrun; the main one writes what all found."""
    torch.set_num_threads(1)
    world = distributed.start("cpu")
    found = measure(folder, world)
    if world.is_main:
        (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")
    distributed.stop()
    return 0


def summarize(rows: list[dict]) -> list[dict[str, Any]]:
    """The worst combination of each value of each setting, then of all."""

    def find_worst(setting: str, value: Any, found: list[dict]) -> dict[str, Any]:
        worst = {name: max(row[name] for row in found) for name in (WEIGHTS, SCALE)}
        return {"setting": setting, "value": value, "combinations": len(found), **worst}

    summary = []
    for setting in ("ranks", *SETTINGS):
        for value in dict.fromkeys(row[setting] for row in rows):
            shown = ("off", "on")[value] if isinstance(value, bool) else value
            summary.append(find_worst(setting, shown, [row for row in rows if row[setting] == value]))
    return [*summary, find_worst("any", "any", rows)]


def main(argv: list[str] | None = None) -> int:
    parser = make_parser(__doc__, "gradients")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="processes; more than one are gloo ranks")
    parser.add_argument("--rows", type=int, default=8, help="queries of the global batch, a multiple of the ranks")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.worker:
        return run_rank(args.worker)
    if args.rows < 4 or any(args.rows % ranks for ranks in args.ranks):
        parser.error(f"--rows {args.rows}: must be a multiple of --ranks {args.ranks}, and 4 at least")
    if not args.json:
        print(f"{describe_machine()}\n")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", seed=1, hidden=64, layers=2, vision_hidden=32, vision_layers=3)
        for slots in SETTINGS["slots"]:
            write_rows(folder, slots, args.rows)
        found = [measure_ranks(folder, ranks) for ranks in args.ranks]
    rows, controls = ([row for one in found for row in one[kind]] for kind in ("rows", "controls"))
    if args.json:
        show("gradients", rows, as_json=True)
    summary = summarize(rows)
    show(f"gradients: worst difference by setting, at most {BOUND:.0e}", summary, args.json)
    show(f"gradients: least difference of a control, at least {1000 * BOUND:.0e}", controls, args.json)
    is_exact = all(summary[-1][name] <= BOUND for name in (WEIGHTS, SCALE))
    is_told_apart = all(row[name] >= 1000 * BOUND for row in controls for name in (WEIGHTS, SCALE))
    return 0 if is_exact and is_told_apart else 1


if __name__ == "__main__":
    sys.exit(main())
