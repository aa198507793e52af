"""Llama and the families that share its attention: rotary positions, grouped queries."""

from __future__ import annotations

from typing import cast

from torch import nn
from transformers import PreTrainedModel

from memstore.families import DecoderOnlyAdapter


class LlamaAdapter(DecoderOnlyAdapter):
    """Self-attention is ``self_attn`` of each layer, rotary positions come from ``rotary_emb``.

    Qwen3 norms queries and keys before rotation; stored keys are taken after that norm, so it needs nothing more.
    """

    model_types = ("llama", "mistral", "qwen2", "qwen3")

    @property
    def decoder(self) -> PreTrainedModel:
        return cast(PreTrainedModel, self.model.base_model)

    @property
    def self_attentions(self) -> list[nn.Module]:
        return [cast(nn.Module, layer.self_attn) for layer in cast(nn.ModuleList, self.decoder.layers)]

    @property
    def rotary(self) -> nn.Module:
        return cast(nn.Module, self.decoder.rotary_emb)
