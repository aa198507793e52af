"""Loading a model by one name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, LlamaForCausalLM, WhisperConfig
from transformers import WhisperForConditionalGeneration as Whisper

from memstore import models
from memstore.errors import ModelLoadError
from tests import tiny


def test_a_directory_of_a_decoder_only_model(tmp_path: Path) -> None:
    model, tokenizer = models.load(str(tiny.save(tmp_path)))
    assert isinstance(model, LlamaForCausalLM)
    assert not model.training
    assert model.dtype == torch.float32
    assert torch.equal(
        model.model.layers[1].self_attn.k_proj.weight, tiny.llama().model.layers[1].self_attn.k_proj.weight
    )
    assert tokenizer("né")["input_ids"] == tiny.tokenizer()("né")["input_ids"]


def test_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    assert models.load(str(tiny.save(tmp_path)), "bfloat16")[0].dtype == torch.bfloat16


def test_a_directory_of_an_encoder_decoder(tmp_path: Path) -> None:
    config = BartConfig(
        vocab_size=300, d_model=16, encoder_layers=1, decoder_layers=1, encoder_ffn_dim=16, decoder_ffn_dim=16
    )
    BartForConditionalGeneration(config).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    assert isinstance(models.load(str(tmp_path))[0], BartForConditionalGeneration)


def test_a_directory_of_whisper(tmp_path: Path) -> None:
    config = WhisperConfig(
        vocab_size=300,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        pad_token_id=257,
    )
    Whisper(config).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    assert isinstance(models.load(str(tmp_path))[0], Whisper)


@pytest.mark.parametrize(
    "name", ["nowhere.gguf", "/nowhere", "{tmp_path}/file.txt", "{tmp_path}", "~nobody-here/x", "x" * 5000]
)
def test_what_cannot_be_loaded_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file.txt").write_text("no model")
    name = name.format(tmp_path=tmp_path)
    with pytest.raises(ModelLoadError, match=f"^Cannot load the model '{name}': ."):
        models.load(name)


def test_a_file_that_is_no_gguf_is_named(tmp_path: Path) -> None:
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"no GGUF at all")
    with pytest.raises(ModelLoadError, match="broken.gguf"):
        models.load(str(file))


def test_a_damaged_directory_is_named(tmp_path: Path) -> None:
    tiny.save(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(ModelLoadError, match=str(tmp_path)):
        models.load(str(tmp_path))
