"""A decoder-only model reads a stored document as if it stood before the prompt, or chosen spans of long ones."""

from __future__ import annotations

from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

import memstore
from memstore.errors import AttachError, UnsupportedModelError, WindowExceededError
from memstore.reading.chat import chat_frame
from memstore.reading.passes import find_cache
from memstore.reading.selectors import Question
from memstore.reading.selectors.by_index import ByIndex
from memstore.registry import adapter_for
from memstore_backends.exact import ExactIndex
from tests import tiny
from tests.models import build, tokens

EXACT = 1e-3
FAMILIES = ["gemma2", "gemma3_text", "gpt_neox", "llama", "mistral-sliding", "phi3-longrope", "qwen3"]
CACHE = "cache" if "cache" in signature(LlamaForCausalLM.forward).parameters else "past_key_values"


@pytest.fixture(params=FAMILIES, scope="module")
def model(request):
    return build(request.param)


def plain_logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_document_of_one_window_gives_the_plain_models_logits(model, library, implementation):
    document, prompt = tokens(60), tokens(9, seed=1, rows=1)
    if implementation == "sdpa" and not model._supports_sdpa:
        with pytest.raises(ValueError, match="does not support an attention implementation"):
            model.set_attn_implementation(implementation)
        return
    model.set_attn_implementation(implementation)
    if implementation == "sdpa" and model.config.model_type == "gemma2":  # older versions of transformers let it pass
        with pytest.raises(UnsupportedModelError, match="caps its attention scores"):
            library.encode(model, input_ids=document, name="doc")
        return
    expected = plain_logits(model, torch.cat((document[None], prompt), dim=1))[:, 60:]
    memory = library.encode(model, input_ids=document, name="doc")
    with memstore.attach(model, memory):
        read = plain_logits(model, prompt)
    assert (read - expected).abs().max() < EXACT
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("settings", [{}, {"num_beams": 3}, {"cache_implementation": "static"}], ids=str)
def test_greedy_and_beam_generation_is_identical(model, library, settings):
    document, prompt = tokens(60), tokens(9, seed=1, rows=2)
    memory = library.encode(model, input_ids=document, name="doc")
    generate = {"max_new_tokens": 10, "do_sample": False, **settings}
    joined = torch.cat((document.expand(2, -1), prompt), dim=1)
    expected = model.generate(input_ids=joined, **generate)[:, joined.shape[1] :]
    with memstore.attach(model, memory) as attached:
        answer = attached.generate(input_ids=prompt, **generate)
    assert torch.equal(answer[:, 9:], expected)


def test_a_decoder_may_be_called_by_position(model, library):
    memory, prompt = library.encode(model, input_ids=tokens(60), name="doc"), tokens(9, seed=1, rows=1)
    with memstore.attach(model, memory), torch.no_grad():
        by_name = model.base_model(input_ids=prompt).last_hidden_state
        assert torch.equal(model.base_model(prompt).last_hidden_state, by_name)


@pytest.mark.parametrize("given_positions", [False, True])
def test_left_padded_batches(model, library, given_positions):
    document, prompts, pads = tokens(60), tokens(9, seed=1, rows=3), (0, 2, 5)
    memory = library.encode(model, input_ids=document, name="doc")
    mask = torch.ones_like(prompts)
    for row, pad in enumerate(pads):
        prompts[row, :pad], mask[row, :pad] = 0, 0
    positions = {"position_ids": (mask.cumsum(1) - 1).clamp_min(0)} if given_positions else {}
    with memstore.attach(model, memory), torch.no_grad():
        read = model(input_ids=prompts, attention_mask=mask, **positions).logits
        written = model.generate(input_ids=prompts, attention_mask=mask, max_new_tokens=8, do_sample=False)
    for row, pad in enumerate(pads):
        joined = torch.cat((document, prompts[row, pad:]))[None]
        assert (read[row, pad:] - plain_logits(model, joined)[0, 60:]).abs().max() < EXACT
        expected = model.generate(input_ids=joined, max_new_tokens=8, do_sample=False)[0, joined.shape[1] :]
        assert torch.equal(written[row, 9 : 9 + len(expected)], expected)


def test_rows_with_their_own_memories(model, library):
    documents = [tokens(20 + 15 * i, seed=i) for i in range(2)]
    memories = [library.encode(model, input_ids=document, name=str(i)) for i, document in enumerate(documents)]
    prompts = tokens(9, seed=7, rows=2)
    with memstore.attach(model, rows=[[memory] for memory in memories]):
        together = plain_logits(model, prompts)
        written = model.generate(input_ids=prompts, max_new_tokens=6, num_beams=2, do_sample=False)
    for row, memory in enumerate(memories):
        with memstore.attach(model, memory):
            assert (together[row] - plain_logits(model, prompts[row : row + 1])[0]).abs().max() < EXACT
            alone = model.generate(input_ids=prompts[row : row + 1], max_new_tokens=6, num_beams=2, do_sample=False)
        ended = len(alone[0])  # a row that ended earlier than the other is filled up
        assert torch.equal(written[row, :ended], alone[0]) and set(written[row, ended:].tolist()) <= {0, 2}


