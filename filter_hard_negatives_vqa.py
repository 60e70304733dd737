r"""Drop false negatives: a vision-language model answers each query from its candidates' pages and judges the answers.

reads   --input: JSONL with query, chunk_path and retrieve_top20 (mine_hard_negatives.py writes it)
writes  --output: the rows with enough hard negatives in neg_chunk_paths; --reviews-output: one line per reviewed
        candidate, appended at once; --summary-output: counts, renewed while it runs

    OPENAI_API_KEY=... python filter_hard_negatives_vqa.py --input hn.jsonl --output hn_v2.jsonl \
        --candidate-k 10 --num-hard-negatives 2 --concurrency 8
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from contrastors.candidates import (
    MISSING,
    UNREADABLE,
    Document,
    KnownPositives,
    content_now,
    file_content,
    load_document,
    place,
    read_rows,
    row_key,
)
from contrastors.cli import add_image_flags, make_parser, natural_int, positive_float, positive_int, run_script
from contrastors.images import BadImage, open_image
from contrastors.records import (
    CANDIDATES,
    NEGATIVES,
    POSITIVE,
    QUERY,
    BadRow,
    PathResolver,
    Record,
    check_bad_rows,
    dump_json,
    write_text,
)
from contrastors.report import MAX_ROWS, write_report
from contrastors.reviews import (
    KEPT,
    LOST_FRACTION_HELP,
    NOT_JUDGED,
    PARENT_VARIABLE,
    Journal,
    add_counts,
    check_lost_rows,
    check_outputs,
    check_understood,
    count_review,
    empty_counts,
    kept_positions,
    make_summary,
    moved_path,
    read_earlier,
    refuse_equal_files,
    write_results,
)
from contrastors.runlog import progress
from contrastors.verdicts import CORRECT
from contrastors.vlm import DEFAULT_BASE_URL, REFUSED, Judge, RequestFailed
from contrastors.vlm_messages import Prompts, estimate_cost, estimate_image_tokens, read_prompts

MENDABLE = ("candidates_missing", "positive_missing", "positive_unreadable")  # people mend files: tried again
SAMPLED_IMAGES = 50  # of a dry run


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = make_parser(__doc__)
    data = parser.add_argument_group("data")
    data.add_argument("--input", required=True, help="JSONL with retrieve_top20")
    data.add_argument("--relative-to", help="folder that relative paths of the input belong to (default: its own)")
    data.add_argument("--known-positives", help="positives of queries in other chunks (the chunk runner writes it)")
    data.add_argument("--offset", type=natural_int, default=0, help="rows to pass over at the start")
    data.add_argument("--limit", type=natural_int, default=0, help="rows to filter; 0 = all")
    data.add_argument("--candidate-k", type=positive_int, default=10, help="candidates looked at a row, at most")
    data.add_argument("--num-hard-negatives", type=positive_int, default=2, help="hard negatives a row")
    data.add_argument(
        "--check-positive", action=argparse.BooleanOptionalAction, default=False,
        help="ask the same of the positive, skip rows whose positive does not answer",
    )  # fmt: skip
    add_image_flags(data, LOST_FRACTION_HELP)
    model = parser.add_argument_group("model")
    model.add_argument("--model", default="gpt-4.1-mini", help="model that answers")
    model.add_argument("--judge-model", help="model that judges the answers (default: --model)")
    model.add_argument("--base-url", help=f"OpenAI-compatible server (default: $OPENAI_BASE_URL or {DEFAULT_BASE_URL})")
    model.add_argument("--api-key-env", default="OPENAI_API_KEY", help="environment variable that holds the key")
    model.add_argument("--prompt-file", help="JSON with templates 'answer' and/or 'judge' (default: built in)")
    model.add_argument("--max-image-side", type=natural_int, default=0, help="shrink to so many pixels; 0 = off")
    output = parser.add_argument_group("output")
    output.add_argument("--output", required=True, help="JSONL of the filtered rows")
    output.add_argument("--reviews-output", help="JSONL of the reviews (default: OUTPUT with .reviews.jsonl)")
    output.add_argument("--summary-output", help="JSON of settings and counts (default: OUTPUT with .summary.json)")
    output.add_argument(
        "--report", help="HTML page of the first rows with pictures, scores and verdicts (default: none)"
    )
    output.add_argument("--resume", action="store_true", help="go on with an earlier run; asks only what is missing")
    output.add_argument("--overwrite", action="store_true", help="replace existing outputs")
    runtime = parser.add_argument_group("runtime")
    runtime.add_argument("--concurrency", type=positive_int, default=8, help="rows (and requests) at once")
    runtime.add_argument("--max-retries", type=natural_int, default=5, help="further tries of a failed request")
    runtime.add_argument("--timeout", type=positive_float, default=180.0, help="seconds for one reply")
    runtime.add_argument("--requests-per-minute", type=natural_int, default=0, help="requests a minute; 0 = no limit")
    runtime.add_argument("--dry-run", action="store_true", help="estimate calls, tokens and cost; sends nothing")
    return parser


def validate(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuses combinations that would fail later, and fills in the defaults that hang on other flags."""
    if args.num_hard_negatives > args.candidate_k:
        parser.error(f"--num-hard-negatives {args.num_hard_negatives} is more than --candidate-k {args.candidate_k}")
    if args.resume and args.overwrite:
        parser.error("--resume goes on with the outputs, --overwrite replaces them; give one")
    stem = args.output.removesuffix(".jsonl")
    args.judge_model = args.judge_model or args.model
    args.reviews_output = args.reviews_output or f"{stem}.reviews.jsonl"
    args.summary_output = args.summary_output or f"{stem}.summary.json"
    args.bad_rows_output = f"{stem}.bad_rows.jsonl"
    if args.base_url == "":  # of a shell variable or file that holds none: pictures must not go to another server
        parser.error("--base-url is empty; give the address of the server, or leave it out")
    args.base_url = args.base_url or os.environ.get("OPENAI_BASE_URL") or DEFAULT_BASE_URL
    if not args.base_url.startswith(("http://", "https://")):
        parser.error(f"--base-url {args.base_url} must start with http:// or https://")
    names = ("input", "known_positives", "prompt_file", "output", "reviews_output", "summary_output", "report")
    files = {f"--{name.replace('_', '-')}": getattr(args, name) for name in names}
    refuse_equal_files(parser, files | {"the list of lost rows": args.bad_rows_output})
    if args.report and args.dry_run:
        parser.error("--dry-run writes nothing; leave out --report")


