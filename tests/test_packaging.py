"""package_hf_image_shards.py and extract_hf_image_shards.py, and what the four publishing scripts share."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrastors.records import read_pairs
from contrastors.shards import check_name, file_sha256, folder_output, read_checksums, shard_name, write_checksums
from tests.conftest import ROOT, write_rows
from tests.publishing import draw_tile, extract, package, prepare, tree

# --- package ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def prepared(split_dir: Path, tmp_path: Path) -> Path:
    assert prepare(split_dir, output=tmp_path / "export/set") == 0
    return tmp_path / "export/set"


def test_one_shard_a_folder_and_counts_that_add_up(prepared: Path, tmp_path: Path):
    assert package(prepared, tmp_path / "packed") == 0
    summary = json.loads((tmp_path / "packed/shard_summary.json").read_text())
    members = {}
    for shard in summary["shards"]:
        with tarfile.open(tmp_path / "packed" / shard["name"]) as tar:
            members[shard["name"]] = [member.name for member in tar]
        assert len(members[shard["name"]]) == shard["num_images"]
        assert len({os.path.dirname(name) for name in members[shard["name"]]}) == 1
        assert (tmp_path / "packed" / shard["name"]).stat().st_size == shard["num_bytes"]
    images = sorted(name for name in tree(prepared) if name.startswith("images/"))
    assert list(members) == [shard_name(number) for number in range(3)]
    assert sum(members.values(), []) == images and summary["num_images"] == len(images)
    assert summary["num_image_bytes"] == sum((prepared / name).stat().st_size for name in images)


def test_shard_size_closes_shards_by_bytes(prepared: Path, tmp_path: Path):
    biggest = max(path.stat().st_size for path in (prepared / "images").rglob("*.png"))
    assert package(prepared, tmp_path / "packed", "--shard-size-mb", str(2.5 * biggest / 1e6)) == 0
    shards = json.loads((tmp_path / "packed/shard_summary.json").read_text())["shards"]
    assert all(shard["num_image_bytes"] <= 2.5 * biggest for shard in shards) and len(shards) == 5
    assert package(prepared, tmp_path / "tiny", "--shard-size-mb", "0.000001") == 0
    assert len(list((tmp_path / "tiny/shards").iterdir())) == 10, "an image larger than a shard has one to itself"


def test_packaging_twice_gives_the_same_bytes_whatever_the_files_metadata(prepared: Path, tmp_path: Path):
    assert package(prepared, tmp_path / "one/set") == 0
    copy = tmp_path / "elsewhere"
    for name in sorted(tree(prepared), reverse=True):  # another order in the directory, other times and rights
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(prepared / name, copy / name)
        os.utime(copy / name, (1, 1))
        (copy / name).chmod(0o600)
    assert package(copy, tmp_path / "two/set") == 0
    assert tree(tmp_path / "one/set") == tree(tmp_path / "two/set")


KILL_ITSELF = """
import os, signal, sys
import {script} as script
real, calls = script.{step}, 0
def killed(*args):
    global calls
    calls += 1
    if calls == 3:
        os.kill(os.getpid(), signal.{signal})
    return real(*args)
