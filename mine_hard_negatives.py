"""Mines hard negatives: embeds queries and a corpus of tiles, and takes the nearest tiles that are not positives.

Reads (query, tile) pairs as JSONL; writes the same rows with neg_chunk_paths, retrieve_top20, positive_score and
positive_rank, and OUTPUT.stats.json. Embeddings are kept as they are made, so a stopped run goes on.

  python mine_hard_negatives.py --input pairs.jsonl --output pairs_hn.jsonl --num-negatives 7
  torchrun --nproc_per_node=4 mine_hard_negatives.py --input pairs.jsonl --output pairs_hn.jsonl --corpus tiles/
  python mine_hard_negatives.py --input pairs.jsonl --output pairs_hn.jsonl --search-api-url http://host:30888
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from contrastors.cli import (
    add_image_flags,
    fraction,
    make_parser,
    natural_float,
    natural_int,
    positive_int,
    require_transformers,
    run_script,
    typed_flags,
)
from contrastors.records import (
    CANDIDATES,
    NEGATIVES,
    POSITIVE,
    QUERY,
    BadRow,
    PathResolver,
    check_bad_rows,
    dump_json,
    read_jsonl,
    relocate_row,
    write_jsonl,
    write_text,
)

if TYPE_CHECKING:
    import numpy as np

    from contrastors.distributed import World
    from contrastors.embeddings import EmbeddingMatrix
    from contrastors.loading import Encoder
    from contrastors.mining import MiningData, Row
    from contrastors.served import ServedHits

MARGINS = {"perc": 0.95, "margin": 0.05}  # perc: TopK-PercPos of NV-Retriever, arXiv 2407.15831
NUM_LOOKED_AT = 2_000  # vectors that show whether a model is broken
# What a mined file depends on beside model, input and corpus.
SETTINGS = (
    "max_num_visual_tokens", "max_query_tokens", "dtype", "num_negatives", "n_docs", "filter_mode", "margin", "index",
    "nprobe", "search_api_url", "seed",
)  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- flags


def build_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = make_parser(__doc__)
    onoff = argparse.BooleanOptionalAction

    data = parser.add_argument_group("data")
    add = data.add_argument
    add("--input", required=True, help="JSONL with query and chunk_path")
    add("--corpus", help="folder, glob, text file or JSONL (chunk_path, article_id) of tiles (default: all positives)")
    add("--max-query-tokens", type=positive_int, default=512, help="tokens of a query's prompt; longer texts are cut")
    add("--num-workers", type=natural_int, default=4, help="loader processes of each rank; 0 = load in this process")
    add_image_flags(data)

    add = parser.add_argument_group("model").add_argument
    add("--model", default="Qwen/Qwen3-VL-Embedding-2B", help="base model: hub name or folder")
    add("--adapter", metavar="DIR", help="checkpoint folder of a trained adapter (default: the base model alone)")
    add("--max-num-visual-tokens", type=positive_int, default=256, help="visual tokens of the largest image")
    add("--dtype", choices=("auto", "bf16", "fp32"), default="auto", help="auto = bf16 on cuda, fp32 elsewhere")

    add = parser.add_argument_group("mining").add_argument
    add("--num-negatives", type=positive_int, default=7, help="hard negatives of a row, at most")
    add("--n-docs", type=positive_int, default=20, help="tiles retrieved for a row (the length of retrieve_top20)")
    modes = ("none", "article", "margin", "perc", "skip_top1")
    add("--filter-mode", choices=modes, default="none", help="which candidates are too good to be negatives")
    add("--margin", type=natural_float, help="of margin and perc (default: 0.05 and 0.95)")
    add("--index", choices=("exact", "faiss-ivf", "faiss-hnsw"), default="exact", help="how the corpus is searched")
    add("--nprobe", type=positive_int, default=128, help="lists of faiss-ivf or the service; width of faiss-hnsw")
    add("--search-api-url", metavar="URL", help="search a served index of this model's vectors, not a corpus here")
    add(
        "--min-positive-found", type=fraction, default=0.05,
        help="with a service: stop when fewer rows find their positive (its paths do not match); 0 = off",
    )  # fmt: skip

    add = parser.add_argument_group("output").add_argument
    add("--output", required=True, help="JSONL of the rows with their hard negatives")
    add("--stats-output", help="JSON of settings and counts (default: OUTPUT with .stats.json)")
    add("--report", metavar="FILE.html", help="one page of the first rows to look at (default: none)")
    add("--embeddings-dir", metavar="DIR", help="where embeddings are kept (default: OUTPUT with .embeddings)")
    add("--resume", action=onoff, default=False, help="go on with a stopped run of the same settings")
    add("--overwrite", action=onoff, default=False, help="replace the output")

    add = parser.add_argument_group("runtime").add_argument
    add("--batch-size", type=positive_int, default=64, help="queries or tiles of one forward on each rank")
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto", help="auto = cuda, then mps, then cpu")
    add("--seed", type=natural_int, default=0, help="of the clustering of faiss-ivf")
    return parser


def validate(parser: argparse.ArgumentParser, args: argparse.Namespace, typed: set[str]) -> None:
    """Refuses flags that would be ignored or fail later; fills in the defaults that hang on other flags."""
    served = bool(args.search_api_url)
    refusals = [
        (args.num_negatives > args.n_docs, f"--num-negatives {args.num_negatives} is more than --n-docs {args.n_docs}"),
        (args.resume and args.overwrite, "--resume goes on with the output, --overwrite replaces it; give one"),
        (served and bool(args.corpus), "--corpus and --search-api-url: the service has its own corpus; give one"),
        (served and "index" in typed, "--index is idle with --search-api-url"),
        (not served and "min_positive_found" in typed, "--min-positive-found acts on --search-api-url only"),
        (
            not served and args.index == "exact" and "nprobe" in typed,
            "--nprobe acts on --index faiss-ivf, faiss-hnsw or --search-api-url only",
        ),
        (
            args.margin is not None and args.filter_mode not in MARGINS,
            f"--margin acts on --filter-mode margin or perc only, not on {args.filter_mode}",
        ),
        (
            args.filter_mode == "perc" and (args.margin or 0) > 1,
            f"--margin {args.margin}: a share of at most 1 for perc",
        ),
        (
            served and not args.search_api_url.startswith(("http://", "https://")),
            f"--search-api-url {args.search_api_url} must start with http:// or https://",
        ),
    ]
    for refused, text in refusals:
        if refused:
            parser.error(text)
    stem = args.output.removesuffix(".jsonl")
    args.margin = MARGINS.get(args.filter_mode) if args.margin is None else args.margin
    args.stats_output = args.stats_output or f"{stem}.stats.json"
    args.embeddings_dir = args.embeddings_dir or f"{stem}.embeddings"
    read = {os.path.realpath(path) for path in (args.input, args.corpus) if path}
    if len(set(map(os.path.realpath, outputs_of(args))) - read) < len(outputs_of(args)):
        parser.error(
            "--output, --stats-output and --report must be files of their own, and neither --input nor --corpus"
        )


# ----------------------------------------------------------------------------------------------------------------- data


def outputs_of(args: argparse.Namespace) -> list[str]:
    """Returns the files that a run leaves; none of them is replaced unasked."""
    return [path for path in (args.output, args.stats_output, args.report) if path]


def report_path(args: argparse.Namespace, name: str) -> Path:
    """Returns a path beside the output that has its name."""
    return Path(f"{args.output.removesuffix('.jsonl')}.{name}.jsonl")


def check_data(args: argparse.Namespace, data: MiningData) -> None:
    """Reports what cannot be used and stops where it is too much."""
    if args.corpus:
        report, source = report_path(args, "bad_corpus"), f"--corpus {args.corpus}"
        check_bad_rows(source, data.bad_tiles, data.num_tiles, args.max_bad_fraction, report)
    bad = sorted([*data.bad_rows, *data.failed_rows], key=lambda row: row.line)
    check_bad_rows(args.input, bad, data.num_rows, args.max_bad_fraction, report_path(args, "bad_rows"))


def check_articles(args: argparse.Namespace, is_known: bool) -> None:
    """Refuses `--filter-mode article` where no article is known of any positive."""
    if args.filter_mode == "article" and not is_known:
        raise ValueError(
            f"--filter-mode article: no article_id is known of any positive of {args.input}; give rows or corpus an "
            "article_id, or use another --filter-mode"
        )


# ------------------------------------------------------------------------------------------------------------ embedding


def embed_kind(
    args: argparse.Namespace, encoder: Encoder, world: World, kind: str, sources: list[str], keys: list[bytes]
) -> tuple[EmbeddingMatrix | None, dict[str, int]]:
    """Returns the embeddings of queries or documents (None beside the main rank), and their counts. Collective."""
    from contrastors.batches import ItemDataset
    from contrastors.embeddings import EmbeddingStore, embed_missing
    from contrastors.runlog import progress

    store = EmbeddingStore(args.embeddings_dir, encoder.identity_of(kind), encoder.model.embedding_size)
    dataset = ItemDataset(encoder.processor, kind, sources, args.max_image_pixels)
    with progress(len(keys) // world.size, f"embedding ({kind})", world.is_main) as bar:
        num_made = embed_missing(
            encoder.model, dataset, keys, store, world, args.batch_size, args.num_workers, bar.update
        )
    matrix = store.matrix(keys) if world.is_main else None
    return matrix, {"distinct": len(keys), "embedded": num_made, "reused": len(keys) - num_made}


# --------------------------------------------------------------------------------------------------------------- search


def ask_service(args: argparse.Namespace, data: MiningData, queries: np.ndarray, stats: dict[str, Any]) -> ServedHits:
    """Returns the replies of the service; rows whose search failed in the end become bad rows.

    Raises:
        ValueError: More rows failed than allowed.
    """
    from contrastors.embeddings import text_key
    from contrastors.runlog import progress
    from contrastors.search_api import BATCH_SIZE, HitJournal, SearchClient, SearchFailed
    from contrastors.served import ServedHits

    rows: list[list[Row]] = [[] for _ in data.queries]
    for row in data.rows.values():
        rows[row.query].append(row)
    keys = [text_key(query).hex() for query in data.queries]
    journal = HitJournal(report_path(args, "hits"), args.resume)
    asked = [query for query, key in enumerate(keys) if rows[query] and key not in journal.hits]
    stats["search"] = {"url": args.search_api_url, "queries": len(asked), "resumed": len(journal.hits)}
    with (
        SearchClient(args.search_api_url, args.n_docs, args.nprobe) as client,
        progress(len(asked), "searching", True) as bar,
    ):
        for start in range(0, len(asked), BATCH_SIZE):
            batch = asked[start : start + BATCH_SIZE]
            try:
                found = client.search(queries[batch], max(len(data.positives[query]) for query in batch))
                journal.add([keys[query] for query in batch], found)
            except SearchFailed as error:
                for row in (row for query in batch for row in rows[query]):
                    data.failed_rows.append(BadRow(row.line, row.path, f"its search failed: {error}"))
                check_data(args, data)
            bar.update(len(batch))
        stats["search"] |= client.requests
    journal.close()
    failed = {row.line for row in data.failed_rows}
    data.rows = {index: row for index, row in data.rows.items() if row.line not in failed}
    replies = [
        (journal.hits.get(key) or [])[: args.n_docs + len(positives)]
        for key, positives in zip(keys, data.positives, strict=True)
    ]
    for row in data.unreadable:
        rows[row.query].append(row)
    served = [list(map(data.served_positive, group)) for group in rows]
    documents = [[row.document for row in group] for group in rows]
    return ServedHits(replies, served, documents, data.resolver.folder, os.path.dirname(os.path.abspath(args.output)))


def check_positives_found(args: argparse.Namespace, data: MiningData, found: ServedHits) -> None:
    """Stops where the service's paths do not seem to be those of the rows.

    Raises:
        ValueError: Fewer rows than --min-positive-found have one of their positives among their hits.
    """
    known = [any(hit.documents for hit in found.hits(query)[: args.n_docs]) for query in range(len(data.queries))]
    num_found = sum(known[row.query] for row in data.rows.values())
    if num_found >= args.min_positive_found * len(data.rows):
        return
    row = next(row for row in data.rows.values() if not known[row.query])
    hits = found.replies[row.query]
    example = (
        f"for line {row.line} it returned {hits[0]['path']}, the row has {row.text}" if hits else "it found nothing"
    )
    raise ValueError(
        f"{args.search_api_url}: {num_found} of {len(data.rows)} rows find a positive among {args.n_docs} hits, less "
        f"than --min-positive-found {args.min_positive_found}; either its paths are not those of {args.input} "
        f"({example}), or another model made its index. Unrecognised positives would become hard negatives"
    )


# --------------------------------------------------------------------------------------------------------------- output


def mined_rows(
    args: argparse.Namespace, data: MiningData, found: Any, counts: Counter[str], funnel: Counter[str]
) -> Iterator:
    """Yields the usable rows with their hard negatives, in order, and counts what became of them."""
    folder = os.path.dirname(os.path.abspath(args.output))
    for record in read_jsonl(args.input):
        row = data.rows.get(record.index)
        if row is not None:
            yield relocate_row(record.data, data.resolver, folder) | mine_row(args, data, found, row, counts, funnel)
    check_articles(args, counts["unfiltered"] < counts["written"])


def mine_row(
    args: argparse.Namespace, data: MiningData, found: Any, row: Row, counts: Counter[str], funnel: Counter[str]
) -> dict[str, Any]:
    """Returns what mining adds to a row."""
    from contrastors.negatives import Positive, applies, choose_negatives, find_position

    hits = found.hits(row.query)
    top = hits[: args.n_docs]
    place = find_position(top, row.document)
    score = found.score(row) if place is None else top[place].score
    own = set(data.articles.get(row.document, ())) | set(top[place].articles if place is not None else ())
    positive = Positive(row.document, score, own)
    known = data.positives[row.query] | data.doubtful.get(row.query, set())
    chosen = choose_negatives(
        hits, known, positive, args.filter_mode, args.margin or 0.0, args.n_docs, args.num_negatives, funnel
    )
    counts["written"] += 1
    counts["positive_retrieved"] += place is not None
    counts["unfiltered"] += not applies(args.filter_mode, positive)
    counts["with_too_few_negatives"] += len(chosen) < args.num_negatives
    counts["without_negatives"] += not chosen
    return {
        NEGATIVES: [hit.entry["path"] for hit in chosen],
        CANDIDATES: [{"rank": rank, **hit.entry} for rank, hit in enumerate(top, start=1)],
        "positive_score": score,
        "positive_rank": None if place is None else place + 1,
    }


def digest_inputs(args: argparse.Namespace, data: MiningData) -> dict[str, Any]:
    """Returns the hash of the input file, and that of the corpus's documents and articles."""
    tiles = [[content, tile.text, tile.article_id] for content, tile in zip(data.contents, data.tiles, strict=True)]
    tiles_digest = hashlib.blake2b(dump_json(tiles).encode(), digest_size=16).hexdigest()
    with open(args.input, "rb") as file:
        found = hashlib.file_digest(file, "blake2b").hexdigest()[:32]
    return {"input": found, "corpus": None if args.search_api_url else tiles_digest}


