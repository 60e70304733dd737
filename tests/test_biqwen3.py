"""contrastors/biqwen3.py and the small floor-1 modules: adapters, loading, pooling, normalisation, temperature."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, Qwen3VLConfig

from contrastors.biqwen3 import BiQwen3, l2_normalize
from contrastors.distributed import GradientBucket, gather_rows, gather_with_grad, pick_device
from contrastors.logit_scale import LogitScale
from contrastors.rand_state import RandContext, seed_step

PIXELS = ([0.5] * 3, [0.5] * 3)

# The shape of Qwen3-VL-2B, from its config.
TEXT_2B = {
    "hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "intermediate_size": 6144, "vocab_size": 151936,
}  # fmt: skip
VISION_2B = {
    "depth": 24, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096, "out_hidden_size": 2048,
    "deepstack_visual_indexes": [5, 11, 17],
}  # fmt: skip


def load(folder, **options) -> BiQwen3:
    return BiQwen3.from_pretrained(str(folder), *PIXELS, **options)


@pytest.mark.parametrize(
    ("vision", "modules", "tensors", "parameters"),
    [(False, (112, 0), 224, 12_845_056), (True, (112, 96), 416, 25_427_968)],
)
def test_lora_of_the_real_2b_shape_has_the_known_size(vision, modules, tensors, parameters):
    with torch.device("meta"):
        backbone = AutoModel.from_config(Qwen3VLConfig(text_config=TEXT_2B, vision_config=VISION_2B))
    model = BiQwen3(backbone.requires_grad_(False), *PIXELS)
    found = model.add_adapter(r=32, alpha=32, dropout=0.05, vision=vision)
    assert (found["language"], found["vision"]) == modules
    trainable = model.trainable_parameters()
    assert len(trainable) == tensors and sum(p.numel() for p in trainable.values()) == parameters


def test_without_lora_vit_no_vision_parameter_trains(tiny_model):
    """O14: q_proj must not catch the vision tower, nor anything but q, k, v, o of the language model."""
    model = load(tiny_model)
    model.add_adapter(4, 8, 0.0, vision=False)
    names = list(model.trainable_parameters())
    assert names and all("language_model" in name and "lora_" in name for name in names)
    assert {name.split(".lora_")[0].rsplit(".", 1)[1] for name in names} == {"q_proj", "k_proj", "v_proj", "o_proj"}


def test_a_model_without_matching_modules_is_an_error(tiny_model):
    model = load(tiny_model)
    model.backbone = model.backbone.visual  # nothing of a language model in it
    with pytest.raises(ValueError, match="LoRA targets"):
        model.add_adapter(4, 8, 0.0, vision=False)


def test_an_untied_lm_head_alone_may_be_left_over(tiny_model, tmp_path):
    folder = tmp_path / "untied"
    shutil.copytree(tiny_model, folder)
    tensors = load_file(folder / "model.safetensors")
    head = next(value for key, value in tensors.items() if "embed_tokens" in key)
    save_file(tensors | {"lm_head.weight": head + 1}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    first, second = load(tiny_model), load(folder)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_another_architecture_is_refused_by_name(tiny_model, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"]}))
    with pytest.raises(ValueError, match="is a bert; these scripts train qwen3_vl"):
        load(tmp_path)


def test_the_base_is_frozen_and_in_the_asked_dtype(tiny_model):
    model = load(tiny_model, dtype=torch.bfloat16)
    assert not model.trainable_parameters() and model.autocast_dtype == torch.bfloat16
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    model.add_adapter(4, 8, 0.0, vision=True)
    assert {p.dtype for p in model.trainable_parameters().values()} == {torch.float32}
    assert model.pixel_mean.dtype == torch.float32


def test_normalising_a_zero_vector_stays_finite():
    """O13: x / |x| is NaN there, and a tiny epsilon would give gradients of 1e12."""
    vectors = torch.zeros(2, 4, requires_grad=True)
    out = l2_normalize(vectors)
    out.sum().backward()
    assert torch.isfinite(out).all() and vectors.grad.abs().max() <= 1e6
    assert l2_normalize(torch.ones(1, 4, dtype=torch.bfloat16)).dtype == torch.float32
    assert torch.allclose(l2_normalize(torch.randn(3, 5)).norm(dim=1), torch.ones(3))


def test_log_scale_starts_at_the_inverse_temperature_and_is_clamped():
    scale = LogitScale(0.07)
    assert scale.log_scale.item() == pytest.approx(2.6593, abs=1e-4)
    assert scale(torch.ones(1)).item() == pytest.approx(1 / 0.07)
    with torch.no_grad():
        scale.log_scale.fill_(9.0)
    assert scale(torch.ones(1)).item() == pytest.approx(math.exp(9))  # no clamp in forward
    scale.clamp_()
    assert scale.log_scale.item() == pytest.approx(math.log(100)) and scale.temperature == pytest.approx(0.01)
    with torch.no_grad():
        scale.log_scale.fill_(-3.0)
    scale.clamp_()
    assert scale.log_scale.item() == 0.0
    for wrong in (0.0, -1.0, 1e-9, 2.0):
        with pytest.raises(ValueError, match="--temperature"):
            LogitScale(wrong)


def test_rand_context_replays_masks_and_leaves_the_stream_where_it_was():
    torch.manual_seed(1)
    context = RandContext("cpu")
    first = torch.nn.functional.dropout(torch.ones(100), 0.5)
    after = torch.get_rng_state()
    with context.replay():
        assert torch.equal(first, torch.nn.functional.dropout(torch.ones(100), 0.5))
    assert torch.equal(after, torch.get_rng_state())


def test_the_random_stream_of_a_step_is_a_function_of_seed_step_and_rank():
    draws = set()
    for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]:
        seed_step(*key)
        first = torch.rand(3)
        seed_step(*key)
        assert torch.equal(first, torch.rand(3))
        draws.add(first[0].item())
    assert len(draws) == 4


def test_gradients_are_views_of_one_bucket():
    weights = [torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(3))]
    bucket = GradientBucket(weights, num_extras=2)
    (weights[0].sum() * 3).backward()
    assert bucket.gradients.tolist() == [3.0] * 4 + [0.0] * 3
    bucket.extras.copy_(torch.tensor([5.0, 7.0]))
    bucket.reduce()
    assert bucket.flat.tolist() == [3.0] * 4 + [0.0] * 3 + [5.0, 7.0]
    (weights[0].sum()).backward()
    assert weights[0].grad.tolist() == [[4.0, 4.0], [4.0, 4.0]]
    bucket.zero_()
    assert not weights[0].grad.any() and not bucket.extras.any()
    with pytest.raises(ValueError, match="must exist and share dtype"):
        GradientBucket([])


def test_collectives_do_nothing_in_one_process():
    rows = torch.ones(3, 2, requires_grad=True)
    assert gather_with_grad(rows) is rows and gather_rows(rows, 3) is rows


def test_a_device_that_is_not_there_is_one_sentence():
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="--device cuda"):
            pick_device("cuda")
    assert pick_device("cpu").type == "cpu"
