"""Rows of a batch, each with its own memories, prompts of unequal length, and every way in which tokens are chosen."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import pytest
import torch
import transformers as tf
from transformers import CompileConfig
from transformers.modeling_outputs import BaseModelOutput

import memstore
from memstore.errors import AttachError
from tests.models import build, read, run, set_attention, tokens

SEQ2SEQ = ["bart", "t5"]
LENGTHS = (12, 8, 5)  # of the prompts
PADDING = 1e-5


@pytest.fixture(params=SEQ2SEQ)
def model(request):
    return build(request.param)


def given(model, library, **options):
    """Padded prompts with their mask, and three rows of memories that overlap."""
    one, two, three = (
        library.encode(model, input_ids=tokens(25 + 7 * i, seed=i), name=str(i), **options) for i in range(3)
    )
    prompts = tokens(max(LENGTHS), seed=9, rows=len(LENGTHS))
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    return prompts * mask + model.config.pad_token_id * (1 - mask), mask, [[one], [two, three], [three, one]]


def plain(model, prompts, rows):
    """Encoder outputs of the plain model: each row's prompt and memories in a row, the shorter ones padded."""
    joined = []
    for prompt, length, memories in zip(prompts, LENGTHS, rows, strict=True):
        with torch.no_grad():
            states = [model.get_encoder()(input_ids=prompt[None, :length]).last_hidden_state[0]]
        for memory in memories:
            with memory.open() as opened:
                states += [block.to(model.dtype) for block in opened.blocks("hidden")]
        joined.append(torch.cat(states))
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(states)) for states in joined], batch_first=True)
    padded = torch.nn.utils.rnn.pad_sequence(joined, batch_first=True, padding_value=3)
    return {"encoder_outputs": BaseModelOutput(last_hidden_state=padded), "attention_mask": mask.long()}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("top_k", ["all", 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_padding_does_not_change_a_row(library, model, dtype, top_k, implementation):
    """Each row as in a batch of its own, and as the plain model over prompt and memories where everything is read."""
    model.to(dtype)
    set_attention(model, implementation)
    prompts, mask, rows = given(model, library)
    answer = tokens(7, seed=1, rows=3)
    alone = []
    for row, length in enumerate(LENGTHS):
        with memstore.attach(model, *rows[row], top_k=top_k), torch.no_grad():
            one = slice(row, row + 1)
            alone.append(model(input_ids=prompts[one, :length], decoder_input_ids=answer[one]).logits)
    with memstore.attach(model, rows=rows, top_k=top_k), torch.no_grad():
        together = model(input_ids=prompts, attention_mask=mask, decoder_input_ids=answer).logits
    largest = float(together.abs().max())
    assert (together - torch.cat(alone)).abs().max() < (PADDING if dtype == torch.float32 else 0.02 * largest)
    if top_k == "all":
        with torch.no_grad():
            expected = model(**plain(model, prompts, rows), decoder_input_ids=answer).logits
        assert (together - expected).abs().max() < (1e-4 if dtype == torch.float32 else 0.05 * largest)


def test_prompts_may_be_padded_on_the_left_where_positions_are_relative(library):
    model = build("t5")
    prompts, mask, rows = given(model, library)
    answer = tokens(7, seed=1, rows=3)
    rolled = [torch.stack([x.roll(12 - n) for x, n in zip(each, LENGTHS, strict=True)]) for each in (prompts, mask)]
    with memstore.attach(model, rows=rows), torch.no_grad():
        right = model(input_ids=prompts, attention_mask=mask, decoder_input_ids=answer).logits
        left = model(input_ids=rolled[0], attention_mask=rolled[1], decoder_input_ids=answer).logits
    assert (left - right).abs().max() < PADDING


WAYS: list[dict[str, Any]] = [
    {},
    {"num_beams": 4},
    {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.5, "early_stopping": True},
    {"num_beams": 3, "do_sample": True},
    {"do_sample": True},
    {"do_sample": True, "num_return_sequences": 3, "top_k": 20, "temperature": 1.4},
    {"cache_implementation": "static"},
    {"cache_implementation": "static", "num_beams": 3},
    {"use_cache": False},
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_same_tokens_as_the_plain_model(library, model, way):
    """By whatever way tokens are chosen: as the plain model over each row's prompt and memories, from the same seed."""
    prompts, mask, rows = given(model, library)
    settings = {"max_new_tokens": 10, "do_sample": False, "repetition_penalty": 1.5, **way}
    torch.manual_seed(3)
    expected = model.generate(**plain(model, prompts, rows), **settings)
    with memstore.attach(model, rows=rows, top_k="all") as attached:
        torch.manual_seed(3)
        assert torch.equal(model.generate(input_ids=prompts, attention_mask=mask, **settings), expected)
        torch.manual_seed(3)
        assert torch.equal(attached.generate(input_ids=prompts, attention_mask=mask, **settings), expected)
    assert len({tuple(row.tolist()) for row in expected}) > 1


@pytest.mark.parametrize("top_k", ["all", 12])
def test_rows_of_whisper(library, top_k):
    model = build("whisper")
    features = torch.randn(4, 8, 40, generator=torch.Generator().manual_seed(0))
    one, two = (library.encode(model, input_features=features[i : i + 2 - i], name=str(i)) for i in range(2))
    rows, answer = [[one], [one, two], [two]], tokens(6, seed=1, rows=3) % 50
    alone = []
    for row, memories in enumerate(rows):
        with memstore.attach(model, *memories, top_k=top_k) as attached, torch.no_grad():
            prompt = attached.empty_prompt()
            alone.append(model(encoder_outputs=prompt, decoder_input_ids=answer[row : row + 1]).logits)
    with memstore.attach(model, rows=rows, top_k=top_k) as attached, torch.no_grad():
        together = model(encoder_outputs=attached.empty_prompt(3), decoder_input_ids=answer).logits
    assert (together - torch.cat(alone)).abs().max() < PADDING
    if top_k == "all":
        joined = features[[0, 1]], features[[0, 1, 1]], features[[1]]
        for row, windows in enumerate(joined):
            with torch.no_grad():
                states = model.get_encoder()(windows).last_hidden_state.flatten(0, 1)[None]
                states = BaseModelOutput(last_hidden_state=states)
                expected = model(encoder_outputs=states, decoder_input_ids=answer[row : row + 1]).logits
            assert (together[row] - expected[0]).abs().max() < 1e-4


def helps(model, prompt, helping, settings):
    """Whether assisted generation of the plain model writes what it writes alone."""
    try:
        helped = model.generate(input_ids=prompt, **helping, **settings)
    except TypeError:  # its cache cannot be shortened
        return False
    return torch.equal(helped, model.generate(input_ids=prompt, **settings))


@pytest.mark.parametrize("family", [*SEQ2SEQ, "llama"])
@pytest.mark.parametrize("helper", ["another model", "the prompt"])
def test_assisted_generation_writes_what_greedy_generation_writes(library, family, helper):
    model, prompt = build(family), tokens(9, seed=1, rows=1)
    helping = (
        {"assistant_model": build(family, seed=5)} if helper == "another model" else {"prompt_lookup_num_tokens": 3}
    )
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    if not helps(model, prompt, helping, settings):
        pytest.skip(f"transformers {tf.__version__} writes something else with help, also without a memory")
    with memstore.attach(model, read(library, model)) as attached:
        expected = attached.generate(input_ids=prompt, **settings)
        assert torch.equal(attached.generate(input_ids=prompt, **helping, **settings), expected)
        if family == "llama":
            return
        if helper == "another model":
            with pytest.raises(AttachError, match="assistant model reads the prompt for itself, and there is none"):
                attached.generate(**helping, **settings)
        else:
            assert torch.equal(attached.generate(**helping, **settings), attached.generate(**settings))
    assert not torch.equal(model.generate(input_ids=prompt, **settings), expected)


def test_beams_of_a_single_prompt_are_not_taken_for_the_rows(library, model):
    rows = [[read(library, model, name)] for name in ("a", "b")]
    settings: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    prompts = tokens(9, seed=1, rows=2)
    with memstore.attach(model, rows=rows):
        for way in ({"num_beams": 2}, {"num_beams": 2, "num_return_sequences": 2}):
            assert len(model.generate(input_ids=prompts, **way, **settings)) == 2 * len(way)
            with pytest.raises(AttachError, match="a batch of 1 cannot be shared out"):
                model.generate(input_ids=prompts[:1], **way, **settings)
        with pytest.raises(AttachError, match="a batch of 1 cannot be shared out"):
            model.generate(input_ids=prompts[:1], do_sample=True, num_return_sequences=2, max_new_tokens=3)


@pytest.fixture
def compiler():
    """``torch.compile`` without a compiler behind it, and without the log of a hundred lines a frame."""
    torch.compiler.reset()
    logging.disable(logging.INFO)
    yield partial(torch.compile, backend="eager")
    logging.disable(logging.NOTSET)
    torch.compiler.reset()


def shallow(family):
    """A model with one layer, of which each costs seconds to compile."""
    model = build(family)
    for stack in (model.model.encoder, model.model.decoder) if family == "bart" else (model.model,):
        stack.layers = stack.layers[:1]
    model.config.encoder_layers = model.config.decoder_layers = model.config.num_hidden_layers = 1
    return model


def test_a_compiled_decoder_reads_what_is_attached(library, compiler):
    """What was true when it was compiled is not taken to be true for ever."""
    model = shallow("llama")
    memory, before = read(library, model), run(model)
    with memstore.attach(model, memory):
        expected = run(model)
    model.model.forward = compiler(model.model.forward)
    torch.testing.assert_close(run(model), before)
    with memstore.attach(model, memory):
        torch.testing.assert_close(run(model), expected)
    torch.testing.assert_close(run(model), before)


def test_generate_compiles_its_steps_over_a_static_cache(library, compiler):
    model, prompts = shallow("bart"), tokens(9, seed=1, rows=2)
    compiling: Any = CompileConfig(backend="eager", mode="default")
    compiling._compile_all_devices = True
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "repetition_penalty": 2.0}
    static = {"cache_implementation": "static", "compile_config": compiling}
    before = model.generate(input_ids=prompts, **settings)
    assert torch.equal(model.generate(input_ids=prompts, **static, **settings), before)
    assert hasattr(model, "_compiled_call")
    with memstore.attach(model, read(library, model)):
        expected = model.generate(input_ids=prompts, **settings)
        assert torch.equal(model.generate(input_ids=prompts, **static, **settings), expected)
    assert torch.equal(model.generate(input_ids=prompts, **static, **settings), before)
    assert not torch.equal(expected, before)


def test_one_graph_of_the_whole_model_is_refused_by_torch(library, compiler):
    """A memory is read between graphs, so there is none of the whole: an error, not an answer without the memory."""
    model = shallow("bart")
    with memstore.attach(model, read(library, model)):
        whole = compiler(model.forward, fullgraph=True)
        with pytest.raises(RuntimeError, match="Binding._pre_hook"):
            whole(input_ids=tokens(9, rows=1), decoder_input_ids=tokens(5, rows=1))
