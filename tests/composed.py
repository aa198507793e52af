"""Tiny models that are composed of two, and one of a family that no adapter knows."""

from __future__ import annotations

from typing import Any

import transformers as tf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.models import VOCAB

SPECIAL: dict[str, Any] = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
BART: dict[str, Any] = {"d_model": 48, "decoder_layers": 2, "decoder_attention_heads": 6, "decoder_ffn_dim": 64}
OWN_NAMES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": 70, "n_embd": 48, "n_layer": 2, "n_head": 6},
    "bart": BART | {"max_position_embeddings": 70},
    "mbart": BART | {"max_position_embeddings": 70},
}
BESIDE: dict[str, dict[str, Any]] = {
    "electra": {"embedding_size": 32},
    "xmod": {"default_language": "en_XX", "languages": ["en_XX"]},
}


def composed(encoder: str, decoder: str) -> Any:
    """An encoder of width 32 with three layers and a decoder of width 48 with two, of these model types."""

    def part(model_type: str, width: int, layers: int, heads: int) -> Any:
        named: dict[str, Any] = {
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "intermediate_size": 64,
            "max_position_embeddings": 70,
        }
        own = OWN_NAMES.get(model_type, named) | BESIDE.get(model_type, {})
        make: Any = CONFIG_MAPPING[model_type]
        return make(vocab_size=VOCAB, **SPECIAL, **own)

    parts = part(encoder, 32, 3, 4), part(decoder, 48, 2, 6)
    whole: dict[str, Any] = {"vocab_size": VOCAB, "decoder_start_token_id": 2, **SPECIAL}
    config = tf.EncoderDecoderConfig.from_encoder_decoder_configs(*parts, **whole)
    return tf.EncoderDecoderModel(config)


class MadeUpConfig(tf.BartConfig):
    """A family that no adapter knows."""

    model_type = "made-up"


class MadeUp(tf.BartForConditionalGeneration):
    """BART by another name."""

    config_class = MadeUpConfig
