"""Uploads a data set folder to the Hugging Face hub, in a way that a second start continues.

Reads every file of --local-dir (made by package_hf_image_shards.py or prepare_hf_dataset.py); writes a dataset
repository. The token comes from HF_TOKEN or `hf auth login`.

    python upload_hf_dataset.py --local-dir export_sharded/screenshot-training --repo-id USER/NAME
"""

from __future__ import annotations

import argparse
import glob
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from contrastors.cli import make_parser, natural_float, natural_int, run_script
from contrastors.shards import IMAGES, list_files

MAX_WAIT_S = 300.0  # the hub counts requests in windows of five minutes
MANY_FILES = 10_000  # the hub's limit for one folder


def build_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = make_parser(__doc__)
    data = parser.add_argument_group("data")
    data.add_argument("--local-dir", required=True, metavar="DIR", help="the folder to upload")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--repo-id", default="", metavar="USER/NAME",
        help="dataset repository, made where it is missing (default: the account's name and the folder's)",
    )  # fmt: skip
    output.add_argument(
        "--private", action=argparse.BooleanOptionalAction, default=False,
        help="make the repository private; an existing public one is refused",
    )  # fmt: skip
    output.add_argument("--revision", default="main", metavar="BRANCH", help="branch, made where it is missing")
    runtime = parser.add_argument_group("runtime")
    runtime.add_argument(
        "--dry-run", action=argparse.BooleanOptionalAction, default=False,
        help="list files and calls, change nothing on the hub",
    )  # fmt: skip
    runtime.add_argument(
        "--max-retries", type=natural_int, default=6,
        help="how often a call that failed for a passing reason (429, 5xx, connection) is made again; 0 = never",
    )  # fmt: skip
    runtime.add_argument(
        "--retry-wait-s", type=natural_float, default=10.0,
        help=f"seconds before the first retry, doubled each time up to {MAX_WAIT_S:.0f}; Retry-After goes first",
    )  # fmt: skip
    return parser


def retry(call: Callable[[], Any], what: str, max_retries: int, wait_s: float) -> Any:
    """Returns what `call` returns; failures that pass are waited out.

    Args:
        call: One step of the upload, safe to repeat.
        what: Its name in messages.
        max_retries: Further tries.
        wait_s: Seconds before the first of them.

    Raises:
        ValueError: It failed for good; the text is one sentence.
    """
    from huggingface_hub import errors

    for attempt in range(max_retries + 1):
        try:
            return call()
        # RuntimeError is what the Rust client of the xet storage raises.
        except (errors.HTTPError, OSError, RuntimeError) as error:
            response = getattr(error, "response", None)
            status = response.status_code if response is not None else None
            passing = status in (408, 429) or status is not None and status >= 500
            passing = passing or status is None and not isinstance(error, (FileNotFoundError, PermissionError))
            reason = f"{what}: " + " ".join(str(error).split())
            if isinstance(error, (errors.LocalTokenNotFoundError, errors.OfflineModeIsEnabled)) or not passing:
                raise ValueError(reason) from error
            if attempt == max_retries:
                raise ValueError(f"{reason} (given up after {attempt + 1} tries; run again to continue)") from error
            asked = (response.headers.get("Retry-After") or "") if response is not None else ""
            pause_s = float(asked) if asked.isdigit() else min(MAX_WAIT_S, wait_s * 2**attempt)
            print(f"{reason}; try {attempt + 2} of {max_retries + 1} in {pause_s:g} s", file=sys.stderr, flush=True)
            time.sleep(pause_s)
    raise AssertionError("the loop returns or raises")


def name_repository(repo_id: str, folder: Path, account: Callable[[], str]) -> str:
    """Returns USER/NAME, with the account's name and the folder's where they are not given.

    Raises:
        ValueError: The hub would refuse the name.
    """
    from huggingface_hub.utils import validate_repo_id

    name = repo_id or folder.name
    full = name if "/" in name else f"{account()}/{name}"
    validate_repo_id(full)
    return full


