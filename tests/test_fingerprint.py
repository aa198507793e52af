"""Which model may read a memory: the one that wrote it, however it was loaded, and no other."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch
import transformers as tf
from xxhash import xxh3_128

import memstore
from memstore import describe, fingerprint
from memstore.errors import FingerprintMismatchError, FingerprintWarning
from memstore.registry import adapter_for
from tests import tiny
from tests.models import build, clone, tokens

FAMILIES = ["bart", "t5", "qwen3"]


@pytest.fixture(params=FAMILIES)
def model(request):
    return build(request.param)


def rebuilt(model, **changes):
    """The same weights as far as they fit, under another configuration."""
    config = copy.deepcopy(model.config)
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(0)
    other = type(model)(config)
    own = other.state_dict()
    fitting = {key: value for key, value in model.state_dict().items() if key in own and own[key].shape == value.shape}
    other.load_state_dict(fitting, strict=False)
    return other.eval()


def facts(model):
    return fingerprint.fingerprint(adapter_for(model)(model))


def body(model):
    """The part of a model that writes its memories."""
    return model.get_encoder() if model.config.is_encoder_decoder else model.base_model


def refused(model, memory, *words):
    with pytest.raises(FingerprintMismatchError) as caught:
        memstore.attach(model, memory)
    for word in words:
        assert word in str(caught.value)
    return str(caught.value)


def accepted(model, memory):
    with warnings.catch_warnings(), memstore.attach(model, memory):
        warnings.simplefilter("error", FingerprintWarning)


def test_one_changed_element_anywhere_is_refused(library, model):
    """The first, a middle and the last element of every tensor that memories depend on, changed in place."""
    memory = library.encode(model, input_ids=tokens(20), name="doc")
    accepted(model, memory)
    for name, tensor in body(model).state_dict().items():
        for place in {0, tensor.numel() // 2, tensor.numel() - 1}:
            with torch.no_grad():
                element = tensor.view(-1)[place]
                before = element.clone()
                element.add_(1e-3)
                message = refused(model, memory, "What differs: weights (memory: ", ", model: ")
                assert message.count(";") == 0, f"{name}: {message}"
                element.copy_(before)
    accepted(model, memory)


@pytest.mark.parametrize("change", ["data", "inference mode", "conversion", "new tensor"])
@pytest.mark.parametrize("family", ["bart", "llama"])
def test_weights_that_changed_without_a_new_version_are_refused(library, family, change):
    model = build(family)
    memory = library.encode(model, input_ids=tokens(20), name="doc")
    weight = body(model).layers[0].self_attn.v_proj.weight
    if change == "data":  # how adapters are merged
        weight.data += 0.01
    elif change == "inference mode":
        with torch.inference_mode():
            weight.mul_(1.01)
    elif change == "conversion":  # a storage that is freed leaves its address to the next
        model.half().float()
    else:
        weight.data = weight.data * 1.01
    refused(model, memory, "What differs: weights")


def test_a_model_made_in_inference_mode_has_a_fingerprint():
    with torch.inference_mode():
        model = build("llama")
    assert facts(model) == facts(build("llama"))


@pytest.mark.parametrize("family", ["bart", "t5"])
def test_a_decoder_may_change_because_no_stored_state_depends_on_it(library, family):
    model = build(family)
    memory = library.encode(model, input_ids=tokens(20), name="doc")
    encoder = {tensor.data_ptr() for tensor in model.get_encoder().state_dict().values()}
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.data_ptr() not in encoder:
                parameter.add_(0.01)
    accepted(model, memory)
    again = library.encode(model, input_ids=tokens(20), name="again")
    assert again.manifest.digest == memory.manifest.digest


def test_the_head_of_a_decoder_only_model_may_change(library):
    model = build("llama")
    memory = library.encode(model, input_ids=tokens(20), name="doc")
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    accepted(model, memory)


CHANGES = [
    ("llama", {"rms_norm_eps": 1e-3}, "config.rms_norm_eps (memory: 1e-06, model: 0.001)"),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, "rope_theta (memory: 10000.0, model"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type (memory"),
    (
        "qwen2",
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}},
        "rope_parameters.rope_type (memory: default, model: yarn)",
    ),
    ("llama", {"hidden_act": "gelu"}, "config.hidden_act (memory: silu, model: gelu)"),
    ("mistral", {"sliding_window": 30}, "config.sliding_window (memory: None, model: 30)"),
    ("bart", {"activation_function": "relu"}, "config.activation_function"),
    ("bart", {"scale_embedding": True}, "config.scale_embedding"),
    ("bart", {"encoder_attention_heads": 8}, "config.encoder_attention_heads"),
    ("t5", {"layer_norm_epsilon": 1e-2}, "config.layer_norm_epsilon"),
    ("t5", {"relative_attention_max_distance": 20}, "config.relative_attention_max_distance"),
]


@pytest.mark.parametrize(("family", "changes", "named"), CHANGES, ids=lambda value: str(value)[:30])
def test_another_configuration_with_the_same_weights_is_refused(library, family, changes, named):
    model = build(family)
    memory = library.encode(model, input_ids=tokens(20), name="doc")
    message = refused(rebuilt(model, **changes), memory, named)
    assert "weights" not in message


def test_rope_parameters_changed_after_loading_are_refused(library):
    model = build("llama")
    memory = library.encode(model, input_ids=tokens(20), name="doc")
    model.model.rotary_emb.inv_freq.mul_(0.5)
    refused(model, memory, "rope (memory")


def test_another_class_is_refused_where_its_weights_are_the_same(library):
    model = build("llama")
    memory = library.encode(model, input_ids=tokens(20), name="doc")
    settings = {**model.config.to_dict(), "model_type": "mistral", "sliding_window": None, "attention_bias": True}
    other = tf.MistralForCausalLM(tf.MistralConfig(**settings)).eval()
    refused(other, memory, "model_type (memory: llama, model: mistral)", "model_class (memory: LlamaForCausalLM")


@pytest.mark.parametrize(("wrote", "reads"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float32", "float16")])
@pytest.mark.parametrize("family", ["bart", "llama"])
def test_another_dtype_is_refused(library, family, wrote, reads):
    model = build(family).to(getattr(torch, wrote))
    memory = library.encode(model, input_ids=tokens(20), name="doc")
    model.to(getattr(torch, reads))
    refused(model, memory, f"compute_dtype (memory: {wrote}, model: {reads})")


def test_strict_false_warns_and_reads_unless_the_geometry_differs(library):
    memory = library.encode(build("bart"), input_ids=tokens(20), name="doc")
    other = build("bart", seed=1)
    with pytest.warns(FingerprintWarning, match="What differs: weights") as caught:
        attachment = memstore.attach(other, memory, strict=False)
    assert caught[0].filename == __file__
    with attachment as attached:
        assert attached.generate(max_new_tokens=2).shape[0] == 1
    wider = rebuilt(other, d_model=24)
    deeper = rebuilt(build("llama"), num_hidden_layers=2)
    kv = library.encode(build("llama"), input_ids=tokens(20), name="kv")
    for model, stored in ((wider, memory), (deeper, kv), (build("llama"), memory), (other, kv)):
        with pytest.raises(FingerprintMismatchError, match="geometry of this .* Attach it to that model"):
            memstore.attach(model, stored, strict=False)


def test_a_model_saved_and_loaded_again_is_accepted(library, model, tmp_path):
    model.generation_config.num_beams = 4
    memory = library.encode(model, input_ids=tokens(20), name="doc")
    model.save_pretrained(tmp_path / "model")
    loaded = type(model).from_pretrained(tmp_path / "model", attn_implementation="eager")
    assert facts(loaded) == {**memory.fingerprint, "tokenizer": None}
    accepted(loaded, memory)
    loaded.save_pretrained(tmp_path / "again")
    accepted(type(model).from_pretrained(tmp_path / "again"), memory)


IRRELEVANT = {
    "use_cache": False,
    "num_beams": 4,
    "max_length": 99,
    "output_attentions": False,
    "output_hidden_states": True,
    "return_dict": False,
    "dropout": 0.5,
    "attention_dropout": 0.5,
    "decoder_layerdrop": 0.1,
    "initializer_range": 0.5,
    "id2label": {0: "a"},
    "_name_or_path": "elsewhere",
    "transformers_version": "9",
    "forced_eos_token_id": 2,
    "eos_token_id": 3,
    "a_key_of_a_later_version": 1,
}


@pytest.mark.parametrize("key", IRRELEVANT)
@pytest.mark.parametrize("family", ["bart", "llama"])
def test_what_changes_nothing_that_is_stored_is_accepted(library, family, key):
    model = build(family)
    memory = library.encode(model, input_ids=tokens(20), name="doc")
    setattr(model.config, key, IRRELEVANT[key])
    model.generation_config.temperature = 0.5
    model.set_attn_implementation("eager")
    accepted(model, memory)


def test_another_tokenizer_is_refused_when_it_is_used(library):
    model, tokenizer = tiny.llama(), tiny.tokenizer()
    memory = library.encode(model, tokenizer, "In the beginning", name="doc")
    cut_otherwise = tiny.tokenizer()
    inner = json.loads(cut_otherwise.backend_tokenizer.to_str())
    inner["pre_tokenizer"]["add_prefix_space"] = True
    cut_otherwise.backend_tokenizer.pre_tokenizer = type(cut_otherwise.backend_tokenizer.pre_tokenizer)(True)
    renamed = tiny.tokenizer()
    renamed.add_tokens(["beginning"])
    with memstore.attach(model, memory) as attached:
        for other in (cut_otherwise, renamed):
            with pytest.raises(FingerprintMismatchError, match="What differs: tokenizer"):
                attached.generate("Who?", tokenizer=other, max_new_tokens=1)
        assert isinstance(attached.generate("Who?", tokenizer=tiny.tokenizer(), max_new_tokens=1), str)


def test_a_tokenizer_is_hashed_once_and_again_when_it_has_changed(monkeypatch):
    counted, digest = [], xxh3_128

    def counting(value):
        counted.append(value)
        return digest(value)

    monkeypatch.setattr(fingerprint, "xxh3_128", counting)
    tokenizer = tiny.tokenizer()
    first = fingerprint.tokenizer_hash(tokenizer)
    assert fingerprint.tokenizer_hash(tokenizer) == first and len(counted) == 1
    assert fingerprint.tokenizer_hash(tiny.tokenizer()) == first and len(counted) == 2
    tokenizer.add_tokens(["Nebuchadnezzar"])
    assert (added := fingerprint.tokenizer_hash(tokenizer)) != first
    tokenizer.backend_tokenizer.pre_tokenizer = type(tokenizer.backend_tokenizer.pre_tokenizer)(True)
    assert fingerprint.tokenizer_hash(tokenizer) not in (first, added)


def test_a_memory_without_tokenizer_takes_any(library):
    model = tiny.llama()
    memory = library.encode(model, input_ids=tokens(20), name="doc")
    assert memory.fingerprint["tokenizer"] is None
    with memstore.attach(model, memory) as attached:
        assert isinstance(attached.generate("Who?", tokenizer=tiny.tokenizer(), max_new_tokens=1), str)


def test_the_tokenizer_hash_survives_saving(tmp_path):
    tiny.save(tmp_path)
    loaded = tf.AutoTokenizer.from_pretrained(tmp_path)
    assert fingerprint.tokenizer_hash(loaded) == fingerprint.tokenizer_hash(tiny.tokenizer())


def test_weights_are_hashed_once_for_each_model(library, monkeypatch):
    hashed, compute = [], fingerprint.tensors_hash

    def counting(tensors):
        hashed.append(len(tensors))
        return compute(tensors)

    monkeypatch.setattr(fingerprint, "tensors_hash", counting)
    model = build("bart")
    memories = [library.encode(model, input_ids=tokens(20, seed=i), name=str(i)) for i in range(3)]
    for _ in range(3):
        accepted(model, memories[0])
        memstore.attach(model, *memories)
    assert len(hashed) == 1
    with torch.no_grad():
        model.model.encoder.layers[0].fc1.bias.mul_(2)
    refused(model, memories[0], "weights")
    refused(model, memories[0], "weights")
    assert len(hashed) == 2
    copied = clone(model)
    assert facts(copied)["weights"] == facts(model)["weights"]
    assert len(hashed) == 3


def test_a_memory_that_was_resumed_is_accepted(library, monkeypatch):
    monkeypatch.setattr(describe, "BLOCK_BYTES", 1)
    model = build("llama")

    def stop(done, total):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        library.encode(model, input_ids=tokens(400), name="doc", window=64, progress=stop)
    model.set_attn_implementation("eager")  # another order of additions, and so another rounding: start again
    model.set_attn_implementation("sdpa")
    accepted(model, library.encode(model, input_ids=tokens(400), name="doc", window=64))
