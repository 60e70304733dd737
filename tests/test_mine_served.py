"""mine_hard_negatives.py through a search service: its paths, its failures, and stops while it is asked."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from mine_hard_negatives import main
from tests.conftest import ROOT, write_rows
from tests.judge_server import Played
from tests.mining import check_spellings, embed_all, flags_of, read, same_but_scores, write_spellings
from tests.runs import finish, spawn
from tests.search_server import SearchServer, index_of


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("contrastors.search_api.retry_delay", lambda attempt, headers: 0.001)


@pytest.fixture
def service(colour_set, tiny_model):
    """Returns a real search over files of the colour set, with their paths as `rename` spells them."""

    def build(rename=lambda name: name, names=None, **more):
        found = names or [f"c{n:02d}.png" for n in range(12)]
        vectors = embed_all(tiny_model, "document", [colour_set / name for name in found])
        return index_of(vectors, [{"path": rename(name), **more} for name in found])

    return build


@pytest.mark.parametrize(
    "rename",
    [lambda name: name, lambda name: f"./{name}", lambda name: f"/index/of/{name}", lambda name: f"{{root}}/{name}"],
    ids=["relative", "dotted", "absolute elsewhere", "absolute here"],
)
def test_a_service_gives_the_rows_of_a_local_search_whatever_its_paths_look_like(mine, service, colour_set, rename):
    wanted, _ = mine(n_docs=6)
    with SearchServer(service(lambda name: rename(name).replace("{root}", str(colour_set)))) as server:
        found, stats = mine(n_docs=6, search_api_url=server.url, output=colour_set / "served.jsonl")
    for row in found:
        row["neg_chunk_paths"] = [Path(path).name for path in row["neg_chunk_paths"]]
        for entry in row["retrieve_top20"]:
            entry["path"] = Path(entry["path"]).name
    for row, other in zip(found, wanted, strict=True):
        if other["positive_rank"] is None:
            assert row["positive_rank"] is None and row["positive_score"] is None  # from a service it is not known
            row["positive_score"] = other["positive_score"]
    same_but_scores(found, wanted)
    assert stats["search"]["calls"] == 1 and not (colour_set / "served.hits.jsonl").exists()


def test_a_service_never_makes_a_positive_a_negative(mine, service, colour_set):
    write_spellings(colour_set)
    names = [*(f"c{n:02d}.png" for n in range(12)), "copy.png", "copy_of_five.png"]
    with SearchServer(service(names=names)) as server:
        rows, _ = mine(search_api_url=server.url, num_negatives=20)
        assert all(request.body["n_docs"] == 22 for request in server.requests)  # two positives at most
    check_spellings(colour_set, rows)


def test_ids_recognise_positives_whose_paths_have_nothing_in_common(mine, service, colour_set):
    rows = [row | {"tile_index": 0, "chunk_index": 2} for row in read(colour_set / "rows.jsonl")]
    write_rows(colour_set / "rows.jsonl", [row | {"article_id": n} for n, row in enumerate(rows)])
    plain = service()

    def renamed(request):
        return [
            [{"path": f"blob/{hit['path'][1:3]}x", "score": hit["score"], "article_id": str(int(hit["path"][1:3])),
              "tile_index": "0", "chunk_index": 2} for hit in hits]
            for hits in plain(request)
        ]  # fmt: skip

    with SearchServer(renamed) as server:
        mined, _ = mine(search_api_url=server.url, num_negatives=20, filter_mode="article")
    for number, row in enumerate(mined):
        assert row["positive_rank"] and f"blob/{number:02d}x" not in row["neg_chunk_paths"]
        assert len(row["neg_chunk_paths"]) == 11 and row["retrieve_top20"][0]["article_id"].isdecimal()


def test_paths_that_match_no_positive_stop_the_run_with_an_example(service, colour_set, tiny_model, capsys):
    argv = flags_of(colour_set, tiny_model)
    with SearchServer(service(lambda name: f"images/{name[1:]}")) as server:
        assert main([*argv, "--search-api-url", server.url]) == 1
    error = capsys.readouterr().err
    assert "0 of 12 rows find a positive among 20 hits, less than --min-positive-found 0.05" in error
    assert "for line 1 it returned images/" in error and "the row has c00.png" in error
    assert not (colour_set / "hn.jsonl").exists()


def test_a_positive_of_an_unusable_row_is_no_negative_of_its_query(mine, service, colour_set):
    """Its image is unknown; the row's path and its ids are not."""
    rows = read(colour_set / "rows.jsonl")
    lost = [
        {"chunk_path": "lost/c05.png"},
        {"chunk_path": "nowhere.png", "article_id": "06", "tile_index": 0, "chunk_index": 0},
    ]
    write_rows(colour_set / "rows.jsonl", [*({"query": rows[0]["query"], **row} for row in lost), *rows])
    plain = service(lambda name: f"/index/lost/{name}")

    def with_ids(request):
        ids = {"tile_index": 0, "chunk_index": 0}
        return [[hit | ids | {"article_id": hit["path"][-6:-4]} for hit in hits] for hits in plain(request)]

    with SearchServer(with_ids) as server:
        mined, stats = mine(search_api_url=server.url, num_negatives=20, max_bad_fraction=0.2)
        assert server.requests[0].body["n_docs"] == 23  # those positives take no places either
    assert stats["rows"]["bad"] == 2
    names = [{Path(path).name for path in row["neg_chunk_paths"]} for row in mined]
    assert len(names[0]) == 9 and not {"c00.png", "c05.png", "c06.png"} & names[0]
    assert all(len(found) == 11 for found in names[1:])  # other queries lose nothing


