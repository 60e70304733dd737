"""What `--plan` promises: FLOP as torch counts them, memory as autograd saves it, files as they are written."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
import torch

from benchmarks.models import REAL_2B, TINY, build_model, count_flop, make_config
from contrastors import costs
from contrastors.biqwen3 import read_config
from contrastors.chunking import GIB, Chunking, make_full_chunk, measure_chunk
from contrastors.costs import Setting, estimate_chunk, language_flop, step_flop, vision_flop
from contrastors.loading import load_bi_encoder
from contrastors.loss import TILE_LOGITS, WHOLE_LOGITS
from contrastors.plan import count_parameters, make_plan, make_setting, plan_chunk
from tests.runs import arguments, train
from train_contrastors import build_parser

REAL_8B = REAL_2B._replace(
    hidden=4096, inner=12288, layers=36, heads=32, vision_hidden=1152, vision_inner=4304, vision_layers=27,
    deepstack=(8, 16, 24),
)  # fmt: skip
LORA_R = 4


def parse(*argv: object):
    return build_parser().parse_args(list(map(str, argv)))


def save_config(folder, shape):
    make_config(shape).save_pretrained(folder)
    return folder


# ------------------------------------------------------------------------------------------------------- FLOP and bytes


@pytest.mark.parametrize(
    ("dtype", "vision", "dropout", "checkpointing", "visual"),
    [
        ("fp32", False, 0.0, False, 16), ("fp32", False, 0.1, False, 64), ("fp32", False, 0.0, True, 36),
        ("fp32", True, 0.0, False, 16), ("fp32", True, 0.1, True, 64), ("bf16", False, 0.1, False, 64),
        ("bf16", False, 0.0, False, 16), ("bf16", True, 0.1, False, 16), ("bf16", True, 0.0, True, 64),
    ],
)  # fmt: skip
def test_flop_and_saved_bytes_of_a_chunk_are_those_that_torch_finds(
    tiny_model, monkeypatch, dtype, vision, dropout, checkpointing, visual
):
    device, config, items = torch.device("cpu"), read_config(str(tiny_model)), 2
    model, processor = load_bi_encoder(str(tiny_model), device, dtype, max_num_visual_tokens=visual)
    model.add_adapter(LORA_R, 8, dropout, vision)
    if checkpointing:
        model.enable_gradient_checkpointing()
    chunk = make_full_chunk(processor, Chunking(items))
    flop = count_flop(lambda: model.train()(**chunk).sum().backward())
    if (
        checkpointing and not vision
    ):  # what a frozen part saves for a layer dies with the layer, but the probe counts it
        found = measure_chunk(model, model.encode_images(chunk), False)
    else:
        found = measure_chunk(model, chunk, reuse_features=not vision)
    monkeypatch.setattr(costs, "DOCUMENT_PROMPT", chunk["input_ids"].shape[1] - visual)  # another tokenizer
    setting = Setting(
        queries=items, group=1, visual=visual, documents_chunk=items, lora_r=LORA_R, dropout=dropout > 0,
        lora_vit=vision, checkpointing=checkpointing, half=dtype == "bf16", on_cuda=False,
    )  # fmt: skip
    cost = estimate_chunk(config, setting, count_parameters(config, LORA_R, vision).adapter)
    assert cost.tokens == found.tokens and abs(cost.graph / found.graph - 1) < 0.03, (cost, found)
    assert found.features in (cost.features, 0) and (cost.features > 0) is not vision
    whole = language_flop(config.text_config, setting.document_tokens, setting)
    whole += vision_flop(config.vision_config, visual * 4, setting)
    assert abs(items * sum(whole) / flop - 1) < (0.02 if checkpointing else 0.0001)


def test_a_native_tile_costs_what_the_real_model_is_known_to_cost():
    """875 x 1024 pixels: 3,456 patches in 24 blocks are 3.3 TFLOP, about 890 tokens 2.7 TFLOP."""
    config, setting = make_config(REAL_2B), Setting(1, 1, 864, lora_r=0)
    mergers = 4 * costs.linear_flop(864, 4096, 4096).forward + 4 * costs.linear_flop(864, 4096, 2048).forward
    assert abs((vision_flop(config.vision_config, 3456, setting).forward - mergers) / 3.3e12 - 1) < 0.02
    assert abs(language_flop(config.text_config, 890, setting).forward / 2.7e12 - 1) < 0.02
    for visual, share in ((256, 0.46), (1024, 0.57), (1800, 0.63), (4096, 0.73)):
        vision = vision_flop(config.vision_config, 4 * visual, setting).forward
        language = language_flop(config.text_config, visual + costs.DOCUMENT_PROMPT, setting).forward
        assert abs(vision / (vision + language) - share) < 0.04, visual


def test_retained_graphs_are_not_replayed_and_reused_features_are_not_computed_again():
    config, setting = make_config(TINY), Setting(8, 3, 64, documents_chunk=4, lora_r=LORA_R)
    queries, documents = setting.num_chunks
    replays = [step_flop(config, setting, n)["replay"] for n in (0, documents // 2, documents, documents + queries, 99)]
    assert replays == sorted(replays, reverse=True) and replays[-1] == replays[-2] == 0 and replays[2] > 0
    again = step_flop(config, replace(setting, reuse_features=False), 0)["replay"] - replays[0]
    assert again == setting.documents * vision_flop(config.vision_config, 64 * 4, setting).forward


def test_logits_beyond_the_whole_matrix_cost_a_tile():
    small, large = Setting(1024, 1, 16), Setting(65536, 3, 16)
    assert costs.loss_bytes(small) == 4 * costs.LOGITS_COPIES * 1024**2
    assert large.queries * large.documents > WHOLE_LOGITS
    assert costs.loss_bytes(large) <= 4 * costs.LOGITS_COPIES * TILE_LOGITS
    assert costs.loss_bytes(replace(large, loss_tile=8)) == 4 * costs.LOGITS_COPIES * 8 * large.documents


# ------------------------------------------------------------------------------------------------------ the real shapes


@pytest.mark.parametrize(
    ("shape", "language", "vision", "adapter", "tensors", "graph_gb"),
    [(REAL_2B, 1.7206e9, 4.07e8, 12_845_056, 224, (1.5, 4.5)), (REAL_8B, 7.568e9, 5.76e8, 30_670_848, 288, (4, 11))],
)
def test_the_real_sizes_get_a_sensible_plan(shape, language, vision, adapter, tensors, graph_gb):
    config = make_config(shape)
    sizes = count_parameters(config, 32, False)
    if shape is REAL_8B:
        assert sizes.tensors == tensors
    assert abs(sizes.language / language - 1) < 1e-3 and abs(sizes.vision / vision - 1) < 0.01
    assert (sizes.adapter, sizes.tensors) == (adapter, tensors)
    setting = Setting(queries=64, group=3, visual=1024)
    rows = [
        plan_chunk(config, sizes, replace(setting, documents_chunk=chunk), 40 * GIB, "auto") for chunk in (1, 2, 4, 8)
    ]
    for row in rows:
        assert graph_gb[0] < row.graph / row.documents / GIB < graph_gb[1]
        assert row.retained * row.graph + row.features <= 40 * GIB < row.total + 40 * GIB
        assert row.total > 2 * (sizes.language + sizes.vision)
    assert [row.retained for row in rows] == sorted((row.retained for row in rows), reverse=True)
    assert abs(rows[1].graph / rows[0].graph - 2) < 0.05
    assert count_parameters(make_config(REAL_2B), 32, True).tensors == 416


# ---------------------------------------------------------------------------------------------------------- the command


def test_the_flag_prints_a_plan_on_the_main_rank_without_data_weights_or_a_run(tmp_path, monkeypatch, capsys):
    folder = save_config(tmp_path / "model", TINY)
    argv = ["--plan", "--model", str(folder), "--batch-size", "16", "--num-hard-negatives", "2", "--device", "cuda"]
    argv += ["--output-dir", str(tmp_path / "run"), "--memory-budget-gb", "0.01", "--train-jsonl", str(tmp_path / "no")]
    monkeypatch.setenv("WORLD_SIZE", "2")
    outputs = []
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        assert train(argv) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[1] == "" and not (tmp_path / "run").exists() and os.listdir(folder) == ["config.json"]
    assert "global batch: 32 queries against 96 columns, world size 2" in outputs[0]
    assert "| 2 (this run) |" in outputs[0] and "collectives of a step: 3 (" in outputs[0]


def test_a_plan_of_no_model_or_of_a_run_that_has_begun_is_refused(tmp_path, capsys):
    assert train(["--plan", "--model", str(tmp_path)]) == 1
    assert f"--model {tmp_path}" in capsys.readouterr().err
    assert train(["--plan", "--resume", "latest"]) == 2
    assert "--plan tells of a training that is yet to begin" in capsys.readouterr().err


def test_the_setting_follows_the_flags(tmp_path):
    config = make_config(TINY)
    flags = ("--batch-size", 8, "--num-hard-negatives", 1, "--max-num-visual-tokens", 64, "--lora-dropout", 0)
    setting = make_setting(parse(*flags, "--grad-cache-chunk", 99, "--dtype", "fp32"), config, 4, on_cuda=True)
    assert (setting.documents, setting.documents_chunk, setting.visual, setting.world_size) == (16, 16, 64, 4)
    assert (setting.half, setting.dropout, setting.reuse_features) == (False, False, True)
    setting = make_setting(parse(*flags, "--grad-cache-chunk", 8, "--chunk-tokens", 200, "--lora-vit"), config, 1, True)
    assert (setting.documents_chunk, setting.half, setting.reuse_features) == (3, True, False)


def test_without_a_device_to_ask_no_memory_is_invented(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    args = parse("--model", save_config(tmp_path / "model", TINY), "--device", "cuda")
    assert "no cuda device is here to ask" in make_plan(args, 1)


def test_a_checkpoint_takes_the_disk_of_the_plan(tiny_model, colour_set):
    assert train(arguments(tiny_model, colour_set, colour_set / "run", max_steps=1, eval_steps=0, lora_r=64)) == 0
    adapter = count_parameters(read_config(str(tiny_model)), 64, False).adapter
    written = sum(file.stat().st_size for file in (colour_set / "run" / "checkpoint-1").iterdir())
    saved = json.loads((colour_set / "run" / "args.json").read_text())
    assert saved["plan"] is False and abs(written / (12 * adapter) - 1) < 0.2, (written, 12 * adapter)


def test_models_of_the_benchmarks_have_the_parameters_of_the_plan():
    model = build_model(TINY, vision_adapter=True)
    sizes = count_parameters(make_config(TINY), 8, True)
    assert sum(p.numel() for p in model.trainable_parameters().values()) == sizes.adapter
    assert sum(p.numel() for p in model.parameters()) == sizes.language + sizes.vision + sizes.adapter
