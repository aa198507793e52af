"""BART and the families that share its attention."""

from __future__ import annotations

from typing import ClassVar

from memstore.cross_attention import CrossAttention, plain_linear
from memstore.families import EncoderDecoderAdapter


class BartAdapter(EncoderDecoderAdapter):
    """Cross-attention is ``encoder_attn`` of each decoder layer."""

    model_types: ClassVar[tuple[str, ...]] = ("bart", "mbart", "pegasus", "marian", "m2m_100")

    @property
    def native_window(self) -> int:
        return int(self.model.config.max_position_embeddings)

    def cross_attentions(self) -> list[CrossAttention]:
        return [
            CrossAttention(
                attention,
                layer_idx,
                attention.num_heads,
                plain_linear(attention.k_proj, attention),
                plain_linear(attention.v_proj, attention),
            )
            for layer_idx, attention in enumerate(layer.encoder_attn for layer in self.model.get_decoder().layers)
        ]
