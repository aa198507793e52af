"""Models composed of an encoder and a decoder, between which the encoder's states may pass a map."""

from __future__ import annotations

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

import memstore
from memstore.errors import UnsupportedModelError, WindowExceededError
from memstore.registry import adapter_for
from memstore_adapters.encoder_decoder import DECODERS
from tests.composed import composed
from tests.models import randomised, tokens

EXACT = 1e-4
ANSWER = tokens(7, seed=1, rows=1)


def made(encoder, decoder):
    return randomised(lambda: composed(encoder, decoder))


def states(model, ids):
    with torch.no_grad():
        return model.get_encoder()(ids[None]).last_hidden_state


@pytest.mark.parametrize("decoder", DECODERS)
def test_every_decoder_reads_exactly(library, decoder):
    """Alone, and together with a prompt; the encoder is narrower than the decoder."""
    model, document, prompt = made("bert", decoder), tokens(60), tokens(20, seed=3)
    memory = library.encode(model, input_ids=document, name="doc")
    assert memory.manifest.parts["hidden"].shape == (32,)
    both = BaseModelOutput(last_hidden_state=torch.cat([states(model, prompt), states(model, document)], dim=1))
    with torch.no_grad():
        expected = model(input_ids=document[None], decoder_input_ids=ANSWER).logits
        expected_both = model(encoder_outputs=both, decoder_input_ids=ANSWER).logits
    assert (expected - expected_both).abs().max() > 10 * EXACT
    with memstore.attach(model, memory, top_k="all") as attached, torch.no_grad():
        read = model(encoder_outputs=attached.empty_prompt(), decoder_input_ids=ANSWER).logits
        read_both = model(input_ids=prompt[None], decoder_input_ids=ANSWER).logits
    assert (read - expected).abs().max() < EXACT
    assert (read_both - expected_both).abs().max() < EXACT


@pytest.mark.parametrize("decoder", ["bert", "gpt2"])
def test_scores_and_values_are_those_of_the_maps_one_after_the_other(decoder):
    model = made("bert", decoder)
    attention = adapter_for(model)(model).cross_attentions()[1]
    query, encoded = torch.randn(1, 6, 3, 8), torch.randn(1, 20, 32)
    with torch.no_grad():
        passed = model.enc_to_dec_proj(encoded)
        layer = [module for name, module in model.decoder.named_modules() if name.endswith("crossattention")][1]
        both = layer.c_attn(passed) if decoder == "gpt2" else layer.self.key(passed)
        key = both[..., :48].view(1, 20, 6, 8).transpose(1, 2)
        scores = attention.absorb(query, 0.3) @ encoded[:, None].transpose(2, 3) + attention.key_bias(query, 0.3)
    torch.testing.assert_close(scores, 0.3 * query @ key.transpose(2, 3), atol=1e-5, rtol=1e-4)


def test_the_map_between_is_no_part_of_what_a_memory_depends_on(library):
    """It is applied when the memory is read, so a decoder that is trained further reads what it would read anew."""
    model, document = made("roberta", "bert"), tokens(60)
    memory = library.encode(model, input_ids=document, name="doc")
    with torch.no_grad():
        model.enc_to_dec_proj.weight.mul_(-1.5)
        expected = model(input_ids=document[None], decoder_input_ids=ANSWER).logits
    with memstore.attach(model, memory, top_k="all") as attached, torch.no_grad():
        read = model(encoder_outputs=attached.empty_prompt(), decoder_input_ids=ANSWER).logits
    assert (read - expected).abs().max() < EXACT


@pytest.mark.parametrize(
    ("encoder", "decoder", "window", "target"),
    [("bert", "gpt2", 70, 70), ("roberta", "bert", 68, 70), ("bert", "roberta", 70, 68)],
)
def test_positions_that_padding_takes_are_not_counted(library, encoder, decoder, window, target):
    """RoBERTa's first token stands at position 2, where the id of padding is 1."""
    model = made(encoder, decoder)
    adapter = adapter_for(model)(model)
    assert (adapter.native_window, adapter.max_window, adapter.max_target) == (window, window, target)
    memory = library.encode(model, input_ids=tokens(200), name="doc")
    with memstore.attach(model, memory) as attached, torch.no_grad():
        assert (
            model(encoder_outputs=attached.empty_prompt(), decoder_input_ids=tokens(target, rows=1)).logits.shape[1]
            == target
        )
        with pytest.raises(WindowExceededError, match=f"needs {target + 1} positions, and the model has {target}"):
            model(encoder_outputs=attached.empty_prompt(), decoder_input_ids=tokens(target + 1, rows=1))


@pytest.mark.parametrize("decoder", ["rembert", "roformer"])
def test_a_decoder_whose_attention_cannot_be_read_is_refused_by_name(library, decoder):
    with pytest.raises(UnsupportedModelError, match=f"model_type '{decoder}', .* Decoders that can read: bert, "):
        library.encode(made("bert", decoder), input_ids=tokens(20), name="doc")
    assert not len(library)
