"""T5 and the families that share its attention. Relative positions play no part in cross-attention."""

from __future__ import annotations

from memstore.cross_attention import CrossAttention, plain_linear
from memstore.families import EncoderDecoderAdapter


class T5Adapter(EncoderDecoderAdapter):
    """Cross-attention is ``EncDecAttention`` of each decoder block."""

    model_types = ("t5", "mt5", "umt5")

    native_window = 512  # what the published models were trained on
    max_window = None  # relative positions set no limit

    def cross_attentions(self) -> list[CrossAttention]:
        return [
            CrossAttention(
                attention,
                layer_idx,
                attention.n_heads,
                plain_linear(attention.k, attention),
                plain_linear(attention.v, attention),
            )
            for layer_idx, attention in enumerate(
                block.layer[1].EncDecAttention for block in self.model.get_decoder().block
            )
        ]
