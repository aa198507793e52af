"""GPT-NeoX and so Pythia: one map for queries, keys and values, of which a part of the channels is rotary."""

from __future__ import annotations

from typing import cast

from torch import nn
from transformers import PreTrainedModel

from memstore.families import DecoderOnlyAdapter


class GPTNeoXAdapter(DecoderOnlyAdapter):
    """Every head has keys and values of its own."""

    model_types = ("gpt_neox",)

    @property
    def decoder(self) -> PreTrainedModel:
        return cast(PreTrainedModel, self.model.base_model)

    @property
    def self_attentions(self) -> list[nn.Module]:
        return [cast(nn.Module, layer.attention) for layer in cast(nn.ModuleList, self.decoder.layers)]

    @property
    def rotary(self) -> nn.Module:
        return cast(nn.Module, self.decoder.rotary_emb)

    @property
    def num_kv_heads(self) -> int:
        return int(self.model.config.num_attention_heads)

    @property
    def head_dim(self) -> int:
        return int(self.model.config.hidden_size) // self.num_kv_heads
