"""BART and the families that share its attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from memstore.cross_attention import CrossAttention, plain_linear
from memstore.families import EncoderDecoderAdapter
from memstore_adapters.refused import REFUSED


class BartAdapter(EncoderDecoderAdapter):
    """Each decoder layer has a cross-attention with the maps ``k_proj`` and ``v_proj``.

    PegasusX pads to its blocks inside its encoder and takes the padding off again.
    """

    model_types: ClassVar[tuple[str, ...]] = (
        *("bart", "mbart", "pegasus", "marian", "m2m_100"),
        *("blenderbot", "blenderbot-small", "plbart", "pegasus_x"),
    )

    refused: ClassVar[Mapping[str, str]] = REFUSED

    name: ClassVar[str] = "encoder_attn"
    """What a decoder layer calls its cross-attention."""

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
            for layer_idx, attention in enumerate(
                getattr(layer, self.name) for layer in self.model.get_decoder().layers
            )
        ]
