from __future__ import annotations

import json
import os
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from contrastors.records import (
    BadRow,
    PathResolver,
    RecordError,
    atomic_output,
    check_bad_rows,
    dump_json,
    read_jsonl,
    read_pairs,
    relocate_row,
    write_jsonl,
    write_text,
)

EXAMPLES = settings(max_examples=100)
ODD = '\u2028\u2029\u0085\ufeff\x0b\x0c\x1c\r\n\t"\\ é\U0001f600'
TEXT = st.text(st.one_of(st.sampled_from(ODD), st.characters(exclude_categories=["Cs"])), max_size=12)
SCALAR = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), TEXT)
VALUE = st.recursive(SCALAR, lambda v: st.one_of(st.lists(v, max_size=3), st.dictionaries(TEXT, v, max_size=3)))
ROWS = st.lists(st.dictionaries(TEXT, VALUE, max_size=4), max_size=5)
BLANK = st.sampled_from([b"\n", b"\r\n", b"  \t\n"])


def put(folder: Path, *rows: dict, name: str = "rows.jsonl") -> Path:
    write_jsonl(folder / name, rows)
    return folder / name


# --- lines ---


@EXAMPLES
@given(rows=ROWS)
@example(rows=[{"query": "a\u2028b\u0085c\u2029d\x0be\ufeff"}])
def test_rows_come_back_as_written(tmp_path_factory, rows):
    path = tmp_path_factory.getbasetemp() / "round.jsonl"
    assert write_jsonl(path, rows) == len(rows)
    assert [record.data for record in read_jsonl(path)] == rows
    assert [list(record.data) for record in read_jsonl(path)] == [list(row) for row in rows]
    assert path.read_bytes().count(b"\n") == len(rows)


@EXAMPLES
@given(
    rows=st.lists(st.dictionaries(TEXT, SCALAR, max_size=3), min_size=1, max_size=5),
    bom=st.booleans(),
    last_newline=st.booleans(),
    data=st.data(),
)
def test_bom_crlf_blank_lines_and_a_missing_newline_change_nothing(tmp_path_factory, rows, bom, last_newline, data):
    path = tmp_path_factory.getbasetemp() / "windows.jsonl"
    lines, places = [], []
    for row in rows:
        lines += data.draw(st.lists(BLANK, max_size=2))
        places.append(len(lines) + 1)
        ending = data.draw(st.sampled_from([b"\n", b"\r\n", b" \r\n"]))
        lines.append(json.dumps(row, ensure_ascii=False).encode() + ending)
    content = (b"\xef\xbb\xbf" if bom else b"") + b"".join(lines)
    path.write_bytes(content if last_newline else content.rstrip(b"\r\n"))
    assert [(r.index, r.line, r.data) for r in read_jsonl(path)] == list(zip(range(9), places, rows, strict=False))


def test_separators_inside_a_string_stay_unescaped_in_the_file(tmp_path):
    path = put(tmp_path, {"query": "a\u2028b\u0085c"})
    assert "a\u2028b\u0085c" in path.read_bytes().decode()


@pytest.mark.parametrize(
    "line, said",
    [
        (b'{"query": "cut', "not a JSON object"),
        (b'{"query": "a"} {"query": "b"}', "not a JSON object"),
        (b'{"score": NaN}', "NaN is not strict JSON"),
        (b'{"score": -Infinity}', "-Infinity is not strict JSON"),
        (b'{"query": "\xff"}', "not UTF-8"),
        (b"[" * 100_000, "not a JSON object"),
        (b"[1]", "this is a list"),
        (b'"text"', "this is a string"),
        (b"null", "this is null"),
    ],
)
def test_a_broken_line_is_named_with_file_and_line(tmp_path, line, said):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\n{"query": "good"}\r\n' + line + b"\n")
    with pytest.raises(RecordError, match="rows.jsonl, line 3: ") as caught:
        list(read_jsonl(path))
    assert said in str(caught.value)


