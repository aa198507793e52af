"""A text that outgrows the native window beside its memories ends with an error, or goes on without its beginning."""

from __future__ import annotations

import pytest
import torch
from transformers import AttentionInterface, DynamicCache

import memstore
from memstore.errors import AttachError, WindowExceededError
from tests.models import build, tokens
from tests.talks import BUDGET, Pointing, block, document, greedy, held, remember, shallow

EXACT = 1e-4
WINDOW, ROOM = 128, 64  # a native window of which a half is the memory's
NARROW, MEMORY = 48, 24  # and one that leaves less to reckon


def logits(model, ids, **keywords):
    with torch.no_grad():
        return model(input_ids=ids, **keywords).logits


def best_token(model, ids):
    """What greedy search goes on with behind ids [n], where it must not end."""
    scores = logits(model, ids[None])[0, -1]
    scores[model.config.eos_token_id] = -torch.inf
    return int(scores.argmax())


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("sliding", [None, 24, 100])
def test_every_token_sees_the_memory_and_the_last_tokens(library, sliding, static):
    """A prompt that is too long, and 90 generated tokens, in rows of different length: each token is that which the
    plain model gives with the spans before the last 64 tokens."""
    model, text = shallow(WINDOW, sliding=sliding), document()
    ids, mask = tokens(80, seed=3, rows=2), torch.ones(2, 80, dtype=torch.long)
    ids[:, -1] = 43
    ids[1, :50], mask[1, :50] = 0, 0
    settings = greedy(90) | ({"cache_implementation": "static"} if static else {})
    with memstore.attach(
        model, remember(library, model, text), budget=BUDGET, selector=Pointing(), when_full="drop"
    ) as attached:
        written = attached.generate(input_ids=ids, attention_mask=mask, **settings)
    for row in range(2):
        own = written[row, 50 * row :]
        for end in range(80 - 50 * row, len(own), 7):
            kept = torch.cat((block(torch.tensor([43]), text), own[:end][-(WINDOW - ROOM) :]))
            assert best_token(model, kept) == int(own[end])


TURNS: list[torch.Tensor] = []  # cos and sin of all positions