@dataclass
class Run:
    """What the workers of a run share."""

    args: argparse.Namespace
    prompts: Prompts
    resolver: PathResolver
    positives: KnownPositives = field(default_factory=KnownPositives)
    num_rows: int = 0
    digest: str = ""
    counts: dict[str, Any] = field(default_factory=empty_counts)
    bad_rows: list[BadRow] = field(default_factory=list)
    journal: Journal | None = None
    judge: Judge | None = None
    earlier_requests: dict[str, int] = field(default_factory=lambda: {"calls": 0, "retries": 0, "reasks": 0})

    @property
    def settings(self) -> dict[str, Any]:
        """What reviews depend on beside the input; another value makes them reviews of something else."""
        names = ("model", "judge_model", "candidate_k", "num_hard_negatives", "check_positive", "max_image_side")
        return {name: getattr(self.args, name) for name in names} | {"prompt_hash": self.prompts.hash}

    def write_summary(self, completed: bool = False) -> None:
        """Renews the summary."""
        self.counts |= {name: count + self.judge.requests[name] for name, count in self.earlier_requests.items()}
        self.counts["num_rows"] = self.num_rows
        summary = make_summary(self.counts, self.settings, self.digest, completed)
        write_text(self.args.summary_output, dump_json(summary, indent=2) + "\n")


