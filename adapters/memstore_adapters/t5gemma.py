"""T5Gemma: groups of heads share keys and values, and scores are soft-capped."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from memstore.cross_attention import CrossAttention, plain_linear
from memstore.errors import UnsupportedModelError
from memstore.families import EncoderDecoderAdapter
from memstore.hooks import base_implementation


class T5GemmaAdapter(EncoderDecoderAdapter):
    """Cross-attention is ``cross_attn`` of each decoder layer. The encoder may have another width than the decoder."""

    model_types = ("t5gemma",)

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        attention = self.model.get_decoder().layers[0].cross_attn
        implementation = base_implementation(attention)
        if attention.attn_logit_softcapping is not None and implementation != "eager":
            raise UnsupportedModelError(
                f"{type(model).__name__} soft-caps its attention scores, which {implementation} attention leaves out. "
                'Call model.set_attn_implementation("eager").'
            )

    @property
    def native_window(self) -> int:
        return int(self.model.config.encoder.max_position_embeddings)

    def cross_attentions(self) -> list[CrossAttention]:
        return [
            _cross_attention(layer_idx, layer.cross_attn)
            for layer_idx, layer in enumerate(self.model.get_decoder().layers)
        ]


def _cross_attention(layer_idx: int, attention: Any) -> CrossAttention:
    return CrossAttention(
        attention,
        layer_idx,
        attention.config.num_attention_heads,
        plain_linear(attention.k_proj, attention),
        plain_linear(attention.v_proj, attention),
        attention.config.num_key_value_heads,
        attention.attn_logit_softcapping,
    )
