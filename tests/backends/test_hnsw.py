"""What is special to the graph of hnswlib: its recall, what it does not save, and what it keeps to itself."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from memstore.errors import IndexBuildError, QueryError
from memstore.testing.processes import in_another_process
from memstore_backends.hnsw import HnswIndex
from tests.backends.making import built, check_errors_of_files, digest_of_a_build, exact_ids, mismatched, recall

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


@every_dtype
@pytest.mark.parametrize("mean", [0, 4])
def test_most_of_what_is_best_is_found(mean, dtype):
    """Also of keys that have much in common: linked by inner product, half of them could not be reached."""
    keys, queries = mismatched(4000, mean=mean)
    keys = keys.to(dtype)
    scores, ids = built(HnswIndex, keys.split(1500)).search(queries, 50)
    assert recall(ids, exact_ids(keys, queries, 50)) >= 0.95
    true = (queries.double() @ keys.double().T).gather(1, ids)
    torch.testing.assert_close(scores.double(), true, rtol=1e-5, atol=1e-5 * float(true.abs().max()))
    assert (scores.diff(dim=1) <= 0).all()


def test_a_wider_view_finds_more_in_an_index_that_exists():
    keys, queries = mismatched(4000)
    index = built(HnswIndex, [keys], m=6)
    found = []
    for ef_search in (1, 2000):
        index.options = index.options.model_copy(update={"ef_search": ef_search})
        found.append(recall(index.search(queries, 10)[1], exact_ids(keys, queries, 10)))
    assert found[0] < 0.9 and found[1] >= 0.98


@every_dtype
@pytest.mark.parametrize("n", [1, 2, 15, 40])
def test_few_keys_are_all_found_without_a_warning(dtype, n, capfd):
    keys, queries = mismatched(n, d=5)
    keys = keys.to(dtype)
    scores, ids = built(HnswIndex, [keys]).search(queries, n + 3)
    np.testing.assert_array_equal(ids[:, :1], exact_ids(keys, queries, 1))
    assert (ids[:, :n].sort(dim=1).values == torch.arange(n)).all()
    assert (ids[:, n:] == -1).all() and (scores[:, n:] == -torch.inf).all()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("k", [700, 2000])
def test_more_keys_than_the_graph_leads_to_are_found(k):
    keys, queries = mismatched(2000, spread=1)
    index = built(HnswIndex, [keys], m=2, ef_construction=1)
    index._index.set_ef(2000)
    with pytest.raises(RuntimeError, match="Cannot return the results"):  # what the test is about
        index._index.knn_query(np.zeros((1, 33), "f"), k)
    scores, ids = index.search(queries, k)
    best = exact_ids(keys, queries, k)
    assert recall(ids, best) > 0.999
    truth = queries.double().numpy() @ keys.double().numpy().T
    np.testing.assert_allclose(scores, np.take_along_axis(truth, best, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("key_size", "query_size"), [(1e-12, 1), (1e-3, 1e-6), (1e-3, 1e30), (1e6, 1e-20), (1e15, 1e15), (1, 0)]
)
def test_numbers_of_any_size_keep_their_order(key_size, query_size, tmp_path):
    """hnswlib computes 1 - score, in which small scores would all be 1."""
    keys, queries = mismatched(2000)
    index = built(HnswIndex, [keys * key_size])
    index.save(tmp_path / "index")
    loaded = HnswIndex()
    loaded.load(tmp_path / "index")
    for each in (index, loaded):
        scores, ids = each.search(queries * query_size, 50)
        best = (queries.double() @ keys.double().T).amax(1) * key_size * query_size
        torch.testing.assert_close(scores[:, 0].double(), best, rtol=1e-5, atol=0)
        if query_size:
            assert recall(ids, exact_ids(keys, queries, 50)) >= 0.97


def test_keys_that_are_alike_fill_every_slot():
    queries = torch.randn(4, 8)
    for keys in (torch.zeros(1000, 8), torch.randn(10, 8).repeat(100, 1)):
        scores, ids = built(HnswIndex, [keys]).search(queries, 150)
        assert all(len(set(row)) == 150 for row in ids.tolist())
        assert scores.isfinite().all()


def test_numbers_as_large_as_there_are_give_scores_or_an_error():
    keys, queries = (10 * torch.rand(500, 32, generator=torch.Generator().manual_seed(i)) for i in (0, 1))
    keys, queries = 3e37 * keys, queries[:9] + 1
    index = built(HnswIndex, [keys])
    scores, _ = index.search(1e-20 * queries, 500)
    truth = (1e-20 * queries.double()) @ keys.double().T
    torch.testing.assert_close(scores.double(), truth.topk(500).values, rtol=1e-4, atol=0)
    with pytest.raises(QueryError, match="too large"):
        index.search(queries, 3)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_keys_that_are_not_finite_are_refused(value):
    keys = torch.randn(300, 8)
    keys[299, 7] = value
    with pytest.raises(IndexBuildError, match="finite"):
        built(HnswIndex, keys.split(150))


@pytest.mark.parametrize(
    "options",
    [
        {"m": 1},
        {"ef_construction": 0},
        {"ef_search": 0},
        {"seed": -1},
        {"ef_construction": 2**64},
        {"ef_search": 2**64},
    ],
    ids=str,
)
def test_wrong_options_are_refused(options):
    with pytest.raises(ValidationError, match=next(iter(options))):
        HnswIndex.Options(**options)


def test_with_one_thread_another_process_builds_the_same(tmp_path):
    assert torch.get_num_threads() == 1
    here = digest_of_a_build(HnswIndex, torch.float32, tmp_path / "here")
    assert here == in_another_process(digest_of_a_build, HnswIndex, torch.float32, tmp_path / "there")


def test_what_cannot_be_written_or_read_is_an_error_of_the_system(tmp_path):
    """hnswlib says nothing of it."""
    check_errors_of_files(built(HnswIndex, [mismatched(30)[0]]), tmp_path, 30)


def test_searches_of_several_threads_do_not_disturb_each_other(monkeypatch):
    """One with a narrow view is held between choosing it and searching, while one with a wide view wants to start."""
    keys, queries = mismatched(2000)
    index = built(HnswIndex, [keys], ef_search=10)
    expected = {k: index.search(queries, k)[1] for k in (10, 900)}
    inner, found = index._index, {}
    waiting = threading.Thread(target=lambda: found.update({900: index.search(queries, 900)[1]}))

    class Interrupted:
        def set_ef(self, ef):
            inner.set_ef(ef)
            if ef == 10:
                waiting.start()
                waiting.join(0.5)

        def __getattr__(self, name):
            return getattr(inner, name)

    monkeypatch.setattr(index, "_index", Interrupted())
    found[10] = index.search(queries, 10)[1]
    waiting.join()
    assert all(torch.equal(found[k], ids) for k, ids in expected.items())
    assert not torch.equal(expected[10], expected[900][:, :10])  # the view matters here
