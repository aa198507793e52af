"""A talk over memories goes on turn by turn, and everything that generate can do reads the same spans."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache

import memstore
from memstore.errors import AttachError
from tests import tiny
from tests.models import DECODERS, build, tokens
from tests.talks import BUDGET, CACHE, Pointing, block, document, remember, shallow

GREEDY = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
EXACT = 1e-4


def answer(ids, prompt):
    return ids[0, prompt.shape[1] :].tolist()


def logits(model, ids, **keywords):
    with torch.no_grad():
        return model(input_ids=ids, **keywords).logits


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
@pytest.mark.parametrize("family", sorted(DECODERS))
def test_a_talk_in_turns_is_read_as_if_the_document_stood_before_it(library, family, implementation):
    model, text, first, second = build(family), tokens(60), tokens(9, seed=1, rows=1), tokens(7, seed=2, rows=1)
    memory = library.encode(model, input_ids=text, name="doc")
    static = {"config": model.config, "max_cache_len": 64}
    cache = DynamicCache(config=model.config) if implementation == "dynamic" else StaticCache(**static)
    with memstore.attach(model, memory) as attached:
        talk = model.generate(input_ids=first, **{CACHE: cache}, **GREEDY)
        talk = torch.cat((talk, second), dim=1)
        written = attached.generate(input_ids=talk, **{CACHE: cache}, **GREEDY)
    plain = model.generate(input_ids=torch.cat((text[None], talk), dim=1), **GREEDY)
    assert answer(written, talk) == plain[0, 60 + talk.shape[1] :].tolist()
    assert "generate" not in vars(model)


@pytest.mark.parametrize("listen", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_new_question_reads_another_block(library, by_hand, listen):
    """And a question about the same one goes on with it; tokens that were read before stay where they are."""
    model, text, selector = shallow(), document(), Pointing(listen)
    memory = remember(library, model, text)
    turns = [torch.tensor([[*tokens(6, seed=i).tolist(), last]]) for i, last in enumerate((43, 87, 27))]
    cache, talk = DynamicCache(config=model.config), torch.empty(1, 0, dtype=torch.long)
    with memstore.attach(model, memory, budget=BUDGET, selector=selector, explain=True) as attached:
        for ids in turns:
            talk = torch.cat((talk, ids), dim=1)
            before = copy.deepcopy(cache)
            generate = model.generate if by_hand else attached.generate
            given = {"return_dict_in_generate": True, "output_logits": True}
            out = generate(input_ids=talk, **{CACHE: cache}, **GREEDY, **given)
            whole = torch.cat((block(ids[0], text)[None], out.sequences), dim=1)
            expected = logits(model, whole)[:, -9:-1] if False else None
            read = {(r.start_token // 64) for r in attached.provenance()}
            assert read == {int(ids[0, -1]) % 10}
            assert {r.step for r in attached.provenance()} == set(range(8))
            again = generate(input_ids=talk, **{CACHE: before}, **GREEDY)  # a copy of the cache knows the talk too
            assert torch.equal(again, out.sequences)
            talk = out.sequences
            del expected
        assert selector.asked == [[3], [3], [7], [7], [7], [7]]
    plain = model.generate(input_ids=torch.cat((block(turns[2][0], text)[None], talk[:, :-8]), dim=1), **GREEDY)
    assert torch.equal(plain[:, 64:], talk)
