"""What a search loses, against the definitions in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memstore import quality
from memstore.interfaces import VectorIndex
from memstore.quality import Quality, exact, measure
from memstore.vectors import padded
from memstore_backends.exact import ExactIndex


class Found(VectorIndex):
    """An index that finds what it was told, whatever is asked."""

    def __init__(self, ids):
        super().__init__()
        self.ids = ids

    def build(self, blocks):
        raise AssertionError("never built")

    def search(self, queries, k):
        ids = self.ids[: len(queries), :k]
        return padded(torch.zeros(ids.shape), ids, k)


def blocks(seed, sizes, width, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, width, generator=generator) * scale for size in sizes]


def judge(index, keys, values, queries, k) -> Quality:
    return measure(index, keys, values, queries, k, exact(keys, values, queries, k))


def by_definition(keys, values, queries, k, found):
    """The same five numbers in float64, from one matrix of all scores. found: ids of each query, none twice."""
    keys, values, queries = (x.double().numpy() for x in (torch.cat(keys), torch.cat(values), queries))
    scores = queries @ keys.T
    weights = np.exp(scores - scores.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    rows: dict[str, list[float]] = {name: [] for name in ("recall", "mass", "exact_mass", "error", "error_to_all")}
    for score, weight, ids in zip(scores, weights, found, strict=True):
        best = np.argsort(-score)[:k]
        outputs = [
            weight[chosen] @ values[chosen] / weight[chosen].sum() if len(chosen) else np.zeros(values.shape[1])
            for chosen in (np.array(ids, dtype=int), best, np.arange(len(keys)))
        ]
        rows["recall"].append(len(set(ids) & set(best.tolist())) / len(best))
        rows["mass"].append(weight[ids].sum())
        rows["exact_mass"].append(weight[best].sum())
        for name, reference in (("error", outputs[1]), ("error_to_all", outputs[2])):
            rows[name].append(float(np.linalg.norm(outputs[0] - reference) / np.linalg.norm(reference)))
    return {name: float(np.mean(each)) for name, each in rows.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 7, 40])
def test_every_number_is_that_of_its_definition(monkeypatch, dtype, k):
    monkeypatch.setattr(quality, "QUERY_CHUNK", 5)  # so that queries are taken in several goes
    monkeypatch.setattr(quality, "ROW_CHUNK", 400)
    keys = [block.to(dtype) for block in blocks(0, (23, 17), 12)]
    values = [block.to(dtype) for block in blocks(1, (23, 17), 9)]
    queries = blocks(2, (13,), 12, 0.7)[0]
    generator = torch.Generator().manual_seed(3)
    found = torch.stack([torch.randperm(40, generator=generator)[:k] for _ in queries])
    found[1] = -1  # nothing found
    found[2, 0] = -1
    measured = judge(Found(found), keys, values, queries, k)
    expected = by_definition(keys, values, queries, k, [[i for i in ids if i >= 0] for ids in found.tolist()])
    assert {name: getattr(measured, name) for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert measured.kept == pytest.approx(expected["mass"] / expected["exact_mass"], rel=1e-4)
    assert measured.num_queries == 13 and measured.wall_us > 0 and measured.cpu_us > 0


def test_a_key_that_is_found_twice_counts_once():
    keys, queries = blocks(0, (30,), 8), blocks(1, (4,), 8)[0]
    best = (queries @ keys[0].T).topk(3).indices
    once = judge(Found(torch.nn.functional.pad(best[:, :1], (0, 2), value=-1)), keys, keys, queries, 3)
    twice = judge(Found(best[:, :1].repeat(1, 3)), keys, keys, queries, 3)
    assert twice.recall == once.recall == pytest.approx(1 / 3)
    assert (twice.mass, twice.error) == (once.mass, once.error)


def test_equal_scores_count_as_found():
    """Of ten equal keys any three are as good as any others; ids say nothing."""
    keys = [torch.ones(10, 4), torch.zeros(5, 4)]
    found = Found(torch.tensor([[7, 8, 9]]))
    measured = judge(found, keys, keys, torch.full((1, 4), 0.5), 3)
    assert [measured.recall, measured.kept, measured.error] == pytest.approx([1, 1, 0], abs=1e-6)
    below = judge(Found(torch.tensor([[7, 8, 12]])), keys, keys, torch.full((1, 4), 0.5), 3)
    assert below.recall == pytest.approx(2 / 3)


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    width=st.integers(1, 9),
    k=st.integers(1, 70),
    scale=st.sampled_from([0.0, 0.1, 1.0, 10.0]),
    seed=st.integers(0, 1000),
)
def test_an_exact_index_loses_nothing(sizes, width, k, scale, seed):
    keys, values = blocks(seed, sizes, width), blocks(seed + 1, sizes, 5)
    queries = blocks(seed + 2, (6,), width, scale)[0]
    index = ExactIndex()
    index.build(keys)
    measured = judge(index, keys, values, queries, k)
    assert measured.recall == 1
    assert measured.kept == pytest.approx(1, abs=1e-5)
    assert measured.mass == pytest.approx(measured.exact_mass, abs=1e-5)
    if scale:  # else all scores are equal, and another choice of keys is as good
        assert measured.error < 1e-3
    more = judge(index, keys, values, queries, k + 1)
    assert more.mass >= measured.mass - 1e-5
    if k >= sum(sizes):
        assert measured.mass == pytest.approx(1, abs=1e-5)
        assert measured.error_to_all < 1e-3


def test_the_mean_counts_queries():
    one = Quality(num_queries=1, recall=1, mass=0.8, exact_mass=0.8, error=0, error_to_all=0.4, wall_us=4, cpu_us=8)
    three = Quality(num_queries=3, recall=0.6, mass=0.4, exact_mass=0.8, error=0.4, error_to_all=0, wall_us=8, cpu_us=4)
    both = quality.mean([one, three])
    assert both.num_queries == 4
    assert (both.recall, both.mass, both.exact_mass, both.kept) == pytest.approx((0.7, 0.5, 0.8, 0.625))
    assert (both.error, both.error_to_all, both.wall_us, both.cpu_us) == pytest.approx((0.3, 0.1, 7, 5))
