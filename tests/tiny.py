"""A tiny random Llama with a byte-level tokenizer: small enough to be made in a test."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<|start|>", "<|end|>"]
CHAT = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def llama(seed: int = 0, positions: int = 2048) -> LlamaForCausalLM:
    """Two layers with grouped queries."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        bos_token_id=256,
        eos_token_id=257,
        pad_token_id=257,
    )
    model = LlamaForCausalLM(config)
    model.eval()
    return model


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte (ids 0 to 255), with character offsets and a chat template."""
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token=SPECIAL[0],
        eos_token=SPECIAL[1],
        pad_token=SPECIAL[1],
        chat_template=CHAT,
        clean_up_tokenization_spaces=False,
    )


def save(directory: Path, seed: int = 0) -> Path:
    """Save both as ``from_pretrained`` reads them."""
    llama(seed).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory
