"""The read by matrix instructions, against float64, and beside the error that storing states in bfloat16 makes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memstore import bfloat16
from memstore.attention import PLAIN, Scoring, merge, normalise, read_all
from memstore.bfloat16 import read_bfloat16, suits
from memstore.provenance.passages import PASSAGE, Tally

tiles = pytest.mark.skipif(not bfloat16.has_tiles(), reason="no AMX: memories are read in float32 there")


def attention(queries, states):
    return (queries.double() @ states.double().T).softmax(-1) @ states.double()


def states_of(n, width, mean, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, width, generator=generator) + mean * torch.randn(width, generator=generator)


def queries_of(m, width, scale, seed=1):
    return torch.randn(m, width, generator=torch.Generator().manual_seed(seed)) * scale / width**0.5


def distance(a, b):
    return float((a.double() - b).norm() / b.norm())


@tiles
@pytest.mark.parametrize("mean", [0, 3])
@pytest.mark.parametrize("scale", [0.1, 1, 2, 4, 10, 40])
@pytest.mark.parametrize("m", [1, 4, 30, 70])
def test_its_error_is_about_that_of_storing(m, scale, mean):
    states, queries = states_of(6000, 160, mean), queries_of(m, 160, scale)
    stored = states.bfloat16()
    expected = attention(queries, stored)
    storing = distance(expected, attention(queries, states))
    ours = distance(normalise(read_bfloat16(queries, stored.split(2500))), expected)
    assert ours < 2.5 * storing
    assert ours < 4e-3


@tiles
@pytest.mark.parametrize("place", [0, 1500, 2499, 2500, 5999, 6002])
@pytest.mark.parametrize("score", [5, 50, 500])
def test_a_row_that_stands_out_is_found_wherever_it_stands(place, score):
    """Also in a last piece of three rows: each score leaps over all before it."""
    states, queries = states_of(6003, 128, 0), queries_of(3, 128, 1)
    states[place] = queries[1] * score / queries[1].square().sum()
    stored = states.bfloat16()
    result = normalise(read_bfloat16(queries, [stored[:2500], stored[2500:6000], stored[6000:]]))
    assert distance(result, attention(queries, stored)) < 4e-3


@tiles
@pytest.mark.parametrize("place", [0, 3000, 5999])
@pytest.mark.parametrize("score", [-2e4, 900, 1500, 2e4, 3e5])
def test_scores_that_bfloat16_cannot_tell_apart_are(score, place):
    """Two rows whose scores of up to 300,000 differ by 1.5."""
    direction = torch.nn.functional.one_hot(torch.tensor(0), 128).float()
    states = states_of(6000, 128, 0).bfloat16() / 8
    states[:, 0] = 2 if score < 0 else -1  # scores of all others are far lower
    states[[place, place - 1], 0] = 1
    states[place - 1, 1] = 1
    queries = torch.stack([direction * score, direction])
    queries[0, 1] = 1.5
    expected = attention(queries, states)
    with torch.no_grad():
        tally = Tally()
        part = read_bfloat16(queries, [states[:2500], states[2500:]], tally)
    assert distance(normalise(part)[0], expected[0]) < 4e-3
    assert distance(normalise(part)[1], expected[1]) < 4e-3
    assert (tally.sums.sum(-1, keepdim=True) / part.l - 1).abs().max() < 4e-3


@tiles
def test_it_merges_with_other_parts():
    states, queries = states_of(9000, 128, 1).bfloat16(), queries_of(4, 128, 3)
    parts = [read_bfloat16(queries, [states[:5000]]), read_all(queries, [states[5000:]])]
    assert distance(normalise(merge(parts)), attention(queries, states)) < 3e-3


@tiles
def test_equal_states_give_that_state():
    state = torch.randn(128, generator=torch.Generator().manual_seed(0)).bfloat16()
    result = normalise(read_bfloat16(queries_of(2, 128, 5), [state.expand(5000, -1).contiguous()]))
    assert distance(result, state.double().expand(2, -1)) < 1e-5


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"dtype": torch.float32}, False),
        ({"dtype": torch.float16}, False),
        ({"n": 100}, False),
        ({"width": 64}, False),
        ({"m": 65}, False),
        ({"softcap": 30.0}, False),
        ({"bias": torch.zeros(4, 1)}, False),
        ({"grad": True}, False),
        ({"tiles": False}, False),
    ],
    ids=["all is well", "float32", "float16", "short", "narrow", "many queries", "capped", "biased", "grad", "no AMX"],
)
def test_where_it_is_used(change, expected, monkeypatch):
    usual: dict[str, Any] = {"dtype": torch.bfloat16, "n": 5000, "width": 128, "m": 4, "grad": False, "tiles": True}
    case = SimpleNamespace(**usual, **PLAIN._asdict())
    vars(case).update(change)
    monkeypatch.setattr(bfloat16, "has_tiles", lambda: case.tiles)
    blocks = torch.zeros(case.n, case.width, dtype=case.dtype).split(3000)
    queries = torch.zeros(case.m, case.width, requires_grad=case.grad)
    assert suits(queries, blocks, Scoring(case.bias, case.softcap)) == expected


@tiles
@pytest.mark.parametrize("noted", [None, [0, 2]])
def test_its_weights_are_summed_by_passage(noted):
    """Also where later scores leap over those before them, and pieces end within passages."""
    states, queries = states_of(6003, 128, 0), queries_of(3, 128, 4)
    states[3000] = queries[1] * 30 / queries[1].square().sum()
    stored = states.bfloat16()
    with torch.no_grad():
        tally = Tally(None if noted is None else torch.tensor(noted))
        part = read_bfloat16(queries, [stored[:2500], stored[2500:6000], stored[6000:]], tally)
    weights = (queries.double() @ stored.double().T).softmax(-1)
    expected = torch.stack([passage.sum(-1) for passage in weights.split(PASSAGE, dim=-1)], dim=-1)
    rows = [0, 1, 2] if noted is None else noted
    assert (tally.sums / part.l[rows] - expected[rows]).abs().max() < 2e-3
