"""Real weights: what they ask of a memory, and what a search that skips keys loses by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, WhisperForConditionalGeneration

from memstore import assets
from memstore.query_sample import query_sample
from memstore.registry import adapter_for
from memstore.store import MemoryStore
from tests import kept
from tests.real.whisper import whisper_tiny_en

pytestmark = pytest.mark.real


def whisper(store: MemoryStore) -> Any:
    """Hears a minute of noise, about which it has little to say."""
    model = WhisperForConditionalGeneration.from_pretrained(whisper_tiny_en()).eval()
    frames = (2, model.config.num_mel_bins, 2 * model.config.max_source_positions)
    store.encode(model, input_features=torch.randn(frames, generator=torch.Generator().manual_seed(0)), name="doc")
    return model


def smollm2(store: MemoryStore) -> Any:
    """Reads the beginning of a book."""
    model = AutoModelForCausalLM.from_pretrained(assets.smollm2(), dtype=torch.float32).eval()
    store.encode(model, AutoTokenizer.from_pretrained(assets.smollm2()), assets.book_text("Ruth")[0][:700], name="doc")
    return model


@pytest.mark.parametrize(("make", "depth", "heads", "width"), [(whisper, 4, 6, 384), (smollm2, 30, 9, 64)])
def test_exact_search_loses_nothing_and_every_second_key_half_of_the_rest(
    library: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Any, depth: int, heads: int, width: int
) -> None:
    kept.install(tmp_path / "plugins", monkeypatch)
    model = make(library)
    exact = library.check("doc", model, backend="exact", k=32)
    with library["doc"].open() as opened:
        sample = query_sample(opened, adapter_for(model)(model))
    assert [tuple(queries.shape[1:]) for queries in sample.values()] == [(heads, width)] * depth
    assert sum(queries.nbytes for queries in sample.values()) <= 16 << 20
    assert [layer.layer for layer in exact.layers] == list(range(depth))
    for layer in exact.layers:
        assert layer.recall == 1 and layer.kept == pytest.approx(1, abs=1e-5) and layer.error < 1e-4
        assert 32 / exact.num_tokens < layer.mass < 1  # attention is not flat
    library.reindex("doc", "kept", {"step": 2})
    halved = library.check("doc", model, backend="kept", k=32).total
    assert halved.exact_mass == exact.total.exact_mass
    assert 0.4 < halved.recall < 0.8 and 0.4 < halved.kept < 0.95 and halved.error > 0.05
