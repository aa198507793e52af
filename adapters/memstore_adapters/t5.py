"""T5 and the families that share its attention. Relative positions play no part in cross-attention."""

from __future__ import annotations

from typing import ClassVar

from memstore.cross_attention import CrossAttention, plain_linear
from memstore.families import EncoderDecoderAdapter

TRAINED_ON = {"longt5": 16384}  # tokens that the published models were trained on, where they are not T5's 512


class T5Adapter(EncoderDecoderAdapter):
    """Cross-attention is ``EncDecAttention`` of each decoder block."""

    model_types: ClassVar[tuple[str, ...]] = ("t5", "mt5", "umt5", "longt5")

    max_window = None  # relative positions set no limit

    @property
    def native_window(self) -> int:
        return TRAINED_ON.get(self.model.config.model_type, 512)

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
