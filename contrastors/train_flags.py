"""The command line of the trainer: its flags, and what is refused because it would be ignored or fail later."""

from __future__ import annotations

import argparse
import os

from contrastors.cli import (
    add_image_flags,
    add_model_flags,
    natural_float,
    natural_int,
    positive_float,
    positive_int,
)
from contrastors.images import MIN_VISUAL_TOKENS
from contrastors.metrics import HEADLINES

# Trains the query tower alone; documents keep the base model's vectors.
QUERY_SIDE = "query-side-tune"
MODES = ("standard", QUERY_SIDE)

# What acts in one of the modes only; the first group in query-side tuning.
OF_QUERY_SIDE = ("query_side_backward", "document_cache", "search_api_url", "search_api_batch_size", "test_jsonl")
OF_DOCUMENT_CHUNKS = ("chunk_tokens", "reuse_vision_features", "memory_budget_gb")
OF_CHUNKS = ("grad_cache_chunk", "query_chunk", "retain_graphs")

RETAIN_HELP = "chunks forwarded once, their graphs kept; 0 = graph of one chunk (default: auto on cuda, 0 elsewhere)"


def auto_or_count(text: str) -> str | int:
    """Parses `auto` or an integer of at least 0."""
    return text if text == "auto" else natural_int(text)