def test_everything_of_two_documents_at_once(model, library):
    """Reading more than the budget chooses; top_k="all" does not, and then no scouting pass disturbs the result."""
    memories = [library.encode(model, input_ids=tokens(150, seed=i), name=str(i), window=64) for i in range(2)]
    prompt = tokens(9, seed=7, rows=1)
    with memstore.attach(model, *memories, top_k="all"):
        everything = plain_logits(model, prompt)
    with memstore.attach(model, *memories, budget=384):  # three blocks each: all of them
        assert torch.equal(plain_logits(model, prompt), everything)
    with memstore.attach(model, *memories, budget=128):
        assert not torch.equal(plain_logits(model, prompt), everything)


class BlindTo(ExactIndex):
    """Finds nothing for the first query, as an approximate index may that looks into an empty list of keys."""

    def block_maxima(self, queries, size):
        best = super().block_maxima(queries, size)
        best[0] = -torch.inf
        return best


def test_a_query_for_which_nothing_is_found_does_not_spoil_the_others():
    adapter = adapter_for(llama := build("llama"))(llama)
    memory: Any = SimpleNamespace(num_tokens=300, manifest=SimpleNamespace(prefix_ids=()))
    generator = torch.Generator().manual_seed(0)
    keys = [torch.randn(300, 8, generator=generator) for _ in range(2)]
    queries = {0: torch.randn(1, 6, 5, 8, generator=generator)}

    class Opened:
        """Stands for an open memory, of which an index is all that is asked."""

    opened: Any = Opened()
    selector = ByIndex()
    selector._indexes[opened] = {f"keys.0.{g}": BlindTo() for g in range(2)}
    for index, of_head in zip(selector._indexes[opened].values(), keys, strict=True):
        index.build([of_head])
    asks = torch.ones(1, 5, dtype=torch.bool)
    scores = selector.score(Question(adapter, [memory], [opened], [0], asks, None, queries))
    every = torch.stack([queries[0][0, h] @ keys[h // 3].T for h in range(6)])  # [H, T, n]
    best = torch.stack([block.amax(-1) for block in every.split(64, dim=-1)], dim=-1).softmax(-1)
    best[[0, 3], 0] = 0  # the first query of each index is the blind one
    assert (scores - best.amax((0, 1))).abs().max() < 1e-6


def test_scouted_generation_reads_its_budget_and_says_so(model, library):
    memories = [library.encode(model, input_ids=tokens(200, seed=i), name=str(i), window=64) for i in range(2)]
    prompt = tokens(9, seed=7, rows=2)
    with memstore.attach(model, *memories, budget=128, explain=True) as attached:
        attached.generate(input_ids=prompt, max_new_tokens=4, min_new_tokens=4, do_sample=False)
        readings = attached.provenance()
    assert {r.step for r in readings} == {0, 1, 2, 3} and {r.layer for r in readings} == {0, 1, 2}
    for row in (0, 1):
        read = {(r.document, t) for r in readings if r.row == row for t in range(r.start_token, r.end_token)}
        least = (
            0 if getattr(model.config, "sliding_window", None) else 64
        )  # a sliding layer sees the nearest tokens only
        assert least < len(read) <= 128
    for step, row, layer in {(r.step, r.row, r.layer) for r in readings}:
        assert 0 < sum(r.mass for r in readings if (r.step, r.row, r.layer) == (step, row, layer)) < 1


def test_a_cache_from_outside_is_refused(model, library):
    memory = library.encode(model, input_ids=tokens(60), name="doc")
    prompt = tokens(9, seed=1, rows=1)
    with torch.no_grad():
        cache = find_cache(model(input_ids=prompt, use_cache=True).values())
        with memstore.attach(model, memory), pytest.raises(AttachError, match="outside the attachment"):
            model(input_ids=prompt[:, :1], **{CACHE: cache})


def test_the_native_window_is_never_exceeded_in_silence(model, library):
    memory = library.encode(model, input_ids=tokens(500), name="doc", window=512)
    with memstore.attach(model, memory):
        plain_logits(model, tokens(12, rows=1))
        with pytest.raises(WindowExceededError, match="513 positions"):
            plain_logits(model, tokens(13, rows=1))


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("top_k", ["all", None])
def test_padded_chats_read_like_each_alone(library, top_k, cache):
    """The template's header is hidden in every row, wherever it begins, and padding asks nothing while scouting."""
    llama, tokenizer = tiny.llama(), tiny.tokenizer()
    memory = library.encode(llama, tokenizer, "In the beginning was the word. " * 60, name="doc", window=512)
    assert memory.manifest.prefix_ids
    frame = chat_frame(tokenizer)
    chats = [
        frame.header + tokenizer(question + frame.after, add_special_tokens=False)["input_ids"]
        for question in ("Who was it?", "What was there in the beginning?")
    ]
    longest = max(map(len, chats))
    ids = torch.tensor([[tokenizer.pad_token_id] * (longest - len(chat)) + chat for chat in chats])
    mask = torch.tensor([[0] * (longest - len(chat)) + [1] * len(chat) for chat in chats])
    settings = {"max_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    with memstore.attach(llama, memory, top_k=top_k):
        alone = [llama.generate(input_ids=torch.tensor([chat]), **settings).logits[0] for chat in chats]
        padded = llama.generate(input_ids=ids, attention_mask=mask, cache_implementation=cache, **settings).logits[0]
    assert (padded - torch.cat(alone)).abs().max() < 1e-5
