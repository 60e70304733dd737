"""Checks the machine, the model and the data before a training run: a table, and exit code 1 where something is off.

Takes the training script's flags and the first rows of its data; writes nothing. The first thing to run on a new
cluster, and after an upgrade.

  python -m contrastors.doctor --model Qwen/Qwen3-VL-Embedding-2B --train-jsonl train_hn.jsonl --num-hard-negatives 2
  python -m contrastors.doctor --model M --train-jsonl F --lora-vit --grad-cache-chunk 4 --batch-size 8 --processes 2
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from contrastors.cli import (
    add_image_flags,
    add_model_flags,
    make_parser,
    natural_int,
    positive_float,
    positive_int,
    require_transformers,
    run_script,
)

if TYPE_CHECKING:
    from contrastors.checks import Check, Patient

WIDTHS = (27, 66, 22)  # name, figure, bound
STOP_S = 40  # torchrun gives its workers 30 s
# torch asks the name server who 127.0.0.1 is, once a connection: 10 s each where nobody answers.
RES_OPTIONS = "timeout:1 attempts:2"


def build_parser() -> argparse.ArgumentParser:
    """Returns the command line: flags of the training script with its defaults, and a few of the doctor's own."""
    parser = make_parser(__doc__)
    parser.prog = "python -m contrastors.doctor"

    data = parser.add_argument_group("data")
    add = data.add_argument
    add("--train-jsonl", default="training/data/train.jsonl", help="rows with query, chunk_path, neg_chunk_paths")
    add("--num-hard-negatives", type=natural_int, default=0, help="hard negatives of a row, its first usable; 0 = none")
    add("--max-train-rows", type=natural_int, default=128, help="use the first rows only; 0 = all")
    add("--max-query-tokens", type=positive_int, default=512, help="tokens of a query's prompt; longer texts are cut")
    add("--num-workers", type=natural_int, default=4, help="loader processes; 0 = none, loads in line")
    add_image_flags(data)

    add_model_flags(parser)
    add = parser.add_argument_group("step").add_argument
    add("--temperature", type=positive_float, default=0.07, help="initial temperature, 0.01 to 1")
    add("--grad-reduction", choices=("sum", "mean"), default="sum", help="over ranks; mean = gradient of one process")
    add("--batch-size", type=positive_int, default=4, help="rows of each rank; the graphs of all of them are kept once")
    add("--grad-cache-chunk", type=positive_int, default=2, help="documents of one forward")
    add("--query-chunk", type=natural_int, default=0, help="queries of one forward; 0 = tokens of a document chunk")

    add = parser.add_argument_group("runtime").add_argument
    add("--processes", type=positive_int, default=2, help="ranks to compare with one process; 1 = leave that out")
    add("--processes-timeout-s", type=positive_float, default=600, help="seconds after which the ranks count as hung")
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto", help="auto = cuda, then mps, then cpu")
    add("--seed", type=natural_int, default=0, help="of adapter, order and dropout")
    # What the doctor starts under torchrun is this same module: its ranks write their gradients to this file.
    parser.add_argument("--gradients-to", type=Path, help=argparse.SUPPRESS)
    return parser


