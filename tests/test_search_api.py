"""The search client against a real local server, the journal of replies, and the recognition of positives."""

from __future__ import annotations

import os
import shutil
import socket
import time
import unicodedata

import pytest

from contrastors import search_api
from contrastors.images import content_hash
from contrastors.search_api import HitJournal, SearchClient, SearchFailed, SearchStopped
from contrastors.served import HitResolver, PositiveMatcher, ServedHits, ServedPositive, equal_sized_contents
from tests.judge_server import Played
from tests.search_server import SearchServer

HIT = {"path": "tiles/a.png", "score": 0.5, "article_id": 7}


@pytest.fixture
def quick(monkeypatch):
    """Waits between tries of hardly anything; the waits asked for are kept."""
    waits = []
    real = search_api.retry_delay

    def wait(attempt, headers):
        waits.append(real(attempt, headers))
        return 0.001

    monkeypatch.setattr(search_api, "retry_delay", wait)
    return waits


def one_hit(request):
    return [[HIT]] * len(request.body["queries"])


def after(failures: list[Played], then=one_hit):
    """Plays the failures one after another, then answers."""
    return lambda request: failures[request.number] if request.number < len(failures) else then(request)


def test_the_request_has_the_agreed_form_and_hits_come_back_as_sent():
    with SearchServer(one_hit) as server, SearchClient(server.url, 20, 64) as client:
        client.check()
        assert client.search([[0.25, -1.0], [0.0, 1.0]], num_extra=3) == [[HIT], [HIT]]
        body = server.requests[0].body
    assert body == {"queries": [{"embedding": [0.25, -1.0]}, {"embedding": [0.0, 1.0]}], "n_docs": 23, "nprobe": 64}


def test_a_url_may_end_in_a_slash_or_in_the_route():
    with SearchServer(one_hit) as server:
        for url in (server.url + "/", server.url + "/search"):
            with SearchClient(url, 1, 1) as client:
                client.check()
                assert client.search([[1.0]]) == [[HIT]]


@pytest.mark.parametrize(
    "failures",
    [
        [Played("slow down", 429, {"Retry-After": "1"})] * 2,
        [Played("", 503)] * 3,
        [Played("", 500), Played("", 502), Played("", 408)],
        [Played({"results": [{"hits": [HIT]}]}, cut=True)],
        [Played("<html>", 200)],
        [Played('{\0"results": []}', 200)],  # looks like UTF-16, and is none
        [Played("[" * 100_000, 200)],
        [Played({"results": []}, delay_s=60)],
    ],
    ids=["429", "503", "mixed", "cut", "no JSON", "no encoding", "too deep", "slow"],
)
def test_failures_that_pass_are_asked_again_until_the_good_reply(failures, quick):
    with SearchServer(after(failures)) as server, SearchClient(server.url, 20, 1, timeout_s=2) as client:
        assert client.search([[1.0]]) == [[HIT]]
        assert client.requests == {"calls": len(failures) + 1, "retries": len(failures)}


def test_retry_after_is_honoured_and_waits_grow_without_it(quick):
    failures = [Played("", 429, {"Retry-After": "7"}), *[Played("", 503)] * 4]
    with SearchServer(after(failures)) as server, SearchClient(server.url, 20, 1) as client:
        client.search([[1.0]])
    assert 7 <= quick[0] <= 8 and quick[4] > 2 * quick[1]


def test_a_batch_that_fails_in_the_end_is_a_failure_of_its_own_with_the_last_reason(quick):
    with SearchServer(after([Played("out of memory", 503)] * 9)) as server:
        with SearchClient(server.url, 20, 1, max_retries=2) as client, pytest.raises(SearchFailed) as failed:
            client.search([[1.0]])
    assert str(failed.value) == "3 tries failed, the last: answered 503 out of memory" and server.num_calls == 3


@pytest.mark.parametrize("status", [400, 401, 404, 422])
def test_what_no_retry_cures_stops_at_once_with_url_and_reply(status):
    with SearchServer(after([Played("no such thing", status)])) as server, SearchClient(server.url, 20, 1) as client:
        with pytest.raises(SearchStopped, match=f"{server.url}/search answered {status} no such thing; mend"):
            client.search([[1.0]])
    assert server.num_calls == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"results": [{"hits": []}]}, "1 results came for 2 queries"),
        ({"results": [{"hits": []}] * 3}, "3 results came for 2 queries"),
        ({"hits": []}, "no list 'results'"),
        ([], "no list 'results'"),
        ({"results": [{"hits": []}, {}]}, "no list 'hits'"),
        ({"results": [{"hits": []}, None]}, "no list 'hits'"),
        ({"results": [{"hits": ["a.png"]}] * 2}, "a hit needs 'path'"),
        ({"results": [{"hits": [{"path": "a.png"}]}] * 2}, "a hit needs 'path'"),
        ({"results": [{"hits": [{"path": "a.png", "score": "0.5"}]}] * 2}, "a hit needs 'path'"),
        ('{"results": [{"hits": [{"path": "a.png", "score": NaN}]}, {"hits": []}]}', "a hit needs 'path'"),
        ({"results": [{"hits": [HIT, HIT | {"score": 0.9}]}] * 2}, "scores rise from hit to hit"),
    ],
)
def test_a_reply_of_another_length_or_form_is_an_error(body, message):
    with SearchServer(lambda request: Played(body)) as server, SearchClient(server.url, 20, 1) as client:
        with pytest.raises(SearchStopped, match=message):
            client.search([[1.0], [2.0]])


