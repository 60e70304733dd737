"""What the doctor measures of a training step: gradients against what the mathematics promises, what trains, time."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import NamedTuple

import torch

from contrastors.batches import Batch, StepDataset, load_batches
from contrastors.checks import Check, Patient, judge
from contrastors.loss import grad_cache_loss
from contrastors.rand_state import seed_step

# Relative L2 of two gradients that should be equal. SAME_SHAPES: the same forwards, summed in another order; here 7e-8
# was measured. OTHER_SHAPES: other padding and kernels, whose rounding the layers amplify; measured on 28 random layers
# whose embeddings hardly differ: 3e-5 in fp32, 0.16 in bf16. The room above is for GPU kernels that add in no fixed
# order. A lost chunk or other dropout masks make 0.3 and more.
SAME_SHAPES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
OTHER_SHAPES = {torch.float32: 1e-3, torch.bfloat16: 3e-1}
LOADER_S = 10.0  # the loader is watched for so long at most, and as long waited for to be past its start
BATCH_S = 120.0  # a batch that takes longer never comes


class Agreement(NamedTuple):
    """How near a gradient is to the one it should be."""

    difference: float
    cosine: float
    ratio: float

    def __str__(self) -> str:
        return f"relative L2 {self.difference:.1e}, cosine {self.cosine:.8f}, norm ratio {self.ratio:.6f}"


def compare_gradients(
    found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], factor: float = 1.0
) -> dict[str, Agreement]:
    """Returns the agreement of each parameter group; NaN where the wanted gradient is zero.

    Args:
        found: Group -> flat gradient.
        wanted: The same groups.
        factor: Norm that `found` should have, in norms of `wanted`.
    """
    table = {}
    for group, reference in wanted.items():
        a, b = found[group].double().cpu(), reference.double().cpu()
        size = b.norm()
        cosine = a @ b / (a.norm() * size)
        table[group] = Agreement(float((a / factor - b).norm() / size), float(cosine), float(a.norm() / size))
    return table


def cached_gradients(patient: Patient, batch: Batch, loss_factor: float = 1.0) -> dict[str, torch.Tensor]:
    """Returns the gradients of one training step, by parameter group; all ranks together. Collective."""
    patient.bucket.zero_()
    seed_step(patient.args.seed, 0, patient.world.rank)
    grad_cache_loss(patient.model, patient.chunks(batch), partial(patient.contrast, batch=batch), loss_factor)
    patient.bucket.reduce()
    return split_groups(patient)


def full_gradients(patient: Patient, batch: Batch, same_chunks: bool) -> dict[str, torch.Tensor]:
    """Returns the gradients through one graph of the whole batch, by parameter group.

    Args:
        patient: In one process.
        batch: Its batch.
        same_chunks: Forward the chunks of training from the same seed, so that dropout draws the same masks; otherwise
            all queries in one forward and all documents in another.
    """
    patient.bucket.zero_()
    seed_step(patient.args.seed, 0, patient.world.rank)
    whole = batch.queries.chunks(len(batch.queries)) + batch.documents.chunks(len(batch.documents))
    chunks = patient.chunks(batch) if same_chunks else whole
    patient.contrast(torch.cat([patient.model(**chunk) for chunk in chunks]), batch).loss.backward()
    return split_groups(patient)


def split_groups(patient: Patient) -> dict[str, torch.Tensor]:
    """Returns copies of all gradients, flat, for A and B of both parts and for the logit scale."""
    found: dict[str, list[torch.Tensor]] = {}
    for name, parameter in patient.model.trainable_parameters().items():
        group = f"{'vision' if '.visual.' in name else 'language'} {'A' if '.lora_A.' in name else 'B'}"
        found.setdefault(group, []).append(parameter.grad.flatten())
    found["logit scale"] = [patient.logit_scale.log_scale.grad.flatten()]
    return {group: torch.cat(parts).clone() for group, parts in found.items()}


def check_chunking(patient: Patient) -> list[Check]:
    """Compares the chunked gradients of one batch with those of its full graph."""
    batch = patient.first_batch(patient.args.batch_size)
    patient.model.train()
    dropout = patient.args.lora_dropout > 0
    found = cached_gradients(patient, batch)
    wanted = full_gradients(patient, batch, same_chunks=dropout)
    bound = (SAME_SHAPES if dropout else OTHER_SHAPES)[patient.model.base.dtype]
    what = "a chunk is lost or counted twice, or its second forward draws other dropout masks"
    checks = []
    for group, agreement in compare_gradients(found, wanted).items():
        sentence = f"the chunked gradient of {group} is not that of the full graph ({agreement}): {what}"
        is_ok = agreement.difference <= bound  # NaN is off too
        checks.append(judge(f"chunked / full: {group}", str(agreement), f"L2 <= {bound:g}", is_ok, sentence))
    num_chunks = len(patient.chunks(batch))
    reference = "the same chunks and dropout" if dropout else "one forward each"
    note = "" if num_chunks > 2 else "one chunk holds all; a smaller --grad-cache-chunk would show more"
    figure = f"{len(batch.queries)} queries, {len(batch.documents)} documents in {num_chunks} chunks; full: {reference}"
    return [Check("batch", figure, sentence=note), *checks]


def check_ranks(patient: Patient, found: dict[str, torch.Tensor], ranks_agree: bool) -> list[Check]:
    """Compares the gradients of `--processes` with those of this one process on their global batch.

    Args:
        patient: In one process.
        found: Gradients of the ranks, by parameter group.
        ranks_agree: Whether all ranks hold the same bits.
    """
    args = patient.args
    patient.model.eval()  # ranks draw other dropout masks than one process
    wanted = cached_gradients(patient, patient.first_batch(args.batch_size * args.processes))
    factor = args.processes if args.grad_reduction == "sum" else 1
    bound = OTHER_SHAPES[patient.model.base.dtype]
    name = f"1 process / {args.processes}"
    text = f"{args.processes} ranks hold {'equal' if ranks_agree else 'different'} gradients"
    checks = [judge(f"{name}: ranks", text, "equal", ranks_agree, f"{text} after the all-reduce: they would drift")]
    for group, agreement in compare_gradients(found, wanted, factor).items():
        is_ok = agreement.difference <= bound
        sentence = (
            f"{args.processes} processes do not give {factor} x the gradient of one for {group} ({agreement}), as "
            f"--grad-reduction {args.grad_reduction} promises: gather, reduction or its factor is wrong"
        )
        limit = f"L2 <= {bound:g}, ratio {factor}"
        checks.append(judge(f"{name}: {group}", str(agreement), limit, is_ok, sentence))
    return checks


def check_training_modules(patient: Patient) -> list[Check]:
    """Tells what trains, and whether a gradient reaches all of it; the last gradients must still be there."""
    named = dict(patient.model.named_parameters())
    config = patient.model.base.config
    wanted = {"language": 4 * config.text_config.num_hidden_layers, "vision": 0}
    if patient.args.lora_vit:
        wanted["vision"] = 4 * config.vision_config.depth
    trains = {name: p for name, p in named.items() if p.requires_grad and ".lora_" in name}
    checks = []
    for part, num_modules in wanted.items():
        own = {name: p for name, p in trains.items() if (".visual." in name) == (part == "vision")}
        modules = {re.sub(r"\.lora_[AB]\..*", "", name) for name in own}
        frozen = [n for n in named if ".lora_" in n and n not in trains and (".visual." in n) == (part == "vision")]
        figure = f"{len(modules)} modules, {len(own)} tensors, {sum(p.numel() for p in own.values()):,} parameters"
        sentence = f"{len(modules)} {part} modules train, {num_modules} should"
        if frozen:
            sentence += f"; {len(frozen)} LoRA tensors are frozen, the first is {frozen[0]}"
        is_ok = len(modules) == num_modules and len(own) == 2 * num_modules
        checks.append(judge(f"trains: {part}", figure, f"{num_modules} modules", is_ok, sentence))
    strangers = [name for name, p in named.items() if p.requires_grad and ".lora_" not in name]
    figure = f"{len(strangers)} tensors beside LoRA and logit scale"
    checks.append(judge("trains: other", figure, "0", not strangers, f"{', '.join(strangers[:3])} must not train"))
    dead = [n for n, p in trains.items() if not (torch.isfinite(p.grad).all() and p.grad.norm() > 0)]
    sentence = f"{len(dead)} LoRA tensors receive no gradient or one that is not finite: {', '.join(dead[:3])}"
    figure = f"{len(trains) - len(dead)} of {len(trains)} LoRA tensors"
    return [*checks, judge("gradient arrives", figure, "all, not zero", bool(trains) and not dead, sentence)]


def _give_up(number: int, frame: FrameType | None) -> None:
    raise ValueError(
        f"the loader gave no batch for {BATCH_S:g} s: its workers or the storage hang (--num-workers 0 does without)"
    )


@contextmanager
def open_loader(dataset: StepDataset, num_workers: int, device: torch.device) -> Iterator[Iterator[Batch]]:
    """Yields endless batches of a loader, each within `BATCH_S`; the loader and its workers are gone after the block.

    Raises:
        ValueError: No batch came for `BATCH_S`.
    """

    def take() -> Iterator[Batch]:
        while True:
            signal.setitimer(signal.ITIMER_REAL, BATCH_S, BATCH_S)
            yield next(batches)

    handler = signal.signal(signal.SIGALRM, _give_up)
    batches = load_batches(dataset, 0, 2**31, num_workers, device)
    try:
        yield take()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # before the loader is closed, which has limits of its own
        batches.close()
        signal.signal(signal.SIGALRM, handler)


def watch_loader(batches: Iterator[Batch], num_workers: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Returns documents a second, without start-up; batches that wait ready at the start are waited out."""
    begun = clock()
    for _ in range(1 + 2 * num_workers):
        next(batches)
        if clock() - begun > LOADER_S:
            break
    started, num_documents = clock(), 0
    for number, batch in enumerate(batches, start=1):
        num_documents += len(batch.documents)
        taken_s = clock() - started
        if number >= 8 * max(1, num_workers) or taken_s > LOADER_S:
            break
    return num_documents / taken_s


def check_time(patient: Patient) -> list[Check]:
    """Tells how fast loader and step are; told and not judged."""
    args, device = patient.args, patient.world.device
    batch = patient.first_batch(args.batch_size)
    patient.model.train()

    def step() -> None:
        cached_gradients(patient, batch)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    step()  # the first one warms up
    started = time.perf_counter()
    step()
    step_s = time.perf_counter() - started
    with open_loader(patient.dataset(args.batch_size), args.num_workers, device) as batches:
        loader = watch_loader(batches, args.num_workers)
    needed = len(batch.documents) / step_s
    advice = f"the step waits for the loader: more than --num-workers {args.num_workers} would help"
    return [
        Check("loader", f"{loader:.1f} tiles/s with {args.num_workers} workers"),
        Check(
            "step, without optimizer",
            f"{step_s:.3f} s, {needed:.1f} tiles/s: {needed / loader:.0%} of what the loader gives",
            sentence="" if loader >= needed else advice,
        ),
    ]