def add_training_flags(parser: argparse.ArgumentParser) -> None:
    """Adds every flag of the trainer."""
    onoff = argparse.BooleanOptionalAction

    data = parser.add_argument_group("data")
    add = data.add_argument
    add("--train-jsonl", default="training/data/train.jsonl", help="rows with query, chunk_path, neg_chunk_paths")
    add("--eval-jsonl", default="training/data/eval.jsonl", help="rows to evaluate on; negatives join the corpus")
    add("--num-hard-negatives", type=natural_int, default=0, help="hard negatives of a row, its first usable; 0 = none")
    add("--sample-negatives", action=onoff, default=False, help="choose a row's hard negatives anew each epoch, seeded")
    add("--missing-negatives", choices=("mask", "drop-row"), default="mask", help="rows with too few hard negatives")
    add("--max-train-rows", type=natural_int, default=0, help="use the first rows only; 0 = all")
    add("--max-query-tokens", type=positive_int, default=512, help="tokens of a query's prompt; longer texts are cut")
    add("--num-workers", type=natural_int, default=4, help="loader processes of each rank; 0 = none, loads in line")
    add_image_flags(data)

    add_model_flags(parser)
    add = parser.add_argument_group("loss").add_argument
    add("--temperature", type=positive_float, default=0.07, help="initial temperature, 0.01 to 1; it is learned")
    add("--logit-scale-lr", type=natural_float, default=1e-3, help="learning rate of the temperature; 0 = fixed")
    add("--mask-false-negatives", action=onoff, default=True, help="mask documents known to answer a query")
    add("--grad-reduction", choices=("sum", "mean"), default="sum", help="over ranks; mean = gradient of one process")
    add("--loss-tile", type=natural_int, default=0, help="queries whose logits are formed at a time; 0 = automatic")

    add = parser.add_argument_group("optimization").add_argument
    add("--batch-size", type=positive_int, default=4, help="rows of each rank in a step")
    add(
        "--grad-cache-chunk",
        type=positive_int,
        default=2,
        help="documents of one forward; changes memory, not gradients",
    )
    add("--chunk-tokens", type=natural_int, default=0, help="visual tokens of one forward, sorted by size; 0 = off")
    add("--query-chunk", type=natural_int, default=0, help="queries of one forward; 0 = tokens of a document chunk")
    add("--retain-graphs", type=auto_or_count, metavar="auto|N", help=RETAIN_HELP)
    add("--memory-budget-gb", type=natural_float, default=0.0, help="GiB for auto; 0 = 80 %% of what is free")
    add("--reuse-vision-features", action=onoff, default=True, help="run a frozen vision part once for both forwards")
    add("--lr", type=positive_float, default=2e-5, help="peak learning rate of the adapter")
    add("--weight-decay", type=natural_float, default=0.01, help="AdamW weight decay of the adapter; 0 = off")
    add("--warmup-steps", type=natural_int, default=50, help="steps of linear warm-up; 0 = none")
    add("--max-steps", type=positive_int, default=500, help="optimizer steps of the whole run")
    schedulers = ("cosine", "constant", "cosine-restarts")
    add("--scheduler", choices=schedulers, default="cosine", help="learning rate after the warm-up")
    add("--num-cycles", type=positive_int, default=2, help="cycles of cosine-restarts")
    add("--max-grad-norm", type=natural_float, default=1.0, help="clip the norm over all gradients; 0 = off")

    add = parser.add_argument_group("evaluation").add_argument
    add("--eval-steps", type=natural_int, default=100, help="evaluate every so many steps; 0 = never, at no end either")
    add("--eval-batch-size", type=positive_int, default=16, help="items of one forward without gradients")
    add("--max-eval-rows", type=natural_int, default=0, help="use the first rows only; 0 = all")
    add("--best-metric", choices=HEADLINES, default="recall@1", help="marks the best checkpoint")
    add("--eval-only", action=onoff, default=False, help="evaluate the base, or the adapter of --resume, and end")

    add = parser.add_argument_group("output").add_argument
    add("--output-dir", default="training/output_contrastors", help="run folder")
    add("--save-steps", type=natural_int, default=100, help="save every so many steps; 0 = at the end only")
    add("--save-total-limit", type=natural_int, default=5, help="newest checkpoints to keep, beside the best; 0 = all")
    add("--resume", metavar="DIR|latest", help="checkpoint folder; latest = newest in --output-dir, or a fresh start")
    add("--allow-changed-args", action=onoff, default=False, help="let typed flags differ from the checkpoint's")
    add("--overwrite", action=onoff, default=False, help="replace the run that is in --output-dir")
    trackers = ("none", "tensorboard", "wandb", "trackio")
    add("--report-to", choices=trackers, default="none", help="mirror of metrics.jsonl")
    add("--run-name", help="name shown by --report-to (default: name of the run folder)")

    add = parser.add_argument_group("query side").add_argument
    add("--mode", choices=MODES, default="standard", help="query-side-tune: documents keep the base model's vectors")
    backwards = ("direct", "gradcache")
    add("--query-side-backward", choices=backwards, default="direct", help="all queries in one forward, or in chunks")
    add("--document-cache", metavar="DIR", help="vectors of documents (default: document_cache in the run folder)")
    add("--search-api-url", metavar="URL", help="service with the frozen index; it is asked at each evaluation")
    add("--search-api-batch-size", type=positive_int, default=32, help="queries of one request")
    add("--test-jsonl", metavar="FILE", help="rows whose queries the service is asked (default: --eval-jsonl)")

    add = parser.add_argument_group("runtime").add_argument
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto", help="auto = cuda, then mps, then cpu")
    add("--seed", type=natural_int, default=0, help="of adapter, order and dropout")
    add("--plan", action=onoff, default=False, help="print what the run will take (FLOP, memory, disk) and end")


