"""Every family of decoder-only models, and every kind of rotary positions: a tiny model of each.

tests/test_decoder_matrix.py tests each cell of what the documents say of them, and docs/families.py writes the page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import transformers as tf

VOCAB = 120
NATIVE = 512  # positions of each of them

COLUMNS = {
    "exact": "the logits differ by less than 1e-4 from the plain model's with the document before the prompt",
    "greedy": "greedy search writes the same tokens as the plain model after the document",
    "beams": "so does beam search with three beams",
    "left padding": "rows of different lengths, filled up at the left, get what the plain model gives each alone",
    "rows of their own": "rows of a batch, each with its own memories, get what the plain model gives each alone",
    "chosen spans": "what is chosen of a longer document gives the logits of the plain model that has these windows "
    "before its prompt, none of which sees another; – where a document must be of one window",
}


@dataclass(frozen=True)
class Decoder:
    """One family, or one of its variants.

    make: a tiny random model. differs: what the page says of it. telling: changes of the configuration, each of which
    must be seen in the logits, for else a reading that gets it wrong would pass. whole_only: a document of more than
    one window is refused. attention: the implementations that give the same logits.
    """

    make: Callable[..., Any]
    differs: str = ""
    telling: list[dict[str, Any]] = field(default_factory=list)
    whole_only: bool = False
    attention: tuple[str, ...] = ("sdpa", "eager")


def like_llama(model: type, config: type, **extra: Any) -> Callable[..., Any]:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": NATIVE,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }

    def make(**change: Any) -> Any:
        made = config(**{**sizes, **extra, **change})
        capped = config is tf.Gemma2Config  # which older versions of transformers claim to do by sdpa, too
        made._attn_implementation = "eager" if capped or not model._supports_sdpa else "sdpa"  # type: ignore[attr-defined]
        return model(made)

    return make


def rope(rope_type: str, **settings: Any) -> dict[str, Any]:
    """``rope_parameters`` of a configuration."""
    return {"rope_type": rope_type, "rope_theta": 10_000.0, **settings}


def ropes(sliding: float, full: float) -> dict[str, Any]:
    return {
        "sliding_attention": {"rope_type": "default", "rope_theta": sliding},
        "full_attention": {"rope_type": "default", "rope_theta": full},
    }


LLAMA = (tf.LlamaForCausalLM, tf.LlamaConfig)
MISTRAL = (tf.MistralForCausalLM, tf.MistralConfig)
PHI3 = (tf.Phi3ForCausalLM, tf.Phi3Config)
DEFAULT = {"rope_parameters": rope("default")}
BASE = {"rope_parameters": rope("default", rope_theta=500.0)}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA: dict[str, Any] = {
    "head_dim": 10,
    "query_pre_attn_scalar": 7,
    "sliding_window": 24,
    "layer_types": MIXED,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LONG: dict[str, Any] = {
    "max_position_embeddings": 4 * NATIVE,
    "original_max_position_embeddings": NATIVE,
    "rope_parameters": rope(
        "longrope",
        short_factor=[1.0, 1.5, 2.0, 3.0],
        long_factor=[4.0, 6.0, 8.0, 9.0],
        original_max_position_embeddings=NATIVE,
    ),
}
PARTIAL = {"rope_parameters": rope("default", partial_rotary_factor=0.5)}
WHOLE = {"rope_parameters": rope("default", partial_rotary_factor=1.0)}

DECODERS = {
    "llama": Decoder(like_llama(*LLAMA, attention_bias=True), "and so SmolLM and SmolLM2", [BASE]),
    "llama-one-key-head": Decoder(
        like_llama(*LLAMA, num_key_value_heads=1, head_dim=14, tie_word_embeddings=True), "heads wider than their share"
    ),
    "llama-linear": Decoder(like_llama(*LLAMA, rope_parameters=rope("linear", factor=4.0)), "", [DEFAULT]),
    "llama-llama3": Decoder(
        like_llama(
            *LLAMA,
            rope_parameters=rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            ),
        ),
        "",
        [DEFAULT],
    ),
    "llama-yarn": Decoder(
        like_llama(*LLAMA, rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=128)),
        "cos and sin are scaled",
        [DEFAULT],
    ),
    "llama-dynamic": Decoder(
        like_llama(*LLAMA, rope_parameters=rope("dynamic", factor=4.0)), "frozen frequencies", [BASE]
    ),
    "mistral": Decoder(like_llama(*MISTRAL, sliding_window=None), "", [BASE]),
    "mistral-sliding": Decoder(
        like_llama(*MISTRAL, sliding_window=24), "every layer slides", [{"sliding_window": 25}, {"sliding_window": 23}]
    ),
    "mixtral": Decoder(
        like_llama(tf.MixtralForCausalLM, tf.MixtralConfig, sliding_window=24, num_local_experts=4),
        "experts",
        [{"sliding_window": None}],
    ),
    "qwen2": Decoder(like_llama(tf.Qwen2ForCausalLM, tf.Qwen2Config), "", [BASE]),
    "qwen2-sliding": Decoder(
        like_llama(
            tf.Qwen2ForCausalLM, tf.Qwen2Config, use_sliding_window=True, sliding_window=24, max_window_layers=2
        ),
        "the last layers slide",
        [{"sliding_window": 25}],
    ),
    "qwen2_moe": Decoder(
        like_llama(tf.Qwen2MoeForCausalLM, tf.Qwen2MoeConfig, shared_expert_intermediate_size=32, **EXPERTS), "experts"
    ),
    "qwen3": Decoder(
        like_llama(tf.Qwen3ForCausalLM, tf.Qwen3Config, head_dim=12), "queries and keys are normed", [BASE]
    ),
    "qwen3_moe": Decoder(
        like_llama(tf.Qwen3MoeForCausalLM, tf.Qwen3MoeConfig, head_dim=12, **EXPERTS), "experts", [BASE]
    ),
    "gemma": Decoder(like_llama(tf.GemmaForCausalLM, tf.GemmaConfig, head_dim=10), "", [BASE]),
    "gemma2": Decoder(
        like_llama(tf.Gemma2ForCausalLM, tf.Gemma2Config, attn_logit_softcapping=2.0, **GEMMA),
        "sliding and global layers, capped scores",
        [{"attn_logit_softcapping": None}, {"sliding_window": 25}, BASE, {"query_pre_attn_scalar": 10}],
        attention=("eager",),
    ),
    "gemma3_text": Decoder(
        like_llama(tf.Gemma3ForCausalLM, tf.Gemma3TextConfig, rope_parameters=ropes(500.0, 50_000.0), **GEMMA),
        "sliding and global layers, each kind with its own rotary base",
        [
            {"rope_parameters": ropes(500.0, 500.0)},
            {"rope_parameters": ropes(50_000.0, 50_000.0)},
            {"sliding_window": 25},
            {"layer_types": MIXED[::-1][:1] * 3},
        ],
    ),
    "gemma3_text-linear": Decoder(
        like_llama(
            tf.Gemma3ForCausalLM,
            tf.Gemma3TextConfig,
            **GEMMA,
            rope_parameters={
                **ropes(500.0, 500.0),
                "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 8.0},
            },
        ),
        "the global layers' positions are scaled",
        [{"rope_parameters": ropes(500.0, 500.0)}],
    ),
    "granite": Decoder(
        like_llama(tf.GraniteForCausalLM, tf.GraniteConfig, attention_multiplier=0.2), "its own scaling", [BASE]
    ),
    "phi": Decoder(like_llama(tf.PhiForCausalLM, tf.PhiConfig, **PARTIAL), "a part of each head is rotary"),
    "phi3": Decoder(
        like_llama(*PHI3, rope_parameters=rope("default", partial_rotary_factor=0.5)),
        "one map for queries, keys and values; a part of each head may be rotary",
        [{"rope_parameters": rope("default", partial_rotary_factor=0.5, rope_theta=500.0)}],
    ),
    "phi3-sliding": Decoder(like_llama(*PHI3, sliding_window=24), "every layer slides", [{"sliding_window": 25}]),
    "phi3-longrope": Decoder(like_llama(*PHI3, **LONG), "frozen frequencies", [DEFAULT]),
    "gpt_neox": Decoder(
        like_llama(tf.GPTNeoXForCausalLM, tf.GPTNeoXConfig, rope_parameters=rope("default", partial_rotary_factor=0.5)),
        "and so Pythia: a part of each head is rotary",
        [{"rope_parameters": rope("default", partial_rotary_factor=0.5, rope_theta=500.0)}],
    ),
    "gpt2": Decoder(
        like_llama(tf.GPT2LMHeadModel, tf.GPT2Config, scale_attn_by_inverse_layer_idx=True),
        "learned positions: a document is one window, read whole and alone",
        whole_only=True,
    ),
    "olmo": Decoder(like_llama(tf.OlmoForCausalLM, tf.OlmoConfig, clip_qkv=0.5), "clipped keys and values", [BASE]),
    "olmo2": Decoder(like_llama(tf.Olmo2ForCausalLM, tf.Olmo2Config), "queries and keys are normed", [BASE]),
    "olmo3": Decoder(
        like_llama(tf.Olmo3ForCausalLM, tf.Olmo3Config, sliding_window=24, layer_types=MIXED),
        "sliding and global layers",
        [{"sliding_window": 25}],
    ),
    "smollm3": Decoder(
        like_llama(tf.SmolLM3ForCausalLM, tf.SmolLM3Config, no_rope_layers=[1, 0, 1]),
        "layers without rotary positions among those with them",
        [BASE, {"no_rope_layers": [1, 1, 1]}],
    ),
    "stablelm": Decoder(
        like_llama(tf.StableLmForCausalLM, tf.StableLmConfig, qk_layernorm=True, **PARTIAL),
        "a part of each head is rotary",
    ),
    "starcoder2": Decoder(
        like_llama(tf.Starcoder2ForCausalLM, tf.Starcoder2Config, sliding_window=24), "", [{"sliding_window": 25}]
    ),
    "arcee": Decoder(like_llama(tf.ArceeForCausalLM, tf.ArceeConfig), "", [BASE]),
    "seed_oss": Decoder(like_llama(tf.SeedOssForCausalLM, tf.SeedOssConfig, head_dim=12), "", [BASE]),
}
