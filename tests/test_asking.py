"""The sample of queries is what the model's own modules compute, and bounded."""

from __future__ import annotations

import itertools
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BartModel
from transformers.modeling_outputs import BaseModelOutput

import memstore
from memstore.errors import AttachError, CheckError, HookError
from memstore.interfaces import ModelAdapter
from memstore.reading import asking
from memstore.registry import adapter_for
from tests import tiny
from tests.models import build, cross_attentions, read

ENCODER_DECODERS = ["bart", "pegasus_x", "led", "t5", "longt5"]
LLAMAS = ["llama", "mistral", "mistral-sliding", "qwen2", "qwen3"]
DECODERS = [*LLAMAS, "gemma2", "gemma3_text", "gpt2", "phi3-longrope", "smollm3"]
FAMILIES = [*ENCODER_DECODERS, "t5gemma", *DECODERS]


def asked(model, memory):
    with memory.open() as opened:
        return adapter_for(model)(model).queries(opened)


def outputs_of(modules, run):
    """What each of these modules returned while ``run()`` ran: float64 [tokens, width]."""
    taken: list[list[torch.Tensor]] = [[] for _ in modules]
    hooks = [
        module.register_forward_hook(lambda module, args, output, into=into: into.append(output))
        for module, into in zip(modules, taken, strict=True)
    ]
    with torch.no_grad():
        run()
    for hook in hooks:
        hook.remove()
    return [torch.cat(each, dim=1)[0].flatten(1).double().numpy() for each in taken]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_sample_is_bounded_finite_and_always_the_same(library, family):
    model = build(family)
    implementation, settings = model.config._attn_implementation, model.generation_config
    for length in (1, 100):
        memory = read(library, model, f"{family} {length}", length, **({} if family in DECODERS else {"window": 32}))
        sample = asked(model, memory)
        heads = model.config.num_attention_heads if family in DECODERS else adapter_for(model)(model).cross_attentions()
        width = memory.manifest.parts["keys.0" if family in DECODERS else "hidden"].shape[-1]
        count = len(sample[0])
        assert 0 < count <= 128
        for layer, queries in sample.items():
            assert queries.shape == (count, heads if isinstance(heads, int) else heads[layer].num_heads, width)
            assert queries.dtype == torch.float32 and queries.isfinite().all() and queries.is_contiguous()
        model.train()  # with dropout
        again = asked(model, memory)
        assert model.training
        model.eval()
        assert sample.keys() == again.keys() and all(torch.equal(sample[layer], again[layer]) for layer in sample)
    assert model.config._attn_implementation == implementation and model.generation_config is settings


