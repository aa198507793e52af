"""A memory of one window is a prefix that the plain model need not read again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import memstore
from memstore.errors import AttachError, FingerprintMismatchError, UnsupportedModelError
from tests.decoders import DECODERS
from tests.models import build, tokens
from tests.talks import greedy, held


@pytest.mark.parametrize("family", sorted(DECODERS))
def test_it_holds_what_the_plain_model_has_read(library, family):
    model, text, ids = build(family), tokens(60), tokens(9, seed=1, rows=1)
    memory, whole = library.encode(model, input_ids=text, name="doc"), torch.cat((text[None], ids), dim=1)
    cache, plain = memory.to_cache(model), DynamicCache(config=model.config)
    layers: Any = zip(cache.layers, plain.layers, strict=True)
    with torch.no_grad():
        model(input_ids=text[None], **held(plain))
        for ours, theirs in layers:
            assert ours.get_seq_length() == 60 and ours.keys.shape == theirs.keys.shape
            assert (ours.keys - theirs.keys).abs().max() < 1e-4 and torch.equal(ours.values, theirs.values)
        expected = model(input_ids=whole).logits[:, 60:]
        assert (model(input_ids=ids, **held(cache)).logits - expected).abs().max() < 1e-3
    written = model.generate(input_ids=whole, **held(memory.to_cache(model)), **greedy(8))
    assert torch.equal(written, model.generate(input_ids=whole, **greedy(8)))


def test_several_rows(library):
    model, text, ids = build("llama"), tokens(60), tokens(9, seed=1, rows=3)
    cache = library.encode(model, input_ids=text, name="doc").to_cache(model)
    cache.batch_repeat_interleave(3)
    whole = torch.cat((text.expand(3, -1), ids), dim=1)
    written = model.generate(input_ids=whole, **held(cache), **greedy(8))
    assert torch.equal(written, model.generate(input_ids=whole, **greedy(8)))


def test_what_is_no_prefix(library):
    model = build("llama")
    long = library.encode(model, input_ids=tokens(300), name="long", window=128)
    with pytest.raises(AttachError, match=r"windows of 128 tokens.*window=300.*it has 512"):
        long.to_cache(model)
    doc = library.encode(model, input_ids=tokens(60), name="doc")
    with pytest.raises(FingerprintMismatchError, match="weights"):
        doc.to_cache(build("llama", seed=1))
    with pytest.raises(UnsupportedModelError, match="no transformers model"):
        doc.to_cache(torch.nn.Linear(2, 2))
    bart = build("bart")
    with pytest.raises(AttachError, match="encoder"):
        library.encode(bart, input_ids=tokens(60), name="states").to_cache(bart)


def test_a_cache_from_a_memory_is_not_read_beside_another(library):
    """It was filled outside of the attachment, and would stand where the other memory stands."""
    model, ids = build("llama"), tokens(69, rows=1)
    doc = library.encode(model, input_ids=ids[0, :60], name="doc")
    with memstore.attach(model, doc) as attached, pytest.raises(AttachError, match="outside the attachment"):
        attached.generate(input_ids=ids, max_new_tokens=2, **held(doc.to_cache(model)))
