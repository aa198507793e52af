"""LED, Longformer's encoder-decoder, and so PRIMERA: an encoder with local attention and global tokens."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers import EncoderDecoderCache
from transformers.models.led.modeling_led import LEDDecoderAttention

from memstore.hooks import reader_of, uncompiled, wrap
from memstore.reading.passes import find_cache
from memstore_adapters.bart import BartAdapter


class ReadingLEDAttention(LEDDecoderAttention):
    """LED's decoder attention, which follows no AttentionInterface, as it stands in an attached cross-attention."""

    @uncompiled
    def forward(
        self, hidden_states: Tensor, key_value_states: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, Any]:
        reader = reader_of(self)
        if reader is None or key_value_states is None:
            output: tuple[Tensor, Tensor | None, Any] = super().forward(
                hidden_states, key_value_states, *args, **kwargs
            )
            return output
        cache = find_cache((*args, *kwargs.values()))  # whatever its argument is called
        key, value = self._keys_and_values(key_value_states, cache)
        read, weights = reader(
            self,
            self._split(self.q_proj(hidden_states)),
            key,
            value,
            kwargs.get("attention_mask"),
            scaling=self.scaling,
            is_causal=False,
        )
        return self.out_proj(read.flatten(2)), weights, cache

    def _keys_and_values(self, states: Tensor, cache: Any) -> tuple[Tensor, Tensor]:
        """Of the prompt, [B, H, n, c] both: those that the cache has of it, else new ones, which the cache is given."""
        both = isinstance(cache, EncoderDecoderCache)
        if both and cache.is_updated.get(self.layer_idx):
            kept = cache.cross_attention_cache.layers[cast(int, self.layer_idx)]
            return cast(Tensor, kept.keys), cast(Tensor, kept.values)
        key, value = self._split(self.k_proj(states)), self._split(self.v_proj(states))
        if cache is not None:
            key, value = (cache.cross_attention_cache if both else cache).update(key, value, self.layer_idx)
        if both:
            cache.is_updated[self.layer_idx] = True
        return key, value

    def _split(self, projected: Tensor) -> Tensor:
        split: Tensor = projected.unflatten(-1, (self.num_heads, self.head_dim))
        return split.transpose(1, 2)


wrap(LEDDecoderAttention, ReadingLEDAttention)


class LEDAdapter(BartAdapter):
    """Each window is encoded with global attention on its first token, as is usual for summaries of a whole text."""

    model_types = ("led",)

    @property
    def native_window(self) -> int:
        """The encoder pads what it reads to a multiple of its attention window, and needs positions for that too."""
        config = self.model.config
        local = config.attention_window if isinstance(config.attention_window, int) else max(config.attention_window)
        return int(config.max_encoder_position_embeddings // local * local)

    @property
    def max_target(self) -> int:
        return int(self.model.config.max_decoder_position_embeddings)

    def encode(self, windows: Tensor) -> dict[str, Tensor]:
        everywhere = torch.zeros_like(windows)
        everywhere[:, 0] = 1
        return {"hidden": self.encoder(windows, global_attention_mask=everywhere).last_hidden_state}
