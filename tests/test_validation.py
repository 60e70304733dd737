from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
from PIL import Image

from contrastors.images import MAX_IMAGE_PIXELS, content_hash
from contrastors.records import Pair
from contrastors.validation import CACHE_NAME, FactCache, ImageFact, check_image, check_images, image_paths


def save_tile(path: Path, size: tuple[int, int] = (8, 6), colour: int = 9) -> str:
    Image.new("L", size, colour).save(path)
    return str(path)


# --- checking ---


def test_a_good_file_is_known_by_its_bytes_and_upright_size(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 20)).save(tmp_path / "turned.jpg", exif=exif)
    data = (tmp_path / "turned.jpg").read_bytes()
    (tmp_path / "copy.png").write_bytes(data)
    for name in ("turned.jpg", "copy.png"):
        path = str(tmp_path / name)
        assert check_image(path) == ImageFact(path, content_hash(data), 20, 40, "") and check_image(path).ok


@pytest.mark.parametrize(
    "name, reason", [("gone.png", "No such file"), ("cut.png", "truncated"), ("long.png", "1x201 has an aspect ratio")]
)
def test_a_bad_file_has_a_reason_and_no_identity(tmp_path, name, reason):
    save_tile(tmp_path / "long.png", (1, 201))
    (tmp_path / "cut.png").write_bytes(Path(save_tile(tmp_path / "whole.png", (200, 200))).read_bytes()[:60])
    fact = check_image(str(tmp_path / name))
    assert not fact.ok and reason in fact.reason and fact.content == ""


@pytest.fixture
def many_tiles(tmp_path: Path) -> list[str]:
    """Enough files for worker processes; every seventh is broken."""
    paths = [save_tile(tmp_path / f"{i}.png", colour=i) for i in range(70)]
    for path in paths[::7]:
        Path(path).write_bytes(b"no picture")
    return paths


def test_worker_processes_find_what_one_process_finds_in_order(many_tiles):
    calls: list[int] = []
    facts = check_images(many_tiles, num_workers=2, on_progress=calls.append)
    assert [fact.path for fact in facts] == many_tiles and calls == [1] * 70
    assert [fact.ok for fact in facts] == [bool(i % 7) for i in range(70)]
    assert facts == check_images(many_tiles, num_workers=0)


def test_the_pixel_limit_reaches_the_workers(many_tiles):
    facts = check_images(many_tiles, max_image_pixels=40, num_workers=2)
    assert not any(fact.ok for fact in facts) and "limit of 40 pixels" in facts[1].reason


def test_a_killed_worker_is_one_sentence(many_tiles):
    def kill_workers(done: int) -> None:
        for child in multiprocessing.active_children():
            child.kill()

    with pytest.raises(ValueError, match="process that checks images was killed.*--num-workers"):
        check_images(many_tiles * 40, num_workers=1, on_progress=kill_workers)


# --- cache ---


def remembered(folder: Path, path: str, limit: int = MAX_IMAGE_PIXELS) -> ImageFact | None:
    return FactCache(folder).get(path, limit)


def test_an_unchanged_file_is_not_opened_again(tmp_path):
    path = save_tile(tmp_path / "é\u2028 #1.png")
    fact, status = check_image(path), os.stat(path)
    assert FactCache(tmp_path).add([fact])
    Path(path).write_bytes(b"?" * status.st_size)  # what a second look would call bad
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert remembered(tmp_path, path) == fact


def test_a_changed_or_missing_file_is_looked_at_again(tmp_path):
    path = save_tile(tmp_path / "a.png")
    FactCache(tmp_path).add([check_image(path)])
    status = os.stat(path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert remembered(tmp_path, path) is None
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert remembered(tmp_path, path) is not None
    with open(path, "ab") as file:
        file.write(b"x")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert remembered(tmp_path, path) is None
    os.unlink(path)
    assert remembered(tmp_path, path) is None


def test_bad_files_are_not_remembered(tmp_path):
    (tmp_path / "bad.png").write_bytes(b"no picture")
    cache = FactCache(tmp_path)
    assert cache.add([check_image(str(tmp_path / "bad.png")), check_image(str(tmp_path / "gone.png"))])
    assert not (tmp_path / CACHE_NAME).exists() and cache.get(str(tmp_path / "bad.png"), MAX_IMAGE_PIXELS) is None


def test_todays_pixel_limit_judges_remembered_files(tmp_path):
    path = save_tile(tmp_path / "a.png", (10, 10))
    FactCache(tmp_path).add([check_image(path)])
    assert remembered(tmp_path, path, 100).ok
    assert "10x10 is over the limit of 99 pixels" in remembered(tmp_path, path, 99).reason


def test_a_fact_is_written_once(tmp_path):
    path = save_tile(tmp_path / "a.png")
    for _ in range(2):
        cache = FactCache(tmp_path)
        assert cache.add([check_image(path)] * 2) and cache.add([check_image(path)])
    assert (tmp_path / CACHE_NAME).read_bytes().count(b"\n") == 1


def test_unreadable_lines_are_ignored(tmp_path):
    path = save_tile(tmp_path / "a.png")
    FactCache(tmp_path).add([check_image(path)])
    file = tmp_path / CACHE_NAME
    line = file.read_bytes()
    size, mtime = os.stat(path).st_size, os.stat(path).st_mtime_ns
    odd = b'["a.png", %d, %d, "0", "8", null]\n[[], 1, 2, "0", 3, 4]\n{"a": 1}\nnull\n\xff\n\n7\n' % (size, mtime)
    file.write_bytes(line + odd + line[:20])
    assert remembered(tmp_path, path) == check_image(path)
    file.write_bytes(odd)
    assert remembered(tmp_path, path) is None


def test_a_data_set_that_was_moved_keeps_its_facts(tmp_path):
    (tmp_path / "old" / "tiles").mkdir(parents=True)
    path = save_tile(tmp_path / "old" / "tiles" / "a.png")
    FactCache(tmp_path / "old").add([check_image(path)])
    os.rename(tmp_path / "old", tmp_path / "new")
    assert remembered(tmp_path / "new", str(tmp_path / "new" / "tiles" / "a.png")).ok


def test_a_folder_that_cannot_be_written_is_reported_and_no_error(tmp_path):
    cache = FactCache(tmp_path / "gone")
    fact = check_image(save_tile(tmp_path / "a.png"))
    assert cache.add([fact]) is False and cache.get(fact.path, MAX_IMAGE_PIXELS) == fact


# --- paths ---


def test_image_paths_come_once_in_order_of_first_use():
    pairs = [Pair(0, 1, "q", "b", ["c", "b"]), Pair(1, 2, "r", "a", ["c", "d"])]
    assert image_paths(pairs) == ["b", "c", "a", "d"]
    assert image_paths(pairs, with_negatives=False) == ["b", "a"]