@pytest.mark.parametrize("root", ["", "{root}/"], ids=["relative", "absolute"])
def test_a_hit_whose_file_is_here_and_differs_is_not_the_positive_of_that_name(mine, service, colour_set, root):
    (colour_set / "other").mkdir()
    Image.new("RGB", (64, 64), (9, 99, 199)).save(colour_set / "other" / "c00.png")
    wanted, _ = mine(corpus=colour_set, num_negatives=20)
    names = [*(f"c{n:02d}.png" for n in range(12)), "other/c00.png"]
    prefix = root.replace("{root}", str(colour_set))
    with SearchServer(service(lambda name: prefix + name, names=names)) as server:
        found, _ = mine(search_api_url=server.url, num_negatives=20, output=colour_set / "served.jsonl")
    assert any(path.endswith("other/c00.png") for path in found[0]["neg_chunk_paths"])
    assert found[0]["positive_rank"] == wanted[0]["positive_rank"]
    assert found[0]["positive_score"] == pytest.approx(wanted[0]["positive_score"], abs=1e-5)


def test_a_service_that_is_not_well_stops_the_run_before_anything_is_loaded_or_written(
    service, colour_set, tiny_model, capsys
):
    argv, before = flags_of(colour_set, tiny_model), sorted(colour_set.rglob("*"))
    with SearchServer(service(), health=Played({"status": "loading"})) as server:
        assert main([*argv, "--search-api-url", server.url, "--model", str(colour_set / "no model")]) == 1
    assert "/health answered {'status': 'loading'}" in capsys.readouterr().err
    assert sorted(colour_set.rglob("*")) == before
    with SearchServer(service()) as server:
        assert main([*argv, "--search-api-url", server.url]) == 0


def test_a_complete_run_needs_no_service(service, colour_set, tiny_model, capsys, quick):
    with SearchServer(service()) as server:
        argv = flags_of(colour_set, tiny_model, search_api_url=server.url)
        assert main(argv) == 0
    assert main([*argv, "--resume"]) == 0 and "is complete" in capsys.readouterr().out


def test_rows_whose_positive_a_service_did_not_find_are_counted_as_unfiltered(mine, service, colour_set):
    with SearchServer(service()) as server:
        rows, stats = mine(search_api_url=server.url, n_docs=3, filter_mode="perc", num_negatives=2)
    assert stats["rows"]["unfiltered"] == sum(row["positive_score"] is None for row in rows) > 0
    assert stats["rows"]["positive_retrieved"] == sum(row["positive_rank"] is not None for row in rows) > 0