def describe(folder: Path, files: list[str], repo_id: str, args: argparse.Namespace) -> str:
    """Returns the lines that say what will be uploaded where."""
    num_bytes = sum((folder / name).stat().st_size for name in files)
    access = "private" if args.private else "public"
    lines = [f"{folder} -> dataset {repo_id}, branch {args.revision}, {access}: {len(files)} files, {num_bytes} bytes"]
    if sum(name.startswith(f"{IMAGES}/") for name in files) > MANY_FILES:
        lines.append(f"note: over {MANY_FILES} single images; package_hf_image_shards.py makes this quicker")
    if args.dry_run:
        lines += [f"  {(folder / name).stat().st_size:>12} {name}" for name in files]
        lines.append(f"would call: create_repo({repo_id}, private={args.private}) unless it exists")
        if args.revision != "main":
            lines.append(f"would call: create_branch({args.revision}) unless it exists")
        lines.append(
            "would call: upload_folder, which asks for upload modes, sends contents and commits; list_repo_files"
        )
        lines.append("dry run: nothing was changed")
    return "\n".join(lines)


def upload(api: Any, folder: Path, files: list[str], repo_id: str, args: argparse.Namespace) -> str:
    """Makes repository and branch, uploads, checks that every file arrived; returns the address of the last commit.

    Raises:
        ValueError: The repository is public in spite of --private, or a file did not arrive.
    """
    where = {"repo_id": repo_id, "repo_type": "dataset"}

    def step(what: str, call: Callable[..., Any], **options: Any) -> Any:
        return retry(lambda: call(**where, **options), what, args.max_retries, args.retry_wait_s)

    step("create repository", api.create_repo, private=args.private, exist_ok=True)
    if args.private and not step("look at repository", api.repo_info).private:
        raise ValueError(f"{repo_id} exists and is public, --private would not change that; choose another --repo-id")
    if args.revision != "main":
        step("create branch", api.create_branch, branch=args.revision, exist_ok=True)
    # The patterns keep dot files (caches, tokens) and unfinished outputs at the top out, as list_files does.
    tops = {name.split("/")[0]: "/" in name for name in files}
    patterns = [glob.escape(top) + ("/*" if is_folder else "") for top, is_folder in tops.items()]
    commit = step(
        "upload", api.upload_folder, folder_path=folder, revision=args.revision, allow_patterns=patterns,
        commit_message=f"Upload {folder.name}",
    )  # fmt: skip
    arrived = set(step("list files", api.list_repo_files, revision=args.revision))
    if missing := [name for name in files if name not in arrived]:
        raise ValueError(
            f"{repo_id}: {len(missing)} files are not there after the upload, first {missing[0]}; run again"
        )
    if others := sorted(name for name in arrived.difference(files) if not name.startswith(".")):
        print(
            f"note: the repository holds {len(others)} other files, first {others[0]}; delete them if they are outdated"
        )
    return commit.commit_url


def stop_at_once() -> None:
    """Lets SIGINT and SIGTERM end the process: the client's threads would hold a plain exit until their transfer ends.

    Nothing is lost by it, since what the hub has taken stays there and the next start continues.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os._exit(128 + number))


def main(argv: list[str] | None = None) -> int:
    """Runs the script and returns its exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    folder = Path(os.path.abspath(args.local_dir))
    if not folder.is_dir():
        parser.error(f"--local-dir {args.local_dir}: no such folder")

    def work() -> int:
        from huggingface_hub import HfApi

        stop_at_once()
        files = list_files(folder)
        if not files:
            raise ValueError(f"{folder}: holds no file to upload")
        api = HfApi()

        def account() -> str:
            what = "ask the hub for the account's name (--repo-id USER/NAME needs none)"
            return retry(api.whoami, what, args.max_retries, args.retry_wait_s)["name"]

        repo_id = name_repository(args.repo_id, folder, account)
        print(describe(folder, files, repo_id, args), flush=True)
        if not args.dry_run:
            print(upload(api, folder, files, repo_id, args))
        return 0

    return run_script(work)


if __name__ == "__main__":
    sys.exit(main())
