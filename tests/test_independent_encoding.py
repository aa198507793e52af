"""What an encoder makes of a document depends on nothing else, also where the model by itself would let it depend."""

from __future__ import annotations

import random

import pytest
import torch
import transformers as tf

from memstore.errors import DocumentError, UnsupportedModelError
from memstore.fingerprint import weights_hash
from memstore.registry import adapter_for
from tests.matrix import bart_like, t5_like
from tests.models import build, tokens

SPARSE_FROM = 29  # tokens: the tiny BigBirdPegasus attends to (5 + 2 · 1) blocks of 4 at most


def adapter(model):
    return adapter_for(model)(model)


def encoded(model, windows):
    with torch.no_grad():
        return adapter(model).encode(windows)["hidden"]


@pytest.fixture
def bigbird():
    return build("bigbird_pegasus")


@pytest.mark.parametrize("before", [[], [10], [60], [60, 10], [10, 60]], ids=str)
@pytest.mark.parametrize("length", [SPARSE_FROM - 1, SPARSE_FROM, 60])
def test_bigbird_reads_alike_whatever_it_read_before(bigbird, before, length):
    """As a new model does that reads nothing else."""
    document = tokens(length, rows=1)
    expected = build("bigbird_pegasus").get_encoder()(document).last_hidden_state
    for seed, other in enumerate(before):
        encoded(bigbird, tokens(other, seed=seed, rows=1))
    with torch.no_grad():
        bigbird.get_encoder()(tokens(10, rows=1))  # after which the model itself attends to everything
        assert bigbird.get_encoder().attention_type == "original_full"
        by_itself = bigbird.get_encoder()(document).last_hidden_state
    assert torch.equal(encoded(bigbird, document), expected)
    assert torch.allclose(by_itself, expected) == (length < SPARSE_FROM)


@pytest.mark.parametrize("length", [10, 60])
@pytest.mark.parametrize("found", ["block_sparse", "original_full"])
def test_reading_leaves_bigbird_and_random_numbers_as_they_were(bigbird, length, found):
    encoder = bigbird.get_encoder()
    encoder.set_attention_type(found)
    state, weights = torch.random.get_rng_state(), weights_hash(adapter(bigbird))
    encoded(bigbird, tokens(length, rows=1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert {encoder.attention_type, *(layer.self_attn.attention_type for layer in encoder.layers)} == {found}
    assert weights_hash(adapter(bigbird)) == weights
    assert not [name for name, tensor in bigbird.state_dict().items() if tensor.is_meta]
    assert not any(module.training for module in bigbird.modules())


def test_a_bigbird_of_full_attention_stays_so():
    make = bart_like(tf.BigBirdPegasusForConditionalGeneration, tf.BigBirdPegasusConfig, attention_type="original_full")
    model, document = make().eval(), tokens(60, rows=1)
    assert torch.equal(encoded(model, document), model.get_encoder()(document).last_hidden_state)


CROWDED = {
    "nllb-moe": bart_like(
        tf.NllbMoeForConditionalGeneration,
        tf.NllbMoeConfig,
        num_experts=4,
        encoder_sparse_step=1,
        moe_eval_capacity_token_fraction=0.2,
    ),
    "switch_transformers": t5_like(
        tf.SwitchTransformersForConditionalGeneration, tf.SwitchTransformersConfig, num_experts=4, expert_capacity=6
    ),
}


@pytest.mark.parametrize("family", CROWDED)
def test_windows_do_not_compete_for_experts(family):
    """With so few places that many tokens get none."""
    torch.manual_seed(0)
    model = CROWDED[family]().eval()
    windows = tokens(40, rows=3)
    together = encoded(model, windows)
    for window, states in zip(windows.split(1), together.split(1), strict=True):
        assert torch.equal(model.get_encoder()(window).last_hidden_state, states)


@pytest.mark.parametrize("family", CROWDED)
def test_the_first_use_of_a_router_makes_no_other_model(family):
    """Though it converts its weights to the dtype that it computes in."""
    model = build(family).to(torch.bfloat16)
    before = weights_hash(adapter(model))
    encoded(model, tokens(20, rows=1))
    routers = [tensor for name, tensor in model.get_encoder().named_parameters() if ".router." in name]
    assert {tensor.dtype for tensor in routers} == {torch.float32}
    assert weights_hash(adapter(model)) == before


@pytest.mark.parametrize("policy", ["sampling", "random"])
def test_experts_that_are_drawn_by_lot_are_refused(policy):
    model = build("nllb-moe")
    model.config.second_expert_policy = policy
    with pytest.raises(UnsupportedModelError, match=f"second_expert_policy='{policy}'"):
        adapter(model)


def test_attention_that_leaves_the_cap_out_is_refused():
    model = build("t5gemma")
    model.config.decoder._attn_implementation = "sdpa"
    with pytest.raises(UnsupportedModelError, match=r'sdpa attention leaves out.*set_attn_implementation\("eager"\)'):
        adapter(model)
    for layer in model.get_decoder().layers:
        layer.cross_attn.attn_logit_softcapping = None
    assert all(attention.softcap is None for attention in adapter(model).cross_attentions())


@pytest.mark.parametrize(("family", "window"), [("t5", 512), ("longt5", 16384), ("t5gemma", 256), ("pegasus_x", 64)])
def test_the_window_that_a_model_was_made_for(family, window):
    assert adapter(build(family)).native_window == window


def test_a_spectrogram_gives_as_many_states_as_is_said():
    model = build("speech_to_text")
    bound, generator = adapter(model), random.Random(0)
    for frames in [1, 2, 3, 64, *generator.sample(range(4, 64), 5)]:
        features, states = bound.feature_windows(torch.randn(2, frames, 8))
        assert encoded(model, features).shape[1] == states


@pytest.mark.parametrize("shape", [(40, 8), (1, 40, 7), (0, 40, 8), (1, 0, 8), (1, 65, 8)], ids=str)
def test_a_spectrogram_of_another_shape_is_refused(shape):
    with pytest.raises(DocumentError, match=r"reads \[windows, frames, 8\] of at most 64 frames"):
        adapter(build("speech_to_text")).feature_windows(torch.zeros(shape))
