"""Models of random weights, their inputs, and what a step of them costs: FLOP and bytes."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3VLConfig, Qwen3VLModel

from benchmarks.common import Step
from contrastors.biqwen3 import BiQwen3
from contrastors.processing import Inputs

PATCH, MERGE = 16, 2
QUERY_TOKENS, PROMPT_TOKENS = 40, 20
IMAGE_TOKEN = 990


class Shape(NamedTuple):
    """Sizes of a Qwen3-VL: language part, then vision part."""

    hidden: int
    inner: int
    layers: int
    heads: int
    pairs: int
    head_size: int
    vocabulary: int
    vision_hidden: int
    vision_inner: int
    vision_layers: int
    vision_heads: int
    deepstack: tuple[int, ...]
    positions: int


TINY = Shape(64, 192, 2, 4, 2, 16, 1000, 32, 96, 3, 4, (1, 2), 64)
SMALL = Shape(384, 1152, 8, 6, 2, 64, 1000, 256, 1024, 8, 4, (2, 5), 256)
REAL_2B = Shape(2048, 6144, 28, 16, 8, 128, 151936, 1024, 4096, 24, 16, (5, 11, 17), 2304)


def make_config(shape: Shape) -> Qwen3VLConfig:
    half, side = shape.head_size // 2, shape.head_size // 2 * 5 // 16
    text = {
        "vocab_size": shape.vocabulary, "hidden_size": shape.hidden, "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "num_key_value_heads": shape.pairs,
        "head_dim": shape.head_size, "max_position_embeddings": 32768,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True,
            "mrope_section": [half - 2 * side, side, side],
        },
    }  # fmt: skip
    vision = {
        "depth": shape.vision_layers, "hidden_size": shape.vision_hidden, "intermediate_size": shape.vision_inner,
        "num_heads": shape.vision_heads, "patch_size": PATCH, "spatial_merge_size": MERGE, "temporal_patch_size": 2,
        "out_hidden_size": shape.hidden, "num_position_embeddings": shape.positions,
        "deepstack_visual_indexes": list(shape.deepstack),
    }  # fmt: skip
    tokens = {"image_token_id": IMAGE_TOKEN, "video_token_id": IMAGE_TOKEN + 1, "vision_start_token_id": 992}
    return Qwen3VLConfig(text_config=text, vision_config=vision, **tokens)


def build_model(
    shape: Shape, vision_adapter: bool = False, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> BiQwen3:
    """Returns a model of random weights in train mode, with an adapter whose B is not zero."""
    torch.manual_seed(0)
    with torch.device(device):
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)  # never in fp32 first: the real size would take twice the memory
        backbone = Qwen3VLModel(make_config(shape)).requires_grad_(False)
        torch.set_default_dtype(before)
        model = BiQwen3(backbone, [0.5] * 3, [0.5] * 3, dtype if dtype == torch.bfloat16 else None)
        model.add_adapter(r=8, alpha=16, dropout=0.0, vision=vision_adapter)
    for name, parameter in model.trainable_parameters().items():
        parameter.data = parameter.data.float()
        if ".lora_B." in name:  # zero at first, which would hide the gradients of A
            nn.init.normal_(parameter, std=0.02)
    return model.to(device).train()


def make_inputs(queries: int, side: int = 256, group: int = 1) -> tuple[Inputs, Inputs]:
    """Returns queries and `group` documents for each: random tokens, random pixels of side x side tiles."""
    source, documents = torch.Generator().manual_seed(1), queries * group
    patches = (side // PATCH) ** 2
    visual = patches // MERGE**2
    texts = torch.randint(0, 900, (queries, QUERY_TOKENS), generator=source)
    prompts = torch.randint(0, 900, (documents, PROMPT_TOKENS), generator=source)
    half = PROMPT_TOKENS // 2
    slots = torch.full((documents, visual), IMAGE_TOKEN)
    rows = torch.cat([prompts[:, :half], slots, prompts[:, half:]], dim=1)
    pixels = torch.randint(0, 256, (documents * patches, 3 * PATCH**2), generator=source, dtype=torch.uint8)
    grids = torch.tensor([[1, side // PATCH, side // PATCH]] * documents)
    return (
        Inputs(texts.flatten(), [QUERY_TOKENS] * queries, None, None, 0),
        Inputs(rows.flatten(), [PROMPT_TOKENS + visual] * documents, pixels, grids, 0),
    )


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


class LiveSavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """The most bytes that graphs held at once inside the block: each storage once, parameters not at all.

    Attributes:
        peak: In bytes.
    """

    def __init__(self, model: nn.Module):
        self.now = self.peak = 0
        self._known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        self._uses: dict[int, int] = {}
        super().__init__(self._save, lambda holder: holder[0])

    def __enter__(self) -> LiveSavedBytes:
        super().__enter__()
        return self

    def _save(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        holder = _Holder([tensor])
        if place not in self._known:
            self._uses[place] = self._uses.get(place, 0) + 1
            if self._uses[place] == 1:
                self.now += size
                self.peak = max(self.peak, self.now)
            weakref.finalize(holder, self._free, place, size)
        return holder

    def _free(self, place: int, size: int) -> None:
        self._uses[place] -= 1
        self.now -= size * (self._uses[place] == 0)


class _Holder(list):
    """A list that can be referred to weakly."""
