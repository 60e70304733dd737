"""An export gives the vectors of base and adapter, whoever loads it; what does not is never left behind."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch.nn.functional import cosine_similarity
from transformers import Qwen3VLForConditionalGeneration

from contrastors.biqwen3 import BiQwen3
from contrastors.checkpoint import load_adapter
from contrastors.export import build_parser, export_card, main
from contrastors.export_check import Comparison, Probes, check, choose_probes, embed
from contrastors.export_files import (
    check_space,
    copy_files,
    find_base_folder,
    read_source,
    write_generation_adapter,
    write_weights,
)
from contrastors.loading import load_bi_encoder
from contrastors.processing import BiQwen3Processor
from tests.conftest import make_colour_set
from tests.runs import arguments, environment, train

# What a stranger writes: no line of ours, only the libraries and what the export says of itself.
LOADERS = """
import json, sys
from pathlib import Path
import torch
from PIL import Image
from peft import PeftModel
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoProcessor, Qwen3VLForConditionalGeneration

merged, base, adapter, generation, folder = map(Path, sys.argv[1:])
probes = json.loads((folder / "probes.json").read_text())
about = json.loads((merged / "contrastors.json").read_text())
images = [Image.open(folder / name).convert("RGB") for name in probes["images"]]
processor, fp32 = AutoProcessor.from_pretrained(merged), {"dtype": torch.float32}
auto = lambda place: AutoModel.from_pretrained(place, **fp32)
full = lambda place: Qwen3VLForConditionalGeneration.from_pretrained(place, **fp32)

@torch.no_grad()
def plain(model):
    vectors = []
    contents = [("query", {"type": "text", "text": text}) for text in probes["queries"]]
    for kind, content in contents + [("document", {"type": "image", "image": image}) for image in images]:
        system = {"role": "system", "content": [{"type": "text", "text": about[kind + "_instruction"]}]}
        inputs = processor.apply_chat_template(
            [system, {"role": "user", "content": [content]}], tokenize=True, add_generation_prompt=True,
            return_dict=True, return_tensors="pt",
        )
        vectors.append(torch.nn.functional.normalize(model(**inputs).last_hidden_state[:, -1], dim=1))
    return torch.cat(vectors)

