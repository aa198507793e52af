"""Rotary positions of every kind: what is frozen stays so, whatever is read, and other settings are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

import memstore
from memstore.errors import FingerprintMismatchError, WindowExceededError
from memstore.fingerprint import fingerprint
from memstore.registry import adapter_for
from tests.decoders import DECODERS, LLAMA, LONG, NATIVE, like_llama, rope
from tests.models import build, randomised, tokens

CHANGING = ["llama-dynamic", "phi3-longrope"]
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_parameters": rope("default")},
    "base": {"rope_parameters": rope("default", rope_theta=500.0)},
    "linear": {"rope_parameters": rope("linear", factor=4.0)},
    "linear, 8": {"rope_parameters": rope("linear", factor=8.0)},
    "dynamic": {"rope_parameters": rope("dynamic", factor=4.0)},
    "yarn": {"rope_parameters": rope("yarn", factor=4.0, original_max_position_embeddings=128)},
    "longrope": LONG,
}


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("grown", [False, True], ids=["fresh", "after a long text"])
@pytest.mark.parametrize("family", CHANGING)
def test_frozen_frequencies_are_those_of_the_original_window(library, family, grown):
    """Both change in the model itself once it has read a text past that window, and stay so for a while."""
    model, bare = build(family), build(family)
    document, prompt, long = tokens(60), tokens(9, seed=1, rows=1), tokens(NATIVE + 40, seed=2, rows=1)
    expected = logits(bare, torch.cat((document[None], prompt), dim=1))[:, 60:]
    facts = fingerprint(adapter_for(model)(model))
    of_long = logits(bare, long)
    if grown:
        assert torch.equal(logits(model, long), of_long)
        assert not torch.equal(model.model.rotary_emb.inv_freq, model.model.rotary_emb.original_inv_freq)
    before = model.model.rotary_emb.inv_freq.clone()
    memory = library.encode(model, input_ids=document, name="doc")
    assert memory.fingerprint == facts
    with memstore.attach(model, memory):
        assert (logits(model, prompt) - expected).abs().max() < 1e-4
        model.model.rotary_emb(torch.empty(0), torch.tensor([[4 * NATIVE - 1]]))  # whoever asks for a distant position
        assert (logits(model, prompt) - expected).abs().max() < 1e-4
        with pytest.raises(WindowExceededError, match=f"the model has {NATIVE}"):
            logits(model, tokens(NATIVE - 59, rows=1))
        assert (logits(model, prompt) - expected).abs().max() < 1e-4
    assert torch.equal(model.model.rotary_emb.inv_freq, before)
    assert torch.equal(logits(model, long), of_long)
    assert fingerprint(adapter_for(model)(model)) == facts


@pytest.mark.parametrize("family", CHANGING)
def test_windows_are_encoded_alike_whatever_was_read_before(library, family):
    model = build(family)
    first = library.encode(model, input_ids=tokens(300), name="first", window=128)
    logits(model, tokens(NATIVE + 40, rows=1))
    second = library.encode(model, input_ids=tokens(300), name="second", window=128)
    with first.open() as one, second.open() as other:
        assert all(torch.equal(one.block(part, 0), other.block(part, 0)) for part in first.manifest.parts)


@pytest.mark.parametrize("other", [name for name in ROPES if name != "default"])
def test_a_memory_of_other_rope_settings_is_refused(library, other):
    def made(name):
        return randomised(lambda: like_llama(*LLAMA, **ROPES[name])())

    plain, scaled = made("default"), made(other)
    for writer, reader, name in ((plain, scaled, "plain"), (scaled, plain, "scaled")):
        memory = library.encode(writer, input_ids=tokens(20), name=name)
        memstore.attach(writer, memory)
        with pytest.raises(FingerprintMismatchError, match=r"rope(_parameters| \(memory)"):
            memstore.attach(reader, memory)


@pytest.mark.parametrize(
    ("family", "buffer"),
    [
        ("llama", "inv_freq"),
        ("llama-yarn", "attention_scaling"),
        ("llama-dynamic", "original_inv_freq"),
        ("gemma3_text", "sliding_attention_inv_freq"),
        ("gemma3_text", "full_attention_inv_freq"),
        ("gemma3_text-linear", "full_attention_inv_freq"),
    ],
)
def test_every_frequency_in_use_is_in_the_fingerprint(library, family, buffer):
    """Whatever the configuration says."""
    model = build(family)
    memory = library.encode(model, input_ids=tokens(20), name="doc")
    memstore.attach(model, memory)
    rotary = model.model.rotary_emb
    setattr(rotary, buffer, getattr(rotary, buffer) * 1.01)
    with pytest.raises(FingerprintMismatchError, match=r"What differs: rope \(memory: \w+, model: \w+\)\."):
        memstore.attach(model, memory)


@pytest.mark.parametrize("family", DECODERS)
def test_layers_are_described_as_they_attend(family):
    """Windows are those that attention functions are given, and what is not rotary is the same at any position."""
    model = build(family)
    adapter = adapter_for(model)(model)
    given: dict[Any, int | None] = {}

    def spy(module, query, key, value, mask, **keywords):
        given[module] = keywords.get("sliding_window")
        return sdpa_attention_forward(module, query, key, value, mask, **{**keywords, "softcap": None})

    AttentionInterface.register("spy", spy)
    AttentionMaskInterface.register("spy", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.config._attn_implementation = "spy"
    logits(model, tokens(9, rows=1))
    assert [given[module] for module in adapter.self_attentions] == [
        adapter.sliding_window(layer) for layer in range(len(adapter.self_attentions))
    ]
    spec = adapter.parts("float32")["keys.0"]
    assert spec.shape == (adapter.num_kv_heads, adapter.head_dim)
    keys = torch.randn(1, 1, 2, adapter.head_dim)
    rotary = {layer: adapter.rotary_at(layer, keys, torch.tensor([[3, 4]]))[0].shape[-1] for layer in range(3)}
    expected = {"phi": 4, "phi3": 4, "gpt_neox": 4, "stablelm": 4, "gpt2": 0}.get(family, adapter.head_dim)
    assert rotary == {0: expected, 1: 0 if family == "smollm3" else expected, 2: expected}
