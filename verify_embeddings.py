"""Shows whether adapters are better than the base model, and that the embeddings can be trusted: base against adapters.

Reads the rows of an evaluation JSONL; prints a table, writes a JSON and a picture. Exit code 1 if a gate trips.

  python verify_embeddings.py --adapter training/output_contrastors/checkpoint-500 --eval-jsonl training/data/eval.jsonl
  python verify_embeddings.py --adapter A --adapter B --max-pairs 500 --output verify.json --plot verify.png
  python verify_embeddings.py --adapter A --require recall@1=0.65
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contrastors.cli import add_image_flags, make_parser, natural_int, positive_int, require_transformers, run_script
from contrastors.comparison import COMPARED, NOT_A_GOAL, Comparison, compare
from contrastors.metrics import format_interval, format_metric
from contrastors.records import dump_json, write_text

if TYPE_CHECKING:
    import torch

    from contrastors.biqwen3 import BiQwen3
    from contrastors.distributed import World
    from contrastors.evaluation import EvalResult, EvalSet
    from contrastors.gates import Probes
    from contrastors.processing import BiQwen3Processor

REQUIRABLE = tuple(name for name in COMPARED if name not in NOT_A_GOAL)
BETWEEN_ADAPTERS = ("recall@1", "mrr")
BASE = "base"
NUM_PROBES = 6  # queries and images of the gates; they are embedded one by one
SETTINGS = ("model", "max_num_visual_tokens", "max_query_tokens")  # what verify takes from the adapters themselves
DEFAULTS = {"max_num_visual_tokens": 256, "max_query_tokens": 512}


def build_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = make_parser(__doc__)
    data = parser.add_argument_group("data")
    add = data.add_argument
    add("--eval-jsonl", default="training/data/eval.jsonl", help="rows to compare on; negatives join the corpus")
    add("--corpus", help="more tiles to search: folder, glob, text file or JSONL")
    add("--max-pairs", type=natural_int, default=0, help="use the first rows only, and open only their images; 0 = all")
    add("--num-workers", type=natural_int, default=4, help="loader processes; 0 = none, loads in line")
    add_image_flags(data)

    add = parser.add_argument_group("model").add_argument
    add("--adapter", action="append", required=True, metavar="DIR", help="adapter folder; repeat for more")
    add("--model", help="base model: hub name or folder (default: the adapter's own)")
    add("--max-num-visual-tokens", type=positive_int, help="of the largest image (default: as the adapter was trained)")
    add(
        "--max-query-tokens", type=positive_int, help="tokens of a query's prompt (default: as the adapter was trained)"
    )
    add("--dtype", choices=("auto", "bf16", "fp32"), default="auto", help="auto = bf16 on cuda, fp32 elsewhere")

    add = parser.add_argument_group("checks").add_argument
    add("--require", action="append", default=[], type=requirement, metavar="METRIC=VALUE",
        help="fail unless every adapter reaches this; repeat for more (recall@1=0.65)")  # fmt: skip
    add("--against-official", action=argparse.BooleanOptionalAction, default=False,
        help="compare with plain transformers, from text and pixels on")  # fmt: skip

    add = parser.add_argument_group("output").add_argument
    add("--output", help="JSON with all numbers and per-query ranks")
    add("--plot", help="PNG with similarity histograms and recall curves")
    add("--overwrite", action=argparse.BooleanOptionalAction, default=False, help="replace --output and --plot")

    add = parser.add_argument_group("runtime").add_argument
    add("--batch-size", type=positive_int, default=16, help="items of one forward")
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto", help="auto = cuda, then mps, then cpu")
    add("--seed", type=natural_int, default=0, help="of libraries; the numbers do not depend on it")
    return parser


def requirement(text: str) -> tuple[str, float]:
    """Parses METRIC=VALUE."""
    name, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if name not in REQUIRABLE or number != number:
        raise argparse.ArgumentTypeError(f"{text!r} is not METRIC=VALUE with a metric of {', '.join(REQUIRABLE)}")
    return name, number


@dataclass(slots=True)
class Measured:
    """One model on the evaluation set.

    Attributes:
        name: `base`, or the adapter's folder.
        result: Its metrics and per-query values.
        temperature: Of its loss.
        invariance: Largest cosine deviations of the probes.
        off: A sentence for each gate that trips.
        comparisons: Against the base; empty for the base itself.
    """

    name: str
    result: EvalResult
    temperature: float
    invariance: dict[str, float] = field(default_factory=dict)
    off: list[str] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)

    def values(self, metric: str) -> Any:
        """Returns the (Q,) per-query values of a metric."""
        import numpy as np

        return np.asarray([row[metric] for row in self.result.per_query], dtype=np.float64)


def adapter_settings(args: argparse.Namespace) -> None:
    """Fills `--model` and the limits that were not given from the adapters; the same pixels for every model.

    Raises:
        ValueError: Two adapters disagree, or nothing names the base model.
    """
    from contrastors.checkpoint import read_args

    known: dict[str, dict[Any, str]] = {name: {} for name in SETTINGS}
    for folder in args.adapter:
        found = read_args(folder)
        for name in SETTINGS:
            if (value := found.get(name)) is not None:
                known[name].setdefault(value, folder)
    for name, found in known.items():
        if getattr(args, name) is not None:
            continue
        flag = "--" + name.replace("_", "-")
        if len(found) > 1:
            each = ", ".join(f"{value} ({folder})" for value, folder in found.items())
            raise ValueError(f"the adapters were trained with different {flag}: {each}; give {flag}, one for all")
        setattr(args, name, next(iter(found), DEFAULTS.get(name)))
        if getattr(args, name) is None:
            raise ValueError(f"{args.adapter[0]} does not name its base model; give --model")


def load_eval_set(args: argparse.Namespace, world: World) -> EvalSet:
    """Returns queries and corpus; opens no image beyond the first `--max-pairs` rows and the corpus."""
    from contrastors.corpus import read_corpus
    from contrastors.data import validate_images
    from contrastors.evaluation import build_eval_set
    from contrastors.records import BadRow, check_bad_rows, read_pairs
    from contrastors.runlog import progress
    from contrastors.validation import image_paths

    pairs, resolver = read_pairs(args.eval_jsonl, args.max_pairs)
    tiles = read_corpus(args.corpus)[0] if args.corpus else []
    more = [tile.path for tile in tiles]
    paths = list(dict.fromkeys([*image_paths(pairs), *more]))
    with progress(len(paths), "checking images", world.is_main) as bar:
        facts = validate_images(paths, resolver.folder, args.max_image_pixels, args.num_workers, world, bar.update)
    data = build_eval_set(pairs, facts, more)
    if world.is_main:
        report, limit = Path(args.output or "verify"), args.max_bad_fraction
        check_bad_rows(args.eval_jsonl, data.bad_rows, len(pairs), limit, report.with_suffix(".bad_rows.jsonl"))
        if args.corpus:
            bad = [BadRow(t.line, t.path, facts[t.path].reason) for t in tiles if not facts[t.path].ok]
            source = f"--corpus {args.corpus}"
            check_bad_rows(source, bad, len(tiles), limit, report.with_suffix(".bad_corpus.jsonl"))
    lost = f", {data.num_bad_negatives} images unreadable" if data.num_bad_negatives else ""
    skipped = f", {len(data.bad_rows)} bad rows skipped" if data.bad_rows else ""
    say(f"{args.eval_jsonl}: {len(data.queries)} queries, corpus of {len(data.documents)} documents{skipped}{lost}")
    return data


# ---------------------------------------------------------------------------------------------------------- measuring


@dataclass(slots=True)
class Verification:
    """What all models share: the base with its processor, the evaluation set, the probes and their base vectors."""

    args: argparse.Namespace
    world: World
    model: BiQwen3
    processor: BiQwen3Processor
    data: EvalSet
    probes: Probes
    base_vectors: torch.Tensor

    def probe_vectors(self) -> torch.Tensor:
        """Returns the (n, D) vectors of all probes by the model as it is now."""
        import torch

        from contrastors.gates import embed_probes

        kinds = (self.probes.queries, self.probes.documents)
        return torch.cat([embed_probes(self.model, items, self.probes.pad_id) for items in kinds])


def measure(run: Verification, name: str, temperature: float) -> Measured:
    """Returns the metrics of the model as it is now, and what its gates say."""
    from contrastors.evaluation import collapse_warnings, evaluate
    from contrastors.gates import check_invariance, measure_invariance
    from contrastors.runlog import progress

    args = run.args
    with progress(len(run.data.queries) + len(run.data.documents), f"embedding: {name}", run.world.is_main) as bar:
        result = evaluate(
            run.model, run.processor, run.data, run.world, 1 / temperature, args.batch_size, args.num_workers,
            args.max_image_pixels, on_progress=bar.update,
        )  # fmt: skip
    measured = Measured(name, result, temperature, measure_invariance(run.model, run.probes))
    collapsed = collapse_warnings(result.metrics)
    if name == BASE and (num_cut := result.metrics["num_truncated_queries"]):
        say(f"{num_cut} queries were cut at --max-query-tokens {run.processor.max_query_tokens}")
    if name == BASE:  # a poor base is no fault of the adapter, and what the adapter is compared with
        for text in collapsed:
            say(f"note: {name}: {text}")
    else:
        measured.off += collapsed
    measured.off += check_invariance(measured.invariance, run.model.base.dtype)
    return measured


def measure_adapter(run: Verification, folder: str, base: Measured) -> Measured:
    """Returns the metrics of an adapter on the base model, which is left as it was found.

    Raises:
        ValueError: The adapter does not fit, or switching it off does not give back the base model.
    """
    import torch

    from contrastors.checkpoint import BadCheckpoint, load_adapter, read_back, read_temperature
    from contrastors.gates import check_effect
    from contrastors.loading import check_base_weights

    load_adapter(run.model, folder, trainable=False)
    read_back(run.model, folder, must_have_moved=True)
    run.model.eval()
    no_effect = check_effect(run.base_vectors, run.probe_vectors())
    if no_effect:
        raise ValueError(f"{folder}: {no_effect[0]}")
    measured = measure(run, folder, read_temperature(folder))
    run.model.backbone = run.model.backbone.unload()
    try:
        check_base_weights(folder, run.args.model)
    except BadCheckpoint as error:
        measured.off.append(str(error))
    if not torch.equal(run.probe_vectors(), run.base_vectors):
        measured.off.append("without the adapter the model no longer gives the base model's vectors, bit for bit")
    measured.comparisons = [compare(m, base.values(m), measured.values(m)) for m in COMPARED]
    for name, least in run.args.require:
        if not measured.result.metrics[name] >= least:
            found = format_metric(measured.result.metrics[name])
            measured.off.append(f"--require {name}={least:g}: it is {found}")
    return measured


def against_official(run: Verification) -> dict[str, float]:
    """Returns the largest cosine deviation of queries and of documents between our way and plain transformers.

    Raises:
        ValueError: They differ.
    """
    from contrastors.gates import LARGEST_DEVIATION, compare_with_transformers

    images = probe_images(run)
    found = compare_with_transformers(run.model, run.args.model, run.processor, run.data.queries, images)
    bound = LARGEST_DEVIATION[run.model.base.dtype]
    for kind, value in found.items():
        if not value <= bound:
            raise ValueError(
                f"--against-official: {kind} differ from plain transformers by a cosine deviation of {value:.2g}, at "
                f"most {bound:g}; transformers or the checkpoint's processor has changed"
            )
    return found


def probe_images(run: Verification) -> list[Any]:
    """Returns the first pictures of the evaluation set."""
    from contrastors.images import open_image

    return [open_image(path, run.args.max_image_pixels) for path in run.data.documents.paths[:NUM_PROBES]]


# ---------------------------------------------------------------------------------------------------------- reporting


def report_adapter(base: Measured, measured: Measured) -> None:
    """Prints the gates of one adapter, and its table against the base."""
    first = measured.comparisons[0]
    num_documents = measured.result.metrics["corpus_size"]
    say(f"\n{measured.name} against the base: {first.num_queries} queries, {num_documents:.0f} documents")
    for text in measured.off:  # first: they tell whether the numbers below mean anything
        say(f"  OFF: {text}")
    say(f"  {'':20}{'base [95 %]':26}{'adapter [95 %]':26}difference [95 %]")
    for found in measured.comparisons:
        cells = "".join(f"{format_interval(m.result.metrics, found.metric):26}" for m in (base, measured))
        say(f"  {found.metric:20}{cells}{describe_difference(found)}")
    deviations = ", ".join(f"{name} {value:.1g}" for name, value in measured.invariance.items())
    say(f"  keys match, embeddings change, base unchanged; cosine deviations: {deviations}")


def describe_difference(found: Comparison) -> str:
    """Returns difference, interval and sentence of a comparison; an en dash where no query has a value of both."""
    interval = f"{found.difference:+.4f} [{found.low:+.4f}, {found.high:+.4f}]" if found.num_queries else "–"
    chance = "" if found.p_value is None else f", p = {found.p_value:.2g}"
    return f"{interval:28}{found.verdict}{chance}"


def compare_adapters(adapters: list[Measured]) -> list[dict[str, Any]]:
    """Returns, and prints, how each adapter does against each one named before it."""
    found = []
    for second, first in ((b, a) for place, b in enumerate(adapters) for a in adapters[:place]):
        say(f"\n{second.name} against {first.name}")
        for metric in BETWEEN_ADAPTERS:
            one = compare(metric, first.values(metric), second.values(metric))
            say(f"  {metric:20}{describe_difference(one)}")
            found.append({"first": first.name, "second": second.name} | asdict(one))
    return found


def write_report(
    run: Verification, models: list[Measured], between: list[dict[str, Any]], official: dict[str, float]
) -> None:
    """Writes `--output` and `--plot`."""
    from contrastors.plots import draw_comparison

    args = run.args
    if args.output:
        queries = [{key: row[key] for key in ("query", "positives")} for row in models[0].result.per_query]
        for place, row in enumerate(queries):
            row["rank"] = {m.name: m.result.per_query[place]["rank"] for m in models}
        shown = ("eval_jsonl", "corpus", "max_pairs", "model", "dtype", "batch_size")
        record = {
            "settings": {name: getattr(args, name) for name in shown} | run.processor.describe(),
            "num_queries": len(queries),
            "corpus_size": len(run.data.documents),
            "bad_rows": len(run.data.bad_rows),
            "unreadable_images": run.data.num_bad_negatives,
            "models": [
                {
                    "name": m.name,
                    "temperature": m.temperature,
                    "metrics": m.result.metrics,
                    "cosine_deviations": m.invariance,
                    "off": m.off,
                    "against_base": [asdict(found) for found in m.comparisons],
                }
                for m in models
            ],
            "between_adapters": between,
            "against_official": official,
            "queries": queries,
        }
        write_text(args.output, dump_json(record, indent=1) + "\n")
    if args.plot:
        names = ("rank", "positive_similarity", "hardest_negative")
        short = ["/".join(Path(m.name).parts[-2:]) for m in models]
        titles = short if len({*short}) == len(short) else [m.name for m in models]
        shown = {title: {name: m.values(name) for name in names} for title, m in zip(titles, models, strict=True)}
        title = f"{Path(args.eval_jsonl).name}: {len(run.data.queries)} queries, {len(run.data.documents)} documents"
        draw_comparison(args.plot, shown, len(run.data.documents), title)
    written = [f"{flag} {path}" for flag, path in (("numbers", args.output), ("picture", args.plot)) if path]
    if written:
        say("\n" + ", ".join(written))


def say(text: str) -> None:
    """Prints a line of the main rank."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