def test_paths_of_a_service_lead_from_the_output_to_their_files_where_these_are_here(mine, service, colour_set):
    with SearchServer(service()) as server:
        rows, _ = mine(search_api_url=server.url, output=colour_set / "deep" / "er" / "hn.jsonl")
    assert all(path.startswith("../../c") for row in rows for path in row["neg_chunk_paths"])


def many_rows(folder: Path, count: int) -> None:
    rows = [{"query": f"query {n}", "chunk_path": f"c{n % 12:02d}.png"} for n in range(count)]
    write_rows(folder / "rows.jsonl", rows)


def test_batches_hold_at_most_32_queries_and_every_distinct_text_once(mine, service, colour_set):
    many_rows(colour_set, 70)
    rows = read(colour_set / "rows.jsonl")
    write_rows(colour_set / "rows.jsonl", rows + rows[:5])
    with SearchServer(service()) as server:
        mined, _ = mine(search_api_url=server.url)
        assert [len(request.body["queries"]) for request in server.requests] == [32, 32, 6]
    assert len(mined) == 75


def test_a_batch_that_fails_in_the_end_fails_its_rows_by_name_and_resume_asks_for_them_alone(
    service, colour_set, tiny_model, capsys, quick
):
    """No row gets an empty list because the service was away."""
    many_rows(colour_set, 70)
    search, broken = service(), [True]

    def reply(request):
        return Played("busy", 503) if broken[0] and len(request.body["queries"]) == 6 else search(request)

    argv = flags_of(colour_set, tiny_model, max_bad_fraction=0.2)
    with SearchServer(reply) as server:
        argv += ["--search-api-url", server.url]
        assert main(argv) == 0
        assert len(read(colour_set / "hn.jsonl")) == 64 and "6 failed" in capsys.readouterr().out
        bad = read(colour_set / "hn.bad_rows.jsonl")
        assert [row["line"] for row in bad] == list(range(65, 71))
        assert "its search failed: 6 tries failed, the last: answered 503 busy" in bad[0]["reason"]
        assert not json.loads((colour_set / "hn.stats.json").read_text())["completed"]
        broken[0], num_before = False, server.num_calls
        assert main([*argv, "--resume"]) == 0
        assert server.num_calls == num_before + 1
    rows = read(colour_set / "hn.jsonl")
    assert len(rows) == 70 and all(len(row["neg_chunk_paths"]) == 3 for row in rows)
    assert not (colour_set / "hn.bad_rows.jsonl").exists()


def test_a_service_that_goes_away_stops_the_run_above_the_bad_fraction(service, colour_set, tiny_model, capsys, quick):
    many_rows(colour_set, 200)
    search = service()
    with SearchServer(lambda request: search(request) if request.number < 2 else Played("", 502)) as server:
        assert main([*flags_of(colour_set, tiny_model), "--search-api-url", server.url]) == 1
        assert server.num_calls == 2 + 6  # it does not try every further batch in vain
    error = capsys.readouterr().err
    assert "32 of 200 rows cannot be used" in error and "first line 65" in error and "answered 502" in error
    assert not (colour_set / "hn.jsonl").exists()


@pytest.mark.slow
def test_killed_while_searching_the_second_start_asks_only_for_the_rest(service, colour_set, tiny_model):
    """O20."""
    many_rows(colour_set, 32 * 5)
    search, delay_s = service(), [0.4]

    def reply(request):
        time.sleep(delay_s[0])
        return search(request)

    with SearchServer(reply) as server:
        argv = flags_of(colour_set, tiny_model, batch_size=64, search_api_url=server.url)
        process = spawn(ROOT / "mine_hard_negatives.py", *argv)
        while server.num_calls < 3:
            assert process.poll() is None, finish(process)
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert finish(process)[0] == 130
        delay_s[0] = 0
        assert main([*argv, "--resume"]) == 0
        asked = Counter(json.dumps(query) for request in server.requests for query in request.body["queries"])
        assert len(asked) == 160 and sum(asked.values()) <= 160 + 32  # the batch in flight
    assert len(read(colour_set / "hn.jsonl")) == 160
    stats = json.loads((colour_set / "hn.stats.json").read_text())
    assert stats["search"]["resumed"] >= 64 and stats["search"]["resumed"] + stats["search"]["queries"] == 160