found = {
    "Qwen3VLForConditionalGeneration": plain(full(merged).eval().model),
    "AutoModel": plain(auto(merged).eval()),
    "PEFT on AutoModel": plain(PeftModel.from_pretrained(auto(base), adapter).eval()),
    "PEFT on Qwen3VLForConditionalGeneration":
        plain(PeftModel.from_pretrained(full(base), generation).get_base_model().eval().model),
}
st = SentenceTransformer(str(merged), device="cpu", model_kwargs=fp32)
form = {"convert_to_tensor": True, "batch_size": 3}
documents = st.encode_document(images, **form)
found["encode_query, encode_document"] = torch.cat([st.encode_query(probes["queries"], **form), documents])
named = [st.encode(probes["queries"], prompt_name="query", **form), st.encode(images, prompt_name="document", **form)]
found["encode with prompt_name"] = torch.cat(named)
found["encode_query of a long text"] = st.encode_query([probes["long"]], **form)
found["encode of a long text"] = st.encode([probes["long"]], prompt_name="query", **form)
save_file({key: value.contiguous() for key, value in found.items()}, folder / "vectors.safetensors")
"""


def make_base(tiny_model: Path, folder: Path, kind: str) -> Path:
    """The tiny checkpoint: tied fp32 as it is, with an lm_head of its own, or in bf16."""
    shutil.copytree(tiny_model, folder)
    config = json.loads((folder / "config.json").read_text())
    if kind == "untied":
        config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = False
        tensors = load_file(folder / "model.safetensors")
        shape = tensors["model.language_model.embed_tokens.weight"].shape
        tensors["lm_head.weight"] = torch.randn(shape, generator=torch.Generator().manual_seed(3))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if kind == "bf16":
        config["dtype"] = "bfloat16"
        tensors = {key: value.bfloat16() for key, value in load_file(folder / "model.safetensors").items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_adapter(base: Path, folder: Path, vision: bool = False, size: float = 0.1, **limits: int) -> Path:
    """An adapter with B matrices of the given size, and the part of a trainer_state.json that export reads."""
    processor = BiQwen3Processor.from_pretrained(str(base), **({"max_num_visual_tokens": 16} | limits))
    model = BiQwen3.from_pretrained(str(base), [0.5] * 3, [0.5] * 3)
    model.add_adapter(r=4, alpha=8, dropout=0.0, vision=vision)
    noise = torch.Generator().manual_seed(7)
    for name, parameter in model.trainable_parameters().items():
        spread = size if ".lora_B." in name else parameter.shape[1] ** -0.5
        parameter.data = torch.randn(parameter.shape, generator=noise) * spread
    model.backbone.save_pretrained(folder)
    state = {"args": {"model": str(base)}, "processor": processor.describe()}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    return folder


def reference(base: Path, adapter: Path, probes: Probes, **limits: int) -> torch.Tensor:
    model, processor = load_bi_encoder(str(base), torch.device("cpu"), "fp32", **limits)
    load_adapter(model, adapter, trainable=False)
    return embed(model.eval(), processor, probes)


def export(adapter: Path, output: Path, kind: str = "merged", *more: str) -> int:
    target = ["--for", "generation"] if kind == "adapter" else []
    argv = ["--adapter", str(adapter), "--output", str(output), "--format", kind, "--device", "cpu", *target, *more]
    try:
        return main(argv)
    except SystemExit as stop:
        return int(stop.code or 0)


@pytest.fixture
def adapter(tiny_model, tmp_path) -> Path:
    return make_adapter(tiny_model, tmp_path / "adapter")


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("out"))


# ----------------------------------------------------------------------------------------------- who loads it elsewhere


CASES = {
    "tied, language": ("tied", False, {"max_num_visual_tokens": 16, "max_query_tokens": 512}),
    "untied, vision": ("untied", True, {"max_num_visual_tokens": 96, "max_query_tokens": 64}),
    "bf16, vision": ("bf16", True, {"max_num_visual_tokens": 16, "max_query_tokens": 512}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_every_loader_gives_our_vectors_in_a_fresh_process(tiny_model, tmp_path, case):
    kind, vision, limits = CASES[case]
    base = make_base(tiny_model, tmp_path / "base", kind)
    adapter = make_adapter(base, tmp_path / "adapter", vision, **limits)
    assert export(adapter, tmp_path / "st", "sentence-transformers") == 0
    assert_layout(base, adapter, tmp_path / "st")
    (tmp_path / "generation").mkdir()
    write_generation_adapter(read_source(str(adapter), None, None, None), tmp_path / "generation")

    colours = make_colour_set(tmp_path)
    large = Image.effect_mandelbrot((700, 500), (-2, -1.5, 1, 1.5), 50).convert("RGB")  # over every pixel limit here
    images = [Image.open(colours / f"c{n:02d}.png").convert("RGB") for n in range(4)] + [large]
    large.save(tmp_path / "large.png")
    names = [f"c{n:02d}.png" for n in range(4)] + ["large.png"]
    queries = ["red header, blue footer", "grün?", "a dot, top left, and a rather longer text beside it", "42"]
    long = "a text over the limit " * 512
    (tmp_path / "probes.json").write_text(json.dumps({"queries": queries, "images": names, "long": long}))
    command = [tmp_path / "st", base, adapter, tmp_path / "generation", tmp_path]
    done = subprocess.run(
        [sys.executable, "-c", LOADERS, *map(str, command)], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stderr[-3000:]

    ours = reference(base, adapter, Probes([*queries, long], images), **limits)
    expected, expected_long = torch.cat([ours[:4], ours[5:]]), ours[4:5]
    bare, _ = load_bi_encoder(str(base), torch.device("cpu"), "fp32", **limits)
    without = embed(bare.eval(), BiQwen3Processor.from_pretrained(str(base), **limits), Probes(queries, images))
    assert cosine_similarity(expected, without, dim=1).max() < 0.99  # the comparison would notice a missing adapter
    found = load_file(tmp_path / "vectors.safetensors")
    assert len(found) == 8
    for loader, vectors in found.items():
        wanted = expected_long if "long" in loader else expected
        if loader == "encode of a long text" and limits["max_query_tokens"] < 512:
            continue  # encode() knows of no query: it cuts where a document would be too long
        deviation = float((1 - cosine_similarity(vectors.double(), wanted, dim=1)).abs().max())
        print(f"{case}: {loader}: {deviation:.1e}")  # shown by pytest -s: the figures in docs/export.md
        assert deviation <= 1e-4, loader


def assert_layout(base: Path, adapter: Path, output: Path) -> None:
    """Names, dtypes and every byte that is not adapted are those of the base checkpoint."""
    old, new = (load_file(folder / "model.safetensors") for folder in (base, output))
    assert {key: value.dtype for key, value in old.items()} == {key: value.dtype for key, value in new.items()}
    keys = load_file(adapter / "adapter_model.safetensors")
    adapted = {"model." + key.removeprefix("base_model.model.").split(".lora_")[0] + ".weight" for key in keys}
    assert {key for key in old if not torch.equal(old[key], new[key])} == adapted
    assert (output / "config.json").read_bytes() == (base / "config.json").read_bytes()


@pytest.mark.slow
def test_a_real_checkpoint_is_exported_with_its_table_and_compared_on_its_rows(tiny_model, tmp_path, capsys):
    data, base = make_colour_set(tmp_path), make_base(tiny_model, tmp_path / "base", "tied")
    (base / "modules.json").write_text("[]")  # of another export: it would make this one a sentence-transformers model
    assert train(arguments(base, data, data / "run", lora_vit=True)) == 0
    assert export(data / "run" / "checkpoint-4", tmp_path / "out") == 0
    assert_layout(base, data / "run" / "checkpoint-4", tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {path.name for path in base.iterdir()} - {"modules.json"} | {"contrastors.json", "README.md"}
    assert "merged; read back on 7 queries and 6 images" in capsys.readouterr().out
    about = json.loads((tmp_path / "out" / "contrastors.json").read_text())
    assert about["base_model"] == "base" and about["max_num_visual_tokens"] == 16
    assert about["compared"]["smallest_cosine"] > 0.99999 and about["compared"]["lost"] < 0.001
    card = (tmp_path / "out" / "README.md").read_text()
    state = json.loads((data / "run" / "checkpoint-4" / "trainer_state.json").read_text())
    before, after = state["base_metrics"], state["last_metrics"]
    assert f"| mrr | {before['mrr']:.4f} [" in card and f"| {after['mrr']:.4f} [" in card
    assert re.search(r"Images: at most 16 visual tokens \(16384 pixels\)", card)
    for path in (tmp_path / "out").rglob("*.[jm][sd]*"):
        assert str(tmp_path) not in path.read_text(encoding="utf-8"), f"{path.name} names a folder of this machine"


# --------------------------------------------------------------------------------------------------------- the layout


def test_a_sharded_checkpoint_keeps_its_shards_and_index(tiny_model, tmp_path):
    base = make_base(tiny_model, tmp_path / "base", "bf16")
    model = Qwen3VLForConditionalGeneration.from_pretrained(base, dtype=torch.bfloat16)
    (base / "model.safetensors").unlink()
    model.save_pretrained(base, max_shard_size="100KB")
    shards = sorted(path.name for path in base.glob("*.safetensors"))
    assert len(shards) > 2
    name = "model.language_model.layers.1.self_attn.q_proj.weight"
    merged = {name: torch.full_like(model.get_parameter(name), 0.5, dtype=torch.float32)}
    for dtype, precision, factor in (("auto", "bf16", 1), ("fp32", "fp32", 2)):
        (tmp_path / dtype).mkdir()
        assert write_weights(base, merged, tmp_path / dtype, dtype) == precision
        assert sorted(path.name for path in (tmp_path / dtype).glob("*.safetensors")) == shards
        old, new = (json.loads((f / "model.safetensors.index.json").read_text()) for f in (base, tmp_path / dtype))
        assert new["weight_map"] == old["weight_map"]
        assert new["metadata"]["total_size"] == old["metadata"]["total_size"] * factor
        assert (load_file(tmp_path / dtype / new["weight_map"][name])[name] == 0.5).all()
    with pytest.raises(ValueError, match="holds no weight model.nowhere"):
        write_weights(base, merged | {"model.nowhere": merged[name]}, tmp_path / "auto", "auto")


def test_a_checkpoint_without_the_model_level_keeps_its_names(tiny_model, tmp_path):
    tensors = load_file(tiny_model / "model.safetensors")
    base = tmp_path / "bare"
    base.mkdir()
    save_file({key.removeprefix("model."): value for key, value in tensors.items()}, base / "model.safetensors")
    name = "model.language_model.layers.1.self_attn.q_proj.weight"
    (tmp_path / "out").mkdir()
    write_weights(base, {name: torch.zeros_like(tensors[name])}, tmp_path / "out", "auto")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == load_file(base / "model.safetensors").keys()
    assert not written[name.removeprefix("model.")].any()


SIZE = {"shortest_edge": 4096, "longest_edge": 16384}


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [("processor_config.json", {"image_processor": {"size": 1}, "video_processor": {"size": 2}},
      {"image_processor": {"size": SIZE}, "video_processor": {"size": 2}}),
     ("preprocessor_config.json", {"size": 1, "patch_size": 16}, {"size": SIZE, "patch_size": 16}),
     ("preprocessor_config.json", {"min_pixels": 1, "max_pixels": 2}, {"min_pixels": 4096, "max_pixels": 16384}),
     ("video_preprocessor_config.json", {"size": 3}, {"size": 3})],
)  # fmt: skip
def test_pixel_limits_go_into_the_image_processor_wherever_it_is_described(tmp_path, name, settings, expected):
    base, output = tmp_path / "base", tmp_path / "out"
    base.mkdir(), output.mkdir(), (base / "LICENSES").mkdir()
    kept = {"LICENSE": "text", "merges.txt": "a b", "chat_template.jinja": "{{ x }}"}
    gone = {"README.md": "card", "sentence_bert_config.json": "{}", "pytorch_model.bin": "weights"}
    config = {"torch_dtype": "bfloat16", "text_config": {"dtype": "bfloat16"}, "vision_config": {}}
    for file, text in {**kept, **gone, name: json.dumps(settings), "config.json": json.dumps(config)}.items():
        (base / file).write_text(text)
    copy_files(base, output, {"min_pixels": 4096, "max_pixels": 16384}, "fp32")
    assert {path.name for path in output.iterdir()} == {*kept, name, "config.json"}
    assert json.loads((output / name).read_text()) == expected
    assert json.loads((output / "config.json").read_text()) == {
        "torch_dtype": "float32", "text_config": {"dtype": "float32"}, "vision_config": {}, "dtype": "float32"
    }  # fmt: skip


def test_a_hub_name_is_found_in_the_cache(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "models--some--model" / "snapshots" / ("a" * 40)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text("a" * 40)
    assert find_base_folder("some/model") == folder


@pytest.mark.slow
def test_the_adapter_for_generation_has_one_more_level_and_equal_values(tiny_model, tmp_path, adapter):
    assert export(adapter, tmp_path / "out", "adapter") == 0
    old, new = (load_file(folder / "adapter_model.safetensors") for folder in (adapter, tmp_path / "out"))
    assert new.keys() == {key.replace("base_model.model.", "base_model.model.model.", 1) for key in old}
    assert all(
        torch.equal(new[key.replace("base_model.model.", "base_model.model.model.", 1)], old[key]) for key in old
    )


def test_targets_that_would_miss_the_further_level_are_written_out(adapter, tmp_path):
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["target_modules"] = r"language_model\.layers\.\d+\.self_attn\.[qkvo]_proj"
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "out").mkdir()
    write_generation_adapter(read_source(str(adapter), None, None, None), tmp_path / "out")
    targets = json.loads((tmp_path / "out" / "adapter_config.json").read_text())["target_modules"]
    assert "model.language_model.layers.0.self_attn.q_proj" in targets and len(targets) == 8


# ------------------------------------------------------------------------------------------------------ the comparison


@pytest.mark.slow
def test_an_export_that_differs_is_not_left_behind(tmp_path, adapter, capsys, monkeypatch):
    from contrastors import export_files

    write = export_files.write_sentence_transformers

    def forget_the_generation_prompt(folder: Path, *more: object) -> None:
        write(folder, *more)
        settings = json.loads((folder / "sentence_bert_config.json").read_text())
        del settings["processing_kwargs"]
        (folder / "sentence_bert_config.json").write_text(json.dumps(settings))

    monkeypatch.setattr(export_files, "write_sentence_transformers", forget_the_generation_prompt)
    assert export(adapter, tmp_path / "out", "sentence-transformers") == 1
    assert re.search(r"^error: the export was read back and differs", capsys.readouterr().err, flags=re.MULTILINE)
    assert left_behind(tmp_path) == []


@pytest.mark.slow
def test_an_export_that_cannot_be_loaded_is_not_left_behind(tmp_path, adapter, capsys, monkeypatch):
    from contrastors import export_files

    copy = export_files.copy_files

    def lose_the_tokenizer(base: Path, folder: Path, *more: object) -> None:
        copy(base, folder, *more)
        (folder / "tokenizer.json").unlink()

    monkeypatch.setattr(export_files, "copy_files", lose_the_tokenizer)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "contrastors.json").write_text("{}")  # an earlier export stays until the new one is proven
    assert export(adapter, tmp_path / "out", "merged", "--overwrite") == 1
    assert "cannot be read back in a fresh process" in capsys.readouterr().err
    assert left_behind(tmp_path) == ["out"] and (tmp_path / "out" / "contrastors.json").read_text() == "{}"


@pytest.mark.slow
def test_training_that_bf16_would_round_away_is_refused_and_fp32_keeps_it(tiny_model, tmp_path, capsys):
    base = make_base(tiny_model, tmp_path / "base", "bf16")
    adapter = make_adapter(base, tmp_path / "adapter", vision=True, size=1e-4)
    assert export(adapter, tmp_path / "out") == 1
    message = capsys.readouterr().err
    assert "of the adapter's effect lost (bound 25%)" in message and "--dtype fp32" in message
    assert left_behind(tmp_path) == []
    assert export(adapter, tmp_path / "out", "merged", "--dtype", "fp32") == 0
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / "model.safetensors").values()} == {torch.float32}
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.parametrize(
    ("precision", "cosine", "lost", "passes"),
    [("fp32", 0.99995, 0.01, True), ("fp32", 0.9998, 0.01, False), ("fp32", 0.99999, 0.03, False),
     ("bf16", 0.9995, 0.2, True), ("bf16", 0.99999, 0.3, False), ("bf16", 0.998, 0.1, False),
     ("fp32", float("nan"), 0.0, False), ("bf16", 1.0, float("nan"), False)],
)  # fmt: skip
def test_the_bounds_hold_for_the_cosine_and_for_the_share_of_the_effect(precision, cosine, lost, passes):
    found = Comparison(cosine, 0.9, lost, 3, 2)
    if passes:
        check(found, precision)
    else:
        with pytest.raises(ValueError, match="differs from base"):
            check(found, precision)


def test_probes_pass_both_limits_and_come_from_the_training_rows(tiny_model, colour_set):
    processor = BiQwen3Processor.from_pretrained(str(tiny_model), 16, 64)
    generated = choose_probes(processor, str(colour_set / "gone.jsonl"))
    assert any(processor.encode_query(text).truncated for text in generated.queries)
    assert max(image.width * image.height for image in generated.images) > processor.max_pixels
    rows = [json.loads(line) for line in (colour_set / "rows.jsonl").read_text().splitlines()]
    rows[0]["query"], rows[1]["query"] = (
        "<|image_pad|>",
        "https://example.org/a.png",
    )  # other loaders read these otherwise
    (colour_set / "c02.png").write_bytes(b"no image")
    (colour_set / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = choose_probes(processor, str(colour_set / "rows.jsonl"))
    assert found.queries == [*generated.queries, rows[2]["query"], rows[3]["query"]]
    assert len(found.images) == len(generated.images) + 3


def test_a_metric_without_a_value_stands_as_a_dash_in_the_card():
    about = {"format": "merged", "base_model": "base", "adapter": "checkpoint-4", "embeds": "queries and documents"}
    about |= {"query_instruction": "q", "document_instruction": "d", "max_num_visual_tokens": 16, "max_pixels": 16384}
    about |= {"max_query_tokens": 512, "compared": asdict(Comparison(1.0, 0.9, 0.0, 3, 2))}
    found = {"mrr": 1.0, "mrr_low": 0.5, "mrr_high": 1.0, "margin": None, "margin_low": None, "margin_high": None}
    card = export_card(about, {"base_metrics": found, "last_metrics": found, "evaluated_step": 4})
    assert "| mrr | 1.0000 [0.5000, 1.0000] | 1.0000 [0.5000, 1.0000] |" in card and "| margin | – | – |" in card


# ------------------------------------------------------------------------------------------------------------ refusals


def rewrite(adapter: Path, change) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file({change(key): value.clone() for key, value in tensors.items()}, adapter / "adapter_model.safetensors")


def test_an_adapter_of_ms_swift_is_refused_with_the_command_that_mends_it(adapter, tmp_path, capsys):
    rewrite(adapter, lambda key: key.replace("base_model.model.", "base_model.model.model.", 1))
    assert export(adapter, tmp_path / "out") == 1
    assert "python train_swift.py --remap DIR" in capsys.readouterr().err


def test_an_adapter_without_effect_is_refused(tiny_model, tmp_path, capsys):
    assert export(make_adapter(tiny_model, tmp_path / "zero", size=0.0), tmp_path / "out") == 1
    assert "every B matrix is zero" in capsys.readouterr().err
    assert export(make_adapter(tiny_model, tmp_path / "faint", size=1e-12), tmp_path / "out") == 1
    assert "the adapter has no effect" in capsys.readouterr().err
    assert left_behind(tmp_path) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [(lambda key: key.replace("layers.1", "layers.7"), "do not match this model"),
     (lambda key: key.replace("lora_A.weight", "lora_magnitude_vector"), "only a plain LoRA can be exported")],
)  # fmt: skip
def test_keys_that_do_not_fit_are_refused(adapter, tmp_path, capsys, change, message):
    rewrite(adapter, change)
    assert export(adapter, tmp_path / "out") == 1
    assert message in capsys.readouterr().err
    assert left_behind(tmp_path) == []


def test_what_the_adapter_s_folder_does_not_say_must_be_typed(adapter, tiny_model):
    (adapter / "trainer_state.json").unlink()
    with pytest.raises(ValueError, match="give --max-num-visual-tokens"):
        read_source(str(adapter), None, None, None)
    source = read_source(str(adapter), None, 99, None)
    assert (source.model, source.max_num_visual_tokens, source.max_query_tokens) == (str(tiny_model), 99, 512)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": None}))
    with pytest.raises(ValueError, match="names no base model; give --model"):
        read_source(str(adapter), None, 99, None)
    assert read_source(str(adapter), "other", 99, 100).model == "other"
    (adapter / "trainer_state.json").write_text("{")
    with pytest.raises(ValueError, match=r"trainer_state\.json: not valid JSON"):
        read_source(str(adapter), "other", 99, 100)


def test_an_existing_output_is_replaced_only_on_demand_and_only_an_export(adapter, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    assert export(adapter, tmp_path / "out") == 1
    assert "exists; use --overwrite" in capsys.readouterr().err
    assert export(adapter, tmp_path / "out", "merged", "--overwrite") == 1
    assert "holds no contrastors.json" in capsys.readouterr().err
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"


def test_a_disk_without_room_is_named_before_the_merge(tiny_model, tmp_path, monkeypatch):
    size = (tiny_model / "model.safetensors").stat().st_size
    usage = shutil._ntuple_diskusage
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage(size * 9, size * 7, int(size * 1.5)))
    check_space(tiny_model, tmp_path / "deep" / "out", "auto")
    with pytest.raises(ValueError, match="are needed and .* are free"):
        check_space(tiny_model, tmp_path / "deep" / "out", "fp32")


@pytest.mark.parametrize(
    ("argv", "message"),
    [(["--format", "adapter"], "needs --for generation"),
     (["--format", "merged", "--for", "generation"], "belongs to --format adapter"),
     (["--format", "adapter", "--for", "generation", "--dtype", "fp32"], "an adapter keeps its own"),
     (["--format", "gguf"], "invalid choice")],
)  # fmt: skip
def test_combinations_that_would_be_ignored_are_usage_errors(argv, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--adapter", "a", "--output", "o", *argv])
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_a_missing_or_old_sentence_transformers_is_named_before_any_work(adapter, tmp_path, capsys, monkeypatch):
    from contrastors import export as module

    monkeypatch.setattr(module.metadata, "version", lambda name: "5.1.0")
    assert export(adapter, tmp_path / "out", "sentence-transformers") == 1
    assert "sentence-transformers 5.1.0 is too old, 6 is needed: pip install '.[bench]'" in capsys.readouterr().err
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert export(adapter, tmp_path / "out", "sentence-transformers") == 1
    assert "pip install '.[bench]'" in capsys.readouterr().err


def test_every_flag_stands_in_the_docs_with_its_default_and_no_other_does():
    page = (Path(__file__).resolve().parent.parent / "docs" / "export.md").read_text(encoding="utf-8")
    table = page.split("## Flags")[1].split("\n## ")[0]
    found = dict(re.findall(r"^\| `(--[\w-]+)[^`]*` \| ([^|]+?) \|", table, flags=re.MULTILINE))
    actions = [a for a in build_parser()._actions if not isinstance(a, argparse._HelpAction)]
    assert list(found) == [action.option_strings[0] for action in actions]
    for action in actions:
        if isinstance(action.default, (bool, str)):
            shown = {True: "on", False: "off"}.get(action.default, action.default)
            assert found[action.option_strings[0]] == shown


def test_an_adapter_of_the_query_tower_is_exported_for_queries_and_says_so(tiny_model, colour_set, capsys):
    flags = {"mode": "query-side-tune", "grad_cache_chunk": None, "eval_steps": 0, "max_steps": 2}
    assert train(arguments(tiny_model, colour_set, colour_set / "run", **flags)) == 0
    adapter, output = colour_set / "run" / "checkpoint-2", colour_set / "out"
    assert main(["--adapter", str(adapter), "--output", str(output), "--format", "merged", "--device", "cpu"]) == 0
    assert "is for queries alone" in capsys.readouterr().out
    assert json.loads((output / "contrastors.json").read_text())["embeds"] == "queries"
    assert "**For queries alone**" in (output / "README.md").read_text()