def read_earlier(args: argparse.Namespace) -> dict[str, Any]:
    """Returns `settings` and `completed` of the run that `--resume` goes on with; empty where there is none."""
    if args.resume and os.path.exists(args.stats_output):
        stats = json.loads(Path(args.stats_output).read_text(encoding="utf-8"))
        return {"settings": stats["settings"], "completed": stats["completed"] and os.path.exists(args.output)}
    args.resume = False  # nothing tells what run a journal is of
    return {}


def is_complete(args: argparse.Namespace, earlier: dict[str, Any], settings: dict[str, Any]) -> bool:
    """Tells whether an earlier run has nothing left to mine.

    Raises:
        ValueError: Its settings were others.
    """
    if not earlier:
        return False
    before = earlier["settings"]
    differing = [name for name in settings if before.get(name) != settings[name]]
    if differing:
        name = differing[0]
        raise ValueError(
            f"--resume: the run in {args.stats_output} had {name} {before.get(name)}, now it is {settings[name]}; "
            "--overwrite starts anew"
        )
    return earlier["completed"]


def write_stats(args: argparse.Namespace, stats: dict[str, Any]) -> None:
    """Writes the stats file."""
    write_text(args.stats_output, dump_json(stats, indent=1) + "\n")


def write_output(args: argparse.Namespace, data: MiningData, found: Any, stats: dict[str, Any]) -> None:
    """Writes the mined rows and the stats."""
    names = ("written", "positive_retrieved", "unfiltered", "with_too_few_negatives", "without_negatives")
    counts, funnel = Counter(dict.fromkeys(names, 0)), Counter()
    write_jsonl(args.output, mined_rows(args, data, found, counts, funnel))
    bad, failed = len(data.bad_rows), len(data.failed_rows)
    stats["rows"] = {"input": data.num_rows, "bad": bad, "failed": failed, **counts}
    stats["funnel"] = funnel
    stats["completed"] = not failed
    write_stats(args, stats)
    if not failed:
        report_path(args, "hits").unlink(missing_ok=True)
    say(
        f"{args.output}: {counts['written']} of {data.num_rows} rows, {funnel['written']} hard negatives; "
        f"{counts['positive_retrieved']} rows find their positive among the first {args.n_docs}"
    )
    if counts["with_too_few_negatives"]:
        num_dropped = funnel[f"dropped_by_{args.filter_mode}"]
        advice = "raise --n-docs, or use a larger corpus"
        if num_dropped:
            advice = f"--filter-mode {args.filter_mode} dropped {num_dropped} candidates; look at --margin, or {advice}"
        say(
            f"{counts['with_too_few_negatives']} rows have fewer than {args.num_negatives} negatives "
            f"({counts['without_negatives']} none): {advice}"
        )
    if counts["unfiltered"]:
        say(f"{counts['unfiltered']} rows are unfiltered: --filter-mode {args.filter_mode} knows too little of them")
    if bad or failed:
        say(
            f"{bad} rows are bad and {failed} failed: {report_path(args, 'bad_rows')}; --resume tries failed ones again"
        )


