"""Models that no adapter knows: served if a probe proves that they read exactly, and refused otherwise."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn
from transformers.models.bart.modeling_bart import BartAttention

import memstore
from memstore.errors import GenericAdapterNotice, UnsupportedModelError
from memstore.registry import adapter_for
from memstore_adapters.generic import GenericAdapter
from tests.models import build, tokens
from tests.test_attachment import traces

EXACT = 1e-4
ANSWER = tokens(7, seed=1, rows=1)


def unknown() -> Any:
    return build("made-up")


@pytest.fixture
def probes(monkeypatch):
    """Models that were probed."""
    done: list[Any] = []
    probe = GenericAdapter.__init__.__globals__["_probe"]

    def counting(model):
        done.append(model)
        return probe(model)

    monkeypatch.setitem(GenericAdapter.__init__.__globals__, "_probe", counting)
    return done


def reads_exactly(model, library):
    document = tokens(60)
    with torch.no_grad():
        expected = model(input_ids=document[None], decoder_input_ids=ANSWER).logits
    memory = library.encode(model, input_ids=document, name="doc")
    with memstore.attach(model, memory, top_k="all") as attached, torch.no_grad():
        read = model(encoder_outputs=attached.empty_prompt(), decoder_input_ids=ANSWER).logits
    return (read - expected).abs().max() < EXACT * expected.abs().max()


def test_an_unknown_model_is_probed_once_and_served_with_a_notice(library, probes):
    model = unknown()
    assert adapter_for(model) is GenericAdapter
    with pytest.warns(GenericAdapterNotice, match="'made-up'. The 3 cross-attentions of this MadeUp .* read a memory"):
        assert reads_exactly(model, library)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert GenericAdapter(model).native_window == 64
    assert probes == [model]


@pytest.mark.filterwarnings("ignore::memstore.errors.GenericAdapterNotice")
@pytest.mark.parametrize("family", ["bart", "marian", "pegasus", "t5", "umt5"])
def test_what_it_finds_is_what_the_adapter_of_a_family_knows(family):
    model = build(family)
    found, known = GenericAdapter(model).cross_attentions(), adapter_for(model)(model).cross_attentions()
    assert [(each.module, each.key, each.value, each.num_heads) for each in found] == [
        (each.module, each.key, each.value, each.num_heads) for each in known
    ]


@pytest.mark.filterwarnings("ignore::memstore.errors.GenericAdapterNotice")
def test_a_model_is_probed_again_for_another_attention_implementation():
    """T5Gemma soft-caps its scores in eager attention alone: with another it fails, or leaves the cap out."""
    model = build("t5gemma")
    for implementation in ("eager", "sdpa", "eager"):
        for module in model.modules():
            if isinstance(module, tf.PreTrainedModel):
                module.config._attn_implementation = implementation
        if implementation == "eager":
            assert GenericAdapter(model).cross_attentions()[0].softcap == 2.0
        else:
            with pytest.raises(UnsupportedModelError, match="softcap|logits that differ"):
                GenericAdapter(model)


@pytest.mark.filterwarnings("ignore::memstore.errors.GenericAdapterNotice")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probing_leaves_no_trace(dtype):
    """A model in half precision is proved in float32, in which a difference can be told from rounding."""
    model = unknown().to(dtype)
    model.train()
    model.get_encoder().eval()
    modes, before, random = [module.training for module in model.modules()], traces(model), torch.get_rng_state()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    GenericAdapter(model)
    assert [module.training for module in model.modules()] == modes and traces(model) == before
    assert torch.equal(torch.get_rng_state(), random) and model.dtype == dtype
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


class Then(nn.Module):
    """What a map gives, and something done to it."""

    def __init__(self, first, then):
        super().__init__()
        self.first, self.then = first, then

    def forward(self, x):
        return self.then(self.first(x))


def rotated(x):
    """Another sign at every second position."""
    signs = torch.ones(x.shape[1])
    signs[1::2] = -1
    return x * signs[:, None]


class Recent(BartAttention):
    """Adds to scores what favours late tokens."""

    def forward(self, hidden_states, key_value_states=None, attention_mask=None, **kwargs):
        if key_value_states is not None:
            attention_mask = torch.arange(key_value_states.shape[1]).mul(0.05).expand(1, 1, hidden_states.shape[1], -1)
        return super().forward(hidden_states, key_value_states, attention_mask=attention_mask, **kwargs)


class Joined(BartAttention):
    """One softmax over the encoder's states and a key of its own."""

    def forward(self, hidden_states, key_value_states=None, **kwargs):
        if key_value_states is not None:
            key_value_states = torch.cat([key_value_states, hidden_states[:, :1]], dim=1)
            kwargs["attention_mask"] = None
        return super().forward(hidden_states, key_value_states, **kwargs)


