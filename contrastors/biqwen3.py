"""Qwen3-VL as a bi-encoder: one L2-normalised vector for a query's text or a document's image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModel
from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

from contrastors.pixels import unpack_patches

MODEL_TYPES = ("qwen3_vl",)
LANGUAGE_TARGETS = r"language_model\.layers\.\d+\.self_attn\.[qkvo]_proj"
VISION_TARGETS = r"visual\.blocks\.\d+\.(attn\.(qkv|proj)|mlp\.linear_fc[12])"
NORM_EPSILON = 1e-6  # hidden states have norms near sqrt(D); at a zero vector the gradient stays below 1e6


def _clear_rope_deltas(model: nn.Module) -> None:
    """Forgets the position offsets of the last call, which Qwen models keep and could apply to the next one."""
    for module in model.modules():
        if getattr(module, "rope_deltas", None) is not None:
            module.rope_deltas = None


def pool_last_token(hidden: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
    """Returns the hidden state of the last real token of each row, right for either padding side.

    Args:
        hidden: (n, L, D).
        attention_mask: (n, L), 1 at real tokens.

    Returns:
        (n, D).
    """
    places = torch.arange(attention_mask.shape[1], device=hidden.device)
    last = (attention_mask.to(places.dtype) * places).argmax(dim=1)
    return hidden[torch.arange(len(hidden), device=hidden.device), last]


def l2_normalize(vectors: torch.Tensor) -> torch.Tensor:
    """Returns (n, D) unit vectors in at least fp32; a zero vector stays zero."""
    vectors = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
    return vectors / torch.linalg.vector_norm(vectors, dim=-1, keepdim=True).clamp_min(NORM_EPSILON)


class PatchProjection(nn.Module):
    """The patch embedding as one matrix product: a Conv3d whose kernel equals its stride, eight times as fast on a CPU.

    Parameters keep their names and shapes, so files of weights do not notice; results differ by rounding.

    Args:
        convolution: The Conv3d, whose parameters are taken over.
    """

    def __init__(self, convolution: nn.Conv3d):
        super().__init__()
        assert convolution.kernel_size == convolution.stride and not any(convolution.padding), convolution
        self.weight, self.bias = convolution.weight, convolution.bias

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """Returns (P, D) of patches (P, channels, frames, rows, columns)."""
        return nn.functional.linear(patches.flatten(1), self.weight.flatten(1), self.bias)


def read_config(model: str) -> Any:
    """Returns the config of a checkpoint (hub name or folder).

    Raises:
        ValueError: There is none, or it is of another architecture.
    """
    try:
        config = AutoConfig.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(f"--model {model}: {_first_line(error)}") from error
    if config.model_type not in MODEL_TYPES:
        raise ValueError(f"--model {model} is a {config.model_type}; these scripts train {', '.join(MODEL_TYPES)}")
    return config


class BiQwen3(nn.Module):
    """Bi-encoder on a bare Qwen3VLModel, with or without a PEFT adapter.

    Args:
        backbone: Qwen3VLModel (no lm_head).
        pixel_mean: (3,) channel means of the image processor, 0 to 1.
        pixel_std: (3,) standard deviations.
        autocast_dtype: Compute dtype of the forward on cuda; None = that of the weights.

    Attributes:
        documents_by_base: Documents are embedded as if there were no adapter: the other half of query-side tuning.
    """

    def __init__(
        self,
        backbone: nn.Module,
        pixel_mean: list[float],
        pixel_std: list[float],
        autocast_dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.backbone = backbone
        self.autocast_dtype = autocast_dtype
        self.documents_by_base = False
        # Rounded as the torchvision backend rounds its fused rescale and normalise: mean / (1/255) in fp32.
        self.register_buffer("pixel_mean", torch.tensor(pixel_mean) * (1.0 / (1 / 255)), persistent=False)
        self.register_buffer("pixel_std", torch.tensor(pixel_std) * (1.0 / (1 / 255)), persistent=False)
        for module in backbone.modules():  # one at most, the patch embedding
            if isinstance(getattr(module, "proj", None), nn.Conv3d):
                module.proj = PatchProjection(module.proj)

    @classmethod
    def from_pretrained(
        cls,
        model: str,
        pixel_mean: list[float],
        pixel_std: list[float],
        dtype: torch.dtype = torch.float32,
        attn_implementation: str = "sdpa",
    ) -> BiQwen3:
        """Returns the frozen base model of a checkpoint.

        Args:
            model: Hub name or folder.
            pixel_mean: Of the checkpoint's image processor.
            pixel_std: Of the checkpoint's image processor.
            dtype: Of the weights in memory; bf16 also computes in bf16 autocast.
            attn_implementation: sdpa, flash_attention_2 or eager.

        Raises:
            ValueError: No such checkpoint, another architecture, or weights that are missing or left over. An untied
                checkpoint's `lm_head.weight` alone may be left over: an embedding model has no use for it.
        """
        config = read_config(model)
        options = {"dtype": dtype, "attn_implementation": attn_implementation, "use_safetensors": True}
        try:
            backbone, info = AutoModel.from_pretrained(
                model, config=config, output_loading_info=True, trust_remote_code=False, **options
            )
        except (OSError, ValueError, ImportError, RuntimeError, SafetensorError) as error:
            raise ValueError(f"--model {model}: {_first_line(error)}") from error
        missing, left_over = sorted(info["missing_keys"]), sorted(set(info["unexpected_keys"]) - {"lm_head.weight"})
        if missing or left_over:
            raise ValueError(
                f"--model {model}: {len(missing)} weights are missing ({', '.join(missing[:3])}) and {len(left_over)} "
                f"are left over ({', '.join(left_over[:3])}); they would be random or ignored"
            )
        backbone.requires_grad_(False)
        return cls(backbone, pixel_mean, pixel_std, torch.bfloat16 if dtype == torch.bfloat16 else None)

    @property
    def base(self) -> nn.Module:
        """The Qwen3VLModel inside, whether an adapter is wrapped around it or not."""
        return self.backbone.get_base_model() if isinstance(self.backbone, PeftModel) else self.backbone

    @property
    def embedding_size(self) -> int:
        """D."""
        return self.base.config.text_config.hidden_size

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
        image_features: BaseModelOutputWithDeepstackFeatures | None = None,
    ) -> torch.Tensor:
        """Returns one unit vector a row.

        Args:
            input_ids: (n, L) int64.
            attention_mask: (n, L), 1 at real tokens; padding may stand on either side.
            pixel_values: (P, 3 p p) uint8 packed patches, or (P, 3 T p p) floats as the image processor gives them;
                None where the rows are texts.
            image_grid_thw: (images, 3) patches of each image: frames, rows, columns.
            image_features: What `encode_images` gave in place of the pixels.

        Returns:
            (n, D), at least fp32.
        """
        _clear_rope_deltas(self)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": False}
        if image_grid_thw is not None:
            is_image = (input_ids == self.base.config.image_token_id).to(torch.int32)
            inputs |= {"image_grid_thw": image_grid_thw, "mm_token_type_ids": is_image}
        if image_features is not None:
            inputs["mm_encoder_outputs"] = {"image": image_features}
        elif pixel_values is not None:
            inputs["pixel_values"] = self._normalize(pixel_values)
        by_base = self.documents_by_base and image_grid_thw is not None
        with self._autocast(input_ids.device), self.without_adapter() if by_base else nullcontext():
            hidden = self.backbone(**inputs).last_hidden_state
        return l2_normalize(pool_last_token(hidden, attention_mask))

    @torch.no_grad()
    def encode_images(self, chunk: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
        """Returns a chunk with what the vision part makes of its images in place of their pixels, without graph.

        The forward of such a chunk equals that of the chunk itself bit by bit. It draws no random number: dropout is
        in adapters only, and where the vision part has one, its features are no constants.

        Args:
            chunk: Arguments of `forward`; without pixels it is returned as it is.
        """
        if "pixel_values" not in chunk:
            return chunk
        assert not self.trains_vision, "features of a vision part that trains have no gradient"
        grid = chunk["image_grid_thw"]
        with self._autocast(grid.device):
            features = self.base.get_image_features(self._normalize(chunk["pixel_values"]), grid, return_dict=True)
        features.last_hidden_state = None  # before the merger: four times as large, and nobody asks for it
        return {key: value for key, value in chunk.items() if key != "pixel_values"} | {"image_features": features}

    def _normalize(self, pixels: torch.Tensor) -> torch.Tensor:
        if pixels.dtype != torch.uint8:
            return pixels
        frames = self.base.config.vision_config.temporal_patch_size
        return unpack_patches(pixels, self.pixel_mean, self.pixel_std, frames)

    def _autocast(self, device: torch.device) -> torch.autocast:
        enabled = self.autocast_dtype is not None
        return torch.autocast(device.type, self.autocast_dtype or torch.bfloat16, enabled=enabled)

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Computes with the weights of the base model alone inside the block."""
        if not isinstance(self.backbone, PeftModel):
            yield
            return
        trainable = {id(parameter) for parameter in self.trainable_parameters().values()}
        self.backbone.base_model.disable_adapter_layers()
        try:
            yield
        finally:
            self.backbone.base_model.enable_adapter_layers()
            for parameter in self.parameters():  # PEFT makes the adapter trainable again
                parameter.requires_grad_(id(parameter) in trainable)

    @property
    def trains_vision(self) -> bool:
        """Whether anything in the vision part trains."""
        return any(parameter.requires_grad for parameter in self.base.visual.parameters())

    def add_adapter(self, r: int, alpha: int, dropout: float, vision: bool) -> dict[str, int]:
        """Puts a fresh LoRA on the language model's attention and, where asked, on every vision block.

        Returns:
            Number of adapted modules of each part.

        Raises:
            ValueError: A part has no module that matches.
        """
        targets = f"{LANGUAGE_TARGETS}|{VISION_TARGETS}" if vision else LANGUAGE_TARGETS
        config = LoraConfig(
            r=r,
            lora_alpha=alpha,
            lora_dropout=dropout,
            target_modules=rf"(.*\.)?({targets})",
            task_type=TaskType.FEATURE_EXTRACTION,
            bias="none",
        )
        try:
            self.backbone = get_peft_model(self.backbone, config)
        except ValueError as error:
            raise ValueError(f"no module of this model matches the LoRA targets ({_first_line(error)})") from error
        found = self.count_adapted()
        if not found["language"] or (vision and not found["vision"]):
            raise ValueError(f"no module matches the LoRA targets of one part: {found}")
        return found

    def count_adapted(self) -> dict[str, int]:
        """Returns the number of modules that carry a LoRA, for the language and the vision part."""
        names = [name for name, module in self.base.named_modules() if hasattr(module, "lora_A")]
        vision = sum(name.startswith("visual.") for name in names)
        return {"language": len(names) - vision, "vision": vision}

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Returns the parameters that train, by name, in a fixed order."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def enable_gradient_checkpointing(self) -> None:
        """Recomputes each layer in its backward: less memory, about a third more time; gradients are equal.

        Non-reentrant: the reentrant kind gives no gradient to adapters over a frozen base.
        """
        self.base.gradient_checkpointing_enable({"use_reentrant": False})


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
