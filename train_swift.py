"""Trains the adapter with ms-swift instead of train_contrastors.py: no GradCache, fixed temperature.

Reads rows of convert_data_for_swift.py; swift writes OUTPUT_DIR/vN-TIME/checkpoint-N, this script an adapter for all
other scripts beside the last and the best of them, checkpoint-N-biqwen3.

  python train_swift.py --train-jsonl train_hn_swift.jsonl --eval-jsonl eval_swift.jsonl --num-hard-negatives 2
  python train_swift.py --resume training/output_swift/v0-20260101-120000/checkpoint-300 --nproc-per-node 4
  python train_swift.py --remap training/output_swift/v0-20260101-120000/checkpoint-300
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contrastors.cli import (
    fraction,
    make_parser,
    natural_float,
    natural_int,
    positive_float,
    positive_int,
    require_model_folder,
    run_script,
    typed_flags,
)
from contrastors.images import open_image
from contrastors.swift_rows import SwiftRow, read_swift_rows

if TYPE_CHECKING:
    from contrastors.processing import BiQwen3Processor

TESTED = "4.6.0"  # of ms-swift
INSTALL = "pip install -r requirements-swift.txt"
MIN_TEMPERATURE = 0.01  # as in LogitScale, which keeps the temperature for the other scripts
REMAP_FLAGS = {"remap", "model", "device", "dtype", "overwrite"}
# What could not act beside --resume: swift goes on with the adapter and the optimizer that it finds there.
INERT_ON_RESUME = {"lr", "weight_decay", "lora_r", "lora_alpha", "lora_dropout", "freeze_vit"}
_IS_CHECKED = "TRAIN_SWIFT_IS_CHECKED"  # set for the ranks once their parent has looked at the data


def build_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = make_parser(__doc__)
    onoff = argparse.BooleanOptionalAction

    add = parser.add_argument_group("data").add_argument
    add("--train-jsonl", default="data/train_hn_swift.jsonl", help="training rows, of convert_data_for_swift.py")
    add("--eval-jsonl", default="data/eval_swift.jsonl", help='rows for the evaluation loss; "" = no evaluation')
    add(
        "--num-hard-negatives", type=natural_int, default=0, help="hard negatives of a row; 0 = in-batch negatives only"
    )
    add("--num-workers", type=natural_int, default=4, help="loader processes of each rank; 0 = load in this process")

    add = parser.add_argument_group("model").add_argument
    add("--model", default="Qwen/Qwen3-VL-Embedding-2B", help="base model: hub name or folder")
    add("--max-num-visual-tokens", type=positive_int, default=4096, help="visual tokens of the largest image")
    add("--dtype", choices=("auto", "bf16", "fp32"), default="auto", help="auto = bf16 on cuda, fp32 elsewhere")

    add = parser.add_argument_group("adapter").add_argument
    add("--lora-r", type=positive_int, default=32, help="rank of the LoRA matrices")
    add("--lora-alpha", type=positive_float, default=32, help="LoRA scale is alpha / r")
    add("--lora-dropout", type=fraction, default=0.05, help="dropout in front of the LoRA; 0 = off")
    add("--freeze-vit", action=onoff, default=True, help="adapt the language part only; off = vision blocks too")

    add = parser.add_argument_group("loss").add_argument
    add("--temperature", type=positive_float, default=0.07, help="of the logits, fixed")

    add = parser.add_argument_group("optimization").add_argument
    add("--batch-size", type=positive_int, default=4, help="rows of each rank a step")
    add("--lr", type=positive_float, default=2e-5, help="peak learning rate")
    add("--weight-decay", type=natural_float, default=0.01, help="AdamW weight decay of the adapter; 0 = off")
    add("--warmup-steps", type=natural_int, default=50, help="steps of linear warm-up; 0 = none")
    add("--max-steps", type=positive_int, default=500, help="steps of the whole run")
    add("--scheduler", choices=("cosine", "constant"), default="cosine", help="learning rate after the warm-up")
    add("--max-grad-norm", type=natural_float, default=1.0, help="clip the gradient's norm; 0 = off")

    add = parser.add_argument_group("output").add_argument
    add("--output-dir", default="training/output_swift", help="swift makes a new folder in it for every run")
    add("--eval-steps", type=positive_int, default=100, help="steps between evaluations")
    add("--save-steps", type=positive_int, default=100, help="steps between checkpoints")
    add("--save-total-limit", type=positive_int, default=5, help="checkpoints to keep")
    add("--logging-steps", type=positive_int, default=5, help="steps between log lines")
    add("--report-to", choices=("none", "tensorboard", "wandb"), default="none", help="tracker beside the log")
    add("--resume", metavar="DIR", help="go on from a checkpoint of swift; flags not typed are those of its run")
    add("--remap", metavar="DIR", help="train nothing, write DIR-biqwen3 for a checkpoint of swift")
    add("--overwrite", action=onoff, default=False, help="replace DIR-biqwen3 of --remap")

    add = parser.add_argument_group("runtime").add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto = cuda, then cpu")
    add("--nproc-per-node", type=positive_int, default=1, help="ranks on this machine")
    add("--deepspeed", metavar="NAME", help="zero2, zero3 or a JSON file (default: none)")
    add("--seed", type=natural_int, default=0, help="of LoRA, dropout and the order of rows")
    return parser


def validate(parser: argparse.ArgumentParser, args: argparse.Namespace, typed: set[str]) -> None:
    """Refuses flags that would be ignored or fail later."""
    if args.remap:
        if ignored := sorted(typed - REMAP_FLAGS):
            parser.error(f"--{ignored[0].replace('_', '-')} has no meaning with --remap")
        return
    if args.overwrite:
        parser.error("--overwrite belongs to --remap: swift makes a new folder for every run")
    if not MIN_TEMPERATURE <= args.temperature <= 1:
        parser.error(f"--temperature {args.temperature}: it must lie in [{MIN_TEMPERATURE}, 1]")
    if args.deepspeed and importlib.util.find_spec("deepspeed") is None:
        parser.error("--deepspeed needs its package: pip install deepspeed")


def require_swift() -> None:
    """Stops where ms-swift is missing.

    Raises:
        ValueError: With the one command that installs it.
    """
    try:
        found = metadata.version("ms-swift")
    except metadata.PackageNotFoundError as error:
        raise ValueError(f"ms-swift is not installed: {INSTALL}") from error
    if found != TESTED:
        print(f"note: this script is tested with ms-swift {TESTED}, this is {found}; {INSTALL} installs it")


# ----------------------------------------------------------------------------------------------------------------- data


def check_data(args: argparse.Namespace) -> list[SwiftRow]:
    """Returns the training rows after checking all rows of both files.

    Raises:
        ValueError: swift would fail on a row in mid-training, or hide what is wrong with it.
    """
    rows = read_swift_rows(args.train_jsonl, args.num_hard_negatives)
    found = [len(row.images) - 1 for row in rows]
    print(f"{args.train_jsonl}: {len(rows)} rows with {min(found)} to {max(found)} hard negatives")
    if args.eval_jsonl:
        print(f"{args.eval_jsonl}: {len(read_swift_rows(args.eval_jsonl, args.num_hard_negatives))} rows")
    if max(found) > args.num_hard_negatives > 0:
        print(
            f"note: swift encodes all negatives of a row and uses the first {args.num_hard_negatives}; python "
            f"convert_data_for_swift.py --num-hard-negatives {args.num_hard_negatives} saves that"
        )
    return rows


def compare_tokens(row: SwiftRow, template: Any, processor: BiQwen3Processor) -> list[str]:
    """Returns a sentence for the query and for the document of a row if swift gives it other tokens than we do.

    Args:
        row: Any row.
        template: Of swift, in its training mode.
        processor: Ours, at the same pixel limit.
    """
    theirs = template.encode(row.data)
    ours = {
        "query": (processor.encode_query(row.query).token_ids, theirs["anchor_input_ids"]),
        "document": (
            processor.encode_document(open_image(row.images[0])).token_ids,
            theirs["positive_input_ids"],
        ),
    }
    return [
        f"the {kind} of line {row.line} has {len(first)} tokens in the other scripts and {len(second)} in swift, at "
        f"the end {first[-2:]} and {second[-2:]}: swift's template always ends in <|endoftext|>, the other scripts "
        "follow this checkpoint's own processor, and would use the adapter at another token than it was trained at"
        for kind, (first, second) in ours.items()
        if first != second
    ]


# ------------------------------------------------------------------------------------------------------------- training


def refuse_own_code(model: str) -> None:
    """Stops at a checkpoint that brings code, which swift would run: it reads configurations with trust_remote_code.

    Raises:
        ValueError: The configuration names code of its own.
    """
    from swift.model.register import ModelLoader
    from transformers import PretrainedConfig

    if "auto_map" in PretrainedConfig.get_config_dict(model)[0]:
        raise ValueError(f"--model {model}: its config.json names code of its own (auto_map), which swift would run")
    ModelLoader.default_trust_remote_code = False


def refuse_other_slots(template: Any, processor: BiQwen3Processor) -> None:
    """Stops at a checkpoint whose image slots swift would not find: it knows Qwen's own number of that token alone.

    Raises:
        ValueError: The checkpoint has another one, as the demo's has.
    """
    if template.image_token_id != processor.image_token_id:
        raise ValueError(
            f"swift takes token {template.image_token_id} for an image slot, in this checkpoint it is "
            f"{processor.image_token_id}: swift trains models with Qwen's vocabulary only (the demo's has its own)"
        )


def swift_arguments(args: argparse.Namespace, processor: BiQwen3Processor) -> dict[str, Any]:
    """Returns what swift is called with; whatever differs from its defaults for a reason of ours has it beside it."""
    import torch

    from contrastors.biqwen3 import LANGUAGE_TARGETS, VISION_TARGETS
    from contrastors.swift import ARGUMENTS, ENVIRONMENT

    on_cuda = torch.cuda.is_available()
    is_bf16 = args.dtype == "bf16" or (args.dtype == "auto" and on_cuda)
    environment = {name: getattr(args, flag) for flag, (name, _) in ENVIRONMENT.items() if flag != "num_hard_negatives"}
    # Without this swift scales small images up to 4 tokens, we to what the checkpoint says.
    environment["IMAGE_MIN_TOKEN_NUM"] = processor.min_pixels // processor.pixels_per_token
    environment["INFONCE_USE_BATCH"] = "True"
    unused = {}
    if args.num_hard_negatives:
        environment["INFONCE_HARD_NEGATIVES"] = args.num_hard_negatives
    else:  # unset, swift takes all the negatives a row has: they are named away
        unused = {"negative_messages": "unused_messages", "negative_images": "unused_images"}
    targets = LANGUAGE_TARGETS if args.freeze_vit else f"{LANGUAGE_TARGETS}|{VISION_TARGETS}"
    return {name: getattr(args, flag) for flag, name in ARGUMENTS.items()} | {
        "model_type": "qwen3_vl_emb",  # a local folder does not tell
        "task_type": "embedding",
        "loss_type": "infonce",
        "use_hf": True,  # hub names, where the other scripts look for them
        "check_model": False,  # asks a server
        "dataset": [os.path.abspath(args.train_jsonl)],
        "val_dataset": [os.path.abspath(args.eval_jsonl)] if args.eval_jsonl else [],
        "columns": unused,
        "strict": True,  # otherwise a bad row is replaced by another one
        "data_seed": args.seed,
        "per_device_eval_batch_size": args.batch_size,
        "gradient_accumulation_steps": 1,  # its default of 16 rows a step would add gradients up, not average them
        "adam_beta2": 0.999,  # as in train_contrastors.py, swift's own is 0.95
        "target_regex": rf"(.*\.)?({targets})",  # the very modules of train_contrastors.py, not all linear ones
        "model_kwargs": environment,
        "torch_dtype": "bfloat16" if is_bf16 else "float32",
        "bf16": is_bf16,
        "fp16": False,  # what swift takes fp32 weights for, even on a CPU
        "use_cpu": not on_cuda,
        "ddp_backend": ("nccl" if on_cuda else "gloo") if "LOCAL_RANK" in os.environ else None,
        "eval_strategy": "steps" if args.eval_jsonl else "no",
        "report_to": [] if args.report_to == "none" else [args.report_to],
        "output_dir": os.path.abspath(args.output_dir),
        "resume_from_checkpoint": args.resume,
    }


def train(args: argparse.Namespace) -> list[Path]:
    """Trains with swift on every rank and returns the last and the best checkpoint."""
    for name in [name for name in os.environ if name.startswith("INFONCE_")]:
        del os.environ[name]  # a left-over of somebody's shell would change the loss
    from contrastors.processing import BiQwen3Processor

    require_model_folder(args.model)
    processor = BiQwen3Processor.from_pretrained(args.model, args.max_num_visual_tokens)
    from swift.arguments import SftArguments
    from swift.pipelines import sft_main

    refuse_own_code(args.model)
    swift_args = SftArguments(**swift_arguments(args, processor))
    if swift_args.rank <= 0:
        template = swift_args.get_template()
        template.set_mode("train")
        refuse_other_slots(template, processor)
        for sentence in compare_tokens(read_swift_rows(args.train_jsonl, 0)[0], template, processor):
            print(f"warning: {sentence}")
    result = sft_main(swift_args)
    found = [result.get(f"{which}_model_checkpoint") for which in ("last", "best")]
    return [Path(path) for path in dict.fromkeys(found) if path]


def leave_ranks() -> bool:
    """Waits for the other ranks, ends the process group, and tells whether this is the main rank."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return True
    is_main = dist.get_rank() == 0
    dist.barrier()
    dist.destroy_process_group()
    return is_main


