"""prepare_hf_dataset.py: rows, images and splits of a data set folder, and its card with the real library."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
from pathlib import Path

import pytest

from contrastors.datacard import FieldTypes
from contrastors.images import content_hash
from contrastors.records import read_pairs
from prepare_hf_dataset import place_images
from tests.conftest import write_rows
from tests.publishing import draw_tile, package, prepare, rows_of, tree


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
    told = capsys.readouterr().out
    assert "note: 2 positives stand in more than one split" in told
    assert "note: 2 queries stand in more than one split; --make-split --group-field query parts them" in told


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


@pytest.mark.parametrize(
    ("field", "value"),
    [("retrieve_top20", ["a.png"]), ("retrieve_top20", {"path": "a.png"}), ("neg_chunk_paths", "a.png")],
)
def test_a_field_of_another_shape_is_named(split_dir: Path, capsys, field, value):
    rows = rows_of(split_dir / "train_hn.jsonl")
    write_rows(split_dir / "train_hn.jsonl", [*rows[:2], rows[2] | {field: value}])
    assert prepare(split_dir) == 1
    error = capsys.readouterr().err
    assert "train_hn.jsonl, line 3: " in error and field in error and "Traceback" not in error


def test_names_that_this_disk_takes_for_one_are_refused(tmp_path: Path):
    """macOS and exFAT know no case: the second image would be served under the first one's name."""
    first, second = draw_tile(tmp_path / "tiles" / "a.png", 1), draw_tile(tmp_path / "tiles" / "b.png", 2)
    (tmp_path / "set" / "images").mkdir(parents=True)
    shutil.copy(first, tmp_path / "set" / "images" / "A.png")  # where the disk has put a.png
    with pytest.raises(ValueError, match="is taken by an image whose name differs in case or accents only"):
        place_images({str(second): "images/A.png"}, tmp_path / "set", "copy")
    spellings = {str(first): "images/c.png", f"{tmp_path}/tiles/./a.png": "images/c.png"}
    assert place_images(spellings, tmp_path / "set", "copy") == {"copy": 1}


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


def test_rows_without_a_page_are_no_page_and_numbers_have_one_spelling(many_queries: Path, tmp_path: Path):
    """pandas writes a whole column as 7.0 where one of its cells is empty."""
    rows = rows_of(many_queries / "pairs.jsonl")
    for number, row in enumerate(rows):
        row["page"] = (None, row["page"], float(row["page"]))[number % 3]
    write_rows(many_queries / "pairs.jsonl", rows)
    flags = ("--make-split", "--group-field", "page")
    assert prepare(many_queries, *flags, root=tmp_path / "tiles", output=tmp_path / "export") == 0
    splits = [rows_of(file) for file in (tmp_path / "export").glob("*.jsonl")]
    pages = [{float(row["page"]) for row in rows if row["page"] is not None} for rows in splits]
    assert len(splits) == 3 and not pages[0] & pages[1] | pages[0] & pages[2] | pages[1] & pages[2]
    assert all(any(row["page"] is None for row in rows) for rows in splits)  # they did not become one large page


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
    for row in [*rows, {"e": "text"}, {"f": {}}, {"g": 1}, {"g": 2**63}, {"h": 2**63 - 1}]:
        types.add(row)
    assert types.features() == [
        {"name": "a", "dtype": "float64"},
        {"name": "b", "dtype": "string"},
        {"name": "c", "list": {"list": "string"}},
        {"name": "d", "struct": [{"name": "x", "dtype": "int64"}, {"name": "z", "dtype": "bool"}]},
        {"name": "e", "dtype": "json"},
        {"name": "f", "dtype": "json"},
        {"name": "g", "dtype": "float64"},
        {"name": "h", "dtype": "int64"},
    ]
