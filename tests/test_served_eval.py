"""Evaluation through a search service, a real local server: failures are no misses, metrics as on a local corpus."""

from __future__ import annotations

import json
import math
import re
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contrastors import search_api
from contrastors.metrics import query_metrics
from contrastors.search_api import SearchClient, SearchStopped
from contrastors.served import ServedPositive
from contrastors.served_eval import (
    METRICS,
    N_DOCS,
    NPROBE,
    ServedEvalSet,
    evaluate_service,
    hit_metrics,
    read_served_eval_set,
    service_line,
)
from tests.conftest import write_rows
from tests.judge_server import Played
from tests.runs import ROOT, arguments, metrics, train
from tests.search_server import SearchServer, index_of

NUM, SIZE = 40, 8
SICK = Played({"error": "busy"}, status=503)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(search_api, "retry_delay", lambda attempt, headers: 0.001)


@pytest.fixture(scope="module")
def index():
    """Unit vectors, what the service tells of each document, and a search of them."""
    vectors = np.random.default_rng(0).normal(size=(NUM, SIZE)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    entries = [{"path": f"tiles/{number}.png"} for number in range(NUM)]
    return vectors, index_of(vectors, entries)


def eval_set(positives: list[list[int]]) -> ServedEvalSet:
    served = [[ServedPositive(f"/data/tiles/{n}.png", f"tiles/{n}.png", None) for n in own] for own in positives]
    return ServedEvalSet([f"query {place}" for place in range(len(positives))], served)


def client_of(server: SearchServer, batch_size: int = 32, max_retries: int = 2) -> SearchClient:
    return SearchClient(server.url, N_DOCS, NPROBE, batch_size, max_retries)


def noisy(vectors: np.ndarray, numbers: list[int], seed: int = 1) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(size=(len(numbers), SIZE)).astype(np.float32)
    return vectors[numbers] + noise


# ----------------------------------------------------------------------------------------------------------- metrics


@given(
    st.integers(1, 60).flatmap(
        lambda count: st.tuples(
            st.permutations(range(count)), st.sets(st.integers(0, count - 1), min_size=1, max_size=12)
        )
    )
)
def test_metrics_of_hits_are_those_of_the_whole_ranking_as_far_as_ten_hits_tell(case):
    order, positives = case
    numbered = {number: place for place, number in enumerate(sorted(positives))}
    found = hit_metrics([{numbered[n]} if n in numbered else set() for n in order[:N_DOCS]], len(positives))
    scores = np.empty(len(order), dtype=np.float32)
    scores[list(order)] = -np.arange(len(order), dtype=np.float32)
    wanted = query_metrics(scores, sorted(positives))
    for name in ("recall@1", "recall@5", "recall@10", "ndcg@10"):
        assert found[name] == pytest.approx(wanted[name]), name
    assert found["mrr@10"] == pytest.approx(wanted["mrr"] if wanted["rank"] <= 10 else 0.0)


def test_a_copy_of_a_positive_that_came_before_gains_nothing():
    once, twice = hit_metrics([{0}, set(), set()], 2), hit_metrics([{0}, {0}, set()], 2)
    assert once == twice and once["ndcg@10"] < 1
    assert hit_metrics([{0}, {1}], 2)["ndcg@10"] == pytest.approx(1)
    assert hit_metrics([], 1) == dict.fromkeys(METRICS, 0.0)


# ----------------------------------------------------------------------------------------------------------- service


def test_a_thousand_queries_go_in_batches_of_32_and_score_like_the_local_corpus(index):
    vectors, search = index
    numbers = np.random.default_rng(2).integers(0, NUM, 1000).tolist()
    queries = noisy(vectors, numbers)
    with SearchServer(search) as server, client_of(server) as client:
        result = evaluate_service(client, eval_set([[n] for n in numbers]), queries)
        sizes = [len(request.body["queries"]) for request in server.requests]
        assert server.requests[0].body["n_docs"] == N_DOCS
    assert sizes == [32] * 31 + [8]
    local = [query_metrics(scores, [n]) for scores, n in zip(queries @ vectors.T, numbers, strict=True)]
    for name in ("recall@1", "recall@5", "recall@10", "ndcg@10"):
        assert result.metrics[name] == pytest.approx(np.mean([found[name] for found in local]))
    assert 0 < result.metrics["recall@1"] < 1
    assert result.metrics["recall@1_low"] < result.metrics["recall@1"] < result.metrics["recall@1_high"]
    assert [result.metrics[name] for name in ("num_queries", "num_failed", "num_short")] == [1000, 0, 0]


def test_failures_are_counted_apart_and_are_no_misses(index):
    vectors, search = index
    numbers = list(range(NUM))

    def reply(request):  # the second batch fails through all its tries, the third once
        texts = json.dumps(request.body["queries"][0])
        tries[texts] = tries.get(texts, 0) + 1
        place = list(tries).index(texts)
        return SICK if place == 1 or (place == 2 and tries[texts] == 1) else search(request)

    tries: dict[str, int] = {}
    with SearchServer(reply) as server, client_of(server, batch_size=8) as client:
        result = evaluate_service(client, eval_set([[n] for n in numbers]), vectors)
        assert client.requests["retries"] == 3
    assert result.metrics["num_failed"] == 8 and result.metrics["recall@1"] == 1.0
    assert [("failure" in row) for row in result.per_query] == [8 <= n < 16 for n in numbers]
    assert "503" in result.failure and "8 searches failed and are not counted as misses" in service_line(result)


def test_a_service_that_is_gone_for_ever_is_not_asked_for_the_rest(index):
    vectors, search = index
    with SearchServer(lambda request: search(request) if request.number < 2 else SICK) as server:
        with client_of(server, batch_size=8) as client:
            client.check()
            server.health = Played({"status": "down"})
            result = evaluate_service(client, eval_set([[n] for n in range(NUM)]), vectors)
        assert server.num_calls == 2 + 3  # one batch, tried three times
    assert result.metrics["num_failed"] == NUM - 16 and result.metrics["recall@1"] == 1.0
    assert result.per_query[-1]["failure"].startswith("not asked:")


def test_where_nothing_was_answered_there_is_no_metric_at_all(index):
    vectors, _ = index
    with SearchServer(lambda request: SICK) as server, client_of(server, max_retries=0) as client:
        result = evaluate_service(client, eval_set([[0], [1]]), vectors[:2])
    assert result.metrics == {"num_queries": 2, "num_failed": 2, "num_short": 0}
    assert "0 of 2 queries answered" in service_line(result)


def test_short_replies_and_paths_that_fit_no_row_are_told(index):
    vectors, search = index
    short = lambda request: [hits[:3] for hits in search(request)]  # noqa: E731
    with SearchServer(short) as server, client_of(server) as client:
        result = evaluate_service(client, eval_set([[n] for n in range(4)]), vectors[:4])
        assert result.metrics["num_short"] == 4 and "4 replies hold fewer than 10 hits" in service_line(result)
        others = ServedEvalSet(["q"], [[ServedPositive("/elsewhere/x.png", "x.png", None)]])
        assert "no positive was found at all" in service_line(evaluate_service(client, others, vectors[:1]))


def test_another_dimension_stops_with_the_reply_of_the_service(index):
    vectors, _ = index
    refused = Played({"error": f"expected {SIZE + 1} numbers"}, status=400)
    with SearchServer(lambda request: refused) as server, client_of(server) as client:
        with pytest.raises(SearchStopped, match=f"expected {SIZE + 1} numbers"):
            evaluate_service(client, eval_set([[0]]), vectors[:1])
        with pytest.raises(SearchStopped, match="not finite"):
            evaluate_service(client, eval_set([[0]]), np.full((1, SIZE), math.nan))


def test_rows_of_one_text_are_one_query_and_images_need_not_be_here(tmp_path):
    ids = {"article_id": 7, "tile_index": 0, "chunk_index": 1}
    rows = [
        {"query": "a", "chunk_path": "x.png"}, {"query": "b", "chunk_path": "y.png", **ids},
        {"query": "a", "chunk_path": "z.png"}, {"query": "a", "chunk_path": "x.png"},
        {"query": "b", "chunk_path": "copy/y.png", **ids},
    ]  # fmt: skip
    data = read_served_eval_set(write_rows(tmp_path / "rows.jsonl", rows))
    assert data.queries == ["a", "b"] and [len(own) for own in data.positives] == [2, 1]
    assert data.positives[1][0].ids == ("7", "0", "1")
    assert read_served_eval_set(tmp_path / "rows.jsonl", 1).queries == ["a"]


# -------------------------------------------------------------------------------------------------------- in training


@pytest.fixture
def served_run(tiny_model, colour_set):
    """run(url, output, **flags): a query-side run that asks a service; and the search of the frozen corpus."""
    from contrastors.batches import ItemDataset
    from contrastors.distributed import World
    from contrastors.evaluation import embed
    from contrastors.loading import load_bi_encoder

    def run(url: str, output: str, **flags) -> int:
        common = {"mode": "query-side-tune", "grad_cache_chunk": None, "search_api_url": url}
        return train(arguments(tiny_model, colour_set, colour_set / output, **(common | flags)))

    import torch

    world = World(0, 1, torch.device("cpu"))
    model, processor = load_bi_encoder(str(tiny_model), world.device, max_num_visual_tokens=16)
    paths = sorted(map(str, colour_set.glob("c*.png")))
    vectors = embed(model.eval(), ItemDataset(processor, "document", paths, 2**62), world, 16, 0).numpy()
    return run, index_of(vectors, [{"path": f"shard/../{path.split('/')[-1]}"} for path in paths]), colour_set


def test_the_service_measures_what_the_local_corpus_does(served_run):
    run, search, folder = served_run
    with SearchServer(search) as server:
        assert run(server.url, "run", search_api_batch_size=5) == 0
        assert {len(request.body["queries"]) for request in server.requests} == {5, 2}
    rows = [row for row in metrics(folder / "run") if "eval/recall@1" in row or "search/recall@1" in row]
    for step in (0, 2, 4):
        found = {key: value for row in rows if row["step"] == step for key, value in row.items()}
        for name in ("recall@1", "recall@5", "recall@10", "ndcg@10"):
            assert found[f"search/{name}"] == pytest.approx(found[f"eval/{name}"]), (step, name)
    written = {
        key.removesuffix("_low").removesuffix("_high") for row in rows for key in row if key.startswith("search/")
    }
    explained = set(re.findall(r"^\| `(search/[^`]+)` ", (ROOT / "docs" / "query_side.md").read_text(), re.MULTILINE))
    assert written == explained
    lines = (folder / "run" / "search_step4.jsonl").read_text().splitlines()
    assert len(lines) == 12 and len(json.loads(lines[0])["hits"]) == N_DOCS


def test_a_service_that_dies_in_mid_run_costs_no_training(served_run, capsys):
    run, search, folder = served_run
    broken = Played({"nonsense": 1})
    with SearchServer(lambda request: search(request) if request.number < 1 else SICK) as server:
        assert run(server.url, "gone") == 0
    text = capsys.readouterr().out
    assert "12 searches failed and are not counted as misses" in text
    assert [row["search/num_failed"] for row in metrics(folder / "gone") if "search/num_failed" in row] == [0, 12, 12]
    with SearchServer(lambda request: search(request) if request.number < 1 else broken) as server:
        assert run(server.url, "broken") == 0
    assert "nothing was measured at the search service" in capsys.readouterr().out


def test_going_back_and_starting_anew_leave_no_results_of_another_future(served_run):
    run, search, folder = served_run
    with SearchServer(search) as server:
        assert run(server.url, "run", max_steps=6) == 0
        for name in ("checkpoint-4", "checkpoint-6"):
            shutil.rmtree(folder / "run" / name)
        assert train(["--resume", "latest", "--output-dir", str(folder / "run"), "--device", "cpu", "--max-steps", "4",
                      "--allow-changed-args"]) == 0  # fmt: skip
        assert [row["step"] for row in metrics(folder / "run") if "search/recall@1" in row] == [0, 2, 4]
        assert sorted(path.name for path in (folder / "run").glob("search_step*")) == [
            f"search_step{step}.jsonl" for step in (0, 2, 4)
        ]
    assert run(None, "run", max_steps=2, overwrite=True) == 0
    assert not list((folder / "run").glob("search_step*"))


def test_a_service_that_cannot_be_used_ends_the_run_before_its_first_step(served_run, capsys):
    run, _, folder = served_run
    refused = Played({"error": "expected 2048 numbers"}, status=400)
    with SearchServer(lambda request: refused) as server:
        assert run(server.url, "run") == 1
        url = server.url
    assert "expected 2048 numbers" in capsys.readouterr().err
    assert run(url, "away", overwrite=True) == 1
    assert "start the service or mend --search-api-url" in capsys.readouterr().err
    assert not list(folder.glob("*/checkpoint-*"))


def test_a_service_that_answers_nothing_ends_the_run_before_its_first_step_and_warns_a_resumed_one(served_run, capsys):
    run, search, folder = served_run
    with SearchServer(lambda request: SICK) as server:
        assert run(server.url, "run") == 1
    assert "not one query was answered" in capsys.readouterr().err
    with SearchServer(search) as server:
        assert run(server.url, "run", max_steps=2, overwrite=True) == 0
    argv = ["--resume", "latest", "--output-dir", str(folder / "run"), "--device", "cpu", "--max-steps", "4"]
    argv += ["--allow-changed-args", "--search-api-url"]
    assert train([*argv, server.url]) == 0  # nobody is there any more
    assert "warning: http://127.0.0.1" in capsys.readouterr().out
    assert (folder / "run" / "checkpoint-4").is_dir()


def test_two_failed_batches_in_a_row_are_enough_however_well_the_service_says_it_is(index):
    vectors, search = index
    with SearchServer(lambda request: SICK) as server, client_of(server, batch_size=8, max_retries=0) as client:
        result = evaluate_service(client, eval_set([[n] for n in range(NUM)]), vectors)
        assert server.num_calls == 2
    assert result.metrics["num_failed"] == NUM and result.failure.startswith("not asked: two batches failed")


def test_a_stop_ends_the_asking(index):
    vectors, search = index
    with SearchServer(search) as server, client_of(server, batch_size=8) as client:
        stop = lambda: 15 if server.num_calls == 2 else 0  # noqa: E731
        result = evaluate_service(client, eval_set([[n] for n in range(NUM)]), vectors, stop_signal=stop)
        assert server.num_calls == 2
    assert result.metrics["num_failed"] == NUM - 16


def test_one_document_known_by_path_and_by_ids_is_one_positive(tmp_path):
    ids = {"article_id": 7, "tile_index": 0, "chunk_index": 1}
    rows = [{"query": "a", "chunk_path": "x.png"}, {"query": "a", "chunk_path": "x.png", **ids}]
    ((positive,),) = read_served_eval_set(write_rows(tmp_path / "rows.jsonl", rows)).positives
    assert positive.ids == ("7", "0", "1")


def test_other_rows_may_be_asked_for(served_run):
    run, search, folder = served_run
    write_rows(folder / "test.jsonl", [{"query": "red", "chunk_path": "c00.png"}])
    with SearchServer(search) as server:
        assert run(server.url, "run", test_jsonl=folder / "test.jsonl", max_steps=2) == 0
    assert len((folder / "run" / "search_step2.jsonl").read_text().splitlines()) == 1
