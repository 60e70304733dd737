"""Measures ms-swift against this project in a process of its own, since importing swift patches other libraries.

    python tests/swift_figures.py FOLDER

trains in FOLDER/run, resumes in FOLDER/resumed, and writes FOLDER/figures.json. FOLDER holds what `prepare` of
tests/swift_data.py puts there: a checkpoint with the token ids of Qwen, and converted rows.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from PIL import Image

from contrastors.processing import BiQwen3Processor
from tests.conftest import write_rows
from tests.swift_data import NUM_NEGATIVES, VISUAL_TOKENS, environment, only_run, prepare, read_rows, train_flags

NEGATIVES = ([], ["c05.png"], ["c06.png", "c07.png", "c08.png"])


class Both:
    """swift's model and template beside our encoder and processor, of one checkpoint, at one pixel limit."""

    def __init__(self, folder: Path, adapter: Path | None = None, remapped: Path | None = None):
        from swift.model import get_model_processor
        from swift.template import get_template

        from contrastors.checkpoint import load_adapter
        from contrastors.loading import load_bi_encoder

        options = {"model_type": "qwen3_vl_emb", "task_type": "embedding", "torch_dtype": torch.float32}
        self.model, processor = get_model_processor(str(folder / "model"), device_map="cpu", **options)
        self.template = get_template(processor)
        self.template.set_mode("train")
        self.template.model = self.model
        self.template.max_length = 1 << 20  # swift drops longer rows; this model's own 4,096 are fewer than Qwen's
        if adapter:
            from peft import PeftModel

            self.model = PeftModel.from_pretrained(self.model, str(adapter))
        self.model.eval()
        limits = {"max_num_visual_tokens": VISUAL_TOKENS}
        self.encoder, self.processor = load_bi_encoder(str(folder / "model"), torch.device("cpu"), **limits)
        if remapped:
            load_adapter(self.encoder, remapped, trainable=False)
        self.encoder.eval()

    def encode(self, data: dict) -> dict:
        return self.template.encode(json.loads(json.dumps(data)))

    def forward_swift(self, rows: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
        """Vectors as swift's loss gets them, [query, positive, negatives] of every row, and its labels."""
        batch = self.template.data_collator([self.encode(row) for row in rows])
        labels = batch.pop("labels")
        return self.model(**batch)["last_hidden_state"], labels

    def forward_ours(self, rows: list[dict]) -> tuple[torch.Tensor, torch.Tensor]:
        """Vectors of the queries, and of the documents in the order of our loss."""
        from contrastors.images import open_image
        from contrastors.processing import Inputs

        queries = [self.processor.encode_query(row["messages"][-1]["content"]) for row in rows]
        paths = [path for row in rows for (path,) in [*row["positive_images"], *row["negative_images"]]]
        documents = [self.processor.encode_document(open_image(path)) for path in paths]
        pad = self.processor.pad_id
        vectors = [self.encoder(**Inputs.from_items(items, pad).chunks(99)[0]) for items in (queries, documents)]
        return vectors[0], vectors[1]


def split_rows(vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries and documents of swift's order."""
    rows = vectors.view(-1, 2 + NUM_NEGATIVES, vectors.shape[1])
    return rows[:, 0], rows[:, 1:].flatten(0, 1)


@torch.no_grad()
def compare_embeddings(both: Both, rows: list[dict]) -> dict[str, float]:
    theirs, ours = torch.cat(split_rows(both.forward_swift(rows)[0])), torch.cat(both.forward_ours(rows))
    cosines = torch.nn.functional.cosine_similarity(theirs.double(), ours.double())
    return {"max_difference": float((theirs - ours).abs().max()), "min_cosine": float(cosines.min())}


def compare_items(both: Both, data: Path, rows: list[dict]) -> dict:
    """Token ids and pixels of the converted rows against what our collate makes of the rows they come from."""
    from contrastors.batches import StepDataset
    from contrastors.data import BatchOrder, build_training_set
    from contrastors.pixels import unpack_patches
    from contrastors.records import read_pairs
    from contrastors.swift_rows import break_markers
    from contrastors.validation import check_image, image_paths

    pairs, _ = read_pairs(data / "rows.jsonl")
    for pair in pairs:
        pair.query = break_markers(pair.query)
    training = build_training_set(pairs, {p: check_image(p) for p in image_paths(pairs)}, NUM_NEGATIVES)
    order = BatchOrder(len(rows), len(rows), seed=0)
    batch = StepDataset(training, order, both.processor, NUM_NEGATIVES, len(rows))[0]
    queries = batch.queries.token_ids.split(batch.queries.lengths)
    documents = batch.documents.token_ids.split(batch.documents.lengths)
    patches = batch.documents.patches.split(batch.documents.grids.prod(dim=1).tolist())
    group, mean, std = 1 + NUM_NEGATIVES, both.encoder.pixel_mean, both.encoder.pixel_std
    found = {"queries": 0, "documents": 0, "equal_queries": 0, "equal_documents": 0, "pixel_difference": 0.0}
    for place, row in enumerate(order.rows(0)):
        encoded = both.encode(rows[row])
        found["queries"] += 1
        found["equal_queries"] += encoded["anchor_input_ids"] == queries[place].tolist()
        ids = [encoded["positive_input_ids"], *encoded["negative_input_ids"]]
        pixels = [encoded["positive_pixel_values"], *encoded["negative_pixel_values"]]
        for slot, theirs, picture in zip(batch.slots[place * group : (place + 1) * group], ids, pixels, strict=True):
            found["documents"] += 1
            found["equal_documents"] += theirs == documents[slot].tolist()
            difference = (picture - unpack_patches(patches[slot], mean, std, 2)).abs().max()
            found["pixel_difference"] = max(found["pixel_difference"], float(difference))
    return found


def compare_pixels_of_a_scaled_picture(both: Both, path: Path) -> dict[str, float]:
    """Differences in steps of an 8-bit channel: swift scales with Pillow, we with torchvision."""
    from contrastors.images import open_image
    from contrastors.pixels import unpack_patches

    ours = both.processor.encode_document(open_image(path))
    theirs = both.encode(document_row(path))["positive_pixel_values"]
    steps = (theirs - unpack_patches(ours.patches, both.encoder.pixel_mean, both.encoder.pixel_std, 2)).abs() * 127.5
    return {"max": float(steps.max()), "mean": float(steps.mean())}


def document_row(path: Path) -> dict:
    from contrastors.processing import DOCUMENT_INSTRUCTION, QUERY_INSTRUCTION
    from contrastors.swift_rows import make_row

    return make_row("q", [str(path)], QUERY_INSTRUCTION, DOCUMENT_INSTRUCTION)


def swift_settings(folder: Path, processor: BiQwen3Processor, *flags: str) -> dict:
    """What the script calls swift with."""
    from train_swift import build_parser, swift_arguments

    return swift_arguments(build_parser().parse_args(["--model", str(folder / "model"), *flags]), processor)


def count_visual_tokens(both: Both, folder: Path) -> dict:
    """Image slots of both ways, for squares at four limits and for 60 odd sizes."""
    from qwen_vl_utils import vision_process
    from transformers import AutoProcessor

    from contrastors.images import open_image

    source = random.Random(4)
    cases = [(side, side, limit) for side in (512, 2048) for limit in (64, 256, 1024, 4096)]
    cases += [(source.randint(40, 900), source.randint(40, 900), source.choice((16, 64, 256))) for _ in range(60)]
    slot, found = both.processor.image_token_id, {"squares": [], "odd": [0, 0]}
    checkpoint = AutoProcessor.from_pretrained(str(folder / "model"), backend="torchvision")
    for width, height, limit in cases:
        Image.new("L", (width, height)).save(folder / "size.png")
        processor = BiQwen3Processor(checkpoint, limit)
        settings = swift_settings(folder, processor, "--max-num-visual-tokens", str(limit))
        both.template.max_pixels = settings.get("max_pixels")
        for name in ("IMAGE_MAX_TOKEN_NUM", "IMAGE_MIN_TOKEN_NUM"):  # where swift puts what it reads at its start
            setattr(vision_process, name, settings["model_kwargs"][name])
        ours = processor.encode_document(open_image(folder / "size.png")).token_ids.count(slot)
        theirs = both.encode(document_row(folder / "size.png"))["positive_input_ids"].count(slot)
        if width == height:
            found["squares"].append([width, limit, ours, theirs])
        else:
            found["odd"][0] += 1
            found["odd"][1] += ours == theirs
    vision_process.IMAGE_MAX_TOKEN_NUM = VISUAL_TOKENS
    return found


def compare_losses() -> list[list[float]]:
    """[K, swift's loss, ours] on random vectors; its labels are one 1 and K zeros a row."""
    from swift.loss.embedding import InfonceLoss

    from contrastors.logit_scale import LogitScale
    from contrastors.loss import clip_loss

    os.environ["INFONCE_TEMPERATURE"] = "0.07"
    found = []
    for num_negatives in (0, 1, 3):
        generator = torch.Generator().manual_seed(num_negatives)
        vectors = torch.nn.functional.normalize(torch.randn(6, 2 + num_negatives, 32, generator=generator), dim=-1)
        os.environ.pop("INFONCE_HARD_NEGATIVES", None)
        if num_negatives:
            os.environ["INFONCE_HARD_NEGATIVES"] = str(num_negatives)
        labels = torch.tensor(([1.0] + [0.0] * num_negatives) * 6)
        theirs = InfonceLoss(None, None)({"last_hidden_state": vectors.flatten(0, 1)}, labels)
        ours = clip_loss(vectors[:, 0], vectors[:, 1:].flatten(0, 1), LogitScale(0.07), num_negatives).loss
        found.append([num_negatives, float(theirs), float(ours)])
    return found


def lora_names(both: Both, folder: Path, vision: bool) -> tuple[list[str], list[str]]:
    """Names of the LoRA tensors at the size of Qwen3-VL-Embedding-2B, ours and swift's, without weights."""
    from peft import LoraConfig
    from swift.tuners import Swift
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    from contrastors.biqwen3 import BiQwen3
    from contrastors.checkpoint import GENERATION_PREFIX, adapter_tensors

    text = {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
    tower = {"hidden_size": 1024, "depth": 24, "num_heads": 16, "out_hidden_size": 2048}
    config = Qwen3VLConfig(text_config=text | {"vocab_size": 128}, vision_config=tower)
    flags = ["--no-freeze-vit"] if vision else []
    targets = swift_settings(folder, both.processor, *flags)["target_regex"]
    with torch.device("meta"):
        generation = Qwen3VLForConditionalGeneration(config)
        ours = BiQwen3(Qwen3VLForConditionalGeneration(config).model, [0.5] * 3, [0.5] * 3)
        ours.add_adapter(32, 32, 0.0, vision)
        theirs = Swift.prepare_model(generation, LoraConfig(r=32, target_modules=targets))
    wrapped = [name for name, _ in theirs.named_parameters() if "lora_" in name]
    names = [name.replace(".default.", ".").replace(GENERATION_PREFIX, "base_model.model.", 1) for name in wrapped]
    return sorted(adapter_tensors(ours)), sorted(names)


def one_step(both: Both, rows: list[dict]) -> dict[str, float]:
    """The same batch and adapter through swift's wrapping and loss, and through ours; then one step of AdamW each."""
    from swift.loss.embedding import InfonceLoss

    from contrastors.logit_scale import LogitScale
    from contrastors.loss import clip_loss

    os.environ |= {"INFONCE_TEMPERATURE": "0.07", "INFONCE_HARD_NEGATIVES": str(NUM_NEGATIVES)}

    def swift_loss() -> torch.Tensor:
        vectors, labels = both.forward_swift(rows)
        return InfonceLoss(None, None)({"last_hidden_state": vectors}, labels)

    def our_loss() -> torch.Tensor:
        return clip_loss(*both.forward_ours(rows), LogitScale(0.07), NUM_NEGATIVES).loss

    found, gradients = {}, {}
    for name, model, loss_of in (("swift", both.model, swift_loss), ("ours", both.encoder, our_loss)):
        parameters = {key: p for key, p in model.named_parameters() if ".lora_" in key}
        parameters = {key[key.index("layers.") :]: p.requires_grad_() for key, p in sorted(parameters.items())}
        optimizer = torch.optim.AdamW(parameters.values(), lr=1e-3, weight_decay=0.01)
        loss = loss_of()
        loss.backward()
        gradients[name] = torch.cat([p.grad.flatten() for _, p in sorted(parameters.items())]).double()
        optimizer.step()
        found |= {f"{name}_before": float(loss), f"{name}_after": float(loss_of())}
    found["gradient_cosine"] = float(torch.cosine_similarity(gradients["swift"], gradients["ours"], dim=0))
    found["gradient_ratio"] = float(gradients["swift"].norm() / gradients["ours"].norm())
    return found


def train_without_negatives(folder: Path) -> dict:
    """One step on rows with 0, 1 and 3 hard negatives where none are asked for, and its loss."""
    from convert_data_for_swift import main as convert
    from train_swift import main as train

    data = folder / "data"
    rows = [{"query": f"{n} tiles", "chunk_path": f"c{n:02d}.png", "neg_chunk_paths": NEGATIVES[n]} for n in range(3)]
    source, target = write_rows(data / "mixed.jsonl", rows), data / "mixed_swift.jsonl"
    codes = [convert(["--input", str(source), "--output", str(target), "--num-workers", "0"])]
    more = {"train-jsonl": target, "eval-jsonl": "", "num-hard-negatives": 0, "max-steps": 1, "warmup-steps": 0}
    flags = [word for name, value in more.items() for word in (f"--{name}", str(value))]
    codes.append(train([*train_flags(folder, "in_batch"), "--lora-dropout", "0", *flags]))
    state = json.loads((only_run(folder / "in_batch") / "checkpoint-1" / "trainer_state.json").read_text())
    return {"exit_codes": codes, "loss": state["log_history"][0]["loss"]}


@torch.no_grad()
def in_batch_loss(both: Both, rows: list[dict]) -> float:
    from contrastors.logit_scale import LogitScale
    from contrastors.loss import clip_loss

    positives = [row | {"negative_images": []} for row in rows]
    return float(clip_loss(*both.forward_ours(positives), LogitScale(0.07)).loss)


def say_what_differs(both: Both, folder: Path, row: dict) -> dict:
    """What the script says of a checkpoint whose processor appends no end token, and of one that brings code."""
    from contrastors.swift_rows import SwiftRow
    from train_swift import compare_tokens, refuse_own_code

    plain = folder / "plain"
    shutil.copytree(folder / "model", plain, ignore=shutil.ignore_patterns("*.safetensors"))
    for name, change in (("tokenizer", {"post_processor": None}), ("config", {"auto_map": {"AutoConfig": "own.Own"}})):
        file = plain / f"{name}.json"
        file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | change), encoding="utf-8")
    case = SwiftRow(1, row["messages"][-1]["content"], [row["positive_images"][0][0]], row)
    try:
        refuse_own_code(str(plain))
        refused = ""
    except ValueError as error:
        refused = str(error)
    other = BiQwen3Processor.from_pretrained(str(plain), VISUAL_TOKENS)
    compared = {
        "same": compare_tokens(case, both.template, both.processor),
        "other": compare_tokens(case, both.template, other),
    }
    return compared | {"own_code": refused}


def main(folder: Path) -> None:
    from train_swift import main as train

    os.environ |= environment(folder)
    codes = [train(train_flags(folder, "run"))]
    run = only_run(folder / "run")
    codes.append(
        train(["--resume", str(run / "checkpoint-2"), "--output-dir", str(folder / "resumed"), "--device", "cpu"])
    )
    in_batch = train_without_negatives(folder)
    rows = read_rows(folder / "data" / "swift.jsonl")
    base = Both(folder)
    trained = Both(folder, run / "checkpoint-3", run / "checkpoint-3-biqwen3")
    (ours, theirs), (ours_vision, theirs_vision) = [lora_names(base, folder, vision) for vision in (False, True)]
    figures = {
        "exit_codes": codes,
        "in_batch": in_batch | {"our_loss": in_batch_loss(base, read_rows(folder / "data" / "mixed_swift.jsonl"))},
        "says": say_what_differs(base, folder, rows[7]),
        "items": compare_items(base, folder / "data", rows),
        "labels": base.template.data_collator([base.encode(row) for row in rows[:2]])["labels"].tolist(),
        "base": compare_embeddings(base, rows),
        "adapter": compare_embeddings(trained, rows),
        "scaled": compare_pixels_of_a_scaled_picture(base, folder / "data" / "large.png"),
        "visual_tokens": count_visual_tokens(base, folder),
        "losses": compare_losses(),
        "targets": {"num": len(ours), "same": ours == theirs, "same_with_vision": ours_vision == theirs_vision},
        "step": one_step(trained, rows[:4]),
    }
    (folder / "figures.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    work = Path(sys.argv[1]).absolute()
    if not (work / "model").exists():
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        prepare(work)
    main(work)