def test_a_missing_file_and_an_empty_file_are_named(tmp_path):
    with pytest.raises(RecordError, match="none.jsonl: cannot be read"):
        list(read_jsonl(tmp_path / "none.jsonl"))
    (tmp_path / "empty.jsonl").write_bytes(b"\xef\xbb\xbf\r\n \n")
    with pytest.raises(RecordError, match="empty.jsonl: holds no rows"):
        read_pairs(tmp_path / "empty.jsonl")


# --- schema ---


@pytest.mark.parametrize(
    "change, said",
    [
        ({"query": 7}, "field 'query' must be a string, it is a number"),
        ({"query": None}, "field 'query' must be a string, it is null"),
        ({"query": " \n"}, "field 'query' is empty"),
        ({"query": "half \ud83d"}, "field 'query' holds half of a surrogate pair"),
        ({"chunk_path": ["a.png"]}, "field 'chunk_path' must be a string, it is a list"),
        ({"chunk_path": ""}, "field 'chunk_path' is empty"),
        ({"neg_chunk_paths": "b.png"}, "field 'neg_chunk_paths' must be a list of strings, it is a string"),
        ({"neg_chunk_paths": {"a": 1}}, "field 'neg_chunk_paths' must be a list of strings, it is an object"),
        ({"neg_chunk_paths": ["b.png", ["c.png"]]}, "field 'neg_chunk_paths' must be a list of strings, it holds a li"),
        ({"neg_chunk_paths": [True]}, "field 'neg_chunk_paths' must be a list of strings, it holds a boolean"),
        ({"neg_chunk_paths": [""]}, "field 'neg_chunk_paths' must be a list of strings, it holds an empty string"),
    ],
)
def test_a_wrong_field_stops_with_file_line_field_and_type(tmp_path, change, said):
    good = {"query": "q", "chunk_path": "a.png"}
    path = put(tmp_path, good, good | change)
    with pytest.raises(RecordError) as caught:
        read_pairs(path)
    assert str(caught.value).startswith(f"{path}, line 2: {said}")


def test_a_missing_field_is_called_missing(tmp_path):
    with pytest.raises(RecordError, match="line 1: field 'chunk_path' must be a string, it is missing"):
        read_pairs(put(tmp_path, {"query": "q"}))


def test_rows_without_negatives_are_pairs(tmp_path):
    row = {"query": "q", "chunk_path": "a.png"}
    pairs, _ = read_pairs(put(tmp_path, row, row | {"neg_chunk_paths": None}, row | {"neg_chunk_paths": []}))
    assert [pair.negatives for pair in pairs] == [[], [], []]
    assert [(pair.index, pair.line) for pair in pairs] == [(0, 1), (1, 2), (2, 3)]


def test_max_rows_keeps_the_first(tmp_path):
    path = put(tmp_path, *({"query": str(i), "chunk_path": "a.png"} for i in range(5)))
    assert [pair.query for pair in read_pairs(path, max_rows=2)[0]] == ["0", "1"]
    assert len(read_pairs(path)[0]) == 5


# --- paths ---


def test_relative_paths_belong_to_the_folder_of_the_file(tmp_path, monkeypatch):
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for folder in (data, elsewhere):
        folder.mkdir()
        (folder / "a.png").write_text(folder.name)
    path = put(data, {"query": "q", "chunk_path": "a.png", "neg_chunk_paths": ["./a.png", str(elsewhere / "a.png")]})
    found = {}
    for start, name in ((data, "rows.jsonl"), (elsewhere, path), (tmp_path, "data/rows.jsonl")):
        monkeypatch.chdir(start)
        pair = read_pairs(name)[0][0]
        found[start] = [Path(p).read_text() for p in (pair.positive, *pair.negatives)]
    assert list(found.values()) == [["data", "data", "elsewhere"]] * 3


