"""Every family of encoder-decoders: a tiny model of each, what it reads, and what the matrix in the documents says.

tests/test_family_matrix.py tests each cell, and docs/families.py writes the page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as tf

from tests.composed import MadeUp, MadeUpConfig, composed
from tests.models import VOCAB, tokens

COLUMNS = {
    "exact": "the logits differ by less than 1e-4 from those of the plain model that was given the same encoder "
    "states: those of a document of one window, and those of a prompt with two documents behind it",
    "beams": "beam search with four beams writes the same tokens",
    "empty prompt": "greedy search writes the same tokens from the first one on, with no input at all",
    "rows of their own": "rows of a batch, each with its own memories, get what the plain model gives each alone",
    "provenance": "what the readings of a step and layer hold adds up to the memory's share of the attention, as the "
    "plain model's own weights give it",
}


def token_document(seed: int, length: int) -> dict[str, Any]:
    """What ``store.encode`` is given for a document of random tokens."""
    return {"input_ids": tokens(length, seed=seed)}


def plain_inputs(document: dict[str, Any]) -> dict[str, Any]:
    """The document as the model itself is given it, which is a batch of one."""
    return {"input_ids": document["input_ids"][None]}


def with_a_global_token(document: dict[str, Any]) -> dict[str, Any]:
    """The same, with global attention on the first token."""
    ids = document["input_ids"][None]
    return {"input_ids": ids, "global_attention_mask": (torch.arange(ids.shape[1]) == 0).long()[None]}


@dataclass(frozen=True)
class Family:
    """One family, by its ``config.model_type``.

    make: a tiny random model, best with encoder and decoder of different depth and head count. window: what the page
    says of the default window. special: what each of its tokenizer classes puts around a text, for which … stands, as
    tests/test_special_tokens.py tests it; none where only the files of a tokenizer say. beside: what else the page
    says of such tokens. document(seed, length) makes a document of about that many tokens, and inputs turns it into
    what the model's own encoder and forward pass take.
    """

    make: Callable[[], Any]
    window: str
    special: dict[str, str] = field(default_factory=dict)
    beside: str = ""
    document: Callable[[int, int], dict[str, Any]] = field(default=token_document)
    inputs: Callable[[dict[str, Any]], dict[str, Any]] = field(default=plain_inputs)


SPECIAL: dict[str, Any] = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
SIZES: dict[str, Any] = {
    "d_model": 48,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
}
T5_SIZES: dict[str, Any] = {
    "d_model": 48,
    "d_kv": 10,
    "d_ff": 64,
    "num_layers": 3,  # generate of transformers 5 fails for a T5 decoder deeper than its encoder
    "num_decoder_layers": 2,
    "num_heads": 4,
}


def bart_like(model: type, config: type, **extra: Any) -> Callable[[], Any]:
    made = {
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "forced_eos_token_id": None,
        **SPECIAL,
        **SIZES,
        **extra,
    }
    return lambda: model(config(**made))


def t5_like(model: type, config: type, **extra: Any) -> Callable[[], Any]:
    special = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    return lambda: model(config(vocab_size=VOCAB, **special, **T5_SIZES, **extra))


def t5gemma() -> Any:
    shared: dict[str, Any] = {
        "vocab_size": VOCAB,
        "intermediate_size": 64,
        "head_dim": 10,
        "max_position_embeddings": 256,
        "query_pre_attn_scalar": 7,
        "attn_logit_softcapping": 2.0,  # so low that it bends the scores of a tiny model
        "sliding_window": 24,
    }
    encoder = {"hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1}
    decoder = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2}
    sizes: dict[str, Any] = {"encoder": {**shared, **encoder}, "decoder": {**shared, **decoder}}
    config = tf.T5GemmaConfig(vocab_size=VOCAB, **sizes)
    config.decoder_start_token_id = 2
    config._attn_implementation = "eager"  # before transformers 5.20 sdpa is the default, and leaves the cap out
    return tf.T5GemmaForConditionalGeneration(config)


def spectrograms(channels_first: bool) -> Callable[[int, int], dict[str, Any]]:
    """Documents of windows of 40 frames with 8 channels, 20 states each in a Whisper."""

    def document(seed: int, length: int) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(seed)
        shape = (8, 40) if channels_first else (40, 8)
        return {"input_features": torch.randn(1, *shape, generator=generator)}

    return document


def whisper() -> Any:
    special = {**SPECIAL, "begin_suppress_tokens": None, "suppress_tokens": None}
    made: dict[str, Any] = {"vocab_size": VOCAB, "num_mel_bins": 8, "max_source_positions": 20, **special, **SIZES}
    return tf.WhisperForConditionalGeneration(tf.WhisperConfig(**made))


def speech_to_text() -> Any:
    made: dict[str, Any] = {
        "vocab_size": VOCAB,
        "input_feat_per_channel": 8,
        "max_source_positions": 64,
        "conv_channels": 32,
    }
    return tf.Speech2TextForConditionalGeneration(tf.Speech2TextConfig(**made, **SPECIAL, **SIZES))


POSITIONS = "its positions"
ITS_ENCODER = "its encoder's positions, often 512"
BART = {"BartTokenizer": "<s> … </s>"}
PEGASUS = {"PegasusTokenizer": "… </s>"}
T5 = {"T5Tokenizer": "… </s>"}
ROBERTA = {"RobertaTokenizer": "<s> … </s>"}
NLLB = {"NllbTokenizer": "eng_Latn … </s>"}

FAMILIES: dict[str, Family] = {
    "bart": Family(bart_like(tf.BartForConditionalGeneration, tf.BartConfig), f"{POSITIONS}, 1,024", BART),
    "mbart": Family(
        bart_like(tf.MBartForConditionalGeneration, tf.MBartConfig),
        f"{POSITIONS}, 1,024",
        {"MBartTokenizer": "… </s> en_XX", "MBart50Tokenizer": "en_XX … </s>"},
    ),
    "pegasus": Family(
        bart_like(tf.PegasusForConditionalGeneration, tf.PegasusConfig), f"{POSITIONS}, 512 or 1,024", PEGASUS
    ),
    "marian": Family(bart_like(tf.MarianMTModel, tf.MarianConfig), f"{POSITIONS}, 512", {"MarianTokenizer": "… </s>"}),
    "m2m_100": Family(
        bart_like(tf.M2M100ForConditionalGeneration, tf.M2M100Config),
        f"{POSITIONS}, 1,024",
        {"M2M100Tokenizer": "__en__ … </s>", **NLLB},
    ),
    "nllb-moe": Family(
        bart_like(
            tf.NllbMoeForConditionalGeneration,
            tf.NllbMoeConfig,
            num_experts=4,
            encoder_sparse_step=2,
            decoder_sparse_step=2,
        ),
        f"{POSITIONS}, 1,024",
        NLLB,
    ),
    "blenderbot": Family(
        bart_like(tf.BlenderbotForConditionalGeneration, tf.BlenderbotConfig, encoder_no_repeat_ngram_size=0),
        f"{POSITIONS}, 128",
    ),
    "blenderbot-small": Family(
        bart_like(tf.BlenderbotSmallForConditionalGeneration, tf.BlenderbotSmallConfig),
        f"{POSITIONS}, 512",
        {"BlenderbotSmallTokenizer": "…"},
    ),
    "plbart": Family(
        bart_like(tf.PLBartForConditionalGeneration, tf.PLBartConfig),
        f"{POSITIONS}, 1,024",
        {"PLBartTokenizer": "… </s> __python__"},
    ),
    "pegasus_x": Family(
        bart_like(tf.PegasusXForConditionalGeneration, tf.PegasusXConfig, num_global_tokens=4, block_size=16),
        f"{POSITIONS}, 16,384",
        PEGASUS,
        "each window has all of the model's global tokens",
    ),
    "bigbird_pegasus": Family(
        bart_like(
            tf.BigBirdPegasusForConditionalGeneration,
            tf.BigBirdPegasusConfig,
            block_size=4,
            num_random_blocks=1,
            use_bias=True,
        ),
        f"{POSITIONS}, 4,096",
        PEGASUS,
        "the first and the last block of each window are its global tokens",
    ),
    "led": Family(
        bart_like(
            tf.LEDForConditionalGeneration,
            tf.LEDConfig,
            attention_window=[8, 16],
            max_encoder_position_embeddings=70,
            max_decoder_position_embeddings=40,
        ),
        f"{POSITIONS}, 16,384",
        {"LEDTokenizer": "<s> … </s>"},
        "the first token of each window is its global one",
        inputs=with_a_global_token,
    ),
    "encoder-decoder (BERT, GPT-2)": Family(
        lambda: composed("bert", "gpt2"), ITS_ENCODER, {"BertTokenizer": "[CLS] … [SEP]"}
    ),
    "encoder-decoder (BERT Generation)": Family(lambda: composed("bert-generation", "bert-generation"), ITS_ENCODER),
    "encoder-decoder (RoBERTa, RoBERTa)": Family(lambda: composed("roberta", "roberta"), ITS_ENCODER, ROBERTA),
    "made-up": Family(
        bart_like(MadeUp, MadeUpConfig), "its positions, else 512", beside="those of its tokenizer; served by `generic`"
    ),
    "t5": Family(t5_like(tf.T5ForConditionalGeneration, tf.T5Config), "512, no limit", T5),
    "mt5": Family(t5_like(tf.MT5ForConditionalGeneration, tf.MT5Config), "512, no limit", T5),
    "umt5": Family(t5_like(tf.UMT5ForConditionalGeneration, tf.UMT5Config), "512, no limit", T5),
    "longt5": Family(
        t5_like(
            tf.LongT5ForConditionalGeneration,
            tf.LongT5Config,
            encoder_attention_type="transient-global",
            local_radius=7,
            global_block_size=4,
        ),
        "16,384, no limit",
        T5,
        "each window makes global tokens of its own blocks",
    ),
    "switch_transformers": Family(
        t5_like(
            tf.SwitchTransformersForConditionalGeneration,
            tf.SwitchTransformersConfig,
            num_experts=4,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
        ),
        "512, no limit",
        T5,
    ),
    "t5gemma": Family(t5gemma, "its encoder's positions, 8,192"),
    "whisper": Family(
        whisper,
        "30 seconds, 1,500 states",
        beside="none, it reads sound",
        document=spectrograms(channels_first=True),
        inputs=dict,
    ),
    "speech_to_text": Family(
        speech_to_text,
        "6,000 frames, 1,500 states",
        beside="none, it reads sound",
        document=spectrograms(channels_first=False),
        inputs=dict,
    ),
}