script.{step} = killed
sys.exit(script.main(sys.argv[1:]))
"""


def run_killed(script: str, step: str, name: str, *flags: str) -> int:
    code = KILL_ITSELF.format(script=script, step=step, signal=name)
    return subprocess.run([sys.executable, "-c", code, *flags], cwd=ROOT, timeout=300, capture_output=True).returncode


@pytest.mark.parametrize(("name", "code"), [("SIGKILL", -9), ("SIGTERM", 143)])
def test_packaging_killed_in_the_middle_leaves_no_output_and_the_next_run_is_whole(prepared, tmp_path, name, code):
    flags = "--source-dir", str(prepared), "--output-dir", str(tmp_path / "packed/set"), "--shard-size-mb", "0.01"
    assert run_killed("package_hf_image_shards", "write_shard", name, *flags) == code
    left = [path.name for path in (tmp_path / "packed").iterdir()]
    assert left == (["set.tmp-partial"] if name == "SIGKILL" else [])
    assert package(prepared, tmp_path / "packed/set", "--shard-size-mb", "0.01") == 0
    assert package(prepared, tmp_path / "undisturbed/set", "--shard-size-mb", "0.01") == 0
    assert tree(tmp_path / "packed/set") == tree(tmp_path / "undisturbed/set")
    assert [path.name for path in (tmp_path / "packed").iterdir()] == ["set"], "nothing is left beside it"


def test_checksum_list_is_what_sha256sum_checks(prepared: Path, tmp_path: Path):
    assert package(prepared, tmp_path / "packed") == 0
    command = ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"]
    if shutil.which(command[0]):
        assert subprocess.run(command, cwd=tmp_path / "packed").returncode == 0
    names = set(read_checksums(tmp_path / "packed"))
    assert names == {"eval.jsonl", "train.jsonl", *(shard_name(number) for number in range(3))}


def test_links_are_packed_only_when_asked(split_dir: Path, tmp_path: Path, capsys):
    assert prepare(split_dir, "--link-mode", "symlink", output=tmp_path / "linked/set") == 0
    assert package(tmp_path / "linked/set", tmp_path / "packed") == 1
    error = capsys.readouterr().err
    assert "'images/site" in error and "is refused: it is a link" in error and "--follow-links" in error
    assert package(tmp_path / "linked/set", tmp_path / "packed", "--follow-links") == 0
    assert prepare(split_dir, output=tmp_path / "plain/set") == 0
    assert package(tmp_path / "plain/set", tmp_path / "packed2") == 0
    assert tree(tmp_path / "packed") == tree(tmp_path / "packed2")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda folder: (folder / "images/site0/page00.png").unlink(),
            "'images/site0/page00.png' is not in the folder",
        ),
        (lambda folder: os.mkfifo(folder / "images/pipe"), "'images/pipe' is refused: neither a file nor a folder"),
        (lambda folder: (folder / "images/up").symlink_to("/"), "'images/up' is refused: it is a link"),
        (lambda folder: (folder / "images/a\\b.png").write_bytes(b"x"), "refused: it holds a backslash"),
        (lambda folder: (folder / "images" / os.fsdecode(b"\xff.png")).write_bytes(b"x"), "is refused"),
        (lambda folder: (folder / "more").mkdir() or (folder / "more/x").write_bytes(b"x"), "'more/x' lies outside"),
    ],
)
def test_source_that_would_publish_something_wrong_is_refused_by_name(prepared, tmp_path, capsys, spoil, words):
    spoil(prepared)
    assert package(prepared, tmp_path / "packed", "--follow-links") == 1
    assert words in capsys.readouterr().err and not list(tmp_path.glob("packed*"))


def test_caches_and_unfinished_files_are_not_packed(prepared: Path, tmp_path: Path):
    (prepared / ".image_facts.jsonl").write_text("[]\n")
    (prepared / "train.jsonl.tmp-01234567").write_text("{")
    assert package(prepared, tmp_path / "packed") == 0
    assert sorted(path.name for path in (tmp_path / "packed").iterdir()) == [
        "README.md", "SHA256SUMS", "dataset_summary.json", "eval.jsonl", "shard_summary.json", "shards", "train.jsonl",
    ]  # fmt: skip


def test_what_comes_while_a_folder_is_made_is_not_replaced_unasked(tmp_path: Path):
    with pytest.raises(ValueError, match="set: exists"), folder_output(tmp_path / "set", False, "marker"):
        (tmp_path / "set").mkdir()
        (tmp_path / "set" / "precious.txt").touch()
    with pytest.raises(ValueError, match="holds no marker"), folder_output(tmp_path / "other", True, "marker"):
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "precious.txt").touch()
    assert len(list(tmp_path.rglob("precious.txt"))) == 2 and not list(tmp_path.glob("*.tmp-*"))


@pytest.mark.parametrize("failing", ["rename", "rmtree"])
def test_a_stop_while_an_old_folder_is_replaced_keeps_a_whole_one(tmp_path: Path, monkeypatch, failing):
    """The second rename fails and the old folder is back; or the old one cannot go, and the new one is there."""

    def make(text: str) -> None:
        with folder_output(tmp_path / "set", True, "marker") as folder:
            (folder / "marker").write_text(text)

    make("old")
    with monkeypatch.context() as patch:
        if failing == "rename":
            rename = Path.rename
            patch.setattr(Path, "rename", lambda p, to: stop() if "partial" in p.name else rename(p, to))
            with pytest.raises(KeyboardInterrupt):
                make("new")
        else:
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)
            make("new")
    assert (tmp_path / "set" / "marker").read_text() == {"rename": "old", "rmtree": "new"}[failing]
    make("newer")
    (tmp_path / "set").rename(tmp_path / "set.tmp-old")  # a kill between the two renames
    make("newest")
    assert [(path.name, (path / "marker").read_text()) for path in tmp_path.iterdir()] == [("set", "newest")]


def stop() -> None:
    raise KeyboardInterrupt


def test_an_output_that_is_a_link_stays_one(tmp_path: Path):
    (tmp_path / "disk" / "set").mkdir(parents=True)
    (tmp_path / "set").symlink_to(tmp_path / "disk" / "set")
    with folder_output(tmp_path / "set", True, "marker") as folder:
        (folder / "marker").touch()
    assert (tmp_path / "set").is_symlink() and (tmp_path / "disk" / "set" / "marker").exists()


# --- extract ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def downloaded(prepared: Path, tmp_path: Path) -> Path:
    assert package(prepared, tmp_path / "packed") == 0
    return Path(shutil.copytree(tmp_path / "packed", tmp_path / "elsewhere" / "downloaded"))


def test_round_trip_gives_the_same_folder_and_pairs(prepared: Path, downloaded: Path):
    assert extract(downloaded) == 0
    images = {name: data for name, data in tree(downloaded).items() if name.startswith("images/")}
    assert images == {name: data for name, data in tree(prepared).items() if name.startswith("images/")}
    for file in ("train.jsonl", "eval.jsonl"):
        assert (downloaded / file).read_bytes() == (prepared / file).read_bytes()
        pairs, _ = read_pairs(downloaded / file)
        assert all(os.path.isfile(path) for pair in pairs for path in [pair.positive, *pair.negatives])
    summary = json.loads((downloaded / "extract_summary.json").read_text())
    assert summary == {"num_shards": 3, "num_images": 10, "num_written": 10, "num_kept": 0}


def test_round_trip_of_odd_names(tmp_path: Path):
    name = unicodedata.normalize("NFD", "é #1 50% ürü.v2.png")
    draw_tile(tmp_path / "tiles/a b" / name, 1)
    draw_tile(tmp_path / "tiles" / ("long" * 40) / ("x" * 120 + ".PNG"), 2)
    (tmp_path / "split").mkdir()
    composed = f"../tiles/a b/{unicodedata.normalize('NFC', name)}"
    long = f"../tiles/{'long' * 40}/{'x' * 120}.PNG"
    write_rows(tmp_path / "split/train.jsonl", [{"query": "q", "chunk_path": composed, "neg_chunk_paths": [long]}])
    assert prepare(tmp_path / "split", root=tmp_path / "tiles", output=tmp_path / "export/set") == 0
    assert package(tmp_path / "export/set", tmp_path / "packed/set") == 0
    assert extract(tmp_path / "packed/set") == 0
    (pair,), resolver = read_pairs(tmp_path / "packed/set/train.jsonl")
    assert Path(pair.positive).read_bytes() == (tmp_path / "tiles/a b" / name).read_bytes()
    assert os.path.isfile(pair.negatives[0]) and resolver.num_renamed == 0


@pytest.mark.parametrize(("name", "code"), [("SIGKILL", -9), ("SIGTERM", 143)])
def test_extraction_killed_in_the_middle_is_taken_up(downloaded: Path, prepared: Path, name: str, code: int):
    assert run_killed("extract_hf_image_shards", "os.replace", name, "--dataset-dir", str(downloaded)) == code
    assert bool(list(downloaded.glob(".extract*"))) == (name == "SIGKILL"), "a stop that can be caught cleans up"
    there = [path for path in tree(downloaded) if path.startswith("images/")]
    assert len(there) == 2
    assert extract(downloaded) == 0
    assert json.loads((downloaded / "extract_summary.json").read_text())["num_kept"] == 2
    assert tree(downloaded / "images") == tree(prepared / "images")
    assert not list(downloaded.glob(".extract*"))


def test_two_extractions_at_once_give_one_whole_folder(downloaded: Path, prepared: Path):
    command = [sys.executable, str(ROOT / "extract_hf_image_shards.py"), "--dataset-dir", str(downloaded)]
    pipe = subprocess.PIPE
    both = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]
    said = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert sorted("/: 0 written" in out for out, _ in said) == [False, True]  # the second waited, and found all there
    assert tree(downloaded / "images") == tree(prepared / "images")


def test_changed_image_stops_the_extraction_unless_overwrite(downloaded: Path, prepared: Path, capsys):
    assert extract(downloaded) == 0
    changed = downloaded / "images/site1/page05.png"
    data = bytearray(changed.read_bytes())
    data[-1] ^= 1
    changed.write_bytes(data)
    assert extract(downloaded) == 1
    assert "page05.png: exists and differs" in capsys.readouterr().err and changed.read_bytes() == data
    assert extract(downloaded, "--overwrite") == 0
    assert tree(downloaded / "images") == tree(prepared / "images")


def pack_hostile(folder: Path, *members: tuple[str, bytes, str], content: bytes = b"evil") -> None:
    """Makes shards/images-00000.tar of good and bad members, with a checksum list that agrees."""
    (folder / "shards").mkdir(parents=True)
    with tarfile.open(folder / shard_name(0), "w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind, target in [("images/good.png", tarfile.REGTYPE, ""), *members]:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            member.size = len(content) if kind == tarfile.REGTYPE else 0
            tar.addfile(member, io.BytesIO(content) if member.size else None)
    write_checksums(folder, {shard_name(0): file_sha256(folder / shard_name(0))})


@pytest.mark.parametrize(
    ("name", "kind", "target"),
    [
        ("../evil", tarfile.REGTYPE, ""),
        ("images/../../evil", tarfile.REGTYPE, ""),
        ("images/./evil", tarfile.REGTYPE, ""),
        ("images/a\\..\\evil", tarfile.REGTYPE, ""),
        ("C:/evil", tarfile.REGTYPE, ""),
        ("images/evil\n", tarfile.REGTYPE, ""),
        ("train.jsonl", tarfile.REGTYPE, ""),
        ("images/good.png", tarfile.REGTYPE, ""),
        ("images/evil", tarfile.SYMTYPE, "/etc/passwd"),
        ("images/evil", tarfile.LNKTYPE, "images/good.png"),
        ("images/evil", tarfile.CHRTYPE, ""),
        ("images/evil", tarfile.BLKTYPE, ""),
        ("images/evil", tarfile.FIFOTYPE, ""),
        ("images/evil", tarfile.DIRTYPE, ""),
        ("images/evil", tarfile.GNUTYPE_SPARSE, ""),
    ],
)
def test_hostile_member_is_refused_by_name_and_nothing_is_written(tmp_path: Path, capsys, name, kind, target):
    folder = tmp_path / "outer/set"
    pack_hostile(folder, (name, kind, target))
    before = tree(tmp_path)
    assert extract(folder) == 1
    error = capsys.readouterr().err
    assert repr(name) in error and "refused" in error and "images-00000.tar" in error
    assert tree(tmp_path) == before and not (folder / "images").exists()


def test_absolute_member_is_refused(tmp_path: Path, capsys):
    pack_hostile(tmp_path / "set", (str(tmp_path / "evil"), tarfile.REGTYPE, ""))
    assert extract(tmp_path / "set") == 1
    assert "refused" in capsys.readouterr().err and not (tmp_path / "evil").exists()


def test_nothing_is_written_through_links_that_are_there(tmp_path: Path, capsys):
    outside = tmp_path / "outside"
    outside.mkdir()
    pack_hostile(tmp_path / "partial")
    (tmp_path / "partial" / ".extract.tmp-partial").symlink_to(outside / "new")  # git delivers links, too
    assert extract(tmp_path / "partial") == 0 and not list(outside.iterdir())
    assert not (tmp_path / "partial" / "images" / "good.png").is_symlink()
    for case, link in (("folder", "images"), ("file", "images/good.png")):
        folder = tmp_path / case
        pack_hostile(folder)
        (folder / link).parent.mkdir(exist_ok=True)
        (folder / link).symlink_to(outside if case == "folder" else outside / "new")
        assert extract(folder, "--overwrite") == 1
        assert "is a link, and nothing is written through links" in capsys.readouterr().err
    assert not list(outside.iterdir())


def test_damaged_download_is_named_before_anything_is_written(downloaded: Path, capsys):
    last = downloaded / shard_name(2)
    whole = last.read_bytes()

    def refused(words: str) -> None:
        assert extract(downloaded) == 1
        error = capsys.readouterr().err
        assert words in error and not (downloaded / "images").exists()

    last.write_bytes(whole[:-1] + b"x")
    refused("images-00002.tar: wrong checksum; download it again")
    last.unlink()
    refused("images-00002.tar: missing")
    last.write_bytes(whole)
    shutil.copy(last, downloaded / "shards/other.tar")
    refused("other.tar: not in the checksum list")
    (downloaded / "shards/other.tar").unlink()
    last.write_bytes(whole[:5000])
    write_checksums(downloaded, read_checksums(downloaded) | {shard_name(2): file_sha256(last)})
    refused("images-00002.tar: damaged tar")
    last.write_bytes(b"x" * 5000)
    write_checksums(downloaded, read_checksums(downloaded) | {shard_name(2): file_sha256(last)})
    refused("images-00002.tar: no plain tar file")
    (downloaded / "SHA256SUMS").write_text("0123  ../evil\n")
    refused("SHA256SUMS, line 1: not '<sha256>  <name>'")
    (downloaded / "SHA256SUMS").write_text(f"{'0' * 64}  ../evil\n")
    refused("'../evil' is refused")
    (downloaded / "SHA256SUMS").unlink()
    refused("SHA256SUMS: not found")


def test_nothing_to_extract_is_an_error(tmp_path: Path, capsys):
    assert extract(tmp_path) == 1
    assert "nothing to extract" in capsys.readouterr().err


# --- shared ----------------------------------------------------------------------------------------------------------


@given(st.text(alphabet=st.sampled_from("./\\a\0\nC: é"), min_size=1, max_size=12))
def test_accepted_names_stay_inside_every_folder(name: str):
    try:
        check_name(name, "test")
    except ValueError:
        return
    joined = os.path.normpath(os.path.join("/folder", name))
    assert joined == f"/folder/{name}" and "\\" not in name and "\n" not in name


def test_help_of_the_four_scripts_loads_no_torch():
    code = """
import contextlib, io, sys
for name in ("prepare_hf_dataset", "package_hf_image_shards", "upload_hf_dataset", "extract_hf_image_shards"):
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as out:
        __import__(name).main(["--help"])
    assert "usage:" in out.getvalue()
heavy = {"torch", "transformers", "huggingface_hub", "datasets"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=300)
