"""train_swift.py for real, and ms-swift against this project: tokens, pixels, embeddings, loss, gradients, two ranks.

    torchrun --nproc_per_node=2 tests/test_swift_equivalence.py --multi-gpu FOLDER      prints losses and gradients

FOLDER is one of tests/swift_figures.py. The figures are measured in processes of their own: importing swift patches
other libraries.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from contrastors.swift import read_flags
from tests.conftest import ROOT, write_rows
from tests.swift_data import NUM_NEGATIVES, VISUAL_TOKENS, environment, only_run, prepare, read_rows, train_flags

try:
    importlib.metadata.version("ms-swift")
    IS_MISSING = False
except importlib.metadata.PackageNotFoundError:
    IS_MISSING = True
needs_swift = pytest.mark.skipif(IS_MISSING, reason="ms-swift is not installed: pip install -r requirements-swift.txt")
pytestmark = pytest.mark.xdist_group("swift")  # all of them share the runs below


# ---------------------------------------------------------------------------------------------------- two ranks: worker


def measure_ranks(folder: Path) -> dict[str, float]:
    """Loss and gradient of the same global batch by swift (DDP and its loss) and by this project."""
    from accelerate import PartialState
    from swift.loss.embedding import InfonceLoss
    from torch.nn.parallel import DistributedDataParallel

    from contrastors.distributed import GradientBucket, gather_objects
    from contrastors.images import open_image
    from contrastors.logit_scale import LogitScale
    from contrastors.loss import clip_loss
    from contrastors.processing import Inputs
    from contrastors.records import read_pairs
    from tests.gradients import build_model

    rank = PartialState(cpu=True).process_index
    os.environ |= {"INFONCE_TEMPERATURE": "0.07", "INFONCE_HARD_NEGATIVES": str(NUM_NEGATIVES)}
    model, _, processor = build_model(folder / "model")
    own = read_pairs(folder / "data" / "rows.jsonl")[0][rank * 4 : rank * 4 + 4]
    paths = [path for pair in own for path in (pair.positive, *pair.negatives)]
    queries = [processor.encode_query(pair.query) for pair in own]
    documents = [processor.encode_document(open_image(path)) for path in paths]
    chunks = [Inputs.from_items(items, processor.pad_id).chunks(99)[0] for items in (queries, documents)]

    def embed(encoder: torch.nn.Module) -> list[torch.Tensor]:
        return [encoder(**chunk) for chunk in chunks]

    wrapped = DistributedDataParallel(model)
    first, second = embed(wrapped)
    rows = torch.cat([first[:, None], second.view(4, 1 + NUM_NEGATIVES, -1)], dim=1).flatten(0, 1)
    theirs = InfonceLoss(None, None)({"last_hidden_state": rows}, torch.tensor(([1.0] + [0.0] * NUM_NEGATIVES) * 4))
    theirs.backward()
    parameters = list(model.trainable_parameters().values())
    swift_gradient = torch.cat([p.grad.flatten() for p in parameters]).double()

    bucket = GradientBucket(parameters)
    bucket.zero_()
    ours = clip_loss(*embed(model), LogitScale(0.07), NUM_NEGATIVES).loss
    ours.backward()
    bucket.reduce()
    our_gradient = bucket.gradients.double()
    return {
        "world_size": torch.distributed.get_world_size(),
        "swift_loss": float(theirs),
        "our_loss": sum(gather_objects(float(ours))) / torch.distributed.get_world_size(),
        "gradient_cosine": float(torch.cosine_similarity(swift_gradient, our_gradient, dim=0)),
        "norm_ratio_to_mean": float(swift_gradient.norm() / our_gradient.norm()),
    }


# ------------------------------------------------------------------------------------------------------------- fixtures


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("swift")
    prepare(folder)
    return folder


def start(work: Path, *command: object) -> subprocess.CompletedProcess:
    argv = [sys.executable, *map(str, command)]
    return subprocess.run(argv, cwd=ROOT, env=environment(work), capture_output=True, text=True, timeout=800)


@pytest.fixture(scope="module")
def figures(work: Path) -> dict:
    """One process: three steps of training, a resumed run, and everything that is compared."""
    done = start(work, "tests/swift_figures.py", work)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((work / "figures.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def two_ranks(work: Path) -> Path:
    """The folder of a run of train_swift.py on two ranks."""
    done = start(work, "train_swift.py", *train_flags(work, "ranks"), "--nproc-per-node", 2)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert "checkpoint-3-biqwen3: 16 tensors, every key matches and embeddings change" in done.stdout
    return only_run(work / "ranks")


def losses(run: Path) -> list[float]:
    state = json.loads((run / "checkpoint-3" / "trainer_state.json").read_text(encoding="utf-8"))
    return [row["loss"] for row in state["log_history"] if "loss" in row]


def verify(*argv: object) -> int:
    from verify_embeddings import main

    return main([*map(str, argv), "--device", "cpu", "--num-workers", "0"])


def train_here(capsys, *argv: str) -> tuple[int, str]:
    """Runs the script in this process, for what it refuses before it imports swift."""
    from train_swift import main

    try:
        code = main(list(argv))
    except SystemExit as stop:
        code = int(stop.code or 0)
    return code, capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- the nine of the spec


@needs_swift
def test_swift_gives_converted_rows_the_token_ids_of_our_collate_and_the_same_pixels(figures):
    items = figures["items"]
    assert (items["queries"], items["documents"]) == (items["equal_queries"], items["equal_documents"]) == (12, 36)
    assert items["pixel_difference"] == 0.0


@needs_swift
def test_swift_embeds_as_we_do_with_the_base_model_and_with_the_remapped_adapter(figures):
    for kind in ("base", "adapter"):
        assert figures[kind]["max_difference"] < 1e-5 and figures[kind]["min_cosine"] > 0.99999


@needs_swift
def test_swift_s_loss_is_clip_loss_in_one_process(figures):
    assert [num_negatives for num_negatives, _, _ in figures["losses"]] == [0, 1, 3]
    for _, theirs, ours in figures["losses"]:
        assert theirs == pytest.approx(ours, abs=1e-6)


@needs_swift
def test_the_lora_targets_are_those_of_training_at_the_size_of_the_real_model(figures):
    assert figures["targets"] == {"num": 224, "same": True, "same_with_vision": True}


@needs_swift
def test_labels_mark_the_positive_of_each_row_and_its_hard_negatives(figures):
    assert figures["labels"] == [1.0, 0.0, 0.0] * 2


@needs_swift
def test_one_training_step_has_our_loss_and_gradient(figures):
    step = figures["step"]
    assert step["swift_before"] == pytest.approx(step["ours_before"], abs=1e-4)
    assert step["swift_after"] == pytest.approx(step["ours_after"], abs=1e-3)
    assert step["swift_after"] < step["swift_before"]
    assert step["gradient_cosine"] > 0.99999 and step["gradient_ratio"] == pytest.approx(1, abs=1e-4)


@needs_swift
@pytest.mark.slow
@pytest.mark.dist
def test_over_two_ranks_swift_s_gradient_is_that_of_the_mean_reduction(work):
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", __file__, "--multi-gpu", work]
    done = start(work, *command)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["world_size"] == 2
    assert found["swift_loss"] == pytest.approx(found["our_loss"], abs=1e-5)
    assert found["gradient_cosine"] > 0.99999
    # --grad-reduction sum, the default of train_contrastors.py, is twice as large on two ranks.
    assert found["norm_ratio_to_mean"] == pytest.approx(1, abs=1e-4)


@needs_swift
def test_images_get_as_many_visual_tokens_in_swift(figures):
    limited = {(512, 64): 64, (512, 256): 256, (512, 1024): 256, (512, 4096): 256}
    limited |= {(2048, limit): limit for limit in (64, 256, 1024, 4096)}
    squares = {(side, limit): (ours, theirs) for side, limit, ours, theirs in figures["visual_tokens"]["squares"]}
    assert squares == {case: (tokens, tokens) for case, tokens in limited.items()}
    num_sizes, num_equal = figures["visual_tokens"]["odd"]
    assert num_sizes == num_equal == 60


@needs_swift
def test_a_scaled_picture_differs_by_one_step_of_a_channel_at_most(figures):
    assert figures["scaled"]["max"] < 1.01 and figures["scaled"]["mean"] < 0.01


# ------------------------------------------------------------------------------------------------- the script, for real


@needs_swift
def test_a_resumed_run_takes_its_flags_from_the_checkpoint_and_repeats_the_step(work, figures):
    assert figures["exit_codes"] == [0, 0]
    first, resumed = losses(only_run(work / "run")), losses(only_run(work / "resumed"))
    assert len(first) == len(resumed) == 3
    assert resumed == pytest.approx(first, abs=1e-6)


@needs_swift
def test_a_resumed_run_refuses_flags_that_could_not_act_and_does_no_step_too_many(work, figures, capsys):
    """swift restores optimizer and schedule, so another --lr would be written down and not be trained with."""
    run = only_run(work / "run")
    for words, sentence in (
        (["--lr", "5"], "--lr 5.0 (checkpoint: "),
        (["--lora-r", "99"], "--lora-r 99 (checkpoint: "),
        (["--weight-decay", "0.5"], "swift goes on with the adapter and the optimizer of the checkpoint"),
    ):
        code, said = train_here(capsys, "--resume", str(run / "checkpoint-2"), *words, "--device", "cpu")
        assert code == 1 and sentence in said, said
    code, said = train_here(capsys, "--resume", str(run / "checkpoint-3-biqwen3"))
    assert code == 1 and said.count("\n") == 1 and "is a remapped adapter; swift's own is" in said
    from train_swift import main

    before = sorted(work.rglob("*"))
    assert main(["--resume", str(run / "checkpoint-3"), "--device", "cpu"]) == 0
    assert "is complete: it has done all of --max-steps 3" in capsys.readouterr().out
    assert sorted(work.rglob("*")) == before


@needs_swift
def test_an_adapter_that_was_remapped_before_a_stop_is_kept(work, figures, capsys):
    from train_swift import build_parser, remap

    checkpoint = only_run(work / "run") / "checkpoint-3"
    kept = (checkpoint.with_name("checkpoint-3-biqwen3") / "adapter_model.safetensors").stat().st_mtime_ns
    remap(build_parser().parse_args([]), [checkpoint], None)
    assert "checkpoint-3-biqwen3 exists and is kept" in capsys.readouterr().out
    assert (checkpoint.with_name("checkpoint-3-biqwen3") / "adapter_model.safetensors").stat().st_mtime_ns == kept


def test_a_vocabulary_whose_image_slots_swift_would_not_find_is_refused(tiny_model):
    from types import SimpleNamespace

    from contrastors.processing import BiQwen3Processor
    from train_swift import refuse_other_slots

    processor = BiQwen3Processor.from_pretrained(str(tiny_model))
    refuse_other_slots(SimpleNamespace(image_token_id=processor.image_token_id), processor)
    with pytest.raises(ValueError, match="swift takes token 151655 for an image slot, in this checkpoint it is"):
        refuse_other_slots(SimpleNamespace(image_token_id=151655), processor)


@needs_swift
def test_rows_with_0_1_and_3_negatives_train_in_batch_only_where_none_are_asked_for(figures):
    found = figures["in_batch"]
    assert found["exit_codes"] == [0, 0]
    assert found["loss"] == pytest.approx(found["our_loss"], abs=1e-4)


@needs_swift
def test_a_checkpoint_whose_processor_ends_otherwise_is_warned_about(figures):
    says = figures["says"]
    assert says["same"] == [] and len(says["other"]) == 2
    for kind, sentence in zip(("query", "document"), says["other"], strict=True):
        assert f"the {kind} of line 1 has" in sentence and "always ends in <|endoftext|>" in sentence


@needs_swift
def test_a_checkpoint_that_brings_code_is_refused(figures):
    assert "auto_map" in figures["says"]["own_code"]


@needs_swift
def test_two_ranks_are_two_ranks_and_train_the_language_attention_alone(two_ranks):
    saved = json.loads((two_ranks / "checkpoint-3" / "args.json").read_text(encoding="utf-8"))
    assert saved["global_world_size"] == 2 and saved["gradient_accumulation_steps"] == 1
    assert saved["strict"] and not saved["fp16"] and not saved["bf16"] and saved["adam_beta2"] == 0.999
    assert {path.name for path in (two_ranks / "checkpoint-3").glob("rng_state*")} == {
        "rng_state_0.pth",
        "rng_state_1.pth",
    }
    flags = read_flags(two_ranks / "checkpoint-3")  # what a resumed run takes from it
    assert (flags["nproc_per_node"], flags["dtype"], flags["batch_size"]) == (2, "fp32", 4)
    keys = load_file(two_ranks / "checkpoint-3" / "adapter_model.safetensors").keys()
    assert len(keys) == 16 and all(".language_model.layers." in key and ".self_attn." in key for key in keys)


@needs_swift
def test_the_remapped_adapter_is_accepted_by_verify_with_the_limit_it_was_trained_at(work, two_ranks):
    adapter = two_ranks / "checkpoint-3-biqwen3"
    assert verify("--adapter", adapter, "--eval-jsonl", work / "data" / "rows.jsonl", "--output", work / "v.json") == 0
    found = json.loads((work / "v.json").read_text(encoding="utf-8"))
    assert found["settings"]["max_num_visual_tokens"] == VISUAL_TOKENS
    assert found["models"][1]["metrics"] != found["models"][0]["metrics"]


@needs_swift
def test_an_export_of_the_remapped_adapter_is_swift_s_own_again(two_ranks, tmp_path):
    from contrastors.export_files import read_source, write_generation_adapter

    source = read_source(str(two_ranks / "checkpoint-3-biqwen3"), None, None, None)
    assert source.max_num_visual_tokens == VISUAL_TOKENS
    assert "train_jsonl" not in source.record["args"]  # its rows have swift's format, an export would stumble over them
    write_generation_adapter(source, tmp_path)
    made, saved = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path, two_ranks / "checkpoint-3"))
    assert made.keys() == saved.keys() and all(torch.equal(made[key], saved[key]) for key in made)


@needs_swift
def test_the_adapter_as_swift_saved_it_is_refused_by_verify_with_the_command_that_mends_it(work, two_ranks, capsys):
    assert verify("--adapter", two_ranks / "checkpoint-3", "--eval-jsonl", work / "data" / "rows.jsonl") == 1
    assert "python train_swift.py --remap DIR" in capsys.readouterr().err


@needs_swift
def test_remap_alone_writes_the_same_adapter_again_and_replaces_none_unasked(two_ranks, tmp_path, capsys):
    from safetensors import safe_open

    saved = shutil.copytree(two_ranks / "checkpoint-3", tmp_path / "old")
    (saved / "args.json").unlink()  # a bare adapter, as others publish it: its configuration names the base
    assert train_here(capsys, "--remap", str(saved), "--device", "cpu") == (0, "")
    made, first = load_file(tmp_path / "old-biqwen3" / "adapter_model.safetensors"), f"{two_ranks}/checkpoint-3-biqwen3"
    with safe_open(f"{first}/adapter_model.safetensors", framework="pt") as file:
        assert {key: value.tolist() for key, value in made.items()} == {
            key: file.get_tensor(key).tolist() for key in file.keys()
        }
    code, sentence = train_here(capsys, "--remap", str(saved), "--device", "cpu")
    assert code == 1 and "old-biqwen3: exists; choose another folder or give --overwrite" in sentence
    assert train_here(capsys, "--remap", str(saved), "--device", "cpu", "--overwrite")[0] == 0
    code, sentence = train_here(capsys, "--remap", first, "--device", "cpu")
    assert code == 1 and "nothing to remap" in sentence


@needs_swift
@pytest.mark.parametrize("change", ["zero", "another layer", "head"])
def test_remap_leaves_nothing_behind_where_the_adapter_would_not_act(two_ranks, tmp_path, capsys, change):
    saved = shutil.copytree(two_ranks / "checkpoint-3", tmp_path / "old")
    tensors = load_file(saved / "adapter_model.safetensors")
    changed = {
        "zero": ("every B matrix is zero", {k: v * 0 if ".lora_B." in k else v for k, v in tensors.items()}),
        "another layer": ("do not match", {k.replace("layers.1.", "layers.7."): v for k, v in tensors.items()}),
        "head": ("only a plain LoRA", tensors | {"base_model.model.lm_head.weight": torch.zeros(1)}),
    }
    reason, tensors = changed[change]
    save_file({key: value.contiguous() for key, value in tensors.items()}, saved / "adapter_model.safetensors")
    code, sentence = train_here(capsys, "--remap", str(saved), "--device", "cpu")
    assert code == 1 and reason in sentence
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


# ------------------------------------------------------------------------------------------ refused before any training


@needs_swift
def test_evaluation_rows_without_hard_negatives_are_refused_before_training(work, tmp_path, capsys):
    rows = [{k: v for k, v in row.items() if "negative" not in k} for row in read_rows(work / "data" / "swift.jsonl")]
    file = write_rows(tmp_path / "eval.jsonl", rows)
    code, sentence = train_here(capsys, *train_flags(work, "never"), "--eval-jsonl", str(file))
    assert code == 1 and f"{file}, line 1: 0 hard negatives" in sentence
    assert "convert_data_for_swift.py --num-hard-negatives 2" in sentence and not (work / "never").exists()


@needs_swift
@pytest.mark.parametrize("kind", ["missing", "no picture", "another format"])
def test_a_row_that_swift_would_stumble_over_is_refused_by_name(work, tmp_path, capsys, kind):
    rows = read_rows(work / "data" / "swift.jsonl")
    if kind == "another format":
        rows[3] = {"query": "red", "chunk_path": "c00.png"}
        expected = "line 4: not a row of convert_data_for_swift.py"
    else:
        path = tmp_path / "lost.png"
        rows[3]["negative_images"][1] = [str(path)]
        expected = f"line 4: {path} cannot be used"
        if kind == "no picture":
            path.write_bytes(b"no picture")
    file = write_rows(tmp_path / "train.jsonl", rows)
    code, sentence = train_here(capsys, *train_flags(work, "never"), "--train-jsonl", str(file))
    assert code == 1 and expected in sentence and not (work / "never").exists()


def test_without_swift_the_one_install_command_is_named(tmp_path, monkeypatch, capsys):
    def not_found(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("train_swift.metadata.version", not_found)
    code, sentence = train_here(capsys, "--train-jsonl", str(tmp_path / "rows.jsonl"))
    assert (code, sentence) == (1, "error: ms-swift is not installed: pip install -r requirements-swift.txt\n")
    assert (ROOT / "requirements-swift.txt").is_file()


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [(["--remap", "x", "--lr", "1"], "--lr has no meaning with --remap"),
     (["--overwrite"], "--overwrite belongs to --remap"),
     (["--temperature", "2"], "must lie in"),
     (["--deepspeed", "zero2"], "pip install deepspeed")],
)  # fmt: skip
def test_flags_that_would_be_ignored_or_fail_later_are_usage_errors(capsys, argv, sentence):
    code, said = train_here(capsys, *argv)
    assert code == 2 and sentence in said


if __name__ == "__main__":
    measured = measure_ranks(Path(sys.argv[sys.argv.index("--multi-gpu") + 1]))
    if os.environ["RANK"] == "0":
        print(json.dumps(measured))
    torch.distributed.destroy_process_group()
