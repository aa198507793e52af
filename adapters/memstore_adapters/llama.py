"""Llama and the families built like it: rotary positions, grouped queries, layers of one shape."""

from __future__ import annotations

from typing import ClassVar, cast

from torch import nn
from transformers import PreTrainedModel

from memstore.families import DecoderOnlyAdapter


class LlamaAdapter(DecoderOnlyAdapter):
    """Self-attention is ``self_attn`` of each layer, rotary positions come from ``rotary_emb``.

    Keys and values are taken where attention sees them. So it makes no difference whether they come from one map or
    three, whether they are normed before they are rotated, or how many of their channels are.
    """

    model_types: ClassVar[tuple[str, ...]] = (
        *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi", "phi3", "gemma", "granite"),
        *("olmo", "olmo2", "olmo3", "starcoder2", "stablelm", "arcee", "seed_oss"),
    )

    @property
    def decoder(self) -> PreTrainedModel:
        return cast(PreTrainedModel, self.model.base_model)

    @property
    def self_attentions(self) -> list[nn.Module]:
        return [cast(nn.Module, layer.self_attn) for layer in cast(nn.ModuleList, self.decoder.layers)]

    @property
    def rotary(self) -> nn.Module:
        return cast(nn.Module, self.decoder.rotary_emb)


class SmolLM3Adapter(LlamaAdapter):
    """Some layers have no rotary positions (``config.no_rope_layers`` is 0 for these)."""

    model_types = ("smollm3",)

    def rope_of(self, layer: int) -> str | None:
        return super().rope_of(layer) if self.model.config.no_rope_layers[layer] else None