@pytest.mark.parametrize("disk, text", [("NFD", "NFC"), ("NFC", "NFD")])
def test_the_other_normal_form_is_found_and_counted_once(tmp_path, disk, text):
    name = "é #1 50%.png"
    (tmp_path / unicodedata.normalize(disk, name)).write_text("x")
    row = {"query": "q", "chunk_path": unicodedata.normalize(text, name)}
    pairs, resolver = read_pairs(put(tmp_path, row, row))
    assert [Path(pair.positive).read_text() for pair in pairs] == ["x", "x"]
    assert resolver.num_renamed == 1


def test_the_exact_name_wins_over_the_other_normal_form(tmp_path):
    for form in ("NFC", "NFD"):
        (tmp_path / unicodedata.normalize(form, "é.png")).write_text(form)
    resolver = PathResolver(tmp_path / "rows.jsonl")
    for form in ("NFC", "NFD"):
        assert Path(resolver(unicodedata.normalize(form, "é.png"))).read_text() == form
    assert resolver.num_renamed == 0


@pytest.mark.parametrize("name", ["gone.png", "weg é.png", "nul\0.png", "half\ud800.png"])
def test_a_missing_file_comes_back_with_the_full_path_tried(tmp_path, name):
    resolver = PathResolver(tmp_path / "rows.jsonl")
    assert resolver(name) == os.path.join(tmp_path, name)
    assert resolver.num_renamed == 0


def relocated(old: Path, new: Path, row: dict) -> dict:
    """Returns the row as the file in the new folder holds it, with the contents that its paths lead to."""
    path = put(new, relocate_row(row, PathResolver(old / "rows.jsonl"), new), name="moved.jsonl")
    moved = next(read_jsonl(path)).data
    resolver = PathResolver(path)
    paths = [moved["chunk_path"], *moved["neg_chunk_paths"], *(e["path"] for e in moved["retrieve_top20"])]
    return {"row": moved, "contents": [Path(resolver(p)).read_text() for p in paths]}


def lay_tiles(folder: Path) -> dict:
    (folder / "tiles").mkdir(parents=True)
    for name in ("a", "b #1 50%", unicodedata.normalize("NFD", "é")):
        (folder / "tiles" / f"{name}.png").write_text(unicodedata.normalize("NFC", name))
    return {
        "id": 7,
        "query": "a\u2028b",
        "chunk_path": "tiles/a.png",
        "neg_chunk_paths": ["./tiles/../tiles/b #1 50%.png", unicodedata.normalize("NFC", "tiles/é.png")],
        "retrieve_top20": [{"rank": 1, "path": "tiles/a.png", "score": 0.5, "extra": [1]}],
    }


@pytest.mark.parametrize("place", ["data/out", "other", ".", "data/tiles"])
def test_a_row_in_another_folder_finds_the_same_images(tmp_path, place):
    row = lay_tiles(tmp_path / "data")
    result = relocated(tmp_path / "data", tmp_path / place, row)
    assert result["contents"] == ["a", "b #1 50%", "é", "a"]
    moved = result["row"]
    assert list(moved) == list(row) and (moved["id"], moved["query"]) == (7, "a\u2028b")
    assert moved["retrieve_top20"][0] | {"path": ""} == row["retrieve_top20"][0] | {"path": ""}


@pytest.mark.parametrize("link_old, link_new", [(True, False), (False, True), (True, True)])
def test_a_linked_folder_does_not_lead_relative_paths_astray(tmp_path, link_old, link_new):
    old, new = tmp_path / "data", tmp_path / "out"
    for folder, linked in ((old, link_old), (new, link_new)):
        if linked:
            target = tmp_path / "big" / "disk" / folder.name
            target.mkdir(parents=True)
            folder.symlink_to(target)
    assert relocated(old, new, lay_tiles(old))["contents"] == ["a", "b #1 50%", "é", "a"]


def test_a_row_that_stays_in_its_folder_stays_as_it_is(tmp_path):
    row = lay_tiles(tmp_path / "data")
    (tmp_path / "link").symlink_to(tmp_path / "data")
    for folder in (tmp_path / "data", tmp_path / "data" / "tiles" / "..", tmp_path / "link"):
        assert relocate_row(row, PathResolver(tmp_path / "data" / "rows.jsonl"), folder) == row