# ----------------------------------------------------------------------------------------------------------------- main


def check_start(args: argparse.Namespace) -> dict[str, Any]:
    """Returns what `read_earlier` does, after looking at what ends a run sooner than images and model are read.

    Raises:
        ValueError: An output exists, or the service is not there.
    """
    held = [path for path in outputs_of(args) if os.path.exists(path)]
    if held and not (args.resume or args.overwrite):
        raise ValueError(f"{held[0]} exists; use --overwrite, --resume or another name")
    earlier = read_earlier(args)
    if args.search_api_url and not earlier.get("completed"):
        from contrastors.search_api import SearchClient

        with SearchClient(args.search_api_url, args.n_docs, args.nprobe) as client:
            client.check()
    return earlier


def check_limits(args: argparse.Namespace) -> None:
    """Warns where the adapter was trained at another size of images: its vectors are best at that one."""
    state = Path(args.adapter) / "trainer_state.json"
    if state.exists():
        trained = json.loads(state.read_text(encoding="utf-8"))["processor"]["max_num_visual_tokens"]
        if trained != args.max_num_visual_tokens:
            say(
                f"warning: the adapter was trained with --max-num-visual-tokens {trained}, "
                f"this run has {args.max_num_visual_tokens}"
            )


def say(text: str) -> None:
    """Prints a line of the main rank."""
    print(text, flush=True)