# --------------------------------------------------------------------------------------------------------------- main


def start(args: argparse.Namespace) -> Verification:
    """Returns the base model, the evaluation set and the probes."""
    import torch

    from contrastors import distributed
    from contrastors.gates import make_probes
    from contrastors.loading import load_bi_encoder

    world = distributed.start(args.device)
    for path in (args.output, args.plot):
        if world.is_main and path and os.path.exists(path) and not args.overwrite:
            raise ValueError(f"{path} exists; use --overwrite or another name")
    adapter_settings(args)
    data = load_eval_set(args, world)
    model, processor = load_bi_encoder(
        args.model, world.device, args.dtype, "auto", args.max_num_visual_tokens, args.max_query_tokens
    )
    run = Verification(args, world, model.eval(), processor, data, None, torch.empty(0))
    run.probes = make_probes(processor, data.queries[:NUM_PROBES], probe_images(run))
    run.base_vectors = run.probe_vectors()
    return run


def work(args: argparse.Namespace) -> int:
    """Does what the command line asks for and returns the exit code."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive the fork of loader workers

    require_transformers()
    from contrastors import distributed
    from contrastors.checkpoint import read_args
    from contrastors.loading import silence_libraries
    from contrastors.logit_scale import LogitScale
    from contrastors.rand_state import seed_step

    silence_libraries()
    started = time.perf_counter()
    run = start(args)
    seed_step(args.seed, 0, 0)
    official = against_official(run) if args.against_official else {}
    initial = LogitScale(read_args(args.adapter[0]).get("temperature", 0.07)).temperature
    models = [measure(run, BASE, initial)]
    for folder in args.adapter:
        models.append(measure_adapter(run, folder, models[0]))
        report_adapter(models[0], models[-1])
    between = compare_adapters(models[1:])
    for kind, value in official.items():
        say(f"plain transformers: {kind} differ by a cosine deviation of at most {value:.2g}")
    if run.world.is_main:
        write_report(run, models, between, official)
    distributed.stop()
    say(f"{time.perf_counter() - started:.0f} s")
    tripped = [f"{m.name}: {text}" for m in models for text in m.off]
    if tripped:
        raise ValueError("; ".join(tripped))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Parses the command line and runs it."""
    parser = build_parser()
    args = parser.parse_args(argv)
    repeated = {folder for folder in args.adapter if args.adapter.count(folder) > 1}
    if repeated:
        parser.error(f"--adapter {repeated.pop()} is given twice")
    read = {os.path.realpath(path) for path in (args.eval_jsonl, args.corpus) if path}
    written = [os.path.realpath(path) for path in (args.output, args.plot) if path]
    if len({*written} - read) < len(written):
        parser.error("--output and --plot must be two files, and neither --eval-jsonl nor --corpus")
    return run_script(lambda: work(args))


if __name__ == "__main__":
    sys.exit(main())
