"""A decoder of one layer, whose keys and values depend on no other token than their own, and selectors that obey.

What such a model reads of chosen spans is what the plain model reads of their text, however long the document is. So
there is something to compare with where a memory is not read whole."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
import transformers as tf

from memstore.reading.selection import BLOCK
from memstore.reading.selectors import BlockSelector
from tests.models import VOCAB, randomised, tokens

CACHE = "cache" if "cache" in signature(tf.LlamaForCausalLM.forward).parameters else "past_key_values"
LENGTH, BUDGET = 640, 64  # a document of ten blocks, of which one is read


def held(cache: tf.Cache) -> dict[str, Any]:
    """The keyword that gives a model this cache."""
    return {CACHE: cache}


def shallow(window: int = 512, layers: int = 1, sliding: int | None = None, seed: int = 0):
    """A tiny model with ``window`` positions."""
    llama: tuple[Any, Any] = (tf.LlamaForCausalLM, tf.LlamaConfig)
    kind, config = llama if sliding is None else (tf.MistralForCausalLM, tf.MistralConfig)
    extra: dict[str, Any] = {} if sliding is None else {"sliding_window": sliding}
    shape: dict[str, Any] = {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
    }
    ids: dict[str, Any] = {"vocab_size": VOCAB, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    made = config(num_hidden_layers=layers, max_position_embeddings=window, **shape, **ids, **extra)
    return randomised(lambda: kind(made), seed)


class Pointing(BlockSelector):
    """Reads the block that the last asking token names, and counts how often it was asked. listen: whether it wants to
    be told what the attention asks."""

    def __init__(self, listen: bool = True) -> None:
        self.needs_queries = listen  # type: ignore[misc]
        self.asked: list[list[int]] = []

    def score(self, question):
        scores = torch.zeros(len(question.asks), question.num_blocks)
        for row, asks in enumerate(question.asks):
            scores[row, int(question.token_ids[row][asks][-1]) % question.num_blocks] = 1
        self.asked.append(scores.argmax(1).tolist())
        return scores


def block(ids: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
    """What of the document is read for a prompt [T]."""
    start = int(ids[-1]) % (len(document) // BLOCK) * BLOCK
    return document[start : start + BLOCK]


def document(seed: int = 0) -> torch.Tensor:
    """Random ids [640]."""
    return tokens(LENGTH, seed=seed)


def prompt(last: int, seed: int = 1, length: int = 7) -> torch.Tensor:
    """[1, length] ids, the last of which names the block that answers."""
    return torch.tensor([[*tokens(length - 1, seed=seed).tolist(), last]])


def remember(library, model, ids: torch.Tensor, name: str = "doc"):
    """The memory of a document that is read in windows, so that spans of it are chosen."""
    return library.encode(model, input_ids=ids, name=name, window=128)


def greedy(new: int) -> dict[str, Any]:
    """Keywords of generate for so many tokens."""
    return {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
