"""Every adapter keeps the contract, with every model family that it claims."""

from __future__ import annotations

from typing import Any

import pytest

from memstore.testing import ModelAdapterContract
from memstore_adapters.bart import BartAdapter
from memstore_adapters.bigbird_pegasus import BigBirdPegasusAdapter
from memstore_adapters.encoder_decoder import ComposedAdapter
from memstore_adapters.experts import NllbMoeAdapter, SwitchTransformersAdapter
from memstore_adapters.gemma import GemmaAdapter
from memstore_adapters.generic import GenericAdapter
from memstore_adapters.gpt2 import GPT2Adapter
from memstore_adapters.gpt_neox import GPTNeoXAdapter
from memstore_adapters.led import LEDAdapter
from memstore_adapters.llama import LlamaAdapter, SmolLM3Adapter
from memstore_adapters.speech_to_text import Speech2TextAdapter
from memstore_adapters.t5 import T5Adapter
from memstore_adapters.t5gemma import T5GemmaAdapter
from memstore_adapters.whisper import WhisperAdapter
from tests.matrix import FAMILIES
from tests.models import build


class OfFamily(ModelAdapterContract):
    family: str

    def make_model(self) -> Any:
        return build(self.family)


class OfSound(OfFamily):
    def document(self) -> dict[str, Any]:
        return FAMILIES[self.family].document(1, 20)


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


class TestBlenderbot(OfFamily):
    adapter, family = BartAdapter, "blenderbot"


class TestBlenderbotSmall(OfFamily):
    adapter, family = BartAdapter, "blenderbot-small"


class TestPLBart(OfFamily):
    adapter, family = BartAdapter, "plbart"


class TestPegasusX(OfFamily):
    adapter, family = BartAdapter, "pegasus_x"


class TestBigBirdPegasus(OfFamily):
    adapter, family = BigBirdPegasusAdapter, "bigbird_pegasus"


class TestNllbMoe(OfFamily):
    adapter, family = NllbMoeAdapter, "nllb-moe"


class TestT5(OfFamily):
    adapter, family = T5Adapter, "t5"


class TestMT5(OfFamily):
    adapter, family = T5Adapter, "mt5"


class TestUMT5(OfFamily):
    adapter, family = T5Adapter, "umt5"


class TestLongT5(OfFamily):
    adapter, family = T5Adapter, "longt5"


class TestSwitchTransformers(OfFamily):
    adapter, family = SwitchTransformersAdapter, "switch_transformers"


class TestT5Gemma(OfFamily):
    adapter, family = T5GemmaAdapter, "t5gemma"


class TestLED(OfFamily):
    adapter, family = LEDAdapter, "led"

    def batch(self) -> dict[str, Any]:
        return FAMILIES["led"].inputs(self.document())


class TestBertAndGpt2(OfFamily):
    adapter, family = ComposedAdapter, "encoder-decoder (BERT, GPT-2)"


class TestRobertaAndRoberta(OfFamily):
    adapter, family = ComposedAdapter, "encoder-decoder (RoBERTa, RoBERTa)"


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


class TestPhi3(OfFamily):
    adapter, family = LlamaAdapter, "phi3-longrope"


class TestSmolLM3(OfFamily):
    adapter, family = SmolLM3Adapter, "smollm3"


class TestGemma2(OfFamily):
    adapter, family = GemmaAdapter, "gemma2"


class TestGemma3(OfFamily):
    adapter, family = GemmaAdapter, "gemma3_text"


class TestGPTNeoX(OfFamily):
    adapter, family = GPTNeoXAdapter, "gpt_neox"


class TestGPT2(OfFamily):
    adapter, family = GPT2Adapter, "gpt2"


class TestWhisper(OfSound):
    adapter, family = WhisperAdapter, "whisper"


class TestSpeech2Text(OfSound):
    adapter, family = Speech2TextAdapter, "speech_to_text"
