"""Whisper tiny.en over sounds that are made here: encoder states, and queries of its cross-attention."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data_mixed import SEED, some
from torch import Tensor
from transformers import AutoFeatureExtractor, WhisperForConditionalGeneration

from memstore.assets import build_once, cache_dir
from memstore.attention import absorb_keys, split_heads
from memstore.hooks import base_attention, base_implementation, install
from memstore.registry import adapter_for

sys.path.append(str(Path(__file__).parents[1]))
from tests.real.whisper import whisper_tiny_en

RATE = 16_000  # samples a second
SCENES = 68  # of 1,500 states each


def folder(which: str) -> Path:
    """A folder with keys [n, d] and queries [layers, m, d], float32. The caller chooses the layer."""
    return build_once(cache_dir() / "bench" / "whisper-sounds", _listen)


@torch.no_grad()
def _listen(target: Path) -> None:
    path = whisper_tiny_en()
    model = WhisperForConditionalGeneration.from_pretrained(path).eval()
    extract = AutoFeatureExtractor.from_pretrained(path)
    adapter = adapter_for(model)(model)
    rng = np.random.default_rng(SEED)
    sounds = [scene(rng, 30 * RATE) for _ in range(SCENES)]
    cross = adapter.cross_attentions()
    asked: list[list[Tensor]] = [[] for _ in cross]
    taken: dict[int, Tensor] = {}

    def tap(layer: int, module: Any) -> Any:
        base = base_attention(module, base_implementation(module))

        def attention(module, query, key, value, mask, **kwargs):
            taken[layer] = query * kwargs.get("scaling", query.shape[-1] ** -0.5)
            return base(module, query, key, value, mask, **kwargs)

        return attention

    states = []
    uninstall = install({each.module: tap(each.layer_idx, each.module) for each in cross})
    for i, sound in enumerate(sounds):
        features = extract(sound, sampling_rate=RATE, return_tensors="pt").input_features
        encoded = model.get_encoder()(features)
        states.append(encoded.last_hidden_state[0])
        if i % 2:
            continue
        written = model.generate(features, do_sample=False, max_length=28)
        model(encoder_outputs=encoded, decoder_input_ids=written)
        for each in cross:
            absorbed = absorb_keys(taken[each.layer_idx], split_heads(each.key.weight, each.num_heads))
            asked[each.layer_idx].append(absorbed[0].flatten(0, 1))
    uninstall()
    np.save(target / "keys.npy", torch.cat(states).numpy())
    np.save(target / "queries.npy", np.stack([some(torch.cat(layer)) for layer in asked]))


def scene(rng: np.random.Generator, samples: int) -> np.ndarray:
    """One window of sound [samples] float32: a floor of noise, and events at random times, each of a random kind."""
    sound = rng.uniform(0.001, 0.01) * rng.standard_normal(samples)
    for _ in range(rng.integers(10, 40)):
        length = int(rng.uniform(0.05, 3) * RATE)
        at = rng.integers(0, samples - length)
        time, pitch = np.arange(length) / RATE, np.exp(rng.uniform(np.log(60), np.log(4000)))
        vibrato = rng.uniform(0, 8) * np.sin(2 * np.pi * rng.uniform(1, 8) * time)
        sweep = rng.uniform(-0.5, 1) * pitch * time
        phase = 2 * np.pi * (pitch + sweep / 2) * time + vibrato
        kinds = (
            np.sin(phase),  # a tone
            sum(np.sin(phase * i) / i for i in range(1, rng.integers(3, 12))),  # a voice without words
            np.sign(np.sin(phase)) * (time * rng.uniform(2, 20) % 1 < 0.3),  # beeps
            np.cumsum(rng.standard_normal(length)) / np.sqrt(length),  # a rumble
            rng.standard_normal(length) * (time * rng.uniform(1, 10) % 1 < 0.1),  # knocks
        )
        event = kinds[rng.integers(len(kinds))] * np.hanning(length)
        sound[at : at + length] += np.exp(rng.uniform(np.log(0.02), np.log(0.5))) * event
    return np.clip(sound, -1, 1).astype(np.float32)


def some_windows(count: int) -> tuple[Any, Tensor, int]:
    """The model in float32, inputs [count, mels, frames], and how many states it keeps of those."""
    model = WhisperForConditionalGeneration.from_pretrained(whisper_tiny_en()).eval()
    return model, torch.randn(count, 80, 3000), count * 1500
