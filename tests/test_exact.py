"""The exact index against numpy: the right keys, whatever their dtype and however they lie in blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pydantic import ValidationError

import memstore
from memstore.config import load as load_config
from memstore.errors import ConfigError, IndexBuildError, QueryError
from memstore.indexes import open_index
from memstore_backends import exact
from memstore_backends.exact import ExactIndex
from tests.models import build, tokens

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ROUNDING = {torch.float32: 1e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
CUTS = [[500], [1, 499], [499, 1], [100] * 5, [7, 300, 64, 129]]
WIDTH = 24

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def random(rows, seed=0, dtype=torch.float32, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, WIDTH, generator=generator) * size).to(dtype)


def built(blocks, **options):
    index = ExactIndex(ExactIndex.Options(**options))
    index.build(blocks)
    return index


def check(index, keys, queries, k):
    """Every key that is clearly among the best is found, in order, with its score; nothing else but near ties."""
    scores, ids = index.search(queries, k)
    assert (scores.dtype, ids.dtype) == (torch.float32, torch.int64)
    assert scores.shape == ids.shape == (len(queries), k)
    truth = queries.double().cpu().numpy() @ keys.double().cpu().numpy().T
    scores, ids = scores.double().cpu().numpy(), ids.cpu().numpy()
    found = min(k, len(keys))
    lengths = np.linalg.norm(queries.double().cpu().numpy(), axis=1, keepdims=True)
    slack = ROUNDING[keys.dtype] * np.linalg.norm(keys.double().cpu().numpy(), axis=1).max() * lengths
    best = -np.sort(-truth, axis=1)[:, :found]
    chosen = np.take_along_axis(truth, ids[:, :found], axis=1)
    assert (np.abs(chosen - best) <= slack).all() and (np.abs(scores[:, :found] - chosen) <= slack).all()
    assert (np.diff(scores[:, :found], axis=1) <= 0).all()
    assert all(len(set(row)) == found for row in ids[:, :found].tolist())
    assert (ids[:, found:] == -1).all() and np.isneginf(scores[:, found:]).all()
    return ids


@pytest.mark.parametrize("sizes", CUTS, ids=str)
@pytest.mark.parametrize("k", [1, 10, 499, 500, 501, 700])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_best_keys_are_found_as_numpy_finds_them(dtype, k, sizes):
    keys = random(500, dtype=dtype)
    ids = check(built(keys.split(sizes)), keys, random(9, seed=1), k)
    if dtype == torch.float32:  # rounding leaves no doubt about any of them
        truth = random(9, seed=1).double().numpy() @ keys.double().numpy().T
        np.testing.assert_array_equal(ids[:, : min(k, 500)], np.argsort(-truth, axis=1)[:, :k])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [0, 1, exact.QUERIES, exact.QUERIES + 1])
def test_any_number_and_dtype_of_queries(dtype, queries):
    keys = random(100)
    check(built(keys.split([60, 40])), keys, random(queries, seed=2, dtype=dtype), 5)


@pytest.mark.parametrize("scores", [9, 200, 1700, 4500])
@pytest.mark.parametrize("k", [1, 10, 64])
def test_keys_are_scored_in_runs_of_any_length(monkeypatch, scores, k):
    """Blocks are cut or taken together, to hold few scores at once; with gradients wanted, as while training."""
    monkeypatch.setattr(exact, "SCORES", scores)
    keys = random(500)
    check(built(keys.split([7, 300, 64, 129])), keys, random(9, seed=1), k)
    with_gradient = random(9, seed=1).requires_grad_()
    assert not built([keys]).block_maxima(with_gradient, 64).requires_grad
    ids = built(keys.split([100] * 5)).search(with_gradient, k)[1]
    np.testing.assert_array_equal(ids, np.argsort(-(with_gradient @ keys.T).detach().numpy(), axis=1)[:, :k])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("key_size", "query_size"), [(1, 1e6), (1e3, 1e3), (3e3, 1e30), (1e-3, 1e-6), (1, 0)])
def test_numbers_of_any_size_keep_their_order(dtype, key_size, query_size):
    """A half ends at 65,504, and so would scores that are computed in it as they are."""
    keys = random(200, dtype=dtype, size=key_size)
    index, queries = built([keys]), random(6, seed=3, size=query_size)
    scores, _ = index.search(queries, 5)
    assert scores.isfinite().all()
    check(index, keys, queries, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scores", [200, 1 << 24])
def test_the_sum_over_all_keys_is_that_of_the_scores_it_gives(monkeypatch, dtype, scores):
    """Also of scores so large that their exponentials are not numbers."""
    monkeypatch.setattr(exact, "SCORES", scores)
    keys, queries = torch.randn(500, 16).to(dtype), torch.randn(3, 16) * torch.tensor([[0.1], [1.0], [90.0]])
    index = ExactIndex()
    index.build(keys.split(130))
    all_scores, _ = index.search(queries, 500)
    *found, log_sum = index.search_and_sum(queries, 20)
    assert all(map(torch.equal, found, index.search(queries, 20)))
    assert torch.allclose(log_sum.double(), all_scores.double().logsumexp(1), rtol=1e-6, atol=1e-5)


def test_equal_keys_are_found_once_each_and_always_alike():
    keys = random(10).repeat(30, 1)
    ids = check(built(keys.split([150, 150])), keys, random(4, seed=1), 30)
    again = check(built(keys.split([150, 150])), keys, random(4, seed=1), 30)
    np.testing.assert_array_equal(ids, again)
    assert all(len(set((row % 10).tolist())) == 1 for row in ids)  # the thirty copies of one key


def test_the_index_holds_the_blocks_of_the_store_and_no_copy(tmp_path):
    with memstore.open(tmp_path / "library") as library:
        memory = library.encode(build("bart"), input_ids=tokens(300), name="doc")
        with memory.open() as opened:
            blocks = opened.blocks("hidden")
            index = open_index(opened, "exact").indexes["hidden"]
            assert isinstance(index, ExactIndex) and type(open_index(opened).indexes["hidden"]) is ExactIndex
            held = [block.data_ptr() for block in index.blocks]
            assert held == [block.data_ptr() for block in opened.blocks("hidden")]
            before = torch.cat(blocks).clone()
            index.search(torch.randn(3, 48), 7)
            assert torch.equal(torch.cat(opened.blocks("hidden")), before)


@pytest.mark.parametrize("blocks", [[], [torch.empty(0, WIDTH)], [random(3), torch.empty(0, WIDTH)]])
def test_an_index_without_keys_is_refused(blocks):
    with pytest.raises(IndexBuildError, match="at least one key"):
        built(blocks)


@pytest.mark.parametrize("k", [0, -1, True, 2.0, "3", None])
def test_a_wrong_k_is_refused(k):
    with pytest.raises(QueryError, match=f"k={k!r} must be a whole number of at least 1"):
        built([random(10)]).search(random(2), k)


@pytest.mark.parametrize(
    ("queries", "message"),
    [
        (torch.randn(2, WIDTH + 1), "shape \\(2, 25\\); this index holds keys of width 24"),
        (torch.randn(WIDTH), "shape \\(24,\\)"),
        (torch.randn(1, 2, WIDTH), "shape \\(1, 2, 24\\)"),
        (torch.ones(2, WIDTH, dtype=torch.float64), "finite float32, float16 or bfloat16 numbers.*float64"),
        (torch.ones(2, WIDTH, dtype=torch.int64), "int64"),
        (torch.full((2, WIDTH), torch.nan), "finite"),
        (torch.full((2, WIDTH), -torch.inf), "finite"),
    ],
    ids=["width", "flat", "deep", "double", "whole", "nan", "infinite"],
)
def test_wrong_queries_are_refused(queries, message):
    with pytest.raises(QueryError, match=message):
        built([random(10)]).search(queries, 3)


@pytest.mark.parametrize(
    "blocks",
    [
        [random(3)[:, 0]],
        [random(3), random(3)[:, :5]],
        [random(3), random(3).half()],
        [random(3).double()],
    ],
    ids=["flat", "widths", "dtypes", "double"],
)
def test_wrong_keys_are_refused(blocks):
    with pytest.raises(IndexBuildError, match="one width and one dtype.*these are \\[n, .*float"):
        built(blocks)


def test_an_option_that_does_not_exist_is_refused(monkeypatch):
    monkeypatch.setenv("MEMSTORE__INDEX__OPTIONS__NPROBE", "8")
    with pytest.raises(ConfigError, match="(?i)nprobe"):
        load_config().index_plugin()


def test_keys_are_brought_to_the_device_of_the_options():
    index = built([random(10)], device="cpu")
    assert index.blocks[0].device.type == "cpu" and index.search(random(2), 3)[1].device.type == "cpu"
    with pytest.raises(ValidationError, match="cannot be brought to such a device; use 'cpu', 'cuda'"):
        built([random(10)], device="gpu")
    with pytest.raises(ValidationError, match="cannot be brought to such a device"):
        built([random(10)], device="meta")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU")
def test_a_device_that_is_not_there_is_named():
    with pytest.raises(IndexBuildError, match="cannot be brought to device 'cuda:0': "):
        built([random(10)], device="cuda:0")


@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu(dtype):
    keys = random(500, dtype=dtype).cuda()
    index = built(keys.split([7, 300, 64, 129]))
    check(index, keys, random(9, seed=1).cuda(), 10)
    check(index, keys, random(9, seed=1).cuda(), 600)
    assert index.search(random(2).cuda(), 3)[1].device.type == "cuda"


@needs_gpu
@pytest.mark.parametrize(("keys", "device"), [("cpu", "cuda"), ("cuda", None), ("cpu", None), ("cuda", "cpu")])
@pytest.mark.parametrize("queries", ["cpu", "cuda"])
def test_results_are_where_the_queries_are(keys, device, queries):
    index = built([random(500).to(keys)], device=device)
    assert index.blocks[0].device.type == (device or keys)
    asked = random(9, seed=1).to(queries)
    check(index, random(500), asked, 10)
    for result in (*index.search(asked, 10), index.block_maxima(asked, 64)):
        assert result.device.type == queries
