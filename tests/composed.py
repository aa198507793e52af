"""Tiny random models of the families that need a seam of their own, and one of a family that nobody knows."""

from __future__ import annotations

from typing import Any

import transformers as tf
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 120
SPECIAL: dict[str, Any] = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
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


def led() -> Any:
    """Its encoder has 70 positions, and pads to a multiple of 16."""
    positions: dict[str, Any] = {"max_encoder_position_embeddings": 70, "max_decoder_position_embeddings": 40}
    config = tf.LEDConfig(attention_window=[8, 16], decoder_start_token_id=2, **positions, **SPECIAL, **SIZES)
    return tf.LEDForConditionalGeneration(config)


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


def made_up() -> Any:
    return MadeUp(MadeUpConfig(max_position_embeddings=64, decoder_start_token_id=2, **SPECIAL, **SIZES))


COMPOSED = {
    "led": led,
    "bert-gpt2": lambda: composed("bert", "gpt2"),
    "roberta-roberta": lambda: composed("roberta", "roberta"),
    "made-up": made_up,
}
