"""What GradCache costs, and what retained graphs and vision features computed once give back.

One Qwen3-VL of random weights (language 384 x 8 layers, vision 256 x 8), 256x256 tiles of 64 visual tokens, queries of
40 tokens, LoRA r 8 on q, k, v, o of the language part, batch 16 in 8 chunks of 4. Every way computes the gradients of
the same batch; FLOP are counted (exact), times are the minimum of alternating runs (on a busy machine look at the CPU
time). Prints a JSON line a way, then a table of ratios to one full batch without GradCache, then the gates.

  python -m benchmarks.grad_cache --rounds 6
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3VLConfig, Qwen3VLModel

from contrastors.biqwen3 import BiQwen3
from contrastors.chunking import Chunking, Cut, cut_batch
from contrastors.logit_scale import LogitScale
from contrastors.loss import LossOutput, clip_loss, grad_cache_loss
from contrastors.processing import Inputs

SIDE, PATCH, MERGE = 256, 16, 2
VOCABULARY, IMAGE_TOKEN = 1000, 990
QUERY_TOKENS, PROMPT_TOKENS = 40, 20
TEMPERATURE = 0.07
Step = Callable[[], None]


def build_model(vision_adapter: bool) -> BiQwen3:
    language = {
        "vocab_size": VOCABULARY, "hidden_size": 384, "intermediate_size": 1152, "num_hidden_layers": 8,
        "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True, "mrope_section": [12, 10, 10],
        },
    }  # fmt: skip
    vision = {
        "depth": 8, "hidden_size": 256, "intermediate_size": 1024, "num_heads": 4, "patch_size": PATCH,
        "spatial_merge_size": MERGE, "temporal_patch_size": 2, "out_hidden_size": 384,
        "num_position_embeddings": 256, "deepstack_visual_indexes": [2, 5],
    }  # fmt: skip
    tokens = {"image_token_id": IMAGE_TOKEN, "video_token_id": IMAGE_TOKEN + 1, "vision_start_token_id": 992}
    torch.manual_seed(0)
    backbone = Qwen3VLModel(Qwen3VLConfig(text_config=language, vision_config=vision, **tokens)).requires_grad_(False)
    model = BiQwen3(backbone, [0.5] * 3, [0.5] * 3)
    model.add_adapter(r=8, alpha=16, dropout=0.0, vision=vision_adapter)
    for name, parameter in model.trainable_parameters().items():
        if ".lora_B." in name:  # zero at first, which would hide the gradients of A
            nn.init.normal_(parameter, std=0.02)
    return model.train()


def make_inputs(number: int) -> tuple[Inputs, Inputs]:
    """Queries and documents: random tokens, random pixels."""
    source = torch.Generator().manual_seed(1)
    patches = (SIDE // PATCH) ** 2
    visual = patches // MERGE**2
    texts = torch.randint(0, 900, (number, QUERY_TOKENS), generator=source)
    prompts = torch.randint(0, 900, (number, PROMPT_TOKENS), generator=source)
    slots = torch.full((number, visual), IMAGE_TOKEN)
    documents = torch.cat([prompts[:, :10], slots, prompts[:, 10:]], dim=1)
    pixels = torch.randint(0, 256, (number * patches, 3 * PATCH**2), generator=source).to(torch.uint8)
    grids = torch.tensor([[1, SIDE // PATCH, SIDE // PATCH]] * number)
    return (
        Inputs(texts.flatten(), [QUERY_TOKENS] * number, None, None, 0),
        Inputs(documents.flatten(), [PROMPT_TOKENS + visual] * number, pixels, grids, 0),
    )


class Benchmark:
    """One model, one batch, and the ways to its gradients."""

    def __init__(self, vision_adapter: bool, batch: int, chunk: int):
        self.model, self.scale = build_model(vision_adapter), LogitScale(TEMPERATURE)
        self.chunk = chunk
        self.inputs = make_inputs(batch)
        self.cut: Cut = cut_batch(*self.inputs, Chunking(documents=chunk, queries=chunk), MERGE)
        self.whole = [inputs.chunks(batch)[0] for inputs in self.inputs]

    def contrast(self, embeddings: torch.Tensor) -> LossOutput:
        return clip_loss(*embeddings.split(self.cut.num_queries), self.scale)

    def full_batch(self) -> None:
        self.contrast(torch.cat([self.model(**chunk) for chunk in self.whole])).loss.backward()

    def grad_cache(self, num_retained: int = 0, vision_once: bool = False) -> None:
        encode_images = self.model.encode_images if vision_once else None
        grad_cache_loss(self.model, self.cut.chunks, self.contrast, 1.0, num_retained, encode_images)

    def sentence_transformers(self) -> Step:
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

        encoder = SentenceTransformer(modules=[SentenceEmbedding(self.model)], device="cpu").train()
        loss = CachedMultipleNegativesRankingLoss(encoder, scale=1 / TEMPERATURE, mini_batch_size=self.chunk)
        return lambda: loss([dict(chunk) for chunk in self.whole], None).backward()

    def gradient(self, step: Step) -> torch.Tensor:
        parameters = self.model.trainable_parameters().values()
        for parameter in parameters:
            parameter.grad = None
        step()
        return torch.cat([parameter.grad.flatten() for parameter in parameters])


class SentenceEmbedding(nn.Module):
    """The bi-encoder as a module of sentence-transformers."""

    def __init__(self, model: BiQwen3):
        super().__init__()
        self.model = model

    def forward(self, features: dict) -> dict:
        names = ("input_ids", "attention_mask", "pixel_values", "image_grid_thw")
        return features | {"sentence_embedding": self.model(**{n: features[n] for n in names if n in features})}


def attention_flop(query: torch.Size, key: torch.Size, value: torch.Size, *_: object, **__: object) -> int:
    """Two matrix products of (b, h, L, d) with (b, h, S, d)."""
    return 4 * query[0] * query[1] * query[2] * key[2] * query[3]


def attention_backward_flop(gradient: torch.Size, query: torch.Size, key: torch.Size, *_: object, **__: object) -> int:
    """Five: the scores again, and a gradient each of scores, queries, keys, values."""
    return 10 * query[0] * query[1] * query[2] * key[2] * query[3]


def count_flop(step: Step) -> int:
    """Returns the exact FLOP; the counter does not know CPU attention by itself."""
    mapping = {
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flop,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flop,
    }
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        step()
    return counter.get_total_flops()


def measure(benchmark: Benchmark, ways: dict[str, Step], rounds: int) -> list[dict]:
    wanted = benchmark.gradient(ways["full batch"])
    rows = []
    for name, step in ways.items():
        found = benchmark.gradient(step)
        difference = float((found - wanted).norm() / wanted.norm())
        rows.append({"way": name, "flop": count_flop(step), "relative_l2": difference})
        rows[-1] |= {"seconds": math.inf, "cpu_seconds": math.inf}
    for _ in range(rounds):  # alternating, so that a slow minute of the machine hits all alike
        for row in rows:
            started, cpu_started = time.perf_counter(), time.process_time()
            ways[row["way"]]()
            row["seconds"] = min(row["seconds"], time.perf_counter() - started)
            row["cpu_seconds"] = min(row["cpu_seconds"], time.process_time() - cpu_started)
    for row in rows:
        row["flop_ratio"] = row["flop"] / rows[0]["flop"]
        row["time_ratio"] = row["seconds"] / rows[0]["seconds"]
        row["cpu_ratio"] = row["cpu_seconds"] / rows[0]["cpu_seconds"]
    return rows


def check_gates(rows: dict[str, dict]) -> dict[str, tuple[float, float]]:
    """Gate -> (measured, at most). FLOP are exact; times have 5 % slack."""
    ours = rows["all retained"]
    peer, once = rows["sentence-transformers"], rows["vision once"]
    return {
        "FLOP, all retained / full batch": (ours["flop_ratio"], 1.02),
        "FLOP, vision once / full batch": (once["flop_ratio"], 1.33),
        "time, all retained / full batch": (ours["time_ratio"], 1.15 * 1.05),
        "time, vision once / sentence-transformers": (once["seconds"] / peer["seconds"], 0.80 * 1.05),
        "time, all retained / sentence-transformers": (ours["seconds"] / peer["seconds"], 0.63 * 1.05),
        "largest relative L2 of the gradients": (max(row["relative_l2"] for row in rows.values()), 1e-5),
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="alternating runs of each way; the fastest counts")
    parser.add_argument("--batch", type=int, default=16, help="queries, and documents")
    parser.add_argument("--chunk", type=int, default=4, help="queries or documents of one forward")
    args = parser.parse_args(argv)
    results = {}
    for vision_adapter in (False, True):
        benchmark = Benchmark(vision_adapter, args.batch, args.chunk)
        chunks, some = len(benchmark.cut.chunks), max(1, len(benchmark.cut.chunks) // 4)
        ways: dict[str, Step] = {"full batch": benchmark.full_batch}
        ways["sentence-transformers"] = benchmark.sentence_transformers()
        ways["classic GradCache"] = benchmark.grad_cache
        if not vision_adapter:
            ways["vision once"] = partial(benchmark.grad_cache, vision_once=True)
        ways[f"{some} of {chunks} retained"] = partial(benchmark.grad_cache, some, not vision_adapter)
        ways["all retained"] = partial(benchmark.grad_cache, chunks)
        for row in measure(benchmark, ways, args.rounds):
            results[vision_adapter, row["way"]] = row
            print(json.dumps({"benchmark": "grad_cache", "vision_adapter": vision_adapter, **row}), flush=True)
    print(f"\n{args.batch} queries and documents, chunks of {args.chunk}, {torch.get_num_threads()} threads\n")
    print("| LoRA on | | FLOP | time | CPU time | relative L2 of the gradient |\n|---|---|---|---|---|---|")
    for (vision_adapter, name), row in results.items():
        part = "both parts" if vision_adapter else "language"
        ratios = " | ".join(f"{row[kind + '_ratio']:.2f}" for kind in ("flop", "time", "cpu"))
        print(f"| {part} | {name} | {ratios} | {row['relative_l2']:.0e} |")
    gates = check_gates({name: row for (vision_adapter, name), row in results.items() if not vision_adapter})
    print("\n| gate | measured | at most | |\n|---|---|---|---|")
    for name, (found, most) in gates.items():
        print(f"| {name} | {found:.3g} | {most:.3g} | {'kept' if found <= most else 'missed'} |")
    exact = [found <= most for name, (found, most) in gates.items() if not name.startswith("time")]
    return 0 if all(exact) else 1


if __name__ == "__main__":
    sys.exit(main())
