"""The equations of memstore.attention against plain attention written out."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memstore import attention
from memstore.attention import (
    Partial,
    Scoring,
    absorb_keys,
    absorb_values,
    fused_attention,
    merge,
    normalise,
    ordinary_attention,
    partial_attention,
    read_all,
    read_rows,
    split_heads,
)
from memstore.cross_attention import CrossAttention


def plain(query, key, value, scaling, mask=None):
    """Softmax attention with every key head repeated for its group, in float64."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query.double() @ key.transpose(2, 3) * scaling
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1) @ value


def test_absorbed_projections_equal_projected_keys_and_values():
    torch.manual_seed(0)
    memory, query = torch.randn(50, 24), torch.randn(2, 4, 3, 6)
    key, value = torch.nn.Linear(24, 24), torch.nn.Linear(24, 24)
    keys, values = (layer(memory).view(1, 50, 4, 6).transpose(1, 2).expand(2, -1, -1, -1) for layer in (key, value))
    with torch.no_grad():
        expected = plain(query, keys, values, 0.3)
        absorbed = absorb_keys(query, split_heads(key.weight, 4)) * 0.3
        part = Partial(*(x.unflatten(0, (2, 4, 3)) for x in read_all(absorbed.flatten(0, 2), [memory])))
        output = normalise(absorb_values(part, split_heads(value.weight, 4), split_heads(value.bias, 4)))
    assert (output - expected).abs().max() < 1e-5  # the key bias cancels inside one softmax


@settings(max_examples=50, deadline=None)
@given(cuts=st.lists(st.integers(1, 39), max_size=5, unique=True), seed=st.integers(0, 1000), scale=st.floats(0.1, 50))
def test_merge_is_exact_however_the_keys_are_cut(cuts, seed, scale):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(3, 40, generator=generator) * scale
    values = torch.randn(3, 40, 8, generator=generator)
    edges = [0, *sorted(cuts), 40]
    pieces = [partial_attention(scores[:, a:b], values[:, a:b]) for a, b in pairwise(edges)]
    expected = torch.einsum("mn,mnd->md", scores.double().softmax(-1), values.double())
    assert (normalise(merge(pieces)) - expected).abs().max() < 1e-5
    assert torch.equal(normalise(merge(pieces[:1])), normalise(pieces[0]))


