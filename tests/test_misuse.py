"""What a user may get wrong with memories attached: an error that says so, or the right result; never a silent one."""

from __future__ import annotations

import threading
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

import memstore
from memstore.errors import AttachError, WindowExceededError
from memstore.hooks import reader_of
from tests import tiny
from tests.models import build, read, tokens


@pytest.fixture(scope="module")
def model():
    return build("bart")


@pytest.mark.parametrize("family", ["bart", "llama"])
@pytest.mark.parametrize("options", [{"layers": np.array([0, 1])}, {"layers": torch.tensor([0, 1])}, {"explain": "no"}])
def test_options_of_another_type(library, family, options):
    model = build(family)
    with pytest.raises(AttachError, match=f"{next(iter(options))}="):
        memstore.attach(model, read(library, model), **options)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a list": ({"input_ids": [[5, 6]]}, "input_ids is a list"),
    "an array": ({"input_ids": np.array([[5, 6]])}, "input_ids is a ndarray"),
    "one dimension": ({"input_ids": torch.tensor([5, 6])}, r"shape \[2\]"),
    "no rows": ({"input_ids": torch.zeros(0, 5, dtype=torch.long)}, "at least one row"),
    "no whole numbers": ({"input_ids": torch.ones(1, 2)}, "whole numbers"),
    "too large": ({"input_ids": torch.tensor([[5, 500]])}, "ids from 5 to 500; this model knows 0 to 119"),
    "below 0": ({"inputs": torch.tensor([[-1, 5]])}, "ids from -1 to 5"),
    "no tokens": ({"inputs": torch.zeros(1, 0, dtype=torch.long)}, "no tokens"),
    "no embeddings": ({"inputs_embeds": torch.zeros(1, 0, 48)}, "no tokens"),
    "a flat embedding": ({"inputs_embeds": torch.zeros(5, 48)}, "width"),
    "no tokenizer": ({"prompt": "a", "tokenizer": "bart"}, "not a str"),
    "more than an answer": ({"prompt": "a", "tokenizer": tiny.tokenizer(), "return_dict_in_generate": True}, "a str"),
}


@pytest.mark.parametrize("family", ["bart", "llama"])
@pytest.mark.parametrize("case", WRONG)
def test_inputs_that_no_model_reads(library, family, case):
    model = build(family)
    keywords, message = WRONG[case]
    with memstore.attach(model, read(library, model)) as attached, pytest.raises(AttachError, match=message):
        attached.generate(max_new_tokens=2, **keywords)


@pytest.mark.parametrize("name", ["input_ids", "inputs", "inputs_embeds"])
def test_a_prompt_is_too_long_by_any_name(library, model, name):
    prompt: Any = torch.zeros(1, 65, 48) if name == "inputs_embeds" else tokens(65, rows=1)
    with memstore.attach(model, read(library, model)) as attached, pytest.raises(WindowExceededError, match="65"):
        attached.generate(**{"max_new_tokens": 2, name: prompt})


def test_beams_of_encoder_outputs_made_by_hand_are_not_taken_for_rows(library, model):
    rows = [[read(library, model, name)] for name in ("a", "bb")]
    states = BaseModelOutput(last_hidden_state=torch.zeros(1, 5, 48))
    with memstore.attach(model, rows=rows) as attached, pytest.raises(AttachError, match="batch of 1"):
        attached.generate(encoder_outputs=states, num_beams=2, max_new_tokens=3)


def test_rows_that_whisper_goes_on_with_are_not_taken_for_others(library):
    """Of four rows the first two are longer than a window: the second window is read by a batch of two."""
    model = build("whisper")
    model.generation_config.no_timestamps_token_id, model.generation_config.is_multilingual = 100, False
    generator = torch.Generator().manual_seed(0)
    one, two = (
        library.encode(model, input_features=torch.randn(1, 8, 40, generator=generator), name=name) for name in "ab"
    )
    mask = torch.ones(4, 100, dtype=torch.long)
    mask[2:, 40:] = 0
    long: dict[str, Any] = {"input_features": torch.randn(4, 8, 100, generator=generator), "attention_mask": mask}
    settings: dict[str, Any] = {"return_timestamps": True, "max_new_tokens": 3}
    with memstore.attach(model, rows=[[one], [two]]) as attached:
        with pytest.raises(AttachError, match="a batch of just as many"):
            attached.generate(**long, **settings)
        with pytest.raises(AttachError, match="batch of 1"):
            attached.generate(**{name: tensor[1:3] for name, tensor in long.items()}, **settings)
        together = attached.generate(**{name: tensor[:2] for name, tensor in long.items()}, **settings)
    for row, memory in enumerate((one, two)):
        with memstore.attach(model, memory) as attached:
            alone = attached.generate(**{name: tensor[row : row + 1] for name, tensor in long.items()}, **settings)
        assert torch.equal(together[row : row + 1, : alone.shape[1]], alone)


