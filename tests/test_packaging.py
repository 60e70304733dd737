"""prepare_hf_dataset.py, package_hf_image_shards.py and extract_hf_image_shards.py."""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import extract_hf_image_shards
import package_hf_image_shards
import prepare_hf_dataset
from contrastors.datacard import FieldTypes
from contrastors.images import content_hash
from contrastors.records import read_jsonl, read_pairs
from contrastors.shards import check_name, file_sha256, read_checksums, shard_name, write_checksums
from tests.conftest import ROOT, write_rows


@pytest.fixture(autouse=True)
def keep_signal_handlers():
    """The scripts run in this process; their handlers must not stay."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def draw_tile(path: Path, seed: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.frombytes("RGB", (40, 40), random.Random(seed).randbytes(4800)).save(path)
    return path


@pytest.fixture
def split_dir(tmp_path: Path) -> Path:
    """Twelve tiles in three folders; rows with relative, absolute and dotted paths, and fields of their own."""
    tiles, rows = tmp_path / "tiles", tmp_path / "chunks" / "split"
    rows.mkdir(parents=True)
    names = [f"site{number // 4}/page{number:02d}.png" for number in range(12)]
    for number, name in enumerate(names):
        draw_tile(tiles / name, number)
    made = []
    for number, name in enumerate(names):
        other, third = names[(number + 1) % 12], names[(number + 2) % 12]
        paths = [f"../../tiles/{name}", str(tiles / name), f"../split/../../tiles/./{name}"]
        candidates = [{"rank": 1, "path": str(tiles / other), "score": 0.5}]
        row = {"id": number, "query": f"page {number}\u2028two", "chunk_path": paths[number % 3]}
        made.append(row | {"neg_chunk_paths": [f"../../tiles/{third}"], "retrieve_top20": candidates})
    write_rows(rows / "train_hn.jsonl", made[:8])
    write_rows(rows / "train.jsonl", made[:1])
    plain = [{key: row[key] for key in ("query", "chunk_path")} | {"page": {"nr": 1}} for row in made[8:10]]
    write_rows(rows / "eval.jsonl", plain)
    return rows


def prepare(split_dir: Path, *flags: str, root: Path | None = None, output: Path | None = None) -> int:
    root = root or split_dir.parent.parent / "tiles"
    output = output or split_dir.parent.parent / "export"
    command = ["--split-dir", str(split_dir), "--image-root", str(root), "--output-dir", str(output)]
    return prepare_hf_dataset.main([*command, "--num-workers", "0", *flags])


def package(source: Path, output: Path, *flags: str) -> int:
    return package_hf_image_shards.main(["--source-dir", str(source), "--output-dir", str(output), *flags])


def extract(folder: Path, *flags: str) -> int:
    return extract_hf_image_shards.main(["--dataset-dir", str(folder), *flags])


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rows_of(file: Path) -> list[dict]:
    return [record.data for record in read_jsonl(file)]


# --- prepare ---------------------------------------------------------------------------------------------------------


def test_prepared_rows_keep_every_field_and_find_the_same_images(split_dir: Path, tmp_path: Path):
    assert prepare(split_dir) == 0
    export = tmp_path / "export"
    assert sorted(path.name for path in export.iterdir()) == [
        "README.md", "dataset_summary.json", "eval.jsonl", "images", "train.jsonl",
    ]  # fmt: skip
    for before, after in (("train_hn.jsonl", "train.jsonl"), ("eval.jsonl", "eval.jsonl")):
        old, _ = read_pairs(split_dir / before)
        new, _ = read_pairs(export / after)
        assert [pair.query for pair in new] == [pair.query for pair in old]
        for one, other in zip(old, new, strict=True):
            for a, b in zip([one.positive, *one.negatives], [other.positive, *other.negatives], strict=True):
                assert Path(a).read_bytes() == Path(b).read_bytes()
        for one, other in zip(rows_of(split_dir / before), rows_of(export / after), strict=True):
            assert list(one) == list(other)
            assert other["chunk_path"].startswith("images/site")
            paths = "chunk_path", "neg_chunk_paths", "retrieve_top20"
            assert {k: v for k, v in one.items() if k not in paths} == {
                k: v for k, v in other.items() if k not in paths
            }
    candidate = rows_of(export / "train.jsonl")[0]["retrieve_top20"][0]
    assert candidate == {"rank": 1, "path": "images/site0/page01.png", "score": 0.5}


def test_no_text_of_the_export_names_this_machine(split_dir: Path, tmp_path: Path):
    assert prepare(split_dir) == 0
    for name, data in tree(tmp_path / "export").items():
        assert name.startswith("images/") or str(tmp_path).encode() not in data, name


def test_positives_that_stand_in_two_splits_are_told(split_dir: Path, tmp_path: Path, capsys):
    rows = rows_of(split_dir / "train_hn.jsonl")
    write_rows(split_dir / "eval_hn.jsonl", rows[:2])
    assert prepare(split_dir) == 0
    assert f"note: {len({row['chunk_path'] for row in rows[:2]})} positives stand in more than one split" in (
        capsys.readouterr().out
    )


def test_summary_counts_add_up_with_bad_rows_and_bad_negatives(split_dir: Path, tmp_path: Path):
    (tmp_path / "tiles/site0/page00.png").write_bytes(b"no image")
    (tmp_path / "tiles/site0/page03.png").unlink()
    assert prepare(split_dir, "--max-bad-fraction", "0.5") == 0
    summary = json.loads((tmp_path / "export/dataset_summary.json").read_text())
    train = summary["sources"][0]
    assert train["num_rows_read"] == 8 and train["num_bad_rows"] == 2
    assert summary["splits"]["train"]["num_rows"] == 6
    assert train["num_bad_paths_left_out"] == 2, "page03: a negative of row 1 and a candidate of row 2"
    assert not (tmp_path / "export/images/site0/page00.png").exists()
    assert summary["num_images"] == len([n for n in tree(tmp_path / "export") if n.startswith("images/")])
    report = rows_of(tmp_path / "export.train_hn.bad_rows.jsonl")
    assert [row["line"] for row in report] == [1, 4] and report[1]["reason"] == "No such file or directory"


def test_too_many_bad_rows_stop_before_any_output(split_dir: Path, tmp_path: Path, capsys):
    (tmp_path / "tiles/site0/page00.png").write_bytes(b"no image")
    assert prepare(split_dir) == 1
    assert "1 of 8 rows cannot be used" in capsys.readouterr().err
    assert not list(tmp_path.glob("export*/")), "neither the folder nor a temporary one"


@pytest.mark.parametrize("mode", ["hardlink", "copy", "symlink"])
def test_link_mode_places_images_as_asked(split_dir: Path, tmp_path: Path, mode: str):
    assert prepare(split_dir, "--link-mode", mode) == 0
    placed, original = tmp_path / "export/images/site0/page00.png", tmp_path / "tiles/site0/page00.png"
    assert placed.read_bytes() == original.read_bytes()
    assert placed.is_symlink() == (mode == "symlink")
    assert placed.samefile(original) == (mode != "copy")


def test_images_are_copied_where_links_fail(split_dir: Path, tmp_path: Path, monkeypatch, capsys):
    def refuse(*_: object) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    assert prepare(split_dir) == 0
    placed, original = tmp_path / "export/images/site0/page00.png", tmp_path / "tiles/site0/page00.png"
    assert placed.read_bytes() == original.read_bytes() and not placed.samefile(original)
    assert "by copy" in capsys.readouterr().out


def outside_by_dots(tmp_path: Path) -> str:
    draw_tile(tmp_path / "secret.png", 99)
    return "../../tiles/../secret.png"


def outside_by_absolute_path(tmp_path: Path) -> str:
    return str(draw_tile(tmp_path / "secret.png", 99))


def outside_by_link(tmp_path: Path) -> str:
    (tmp_path / "tiles/link.png").symlink_to(draw_tile(tmp_path / "secret.png", 99))
    return "../../tiles/link.png"


def outside_by_a_common_prefix(tmp_path: Path) -> str:
    return str(draw_tile(tmp_path / "tiles2/secret.png", 99))


def a_pipe(tmp_path: Path) -> str:
    os.mkfifo(tmp_path / "tiles/pipe.png")
    return "../../tiles/pipe.png"


def a_line_break(tmp_path: Path) -> str:
    return str(draw_tile(tmp_path / "tiles/a\nb.png", 99))


@pytest.mark.parametrize("place", ["chunk_path", "neg_chunk_paths", "retrieve_top20"])
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (outside_by_dots, "outside --image-root"),
        (outside_by_absolute_path, "outside --image-root"),
        (outside_by_link, "outside --image-root"),
        (outside_by_a_common_prefix, "outside --image-root"),
        (a_pipe, "no plain file"),
        (a_line_break, "a control character"),
    ],
)
def test_path_that_must_not_be_published_is_refused_by_name(split_dir, tmp_path, capsys, make, words, place):
    path = make(tmp_path)
    row = {"query": "q", "chunk_path": "../../tiles/site0/page00.png"}
    row[place] = {"chunk_path": path, "neg_chunk_paths": [path], "retrieve_top20": [{"rank": 1, "path": path}]}[place]
    write_rows(split_dir / "train_hn.jsonl", [{"query": "fine", "chunk_path": "../../tiles/site0/page00.png"}, row])
    assert prepare(split_dir) == 1
    error = capsys.readouterr().err
    assert words in error and "train_hn.jsonl, line 2" in error
    assert os.path.basename(path) in error or repr(os.path.basename(path))[1:-1] in error
    assert not (tmp_path / "export").exists()


def test_candidate_without_path_is_named(split_dir: Path, capsys):
    tile = "../../tiles/site0/page00.png"
    write_rows(split_dir / "train_hn.jsonl", [{"query": "q", "chunk_path": tile, "retrieve_top20": [{"rank": 1}]}])
    assert prepare(split_dir) == 1
    assert "train_hn.jsonl, line 1: every 'retrieve_top20' entry needs a 'path'" in capsys.readouterr().err


def test_field_that_names_this_machine_is_told(split_dir: Path, tmp_path: Path, capsys):
    rows = rows_of(split_dir / "train_hn.jsonl")
    rows[3]["scan"] = str(tmp_path / "tiles")
    write_rows(split_dir / "train_hn.jsonl", rows)
    assert prepare(split_dir) == 0
    assert "field 'scan' names places of this machine, first in" in (out := capsys.readouterr().out) and "line 4" in out
    assert rows_of(tmp_path / "export/train.jsonl")[3]["scan"] == rows[3]["scan"]


def test_existing_output_is_kept_unless_overwrite_and_only_a_data_set_is_replaced(split_dir, tmp_path, capsys):
    assert prepare(split_dir) == 0
    before = tree(tmp_path / "export")
    (tmp_path / "export/extra.txt").write_text("mine")
    assert prepare(split_dir) == 1
    assert "exists" in capsys.readouterr().err and (tmp_path / "export/extra.txt").exists()
    assert prepare(split_dir, "--overwrite") == 0
    assert tree(tmp_path / "export") == before
    home = tmp_path / "home"
    home.mkdir()
    (home / "letter.txt").write_text("dear")
    assert prepare(split_dir, "--overwrite", output=home) == 1
    assert "holds no dataset_summary.json" in capsys.readouterr().err and (home / "letter.txt").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--seed", "3"], "--seed is used by --make-split only"),
        (["--group-field", "id"], "--group-field is used by --make-split only"),
        (["--make-split", "--eval-fraction", "0.5", "--test-fraction", "0.5"], "leave no row for train"),
        (["--output-dir", "."], "holds --split-dir"),
    ],
)
def test_flags_that_cannot_work_are_usage_errors(split_dir: Path, tmp_path: Path, monkeypatch, capsys, flags, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stopped:
        prepare(split_dir, *flags)
    assert stopped.value.code == 2 and words in capsys.readouterr().err


# --- make-split ------------------------------------------------------------------------------------------------------


@pytest.fixture
def many_queries(tmp_path: Path) -> Path:
    """Sixty tiles with one to six queries each, byte copies under a second name, and negatives from everywhere."""
    draw, rows = random.Random(7), []
    for number in range(60):
        draw_tile(tmp_path / f"tiles/t{number:02d}.png", number)
        shutil.copy(tmp_path / f"tiles/t{number:02d}.png", tmp_path / f"tiles/copy{number:02d}.png")
    for number in range(50):  # the last ten are nobody's positive
        for query in range(draw.randint(1, 6)):
            spelled = draw.choice(["../tiles/t", "../tiles/copy"]) + f"{number:02d}.png"
            others = [f"../tiles/t{other:02d}.png" for other in draw.sample(range(60), 5) if other != number]
            row = {"query": f"tile {number} query {query}", "chunk_path": spelled, "neg_chunk_paths": others[:3]}
            row["retrieve_top20"] = [{"rank": 1, "path": path, "score": 0.1} for path in others[3:]]
            rows.append(row | {"page": number // 2})
    draw.shuffle(rows)
    (tmp_path / "split").mkdir()
    write_rows(tmp_path / "split/pairs.jsonl", rows)
    return tmp_path / "split"


def split_documents(export: Path) -> dict[str, set[str]]:
    documents = {}
    for file in export.glob("*.jsonl"):
        paths = set()
        for row in rows_of(file):
            paths |= {row["chunk_path"], *row["neg_chunk_paths"], *(c["path"] for c in row["retrieve_top20"])}
        documents[file.stem] = {content_hash((export / path).read_bytes()) for path in paths}
    return documents


def test_make_split_puts_no_document_into_two_splits_and_loses_no_row(many_queries: Path, tmp_path: Path):
    assert prepare(many_queries, "--make-split", root=tmp_path / "tiles", output=tmp_path / "export") == 0
    documents = split_documents(tmp_path / "export")
    assert sorted(documents) == ["eval", "test", "train"]
    for one, other in itertools.combinations(documents, 2):
        assert not documents[one] & documents[other], (one, other)
    before = [row["query"] for row in rows_of(many_queries / "pairs.jsonl")]
    after = {file.stem: [row["query"] for row in rows_of(file)] for file in (tmp_path / "export").glob("*.jsonl")}
    assert sorted(before) == sorted(sum(after.values(), []))
    for split, share in (("eval", 0.1), ("test", 0.1)):
        assert 0.5 * share * len(before) < len(after[split]) <= share * len(before)
    assert [q for q in before if q in set(after["train"])] == after["train"], "the order of rows is kept"


def test_make_split_passes_over_what_the_filter_left_beside_its_rows(many_queries: Path, tmp_path: Path):
    for name in ("pairs.reviews.jsonl", "pairs.bad_rows.jsonl", "candidate_reviews.jsonl"):
        (many_queries / name).write_text('{"no": "row"}\n')
    assert prepare(many_queries, "--make-split", root=tmp_path / "tiles", output=tmp_path / "export") == 0


def test_make_split_is_repeatable_and_changes_with_the_seed(many_queries: Path, tmp_path: Path):
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        flags = ("--make-split", "--seed", seed)
        assert prepare(many_queries, *flags, root=tmp_path / "tiles", output=tmp_path / name / "set") == 0
    texts = [(tmp_path / name / "set/eval.jsonl").read_bytes() for name in "abc"]
    assert texts[0] == texts[1] != texts[2]


def test_group_field_keeps_pages_whole(many_queries: Path, tmp_path: Path):
    flags = ("--make-split", "--group-field", "page")
    assert prepare(many_queries, *flags, root=tmp_path / "tiles", output=tmp_path / "export") == 0
    pages = {file.stem: {row["page"] for row in rows_of(file)} for file in (tmp_path / "export").glob("*.jsonl")}
    assert not (pages["train"] & pages["eval"] or pages["train"] & pages["test"] or pages["eval"] & pages["test"])


def test_split_that_would_stay_empty_is_an_error(split_dir: Path, capsys):
    tile = "../../tiles/site0/page00.png"
    write_rows(split_dir / "train_hn.jsonl", [{"query": f"q{n}", "chunk_path": tile} for n in range(20)])
    (split_dir / "eval.jsonl").unlink()
    assert prepare(split_dir, "--make-split") == 1
    assert "leaves no row for eval, test: 20 rows in 1 groups" in capsys.readouterr().err


# --- the data card, with the real library ----------------------------------------------------------------------------


def test_load_dataset_gives_rows_and_splits(split_dir: Path, tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    rows = rows_of(split_dir / "train_hn.jsonl")
    rows[1] |= {"neg_chunk_paths": [], "note": None}
    rows[2] |= {"id": "three", "weights": [1, 2.5], "deep": {"a": [{"b": 1}], "c": None}}
    rows[3] |= {"deep": {"a": [], "c": "x", "d": True}}
    write_rows(split_dir / "train_hn.jsonl", rows)
    assert prepare(split_dir, "--license", "cc-by-4.0") == 0
    loaded = datasets.load_dataset(str(tmp_path / "export"), cache_dir=str(tmp_path / "cache"))
    assert sorted(loaded) == ["eval", "train"]
    for split in loaded:
        expected = rows_of(tmp_path / f"export/{split}.jsonl")
        assert loaded[split].num_rows == len(expected)
        for row, found in zip(expected, loaded[split], strict=True):
            assert without_nulls(found) == without_nulls(row)
    assert loaded["train"][2]["id"] == "three" and loaded["train"][0]["id"] == 0
    assert "license: cc-by-4.0" in (tmp_path / "export/README.md").read_text()


def without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {key: without_nulls(entry) for key, entry in value.items() if entry is not None}
    return [without_nulls(entry) for entry in value] if isinstance(value, list) else value


def test_webdataset_reads_the_shards(split_dir: Path, tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    assert prepare(split_dir) == 0 and package(tmp_path / "export", tmp_path / "packed/set") == 0
    files = sorted(map(str, (tmp_path / "packed/set/shards").glob("*.tar")))
    loaded = datasets.load_dataset(
        "webdataset", data_files={"train": files}, split="train", cache_dir=str(tmp_path / "cache")
    )
    images = sorted((tmp_path / "export/images").rglob("*.png"))
    assert sorted(loaded["__key__"]) == [str(p.relative_to(tmp_path / "export").with_suffix("")) for p in images]


def test_field_types_widen_over_rows():
    types = FieldTypes()
    rows = [{"a": 1, "b": None, "c": [], "d": {"x": 1}, "e": 1}, {"a": 2.5, "b": "t", "c": [["y"]], "d": {"z": True}}]
    for row in [*rows, {"e": "text"}, {"f": {}}]:
        types.add(row)
    assert types.features() == [
        {"name": "a", "dtype": "float64"},
        {"name": "b", "dtype": "string"},
        {"name": "c", "list": {"list": "string"}},
        {"name": "d", "struct": [{"name": "x", "dtype": "int64"}, {"name": "z", "dtype": "bool"}]},
        {"name": "e", "dtype": "json"},
        {"name": "f", "dtype": "json"},
    ]


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
    return subprocess.run([sys.executable, "-c", code, *flags], cwd=ROOT, timeout=60, capture_output=True).returncode


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
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
