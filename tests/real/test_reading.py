"""Real weights: Whisper tiny.en and SmolLM2-135M read what was stored as if they had just read it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, WhisperForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput

import memstore
from memstore import assets
from memstore.store import MemoryStore
from tests.real.whisper import whisper_tiny_en

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def whisper():
    return WhisperForConditionalGeneration.from_pretrained(whisper_tiny_en()).eval()


@pytest.fixture(scope="module")
def smollm2():
    path = assets.smollm2()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(path)


def sound(whisper, seed):
    config = whisper.config
    frames = 2 * config.max_source_positions
    return torch.randn(1, config.num_mel_bins, frames, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("windows", [1, 3])
def test_whisper_reads_stored_sound(whisper, library, windows):
    features = torch.cat([sound(whisper, seed) for seed in range(windows)])
    with torch.no_grad():
        heard = whisper.get_encoder()(features).last_hidden_state
        heard = BaseModelOutput(last_hidden_state=heard.reshape(1, -1, heard.shape[-1]))
        start = torch.tensor([[50257, 50362, 1107, 11]])
        expected = whisper(encoder_outputs=heard, decoder_input_ids=start).logits
        memory = library.encode(whisper, input_features=features, name="sound")
        assert memory.num_tokens == 1500 * windows
        with memstore.attach(whisper, memory, top_k="all") as attached:
            read = whisper(encoder_outputs=attached.empty_prompt(), decoder_input_ids=start).logits
    assert (read - expected).abs().max() < 1e-4


@pytest.mark.parametrize("beams", [1, 4])
def test_whisper_generates_the_same(whisper, library, beams):
    features = sound(whisper, 0)
    settings = {"max_new_tokens": 12, "num_beams": beams, "do_sample": False}
    expected = whisper.generate(features, **settings)
    memory = library.encode(whisper, input_features=features, name="sound")
    with memstore.attach(whisper, memory, top_k="all") as attached:
        assert torch.equal(whisper.generate(encoder_outputs=attached.empty_prompt(), **settings), expected)


def test_smollm2_reads_a_short_document_exactly(smollm2, library):
    model, tokenizer = smollm2
    document = assets.book_text("Ruth")[0][:1500]
    prompt = tokenizer("\n\nThe name of the mother in law was", return_tensors="pt").input_ids
    memory = library.encode(model, tokenizer, document, name="ruth")
    ids = torch.tensor(tokenizer(document).input_ids)[None]
    joined = torch.cat((ids, prompt), dim=1)
    with torch.no_grad():
        expected = model(input_ids=joined).logits[:, ids.shape[1] :]
        written = model.generate(input_ids=joined, max_new_tokens=12, do_sample=False)[:, joined.shape[1] :]
        with memstore.attach(model, memory) as attached:
            read = model(input_ids=prompt).logits
            answer = attached.generate(input_ids=prompt, max_new_tokens=12, do_sample=False)[:, prompt.shape[1] :]
    assert (read - expected).abs().max() < 1e-3
    assert torch.equal(answer, written)


def test_smollm2_reads_for_prompts_of_unequal_length(smollm2: Any, library: MemoryStore) -> None:
    """Left-padded rows answer as each would alone, and as the plain model does on document and prompt."""
    model, tokenizer = smollm2
    document = assets.book_text("Jonah")[0][:1200]
    memory = library.encode(model, tokenizer, document, name="jonah")
    prompts = ["\n\nThe son of Amittai was", "\n\nThis is a story. In this story the city, to which he was sent, was"]
    tokenizer.padding_side = "left"
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    assert int(batch.attention_mask.sum(1).min()) < batch.input_ids.shape[1]
    settings: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    with memstore.attach(model, memory) as attached:
        answers = attached.generate(**batch, **settings)[:, batch.input_ids.shape[1] :]
    for prompt, answer in zip(prompts, answers, strict=True):
        joined = torch.tensor(tokenizer(document).input_ids + tokenizer(prompt).input_ids)[None]
        expected = model.generate(input_ids=joined, **settings)[0, joined.shape[1] :]
        assert torch.equal(answer[: len(expected)], expected)