def scan(run: Run) -> list[BadRow]:
    """Reads the input once: checks every row, gathers the positives, and returns the rows whose own is missing."""
    args, missing = run.args, []
    for record in read_rows(args.input):
        run.positives.add(record.data[QUERY], record.data[POSITIVE])
        if record.index >= args.offset and not (args.limit and record.index >= args.offset + args.limit):
            run.num_rows += 1
            path = run.resolver(record.data[POSITIVE])
            if not os.path.isfile(path):
                missing.append(BadRow(record.line, path, "the positive is missing"))
    if args.known_positives:
        run.positives.read(args.known_positives)
    if not run.num_rows:
        raise ValueError(f"{args.input}: holds no rows" + (f" from --offset {args.offset} on" if args.offset else ""))
    return missing


def selected_rows(run: Run) -> Iterator[tuple[Record, str]]:
    """Yields the rows to filter with their keys, in order."""
    for record in read_rows(run.args.input, run.args.offset, run.args.limit):
        yield record, row_key(record.data, run.positives.of(record.data[QUERY]))


def check_keys(run: Run) -> None:
    """Compares the rows with those that were reviewed, and computes the digest of the input.

    Raises:
        ValueError: A reviewed row is another one now, or gone.
    """
    args, digest, unseen = run.args, hashlib.blake2b(digest_size=8), set(run.journal.keys)
    way_out = f"{args.reviews_output} holds reviews of the input as it was; --overwrite, or another output, starts anew"
    for record, key in selected_rows(run):
        digest.update(key.encode())
        unseen.discard(record.index)
        if run.journal.keys.get(record.index, key) != key:
            raise ValueError(f"--resume: {args.input}, line {record.line} (row {record.index}) has changed; {way_out}")
    if unseen:
        raise ValueError(f"--resume: row {min(unseen)} of {args.input} was reviewed and is not selected now; {way_out}")
    run.digest = digest.hexdigest()


async def review(run: Run, record: Record, key: str, position: int | None, document: Document) -> dict[str, Any]:
    """Returns the review of one picture, asked of the judge and written to the journal."""
    row = record.data
    entry = place(row, position)
    answer, verdict, reason, tokens = "", document.verdict, document.reason, (0, 0)
    if not verdict:
        try:
            found = await run.judge.judge(row[QUERY], document.data)
        except BadImage as error:
            verdict, reason = UNREADABLE, str(error)
        except RequestFailed as error:
            error.path = document.path
            raise
        else:
            answer, verdict, reason = found.answer, found.verdict, found.reason
            tokens = (found.prompt_tokens, found.completion_tokens)
    folder = Path(run.args.reviews_output).parent
    written = {
        "row_index": record.index,
        "row_key": key,
        "role": "positive" if position is None else "candidate",
        "position": position,
        "rank": None if position is None else entry.get("rank", position + 1),
        "score": None if position is None else entry.get("score"),
        "query": row[QUERY],
        POSITIVE: moved_path(row[POSITIVE], run.resolver, folder),
        "path": moved_path(entry["path"], run.resolver, folder),
        "content": document.content,
        "answer": answer,
        "verdict": verdict,
        "reason": reason,
        "model": run.args.model,
        "judge_model": run.args.judge_model,
        "prompt_hash": run.prompts.hash,
        "prompt_tokens": tokens[0],
        "completion_tokens": tokens[1],
    }
    run.journal.append(written)
    return written