def restore_flags(args: argparse.Namespace, typed: set[str]) -> bool:
    """Fills every flag that was not typed from the checkpoint of `--resume`; returns whether steps are left to do.

    Raises:
        ValueError: A typed flag differs and could not act.
    """
    from contrastors.swift import read_flags, read_step

    args.resume = os.path.abspath(args.resume)
    saved = read_flags(args.resume)
    for name in sorted(typed & saved.keys() & INERT_ON_RESUME):
        if getattr(args, name) != saved[name]:
            raise ValueError(
                f"--{name.replace('_', '-')} {getattr(args, name)} (checkpoint: {saved[name]}): swift goes on with the "
                "adapter and the optimizer of the checkpoint; leave it out, or start a new run"
            )
    for name, value in ({"output_dir": os.path.dirname(os.path.dirname(args.resume))} | saved).items():
        if name not in typed:
            setattr(args, name, value)
    return read_step(Path(args.resume)) < args.max_steps


def restart_on_ranks(num_ranks: int, argv: list[str]) -> None:
    """Replaces this process by torchrun with this script (swift's NPROC_PER_NODE is read by its command line only)."""
    os.environ[_IS_CHECKED] = "1"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    sys.stdout.flush()
    os.execv(sys.executable, [*launcher, os.path.abspath(__file__), *argv])