def validate(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuses flags with which nothing could be checked."""
    if args.batch_size == 1 and not args.num_hard_negatives:
        parser.error("a batch of one row without hard negatives has nothing to contrast; raise --batch-size")
    if args.lora_dropout == 1:
        parser.error("--lora-dropout 1 leaves nothing to train")
    if not 0.01 <= args.temperature <= 1:
        parser.error(f"--temperature {args.temperature}: stays within 0.01 and 1, start there")
    wanted = args.batch_size * args.processes
    if 0 < args.max_train_rows < wanted:
        parser.error(
            f"--max-train-rows {args.max_train_rows} is less than --batch-size x --processes = {wanted}; raise it"
        )
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and args.gradients_to is None:
        parser.error("the doctor starts its own ranks (--processes); run it without torchrun")


# ---------------------------------------------------------------------------------------------------------------- table


class Table:
    """Prints checks as they come, and remembers what was off.

    Attributes:
        sentences: Of the lines that were off.
    """

    def __init__(self) -> None:
        self.sentences: list[str] = []
        self._print("check", "figure", "bound", "")

    def _print(self, name: str, figure: str, bound: str, status: str) -> None:
        lines = textwrap.wrap(figure, WIDTHS[1], break_on_hyphens=False) or [""]
        cells = f"{name:{WIDTHS[0]}}  {lines[0]:{WIDTHS[1]}}  {bound:{WIDTHS[2]}}  {status}"
        print(cells.rstrip(), *(f"{'':{WIDTHS[0]}}  {line}" for line in lines[1:]), sep="\n", flush=True)

    def add(self, checks: list[Check]) -> None:
        """Prints the lines of some checks."""
        for check in checks:
            status = {None: "skipped", False: "OFF"}.get(check.is_ok, "ok" if check.bound else "-")
            self._print(check.name, check.figure, check.bound, status)
            if check.is_ok is False:
                self.sentences.append(f"{check.name}: {check.sentence}")
            elif check.sentence:
                self._print("", f"({check.sentence})", "", "")

    def run(self, name: str, work: Callable[[], list[Check]]) -> bool:
        """Runs a check and prints its lines; one that breaks is off, whatever broke it. Returns whether it ran."""
        from contrastors.checks import Check

        try:
            self.add(work())
        except Exception as error:  # the one place: after an upgrade anything may break, and the other lines still tell
            reason = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
            kind = "" if isinstance(error, (ValueError, OSError)) else f"{type(error).__name__}: "
            self.add([Check(name, "could not be measured", "runs", False, f"{kind}{reason}{_advice(error)}")])
            return False
        return True


def _advice(error: Exception) -> str:
    if type(error).__name__ not in ("OutOfMemoryError", "ChunkOutOfMemory"):
        return ""
    return (
        "; a smaller --batch-size (the reference keeps the graphs of a whole batch), --grad-cache-chunk or "
        "--max-num-visual-tokens takes less"
    )


# ---------------------------------------------------------------------------------------------------------------- ranks


def reason_to_skip_ranks(args: argparse.Namespace, device_type: str) -> str:
    """Returns why `--processes` cannot be compared here; "" where they can."""
    import torch

    if args.processes == 1:
        return "--processes 1"
    if device_type == "mps":
        return "several processes need cpu or cuda; try it with --device cpu"
    if device_type == "cuda" and torch.cuda.device_count() < args.processes:
        found = torch.cuda.device_count()
        return f"--processes {args.processes} need a GPU each, found {found}; --device cpu does it without"
    return ""


def run_ranks(argv: list[str], num_processes: int, timeout_s: float, output: Path) -> None:
    """Runs this module under torchrun until its ranks have written `output`.

    Raises:
        ValueError: They failed, or did not end in time.
    """
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_processes}",
        f"--log-dir={output.parent}", "-m", "contrastors.doctor", *argv, "--processes-timeout-s", str(timeout_s),
        "--gradients-to", str(output),
    ]  # fmt: skip
    paths = [str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "RES_OPTIONS": RES_OPTIONS}
    with open(output.with_name("ranks.log"), "w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            code = process.wait(timeout_s + STOP_S)  # ranks end by themselves after timeout_s
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
        log.seek(0)
        lines = [line.strip() for line in log if line.strip()]
    places = [place for rank in range(num_processes) if (place := read_place(output, rank))]
    if places or code is None:
        raise ValueError(
            f"{num_processes} processes did not end within --processes-timeout-s {timeout_s:g}: a collective hangs "
            f"(on GPUs NCCL_DEBUG=INFO tells more) or loading is slow; {', '.join(places) or 'torchrun hangs'}"
        )
    if code:
        told = [line for line in lines if line.startswith("error: ")] or [
            line for line in lines if "Error: " in line and "ChildFailedError" not in line
        ]
        last = told[0].removeprefix("error: ") if told else lines[-1] if lines else "no message"
        raise ValueError(f"{num_processes} processes under torchrun failed (exit code {code}): {last}")


def _stack_file(output: Path, rank: int) -> Path:
    return output.with_name(f"rank{rank}.stack")


def read_place(output: Path, rank: int) -> str:
    """Returns where a rank was when its time was up: our innermost line; "" where it ended in time."""
    file = _stack_file(output, rank)
    stack = file.read_text(errors="replace") if file.exists() else ""
    main_thread = stack.rpartition("(most recent call first)")[2]
    frames = re.findall(r'File "(.+)", line (\d+) in (\S+)', main_thread)
    own = [frame for frame in frames if Path(frame[0]).parent == Path(__file__).parent] or frames
    if not own:
        return f"rank {rank} could not tell where" if stack else ""
    file_name, line, function = own[0]
    return f"rank {rank} was in {function} ({Path(file_name).name}:{line})"


def end_when_time_is_up(output: Path, timeout_s: float) -> None:
    """Ends this rank after so many seconds, wherever it hangs, and leaves its stack beside `output`."""
    file = open(_stack_file(output, int(os.environ["RANK"])), "w")  # faulthandler writes to it until the end
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=file)


def compare_ranks(patient: Patient, args: argparse.Namespace, argv: list[str]) -> list[Check]:
    """Returns the lines of one process against `--processes`; the gradients travel through a file that is deleted."""
    from safetensors import safe_open

    from contrastors.checks import Check
    from contrastors.step_checks import check_ranks

    if reason := reason_to_skip_ranks(args, patient.world.device.type):
        return [Check(f"1 process / {args.processes}", reason, is_ok=None)]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "gradients.safetensors"
        run_ranks(argv, args.processes, args.processes_timeout_s, output)
        with safe_open(output, framework="pt") as file:
            found = {group: file.get_tensor(group) for group in file.keys()}  # no dict: it has no items()
            ranks_agree = file.metadata()["ranks_agree"] == "yes"
    return check_ranks(patient, found, ranks_agree)


def write_rank_gradients(args: argparse.Namespace) -> int:
    """Does the step of one of `--processes`; the main rank writes the gradients. Collective."""
    from safetensors.torch import save_file

    from contrastors import distributed
    from contrastors.checks import add_moved_adapter, load_patient, read_rows
    from contrastors.loading import silence_libraries
    from contrastors.step_checks import cached_gradients

    silence_libraries()
    world = distributed.start(args.device)
    data, _ = read_rows(args)
    patient = load_patient(args, world, data)
    add_moved_adapter(patient)
    patient.model.eval()  # as the one process they are compared with: no dropout
    factor = world.size if args.grad_reduction == "sum" else 1
    gradients = cached_gradients(patient, patient.first_batch(args.batch_size, world.size), factor)
    copies = distributed.gather_objects({group: gradient.cpu() for group, gradient in gradients.items()})
    if world.is_main:
        agree = all(copies[0][group].equal(copy[group]) for copy in copies for group in copies[0])
        save_file(copies[0], args.gradients_to, {"ranks_agree": "yes" if agree else "no"})
    distributed.barrier()
    distributed.stop()
    return 0


# ----------------------------------------------------------------------------------------------------------------- main


def examine(args: argparse.Namespace, argv: list[str]) -> int:
    """Runs all checks in order and returns the exit code."""
    require_transformers()
    from contrastors import checks, distributed, step_checks
    from contrastors.loading import silence_libraries

    silence_libraries()
    world = distributed.start(args.device)
    data, lines = checks.read_rows(args)
    table = Table()
    table.add(lines)
    found: list[Patient] = []

    def load() -> list[Check]:
        patient = checks.load_patient(args, world, data)
        found.append(patient)
        figure = f"{len(patient.model.base.state_dict())} tensors, 0 missing, 0 left over; {patient.model.base.dtype}"
        return [checks.judge("weights", figure.replace("torch.", ""), "none", True, "")]

    if data.rows and table.run("weights", load):
        (patient,) = found
        table.run("inputs", lambda: checks.check_inputs(patient))
        table.run("embeddings", lambda: checks.check_base_embeddings(patient))
        if table.run("adapter", lambda: checks.add_moved_adapter(patient)):
            table.run("invariance", lambda: checks.check_invariance(patient))
            table.run("chunked / full", lambda: step_checks.check_chunking(patient))
            table.run("trains", lambda: step_checks.check_training_modules(patient))
            table.run(f"1 process / {args.processes}", lambda: compare_ranks(patient, args, argv))
            table.run("time", lambda: step_checks.check_time(patient))
    for sentence in table.sentences:
        print(f"error: {sentence}", file=sys.stderr)
    if not table.sentences:
        print("nothing is off")
    return 1 if table.sentences else 0


def main(argv: list[str] | None = None) -> int:
    """Parses the command line and runs it."""
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser()
    args = parser.parse_args(argv)
    validate(parser, args)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive the fork of loader workers
    if args.gradients_to is not None:
        end_when_time_is_up(args.gradients_to, args.processes_timeout_s)
        return run_script(lambda: write_rank_gradients(args))
    return run_script(lambda: examine(args, argv))


if __name__ == "__main__":
    sys.exit(main())