async def review_row(run: Run, record: Record, key: str) -> None:
    """Reviews one row until it has its hard negatives, and counts it; reviews of an earlier run are not asked again."""
    counts, used = empty_counts(), []
    if not os.path.isfile(run.resolver(record.data[POSITIVE])):
        outcome = "positive_missing"
        run.bad_rows.append(BadRow(record.line, run.resolver(record.data[POSITIVE]), "the positive is missing"))
    else:
        known = run.journal.reviews(record.index)
        known = {position: found for position, found in known.items() if found["verdict"] not in NOT_JUDGED}
        try:
            outcome = await choose(run, record, key, known, used, counts)
        except RequestFailed as error:
            outcome = "failed"
            run.bad_rows.append(BadRow(record.line, error.path, str(error)))
        else:
            lost = [found for found in used if found["verdict"] in NOT_JUDGED]
            if outcome in ("failed", "candidates_missing", "positive_unreadable"):
                path = run.resolver(place(record.data, lost[-1]["position"])["path"])
                run.bad_rows.append(BadRow(record.line, path, lost[-1]["reason"]))
    run.journal.keep_only(record.index, {found["position"] for found in used})
    counts["num_rows_done"] = 1
    counts["num_rows_written"] = outcome == "written"
    counts["num_rows_failed"] = outcome == "failed"
    if outcome in counts["skip_reasons"]:
        counts["skip_reasons"][outcome] = counts["num_rows_skipped"] = 1
    for found in used:
        count_review(counts, found)
    add_counts(run.counts, counts)


async def look(path: str, found: dict[str, Any] | None) -> tuple[Document, dict[str, Any] | None]:
    """Returns a file, and the earlier review of it unless another picture has its name by now.

    A picture that is gone keeps its review: it was judged.
    """
    if found is not None:
        content = await asyncio.to_thread(content_now, path) or found["content"]
        if content == found["content"]:
            return Document(path, content), found
    return await asyncio.to_thread(load_document, path), None


async def choose(
    run: Run,
    record: Record,
    key: str,
    known: dict[int | None, dict[str, Any]],
    used: list[dict[str, Any]],
    counts: dict[str, Any],
) -> str:
    """Returns what becomes of a row: `written`, `failed` or a reason to skip it.

    Args:
        run: The run.
        record: The row.
        key: Its key.
        known: Reviews of an earlier run by position.
        used: Filled with the reviews of this row, in order.
        counts: Of this row.

    Raises:
        RequestFailed: The judge did not answer in the end; `used` holds what it had said before.
    """
    args, row = run.args, record.data
    positive_paths = {run.resolver(path) for path in run.positives.of(row[QUERY])}
    if args.check_positive:
        document, found = await look(run.resolver(row[POSITIVE]), known.get(None))
        found = found or await review(run, record, key, None, document)
        used.append(found)
        if found["verdict"] != CORRECT:
            outcomes = {REFUSED: "failed", UNREADABLE: "positive_unreadable"}
            return outcomes.get(found["verdict"], "positive_not_confirmed")
    positives = await asyncio.to_thread(lambda: {file_content(path) for path in positive_paths})
    candidates, seen = counts["candidates"], set()
    candidates["retrieved"] = len(row[CANDIDATES])
    num_kept = 0
    for position, entry in enumerate(row[CANDIDATES]):
        if candidates["looked_at"] == args.candidate_k or num_kept == args.num_hard_negatives:
            break
        path = run.resolver(entry["path"])
        document, found = await look(path, known.get(position))
        if path in positive_paths or document.content in positives:
            candidates["known_positives"] += 1
        elif (document.content or path) in seen:
            candidates["duplicates"] += 1
        else:
            seen.add(document.content or path)
            candidates["looked_at"] += 1
            used.append(found or await review(run, record, key, position, document))
            num_kept += used[-1]["verdict"] in KEPT
    if num_kept == args.num_hard_negatives:
        return "written"
    verdicts = {found["verdict"] for found in used}
    if REFUSED in verdicts:
        return "failed"
    return "candidates_missing" if verdicts & {MISSING, UNREADABLE} else "too_few_negatives"


async def work(run: Run, rows: Iterator[tuple[Record, str]], bar: Any) -> None:
    """Takes rows from the one reader of all workers, so that a million rows are never all in memory."""
    for record, key in rows:
        await review_row(run, record, key)
        bar.update()
        await asyncio.sleep(0)


async def renew_summary(run: Run, stop: Callable[[int], None]) -> None:
    """Renews the summary every second, and stops where the chunk runner is gone."""
    runner = os.environ.get(PARENT_VARIABLE, str(os.getppid()))
    while True:
        await asyncio.sleep(1)
        run.write_summary()
        if runner != str(os.getppid()):
            stop(signal.SIGTERM)