def remap(args: argparse.Namespace, checkpoints: list[Path], model: str | None) -> None:
    """Writes the adapters that the other scripts can use."""
    import torch

    from contrastors.distributed import pick_device
    from contrastors.swift import remap_adapter, remapped_folder

    gc.collect()  # the trained model, before the base model is loaded again
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    for checkpoint in checkpoints:
        folder = remapped_folder(checkpoint)
        if folder.exists() and not args.remap:  # the best so far may be one of before --resume
            print(f"{folder} exists and is kept")
            continue
        made = remap_adapter(checkpoint, model, pick_device(args.device), args.dtype, args.overwrite)
        print(f"{made.folder}: {made.num_tensors} tensors, every key matches and embeddings change")
    print(f"next: python verify_embeddings.py --adapter {folder} --eval-jsonl FILE")


def main(argv: list[str] | None = None) -> int:
    """Runs the script and returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    parser = build_parser()
    args = parser.parse_args(argv)
    typed = typed_flags(build_parser(), argv)
    validate(parser, args, typed)
    if os.path.isdir(args.model):
        args.model = os.path.abspath(args.model)  # a checkpoint keeps it, and may be resumed from another folder
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # swift takes a GPU where it sees one

    def work() -> int:
        if args.remap:
            remap(args, [Path(args.remap).absolute()], args.model if "model" in typed else None)
            return 0
        require_swift()
        if args.resume and not restore_flags(args, typed):
            print(
                f"{args.resume} is complete: it has done all of --max-steps {args.max_steps}; --remap makes its adapter"
            )
            return 0
        if _IS_CHECKED not in os.environ:
            check_data(args)
        if args.nproc_per_node > 1 and "LOCAL_RANK" not in os.environ:
            restart_on_ranks(args.nproc_per_node, argv)
        checkpoints = train(args)
        if leave_ranks():
            remap(args, checkpoints, args.model)
        return 0

    return run_script(work)


if __name__ == "__main__":
    sys.exit(main())
