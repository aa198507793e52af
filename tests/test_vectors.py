"""Reading keys block by block: nothing is lost, copied without need, or left to chance."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from memstore import vectors
from memstore.errors import IndexBuildError, QueryError
from memstore.vectors import Rows, checked_queries, float_chunks, largest, padded, sample

KEYS = torch.arange(240.0).view(60, 4) - 100
sizes = st.lists(st.integers(1, 30), min_size=1, max_size=8)


@given(sizes, st.sampled_from([1, 10, 33, 10_000]), st.sampled_from(vectors.DTYPES))
def test_chunks_are_the_keys_in_order(sizes, chunk, dtype):
    keys = torch.arange(4.0 * sum(sizes)).view(-1, 4)[:, :3].to(dtype)
    before, vectors.CHUNK = vectors.CHUNK, chunk
    try:
        chunks = list(float_chunks(keys.split(sizes)))
    finally:
        vectors.CHUNK = before
    assert torch.equal(torch.cat([part for _, part in chunks]), keys.float())
    assert all(torch.equal(part, keys[start : start + len(part)].float()) for start, part in chunks)
    assert all(part.is_contiguous() and len(part) <= max(1, chunk // 3) for _, part in chunks)


def test_a_chunk_of_contiguous_float32_is_no_copy():
    ((start, chunk),) = float_chunks([KEYS])
    assert start == 0 and chunk.data_ptr() == KEYS.data_ptr()


def test_the_largest_number_is_found_whatever_its_sign():
    assert largest(KEYS.split(7)) == 139
    assert largest((-2 * KEYS).split(7)) == 278
    assert largest([torch.zeros(2, 3)]) == 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite_are_refused(value):
    keys = KEYS.clone()
    keys[59, 3] = value
    for read in (largest, lambda blocks: list(float_chunks(blocks))):
        with pytest.raises(IndexBuildError, match="NaN or infinite"):
            read(keys.split(7))


@given(sizes, st.integers(0, 300), st.integers(0, 3))
def test_a_sample_is_some_of_the_keys_whatever_their_blocks(sizes, size, seed):
    n = sum(sizes)
    keys = torch.arange(4.0 * n).view(n, 4)
    rows = sample(keys.split(sizes), size, seed)
    ids = (rows[:, 0] / 4).long()
    assert torch.equal(keys[ids], rows) and len(rows) == min(n, size)
    assert (ids.diff() > 0).all()  # each key once
    assert torch.equal(rows, sample([keys], size, seed))


def test_another_seed_takes_another_sample():
    assert not torch.equal(sample([KEYS], 20, 0), sample([KEYS], 20, 1))


@pytest.mark.parametrize("dtypes", [(0, 1), (1, 0), (1, 2), (2, 1, 0)], ids=str)
def test_rows_of_blocks_of_several_dtypes_keep_their_numbers(dtypes):
    blocks = [(KEYS / 7).to(vectors.DTYPES[dtype]) for dtype in dtypes]
    ids = torch.tensor([61, 3, 60 * len(blocks) - 1, 0, 59, 60, 3])
    assert torch.equal(Rows(blocks)(ids), torch.cat([block.float() for block in blocks])[ids])


@pytest.mark.parametrize("dtype", vectors.DTYPES, ids=str)
def test_queries_are_checked_without_their_gradient(dtype):
    queries = torch.ones(2, 3, dtype=dtype, requires_grad=True)
    assert torch.equal(checked_queries(queries, 3, 1), torch.ones(2, 3))
    assert not checked_queries(queries, 3, 1).requires_grad


@pytest.mark.parametrize("score", [torch.inf, -torch.inf, torch.nan])
def test_a_score_beyond_float32_is_no_score(score):
    ids = torch.tensor([[4, -1]])
    assert padded(torch.tensor([[1.0, -torch.inf]]), ids, 3)[1].tolist() == [[4, -1, -1]]
    with pytest.raises(QueryError, match="too large"):
        padded(torch.tensor([[score, -torch.inf]]), ids, 3)


@pytest.mark.parametrize("k", [2**45, 2**60, 2**70])
def test_more_slots_than_memory_holds_are_refused(k):
    with pytest.raises(QueryError, match="do not fit into memory"):
        padded(torch.ones(3, 1), torch.zeros(3, 1, dtype=torch.int64), k)