async def review_rows(run: Run) -> int:
    """Reviews all rows, `--concurrency` at a time, and returns 0, or 128 + the signal that ended it early."""
    rows, stopped = selected_rows(run), []
    bar = progress(run.num_rows, "rows", enabled=True)

    async def all_rows() -> None:
        await run.judge.check()
        async with asyncio.TaskGroup() as group:
            for _ in range(run.args.concurrency):
                group.create_task(work(run, rows, bar))

    def stop(number: int) -> None:
        stopped.append(number)
        task.cancel()

    task = asyncio.create_task(all_rows())
    renewer = asyncio.create_task(renew_summary(run, stop))
    loop, handlers = asyncio.get_running_loop(), {}
    for number in (signal.SIGINT, signal.SIGTERM):
        handlers[number] = signal.signal(number, lambda number, frame: loop.call_soon_threadsafe(stop, number))
    try:
        await task
    except asyncio.CancelledError:
        assert stopped  # nobody else cancels
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        renewer.cancel()
        bar.close()
        await run.judge.close()
    return 128 + stopped[0] if stopped else 0


def is_complete(run: Run, earlier: dict[str, Any] | None) -> bool:
    """Tells whether an earlier run has already done all of this one, with nothing left to try again."""
    return (
        earlier is not None
        and earlier["completed"]
        and earlier["input_digest"] == run.digest
        and earlier["num_rows_failed"] == 0
        and not any(count for name, count in earlier["skip_reasons"].items() if name in MENDABLE)
        and os.path.isfile(run.args.output)
    )


def show(run: Run) -> None:
    """Writes the page of `--report`, if it was asked for."""
    args, rows, reviews = run.args, [], []
    if not args.report:
        return
    for record, _ in itertools.islice(selected_rows(run), MAX_ROWS):
        row, found = record.data, run.journal.reviews(record.index).values()
        kept = kept_positions(found, args.num_hard_negatives) or []
        rows.append(row | {NEGATIVES: [row[CANDIDATES][position]["path"] for position in kept]})
        reviews.append(found)
    write_report(
        args.report,
        rows,
        run.resolver,
        reviews,
        title=f"Hard negatives of {os.path.basename(args.input)}",
        positives_of=run.positives.of,
        num_rows=run.num_rows,
        max_image_pixels=args.max_image_pixels,
    )
    print(f"{args.report}: a page of the first {len(rows)} rows to look at")


def finish(run: Run) -> int:
    """Writes reviews and rows in input order, the page, the lost rows, and the summary; returns the exit code.

    Raises:
        ValueError: More rows than allowed were lost.
    """
    args = run.args
    rows = ((record.data, run.journal.reviews(record.index).values()) for record, _ in selected_rows(run))
    num_written = write_results(rows, run.resolver, args.output, args.reviews_output, args.num_hard_negatives)
    assert num_written == run.counts["num_rows_written"], (num_written, run.counts)
    show(run)
    report = Path(args.bad_rows_output)
    error = check_lost_rows(args.input, run.bad_rows, run.num_rows, args.max_bad_fraction, report, "--resume")
    error = error or check_understood(run.counts, args.reviews_output, args.max_bad_fraction)
    run.write_summary(completed=error is None)
    skipped = ", ".join(f"{count} {name}" for name, count in run.counts["skip_reasons"].items() if count)
    print(
        f"{run.num_rows} rows: {num_written} written to {args.output}, {run.counts['num_rows_skipped']} skipped"
        + (f" ({skipped})" if skipped else "")
        + f", {run.counts['num_rows_failed']} failed; {run.counts['calls']} calls"
    )
    if error is not None:
        raise error
    return 0