class Forgetful(nn.Module):
    """An embedding that is another once it has read something short, as the attention of some models is."""

    def __init__(self, first):
        super().__init__()
        self.first, self.weight, self.scale = first, first.weight, 1.0

    def forward(self, ids):
        self.scale = 0.5 if ids.shape[1] < 20 else self.scale
        return self.first(ids) * self.scale


class Sociable(Forgetful):
    """An embedding that mixes the rows of a batch."""

    def forward(self, ids):
        found = self.first(ids)
        return found - found.mean(0) / 9


def change(model, how):
    encoder = model.get_encoder()
    if how == "is changed by reading":
        encoder.embed_tokens = Forgetful(encoder.embed_tokens)
    elif how == "mixes its rows":
        encoder.embed_tokens = Sociable(encoder.embed_tokens)
    for layer in model.get_decoder().layers:
        attention = layer.encoder_attn
        if how == "norms keys":
            attention.k_proj = Then(attention.k_proj, nn.LayerNorm(48))
        elif how == "rotates keys":
            attention.k_proj = Then(attention.k_proj, rotated)
        elif how == "gates values":
            attention.v_proj = Then(attention.v_proj, torch.tanh)
        elif how == "favours late tokens":
            attention.__class__ = Recent
        elif how == "joins keys":
            attention.__class__ = Joined
        elif how == "norms states":
            attention.k_proj, attention.v_proj = (
                nn.Sequential(nn.LayerNorm(48), each) for each in (attention.k_proj, attention.v_proj)
            )
        elif how == "ignores its encoder":
            nn.init.zeros_(attention.out_proj.weight)
        elif how == "fails":
            attention.forward = lambda *args, **kwargs: 1 / 0


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("norms keys", r"what model.decoder.layers.0.encoder_attn.k_proj.first makes of .* is not what an attention"),
        ("rotates keys", r"what model.decoder.layers.0.encoder_attn.k_proj.first makes of .* is not what an attention"),
        ("gates values", r"is not what an attention function is given as keys or values"),
        ("joins keys", r"no nn.Linear of its decoder is given the encoder's states as they are"),
        ("norms states", r"no nn.Linear of its decoder is given the encoder's states as they are"),
        ("favours late tokens", r"a document read from a memory gives logits that differ by [\d.e-]+ from the model's"),
        ("ignores its encoder", r"up to 0 is allowed"),
        ("is changed by reading", "what its encoder makes of a window depends on what it read before or beside it"),
        ("mixes its rows", "what its encoder makes of a window depends on what it read before or beside it"),
        ("fails", "ZeroDivisionError: division by zero"),
    ],
)
def test_what_would_be_read_wrongly_is_refused(library, probes, how, says):
    model = unknown()
    change(model, how)
    before = traces(model)
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match=f"knows model_type 'made-up', and a probe.* failed: .*{says}"):
            library.encode(model, input_ids=tokens(60), name="doc")
    assert probes == [model] and traces(model) == before and not len(library)


def test_families_that_read_otherwise_are_refused():
    """ProphetNet computes its attention itself."""
    sizes: dict[str, Any] = {"hidden_size": 48, "num_encoder_layers": 2, "num_decoder_layers": 2, "encoder_ffn_dim": 64}
    heads: dict[str, Any] = {"num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "decoder_ffn_dim": 64}
    model = tf.ProphetNetForConditionalGeneration(tf.ProphetNetConfig(vocab_size=120, **sizes, **heads))
    with pytest.raises(UnsupportedModelError, match="cross_attn.key_proj makes of the encoder's states is not what an"):
        GenericAdapter(model)


def test_a_decoder_only_model_and_one_that_reads_pictures_are_left_alone():
    for name, encoder_decoder in (("input_ids", False), ("pixel_values", True)):
        model = unknown()
        model.main_input_name, model.config.is_encoder_decoder = name, encoder_decoder
        with pytest.raises(
            UnsupportedModelError, match="No adapter knows model_type 'made-up'. Supported: arcee, bart, "
        ):
            adapter_for(model)
