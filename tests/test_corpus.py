"""The forms of a corpus, and what is wrong with one that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from contrastors.corpus import read_corpus
from contrastors.records import RecordError
from tests.conftest import write_rows


def paths_of(source: object) -> list[str]:
    return [Path(tile.path).name for tile in read_corpus(str(source))[0]]


def test_a_text_file_may_come_from_windows(colour_set):
    file = colour_set / "tiles.txt"
    file.write_bytes("\ufeffc00.png\r\n\r\nc01.png\r\nc02.png".encode())
    tiles, _ = read_corpus(str(file))
    assert [(tile.line, tile.text) for tile in tiles] == [(1, "c00.png"), (3, "c01.png"), (4, "c02.png")]
    assert all(Path(tile.path).is_file() for tile in tiles)


def test_a_folder_is_searched_to_the_bottom_in_one_order_and_for_pictures_alone(colour_set):
    (colour_set / "deep" / "er").mkdir(parents=True)
    (colour_set / "c05.png").rename(colour_set / "deep" / "er" / "z.PNG")
    assert paths_of(colour_set) == [*(f"c{n:02d}.png" for n in range(12) if n != 5), "z.PNG"]
    assert paths_of(colour_set / "**" / "*.PNG") == ["z.PNG"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no tile"),
        (b"\n\n", "holds no tile"),
        (b"caf\xe9.png\n", "no text file in UTF-8; a JSONL's name ends in .jsonl"),
        (None, "cannot be read .*; check the path"),
    ],
)
def test_a_text_file_without_tiles_is_one_sentence(tmp_path, content, message):
    file = tmp_path / "tiles.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(RecordError, match=message) as error:
        read_corpus(str(file))
    assert str(file) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("article", [True, 1.5, ["a"], {"b": 1}])
def test_an_article_id_is_a_text_or_a_whole_number(tmp_path, article):
    write_rows(tmp_path / "corpus.jsonl", [{"chunk_path": "a.png"}, {"chunk_path": "b.png", "article_id": article}])
    with pytest.raises(
        RecordError, match="corpus.jsonl, line 2: field 'article_id' must be a string or a whole number"
    ):
        read_corpus(str(tmp_path / "corpus.jsonl"))
    write_rows(tmp_path / "corpus.jsonl", [{"chunk_path": "a.png", "article_id": n} for n in (None, 7, "7")])
    assert [tile.article_id for tile in read_corpus(str(tmp_path / "corpus.jsonl"))[0]] == [None, 7, "7"]


def test_an_empty_folder_holds_no_tile(tmp_path):
    (tmp_path / "notes.txt").write_text(json.dumps("no picture"))
    with pytest.raises(RecordError, match="holds no tile"):
        read_corpus(str(tmp_path))