def estimate(run: Run) -> dict[str, Any]:
    """Returns what a run would take: calls, tokens and cost, from the fewest candidates a row to the most."""
    args, least, most, sizes = run.args, 0, 0, []
    for record, _ in selected_rows(run):
        num_candidates = min(len(record.data[CANDIDATES]), args.candidate_k)
        least += min(num_candidates, args.num_hard_negatives) + args.check_positive
        most += num_candidates + args.check_positive
        for entry in record.data[CANDIDATES][:1] if len(sizes) < SAMPLED_IMAGES else ():
            try:
                sizes.append(open_image(run.resolver(entry["path"]), args.max_image_pixels).size)
            except BadImage:
                continue
    tokens = [estimate_image_tokens(*size, args.max_image_side) for size in sizes] or [0]
    image_tokens = round(sum(tokens) / len(tokens))
    return {
        "num_rows": run.num_rows,
        "image_tokens": image_tokens,
        "least": estimate_cost({args.model: least}, image_tokens),
        "most": estimate_cost(Counter({args.model: most}) + Counter({args.judge_model: most}), image_tokens),
    }


def close(run: Run, is_first: bool) -> None:
    """Leaves the journal and an honest summary; nothing where a first run did no row.

    After a wrong key, address or model the mended command then starts as if for the first time.
    """
    if run.counts["num_rows_done"] < run.num_rows:
        run.write_summary()
    run.journal.close()
    if is_first and not run.counts["num_rows_done"] and not os.path.getsize(run.args.reviews_output):
        for path in (run.args.reviews_output, run.args.summary_output):
            os.unlink(path)


def filter_rows(args: argparse.Namespace) -> int:
    """Does the work of the script and returns its exit code."""
    folder = args.relative_to or os.path.dirname(os.path.abspath(args.input))
    run = Run(args, read_prompts(args.prompt_file), PathResolver(os.path.join(folder, "rows.jsonl")))
    if args.dry_run:
        missing = scan(run)
        print(dump_json({"num_positives_missing": len(missing)} | estimate(run), indent=2))
        return 0
    api_key = os.environ.get(args.api_key_env, "")
    if not api_key and args.base_url == DEFAULT_BASE_URL:
        raise ValueError(f"no key in ${args.api_key_env}; set it, or give the --base-url of a local server")
    if not (args.resume or args.overwrite):
        outputs = filter(None, [args.output, args.reviews_output, args.summary_output, args.report])
        check_outputs(outputs, "--resume")
    earlier = read_earlier(args.summary_output, args.reviews_output, run.settings) if args.resume else None
    missing = scan(run)
    if args.max_bad_fraction < 1:
        check_bad_rows(args.input, missing, run.num_rows, args.max_bad_fraction, Path(args.bad_rows_output))
    run.journal = Journal(args.reviews_output, args.resume)
    if run.journal.has_torn_line:
        print(f"{args.reviews_output}: the last line was torn and is dropped; its candidate is asked again")
    check_keys(run)
    if is_complete(run, earlier):
        print(f"{args.output} is complete, nothing to do")
        show(run)
        return 0
    if earlier is not None:
        run.earlier_requests = {name: earlier[name] for name in run.earlier_requests}
    run.judge = Judge(
        args.model,
        args.judge_model,
        run.prompts,
        base_url=args.base_url,
        api_key=api_key,
        api_key_env=args.api_key_env,
        max_retries=args.max_retries,
        timeout_s=args.timeout,
        requests_per_minute=args.requests_per_minute,
        max_image_side=args.max_image_side,
        max_image_pixels=args.max_image_pixels,
        max_failures_in_a_row=2 * args.concurrency + 3,
    )
    run.write_summary()
    try:
        code = asyncio.run(review_rows(run))
        if code:
            print(
                f"stopped after {run.counts['num_rows_done']} of {run.num_rows} rows; go on with --resume",
                file=sys.stderr,
            )
        return code or finish(run)
    finally:
        close(run, is_first=earlier is None)


def main(argv: list[str] | None = None) -> int:
    """Parses the command line and returns the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    validate(parser, args)
    return run_script(lambda: filter_rows(args))


if __name__ == "__main__":
    sys.exit(main())
