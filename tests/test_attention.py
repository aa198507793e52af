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
from memstore.reading.excerpt import Excerpt


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


def naive(query, sets, scaling):
    """Softmax attention over all keys of the sets, written out for every head, in float64; zero where all is hidden."""
    b, h = query.shape[:2]

    def side_by_side(tensors):
        every = [each.double().expand(b, -1, -1, -1).repeat_interleave(h // each.shape[1], dim=1) for each in tensors]
        return torch.cat(every, dim=2)

    keys, values = (side_by_side([each[i] for each in sets]) for i in (0, 1))
    scores, start = query.double() @ keys.transpose(2, 3) * scaling, 0
    for key, _, mask in sets:
        some = scores[..., start : start + key.shape[2]]
        if mask is not None and mask.dtype == torch.bool:
            some.masked_fill_(~mask, -torch.inf)
        elif mask is not None:
            some += torch.where(mask > torch.finfo(mask.dtype).min / 2, mask.double(), -torch.inf)
        start += key.shape[2]
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    return (scores.masked_fill(blind, 0.0).softmax(-1) @ values).masked_fill(blind, 0.0)


def merging(query, sets, scaling):
    """What the fused kernel gives, by merging the parts."""
    b = len(query)
    parts = [
        ordinary_attention(query, key.expand(b, -1, -1, -1), value.expand(b, -1, -1, -1), mask, scaling)
        for key, value, mask in sets
    ]
    return normalise(merge(parts))


WAYS = pytest.mark.parametrize("way", [fused_attention, merging], ids=["by one kernel", "merged"])


def a_set(n, rows, t, kind, mask_heads=1, mask_rows=None):
    """n keys for t queries, of ``rows`` rows: key, value, and a mask of the kind, by which query 3 sees nothing."""
    key, value = torch.randn(rows, 2, n, 6, requires_grad=True), torch.randn(rows, 2, n, 6, requires_grad=True)
    seen = torch.rand(rows if mask_rows is None else mask_rows, mask_heads, t, n) < 0.6
    seen[:, :, 3:4] = False
    masks = {"none": None, "boolean": seen, "additive": torch.randn(seen.shape).masked_fill(~seen, -3e38)}
    return key, value, masks[kind]


def sets_of_keys(kind):
    """Two sets of 9 and 5 keys for 7 queries of two rows, each with a mask of the kind."""
    return torch.randn(2, 4, 7, 6, requires_grad=True), [a_set(9, 1, 7, kind), a_set(5, 2, 7, kind)]


@WAYS
@pytest.mark.parametrize("chunk", [1024, 3])
@pytest.mark.parametrize("kind", ["none", "boolean", "additive"])
def test_attention_over_several_sets_and_its_gradient(kind, chunk, way, monkeypatch):
    """However large the gradient of the output is, also where a query sees nothing."""
    monkeypatch.setattr(attention, "QUERY_CHUNK", chunk)
    torch.manual_seed(0)
    query, sets = sets_of_keys(kind)
    leaves = [query, *(each for key, value, _ in sets for each in (key, value))]
    expected, output = naive(query, sets, 0.4), way(query, sets, 0.4)
    assert (output - expected).abs().max() < 1e-6
    assert kind == "none" or not output[:, :, 3].any()
    weight = 100 * torch.randn_like(output)
    wanted, found = (torch.autograd.grad((each * weight).sum(), leaves) for each in (expected, output))
    for one, other in zip(wanted, found, strict=True):
        assert torch.isfinite(other).all() and (one - other).abs().max() < 1e-4


@WAYS
@pytest.mark.parametrize("chunk", [1024, 3])
@pytest.mark.parametrize("length", [1, 7])
def test_masks_of_several_kinds_and_shapes_beside_each_other(length, chunk, way, monkeypatch):
    """One for each head, one for all rows, one for all queries; none; sets of no keys; and a query with strides."""
    monkeypatch.setattr(attention, "QUERY_CHUNK", chunk)
    torch.manual_seed(1)
    query = torch.randn(2, length, 4, 12)[..., ::2].transpose(1, 2)
    sets = [
        a_set(9, 1, length, "boolean", mask_heads=4),
        a_set(5, 2, length, "additive", mask_rows=1),
        a_set(4, 2, 1, "boolean"),
        a_set(6, 2, 1, "additive", mask_heads=4),
        a_set(0, 1, length, "boolean"),
        a_set(0, 1, length, "none"),
        a_set(3, 1, length, "none"),
    ]
    for some in (sets, sets[::-1], sets[:1], sets[1:3], sets[2:6]):
        assert (way(query, some, 0.4) - naive(query, some, 0.4)).abs().max() < 1e-6


@WAYS
@pytest.mark.parametrize(("dtype", "error"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_queries_of_half_precision_with_masks_of_their_own_dtype_and_of_float32(dtype, error, way):
    torch.manual_seed(2)
    query, sets = torch.randn(2, 4, 7, 6).to(dtype), []
    for (key, value, mask), of_mask in zip(sets_of_keys("additive")[1], (dtype, torch.float32), strict=True):
        mask = mask.masked_fill(mask < -1e38, torch.finfo(of_mask).min).to(of_mask)
        sets.append((key.detach().to(dtype), value.detach().to(dtype), mask))
    output = way(query, sets, 0.4)
    assert output.dtype == (dtype if way is fused_attention else torch.float32)
    assert (output - naive(query, sets, 0.4)).abs().max() < error
    assert not output[:, :, 3].any()


@WAYS
def test_what_a_mask_does_not_hide_in_its_own_dtype_is_seen_in_any_other(way):
    """-1e9 is no number of float16. Where it is the highest there is, all keys are as good as without a mask."""
    torch.manual_seed(3)
    query, key, value = torch.randn(1, 2, 3, 6).half(), torch.zeros(1, 2, 5, 6).half(), torch.randn(1, 2, 5, 6).half()
    mask = torch.zeros(1, 1, 3, 5)
    mask[:, :, 0], mask[:, :, 1, 2:], mask[:, :, 2] = -1e9, -1e9, torch.finfo(torch.float32).min
    expected = torch.stack([value.mean(2), value[:, :, :2].mean(2), torch.zeros(1, 2, 6)], dim=2)
    assert (way(query, [(key, value, mask)], 0.4) - expected).abs().max() < 2e-3


@WAYS
def test_the_empty_set_adds_nothing(way):
    """As for rows that are padded for longer than a chunk, and read neither a sink nor a span."""
    torch.manual_seed(0)
    query, ((key, value, _), _) = sets_of_keys("none")
    nothing = torch.empty(1, 2, 0, 6)
    hidden = torch.zeros(1, 1, 7, 9, dtype=torch.bool)
    assert not way(query, [(nothing, nothing, None), (key, value, hidden)], 0.4).any()
    hidden[:, :, 2:, 4] = True
    output = way(query, [(nothing, nothing, None), (key, value, hidden)], 0.4)
    assert not output[:, :, :2].any()
    assert (output[:, :, 2:] - value[:, :, 4:5].repeat_interleave(2, dim=1)).abs().max() < 1e-6
    noted: list[torch.Tensor] = []
    for mask in (None, hidden[..., :0]):
        m, l, o = ordinary_attention(query[:1], nothing, nothing, mask, 0.4, note=noted.append)  # noqa: E741
        assert (m == -torch.inf).all() and not l.any() and not o.any()
        assert m.shape == l.shape == (1, 4, 7, 1) and o.shape == (1, 4, 7, 6)
    assert [each.shape for each in noted] == [(1, 4, 7, 0)] * 2


@pytest.mark.parametrize("mask", [True, False], ids=["masked", "not masked"])
@torch.no_grad()
def test_an_excerpt_of_neither_a_sink_nor_a_span_is_the_empty_set(mask):
    keys = torch.empty(2, 0, 6)
    sums: list[torch.Tensor] = []
    excerpt = Excerpt([], [], 0, torch.empty(0, dtype=torch.long), {0: (keys, keys)})
    seen = torch.empty(3, 1, 7, 0, dtype=torch.bool) if mask else None
    m, l, o = excerpt.attend(0, torch.randn(3, 4, 7, 6), 0.4, seen, sums)  # noqa: E741
    assert (m == -torch.inf).all() and not l.any() and not o.any()
    assert m.shape == l.shape == (3, 4, 7, 1) and o.shape == (3, 4, 7, 6)
    assert [each.shape for each in sums] == [(3, 4, 7, 0)]


def test_one_kernel_is_given_only_keys_that_some_query_of_a_chunk_sees(monkeypatch):
    """Of a sliding window over 40 tokens, and of the tokens to come; never none at all, nor a query that sees none."""
    monkeypatch.setattr(attention, "QUERY_CHUNK", 10)
    given = []

    def kernel(query, key, value, mask, scale):
        given.append(key.shape[2])
        assert (mask > -torch.inf).any(-1).all()
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scale)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", kernel)
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 40, 6) for _ in range(3))
    far = torch.arange(40)[:, None] - torch.arange(40)
    for window, sizes in ((4, [10, 13, 13, 13]), (40, [10, 20, 30, 40])):
        given.clear()
        sets = [(key, value, ((far >= 0) & (far < window))[None, None])]
        assert (fused_attention(query, sets, 0.4) - naive(query, sets, 0.4)).abs().max() < 1e-6
        assert given == sizes
    given.clear()
    assert not fused_attention(query, [(key, value, torch.zeros(1, 1, 40, 40, dtype=torch.bool))], 0.4).any()
    assert given == [1, 1, 1, 1]
