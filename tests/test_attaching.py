"""What may be attached to which model, and with which options: everything else is refused in words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

import memstore
from memstore.errors import AttachError, PluginError, UnsupportedModelError, WindowExceededError
from tests import tiny
from tests.models import build, cross_attentions, read, run, tokens

FAMILIES = ["bart", "t5", "llama", "mistral-sliding"]
SEQ2SEQ = ["bart", "t5"]
DECODER_ONLY = ["llama", "mistral-sliding"]


@pytest.fixture(params=FAMILIES)
def model(request):
    return build(request.param)


def test_all_layers_by_name_are_all_layers(library, model):
    memory = read(library, model)
    with memstore.attach(model, memory) as attached:
        expected = run(model)
        depth = len(attached._readers())
    with memstore.attach(model, memory, layers=range(depth)):
        assert torch.equal(run(model), expected)
    with memstore.attach(model, memory, layers=[depth - 1]):
        last = run(model)
    assert not torch.equal(last, expected) and not torch.equal(last, run(model))


def widen(states):
    def hook(module, args, keywords):
        seen = torch.cat((keywords["key_value_states"], states), dim=1)
        keywords = keywords | {key: None for key in ("attention_mask", "mask", "position_bias") if key in keywords}
        return args, {**keywords, "key_value_states": seen}

    return hook


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_other_layers_see_only_the_prompt(library, family):
    """Against the plain model whose one layer is given the prompt's states and the memory's in a row."""
    model = build(family)
    memory = read(library, model)
    with memory.open() as opened:
        states = opened.rows("hidden", 0, 60)[None].clone()
    layers = cross_attentions(model)
    for i in range(len(layers)):
        hooks = [
            layer.register_forward_pre_hook(widen(states[:, : 60 * (layer is layers[i])]), with_kwargs=True)
            for layer in layers
        ]
        expected = run(model, use_cache=False)
        for hook in hooks:
            hook.remove()
        with memstore.attach(model, memory, layers=[i], top_k="all"):
            torch.testing.assert_close(run(model), expected, atol=1e-4, rtol=1e-4)


WRONG: list[tuple[list[str], dict[str, Any], type[Exception], str]] = [
    (FAMILIES, {"rows": []}, AttachError, "at least one memory"),
    (FAMILIES, {"rows": [[]]}, AttachError, "at least one memory"),
    (FAMILIES, {"layers": []}, AttachError, "which are 0 to"),
    (FAMILIES, {"layers": [0, 3]}, AttachError, "which are 0 to"),
    (FAMILIES, {"layers": [-1]}, AttachError, "which are 0 to"),
    (FAMILIES, {"layers": 1}, AttachError, "layers=1"),
    (FAMILIES, {"layers": [True]}, AttachError, "which are 0 to"),
    (FAMILIES, {"top_k": 0}, AttachError, "top_k=0"),
    (FAMILIES, {"top_k": -1}, AttachError, "top_k=-1"),
    (FAMILIES, {"top_k": True}, AttachError, "top_k=True"),
    (FAMILIES, {"top_k": "some"}, AttachError, "top_k='some'"),
    (FAMILIES, {"top_k": 2.5}, AttachError, "top_k=2.5"),
    (DECODER_ONLY, {"top_k": 8}, AttachError, "budget="),
    (FAMILIES, {"index": "exakt"}, PluginError, "Did you mean 'exact'"),
    (DECODER_ONLY, {"budget": 63}, AttachError, "at least 64"),
    (DECODER_ONLY, {"budget": 0}, AttachError, "at least 64"),
    (DECODER_ONLY, {"budget": 100.5}, AttachError, "budget=100.5"),
    (DECODER_ONLY, {"budget": "all"}, AttachError, "budget='all'"),
    (FAMILIES, {"colour": "red"}, AttachError, "colour: no option.*, which has top_k, .*layers"),
]
CASES = [(family, *case) for families, *case in WRONG for family in families]


@pytest.mark.parametrize(("family", "options", "error", "message"), CASES, ids=lambda value: str(value)[:30])
def test_wrong_options_are_refused_in_words(library, family, options, error, message):
    model = build(family)
    memories = [] if "rows" in options else [read(library, model)]
    with pytest.raises(error, match=message):
        memstore.attach(model, *memories, **options)


def test_memories_are_given_in_one_of_two_ways(library):
    model = build("bart")
    memory = read(library, model)
    for memories, rows in (((), None), ((memory,), [[memory]])):
        with pytest.raises(AttachError, match="Give at least one memory, or rows="):
            memstore.attach(model, *memories, rows=rows)


@pytest.mark.parametrize("top_k", [10, "all"])
def test_an_unknown_index_is_refused_even_where_none_is_needed(library, top_k):
    model = build("bart")
    with pytest.raises(PluginError, match="Did you mean 'exact'"):
        memstore.attach(model, read(library, model), index="exacts", top_k=top_k)


def unsupported():
    sizes: dict[str, Any] = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    yield tf.BertLMHeadModel(tf.BertConfig(vocab_size=9, is_decoder=True, **sizes)), "'bert'"
    yield tf.ViTModel(tf.ViTConfig(image_size=16, patch_size=8, **sizes)), "'vit'"


@pytest.mark.parametrize("other", list(unsupported()), ids=lambda value: value[1])
def test_a_model_without_adapter_is_told_what_is_supported(library, other):
    memory = read(library, build("bart"))
    for use in (lambda: memstore.attach(other[0], memory), lambda: read(library, other[0], "new")):
        with pytest.raises(UnsupportedModelError, match=f"{other[1]}. Supported: .*bart.*llama.*t5.*whisper"):
            use()


def parts():
    for family in SEQ2SEQ:
        model = build(family)
        yield model.get_encoder()
        yield model.get_decoder()
    yield tf.T5EncoderModel(build("t5").config)
    yield tf.BartForCausalLM(build("bart").config)


@pytest.mark.parametrize("part", list(parts()), ids=lambda part: f"{part.config.model_type}-{type(part).__name__}")
def test_a_part_of_a_model_is_told_what_it_lacks(library, part):
    memory = read(library, build(part.config.model_type))
    for use in (lambda: read(library, part, "new"), lambda: memstore.attach(part, memory)):
        with pytest.raises(UnsupportedModelError, match=f"{type(part).__name__} is only a part of an encoder-decoder"):
            use()


def test_what_is_no_model_and_what_is_no_memory_are_refused(library, model):
    memory = read(library, model)
    others: list[Any] = [None, torch.nn.Linear(2, 2), torch.compile(model, backend="eager")]
    for other in others:
        with pytest.raises(UnsupportedModelError, match=f"{type(other).__name__} is no transformers model"):
            memstore.attach(other, memory)
    for memories in (["doc"], [[memory]], [memory.manifest]):
        with pytest.raises(AttachError, match=r"store\['name'\]"):
            memstore.attach(model, *memories)
    for rows in ([memory], 3, [["doc"]], {0: [memory]}):
        with pytest.raises(AttachError, match="one list of them a row"):
            memstore.attach(model, rows=rows)


def test_a_memory_is_attached_once_to_a_row(library, model):
    memory = read(library, model)
    for again in (memory, library["doc"]):
        with pytest.raises(AttachError, match="attached twice to one row: doc, doc"):
            memstore.attach(model, memory, again)
    with memstore.attach(model, memory):
        expected = run(model, rows=2)
    with memstore.attach(model, rows=[[memory], [library["doc"]]]):
        assert torch.equal(run(model, rows=2), expected)


def test_a_model_without_a_head_reads(library):
    base = build("bart").model
    memory = read(library, base, length=30)
    with memstore.attach(base, memory) as attached, torch.no_grad():
        answer = base(encoder_outputs=attached.empty_prompt(), decoder_input_ids=tokens(3, rows=1)).last_hidden_state
        by_place = base(None, None, tokens(3, rows=1), None, attached.empty_prompt()).last_hidden_state
    states = base.get_encoder()(input_ids=torch.tensor(memory.token_ids.tolist())[None])
    expected = base(encoder_outputs=states, decoder_input_ids=tokens(3, rows=1)).last_hidden_state
    torch.testing.assert_close(answer, expected, atol=1e-4, rtol=1e-4)
    assert torch.equal(answer, by_place)


class Scaled(torch.nn.Linear):
    """A projection that does more than its weight says, as a low-rank adapter does."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("name", ["k_proj", "v_proj"])
