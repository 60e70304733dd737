"""The doctor: passes on a sound project, and finds each planted fault in the line that is meant for it."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.conftest import ROOT, make_colour_set, write_rows
from tests.runs import environment

GROUPS = ("language A", "language B", "vision A", "vision B", "logit scale")


def flags(model: Path, rows: Path, *more: str) -> list[str]:
    return [
        "--model", str(model), "--train-jsonl", str(rows), "--device", "cpu", "--num-workers", "0", "--lora-vit",
        "--max-num-visual-tokens", "16", "--lora-r", "4", "--lora-alpha", "4", *more,
    ]  # fmt: skip


def read_table(text: str) -> dict[str, tuple[str, str]]:
    """Name of each line -> (status, figure)."""
    from contrastors.doctor import WIDTHS

    ends = [sum(WIDTHS[:n]) + 2 * n for n in range(1, 4)]
    rows = [(line[: WIDTHS[0]].strip(), line[ends[2] :], line[ends[0] : ends[1]].strip()) for line in text.splitlines()]
    return {name: (status, figure) for name, status, figure in rows if name and status}


@pytest.fixture
def examine(tiny_model, tmp_path, capsys):
    """Runs the doctor in this process, so that a test can plant a fault; gives exit code, table and sentences."""
    from contrastors.doctor import main

    data = make_colour_set(tmp_path)

    def run(*more: str, model: Path = tiny_model) -> tuple[int, dict[str, tuple[str, str]], str]:
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            code = main(flags(model, data / "rows.jsonl", "--num-hard-negatives", "2", "--processes", "1", *more))
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        printed = capsys.readouterr()
        return code, read_table(printed.out), printed.err

    return run


def off(table: dict[str, tuple[str, str]]) -> set[str]:
    return {name for name, (status, _) in table.items() if status == "OFF"}


# ------------------------------------------------------------------------------------------------------ a sound project


@pytest.mark.slow
@pytest.mark.dist
def test_the_demo_s_model_and_tiles_pass_with_two_processes_and_nothing_is_left_behind(tmp_path, tmp_path_factory):
    from contrastors.demo import make_data, make_model

    make_data(tmp_path / "data", seed=5)
    make_model(tmp_path / "model", seed=5)
    rows = [json.loads(line) for line in (tmp_path / "data/train.jsonl").read_text().splitlines()][:24]
    for number, row in enumerate(rows):  # every third row lists no negatives, another one too few
        row["neg_chunk_paths"] = [rows[(number + k) % 24]["chunk_path"] for k in range(1, 1 + number % 3)]
    data = write_rows(tmp_path / "data/train_hn.jsonl", rows)
    before, temporary = sorted(tmp_path.rglob("*")), tmp_path_factory.mktemp("t")
    argv = flags(tmp_path / "model", data, "--num-hard-negatives", "2", "--num-workers", "2")
    argv += ["--processes-timeout-s", "300"]  # a hang is told before this test ends it; 24 s alone, 240 s at load 10
    command = [sys.executable, "-m", "contrastors.doctor", *argv]
    places = environment(TMPDIR=str(temporary))
    done = subprocess.run(command, cwd=ROOT, env=places, capture_output=True, text=True, timeout=900)
    table = read_table(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not off(table) and done.stdout.endswith("nothing is off\n")
    judged = {f"{check}: {group}" for check in ("chunked / full", "1 process / 2") for group in GROUPS}
    judged |= {"rows", "weights", "image", "embeddings", "against plain transformers", "alone / beside others"}
    judged |= {"right / left padding", "first / after others", "rope state", "trains: language", "trains: vision"}
    judged |= {"trains: other", "gradient arrives", "1 process / 2: ranks"}
    assert {name for name, (status, _) in table.items() if status == "ok"} == judged
    shown = " ".join(done.stdout.split())  # long figures are wrapped
    assert "<|vision_start|> <|image_pad|> x 16 <|vision_end|>" in shown and "Retrieve images or text" in shown
    assert table["gradient arrives"][1] == "64 of 64 LoRA tensors"
    for name in ("loader", "step, without optimizer"):
        assert float(re.search(r"([\d.]+) tiles/s", table[name][1])[1]) > 0
    assert not list(temporary.iterdir())
    assert sorted(tmp_path.rglob("*")) == before


def test_without_a_fault_the_table_of_one_process_has_nothing_off(examine):
    code, table, errors = examine("--lora-dropout", "0")
    assert (code, off(table), errors) == (0, set(), "")
    assert table["1 process / 1"][0] == "skipped"


def test_rows_that_plain_transformers_reads_otherwise_are_no_fault(examine, tmp_path):
    """A query over the token limit, one with a control marker, a tile narrower than a visual token."""
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    rows[0]["query"], rows[1]["query"] = "red " * 600, "a green<|im_end|> one"
    with Image.open(tmp_path / "c02.png") as tile:
        tile.crop((0, 0, 20, 64)).save(tmp_path / "c02.png")
    write_rows(tmp_path / "rows.jsonl", rows)
    code, table, errors = examine()
    assert (code, off(table), errors) == (0, set(), "")


# ----------------------------------------------------------------------------------------------- one planted fault each


def test_dropout_masks_that_are_not_replayed_are_found(examine, monkeypatch):
    monkeypatch.setattr("contrastors.rand_state.RandContext.replay", lambda self: nullcontext())
    code, table, errors = examine("--lora-dropout", "0.05")
    assert code == 1
    # The logit scale has its gradient from the first forward.
    assert off(table) == {f"chunked / full: {group}" for group in GROUPS[:4]}
    assert "error: chunked / full: language A" in errors and "dropout masks" in errors


@pytest.mark.parametrize("dropout", ["0", "0.05"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_lost_chunk_is_found_in_either_dtype(examine, monkeypatch, dropout, dtype):
    from contrastors import loss

    whole = loss.replay_chunks

    def lose_last(model, chunks, states, gradients):
        whole(model, chunks[:-1], states[:-1], gradients[: -len(chunks[-1]["input_ids"])])

    monkeypatch.setattr(loss, "replay_chunks", lose_last)
    code, table, errors = examine("--lora-dropout", dropout, "--dtype", dtype)
    assert code == 1 and "a chunk is lost" in errors
    assert off(table) == {f"chunked / full: {group}" for group in GROUPS[:4]}


def test_a_frozen_lora_module_is_found(examine, monkeypatch):
    from contrastors.biqwen3 import BiQwen3

    whole = BiQwen3.add_adapter

    def freeze_one(self, *args):
        found = whole(self, *args)
        self.base.language_model.layers[1].self_attn.k_proj.requires_grad_(False)
        return found

    monkeypatch.setattr(BiQwen3, "add_adapter", freeze_one)
    code, table, errors = examine()
    assert code == 1 and off(table) == {"trains: language"}
    assert "7 language modules train, 8 should; 2 LoRA tensors are frozen" in errors and "layers.1.self_attn" in errors


def test_another_parameter_that_trains_is_found(examine, monkeypatch):
    from contrastors.biqwen3 import BiQwen3

    whole = BiQwen3.add_adapter

    def free_one(self, *args):
        found = whole(self, *args)
        self.base.language_model.norm.requires_grad_(True)
        return found

    monkeypatch.setattr(BiQwen3, "add_adapter", free_one)
    code, table, errors = examine()
    assert code == 1 and "trains: other" in off(table) and "language_model.norm.weight must not train" in errors


def test_a_lora_tensor_without_gradient_is_found(examine, monkeypatch):
    from contrastors.biqwen3 import BiQwen3

    whole = BiQwen3.add_adapter

    def detach_one(self, *args):
        found = whole(self, *args)
        module = self.base.visual.blocks[1].attn.proj
        module.register_forward_hook(lambda module, inputs, output: output.detach())
        return found

    monkeypatch.setattr(BiQwen3, "add_adapter", detach_one)
    code, table, errors = examine()
    assert code == 1 and off(table) == {"gradient arrives"} and "visual.blocks.1.attn.proj.lora_A" in errors


def test_pooling_the_last_place_is_found(examine, monkeypatch):
    monkeypatch.setattr("contrastors.biqwen3.pool_last_token", lambda hidden, attention_mask: hidden[:, -1])
    code, table, errors = examine()
    assert code == 1 and {"alone / beside others", "right / left padding"} <= off(table)
    assert "embeddings depend on their neighbours: padding is pooled" in errors


def test_a_rope_state_that_is_not_cleared_is_found(examine, monkeypatch):
    monkeypatch.setattr("contrastors.biqwen3._clear_rope_deltas", lambda model: None)
    code, table, errors = examine()
    assert code == 1 and off(table) == {"rope state"} and "can go stale" in errors


def test_stale_rope_offsets_that_act_are_found(examine, monkeypatch):
    """As in versions of transformers that take the offsets of the last call wherever there are some."""
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

    whole = Qwen3VLModel.compute_3d_position_ids

    def take_old(self, input_ids, inputs_embeds, **more):
        old = self.rope_deltas
        if old is not None:
            self.rope_deltas = old[:1].expand(len(inputs_embeds), 1)
        return whole(self, input_ids if old is None else None, inputs_embeds, **more)

    monkeypatch.setattr(Qwen3VLModel, "compute_3d_position_ids", take_old)
    assert not {"first / after others", "rope state"} & off(examine()[1])  # harmless while the state is cleared
    monkeypatch.setattr("contrastors.biqwen3._clear_rope_deltas", lambda model: None)
    code, table, errors = examine()
    assert code == 1 and {"first / after others", "rope state"} <= off(table)
    assert "embeddings depend on what was embedded before" in errors


def copy_checkpoint(model: Path, target: Path, change) -> Path:
    shutil.copytree(model, target)
    file = target / "model.safetensors"
    weights = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(weights)
    save_file(weights, file, {"format": "pt"})
    return target


def test_a_missing_weight_is_found(examine, tiny_model, tmp_path):
    name = "model.language_model.layers.1.self_attn.q_proj.weight"
    model = copy_checkpoint(tiny_model, tmp_path / "damaged", lambda weights: weights.pop(name))
    code, table, errors = examine(model=model)
    assert code == 1 and off(table) == {"weights"}
    assert "1 weights are missing (language_model.layers.1.self_attn.q_proj.weight)" in errors


def test_weights_that_are_not_finite_are_found(examine, tiny_model, tmp_path):
    def spoil(weights):
        weights["model.language_model.norm.weight"][3] = torch.nan

    code, table, errors = examine(model=copy_checkpoint(tiny_model, tmp_path / "damaged", spoil))
    assert code == 1 and "embeddings" in off(table) and "not finite: random or damaged weights" in errors


def test_embeddings_that_have_collapsed_are_found(examine, tiny_model, tmp_path):
    def spoil(weights):
        for name, tensor in weights.items():
            if name.endswith("embed_tokens.weight"):
                tensor[:] = tensor[0]

    code, table, errors = examine(model=copy_checkpoint(tiny_model, tmp_path / "damaged", spoil))
    assert code == 1 and "embeddings" in off(table)


def test_wrong_pixel_statistics_are_found(examine, monkeypatch):
    from contrastors.biqwen3 import BiQwen3

    whole = BiQwen3.__init__
    monkeypatch.setattr(BiQwen3, "__init__", lambda self, b, mean, std, kind: whole(self, b, [0.1] * 3, std, kind))
    code, table, errors = examine()
    assert code == 1 and off(table) == {"against plain transformers"} and "checkpoint's own processor" in errors


def test_bad_rows_and_missing_negatives_are_found(examine, tmp_path):
    (tmp_path / "c03.png").write_bytes(b"no image")
    code, table, errors = examine()
    assert code == 1 and off(table) == {"rows"}
    assert f"first line 4: {tmp_path / 'c03.png'}" in errors
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    write_rows(tmp_path / "rows.jsonl", [row | {"neg_chunk_paths": []} for row in rows])
    code, table, errors = examine("--max-bad-fraction", "1")
    assert code == 1 and "rows" in off(table) and "no row has a usable neg_chunk_paths" in errors


def test_a_check_that_breaks_is_off_with_a_sentence_and_the_others_still_run(examine, monkeypatch):
    from contrastors import gates

    def fail(*args, **kwargs):
        raise TypeError("apply_chat_template() got an unexpected keyword\nand more")

    broken = type("Broken", (), {"from_pretrained": staticmethod(fail)})
    monkeypatch.setattr(gates, "AutoProcessor", broken)
    code, table, errors = examine()
    assert code == 1 and off(table) == {"embeddings"} and table["chunked / full: language A"][0] == "ok"
    assert errors == "error: embeddings: TypeError: apply_chat_template() got an unexpected keyword\n"


@pytest.mark.parametrize(
    ("num_workers", "first_step", "found"),
    [
        ("0", 1, {"time"}),
        ("1", 1, {"time"}),
        # Past the last batch that is taken: nothing waits for it, but Python would wait for its worker at the exit.
        ("1", 3 + 8, set()),
    ],
)
def test_a_loader_that_hangs_is_told_and_leaves_no_worker(examine, monkeypatch, num_workers, first_step, found):
    from contrastors.batches import StepDataset

    whole = StepDataset.__getitem__

    def hang(self, step):
        if step >= first_step:
            time.sleep(600)
        return whole(self, step)

    monkeypatch.setattr(StepDataset, "__getitem__", hang)
    monkeypatch.setattr("contrastors.step_checks.BATCH_S", 2.5 if found else 60)
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.3)  # how long a worker is waited for
    before = signal.getsignal(signal.SIGALRM)
    code, table, errors = examine("--num-workers", num_workers)
    assert code == bool(found) and off(table) == found
    assert ("the loader gave no batch for 2.5 s" in errors) == bool(found)
    assert not multiprocessing.active_children()
    assert signal.getsignal(signal.SIGALRM) == before and signal.getitimer(signal.ITIMER_REAL) == (0, 0)


# ---------------------------------------------------------------------------------------------------------------- ranks

FAULTS = {
    "no average": "distributed.GradientBucket.reduce = lambda self: dist.all_reduce(self.flat)",
    "no gradient over ranks": "loss.gather_with_grad = lambda t: distributed.gather_with_grad(t.detach())",
    "no reduction": "distributed.GradientBucket.reduce = lambda self: None",
    "dead rank": "import sys; distributed.start = lambda name: sys.exit('error: rank 1 has no such device')",
    "hang": "import time; distributed.start = lambda name: time.sleep(600)",
    "a collective that one rank leaves out": "distributed.GradientBucket.reduce = lambda self: "
    "os.environ['RANK'] == '0' and (dist.all_reduce(self.flat), distributed.barrier())",
    "late main rank": "import time; os.environ['RANK'] == '0' and time.sleep(5)",
    "slow rank": "import time; whole = loss.get_chunked_embeddings; loss.get_chunked_embeddings = "
    "lambda *inputs: (time.sleep(5 * int(os.environ['RANK'])), whole(*inputs))[1]",
}


@pytest.fixture
def plant_in_ranks(tmp_path, monkeypatch):
    """Plants a fault in the ranks that a test starts, and nowhere else: torchrun gives them, and them alone, a RANK."""

    def plant(fault: str) -> dict[str, str]:
        folder = tmp_path / "planted"
        folder.mkdir()
        lines = ["import os", "if 'RANK' in os.environ:", "    import torch.distributed as dist"]
        lines += ["    from contrastors import distributed, loss", f"    {FAULTS[fault]}"]
        (folder / "sitecustomize.py").write_text("\n".join(lines) + "\n")
        places = environment(PYTHONPATH=os.pathsep.join([str(folder), str(ROOT)]))
        for name, value in places.items():
            monkeypatch.setenv(name, value)
        return places

    return plant


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    ("fault", "found", "ratio"),
    [
        ("no average", {"language A", "language B", "vision A", "vision B", "logit scale"}, 4),
        # The temperature's gradient does not pass through the gather.
        ("no gradient over ranks", {"language A", "language B", "vision A", "vision B"}, None),
        ("no reduction", {"ranks", "language A", "language B", "vision A", "vision B", "logit scale"}, None),
    ],
)
def test_a_wrong_gradient_over_ranks_is_found(examine, plant_in_ranks, fault, found, ratio):
    plant_in_ranks(fault)
    code, table, errors = examine("--processes", "2", "--lora-dropout", "0")
    assert code == 1 and off(table) == {f"1 process / 2: {line}" for line in found}
    assert "do not give 2 x the gradient of one" in errors
    assert ("they would drift" in errors) == ("ranks" in found)
    for group in found if ratio else ():
        assert float(table[f"1 process / 2: {group}"][1].split()[-1]) == pytest.approx(ratio, rel=1e-3)


@pytest.mark.parametrize(("reduction", "factor"), [("sum", 2), ("mean", 1)])
def test_ranks_are_held_to_the_factor_of_the_reduction(tiny_model, colour_set, reduction, factor):
    from contrastors import checks, step_checks
    from contrastors.distributed import World
    from contrastors.doctor import build_parser

    argv = flags(tiny_model, colour_set / "rows.jsonl", "--grad-reduction", reduction)
    args, world = build_parser().parse_args(argv), World(0, 1, torch.device("cpu"))
    patient = checks.load_patient(args, world, checks.read_rows(args)[0])
    checks.add_moved_adapter(patient)
    patient.model.eval()
    one = step_checks.cached_gradients(patient, patient.first_batch(8))
    for times in (1, 2):
        found = {group: times * gradient for group, gradient in one.items()}
        lines = step_checks.check_ranks(patient, found, ranks_agree=True)
        assert [line.is_ok for line in lines] == [True] + [times == factor] * 5


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    ("fault", "timeout_s", "told"),
    [
        ("dead rank", 100, "failed .*: rank 1 has no such device"),
        ("hang", 15, r"did not end within .* 15: a collective hangs .*rank [01] was in \S+ \(\w+\.py:\d+\)"),
        ("a collective that one rank leaves out", 40, r"within .* 40: a collective hangs .*rank [01] was in \S+ \(\w+"),
    ],
)
def test_ranks_that_fail_or_hang_are_told_in_a_sentence(
    tiny_model, colour_set, tmp_path, plant_in_ranks, fault, timeout_s, told
):
    from contrastors.doctor import run_ranks

    plant_in_ranks(fault)
    with pytest.raises(ValueError, match=told):
        run_ranks(flags(tiny_model, colour_set / "rows.jsonl"), 2, timeout_s, tmp_path / "gradients.safetensors")
    assert not psutil.Process().children(recursive=True)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("fault", ["late main rank", "slow rank"])
def test_a_rank_that_is_late_or_slow_changes_nothing(examine, plant_in_ranks, fault):
    plant_in_ranks(fault)
    code, table, errors = examine("--processes", "2", "--processes-timeout-s", "100")
    assert code == 0, errors
    assert not off(table) and table["1 process / 2: ranks"][0] == "ok"


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_whose_doctor_was_killed_end_when_their_time_is_up(tiny_model, colour_set, plant_in_ranks):
    argv = flags(tiny_model, colour_set / "rows.jsonl", "--processes-timeout-s", "12")
    places = plant_in_ranks("hang")
    process = subprocess.Popen([sys.executable, "-m", "contrastors.doctor", *argv], cwd=ROOT, env=places)
    itself = psutil.Process(process.pid)
    while len(started := itself.children(recursive=True)) < 3:  # torchrun and two ranks
        assert process.poll() is None
        time.sleep(0.1)
    process.kill()
    process.wait(60)
    _, alive = psutil.wait_procs(started, timeout=100)
    assert not alive


@pytest.mark.slow
@pytest.mark.dist
def test_a_signal_ends_the_doctor_and_the_ranks_it_started(tiny_model, colour_set, plant_in_ranks):
    command = [sys.executable, "-m", "contrastors.doctor", *flags(tiny_model, colour_set / "rows.jsonl")]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=ROOT, env=plant_in_ranks("hang"), stdout=pipe, stderr=pipe, text=True)
    for line in process.stdout:
        if line.startswith("gradient arrives"):
            break
    itself = psutil.Process(process.pid)
    while len(started := itself.children(recursive=True)) < 3:  # torchrun and two ranks
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=100)
    assert process.returncode == 143, out + errors
    _, alive = psutil.wait_procs(started, timeout=60)
    assert not alive


def test_ranks_without_a_gpu_each_are_skipped_with_the_reason(monkeypatch):
    from contrastors.doctor import build_parser, reason_to_skip_ranks

    args = build_parser().parse_args(["--processes", "2"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert "--processes 2 need a GPU each, found 1" in reason_to_skip_ranks(args, "cuda")
    assert "--device cpu" in reason_to_skip_ranks(args, "mps")
    assert reason_to_skip_ranks(args, "cpu") == ""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert reason_to_skip_ranks(args, "cuda") == ""


# --------------------------------------------------------------------------------------------------------- command line


def test_flags_that_training_has_too_have_its_defaults_and_types():
    from contrastors.doctor import build_parser
    from train_contrastors import build_parser as build_training_parser

    training = {action.dest: action for action in build_training_parser()._actions}
    shared = [action for action in build_parser()._actions if action.dest in training]
    assert len(shared) > 20
    for action in shared:
        if action.dest not in ("help", "max_train_rows"):
            other = training[action.dest]
            assert (action.default, action.type, action.choices) == (other.default, other.type, other.choices)


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--batch-size", "1"], "nothing to contrast"),
        (["--lora-dropout", "1"], "nothing to train"),
        (["--temperature", "2"], "within 0.01 and 1"),
        (["--batch-size", "8", "--processes", "4", "--max-train-rows", "31"], "--batch-size x --processes = 32"),
    ],
)
def test_flags_that_would_check_nothing_are_refused(argv, told, capsys):
    from contrastors.doctor import main

    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2 and told in capsys.readouterr().err


def test_a_missing_file_is_one_sentence(examine, tiny_model, tmp_path, capsys):
    from contrastors.doctor import main

    assert main(flags(tiny_model, tmp_path / "no.jsonl")) == 1
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'no.jsonl'}: cannot be read")


def test_help_loads_no_torch():
    code = "import sys; from contrastors.doctor import build_parser; build_parser().format_help(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not {"torch", "transformers", "peft"} & set(done.stdout.split())
