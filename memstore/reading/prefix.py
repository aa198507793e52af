"""A memory of one window as a transformers cache: a prefix that need not be read again."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from transformers import DynamicCache, PreTrainedModel

from memstore.attaching import check_fit
from memstore.errors import AttachError, UnsupportedModelError
from memstore.reading.excerpt import load_excerpt
from memstore.reading.passes import device_of
from memstore.reading.selection import Span
from memstore.registry import adapter_for

if TYPE_CHECKING:
    from memstore.families import DecoderOnlyAdapter
    from memstore.memory import Memory


def cache_of(memory: Memory, model: PreTrainedModel) -> DynamicCache:
    """What the cache of the plain model holds after it has read the document, on its device and in its dtype; layers
    with a sliding window hold the document's end. For the errors see :meth:`memstore.memory.Memory.to_cache`."""
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModelError(f"{type(model).__name__} is no transformers model. Give the model itself.")
    if memory.kind != "kv":
        raise AttachError(
            f"Memory {memory.name!r} holds what an encoder wrote, which is no cache of a decoder. Attach it."
        )
    adapter = cast("DecoderOnlyAdapter", adapter_for(model)(model))
    check_fit([memory], adapter, strict=True)
    window = memory.manifest.rule.window
    if memory.num_tokens > window:
        raise AttachError(
            f"Memory {memory.name!r} was read in windows of {window} tokens, so it is not what the model would have "
            f"read of its {memory.num_tokens} tokens at once. Attach it; or encode the document with "
            f"window={memory.num_tokens}, if the model has as many positions (it has {adapter.native_window})."
        )
    whole, n = [Span(0, 0, memory.num_tokens)], memory.num_tokens
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    with memory.open() as opened, adapter.held(), torch.no_grad():
        for layer in range(len(adapter.self_attentions)):
            excerpt = load_excerpt(adapter, [memory], lambda _: opened, whole, n, device_of(model), [layer])
            keys, values = (part[None].to(model.dtype) for part in excerpt.layers[layer])
            cache.update(keys, values, layer)
    return cache