def in_pairs(module, query, key, value, mask, **given):
    """Attention that reckons every pair of tokens by itself: as far apart as a model of NARROW positions sees them that
    keeps the first MEMORY tokens, and lets go of the oldest others."""
    cos, sin = (x[0, :, : query.shape[-1]] for x in TURNS)

    def turn(x, at):
        half = x.shape[-1] // 2
        return x * cos[at] + torch.cat((-x[half:], x[:half])) * sin[at]

    def back(x, at):
        half = x.shape[-1] // 2
        return x * cos[at] - torch.cat((-x[half:], x[:half])) * sin[at]

    group, n = query.shape[1] // key.shape[1], query.shape[2]
    output = torch.zeros(1, n, query.shape[1], value.shape[-1])
    for h in range(query.shape[1]):
        plain_q = [back(query[0, h, i], i) for i in range(n)]
        plain_k = [back(key[0, h // group, i], i) for i in range(n)]
        for i in range(n):
            gone = max(0, i + 1 - NARROW)
            seen = [j for j in range(i + 1) if i < MEMORY or j < MEMORY or j >= MEMORY + gone]
            at = [j + gone if j < MEMORY <= i else j for j in seen]
            scores = torch.stack([turn(plain_q[i], i) @ turn(plain_k[j], p) for j, p in zip(seen, at, strict=True)])
            weights = (scores * given["scaling"]).softmax(0)
            output[0, i, h] = weights @ value[0, h // group, seen]
    return output, None


def test_deeper_models_against_attention_pair_by_pair(library):
    """Two layers: what is dropped has been seen by what is kept. One pass, and token by token with a cache."""
    model, text, ids = shallow(NARROW, layers=2), tokens(MEMORY), tokens(60, seed=4, rows=1)
    memory = library.encode(model, input_ids=text, name="doc")
    with memstore.attach(model, memory, when_full="drop"), torch.no_grad():
        once = logits(model, ids)
        cache = DynamicCache(config=model.config)
        steps = [model(input_ids=part, **held(cache)).logits for part in ids.split([30, 1, 20, *[1] * 9], dim=1)]
    whole = torch.cat((text[None], ids), dim=1)
    TURNS[:] = model.model.rotary_emb(torch.empty(0), torch.arange(whole.shape[1])[None])
    AttentionInterface.register("in-pairs", in_pairs)
    model.set_attn_implementation("in-pairs")
    expected = logits(model, whole)[:, MEMORY:]
    assert (once - expected).abs().max() < EXACT
    assert (torch.cat(steps, dim=1) - expected).abs().max() < EXACT
    model.set_attn_implementation("sdpa")
    assert (logits(model, whole)[:, MEMORY:] - expected).abs().max() > 100 * EXACT  # a plain model sees more


def test_layers_that_read_no_memory_let_go_of_the_oldest_tokens_too(library):
    """In two layers of which each sees 64 tokens, nothing that is further away than 128 can matter."""
    model, text, ids = shallow(WINDOW, layers=2), document(), tokens(200, seed=3, rows=1)
    other = torch.cat((tokens(60, seed=4, rows=1), ids[:, 60:]), dim=1)
    memory = remember(library, model, text)
    for layers in ([0], [1]):
        with memstore.attach(model, memory, budget=BUDGET, layers=layers, selector=Pointing(), when_full="drop"):
            last, same = (logits(model, each)[0, -1] for each in (ids, other))
        assert (last - same).abs().max() < EXACT


@pytest.mark.parametrize(
    "settings",
    [{"num_beams": 3}, {"prompt_lookup_num_tokens": 5}, {"assistant_early_exit": 1}, {"prefill_chunk_size": 30}],
    ids=str,
)
def test_dropping_does_not_depend_on_how_tokens_come(library, settings):
    """Beams agree with beams of the same model that computes without a cache, others with greedy search."""
    model, text, ids = shallow(WINDOW, layers=2), document(), tokens(50, seed=3, rows=1)
    same = {"num_beams": settings.get("num_beams", 1)}
    with memstore.attach(model, remember(library, model, text), budget=BUDGET, when_full="drop"):
        expected = model.generate(input_ids=ids, use_cache=False, **greedy(40), **same)
        assert torch.equal(model.generate(input_ids=ids, **greedy(40) | settings), expected)


def test_a_talk_goes_on_when_it_is_full(library):
    model, text, selector = shallow(WINDOW), document(), Pointing()
    cache, talk, asked = DynamicCache(config=model.config), torch.empty(1, 0, dtype=torch.long), (43, 87, 21)
    with memstore.attach(
        model, remember(library, model, text), budget=BUDGET, selector=selector, when_full="drop"
    ) as attached:
        for last in asked:
            new = torch.cat((tokens(29, seed=last), torch.tensor([last])))[None]
            talk = attached.generate(input_ids=torch.cat((talk, new), dim=1), **held(cache), **greedy(20))
    for turn, last in enumerate(asked):
        for end in range(50 * turn + 30, 50 * turn + 50, 4):
            kept = torch.cat((block(torch.tensor([last]), text), talk[0, :end][-(WINDOW - ROOM) :]))
            assert best_token(model, kept) == int(talk[0, end])
    assert selector.asked == [[3], [7], [1]]


def test_an_error_names_the_numbers(library):
    model = shallow(WINDOW)
    memory = remember(library, model, document())
    with memstore.attach(model, memory, budget=BUDGET) as attached:
        assert attached.generate(input_ids=tokens(40, rows=1), **greedy(24)).shape == (1, 64)
        numbers = r"Memories \(64 tokens\).* need 129 positions, and the model has 128.*when_full=\"drop\""
        with pytest.raises(WindowExceededError, match=numbers):
            attached.generate(input_ids=tokens(65, rows=1), max_new_tokens=1)
        with pytest.raises(WindowExceededError, match="need 129 positions"):
            attached.generate(input_ids=tokens(40, rows=1), **greedy(26))
    with (
        memstore.attach(model, memory, budget=WINDOW, when_full="drop"),
        pytest.raises(WindowExceededError, match="128 tokens"),
    ):
        logits(model, tokens(5, rows=1))


def test_what_cannot_be_chosen(library):
    model = build("gpt2")
    memory = library.encode(model, input_ids=tokens(40), name="doc")
    with pytest.raises(AttachError, match="table of positions"):
        memstore.attach(model, memory, when_full="drop")
    with pytest.raises(AttachError, match="when_full='stop'"):
        memstore.attach(model, memory, when_full="stop")