def validate(parser: argparse.ArgumentParser, args: argparse.Namespace, typed: set[str]) -> None:
    """Ends with a usage error on flags that would be ignored or fail later."""
    training = not args.eval_only
    flash = args.attn_implementation == "flash_attention_2"
    alone = args.batch_size * int(os.environ.get("WORLD_SIZE", 1)) == 1
    wants_other_scheduler = "num_cycles" in typed and args.scheduler != "cosine-restarts"
    refusals = [
        (args.overwrite and args.resume and training, "--overwrite deletes the run that --resume continues"),
        (args.plan and (args.resume or args.eval_only), "--plan tells of a training that is yet to begin"),
        (args.report_to == "none" and "run_name" in typed and training, "--run-name acts with --report-to only"),
        (args.allow_changed_args and not args.resume, "--allow-changed-args acts on --resume only"),
        (wants_other_scheduler, f"--num-cycles acts on --scheduler cosine-restarts only, not on {args.scheduler}"),
        (not 0.01 <= args.temperature <= 1, f"--temperature {args.temperature}: stays within 0.01 and 1, start there"),
        (
            args.max_num_visual_tokens < MIN_VISUAL_TOKENS,
            f"--max-num-visual-tokens {args.max_num_visual_tokens}: at least {MIN_VISUAL_TOKENS} are needed",
        ),
        (args.lora_dropout == 1, "--lora-dropout 1 leaves nothing to train"),
        (
            args.lora_vit and args.reuse_vision_features and "reuse_vision_features" in typed,
            "--reuse-vision-features needs a frozen vision part; --lora-vit trains it",
        ),
        (
            args.memory_budget_gb and args.retain_graphs not in (None, "auto"),
            f"--memory-budget-gb acts on --retain-graphs auto only, not on {args.retain_graphs}",
        ),
        (
            0 < args.chunk_tokens < args.max_num_visual_tokens,
            f"--chunk-tokens {args.chunk_tokens} holds no tile of --max-num-visual-tokens {args.max_num_visual_tokens}",
        ),
        (
            flash and (args.device not in ("auto", "cuda") or args.dtype == "fp32"),
            "--attn-implementation flash_attention_2 needs --device cuda and --dtype bf16",
        ),
        (
            training and alone and not args.num_hard_negatives,
            "a global batch of one row without hard negatives has nothing to contrast; raise --batch-size",
        ),
    ]
    refusals += _refuse_for_mode(args, typed)
    acts = {"sample_negatives": args.sample_negatives, "missing_negatives": args.missing_negatives == "drop-row"}
    for name in sorted(typed & acts.keys()) if training and not args.num_hard_negatives else ():
        refusals.append((acts[name], f"{_flag(name)} needs --num-hard-negatives"))
    idle = {"eval_jsonl", "best_metric", "max_eval_rows"}
    if args.mode == "standard":  # otherwise documents are embedded in such batches, before the first step
        idle.add("eval_batch_size")
    for name in sorted(typed & idle) if training and args.eval_steps == 0 else ():
        refusals.append((True, f"{_flag(name)} is idle with --eval-steps 0"))
    for refused, text in refusals:
        if refused:
            parser.error(text)


def _refuse_for_mode(args: argparse.Namespace, typed: set[str]) -> list[tuple[bool, str]]:
    """Returns what flags that act in one mode only are refused for."""
    if args.mode == "standard":
        idle = [name for name in OF_QUERY_SIDE if name in typed and getattr(args, name) is not None]
        return [(True, f"{_flag(name)} acts on --mode query-side-tune only") for name in idle]
    idle = [name for name in OF_DOCUMENT_CHUNKS if name in typed and getattr(args, name)]
    refused = [
        (True, f"{_flag(name)} is about chunks of documents, and --mode {args.mode} embeds none") for name in idle
    ]
    if args.query_side_backward == "direct":
        idle = [name for name in OF_CHUNKS if name in typed]
        refused += [(True, f"{_flag(name)} acts on --query-side-backward gradcache only") for name in idle]
    elif args.query_chunk and "grad_cache_chunk" in typed and not args.resume:
        refused.append((True, "--grad-cache-chunk and --query-chunk both say how many queries a forward has; give one"))
    service = sorted({"search_api_batch_size", "test_jsonl"} & typed) if not args.search_api_url else ()
    refused += [(getattr(args, name) is not None, f"{_flag(name)} needs --search-api-url") for name in service]
    no_evaluation = args.eval_steps == 0 and not args.eval_only
    return [
        *refused,
        (args.lora_vit, f"--lora-vit: --mode {args.mode} trains on queries, and they have no pixels"),
        (args.retain_graphs == "auto", "--retain-graphs auto measures chunks of documents; give a number of chunks"),
        (args.plan, f"--plan knows --mode standard only: in {args.mode} a step embeds the queries and nothing else"),
        (args.search_api_url and no_evaluation, "--search-api-url is asked at evaluations; --eval-steps 0 has none"),
    ]


def _flag(name: str) -> str:
    """Returns the flag of an argument's name."""
    return "--" + name.replace("_", "-")
