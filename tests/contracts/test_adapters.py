"""Every adapter keeps the contract, with every model family that it claims."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from memstore.testing import ModelAdapterContract
from memstore_adapters.bart import BartAdapter
from memstore_adapters.encoder_decoder import ComposedAdapter
from memstore_adapters.generic import GenericAdapter
from memstore_adapters.led import LEDAdapter
from memstore_adapters.llama import LlamaAdapter
from memstore_adapters.t5 import T5Adapter
from memstore_adapters.whisper import WhisperAdapter
from tests.models import build, whisper


class OfFamily(ModelAdapterContract):
    family: str

    def make_model(self) -> Any:
        return build(self.family)


class TestBart(OfFamily):
    adapter, family = BartAdapter, "bart"


class TestMBart(OfFamily):
    adapter, family = BartAdapter, "mbart"


class TestPegasus(OfFamily):
    adapter, family = BartAdapter, "pegasus"


class TestMarian(OfFamily):
    adapter, family = BartAdapter, "marian"


class TestM2M100(OfFamily):
    adapter, family = BartAdapter, "m2m_100"


class TestT5(OfFamily):
    adapter, family = T5Adapter, "t5"


class TestMT5(OfFamily):
    adapter, family = T5Adapter, "mt5"


class TestUMT5(OfFamily):
    adapter, family = T5Adapter, "umt5"


class TestLED(OfFamily):
    adapter, family = LEDAdapter, "led"

    def batch(self) -> dict[str, Any]:
        """With the global token that each window is read with."""
        batch = super().batch()
        everywhere = torch.zeros_like(batch["input_ids"])
        everywhere[:, 0] = 1
        return batch | {"global_attention_mask": everywhere}


class TestBertAndGpt2(OfFamily):
    adapter, family = ComposedAdapter, "bert-gpt2"


class TestRobertaAndRoberta(OfFamily):
    adapter, family = ComposedAdapter, "roberta-roberta"


@pytest.mark.filterwarnings("ignore::memstore.errors.GenericAdapterNotice")
class TestUnknown(OfFamily):
    adapter, family = GenericAdapter, "made-up"


class TestLlama(OfFamily):
    adapter, family = LlamaAdapter, "llama"


class TestMistral(OfFamily):
    adapter, family = LlamaAdapter, "mistral"


class TestMistralSliding(OfFamily):
    adapter, family = LlamaAdapter, "mistral-sliding"


class TestQwen2(OfFamily):
    adapter, family = LlamaAdapter, "qwen2"


class TestQwen3(OfFamily):
    adapter, family = LlamaAdapter, "qwen3"


class TestWhisper(ModelAdapterContract):
    adapter = WhisperAdapter

    def make_model(self) -> Any:
        return whisper()

    def document(self) -> dict[str, Any]:
        return {"input_features": torch.randn(1, 8, 40, generator=torch.Generator().manual_seed(1))}
