"""GPT-2, whose positions are learned and added to the tokens."""

from __future__ import annotations

from typing import cast

from torch import nn
from transformers import PreTrainedModel

from memstore.families import DecoderOnlyAdapter


class GPT2Adapter(DecoderOnlyAdapter):
    """A document is one window, by default the longest there is, and is read whole in front of the prompt."""

    model_types = ("gpt2",)
    whole_only = "its positions are learned and added to its tokens, so what it read at one place holds at no other"

    @property
    def decoder(self) -> PreTrainedModel:
        return cast(PreTrainedModel, self.model.base_model)

    @property
    def self_attentions(self) -> list[nn.Module]:
        return [cast(nn.Module, block.attn) for block in cast(nn.ModuleList, self.decoder.h)]

    @property
    def rotary(self) -> None:
        return None

    @property
    def num_kv_heads(self) -> int:
        return int(self.model.config.num_attention_heads)
