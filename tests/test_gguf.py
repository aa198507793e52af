"""A GGUF file, loaded through transformers, is a model like any other."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import memstore
from memstore.errors import FingerprintMismatchError
from tests.models import tokens

HIDDEN, HEADS, KV_HEADS, LAYERS, INNER, VOCAB = 64, 4, 2, 2, 96, 120


def write_gguf(path: Path, family: str, rope_base: float = 10_000.0) -> None:
    """A tiny random model, quantised to 8 bits where a file of its family would be."""
    generator = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(rope_base)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)

    def add(name: str, *shape: int) -> None:
        data = generator.normal(0, 0.3, shape).astype(np.float32)
        if len(shape) == 1:
            return writer.add_tensor(name, data + 1)
        kind = gguf.GGMLQuantizationType.Q8_0
        return writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)

    add("token_embd.weight", VOCAB, HIDDEN)
    add("output.weight", VOCAB, HIDDEN)
    add("output_norm.weight", HIDDEN)
    narrow = HIDDEN // HEADS * KV_HEADS
    for i in range(LAYERS):
        for name, width in (("attn_q", HIDDEN), ("attn_k", narrow), ("attn_v", narrow)):
            add(f"blk.{i}.{name}.weight", width, HIDDEN)
            if family == "qwen2":
                add(f"blk.{i}.{name}.bias", width)
        add(f"blk.{i}.attn_output.weight", HIDDEN, HIDDEN)
        for name in ("ffn_gate", "ffn_up"):
            add(f"blk.{i}.{name}.weight", INNER, HIDDEN)
        add(f"blk.{i}.ffn_down.weight", HIDDEN, INNER)
        for name in ("attn_norm", "ffn_norm"):
            add(f"blk.{i}.{name}.weight", HIDDEN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load(path: Path):
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return model.eval()


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_a_memory_of_a_gguf_file_is_read_exactly_by_whoever_loads_it_again(library, tmp_path, family):
    write_gguf(file := tmp_path / "tiny.gguf", family)
    document, prompt = tokens(60), tokens(9, seed=1, rows=1)
    memory = library.encode(load(file), input_ids=document, name="doc")
    model = load(file)
    with torch.no_grad():
        expected = model(input_ids=torch.cat((document[None], prompt), dim=1)).logits[:, 60:]
        with memstore.attach(model, memory):
            assert (model(input_ids=prompt).logits - expected).abs().max() < 1e-4 * expected.abs().max()
    write_gguf(other := tmp_path / "other.gguf", family, rope_base=500.0)
    with pytest.raises(FingerprintMismatchError, match="rope_theta"):
        memstore.attach(load(other), memory)
