"""A talk over memories goes on turn by turn, and everything that generate can do reads the same spans."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import DynamicCache, StaticCache

import memstore
from memstore.errors import AttachError, ConfigError
from memstore.reading.chat import BETWEEN, chat_frame, chat_text
from memstore.reading.selectors.scouting import Scouting
from tests import tiny
from tests.models import build, tokens
from tests.talks import BUDGET, Pointing, block, document, greedy, held, prompt, remember, shallow

EXACT = 1e-4


def logits(model, ids, **keywords):
    with torch.no_grad():
        return model(input_ids=ids, **keywords).logits


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gemma3_text", "gpt2"])
def test_a_talk_in_turns_is_read_as_if_the_document_stood_before_it(library, family):
    model, text = build(family), tokens(60)
    memory = library.encode(model, input_ids=text, name="doc")
    static, answers = StaticCache(config=model.config, max_cache_len=64), []
    with memstore.attach(model, memory) as attached:
        for cache in (DynamicCache(config=model.config), static):
            first = model.generate(input_ids=prompt(43), **held(cache), **greedy(5))
            talk = torch.cat((first, prompt(87, seed=2)), dim=1)
            written = attached.generate(input_ids=talk, **held(cache), **greedy(5))
            answers.append((talk, written))
    assert "generate" not in vars(model)
    for talk, written in answers:
        plain = model.generate(input_ids=torch.cat((text[None], talk), dim=1), **greedy(5))
        assert torch.equal(written, plain[:, 60:])


@pytest.mark.parametrize("listen", [False, True])
def test_a_new_question_reads_another_block(library, listen):
    """And a question about the same one goes on with it; tokens that were read before stay where they are."""
    model, text, selector = shallow(), document(), Pointing(listen)
    cache, talk = DynamicCache(config=model.config), torch.empty(1, 0, dtype=torch.long)
    with memstore.attach(model, remember(library, model, text), budget=BUDGET, selector=selector, explain=True) as here:
        for last, generate in ((43, model.generate), (87, here.generate), (27, model.generate)):
            talk = torch.cat((talk, prompt(last)), dim=1)
            before = copy.deepcopy(cache)
            written = generate(input_ids=talk, **held(cache), **greedy(8))
            readings = here.provenance()
            assert {r.start_token // 64 for r in readings} == {last % 10} and {r.step for r in readings} == set(
                range(8)
            )
            again = generate(input_ids=talk, **held(before), **greedy(8))  # a copy of the cache knows the talk too
            assert torch.equal(again, written)
            talk = written
    assert selector.asked[:6] == [[3], [3], [7], [7], [7], [7]]
    with torch.no_grad():
        whole = torch.cat((block(prompt(27)[0], text)[None], talk), dim=1)
        assert torch.equal(model(input_ids=whole).logits[0, -9:-1].argmax(-1), talk[0, -8:])


def test_every_row_of_a_batch_has_a_talk_of_its_own(library):
    """Rows of different lengths, filled up between the turns too, of which one asks for something else."""
    model, text, selector = shallow(), document(), Pointing()
    lasts, lengths = ((43, 43), (43, 87)), ((7, 5), (4, 7))
    with memstore.attach(model, remember(library, model, text), budget=BUDGET, selector=selector):
        cache, ids, mask = DynamicCache(config=model.config), torch.empty(2, 0).long(), torch.empty(2, 0).long()
        for turn in range(2):
            new = [prompt(lasts[row][turn], seed=row, length=lengths[row][turn])[0] for row in range(2)]
            ids = torch.cat((ids, torch.stack([torch.nn.functional.pad(x, (7 - len(x), 0)) for x in new])), dim=1)
            mask = torch.cat((mask, torch.tensor([[0] * (7 - len(x)) + [1] * len(x) for x in new])), dim=1)
            ids = model.generate(input_ids=ids, attention_mask=mask, **held(cache), **greedy(4))
            mask = torch.nn.functional.pad(mask, (0, 4), value=1)
    for row in range(2):
        talk = ids[row][mask[row].bool()]
        whole = torch.cat((block(torch.tensor([lasts[row][1]]), text), talk))[None]
        assert torch.equal(logits(model, whole)[0, -5:-1].argmax(-1), talk[-4:])


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True, "num_return_sequences": 3, "top_k": 20},
    "several beams": {"num_beams": 4, "num_return_sequences": 2},
    "static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "beams without a cache": {"num_beams": 3, "use_cache": False},
    "chunks": {"prefill_chunk_size": 4},
    "chunks in a static cache": {"prefill_chunk_size": 4, "cache_implementation": "static"},
    "words of the prompt": {"prompt_lookup_num_tokens": 4},
    "assistant": {"assistant_model": 1},
    "an assistant as good as itself": {"assistant_model": 0},
}


@pytest.mark.parametrize("way", WAYS)
def test_whatever_generate_does_it_reads_what_the_prompt_asks_for(library, way):
    """As the plain model with the text of those spans before the prompt; no candidate or chunk chooses."""
    model, text, selector, settings = shallow(), document(), Pointing(), greedy(12) | WAYS[way]
    if "assistant_model" in settings:
        settings["assistant_model"] = shallow(seed=settings["assistant_model"])
    ids = torch.cat((prompt(43, length=9)[:, :-1], prompt(43, length=9)), dim=1)  # repeats itself: there is a candidate
    plain = {key: value for key, value in settings.items() if key != "prefill_chunk_size"}
    torch.manual_seed(0)
    expected = model.generate(input_ids=torch.cat((block(ids[0], text)[None], ids), dim=1), **plain)[:, 64:]
    with memstore.attach(model, remember(library, model, text), budget=BUDGET, selector=selector):
        torch.manual_seed(0)
        assert torch.equal(model.generate(input_ids=ids, **settings), expected)
    assert selector.asked == [[3]]


def goes_on_in_chunks(model):
    """Whether transformers by itself reads a later turn in chunks as it does at once."""
    written = []
    for extra in ({}, {"prefill_chunk_size": 4}):
        cache = DynamicCache(config=model.config)
        talk = model.generate(input_ids=prompt(43, length=9), **held(cache), **greedy(2))
        model.generate(input_ids=torch.cat((talk, prompt(87, length=9)), dim=1), **held(cache), **greedy(2), **extra)
        keys = getattr(cache.layers[0], "keys")  # noqa: B009
        written.append(keys)
    once, chunks = written
    return once.shape == chunks.shape and torch.allclose(once, chunks, atol=1e-4)


def test_a_later_turn_is_read_alike_in_chunks(library):
    """With candidates transformers reads the talk twice, and writes something else even without a memory: refused."""
    model, text, selector = shallow(), document(), Pointing()
    refused = {"prompt_lookup_num_tokens": "the whole talk again"}
    if not goes_on_in_chunks(model):  # older versions of transformers forget the cache in both
        refused = dict.fromkeys(("prompt_lookup_num_tokens", "prefill_chunk_size"), "attention_mask has shape")
    written = []
    with memstore.attach(model, remember(library, model, text), budget=BUDGET, selector=selector):
        for extra in ({}, {"prefill_chunk_size": 4}, {"prompt_lookup_num_tokens": 4}):
            cache = DynamicCache(config=model.config)
            talk = model.generate(input_ids=prompt(43, length=9), **held(cache), **greedy(6), **extra)
            talk = torch.cat((talk, prompt(87, length=9)), dim=1)
            if message := refused.get(next(iter(extra), "")):
                with pytest.raises(AttachError, match=message):
                    model.generate(input_ids=talk, **held(cache), **greedy(12), **extra)
            else:
                written.append(model.generate(input_ids=talk, **held(cache), **greedy(12), **extra))
    assert all(torch.equal(each, written[0]) for each in written)
    assert selector.asked == [[3], [7], [3], [7], [3]] if len(written) == 2 else [[3], [7], [3], [3]]


def test_scouting_hears_a_prompt_alike_however_it_is_given(library):
    """Three layers, the default selector, a padded batch: the same blocks and the same answer."""
    model, memories = build("llama"), []
    memories = [library.encode(model, input_ids=tokens(640, seed=i), name=str(i), window=128) for i in range(2)]
    ids, mask = tokens(12, seed=5, rows=2), torch.ones(2, 12, dtype=torch.long)
    ids[1, :5], mask[1, :5] = 0, 0
    chosen, written = [], []
    with memstore.attach(model, rows=[[memory] for memory in memories], budget=BUDGET) as attached:
        for extra in ({}, {"prefill_chunk_size": 5}, {"use_cache": False}, {"cache_implementation": "static"}):
            written.append(model.generate(input_ids=ids, attention_mask=mask, **greedy(6), **extra))
            chosen.append([[(each.document, each.start_token) for each in row] for row in attached.selection()])
        with pytest.raises(AttachError, match="attention_mask="):
            model.generate(input_ids=ids, **greedy(6), prefill_chunk_size=5)
    assert all(torch.equal(each, written[0]) for each in written) and all(each == chosen[0] for each in chosen)


def test_padding_on_both_sides(library):
    """A pass of one's own gives each row what it gets alone; generate, which would write behind padding, says no."""
    model, text = shallow(layers=2), document()
    rows, pads = [prompt(43, seed=i, length=9 - i)[0] for i in range(3)], [(0, 0), (1, 0), (0, 2)]
    ids = torch.stack([torch.nn.functional.pad(row, pad) for row, pad in zip(rows, pads, strict=True)])
    mask = torch.stack(
        [torch.nn.functional.pad(torch.ones_like(row), pad) for row, pad in zip(rows, pads, strict=True)]
    )
    with memstore.attach(model, remember(library, model, text), budget=BUDGET) as attached:
        together = logits(model, ids, attention_mask=mask)
        for row, (left, right) in enumerate(pads):
            alone = logits(model, rows[row][None])[0]
            assert (together[row, left : 9 - right] - alone).abs().max() < EXACT
        with pytest.raises(AttachError, match="Pad on the left"):
            attached.generate(input_ids=ids, attention_mask=mask, max_new_tokens=2)


def test_padding_in_a_later_turn_of_a_static_cache(library):
    """The padding of the first turn is none of the second, in which another row is filled up."""
    model, text, selector, written = shallow(), document(), Pointing(), []
    first, second = tokens(12, seed=3, rows=2), tokens(4, seed=9, rows=2)
    masks = torch.ones_like(first), torch.ones_like(second)
    first[1, :9], masks[0][1, :9], second[0, :2], masks[1][0, :2] = 0, 0, 0, 0
    with memstore.attach(model, remember(library, model, text), budget=BUDGET, selector=selector):
        for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=64)):
            talk = model.generate(input_ids=first, attention_mask=masks[0], **held(cache), **greedy(3))
            mask = torch.cat((masks[0], torch.ones(2, 3, dtype=torch.long), masks[1]), dim=1)
            talk = torch.cat((talk, second), dim=1)
            written.append(model.generate(input_ids=talk, attention_mask=mask, **held(cache), **greedy(3)))
    assert torch.equal(*written) and selector.asked[:2] == selector.asked[2:]


def test_beams_are_not_taken_for_rows(library):
    """Two rows of memories and one prompt: its beams are no second row."""
    model = shallow()
    memories = [remember(library, model, document(i), str(i)) for i in range(2)]
    with memstore.attach(model, rows=[[memory] for memory in memories], budget=BUDGET):
        for several in ({"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}):
            with pytest.raises(AttachError, match="2 rows of memories are attached; a batch of 1"):
                model.generate(input_ids=prompt(43), max_new_tokens=2, **several)


@pytest.mark.parametrize("way", ["keyword", "config", "model"])
def test_guidance_is_refused(library, way):
    """It reads a second time without the prompt, where nothing tells that the memory is not meant."""
    model = shallow()
    config = copy.deepcopy(model.generation_config)
    config.guidance_scale = 3.0
    given = {"keyword": {"guidance_scale": 3.0}, "config": {"generation_config": config}, "model": {}}[way]
    if way == "model":
        model.generation_config = config
    memory = library.encode(model, input_ids=tokens(40), name="doc")
    with memstore.attach(model, memory), pytest.raises(AttachError, match="guidance_scale"):
        model.generate(input_ids=prompt(43), **greedy(2), **given)
    assert model.generate(input_ids=prompt(43), **greedy(2), **given).shape == (1, 9)


def test_a_model_that_returns_tuples(library):
    model, text, ids = shallow(), document(), torch.cat((prompt(43), torch.tensor([[11]])), dim=1)
    memory = remember(library, model, text)
    with memstore.attach(model, memory, budget=BUDGET, selector=Pointing()), torch.no_grad():
        cache = DynamicCache(config=model.config)
        model.model(input_ids=ids[:, :7], return_dict=False, **held(cache))
        states = model.model(input_ids=ids[:, 7:], return_dict=False, **held(cache))[0]
    expected = logits(model, torch.cat((block(ids[0, :7], text)[None], ids), dim=1))[:, -1:]
    assert (model.lm_head(states) - expected).abs().max() < EXACT


@pytest.mark.parametrize("after", ["replaced", "deleted"])
def test_what_became_of_generate_in_the_meantime_stays(library, after):
    model = shallow()
    memory, mine = library.encode(model, input_ids=tokens(40), name="doc"), list
    with memstore.attach(model, memory):
        del model.generate
        if after == "replaced":
            model.generate = mine
    assert vars(model).get("generate") is (mine if after == "replaced" else None)


def test_what_the_model_proposes_to_itself_is_not_told(library):
    """Provenance is that of the tokens that came to be, in every layer, also where one layer guesses them first."""
    model, told = shallow(layers=2), []
    with memstore.attach(model, remember(library, model, document()), budget=BUDGET, explain=True) as attached:
        for extra in ({}, {"assistant_early_exit": 1}, {"assistant_model": model}):
            attached.generate(input_ids=prompt(43), **greedy(6), **extra)
            readings = attached.provenance()
            told.append({(each.step, each.layer, each.start_token): each.mass for each in readings})
    assert told[0] == pytest.approx(told[1], abs=EXACT) and told[0] == pytest.approx(told[2], abs=EXACT)


def test_blocks_are_scored_in_float32_under_autocast(library):
    model, scored = shallow(), []

    class Watched(Scouting):
        def score(self, question, prior=None):
            scored.append(super().score(question, prior))
            return scored[-1]

    memory = remember(library, model, document())
    with memstore.attach(model, memory, budget=BUDGET, selector=Watched()), torch.autocast("cpu", torch.bfloat16):
        logits(model, prompt(43))
    assert scored[0].dtype == torch.float32


@pytest.fixture(scope="module")
def chat():
    return tiny.llama(), tiny.tokenizer()


def test_a_chat(library, chat):
    """One message is a prompt; of a longer chat all is read, and the last message is looked for."""
    model, tokenizer = chat
    text = "In the beginning was the word. " * 60
    memory = library.encode(model, tokenizer, text, name="doc", window=512)
    settings = {"max_new_tokens": 6, "do_sample": False, "tokenizer": tokenizer}
    messages = [{"role": "user", "content": "Who was it?"}]
    seen = []

    class Listening(Pointing):
        def score(self, question):
            seen.append(
                [tokenizer.decode(ids[asks]) for ids, asks in zip(question.token_ids, question.asks, strict=True)]
            )
            return super().score(question)

    with memstore.attach(model, memory, selector=Listening(), budget=BUDGET) as attached:
        assert attached.generate(messages, **settings) == attached.generate("Who was it?", **settings)
        longer = [*messages, {"role": "assistant", "content": "A word."}, {"role": "user", "content": "When?"}]
        answer = attached.generate(longer, **settings)
        whole = str(tokenizer.apply_chat_template(longer, tokenize=False, add_generation_prompt=True))
        whole = BETWEEN + whole.removeprefix(chat_frame(tokenizer).before)
        ids = tokenizer(whole, add_special_tokens=False, return_tensors="pt")["input_ids"]
        by_hand = attached.generate(input_ids=ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        assert answer == tokenizer.decode(by_hand, skip_special_tokens=True).strip()
    assert seen[0] == seen[1] and seen[2] == ["<|start|>user\nWhen?"]
    assert seen[3][0].endswith("A word.<|end|>\n" + seen[2][0])


def test_a_template_that_refuses_a_system_message_alone():
    """Then nothing tells where the last message begins, and all of the chat asks."""
    tokenizer = copy.deepcopy(tiny.tokenizer())
    alone = "{% if messages[-1].role != 'user' %}{{ raise_exception('no question') }}{% endif %}"
    tokenizer.chat_template = alone + "{% for message in messages %}{{ message.content }};{% endfor %}"
    system, user = ({"role": role, "content": role} for role in ("system", "user"))
    assert chat_text(tokenizer, [system, user]) == ("system;user;", "system;user;")
    with pytest.raises(AttachError, match="no question"):
        chat_text(tokenizer, [user, system])


def test_a_template_that_refuses_a_text(library):
    """A document of one window needs none; a longer one, and a prompt in words, are refused with what to do."""
    model, tokenizer = tiny.llama(), copy.deepcopy(tiny.tokenizer())
    tokenizer.chat_template = "{{ raise_exception('only lists') }}"
    memory = library.encode(model, tokenizer, "In the beginning. ", name="short")
    with memstore.attach(model, memory) as attached, pytest.raises(ConfigError, match=r"only lists.* or to None"):
        attached.generate("Who?", tokenizer=tokenizer)
    with pytest.raises(ConfigError, match="only lists"):
        library.encode(model, tokenizer, "In the beginning. " * 60, name="long", window=512)


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ([], "at least one message"),
        ([{"role": "user"}], "Message 0"),
        ([{"role": "user", "content": "a"}, "b"], "Message 1"),
        ([{"role": "user", "content": "\ud800"}], "not valid Unicode"),
    ],
    ids=["none", "no content", "a string", "no Unicode"],
)
def test_what_is_no_chat(library, chat, messages, problem):
    model, tokenizer = chat
    memory = library.encode(model, tokenizer, "In the beginning. ", name="doc")
    with memstore.attach(model, memory) as attached, pytest.raises(AttachError, match=problem):
        attached.generate(messages, tokenizer=tokenizer)


def test_words_do_not_go_on_with_a_cache(library, chat):
    model, tokenizer = chat
    memory = library.encode(model, tokenizer, "In the beginning. ", name="doc")
    with memstore.attach(model, memory) as attached:
        cache = DynamicCache(config=model.config)
        attached.generate(input_ids=torch.tensor([[5, 6, 7]]), max_new_tokens=2, **held(cache))
        with pytest.raises(AttachError, match="give input_ids="):
            attached.generate("And then?", tokenizer=tokenizer, **held(cache))