def test_absolute_paths_and_candidates_without_a_path_stay(tmp_path):
    row = {"chunk_path": str(tmp_path / "a.png"), "neg_chunk_paths": [], "retrieve_top20": [{"rank": 1}, "a.png", None]}
    assert relocate_row(row, PathResolver(tmp_path / "rows.jsonl"), tmp_path / "out") == row


# --- writing ---


@pytest.mark.parametrize(
    "value, text",
    [
        ({"a": float("nan"), "b": [float("inf"), -float("inf"), 0.5]}, '{"a": null, "b": [null, null, 0.5]}'),
        ({"a": np.float32("nan"), "b": np.float32(0.5), "c": np.int64(3)}, '{"a": null, "b": 0.5, "c": 3}'),
        ((1, True, None, "é\u2028"), '[1, true, null, "é\u2028"]'),
    ],
)
def test_json_is_strict_whatever_the_numbers(value, text):
    assert dump_json(value) == text


@EXAMPLES
@given(st.text(st.characters(), max_size=8))
@example("half \ud83d é")
def test_any_text_can_be_written_as_utf8_and_read_back(text):
    assert json.loads(dump_json({"t": text}).encode("utf-8")) == {"t": text}


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = put(tmp_path, {"n": 1})

    def rows():
        yield {"n": 2}
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        write_jsonl(path, rows())
    assert path.read_text() == '{"n": 1}\n' and os.listdir(tmp_path) == ["rows.jsonl"]


def test_the_old_file_is_whole_until_the_new_one_is(tmp_path):
    path = tmp_path / "new" / "file.txt"
    write_text(path, "old\r\n")
    with atomic_output(path) as temporary:
        temporary.write_text("new")
        assert path.read_bytes() == b"old\r\n"
    assert path.read_text() == "new" and os.listdir(path.parent) == ["file.txt"]


@pytest.mark.parametrize("fail", [False, True])
def test_a_folder_appears_whole_or_not_at_all(tmp_path, fail):
    try:
        with atomic_output(tmp_path / "folder") as temporary:
            temporary.mkdir()
            (temporary / "a").write_text("a")
            if fail:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        assert os.listdir(tmp_path) == []
    else:
        assert (tmp_path / "folder" / "a").read_text() == "a" and os.listdir(tmp_path) == ["folder"]


def test_a_pipe_or_device_never_becomes_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(ValueError, match="is neither a file nor a folder"), atomic_output(place):
            pass
    assert (tmp_path / "pipe").is_fifo() and Path("/dev/null").is_char_device()


# --- bad rows ---

BAD = [BadRow(3, "/t/a.png", "the file is empty"), BadRow(9, "/t/b.png", "1x201 has an aspect ratio over 200")]


@pytest.mark.parametrize(
    "num_rows, allowed, stops", [(200, 0.01, False), (199, 0.01, True), (3, 1.0, False), (2, 1.0, True)]
)
def test_too_many_bad_rows_stop_and_all_are_listed(tmp_path, num_rows, allowed, stops):
    report = tmp_path / "bad_rows.jsonl"
    if stops:
        with pytest.raises(ValueError, match=rf"rows: 2 of {num_rows} rows .*--max-bad-fraction.* line 3: /t/a.png"):
            check_bad_rows("rows", BAD, num_rows, allowed, report)
    else:
        check_bad_rows("rows", BAD, num_rows, allowed, report)
    assert [record.data for record in read_jsonl(report)] == [
        {"line": row.line, "path": row.path, "reason": row.reason} for row in BAD
    ]


def test_no_bad_row_needs_no_report(tmp_path):
    check_bad_rows("rows", [], 0, 0.0, tmp_path / "bad_rows.jsonl")
    assert os.listdir(tmp_path) == []
