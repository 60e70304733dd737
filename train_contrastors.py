"""Fine-tunes a Qwen3-VL embedding model into a retriever of page screenshots: contrastive LoRA training with GradCache.

Reads (query, tile) pairs as JSONL; writes a run folder: checkpoint-N/ (PEFT adapters), metrics.jsonl, eval_step*.jsonl.

  python train_contrastors.py --train-jsonl pairs.jsonl --eval-jsonl eval.jsonl --batch-size 64 --grad-cache-chunk 4
  torchrun --nproc_per_node=8 train_contrastors.py --train-jsonl train_hn.jsonl --num-hard-negatives 2 --batch-size 32
  python train_contrastors.py --resume training/output_contrastors/checkpoint-200
  python train_contrastors.py --mode query-side-tune --train-jsonl pairs.jsonl     (an index of documents stays valid)
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contrastors.cli import (
    Stopped,
    StopSignals,
    make_parser,
    require_model_folder,
    require_transformers,
    run_script,
    typed_flags,
)
from contrastors.metrics import HEADLINES
from contrastors.records import dump_json, write_jsonl, write_text
from contrastors.train_flags import add_training_flags, validate

if TYPE_CHECKING:
    import torch

    from contrastors.batches import Batch, StepDataset
    from contrastors.biqwen3 import BiQwen3
    from contrastors.chunking import Chunking
    from contrastors.distributed import GradientBucket, World
    from contrastors.evaluation import EvalSet
    from contrastors.logit_scale import LogitScale
    from contrastors.processing import BiQwen3Processor
    from contrastors.resume import TrainState
    from contrastors.runlog import RunLog
    from contrastors.served_eval import ServedIndex
    from contrastors.watch import Watch

LOWER_IS_BETTER = ("loss",)
# Flags that may differ from rank to rank; what the files hold is compared by itself.
OF_A_RANK = {
    "num_workers", "device", "model", "train_jsonl", "eval_jsonl", "test_jsonl", "document_cache", "output_dir",
    "overwrite", "report_to", "run_name", "resume",
}  # fmt: skip
ONE_AT_A_TIME = "chunks of one; use --gradient-checkpointing, or lower --max-num-visual-tokens or --max-query-tokens"
CURVES = ("train/loss", "train/accuracy", "train/temperature", "eval/loss", "eval/recall@1", "eval/mrr", "eval/margin")


def build_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = make_parser(__doc__)
    add_training_flags(parser)
    return parser


# ------------------------------------------------------------------------------------------------------------------ run


@dataclass(slots=True)
class Run:
    """The locals of a run."""

    args: argparse.Namespace
    world: World
    watch: Watch
    log: RunLog
    folder: Path
    processor: BiQwen3Processor
    model: BiQwen3
    logit_scale: LogitScale
    state: TrainState
    stop: StopSignals
    eval_set: EvalSet | None = None
    eval_vectors: torch.Tensor | None = None
    service: ServedIndex | None = None
    train_set: StepDataset | None = None
    bucket: GradientBucket | None = None
    optimizer: torch.optim.Optimizer | None = None
    chunking: Chunking | None = None

    @property
    def scale(self) -> float:
        """1 / temperature now."""
        return 1 / self.logit_scale.temperature

    def count_on(self, bar: Any, doing: str) -> Callable[[int], None]:
        """Returns what long work calls with the number of things that are done."""

        def count(number: int) -> None:
            bar.update(number)
            self.watch.sign(f"{doing} at step {self.state.step}")

        return count


# ------------------------------------------------------------------------------------------------------------- the step


def learning_rate_factor(args: argparse.Namespace, step: int) -> float:
    """Returns the share of the peak learning rate at a step: a pure function of the step (from 0)."""
    if step < args.warmup_steps:
        return (step + 1) / args.warmup_steps
    if args.scheduler == "constant":
        return 1.0
    done = (step - args.warmup_steps) / max(1, args.max_steps - args.warmup_steps)
    if args.scheduler == "cosine-restarts":
        done = done * args.num_cycles % 1.0
    return 0.5 * (1 + math.cos(math.pi * done))


def compute_gradients(run: Run, batch: Batch) -> list[float]:
    """Fills the bucket with the gradients of a step, averaged over ranks, and returns what rode along. Collective.

    Where a rank runs out of memory, the whole step is done again: that rank keeps fewer graphs, or all cut smaller.

    Raises:
        ValueError: A chunk of one document is too much for some rank.
    """
    import torch

    from contrastors.batches import contrast_batch
    from contrastors.chunking import add_gradients, cut_batch
    from contrastors.rand_state import seed_step

    args, bucket, step = run.args, run.bucket, run.state.step
    loss_factor = run.world.size if args.grad_reduction == "sum" else 1
    while True:
        seed_step(args.seed, step, run.world.rank)
        bucket.zero_()
        cut = cut_batch(batch.queries, batch.documents, run.chunking, run.processor.merge_size)
        options = run.logit_scale, args.num_hard_negatives, args.loss_tile
        contrast = partial(contrast_batch, batch, cut.places, *options)
        output, gave_up_own, needs_halves = add_gradients(run.model, cut, contrast, loss_factor, run.chunking)
        # Loss, accuracy, memory and the wish to stop ride with the gradients: one collective for all of them.
        stop = [float(run.stop.received == number) for number in (signal.SIGINT, signal.SIGTERM)]
        counts = [batch.num_truncated, len(batch.documents), gave_up_own, needs_halves]
        extras = torch.tensor([*stop, *counts], device=bucket.flat.device)
        bucket.extras.copy_(torch.cat([torch.stack([output.loss, output.accuracy]), extras]))
        bucket.reduce()
        *found, any_gave_up, any_needs_halves = bucket.extras.tolist()
        if not any_gave_up and not any_needs_halves:
            return found
        if any_needs_halves and not run.chunking.halve():
            raise ValueError(f"out of memory at step {step + 1} with {ONE_AT_A_TIME}")
        cut = f"chunks of {run.chunking.documents} documents, {run.chunking.num_retained} graphs retained on rank 0"
        run.log.say(f"step {step + 1}: a rank ran out of memory; it is done again, with {cut}")


def train_step(run: Run, batch: Batch) -> dict[str, float]:
    """Does one optimizer step and returns its metrics, equal on every rank. Collective.

    Raises:
        ValueError: Loss or gradient is not finite; the parameters are those before the step.
    """
    import torch

    args, state, bucket = run.args, run.state, run.bucket
    factor = learning_rate_factor(args, state.step)
    for group in run.optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor
    found = compute_gradients(run, batch.to(run.world.device))
    loss, accuracy, interrupt, terminate, truncated, documents = found
    if not args.logit_scale_lr:
        run.logit_scale.log_scale.grad.zero_()  # it stands still, so it is no part of the norm
    grad_norm = torch.linalg.vector_norm(bucket.gradients).item()
    if not math.isfinite(loss) or not math.isfinite(grad_norm):
        rows = [run.train_set.data.rows[r].line for r in run.train_set.order.rows(state.step)]
        raise ValueError(
            f"step {state.step + 1}: loss {loss}, gradient norm {grad_norm}; training stops before it is applied; rows "
            f"on lines {', '.join(map(str, rows[:8]))}{' ...' if len(rows) > 8 else ''} of {args.train_jsonl}"
        )
    if args.max_grad_norm and grad_norm > args.max_grad_norm:
        bucket.gradients.mul_(args.max_grad_norm / grad_norm)
    run.optimizer.step()
    run.logit_scale.clamp_()
    state.step += 1
    state.num_truncated += round(truncated * run.world.size)
    if interrupt + terminate:
        run.stop.agreed = signal.SIGINT if interrupt else signal.SIGTERM
    return {
        "train/loss": loss,
        "train/accuracy": accuracy,
        "train/lr": args.lr * factor,
        "train/temperature": run.logit_scale.temperature,
        "train/grad_norm": grad_norm,
        "train/samples_seen": state.step * args.batch_size * run.world.size,
        "train/documents": round(documents * run.world.size),
    }


# -------------------------------------------------------------------------------------------------- once in a while


def evaluate_run(run: Run) -> bool:
    """Evaluates, logs, writes eval_step{N}.jsonl; returns whether this is the best so far. Collective."""
    from contrastors.evaluation import collapse_warnings, evaluate
    from contrastors.runlog import progress

    args, state = run.args, run.state
    total = (len(run.eval_set.queries) + len(run.eval_set.documents)) // run.world.size
    started = time.perf_counter()
    with progress(total, "evaluating", run.world.is_main) as bar:
        result = evaluate(
            run.model, run.processor, run.eval_set, run.world, run.scale, args.eval_batch_size, args.num_workers,
            args.max_image_pixels, lambda: run.stop.received, run.count_on(bar, "evaluation"), run.eval_vectors,
        )  # fmt: skip
    found = result.metrics
    if run.world.is_main:
        write_jsonl(run.folder / f"eval_step{state.step}.jsonl", result.per_query)
        write_text(run.folder / f"eval_step{state.step}.json", dump_json(found, indent=1) + "\n")
    if not args.eval_only:  # metrics.jsonl holds the steps of a run
        values = {f"eval/{k}": v for k, v in found.items()} | {"time/eval_s": time.perf_counter() - started}
        run.log.metrics(state.step, values)
    cells = " ".join(f"{name} {found[name]:.3f}" for name in HEADLINES)
    low, high = found["recall@1_low"], found["recall@1_high"]
    run.log.say(f"step {state.step} evaluation: {cells} (recall@1 95% [{low:.3f}, {high:.3f}])")
    for warning in collapse_warnings(found):
        run.log.say(f"warning: {warning}")
    if run.service is not None:
        ask_service(run)
    state.last_metrics, state.evaluated_step = found, state.step
    if state.step == 0:  # the base model: no checkpoint, so never the best one
        state.base_metrics = found
        return False
    value = found[args.best_metric]
    if not math.isfinite(value):
        return False
    sign = -1 if args.best_metric in LOWER_IS_BETTER else 1
    if state.best_value is not None and sign * value <= sign * state.best_value:
        return False
    state.best_step, state.best_value = state.step, value
    return True


def ask_service(run: Run) -> None:
    """Evaluates on the index that a search service holds, logs, writes search_step{N}.jsonl. Collective."""
    from contrastors.runlog import progress
    from contrastors.served_eval import service_line

    args, step, service = run.args, run.state.step, run.service
    options = args.eval_batch_size, args.num_workers, is_first_look(run), lambda: run.stop.received
    with progress(len(service.data.queries), "searching", run.world.is_main) as bar:
        result = service.evaluate(run.model, run.processor, *options, run.count_on(bar, "search"))
    if result.metrics:
        write_jsonl(run.folder / f"search_step{step}.jsonl", result.per_query)
        if not args.eval_only:
            run.log.metrics(step, {f"search/{name}": value for name, value in result.metrics.items()})
        run.log.say(f"step {step} {service_line(result)}")
    elif result.failure:
        run.log.say(f"warning: step {step}: nothing was measured at the search service: {result.failure}")


def is_first_look(run: Run) -> bool:
    """Returns whether nothing would be lost if a search service that cannot be used ended this process."""
    return run.args.eval_only or run.state.step == 0


def save_run(run: Run) -> None:
    """Saves a checkpoint, marks the best, deletes surplus ones. The main rank writes; the others wait. Collective."""
    from contrastors.checkpoint import absolute_args, model_card, refresh_state, save_checkpoint
    from contrastors.distributed import barrier
    from contrastors.resume import OF_THIS_CALL
    from contrastors.run_folder import delete_old, mark_best
    from contrastors.runlog import draw_curves, versions

    args, state = run.args, run.state
    run.watch.sign(f"saving step {state.step}")
    if run.world.is_main:
        folder = run.folder / f"checkpoint-{state.step}"
        tables = {"base": state.base_metrics, "last evaluation": state.last_metrics}
        card = model_card(args, state.step, run.logit_scale.temperature, tables)
        record = {
            **asdict(state),
            "epoch": run.train_set.order.epoch(state.step),
            "seed": args.seed,
            "world_size": run.world.size,
            "global_batch": args.batch_size * run.world.size,
            "args": absolute_args({k: v for k, v in vars(args).items() if k not in OF_THIS_CALL}),
            "versions": versions(),
            "processor": run.processor.describe(),
            "chunking": asdict(run.chunking),
        }
        if folder.exists():
            refresh_state(folder, record, card)
        else:
            save_checkpoint(folder, run.model, run.logit_scale, run.optimizer, record, card)
        if state.best_step is not None:
            mark_best(run.folder, state.best_step, args.best_metric, state.best_value)
        delete_old(run.folder, args.save_total_limit, state.best_step, state.run_id)
        draw_curves(run.folder / "metrics.jsonl", run.folder / "curves.png", CURVES)
        run.log.say(f"step {state.step} saved: {folder}")
    barrier()


# ---------------------------------------------------------------------------------------------------------- begin, loop


def choose_chunking(run: Run) -> Chunking:
    """Returns how this run cuts its steps, with as many retained graphs as asked for, or as fit. Collective."""
    from contrastors.chunking import Chunking, choose_retained

    args = run.args
    if args.mode != "standard" and args.query_side_backward == "direct":
        return Chunking(documents=1, queries=args.batch_size)
    if args.mode != "standard":
        room = 0 if args.query_chunk else args.grad_cache_chunk * args.max_num_visual_tokens
        return Chunking(1, 0, args.query_chunk, args.retain_graphs or 0, query_tokens=room)
    reuse = args.reuse_vision_features and not run.model.trains_vision
    chunking = Chunking(args.grad_cache_chunk, args.chunk_tokens, args.query_chunk, reuse_features=reuse)
    wanted = args.retain_graphs
    if wanted is None:
        wanted = "auto" if run.world.device.type == "cuda" or args.memory_budget_gb else 0
    if wanted == "auto":
        sizes = args.batch_size, 1 + args.num_hard_negatives
        run.log.say(choose_retained(run.model, run.processor, chunking, args.memory_budget_gb, *sizes))
    else:
        chunking.num_retained = wanted
    return chunking


def begin_training(run: Run, train: Any, checkpoint: Path | None) -> None:
    """Puts the adapter on the model and makes everything that a step needs; restores it from a checkpoint."""
    import torch

    from contrastors.batches import StepDataset
    from contrastors.checkpoint import load_adapter, restore
    from contrastors.data import BatchOrder
    from contrastors.distributed import GradientBucket

    args = run.args
    torch.manual_seed(args.seed)
    if checkpoint is None:
        found = run.model.add_adapter(args.lora_r, args.lora_alpha, args.lora_dropout, args.lora_vit)
    else:
        found = load_adapter(run.model, checkpoint, trainable=True)
    if args.gradient_checkpointing:
        run.model.enable_gradient_checkpointing()
    run.model.train()
    adapter = list(run.model.trainable_parameters().values())
    run.log.say(
        f"adapter: {found['language']} language and {found['vision']} vision modules, {len(adapter)} tensors, "
        f"{sum(p.numel() for p in adapter):,} parameters"
    )
    scale = list(run.logit_scale.parameters())
    run.bucket = GradientBucket([*adapter, *scale], num_extras=8)
    run.bucket.share_parameters()
    groups = [
        {"params": adapter, "peak_lr": args.lr, "weight_decay": args.weight_decay},
        {"params": scale, "peak_lr": args.logit_scale_lr, "weight_decay": 0.0},
    ]
    run.optimizer = torch.optim.AdamW(groups, lr=args.lr)
    if checkpoint is not None:
        restore(checkpoint, run.logit_scale, run.optimizer)
        for group, fresh in zip(run.optimizer.param_groups, groups, strict=True):
            group |= {"peak_lr": fresh["peak_lr"], "weight_decay": fresh["weight_decay"]}
    if args.warmup_steps >= args.max_steps:
        run.log.say(f"warning: --warmup-steps {args.warmup_steps} does not end within --max-steps {args.max_steps}")
    order = BatchOrder(len(train.rows), args.batch_size * run.world.size, args.seed)
    run.chunking = run.chunking or choose_chunking(run)
    run.train_set = StepDataset(
        train, order, run.processor, args.num_hard_negatives, args.batch_size, run.world.rank, args.sample_negatives,
        args.mask_false_negatives, args.max_image_pixels,
    )  # fmt: skip


def freeze_documents(run: Run) -> None:
    """Gives training and evaluation the base model's vectors of all documents that this run needs. Collective."""
    from contrastors.loading import Encoder, identify_base
    from contrastors.query_side import Wanted, freeze_documents
    from contrastors.runlog import progress

    def stop_or_count(count: int) -> None:
        told(count)
        if run.stop.received:  # every batch is kept, and the next start goes on from there
            raise Stopped(run.stop.received)

    args, wanted = run.args, []
    if run.train_set is not None:
        wanted.append(Wanted(run.train_set.data.documents, run.train_set.documents_of(run.state.step, args.max_steps)))
    if run.eval_set is not None:
        table = run.eval_set.documents
        wanted.append(Wanted(table, range(len(table))))
    encoder = Encoder(run.model, run.processor, identify_base(args.model, run.model, run.world))
    cache = args.document_cache or run.folder / "document_cache"
    options = run.world, args.eval_batch_size, args.num_workers, args.max_image_pixels
    started = time.perf_counter()
    with progress(sum(len(w.numbers) for w in wanted) // run.world.size, "documents", run.world.is_main) as bar:
        told = run.count_on(bar, "embedding documents")
        frozen = freeze_documents(encoder, cache, wanted, *options, stop_or_count)
    run.log.say(
        f"documents: {frozen.num_embedded} of {frozen.num_documents} embedded by the base model in "
        f"{time.perf_counter() - started:.1f} s, kept in {frozen.folder}"
    )
    if run.train_set is not None:
        run.train_set.vectors = frozen.vectors[0]
    if run.eval_set is not None:
        run.eval_vectors = frozen.vectors[-1][range(len(run.eval_set.documents))]


def train(run: Run) -> None:
    """Runs the loop to the last step, or until a signal; every rank does the same steps."""
    from contrastors.batches import load_batches
    from contrastors.evaluation import EvaluationStopped
    from contrastors.runlog import progress

    args, state, log = run.args, run.state, run.log
    batches = load_batches(run.train_set, state.step, args.max_steps, args.num_workers, run.world.device)
    saved_step, first_step = state.step, state.step + 1
    with progress(args.max_steps, "training", run.world.is_main, in_logs=False) as bar:
        bar.update(state.step)
        while True:
            is_last, is_best = state.step == args.max_steps or bool(run.stop.agreed), False
            # once in a while: evaluate (all ranks)
            due = run.eval_set is not None and (state.step % args.eval_steps == 0 or state.step == args.max_steps)
            evaluated_late = False
            if due and state.evaluated_step != state.step and not run.stop.agreed:
                try:
                    is_best = evaluate_run(run)
                    evaluated_late = 0 < state.step == saved_step  # a stop came before it, and this is the resume
                except EvaluationStopped as stopped:
                    run.stop.agreed, is_last = stopped.signal, True
            # once in a while: save (main rank)
            due = is_last or (args.save_steps and state.step % args.save_steps == 0)
            if (due and state.step != saved_step) or is_best or evaluated_late:
                save_run(run)
                saved_step = state.step
            if is_last:
                break
            run.watch.sign(f"step {state.step + 1}")
            started = time.perf_counter()
            batch = next(batches)
            waited_s = time.perf_counter() - started
            values = train_step(run, batch)
            step_s = time.perf_counter() - started
            values |= {
                "time/step_s": step_s,
                "time/data_wait_pct": 100 * waited_s / step_s,
                "time/queries_per_s": args.batch_size * run.world.size / step_s,
            }
            if args.mode == "standard":
                values["time/tiles_per_s"] = values["train/documents"] / step_s
            log.metrics(state.step, values)
            bar.update(1)
            if state.step in (first_step, args.max_steps) or state.step % 10 == 0:
                log.say(step_line(state.step, args.max_steps, values))


def step_line(step: int, max_steps: int, values: dict[str, float]) -> str:
    """Returns the console line of a step."""
    unit = "tiles" if "time/tiles_per_s" in values else "queries"
    speed = f"{values[f'time/{unit}_per_s']:.1f} {unit}/s"
    return (
        f"step {step}/{max_steps} loss {values['train/loss']:.4f} accuracy {values['train/accuracy']:.3f} "
        f"lr {values['train/lr']:.2e} temperature {values['train/temperature']:.4f} "
        f"grad norm {values['train/grad_norm']:.3g} {values['time/step_s']:.2f} s "
        f"({speed}, data wait {values['time/data_wait_pct']:.0f} %)"
    )


# --------------------------------------------------------------------------------------------------------------- output


def prepare_output(run: Run, checkpoint: Path | None) -> None:
    """Makes the run folder ready: cleared, or taken back to the checkpoint's step. The main rank's work."""
    from contrastors.checkpoint import absolute_args
    from contrastors.run_folder import clear_results, go_back_to, remove_leftovers

    args, folder = run.args, run.folder
    if args.overwrite:
        clear_results(folder)
    remove_leftovers(folder)
    run.log.open()
    for note in go_back_to(folder, asdict(run.state), args.best_metric, checkpoint):
        run.log.say(note)
    config = absolute_args(vars(args)) | {"world_size": run.world.size}
    run.log.write_records(config, str(run.world.device))
    name = args.run_name or folder.resolve().name
    run.log.start_tracker(args.report_to, name, config, run.state.run_id)


def write_summary(run: Run) -> None:
    """Writes summary.json: how the run ended, with counts that add up to the input."""
    data, state = run.train_set.data, run.state
    num_rows = len(data.rows) + len(data.bad_rows) + data.num_dropped
    summary = {
        "completed": state.step == run.args.max_steps and not run.stop.agreed,
        "step": state.step,
        "rows": {"input": num_rows, "used": len(data.rows), "bad": len(data.bad_rows), "dropped": data.num_dropped},
        "documents": len(data.documents),
        "bad_negatives": data.num_bad_negatives,
        "positives_among_negatives": data.num_positive_negatives,
        "truncated_queries_seen": state.num_truncated,
        "best": {"step": state.best_step, "metric": run.args.best_metric, "value": state.best_value},
        "last_evaluation": state.last_metrics,
    }
    if run.world.is_main:
        write_text(run.folder / "summary.json", dump_json(summary, indent=1) + "\n")
    if state.num_truncated:
        run.log.say(f"queries cut at --max-query-tokens {run.args.max_query_tokens}: {state.num_truncated}")
    if run.stop.agreed:
        name = signal.Signals(run.stop.agreed).name
        way_on = f"--resume latest --output-dir {run.folder} goes on"
        if state.step == 0:  # no checkpoint holds the flags
            way_on = (
                f"the same command with --resume latest{' in place of --overwrite' * run.args.overwrite} begins anew"
            )
        run.log.say(f"stopped by {name} after step {state.step}; {way_on}")


def check_start(args: argparse.Namespace, world: World, checkpoint: Path | None) -> None:
    """Finds what would stop the run later: before every image is looked at, which may take long. Collective."""
    from contrastors.distributed import require_agreement
    from contrastors.loading import check_attention
    from contrastors.run_folder import check_output_folder, find_results

    folder = Path(args.output_dir)
    flags = {f"--{name.replace('_', '-')}": value for name, value in vars(args).items() if name not in OF_A_RANK}
    require_agreement({"the checkpoint": str(checkpoint)} | flags)
    require_model_folder(args.model)
    check_attention(args.attn_implementation, world.device)
    if not world.is_main:
        return
    check_output_folder(folder)
    if not args.overwrite and (args.eval_only or not args.resume):
        if held := find_results(folder, args.eval_only):
            instead = "--overwrite" if args.eval_only else "--resume latest, --overwrite"
            raise ValueError(f"{held[0]} exists; use {instead} or another --output-dir")


def start_run(args: argparse.Namespace, typed: set[str], watch: Watch) -> tuple[Run, Any, Path | None]:
    """Returns the run, its training set (None for `--eval-only`) and the checkpoint that it continues."""
    from contrastors import distributed
    from contrastors.checkpoint import load_scale
    from contrastors.data import BatchOrder
    from contrastors.datasets import load_data
    from contrastors.loading import load_bi_encoder
    from contrastors.logit_scale import LogitScale
    from contrastors.resume import locate_checkpoint, recorded_chunking, take_flags, take_state
    from contrastors.runlog import RunLog
    from contrastors.served_eval import ServedIndex

    checkpoint, saved, notes = locate_checkpoint(args)
    if checkpoint is not None:
        notes += take_flags(args, typed, checkpoint, saved, int(os.environ.get("WORLD_SIZE", 1)))
    if args.resume:
        validate(build_parser(), args, typed)
    world = distributed.start(args.device)
    check_start(args, world, checkpoint)
    folder = Path(args.output_dir)
    log = RunLog(folder, world.is_main)
    for note in notes:
        log.say(note)
    train_data, eval_set = load_data(args, world, log, folder, lambda: watch.sign("checking images"))
    if train_data is not None:  # refuses fewer rows than a batch, before the model is loaded
        BatchOrder(len(train_data.rows), args.batch_size * world.size, args.seed)
    watch.sign("loading the model")
    limits = args.max_num_visual_tokens, args.max_query_tokens
    model, processor = load_bi_encoder(args.model, world.device, args.dtype, args.attn_implementation, *limits)
    logit_scale = LogitScale(args.temperature).to(world.device)
    if checkpoint is not None:
        load_scale(checkpoint, logit_scale)
    state = take_state(args, saved, model, train_data, eval_set, log)
    run = Run(args, world, watch, log, folder, processor, model, logit_scale, state, StopSignals(), eval_set)
    run.chunking = recorded_chunking(args, saved)
    model.documents_by_base = args.mode != "standard"
    if args.search_api_url:
        options = args.search_api_url, args.test_jsonl or args.eval_jsonl, args.max_eval_rows
        run.service = ServedIndex.open(*options, args.search_api_batch_size, world)
        if warning := run.service.check(is_first_look(run)):
            log.say(f"warning: {warning}")
    return run, train_data, checkpoint


def do(run: Run, train_data: Any, checkpoint: Path | None) -> None:
    """Evaluates or trains."""
    from contrastors.checkpoint import load_adapter
    from contrastors.evaluation import EvaluationStopped

    if not run.args.eval_only:
        begin_training(run, train_data, checkpoint)
        if run.world.is_main:
            prepare_output(run, checkpoint)
        if run.model.documents_by_base:
            freeze_documents(run)
        train(run)
        write_summary(run)
        return
    if checkpoint is not None:
        load_adapter(run.model, checkpoint, trainable=False)
    run.log.open()
    if run.model.documents_by_base:
        freeze_documents(run)
    try:
        evaluate_run(run)
    except EvaluationStopped as stopped:
        run.stop.agreed = stopped.signal


def work(args: argparse.Namespace, typed: set[str]) -> int:
    """Does what the command line asks for and returns the exit code."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive the fork of loader workers

    if args.plan:
        from contrastors.plan import make_plan

        if int(os.environ.get("RANK", 0)) == 0:
            print(make_plan(args, int(os.environ.get("WORLD_SIZE", 1))))
        return 0
    require_transformers()
    import torch

    from contrastors import distributed
    from contrastors.loading import silence_libraries
    from contrastors.watch import Watch

    silence_libraries()
    if args.report_to != "none" and importlib.util.find_spec(args.report_to) is None:
        raise ValueError(f"--report-to {args.report_to} needs its package: pip install '.[tracking]'")
    with Watch(int(os.environ.get("RANK", 0))) as watch:
        run, train_data, checkpoint = start_run(args, typed, watch)
        try:
            do(run, train_data, checkpoint)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"rank {run.world.rank} is out of memory at step {run.state.step + 1}; lower --grad-cache-chunk (the "
                "batch stays), --eval-batch-size or --max-num-visual-tokens"
            ) from error
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise ValueError(
                "a loader process was killed, most likely for memory or shared memory; use fewer --num-workers (0 "
                "works)"
            ) from error
    run.log.close()
    distributed.stop()
    if run.stop.agreed:
        raise Stopped(run.stop.agreed)
    return 0


def main(argv: list[str] | None = None) -> int:
    """Parses the command line and runs it."""
    parser = build_parser()
    args = parser.parse_args(argv)
    typed = typed_flags(build_parser(), argv)
    if args.plan or not args.resume:
        validate(parser, args, typed)
    return run_script(lambda: work(args, typed))


if __name__ == "__main__":
    sys.exit(main())