def work(args: argparse.Namespace) -> int:
    """Does what the command line asks for and returns the exit code."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # its threads do not survive the fork of loader workers

    require_transformers()
    from contrastors import distributed
    from contrastors.embeddings import text_key
    from contrastors.loading import load_encoder, silence_libraries
    from contrastors.mining import load_mining_data

    silence_libraries()
    world = distributed.start(args.device)
    earlier = check_start(args) if world.is_main else {}
    data = load_mining_data(args.input, args.corpus, args.max_image_pixels, args.num_workers, world)
    if world.is_main:
        check_data(args, data)
    # A service may know the articles, so there they are looked for in the end.
    check_articles(args, bool(args.search_api_url) or any(row.document in data.articles for row in data.rows.values()))
    encoder = load_encoder(
        args.model, args.adapter, world, args.dtype, args.max_num_visual_tokens, args.max_query_tokens
    )
    settings = {name: getattr(args, name) for name in SETTINGS} | encoder.identity | digest_inputs(args, data)
    if distributed.from_main(is_complete(args, earlier, settings) if world.is_main else None):
        distributed.stop()
        if world.is_main:
            say(f"{args.output} is complete; nothing to mine")
            show(args)
        return 0
    if world.is_main and args.adapter:
        check_limits(args)
    stats: dict[str, Any] = {"completed": False, "settings": settings, "world_size": world.size}
    if world.is_main:
        write_stats(args, stats)
    queries, stats["queries"] = embed_kind(
        args, encoder, world, "query", data.queries, list(map(text_key, data.queries))
    )
    documents = None
    if not args.search_api_url:
        paths = [tile.path for tile in data.tiles]
        keys = [bytes.fromhex(content) for content in data.contents]
        documents, stats["documents"] = embed_kind(args, encoder, world, "document", paths, keys)
    distributed.stop()
    if world.is_main:  # searching is the smaller part by far
        finish(args, data, encoder, world, queries, documents, stats)
    return 0


def finish(
    args: argparse.Namespace, data: MiningData, encoder: Encoder, world: World, queries: EmbeddingMatrix,
    documents: EmbeddingMatrix | None, stats: dict[str, Any],
) -> None:  # fmt: skip
    """Searches and writes: the work of the main rank alone."""
    import torch

    from contrastors.evaluation import collapse_warnings, describe_vectors
    from contrastors.index import count_not_finite
    from contrastors.mining import LocalHits
    from contrastors.runlog import progress

    vectors = queries[:]
    broken = [text for text, vector in zip(data.queries, vectors, strict=True) if not math.isfinite(vector.sum())]
    if broken:
        raise ValueError(f"the embedding of query '{broken[0][:80]}' is not finite ({len(broken)} such); check --model")
    truncated = sum(encoder.processor.encode_query(query).truncated for query in data.queries)
    stats["queries"]["truncated"] = truncated
    if truncated:
        say(f"{truncated} of {len(data.queries)} queries were cut at --max-query-tokens {args.max_query_tokens}")
    some = vectors[:NUM_LOOKED_AT], documents[:NUM_LOOKED_AT] if documents is not None else vectors[:0]
    look = describe_vectors(*map(torch.from_numpy, some)) | {"num_not_finite": 0}  # of those all are counted below
    for warning in collapse_warnings(look):
        say(f"warning: {warning} (of {NUM_LOOKED_AT:,} queries and tiles at most); their order means nothing")
    if documents is None:
        found = ask_service(args, data, vectors, stats)
        check_positives_found(args, data, found)
    else:
        stats["documents"] |= {"tiles": data.num_tiles, "bad_tiles": len(data.bad_tiles)}
        stats["documents"]["copies"] = data.num_tiles - len(data.bad_tiles) - len(data.tiles)
        stats["documents"]["not_finite"] = num_lost = count_not_finite(documents)
        if num_lost:
            say(f"warning: {num_lost} tiles have an embedding that is not finite; they are never found")
        with progress(len(documents), "searching", True) as bar:
            found = LocalHits(
                data, vectors, documents, args.n_docs, os.path.dirname(os.path.abspath(args.output)), kind=args.index,
                nprobe=args.nprobe, seed=args.seed, device=world.device, on_progress=bar.update,
            )  # fmt: skip
    write_output(args, data, found, stats)
    show(args)


def show(args: argparse.Namespace) -> None:
    """Writes the page of `--report`, if it was asked for."""
    from contrastors.candidates import KnownPositives
    from contrastors.report import write_report

    if not args.report:
        return
    positives, num_rows = KnownPositives(), 0
    for record in read_jsonl(args.output):
        positives.add(record.data[QUERY], record.data[POSITIVE])
        num_rows += 1
    rows = (record.data for record in read_jsonl(args.output))
    title = f"Hard negatives of {os.path.basename(args.output)}"
    num_shown = write_report(
        args.report, rows, PathResolver(args.output), title=title, positives_of=positives.of, num_rows=num_rows,
        max_image_pixels=args.max_image_pixels,
    )  # fmt: skip
    say(f"{args.report}: a page of the first {num_shown} rows to look at")


def main(argv: list[str] | None = None) -> int:
    """Parses the command line and runs it."""
    parser = build_parser()
    args = parser.parse_args(argv)
    validate(parser, args, typed_flags(build_parser(), argv))
    return run_script(lambda: work(args))


if __name__ == "__main__":
    sys.exit(main())
