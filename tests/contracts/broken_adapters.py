"""Adapters that each break one promise: the test of the kit that must fail, and what it must say."""

from __future__ import annotations

import torch

from memstore.manifest import PartSpec, WindowRule
from memstore.testing import ModelAdapterContract
from memstore_adapters.bart import BartAdapter
from memstore_adapters.llama import LlamaAdapter
from tests.models import build

READS = "test_a_memory_reads_like_its_document"
ALIKE = "test_a_window_is_encoded_alike_whenever_and_with_whatever"
WEIGHTS = "test_weights_are_those_that_decide_what_is_encoded"


class Kit(ModelAdapterContract):
    fails: str
    says: str

    def make_model(self):
        return build("llama" if issubclass(self.adapter, LlamaAdapter) else "bart")


class TestStranger(Kit):
    fails, says = "test_it_knows_its_models", "has model_type 'bart', which is not in ('mbart',)"

    class adapter(BartAdapter):
        model_types = ("mbart",)


class TestMismeasured(Kit):
    fails, says = (
        "test_parts_describe_what_encode_returns",
        "returns 'hidden' of shape (2, 40, 48), and should (2, 40, 4",
    )

    class adapter(BartAdapter):
        def parts(self, dtype):
            return {"hidden": PartSpec(shape=(4, 12), dtype=dtype)}


class TestOnePrecision(Kit):
    fails, says = "test_parts_describe_what_encode_returns", "parts('float16') says that 'hidden' is stored as float32"

    class adapter(BartAdapter):
        def parts(self, dtype):
            return super().parts("float32")


class TestNoisy(Kit):
    fails, says = ALIKE, "'hidden' of the same windows differs from one call to the next"

    class adapter(BartAdapter):
        def encode(self, windows):
            return {"hidden": torch.nn.functional.dropout(super().encode(windows)["hidden"], 0.5)}


class TestSociable(Kit):
    fails, says = ALIKE, "if another is read beside it"

    class adapter(BartAdapter):
        def encode(self, windows):
            hidden = super().encode(windows)["hidden"]
            return {"hidden": hidden - hidden.mean(0)}


class TestUnweighed(Kit):
    fails, says = WEIGHTS, "weights() must give the tensors that encode() depends on"

    class adapter(BartAdapter):
        def weights(self):
            return {}


class TestDecoderWeighed(Kit):
    fails, says = WEIGHTS, "'hidden' depends on tensors of the model that weights() lacks"

    class adapter(BartAdapter):
        def weights(self):
            return dict(self.model.get_decoder().state_dict())


class TestUnruly(Kit):
    fails, says = "test_a_wrong_rule_is_refused", "window=8 with overlap=9: ConfigError is due, but nothing was raised"

    class adapter(BartAdapter):
        def rule(self, window, overlap):
            if window and isinstance(overlap, int) and overlap > window:
                return WindowRule(window=window, overlap=overlap, context="both")
            return super().rule(window, overlap)


class TestStubborn(Kit):
    fails, says = "test_a_rule_has_defaults_and_takes_what_fits", "rule(40, 1) gives window=64 overlap=32"

    class adapter(BartAdapter):
        def rule(self, window, overlap):
            return super().rule(None, None)


class TestOneLayerShort(Kit):
    fails, says = READS, "Logits differ from the plain model's by"

    class adapter(BartAdapter):
        def cross_attentions(self):
            return super().cross_attentions()[1:]


class TestRotated(Kit):
    fails, says = READS, "Logits differ from the plain model's by"

    class adapter(LlamaAdapter):
        def encode(self, windows):
            return {part: -rows if part.startswith("keys") else rows for part, rows in super().encode(windows).items()}


class TestMarked(Kit):
    fails, says = "test_nothing_is_left_behind", "the model does not give what it gave before"

    class adapter(BartAdapter):
        def attachment(self, rows, **options):
            with torch.no_grad():
                self.model.lm_head.weight.add_(1e-3)
            return super().attachment(rows, **options)


class TestAgreeable(Kit):
    fails, says = "test_wrong_options_are_refused", "Attaching with {'no_such_option': 1}: AttachError is due, but noth"

    class adapter(BartAdapter):
        def attachment(self, rows, **options):
            options.pop("no_such_option", None)
            return super().attachment(rows, **options)


class TestAskingOtherwise(Kit):
    fails, says = "test_queries_are_a_sample_that_fits_the_keys", "differ from one call to the next"

    class adapter(BartAdapter):
        def queries(self, opened):
            return {layer: queries + torch.rand(1) for layer, queries in super().queries(opened).items()}


class TestAskingOneHead(Kit):
    fails, says = "test_queries_are_a_sample_that_fits_the_keys", "and must be float32 [m, num_heads, 8]"

    class adapter(LlamaAdapter):
        def queries(self, opened):
            return {layer: queries[:, 0] for layer, queries in super().queries(opened).items()}