@pytest.mark.parametrize("kind", ["Sequential", "Scaled"])
def test_a_projection_that_is_no_plain_linear_map_is_refused(library, name, kind):
    model = build("bart")
    memory = read(library, model)
    attention = model.model.decoder.layers[1].encoder_attn
    other = torch.nn.Sequential(getattr(attention, name), torch.nn.LayerNorm(48)) if kind == "Sequential" else None
    setattr(attention, name, other or Scaled(48, 48))
    with pytest.raises(UnsupportedModelError, match=kind):
        memstore.attach(model, memory)


def test_a_query_may_be_projected_in_any_way(library):
    model = build("bart")
    attention = model.model.decoder.layers[1].encoder_attn
    attention.q_proj = torch.nn.Sequential(attention.q_proj, torch.nn.LayerNorm(48))
    memory = read(library, model)
    with torch.no_grad():
        states = model.get_encoder()(input_ids=torch.tensor(memory.token_ids.tolist())[None])
        expected = model(encoder_outputs=states, decoder_input_ids=tokens(5, seed=2, rows=1)).logits
        with memstore.attach(model, memory, top_k="all") as attached:
            read_back = model(encoder_outputs=attached.empty_prompt(), decoder_input_ids=tokens(5, seed=2, rows=1))
    torch.testing.assert_close(read_back.logits, expected, atol=1e-4, rtol=1e-4)


