"""upload_hf_dataset.py with the real huggingface_hub client against a hub on 127.0.0.1."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.hub_server import TOKEN, Hub

pytest.importorskip("huggingface_hub")


@pytest.fixture
def hub():
    with Hub() as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A packaged data set of two shards, and beside it what must never be published."""
    folder = tmp_path / "pages"
    (folder / "shards").mkdir(parents=True)
    for number in range(2):
        noise = random.Random(number).randbytes(200_000)
        (folder / f"shards/images-{number:05d}.tar").write_bytes(noise)
    (folder / "train.jsonl").write_text('{"query": "q", "chunk_path": "images/a.png"}\n')
    (folder / "README.md").write_text("---\npretty_name: pages\n---\n\n# pages\n")
    (folder / ".image_facts.jsonl").write_text("[]\n")
    (folder / "train.jsonl.tmp-0a1b2c3d").write_text("{")
    return folder


PUBLISHED = ["README.md", "shards/images-00000.tar", "shards/images-00001.tar", "train.jsonl"]


def start(hub: Hub, folder: Path, *flags: str, token: str = TOKEN, xet: bool = False) -> subprocess.Popen:
    drop = {"HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_DISABLE_XET", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"}
    env = {key: value for key, value in os.environ.items() if key not in drop}
    env |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder.parent / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1"}
    env |= {"HF_TOKEN": token} if token else {}
    env |= {} if xet else {"HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, str(ROOT / "upload_hf_dataset.py"), "--local-dir", str(folder), "--retry-wait-s", "0.05"]
    return subprocess.Popen(
        [*command, *flags], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder.parent
    )


def upload(hub: Hub, folder: Path, *flags: str, **options) -> tuple[int, str, str]:
    process = start(hub, folder, *flags, **options)
    out, err = process.communicate(timeout=300)
    assert TOKEN not in out + err
    return process.returncode, out, err


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in PUBLISHED}


def test_every_file_arrives_and_nothing_else(hub: Hub, folder: Path):
    code, out, err = upload(hub, folder)
    assert code == 0, err
    first = out.splitlines()[0]
    assert "dataset tester/pages, branch main, public: 4 files" in first, "the account's and the folder's name, at once"
    assert hub.repos["tester/pages"]["branches"]["main"] == contents(folder)
    assert hub.repos["tester/pages"]["private"] is False


def test_passing_failures_of_every_call_are_waited_out(hub: Hub, folder: Path):
    hub.faults = {
        ("GET", "whoami"): [429],
        ("POST", "create"): [503, "cut"],
        ("POST", "preupload"): [429],
        ("POST", "batch"): [503],
        ("PUT", "storage"): ["cut", 500],
        ("POST", "commit"): [429, "cut"],
        ("GET", "tree"): [502],
    }
    code, _, err = upload(hub, folder)
    assert code == 0, err
    assert hub.repos["tester/pages"]["branches"]["main"] == contents(folder)
    assert not any(hub.faults.values()), "every fault was met"
    assert "429" in err and "try 2 of 7" in err


def test_killed_upload_continues_with_what_is_missing(hub: Hub, folder: Path):
    hub.faults = {("PUT", "storage"): [None, "hold"]}
    process = start(hub, folder, "--repo-id", "team/set")
    try:
        deadline = time.monotonic() + 300
        while not (hub.count("PUT", "storage") == 2 and len(hub.objects) == 1):
            assert process.poll() is None and time.monotonic() < deadline, "the first shard should be there by now"
            time.sleep(0.02)
    finally:
        process.kill()
        process.communicate()
    hub.released.set()
    code, _, err = upload(hub, folder, "--repo-id", "team/set")
    assert code == 0, err
    assert hub.count("PUT", "storage") == 3, "the stored shard was not sent again"
    assert hub.repos["team/set"]["branches"]["main"] == contents(folder)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_ends_an_upload_that_is_waiting_for_the_hub(hub: Hub, folder: Path, number: int, code: int):
    hub.faults = {("PUT", "storage"): ["hold", "hold"]}
    process = start(hub, folder)
    try:
        while hub.count("PUT", "storage") < 2:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        assert process.wait(timeout=300) == code
    finally:
        process.kill()
        process.communicate()


def test_second_upload_sends_and_commits_nothing(hub: Hub, folder: Path):
    assert upload(hub, folder)[0] == 0
    hub.repos["tester/pages"]["branches"]["main"]["shards/images-00009.tar"] = b"of an older upload"
    before = hub.count("PUT", "storage"), hub.count("POST", "commit")
    code, out, err = upload(hub, folder)
    assert code == 0, err
    assert "the repository holds 1 other files, first shards/images-00009.tar" in out
    assert (hub.count("PUT", "storage"), hub.count("POST", "commit")) == before


def test_dry_run_lists_files_and_calls_and_changes_nothing(hub: Hub, folder: Path):
    code, out, err = upload(hub, folder, "--dry-run", "--private")
    assert code == 0, err
    assert all(name in out for name in [*PUBLISHED, "create_repo(tester/pages, private=True)", "upload_folder"])
    assert ".image_facts" not in out and ".tmp-" not in out
    assert hub.writes() == [] and hub.repos == {}


@pytest.mark.parametrize(("token", "words"), [("hf_wrongtoken", "Invalid user token"), ("", "no token found")])
def test_missing_or_wrong_token_stops_at_once_in_one_line(hub: Hub, folder: Path, token: str, words: str):
    code, _, err = upload(hub, folder, token=token)
    assert code == 1 and words in err
    assert len(err.strip().splitlines()) == 1 and "hf_wrongtoken" not in err
    assert hub.writes() == [] and hub.count("GET", "whoami") == bool(token)


def test_private_is_never_a_public_repository(hub: Hub, folder: Path):
    assert upload(hub, folder, "--private")[0] == 0
    assert hub.repos["tester/pages"]["private"] is True
    hub.repos["tester/open"] = {"private": False, "branches": {"main": {}}}
    code, _, err = upload(hub, folder, "--private", "--repo-id", "open")
    assert code == 1 and "tester/open exists and is public" in err
    assert hub.repos["tester/open"]["branches"]["main"] == {}


def test_revision_is_made_and_main_left_alone(hub: Hub, folder: Path):
    assert upload(hub, folder, "--revision", "v2")[0] == 0
    branches = hub.repos["tester/pages"]["branches"]
    assert branches["v2"] == contents(folder) and branches["main"] == {}


def test_lasting_failure_gives_up_with_the_way_out(hub: Hub, folder: Path):
    hub.faults = {("POST", "commit"): [503] * 10}
    code, _, err = upload(hub, folder, "--max-retries", "2")
    assert code == 1 and hub.count("POST", "commit") == 3
    assert err.strip().splitlines()[-1].startswith("error: upload: ") and "run again to continue" in err


def test_file_that_did_not_arrive_is_named(hub: Hub, folder: Path):
    hub.ignored.add("train.jsonl")
    code, _, err = upload(hub, folder)
    assert code == 1 and "1 files are not there after the upload, first train.jsonl" in err


def test_link_in_the_folder_is_refused_before_any_call(hub: Hub, folder: Path):
    (folder / "notes.txt").symlink_to("/etc/passwd")
    code, _, err = upload(hub, folder)
    assert code == 1 and "'notes.txt' is refused: it is a link" in err
    assert hub.calls == []


def test_xet_transfer_of_the_client_survives_failures_and_repeats(hub: Hub, folder: Path):
    pytest.importorskip("hf_xet")
    hub.faults = {("POST", "xorb"): [503], ("POST", "commit"): [429], ("POST", "preupload"): [500]}
    code, _, err = upload(hub, folder, xet=True)
    assert code == 0, err
    assert not any(hub.faults.values())
    files = hub.repos["tester/pages"]["branches"]["main"]
    assert sorted(files) == PUBLISHED and hub.count("PUT", "storage") == 0
    assert sum(map(len, hub.xorbs.values())) > 400_000, "both shards, noise that no compression makes smaller"
    before = hub.count("POST", "commit")
    assert upload(hub, folder, xet=True)[0] == 0
    assert hub.count("POST", "commit") == before