def test_more_hits_than_asked_for_are_cut():
    with SearchServer(lambda r: [[HIT] * 30]) as server, SearchClient(server.url, 4, 1) as client:
        assert len(client.search([[1.0]])[0]) == 4


def test_a_service_that_is_not_well_or_not_there_stops_with_its_address(quick):
    with (
        SearchServer(one_hit, health=Played({"status": "loading"})) as server,
        SearchClient(server.url, 1, 1) as client,
    ):
        with pytest.raises(SearchStopped, match="/health answered {'status': 'loading'}"):
            client.check()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with (
        SearchClient(url, 1, 1) as client,
        pytest.raises(SearchStopped, match=f"{url}/health: 3 tries failed, .* start"),
    ):
        client.check()


def test_a_proxy_of_the_environment_is_ignored_on_this_machine(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with SearchServer(one_hit) as server, SearchClient(server.url, 1, 1, max_retries=0) as client:
        assert client.search([[1.0]]) == [[HIT]]


def test_a_server_that_never_ends_its_reply_is_given_up_at_the_timeout(quick):
    started = time.monotonic()
    with SearchServer(lambda request: Played({}, delay_s=100)) as server:
        with SearchClient(server.url, 1, 1, max_retries=1, timeout_s=0.3) as client, pytest.raises(SearchFailed):
            client.search([[1.0]])
    assert time.monotonic() - started < 50


# -------------------------------------------------------------------------------------------------------------- journal


def test_the_journal_keeps_replies_and_drops_a_torn_last_line(tmp_path):
    journal = HitJournal(tmp_path / "hits.jsonl", resume=False)
    journal.add(["k1", "k2"], [[HIT], []])
    journal.add(["k3"], [[HIT | {"path": "é\u2028.png"}]])
    journal.close()
    whole = (tmp_path / "hits.jsonl").read_bytes()
    for cut in range(1, 30):
        (tmp_path / "hits.jsonl").write_bytes(whole[:-cut])
        resumed = HitJournal(tmp_path / "hits.jsonl", resume=True)
        assert resumed.hits == {"k1": [HIT], "k2": []}
        resumed.add(["k3"], [[HIT | {"path": "é\u2028.png"}]])
        resumed.close()
        assert (tmp_path / "hits.jsonl").read_bytes() == whole
    again = HitJournal(tmp_path / "hits.jsonl", resume=False)
    assert not again.hits
    again.close()


# ---------------------------------------------------------------------------------------------------------- recognition


def matcher(path: str, text: str = "", ids=None) -> PositiveMatcher:
    return PositiveMatcher([ServedPositive(path, text or path, ids)])


@pytest.mark.parametrize(
    ("path", "text", "hit", "is_positive"),
    [
        ("/d/tiles/a.png", "", "/d/tiles/a.png", True),
        ("/d/tiles/a.png", "", "tiles/a.png", True),
        ("/d/tiles/a.png", "", "./tiles//a.png", True),
        ("/d/tiles/a.png", "", "../tiles/a.png", True),
        ("/d/tiles/a.png", "", "a.png", True),
        ("/d/tiles/a.png", "", "iles/a.png", False),
        ("/d/tiles/a.png", "", "tiles/ba.png", False),
        ("/d/tiles/a.png", "", "/srv/tiles/a.png", False),
        ("/d/tiles/a.png", "tiles/a.png", "/srv/tiles/a.png", True),
        ("/d/tiles/a.png", "./tiles/a.png", "/srv/tiles/a.png", True),
        ("/d/tiles/a.png", "tiles/a.png", "/srv/tiles/b.png", False),
        ("/d/tiles/\u00e9 #1 50%.png", "", unicodedata.normalize("NFD", "tiles/\u00e9 #1 50%.png"), True),
    ],
)
def test_a_positive_is_recognised_by_the_end_of_its_path(path, text, hit, is_positive):
    assert matcher(path, text).find({"path": hit}) == ({0} if is_positive else set())


def test_ids_decide_where_both_sides_have_them():
    known = matcher("/d/tiles/a.png", "tiles/a.png", ("7", "0", "1"))
    ids = {"article_id": 7, "tile_index": 0, "chunk_index": 1}
    assert known.find({"path": "elsewhere/x.png", **ids}) == {0}
    assert known.find({"path": "tiles/a.png", **ids, "chunk_index": 2}) == set()
    assert known.find({"path": "tiles/a.png", "article_id": 8}) == {0}  # not all three: the path decides


def test_a_linked_folder_is_the_folder_it_links_to(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert matcher(str(tmp_path / "link" / "a.png")).find({"path": "real/a.png"}) == {0}


def test_files_of_relative_hits_are_found_where_recognised_positives_lie(tmp_path):
    (tmp_path / "index" / "x").mkdir(parents=True)
    for name in ("a.png", "b.png"):
        (tmp_path / "index" / "x" / name).write_bytes(b"1")
    (tmp_path / "x").mkdir()  # O07: the same relative name in two folders
    for name in ("b.png", "c.png"):
        (tmp_path / "x" / name).write_bytes(b"2")
    resolver = HitResolver(str(tmp_path))
    resolver.learn("x/a.png", str(tmp_path / "index" / "x" / "a.png"))
    assert resolver("x/b.png") == str(tmp_path / "index" / "x" / "b.png")
    assert resolver("x/c.png") == str(tmp_path / "x" / "c.png")
    assert resolver("x/missing.png") is None


def test_only_files_of_equal_size_are_read_and_copies_are_equal(tmp_path):
    for name, data in {"a": b"same", "b": b"same", "c": b"diff", "d": b"longer"}.items():
        (tmp_path / name).write_bytes(data)
    found = equal_sized_contents([str(tmp_path / name) for name in "abcd"] + [None, "/no/such/file"])
    assert found.keys() == {str(tmp_path / name) for name in "abc"}
    assert found[str(tmp_path / "a")] == found[str(tmp_path / "b")] != found[str(tmp_path / "c")]


def test_hits_know_positives_copies_and_where_their_files_are_from_the_output(tmp_path, colour_set):
    """Relative paths of an index in another folder; a byte copy of the positive, and two copies of one negative."""
    os.makedirs(tmp_path / "out")
    shutil.copy(colour_set / "c00.png", colour_set / "positive_copy.png")
    shutil.copy(colour_set / "c01.png", colour_set / "negative_copy.png")
    names = ["c00.png", "positive_copy.png", "c01.png", "negative_copy.png", "gone.png"]
    reply = [{"path": name, "score": 0.9 - place / 10, "article_id": place} for place, name in enumerate(names)]
    positive = ServedPositive(str(colour_set / "c00.png"), "c00.png", None)
    hits = ServedHits([reply], [[positive]], [[5]], str(colour_set), str(tmp_path / "out")).hits(0)
    assert [sorted(hit.documents) for hit in hits] == [[5], [5], [], [], []]
    assert hits[2].identity == hits[3].identity != hits[4].identity
    assert [hit.entry["path"] for hit in hits] == [f"../{name}" for name in names[:4]] + ["gone.png"]
    assert [hit.entry["article_id"] for hit in hits] == [0, 1, 2, 3, 4] and hits[1].articles == ["1"]


def test_a_path_that_fits_is_doubted_only_where_both_images_are_known(tmp_path):
    """Which file a relative path means is a guess: beside the input lies another picture of that name."""
    for folder, data in {"a": b"one", "b": b"two", ".": b"three"}.items():
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "0.png").write_bytes(data)
    path = tmp_path / "a" / "0.png"
    known = PositiveMatcher([ServedPositive(str(path), "0.png", None, content_hash(b"one"))])
    other = str(tmp_path / "b" / "0.png")
    assert known.find({"path": other}, other) == set()
    assert known.find({"path": str(path)}, str(path)) == {0}
    assert known.find({"path": "b/0.png"}, other) == set()
    assert known.find({"path": "/srv/b/0.png"}) == {0}  # its file is elsewhere
    assert known.find({"path": other}, str(tmp_path / "gone.png")) == {0}  # and this one cannot be read
    assert known.find({"path": "0.png"}, str(tmp_path / "0.png")) == {0}
    unknown = PositiveMatcher([ServedPositive(str(path), "0.png", None)])  # of a row whose image is broken
    assert unknown.find({"path": other}, other) == {0}
    ids = {"article_id": 7, "tile_index": 0, "chunk_index": 1}
    same = PositiveMatcher([ServedPositive(str(path), "0.png", ("7", "0", "1"), content_hash(b"one"))])
    assert same.find({"path": other, **ids}, other) == {0}  # ids decide