@pytest.mark.parametrize("family", ENCODER_DECODERS)
def test_an_encoder_decoder_asks_what_its_query_maps_give(library, family):
    """What the plain model asks while it writes, with the key map applied head by head in float64."""
    model = build(family)
    memory = read(library, model)
    with memory.open() as opened:
        states = opened.rows("hidden", 0, 60)[None].clone()
    settings = {"max_length": 33, "do_sample": False, "num_beams": 1}
    t5 = "t5" in family
    modules = cross_attentions(model)
    maps = [(module.q, module.k) if t5 else (module.q_proj, module.k_proj) for module in modules]
    prompt = BaseModelOutput(last_hidden_state=states)
    plain = outputs_of([query for query, _ in maps], lambda: model.generate(encoder_outputs=prompt, **settings))
    sample = asked(model, memory)
    assert list(sample) == list(range(len(modules)))
    for layer, (query, (_, key)) in enumerate(zip(plain, maps, strict=True)):
        heads = 4 if t5 else 6
        weight = np.split(key.weight.detach().double().numpy(), heads)  # [c, d] for each head
        scaling = 1 if t5 else weight[0].shape[0] ** -0.5
        expected = [part @ weight[head] * scaling for head, part in enumerate(np.split(query, heads, axis=1))]
        np.testing.assert_allclose(sample[layer], np.stack(expected, axis=1), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", [*LLAMAS, "olmo3", "smollm3"])
@pytest.mark.parametrize("length", [60, 200])
def test_a_decoder_asks_what_its_query_maps_give_turned_to_a_fixed_distance(library, family, length):
    """The plain model's pass over each passage; complex numbers rotate it by half of what a layer sees."""
    model = build(family)
    memory = read(library, model, length=length)
    starts = [0] if length <= 64 else [0, 45, 90, 136]
    attentions = [layer.self_attn for layer in model.model.layers]
    modules = [attention.q_norm if family in ("qwen3", "olmo3") else attention.q_proj for attention in attentions]
    passages = []
    for start in starts:
        ids = torch.tensor(memory.token_ids[start : start + 64])[None].long()
        passages.append(outputs_of(modules, lambda ids=ids: model(input_ids=ids)))
    kept = np.linspace(0, sum(len(each[0]) for each in passages) - 1, min(128, 64 * len(starts), length)).round()
    sample = asked(model, memory)
    for layer in range(3):
        plain = np.concatenate([each[layer] for each in passages])[kept.astype(int)]
        plain = plain.reshape(len(plain), 6, 2, -1)  # both halves of the channels of each of 6 heads
        scaling = attentions[layer].scaling
        turned = (plain[:, :, 0] + 1j * plain[:, :, 1]) * np.exp(1j * angles_of(model, family, layer)) * scaling
        expected = np.concatenate((turned.real, turned.imag), axis=-1)
        np.testing.assert_allclose(sample[layer], expected, rtol=1e-3, atol=1e-4)


def angles_of(model, family, layer):
    """By how much half of what a layer sees turns its queries."""
    kind = model.config.layer_types[layer] if family == "olmo3" else None
    window = None if kind == "full_attention" else getattr(model.config, "sliding_window", None)
    inv_freq = getattr(model.model.rotary_emb, "inv_freq" if kind is None else f"{kind}_inv_freq")
    rotary = 0 if family == "smollm3" and layer == 1 else 1
    return rotary * (window or 512) // 2 * inv_freq.double().numpy()


def test_a_passage_is_read_behind_the_prefix_of_the_memory(library):
    """Its own queries do not count, and what follows it is read as it was when it was encoded."""
    llama, tokenizer = tiny.llama(), tiny.tokenizer()
    memory = library.encode(llama, tokenizer, "In the beginning was the word. " * 60, name="doc", window=512)
    prefix, ids = list(memory.manifest.prefix_ids), memory.token_ids.tolist()
    assert prefix
    sample = asked(llama, memory)
    projections = [layer.self_attn.q_proj for layer in llama.model.layers]
    last = torch.tensor([prefix + ids[-64:]])
    plain = outputs_of(projections, lambda: llama(input_ids=last))
    for layer in (0, 1):
        lengths = sample[layer].norm(dim=-1)  # which turning leaves as they are
        expected = np.linalg.norm(plain[layer].reshape(len(plain[layer]), 4, 8), axis=-1) / np.sqrt(8)
        assert len(lengths) == 128
        np.testing.assert_allclose(lengths[-1], expected[-1], rtol=1e-4)
        assert len(expected) == len(prefix) + 64


def test_what_a_checkpoint_says_of_beams_and_lengths_does_not_count(library, caplog):
    model = build("bart")
    memory = read(library, model, length=200)
    expected = asked(model, memory)
    settings = {"num_beams": 4, "early_stopping": True, "length_penalty": 2.0, "min_length": 56, "max_length": 142}
    settings |= {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "max_new_tokens": 90, "use_cache": False}
    model.generation_config.update(**settings)
    before = model.generation_config.to_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sample = asked(model, memory)
    assert not caplog.records and model.generation_config.to_dict() == before
    assert all(torch.equal(sample[layer], expected[layer]) for layer in expected)


@pytest.mark.parametrize(("family", "positions"), [("bart", 10), ("llama", 3)])
def test_the_size_of_a_sample_is_bounded(library, monkeypatch, family, positions):
    model = build(family)
    memory = read(library, model, length=200, window=64)
    whole = asked(model, memory)
    nbytes = sum(queries.nbytes for queries in whole.values()) // 128
    monkeypatch.setattr(asking, "BYTES", positions * nbytes + nbytes // 2)
    sample = asked(model, memory)
    assert sum(queries.nbytes for queries in sample.values()) == positions * nbytes
    monkeypatch.setattr(asking, "BYTES", 10)  # a single position is kept, whatever it takes
    assert all(queries.shape[0] == 1 for queries in asked(model, memory).values())


@given(num_tokens=st.integers(1, 10_000), size=st.integers(1, 2_000))
def test_passages_spread_evenly_over_the_document(num_tokens, size):
    passages = asking.passages(num_tokens, size)
    assert 1 <= len(passages) <= 4 and len(set(passages)) == len(passages)
    assert all(0 <= start < end <= num_tokens and end - start == min(size, num_tokens) for start, end in passages)
    assert passages[0][0] == 0 and passages[-1][1] == num_tokens
    steps = [later[0] - earlier[0] for earlier, later in itertools.pairwise(passages)]
    assert not steps or max(steps) - min(steps) <= 1


@pytest.mark.parametrize("family", ["bart", "llama"])
def test_an_attached_model_is_not_asked(library, family):
    model = build(family)
    memory = read(library, model)
    with memstore.attach(model, memory), pytest.raises(AttachError, match="attached already; leave that attachment"):
        asked(model, memory)
    assert len(asked(model, memory)) == 3


def test_a_model_without_a_head_cannot_write(library):
    model = BartModel(build("bart").config).eval()
    memory = library.encode(model, input_ids=[5, 6, 7], name="doc")
    with pytest.raises(CheckError, match="BartModel has no head"):
        asked(model, memory)


@pytest.mark.parametrize("family", ["bart", "llama"])
def test_a_model_that_ignores_the_hook_is_found_out(library, monkeypatch, family):
    model = build(family)
    memory = read(library, model)
    monkeypatch.setattr(type(model), "forward", lambda *args, **kwargs: None)
    monkeypatch.setattr(type(model), "generate", lambda *args, **kwargs: None)
    monkeypatch.setattr(type(model.base_model), "forward", lambda *args, **kwargs: None)
    with pytest.raises(HookError, match="without calling all of its attention modules"):
        asked(model, memory)


def test_an_adapter_that_cannot_sample_says_so():
    with pytest.raises(CheckError, match="SimpleNamespace gives no sample of what int asks"):
        ModelAdapter.queries(SimpleNamespace(model=3), None)  # type: ignore[arg-type]