def test_merging_a_fully_masked_part_changes_nothing():
    values = torch.randn(2, 5, 3)
    part = partial_attention(torch.randn(2, 5), values)
    nothing = partial_attention(torch.full((2, 5), -torch.inf), values)
    assert torch.equal(nothing.l, torch.zeros(2, 1)) and torch.equal(nothing.o, torch.zeros(2, 3))
    assert torch.equal(normalise(merge([nothing, part])), normalise(part))
    assert torch.equal(normalise(merge([nothing, nothing])), torch.zeros(2, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [[100], [33, 33, 34], [1, 99]])
def test_reading_blocks_equals_reading_all_rows_at_once(dtype, sizes):
    torch.manual_seed(1)
    memory, queries = torch.randn(100, 16).to(dtype), torch.randn(1500, 16)
    expected = (queries.double() @ memory.double().T).softmax(-1) @ memory.double()
    assert (normalise(read_all(queries, memory.split(sizes))) - expected).abs().max() < 1e-5
    everything = torch.arange(100).expand(1500, 100)
    assert (normalise(read_rows(queries, lambda ids: memory[ids], everything)) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("rows", [1, 7, 40, 1000])
def test_reading_in_pieces_of_any_size_is_exact_and_has_a_gradient(monkeypatch, rows):
    """Later pieces may hold far higher scores, and far lower ones, than what was read before."""
    monkeypatch.setattr(attention, "PIECE", rows * 16)
    torch.manual_seed(5)
    memory, queries = torch.randn(90, 16) * torch.linspace(-9, 9, 90)[:, None], torch.randn(3, 16, requires_grad=True)
    expected = (queries.double() @ memory.double().T).softmax(-1) @ memory.double()
    output = normalise(read_all(queries, memory.split([50, 40])))
    assert (output - expected).abs().max() < 1e-5
    gradients = [torch.autograd.grad(each.square().sum(), queries)[0] for each in (output, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


def test_empty_slots_of_a_search_weigh_nothing():
    memory, queries = torch.randn(7, 4), torch.randn(3, 4)
    ids = torch.tensor([[0, 5, -1], [1, -1, -1], [-1, -1, -1]])
    part = read_rows(queries, lambda rows: memory[rows], ids)
    weights = (queries[0] @ memory[[0, 5]].T).softmax(-1)
    torch.testing.assert_close(normalise(part)[0], weights @ memory[[0, 5]])
    torch.testing.assert_close(normalise(part)[1], memory[1])
    assert torch.equal(normalise(part)[2], torch.zeros(4))


@pytest.mark.parametrize("length", [1, 3, 1100])
@pytest.mark.parametrize("kind", ["none", "boolean", "additive"])
def test_ordinary_attention_with_grouped_heads_and_masks(length, kind):
    torch.manual_seed(2)
    query, key, value = torch.randn(2, 6, length, 8), torch.randn(2, 3, 20, 8), torch.randn(2, 3, 20, 8)
    seen = torch.rand(2, 1, length, 20) > 0.3
    seen[..., 0] = True
    mask = {"none": None, "boolean": seen, "additive": torch.where(seen, 0.0, torch.finfo(torch.float32).min)}[kind]
    output = normalise(ordinary_attention(query, key, value, mask, 0.5))
    assert (output - plain(query, key, value, 0.5, None if kind == "none" else seen)).abs().max() < 1e-5


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("groups", [6, 2])
@torch.no_grad()
def test_key_bias_and_soft_capping_are_those_of_the_plain_model(groups, softcap, monkeypatch):
    """Grouped heads, a bias on the keys and capped scores: the same as making all keys and values."""
    monkeypatch.setattr(attention, "QUERY_CHUNK", 7)
    heads, c, d, n = 6, 5, 16, 40
    key, value = torch.nn.Linear(d, groups * c), torch.nn.Linear(d, groups * c)
    cross = CrossAttention(torch.nn.Identity(), 0, heads, key, value, groups, softcap)
    query, states = torch.randn(2, heads, 3, c), torch.randn(n, d)
    made = [
        (states @ m.weight.T + m.bias).view(1, n, groups, c).transpose(1, 2).expand(2, -1, -1, -1) for m in (key, value)
    ]
    keys, values = (x.double().repeat_interleave(heads // groups, dim=1) for x in made)
    scores = query.double() @ keys.transpose(2, 3) * 0.7
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    expected, total = (scores.softmax(-1) @ values).float(), scores.logsumexp(-1, keepdim=True).float()
    flat = cross.absorb(query, 0.7).flatten(0, 2)
    bias = cross.key_bias(query, 0.7)
    assert bias is not None
    scoring = Scoring(bias.flatten(0, 2), softcap)
    ids = torch.arange(n).expand(len(flat), -1)
    for part in (read_all(flat, states.split(11), scoring), read_rows(flat, states.__getitem__, ids, scoring)):
        read = cross.values(Partial(*(tensor.unflatten(0, query.shape[:3]) for tensor in part)))
        torch.testing.assert_close(normalise(read), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(read.l.log() + read.m, total, atol=1e-5, rtol=1e-5)
    plain_part = ordinary_attention(query, made[0], made[1], None, 0.7, softcap=softcap)
    torch.testing.assert_close(normalise(plain_part), expected, atol=1e-5, rtol=1e-5)


def sets_of_keys(kind):
    """Two sets of 9 and 5 keys for 7 queries of two rows, each with a mask of the kind."""
    sets = []
    for n, rows in ((9, 1), (5, 2)):
        key, value = torch.randn(rows, 2, n, 6, requires_grad=True), torch.randn(2, 2, n, 6, requires_grad=True)
        seen = torch.rand(rows, 1, 7, n) < 0.6
        seen[:, :, 3] = False
        mask = {"none": None, "boolean": seen, "additive": torch.zeros(seen.shape).masked_fill(~seen, -3e38)}[kind]
        sets.append((key, value, mask))
    return torch.randn(2, 4, 7, 6, requires_grad=True), sets


@pytest.mark.parametrize("chunk", [1024, 3])
@pytest.mark.parametrize("kind", ["none", "boolean", "additive"])
def test_one_kernel_over_several_sets_is_what_merging_them_gives(kind, chunk, monkeypatch):
    monkeypatch.setattr(attention, "QUERY_CHUNK", chunk)
    torch.manual_seed(0)
    query, sets = sets_of_keys(kind)
    leaves = [query, *(each for key, value, _ in sets for each in (key, value))]
    parts = [ordinary_attention(query, key.expand(2, -1, -1, -1), value, mask, 0.4) for key, value, mask in sets]
    expected, output = normalise(merge(parts)), fused_attention(query, sets, 0.4)
    assert (output - expected).abs().max() < 1e-6
    assert kind == "none" or not output[:, :, 3].any()
    weight = torch.randn_like(expected)
    wanted, found = (torch.autograd.grad((each * weight).sum(), leaves) for each in (expected, output))
    for one, other in zip(wanted, found, strict=True):
        assert torch.isfinite(other).all() and (one - other).abs().max() < 1e-5


def test_where_all_is_hidden_one_kernel_gives_zero():
    """As for rows that are padded for longer than a chunk, and read neither a sink nor a span."""
    torch.manual_seed(0)
    query, ((key, value, _), _) = sets_of_keys("none")
    nothing = torch.empty(1, 2, 0, 6)
    hidden = torch.zeros(1, 1, 7, 9, dtype=torch.bool)
    assert not fused_attention(query, [(nothing, nothing, None), (key, value, hidden)], 0.4).any()
    hidden[:, :, 2:, 4] = True
    output = fused_attention(query, [(nothing, nothing, None), (key, value, hidden)], 0.4)
    assert not output[:, :, :2].any()
    assert (output[:, :, 2:] - value[:, :, 4:5].repeat_interleave(2, dim=1)).abs().max() < 1e-6


def test_one_kernel_computes_in_the_dtype_of_the_query():
    torch.manual_seed(0)
    query, sets = sets_of_keys("boolean")
    output = fused_attention(query.bfloat16(), sets, 0.4)
    assert output.dtype == torch.bfloat16
    assert (output - fused_attention(query, sets, 0.4)).abs().max() < 0.03
