"""Instructions, chat template and pixel limit: the one place that turns texts and images into model inputs.

`BiQwen3Processor` encodes single items in loader workers; `Inputs` holds many of them flat, without padding, and pads
only when a chunk is formed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError
from PIL import Image
from transformers import AutoProcessor

from contrastors.images import MIN_VISUAL_TOKENS, pad_small
from contrastors.pixels import pack_patches

QUERY_INSTRUCTION = "Retrieve images or text relevant to the user's query."
DOCUMENT_INSTRUCTION = "Represent the user's input."
_PLACEHOLDER = "PLACEHOLDER7TEXT"


@dataclass(frozen=True, slots=True)
class Item:
    """One encoded query or document.

    Attributes:
        token_ids: The whole prompt, image slots included.
        patches: (P, 3 p p) uint8 packed patches of the image; None for a text.
        grid: (frames, rows, columns) of patches; None for a text.
        truncated: Whether the text was cut.
    """

    token_ids: list[int]
    patches: torch.Tensor | None = None
    grid: tuple[int, int, int] | None = None
    truncated: bool = False


@dataclass(slots=True)
class Inputs:
    """Encoded items, flat: no padding of tokens or pixels until a chunk is formed.

    Attributes:
        token_ids: (T,) int64 of all items.
        lengths: Tokens of each item.
        patches: (P, 3 p p) uint8 of all items, None for texts.
        grids: (n, 3) int64, None for texts.
        pad_id: Token that fills a chunk.
    """

    token_ids: torch.Tensor
    lengths: list[int]
    patches: torch.Tensor | None
    grids: torch.Tensor | None
    pad_id: int

    @classmethod
    def from_items(cls, items: Sequence[Item], pad_id: int) -> Inputs:
        """Returns the items, concatenated; all of them texts, or all of them images."""
        token_ids = torch.tensor([t for item in items for t in item.token_ids], dtype=torch.int64)
        lengths = [len(item.token_ids) for item in items]
        if not items or items[0].patches is None:
            return cls(token_ids, lengths, None, None, pad_id)
        return cls(
            token_ids, lengths, torch.cat([i.patches for i in items]), torch.tensor([i.grid for i in items]), pad_id
        )

    def __len__(self) -> int:
        return len(self.lengths)

    def chunks(self, size: int) -> list[dict[str, torch.Tensor]]:
        """Returns the model inputs of consecutive chunks of at most `size` items, padded on the right."""
        return self.make_chunks([range(n, min(n + size, len(self))) for n in range(0, len(self), size)])

    def make_chunks(self, plan: Sequence[Sequence[int]]) -> list[dict[str, torch.Tensor]]:
        """Returns the model inputs of chunks, padded on the right.

        Args:
            plan: Places of the items of each chunk.
        """
        tokens = self.token_ids.split(self.lengths)
        patches = None if self.patches is None else self.patches.split(self.grids.prod(dim=1).tolist())
        chunks = []
        for places in plan:
            rows = [tokens[place] for place in places]
            ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.pad_id)
            lengths = torch.tensor([self.lengths[place] for place in places], device=ids.device)
            mask = (torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]).to(torch.int64)
            chunk = {"input_ids": ids, "attention_mask": mask}
            if patches is not None:
                pixels = torch.cat([patches[place] for place in places])
                chunk |= {"pixel_values": pixels, "image_grid_thw": self.grids[list(places)]}
            chunks.append(chunk)
        return chunks

    def _map(self, move: Any) -> Inputs:
        moved = [None if t is None else move(t) for t in (self.token_ids, self.patches, self.grids)]
        return Inputs(moved[0], self.lengths, moved[1], moved[2], self.pad_id)

    def pin_memory(self) -> Inputs:
        """Returns a copy in pinned memory (DataLoader calls this)."""
        return self._map(torch.Tensor.pin_memory)

    def to(self, device: torch.device) -> Inputs:
        """Returns a copy on the device, moved asynchronously from pinned memory."""
        return self._map(lambda t: t.to(device, non_blocking=True))


class BiQwen3Processor:
    """Encodes queries and documents with a checkpoint's own processor.

    The instruction is the system message of the checkpoint's chat template, with the generation prompt. Whatever stands
    in a user's text is text: control markers in it open no turn and no image slot.

    Args:
        processor: The checkpoint's Qwen3VLProcessor with a torchvision image processor.
        max_num_visual_tokens: Largest number of visual tokens of an image; larger images are scaled down.
        max_query_tokens: Longest query prompt; the end of longer texts is cut, the end of the prompt stays.

    Raises:
        ValueError: A limit is too small, or the template or the processor does not behave as needed.
    """

    def __init__(self, processor: Any, max_num_visual_tokens: int = 256, max_query_tokens: int = 512):
        self.tokenizer = processor.tokenizer
        self.image_processor = processor.image_processor
        if not hasattr(self.image_processor, "patchify"):
            raise ValueError("the image processor must be the torchvision one: pip install torchvision")
        self.image_token_id: int = processor.image_token_id
        self.patch_size: int = self.image_processor.patch_size
        self.merge_size: int = self.image_processor.merge_size
        self.temporal_patch_size: int = self.image_processor.temporal_patch_size
        self.max_num_visual_tokens = max_num_visual_tokens
        self.max_query_tokens = max_query_tokens
        if max_num_visual_tokens < MIN_VISUAL_TOKENS:
            raise ValueError(
                f"--max-num-visual-tokens {max_num_visual_tokens}: at least {MIN_VISUAL_TOKENS} are needed"
            )
        pad = self.tokenizer.pad_token_id
        self.pad_id: int = pad if pad is not None else self.tokenizer.eos_token_id

        def render(instruction: str, content: dict[str, str]) -> str:
            system = {"role": "system", "content": [{"type": "text", "text": instruction}]}
            messages = [system, {"role": "user", "content": [content]}]
            try:
                return processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            except (TemplateError, TypeError) as error:
                raise ValueError(f"this checkpoint's chat template cannot be used ({error})") from error

        self._before, self._after = self._appended_tokens()
        rendered = render(QUERY_INSTRUCTION, {"type": "text", "text": _PLACEHOLDER})
        self._head, self._plain_head, self._tail = self._split_prompt(rendered)
        self._document = self._document_prompt(render(DOCUMENT_INSTRUCTION, {"type": "image"}))
        room = self.max_query_tokens - len(self._query_ids("")[0])
        if room < 1:
            raise ValueError(
                f"--max-query-tokens {max_query_tokens}: the prompt around a query takes "
                f"{max_query_tokens - room} tokens, so at least {max_query_tokens - room + 1} are needed"
            )
        probe = "\n two Words "
        encoded, whole = self.encode_query(probe), self.tokenizer(rendered.replace(_PLACEHOLDER, probe))["input_ids"]
        direct = render(QUERY_INSTRUCTION, {"type": "text", "text": probe})
        if not encoded.truncated and (encoded.token_ids != whole or direct != rendered.replace(_PLACEHOLDER, probe)):
            raise ValueError("this checkpoint's tokenizer or chat template does not keep a text as it is")

    @classmethod
    def from_pretrained(
        cls, model: str, max_num_visual_tokens: int = 256, max_query_tokens: int = 512
    ) -> BiQwen3Processor:
        """Returns the processor of a checkpoint (hub name or folder).

        Raises:
            ValueError: The processor files are missing or do not fit.
        """
        try:
            processor = AutoProcessor.from_pretrained(model, backend="torchvision", trust_remote_code=False)
        except (OSError, ValueError, ImportError, TypeError, KeyError) as error:
            way_out = "" if os.path.isdir(model) else "; without a network give the folder of a downloaded checkpoint"
            reason = str(error).splitlines()[0]
            raise ValueError(f"--model {model}: no processor can be loaded ({reason}){way_out}") from error
        if not hasattr(processor, "image_processor"):
            raise ValueError(f"--model {model}: holds a tokenizer, but no image processor")
        return cls(processor, max_num_visual_tokens, max_query_tokens)

    @property
    def pixels_per_token(self) -> int:
        """Pixels under one visual token, (patch x merge)^2: 1024 for Qwen3-VL, 784 for Qwen2.5-VL."""
        return (self.patch_size * self.merge_size) ** 2

    @property
    def max_pixels(self) -> int:
        """Pixels of the largest resized image."""
        return self.max_num_visual_tokens * self.pixels_per_token

    @property
    def min_pixels(self) -> int:
        """Pixels to which smaller images are scaled up: the checkpoint's, never over a quarter of the limit.

        Rounding up to whole tokens can nearly quadruple a small image, and the limit must hold.
        """
        return min(self.image_processor.size["shortest_edge"], self.max_pixels // 4)

    def describe(self) -> dict[str, Any]:
        """Returns what a checkpoint records about pixels and tokens."""
        return {
            "image_backend": "torchvision",
            "max_num_visual_tokens": self.max_num_visual_tokens,
            "min_pixels": self.min_pixels,
            "max_pixels": self.max_pixels,
            "pixels_per_token": self.pixels_per_token,
            "max_query_tokens": self.max_query_tokens,
            "query_instruction": QUERY_INSTRUCTION,
            "document_instruction": DOCUMENT_INSTRUCTION,
        }

    def _plain_ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    def _marked_ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []

    def _appended_tokens(self) -> tuple[list[int], list[int]]:
        """Returns what the tokenizer's post-processor puts before and after every text (often an end token)."""
        bare, dressed = self._marked_ids("a"), self.tokenizer("a")["input_ids"]
        for start in range(len(dressed) - len(bare) + 1):
            if dressed[start : start + len(bare)] == bare:
                return dressed[:start], dressed[start + len(bare) :]
        raise ValueError("this checkpoint's tokenizer changes a text when it adds its special tokens")

    def _split_prompt(self, rendered: str) -> tuple[list[int], str, list[int]]:
        """Splits the rendered query prompt at the control tokens nearest to the text.

        The plain piece between them ("user", newline, text) is encoded in one go, since a tokenizer may merge over its
        inner borders; at control tokens it never does.
        """
        if rendered.count(_PLACEHOLDER) != 1:
            raise ValueError("this checkpoint's chat template does not show the user's text exactly once")
        head, tail = rendered.split(_PLACEHOLDER)
        special = [t.content for t in self.tokenizer.added_tokens_decoder.values() if t.special]
        marks = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))))
        ends = [match.end() for match in marks.finditer(head)]
        first = marks.search(tail)
        if not ends or first is None or first.start() != 0:
            raise ValueError("this checkpoint's chat template has no control tokens around the user's text")
        return self._marked_ids(head[: ends[-1]]), head[ends[-1] :], self._marked_ids(tail)

    def _document_prompt(self, rendered: str) -> tuple[list[int], list[int]]:
        ids = self._marked_ids(rendered)
        if ids.count(self.image_token_id) != 1:
            raise ValueError("this checkpoint's chat template gives an image other than one slot")
        slot = ids.index(self.image_token_id)
        return self._before + ids[:slot], ids[slot + 1 :] + self._after

    def _query_ids(self, text: str) -> tuple[list[int], bool]:
        plain = self._plain_ids(self._plain_head + text)
        room = self.max_query_tokens - sum(map(len, (self._before, self._head, self._tail, self._after)))
        ids = [*self._before, *self._head, *plain[: max(room, 0) if text else None], *self._tail, *self._after]
        return ids, bool(text) and len(plain) > room

    def encode_query(self, text: str) -> Item:
        """Returns the encoded query; texts over the limit lose their end and are marked as truncated."""
        ids, truncated = self._query_ids(text)
        return Item(ids, truncated=truncated)

    def encode_document(self, image: Image.Image) -> Item:
        """Returns the encoded image: scaled to the pixel limit, its slots in the document prompt, packed patches."""
        image = pad_small(image, self.patch_size * self.merge_size, self.max_num_visual_tokens)
        features = self.image_processor(
            images=[image],
            size={"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels},
            do_rescale=False,
            do_normalize=False,
            return_tensors="pt",
        )
        patches = features["pixel_values"]
        assert patches.dtype == torch.uint8, patches.dtype
        grid = tuple(features["image_grid_thw"][0].tolist())
        num_tokens = grid[0] * grid[1] * grid[2] // self.merge_size**2
        before, after = self._document
        token_ids = before + [self.image_token_id] * num_tokens + after
        return Item(token_ids, pack_patches(patches, self.temporal_patch_size), grid)
