"""What is special to scanning principal components: what they find in keys that differ along few directions."""

from __future__ import annotations

import pytest
import torch

from memstore_backends.faiss_pca import FaissPcaIndex, principal
from tests.backends.making import built, exact_ids, recall

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def alike(n, d=64, directions=4, noise=0.05, seed=0):
    """Keys [n, d] that have much in common and differ along few directions, and queries [20, d]."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.randn(directions, d, generator=generator)
    keys = torch.randn(n, directions, generator=generator) @ basis + noise * torch.randn(n, d, generator=generator)
    return keys + 5 * torch.randn(d, generator=generator), torch.randn(20, d, generator=generator)


@every_dtype
def test_most_of_what_is_best_is_found(dtype):
    keys, queries = alike(5000)
    keys = keys.to(dtype)
    scores, ids = built(FaissPcaIndex, keys.split(1700)).search(queries, 50)
    assert recall(ids, exact_ids(keys, queries, 50)) >= 0.97
    true = (queries.double() @ keys.double().T).gather(1, ids)
    torch.testing.assert_close(scores.double(), true, rtol=1e-2, atol=1e-2 * float(true.abs().max()))
    assert (scores.diff(dim=1) <= 0).all()


def test_a_key_that_is_asked_for_is_found_among_keys_unlike_it():
    keys, _ = alike(20_000)
    keys[12_345] = 8 * (keys[0] - keys.mean(0)) + keys.mean(0)
    query = (keys[12_345] - keys.mean(0))[None]
    assert built(FaissPcaIndex, [keys]).search(query, 1)[1].item() == exact_ids(keys, query, 1).item() == 12_345


def test_a_larger_factor_finds_more_in_an_index_that_exists():
    keys, queries = alike(5000, directions=30)
    index = built(FaissPcaIndex, [keys])
    found = []
    for k_factor in (1, 8, 200):  # the last one is more than there are keys
        index.options = index.options.model_copy(update={"k_factor": k_factor})
        found.append(recall(index.search(queries, 50)[1], exact_ids(keys, queries, 50)))
    assert found[0] < found[1] < found[2] == 1


def test_more_components_find_more():
    keys, queries = alike(5000, directions=30)
    exact = exact_ids(keys, queries, 50)
    found = [
        recall(built(FaissPcaIndex, [keys], components=number).search(queries, 50)[1], exact) for number in (2, 16, 34)
    ]
    assert found[0] < 0.5 < found[1] < 0.97 <= found[2]


def test_directions_are_the_widest_first():
    generator = torch.Generator().manual_seed(0)
    widths = torch.tensor([1.0, 5.0, 0.1, 2.0])
    directions = principal(torch.randn(4000, 4, generator=generator) * widths + 100)
    assert directions.abs().argmax(0).tolist() == [1, 3, 0, 2]
    torch.testing.assert_close(directions.T @ directions, torch.eye(4))