def test_flash_attention_is_refused(library, model):
    memory = read(library, model)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = "flash_attention_2"
    before = repr(model.config)
    with (
        pytest.raises(AttachError, match="'flash_attention_2'.*set_attn_implementation"),
        memstore.attach(model, memory),
    ):
        pass
    assert repr(model.config) == before and model.config._attn_implementation == "flash_attention_2"


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_an_empty_prompt_is_used_up_by_beams_and_generate_makes_its_own(library, family):
    model = build(family)
    memory = read(library, model)
    settings: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}
    with memstore.attach(model, memory) as attached:
        greedy = attached.generate(**settings)
        prompt = attached.empty_prompt()
        by_hand = model.generate(encoder_outputs=prompt, num_beams=4, **settings)
        assert len(prompt.last_hidden_state) == 4  # transformers repeats it in place
        assert torch.equal(attached.generate(num_beams=4, **settings), by_hand)
        assert torch.equal(model.generate(encoder_outputs=prompt, **settings), greedy.expand(4, -1))
        assert torch.equal(attached.generate(**settings), greedy)


def test_what_generate_needs_is_said(library):
    model, decoder = build("bart"), build("llama")
    with memstore.attach(model, read(library, model)) as attached:
        with pytest.raises(AttachError, match="needs tokenizer="):
            attached.generate("Who?")
        with pytest.raises(AttachError, match="explain=True"):
            attached.provenance()
    with memstore.attach(decoder, read(library, decoder, "kv")) as attached:
        for ask in (attached.generate, attached.empty_prompt):
            with pytest.raises(AttachError, match="prompt"):
                ask()


def test_a_prompt_that_cannot_be_read_is_said(library):
    decoder, tokenizer = tiny.llama(), tiny.tokenizer()
    tokenizer.chat_template = None
    with memstore.attach(decoder, read(library, decoder)) as attached:
        with pytest.raises(AttachError, match="not valid Unicode at character 2"):
            attached.generate("é \udcff", tokenizer=tokenizer)
        other: Any
        for other, why in (
            (["a", "b"], "Several prompts are given as tensors"),
            (tokens(3, rows=1), "This is a Tensor"),
            ([], "at least one message"),
        ):
            with pytest.raises(AttachError, match=why):
                attached.generate(other, tokenizer=tokenizer)
        for empty in ({"prompt": "", "tokenizer": tokenizer}, {"input_ids": torch.zeros(1, 0, dtype=torch.long)}):
            with pytest.raises(AttachError, match="no tokens"):
                attached.generate(**empty)


def test_an_encoder_decoder_has_only_so_many_positions(library):
    model = build("bart")
    settings: dict[str, Any] = {"do_sample": False, "eos_token_id": None}
    with memstore.attach(model, read(library, model)) as attached:
        with pytest.raises(WindowExceededError, match="The prompt needs 65 positions, and the model has 64"):
            attached.generate(input_ids=tokens(65, rows=1))
        answer = attached.generate(input_ids=tokens(64, rows=1), max_new_tokens=64, **settings)
        assert answer.shape == (1, 65)  # the last token is never read
        with pytest.raises(WindowExceededError, match="What is generated needs 65 positions, and the model has 64"):
            attached.generate(max_new_tokens=65, **settings)