@pytest.mark.parametrize("top_k", ["all", 8])
def test_autocast_does_not_touch_what_is_read(library, model, top_k):
    """In bfloat16 a sum over thousands of tokens stands still, and shares have two digits."""
    memory = read(library, model, length=2000)
    query, seen = torch.randn(1, 6, 1, 8, generator=torch.Generator().manual_seed(0)), []
    with memstore.attach(model, memory, top_k=top_k), torch.no_grad():
        module = model.model.decoder.layers[0].encoder_attn
        function = cast(Any, reader_of(module))
        prompt = torch.zeros(1, 6, 1, 8)
        for enabled in (False, True):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
                seen.append(function(module, query, prompt, prompt, None)[0])
                assert torch.is_autocast_enabled("cpu") == enabled
    assert torch.equal(*seen)


def test_a_step_that_the_keyboard_interrupts_is_over(library, model):
    memories = [read(library, model, name) for name in ("a", "bb")]

    def interrupt(*args):
        raise KeyboardInterrupt

    with memstore.attach(model, memories[0]) as attached:
        hook = model.model.decoder.layers[1].register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            attached.generate(max_new_tokens=2)
        hook.remove()
        attached.add(memories[1])
        answers = []
        thread = threading.Thread(target=lambda: answers.append(attached.generate(max_new_tokens=3)))
        thread.start()
        thread.join()
    with memstore.attach(model, *memories) as attached:
        assert torch.equal(answers[0], attached.generate(max_new_tokens=3))


@pytest.mark.parametrize("top_k", ["all", 8])
def test_what_was_attached_in_inference_mode_takes_gradients_later(library, model, top_k):
    memory, inputs = read(library, model), {"input_ids": tokens(5, rows=1), "decoder_input_ids": tokens(4, rows=1)}
    weight = model.model.decoder.layers[0].encoder_attn.q_proj.weight
    gradients = []
    for inside in (False, True):
        attached = memstore.attach(model, memory, top_k=top_k)
        with torch.inference_mode(inside):
            attached.__enter__()
        try:
            gradients.append(torch.autograd.grad(model(**inputs).logits.sum(), weight)[0])
        finally:
            attached.__exit__(None, None, None)
    torch.testing.assert_close(*gradients)


def explained(model, memories, **keywords):
    attached = memstore.attach(model, *memories, explain=True)
    with attached:
        output = model.generate(
            input_ids=tokens(9, rows=1), max_new_tokens=5, num_beams=3, return_dict_in_generate=True, **keywords
        )
    return attached, output.beam_indices


def test_beam_indices_of_another_kind_or_generation(library, model):
    attached, beams = explained(model, [read(library, model)])
    assert {reading.row for reading in attached.provenance(beam_indices=beams.int())} == {0}
    for wrong in (beams.bool(), beams.to(torch.complex64), beams[:0], torch.cat([beams, beams], dim=1)):
        with pytest.raises(AttachError, match="beam_indices"):
            attached.provenance(beam_indices=wrong)


def test_beams_without_a_cache_cannot_be_followed_and_are_not_guessed(library, model):
    memory = read(library, model)
    attached, beams = explained(model, [memory], use_cache=False)
    with pytest.raises(AttachError, match="leave out use_cache=False"):
        attached.provenance(beam_indices=beams)
    with memstore.attach(model, memory, explain=True) as attached:
        attached.generate(input_ids=tokens(9, rows=1), max_new_tokens=5, num_beams=3, use_cache=False)
        with pytest.raises(AttachError, match="leave out use_cache=False"):
            attached.provenance()
