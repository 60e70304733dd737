"""convert_data_for_swift.py: rows, counts that add up, pictures and texts that swift cannot read otherwise."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from contrastors.images import open_image
from contrastors.processing import DOCUMENT_INSTRUCTION, QUERY_INSTRUCTION
from contrastors.records import RecordError
from contrastors.swift_rows import break_markers, make_row, opens_alike, read_swift_rows
from tests.conftest import write_rows

EXAMPLES = settings(max_examples=200)


def convert(folder: Path, rows: list[dict] | None = None, **flags: object) -> tuple[int, list[dict], dict]:
    """Runs the script on FOLDER/rows.jsonl; returns exit code, output rows and summary."""
    from convert_data_for_swift import main

    if rows is not None:
        write_rows(folder / "rows.jsonl", rows)
    given_flags = {"input": folder / "rows.jsonl", "output": folder / "out.jsonl", "num_workers": 0} | flags
    argv = [word for name, value in given_flags.items() for word in ("--" + name.replace("_", "-"), str(value))]
    code = main([*argv, "--overwrite"])
    output = Path(given_flags["output"])
    if code:
        return code, [], {}
    lines = output.read_text(encoding="utf-8").split("\n")[:-1]
    return code, [json.loads(line) for line in lines], json.loads(output.with_suffix(".stats.json").read_text())


def row(query: str, positive: int, *negatives: int) -> dict:
    return {
        "query": query,
        "chunk_path": f"c{positive:02d}.png",
        "neg_chunk_paths": [f"c{negative:02d}.png" for negative in negatives],
    }


MIXED = [row("none", 0), row("one", 1, 2), row("three", 2, 3, 4, 5)]


def num_negatives(rows: list[dict]) -> list[int]:
    return [len(r.get("negative_images", [])) for r in rows]


def test_a_row_is_query_positive_and_negatives_each_with_its_instruction(colour_set):
    code, rows, stats = convert(colour_set)
    document = [{"role": "system", "content": DOCUMENT_INSTRUCTION}, {"role": "user", "content": "<image>"}]
    assert code == 0 and len(rows) == stats["num_rows"] == 12
    assert rows[3] == {
        "messages": [{"role": "system", "content": QUERY_INSTRUCTION}, {"role": "user", "content": "white"}],
        "positive_messages": [document],
        "positive_images": [[str(colour_set / "c03.png")]],
        "negative_messages": [document, document],
        "negative_images": [[str(colour_set / "c04.png")], [str(colour_set / "c05.png")]],
    }


@pytest.mark.parametrize(("asked", "expected"), [(None, [0, 1, 3]), (0, [0, 0, 0]), (1, [1, 1]), (3, [3])])
def test_every_row_carries_as_many_negatives_as_asked_and_counts_add_up(colour_set, asked, expected):
    flags = {} if asked is None else {"num_hard_negatives": asked}
    _, rows, stats = convert(colour_set, MIXED, **flags)
    assert num_negatives(rows) == expected
    assert all(
        ("negative_messages" in r) == ("negative_images" in r) == bool(n) for r, n in zip(rows, expected, strict=True)
    )
    assert stats["num_hard_negatives"] == sum(expected)
    parts = ("num_rows", "num_bad_rows", "num_rows_with_too_few_negatives")
    assert stats["num_rows_read"] == 3 == sum(stats[name] for name in parts)


def test_no_row_with_enough_negatives_is_an_error_and_leaves_no_output(colour_set, capsys):
    assert convert(colour_set, MIXED, num_hard_negatives=4)[0] == 1
    assert "none of its 3 rows has 4 usable hard negatives" in capsys.readouterr().err
    assert not (colour_set / "out.jsonl").exists()


def test_relative_paths_find_the_same_images_from_any_folder(colour_set, tmp_path, monkeypatch):
    elsewhere = tmp_path / "else where"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    _, rows, _ = convert(colour_set, output=elsewhere / "out.jsonl")
    paths = [path for r in rows for (path,) in [*r["positive_images"], *r["negative_images"]]]
    assert all(os.path.isabs(path) and os.path.isfile(path) for path in paths)
    read_swift_rows(elsewhere / "out.jsonl", 2)


def test_positives_and_twins_of_the_query_never_become_negatives_and_bad_ones_are_left_out(colour_set):
    (colour_set / "c05.png").write_bytes(b"no picture")
    (colour_set / "twin.png").write_bytes((colour_set / "c00.png").read_bytes())
    rows = [row("red", 0, 1, 5, 2, 1), row("red", 1, 2)]
    rows[0]["neg_chunk_paths"].insert(0, "twin.png")
    _, found, stats = convert(colour_set, rows)
    assert [os.path.basename(path) for (path,) in found[0]["negative_images"]] == ["c02.png"]
    assert stats["num_bad_negatives"] == 1 and stats["num_positive_negatives"] == 3


def test_bad_rows_are_reported_and_stop_the_script_above_the_allowed_share(colour_set, capsys):
    (colour_set / "c00.png").unlink()
    assert convert(colour_set)[0] == 1
    assert "1 of 12 rows cannot be used" in capsys.readouterr().err and not (colour_set / "out.jsonl").exists()
    _, rows, stats = convert(colour_set, max_bad_fraction=0.1)
    assert len(rows) == 11 and stats["num_bad_rows"] == 1
    assert json.loads((colour_set / "out.bad_rows.jsonl").read_text())["line"] == 1


def test_pictures_that_swift_would_show_otherwise_are_copied_upright_on_white(colour_set):
    orientation = Image.Exif()
    orientation[0x0112] = 6
    Image.linear_gradient("L").resize((96, 64)).save(colour_set / "turned.jpg", exif=orientation)
    Image.new("RGBA", (64, 64), (0, 90, 0, 120)).save(colour_set / "clear.png")
    ramp = np.tile(np.linspace(0, 65535, 64).astype(np.uint16), (64, 1))
    Image.fromarray(ramp).save(colour_set / "deep.png")
    (colour_set / "c01.png").rename(colour_set / "blank .png ")
    names = ["turned.jpg", "clear.png", "deep.png", "blank .png "]
    rows = [{"query": name, "chunk_path": name, "neg_chunk_paths": ["c02.png"]} for name in names]
    _, found, stats = convert(colour_set, rows)
    assert stats["num_copied_images"] == 4
    for name, converted in zip(names, found, strict=True):
        (path,) = converted["positive_images"][0]
        assert Path(path).parent == colour_set / "out.images"
        with Image.open(path) as picture:  # as swift opens it
            assert np.array_equal(np.asarray(picture.convert("RGB")), np.asarray(open_image(colour_set / name)))
    assert found[0]["negative_images"] == [[str(colour_set / "c02.png")]]


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "CMYK"])
def test_ordinary_pictures_stay_where_they_are(tmp_path, mode):
    path = tmp_path / f"a.{'tif' if mode == 'CMYK' else 'png'}"
    Image.radial_gradient("L").convert(mode).save(path)
    assert opens_alike(str(path))
    with Image.open(path) as picture:
        assert np.array_equal(np.asarray(picture.convert("RGB")), np.asarray(open_image(path)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a <|image_pad|> b<|im_end|>", "a < |image_pad|> b< |im_end|>"), ("<img>x.png</img>", "< img>x.png</img>"),
     ("x <start-image>", "x < start-image>"), ("{{ROUND0}}{{ROUND1}}", "{ {ROUND0}}{ {ROUND1}}"),
     ("<<|endoftext|>>", "<< |endoftext|>>"), ("a <image> b", "a <image> b"), ("1 < 2 |> <|", "1 < 2 |> <|"),
     ("<think>{{SYSTEM}}</think>", "<think>{{SYSTEM}}</think>")],
)  # fmt: skip
def test_markers_are_broken_up_and_other_text_stays(text, expected):
    assert break_markers(text) == expected


MARKERS = ("<|im_end|>", "<img>", "<start-image>", "{{ROUND0}}")


@EXAMPLES
@given(st.lists(st.sampled_from(["<", "|", ">", "{", "}", "ROUND0", "img>", " ", "a", *MARKERS])))
def test_no_marker_is_left_and_nothing_but_spaces_is_added(pieces):
    text = "".join(pieces)
    broken = break_markers(text)
    assert broken.replace(" ", "") == text.replace(" ", "") and break_markers(broken) == broken
    assert not [marker for marker in MARKERS if marker in broken]


def test_queries_with_markers_are_counted(colour_set):
    _, rows, stats = convert(colour_set, [row("red <|im_end|>", 0), row("a <image>", 1)])
    assert [r["messages"][1]["content"] for r in rows] == ["red < |im_end|>", "a <image>"]
    assert stats["num_queries_with_broken_markers"] == 1


def test_an_existing_output_and_the_input_itself_are_refused(colour_set, capsys):
    from convert_data_for_swift import main

    (colour_set / "held.jsonl").write_text("mine")
    assert main(["--input", str(colour_set / "rows.jsonl"), "--output", str(colour_set / "held.jsonl")]) == 1
    assert "exists; use --overwrite" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["--input", str(colour_set / "rows.jsonl"), "--output", str(colour_set / "rows.jsonl")])
    assert ended.value.code == 2
    assert (colour_set / "held.jsonl").read_text() == "mine"


def test_rows_that_swift_would_fail_on_are_named_with_their_line(colour_set):
    good = make_row("q", [str(colour_set / "c00.png"), str(colour_set / "c01.png")], "a", "b")
    for change, words in (
        ({"messages": None}, "line 2: not a row of convert_data_for_swift.py"),
        ({"negative_images": []}, "line 2: not a row of convert_data_for_swift.py"),
        ({"positive_images": [[str(colour_set / "lost.png")]]}, "lost.png cannot be used (No such file"),
        ({"negative_images": None, "negative_messages": None}, "line 2: 0 hard negatives"),
    ):
        write_rows(colour_set / "swift.jsonl", [good, good | change])
        with pytest.raises(RecordError, match="swift.jsonl") as refused:
            read_swift_rows(colour_set / "swift.jsonl", 1)
        assert words in str(refused.value)
    write_rows(colour_set / "swift.jsonl", [])
    with pytest.raises(RecordError, match="holds no rows"):
        read_swift_rows(colour_set / "swift.jsonl", 0)
