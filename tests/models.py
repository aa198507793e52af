"""Tiny random models of every supported family: biases and norms randomised, so that nothing cancels by being zero.

The encoder-decoders are declared in tests/matrix.py, the decoder-only models in tests/decoders.py."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers as tf

from tests.decoders import DECODERS
from tests.decoders import VOCAB as VOCAB


def build(family: str, seed: int = 0):
    """A tiny model in evaluation mode, the same for the same seed."""
    from tests.matrix import FAMILIES  # which builds upon what is here

    return randomised(DECODERS[family].make if family in DECODERS else FAMILIES[family].make, seed)


def randomised(make: Callable[[], Any], seed: int = 0):
    """A model that ``make`` makes, in evaluation mode, with all of its parameters moved off their initial values."""
    torch.manual_seed(seed)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config.max_length = None
    return model.eval()


def set_attention(model, implementation: str) -> None:
    """``model.set_attn_implementation``, which before transformers 5.20 does not reach the stacks of a T5."""
    model.set_attn_implementation(implementation)
    for module in model.modules():
        if isinstance(module, tf.PreTrainedModel):
            module.config._attn_implementation = implementation


def clone(model):
    """An independent model with equal weights and configuration."""
    return copy.deepcopy(model)


def tokens(count: int, seed: int = 0, rows: int | None = None) -> torch.Tensor:
    """Random ids that are no special tokens: [count], or [rows, count]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, VOCAB, (count,) if rows is None else (rows, count), generator=generator)


def cross_attentions(model) -> list[Any]:
    """The cross-attention of every decoder layer, found without an adapter."""
    decoder = model.get_decoder()
    if hasattr(decoder, "block"):  # the T5 family
        return [block.layer[1].EncDecAttention for block in decoder.block]
    return [layer.encoder_attn for layer in decoder.layers]


def run(model, rows=1, **keywords):
    """Logits for a fixed prompt."""
    inputs = {"input_ids": tokens(9, seed=1, rows=rows)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens(5, seed=2, rows=rows)
    with torch.no_grad():
        return model(**inputs, **keywords).logits


def read(store, model, name="doc", length=60, **keywords):
    """The memory of a document of random tokens."""
    return store.encode(model, input_ids=tokens(length, seed=len(name)), name=name, **keywords)
