"""LED: windows with a global token each, and a decoder that follows no AttentionInterface."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput
from transformers.models.led.modeling_led import LEDDecoderAttention

import memstore
from memstore.errors import WindowExceededError
from memstore.registry import adapter_for
from memstore.windows import plan
from tests.models import build, read, run, tokens
from tests.test_attachment import Stop, traces

EXACT = 1e-4
ANSWER = tokens(7, seed=1, rows=1)


@pytest.fixture
def model():
    return build("led")


def everywhere(ids):
    mask = torch.zeros_like(ids)
    mask[:, 0] = 1
    return mask


def states(model, *documents):
    """What the plain encoder makes of token ids [n], one window each."""
    with torch.no_grad():
        made = [model.get_encoder()(ids[None], global_attention_mask=everywhere(ids[None])) for ids in documents]
    return torch.cat([each.last_hidden_state for each in made], dim=1)


def cross_attentions(model):
    return [layer.encoder_attn for layer in model.get_decoder().layers]


@pytest.mark.parametrize("length", [1, 17, 48, 64])
def test_a_window_is_read_with_global_attention_on_its_first_token(model, library, length):
    """Also where the encoder has to pad it to a multiple of its attention window, 16."""
    document = tokens(length)
    memory = library.encode(model, input_ids=document, name="doc")
    with memory.open() as opened, torch.no_grad():
        assert torch.equal(opened.rows("hidden", 0, length), states(model, document)[0])
        local = model.get_encoder()(document[None]).last_hidden_state
    if length > 1:
        assert (states(model, document) - local).abs().max() > EXACT  # so it does matter
    inputs = {"input_ids": document[None], "global_attention_mask": everywhere(document[None])}
    with torch.no_grad():
        expected = model(**inputs, decoder_input_ids=ANSWER).logits
    with memstore.attach(model, memory, top_k="all") as attached, torch.no_grad():
        logits = model(encoder_outputs=attached.empty_prompt(), decoder_input_ids=ANSWER).logits
    assert (logits - expected).abs().max() < EXACT


def test_every_window_of_a_long_document_has_one(model, library):
    document = tokens(150)
    memory = library.encode(model, input_ids=document, name="doc")
    windows = plan(150, memory.manifest.rule)
    assert memory.manifest.rule.window == 64 and len(windows) == 4  # of 70 positions, 64 are whole attention windows
    kept = [
        states(model, document[w.start : w.stop])[0, w.keep_start - w.start : w.keep_stop - w.start] for w in windows
    ]
    with memory.open() as opened:
        assert (opened.rows("hidden", 0, 150) - torch.cat(kept)).abs().max() < EXACT


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("use_cache", [True, False])
def test_keys_of_the_prompt_are_cached_as_the_plain_decoder_does(model, library, beams, use_cache):
    """Step by step the same scores as with the states of prompt and document given to the plain model."""
    prompt, document = tokens(20, seed=3), tokens(60)
    memory = library.encode(model, input_ids=document, name="doc")

    def scores(**inputs):
        settings = {"max_new_tokens": 6, "min_new_tokens": 6, "num_beams": beams, "do_sample": False}
        made = model.generate(**inputs, **settings, output_logits=True, return_dict_in_generate=True)
        return torch.stack(made.logits)

    expected = scores(encoder_outputs=BaseModelOutput(last_hidden_state=states(model, prompt, document)))
    inputs = {"input_ids": prompt[None], "global_attention_mask": everywhere(prompt[None])}
    assert (scores(**inputs) - expected).abs().max() > 100 * EXACT
    with memstore.attach(model, memory, top_k="all"):
        assert (scores(**inputs, use_cache=use_cache) - expected).abs().max() < EXACT


def test_layers_that_are_not_chosen_see_the_prompt_alone(model, library):
    prompt, document = tokens(20, seed=3), tokens(60)
    memory, joined = library.encode(model, input_ids=document, name="doc"), states(model, prompt, document)
    with memstore.attach(model, memory, top_k="all", layers=[1]), torch.no_grad():
        logits = model(prompt[None], global_attention_mask=everywhere(prompt[None]), decoder_input_ids=ANSWER).logits

    def give_all(module, args, kwargs):
        return args, kwargs | {"key_value_states": joined, "attention_mask": None}

    handle = cross_attentions(model)[1].register_forward_pre_hook(give_all, with_kwargs=True)
    plain = BaseModelOutput(last_hidden_state=states(model, prompt))
    with torch.no_grad():
        expected = model(encoder_outputs=plain, decoder_input_ids=ANSWER).logits
    handle.remove()
    assert (logits - expected).abs().max() < EXACT


@pytest.mark.parametrize("leave", ["normally", "by an exception"])
def test_nothing_is_left_behind_and_no_other_module_is_touched(model, library, leave):
    other = build("led", seed=1)
    memory, before, expected, theirs = read(library, model), traces(model), run(model), run(other)
    try:
        with memstore.attach(model, memory):
            assert not torch.equal(run(model), expected) and torch.equal(run(other), theirs)
            assert {type(module) for module in cross_attentions(other)} == {LEDDecoderAttention}
            if leave == "by an exception":
                raise Stop
    except Stop:
        pass
    assert traces(model) == before and torch.equal(run(model), expected)
    assert {type(module) for module in cross_attentions(model)} == {LEDDecoderAttention}


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_made_while_attached_attends_plainly_and_can_be_attached(model, library, clone):
    memory, expected = read(library, model), run(model)
    attention, attentions = cross_attentions(model)[0], model.get_decoder().layers
    with memstore.attach(model, memory):
        read_logits = run(model)
        copied = clone(attention)
    attentions[0].encoder_attn = copied
    assert torch.equal(run(model), expected)
    with memstore.attach(model, memory):
        assert torch.equal(run(model), read_logits)
    assert torch.equal(run(model), expected)


def test_the_decoder_has_positions_of_its_own(model, library):
    assert adapter_for(model)(model).max_target == 40
    with memstore.attach(model, read(library, model)) as attached, torch.no_grad():
        assert (
            model(encoder_outputs=attached.empty_prompt(), decoder_input_ids=tokens(40, rows=1)).logits.shape[1] == 40
        )
        with pytest.raises(WindowExceededError, match="needs 41 positions, and the model has 40"):
            model(encoder_outputs=attached.empty_prompt(), decoder_input_ids=tokens(41, rows=1))
