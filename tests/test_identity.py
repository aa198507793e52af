"""Which model may read a memory, as one table: each fact is changed by itself, and refused, accepted, or asked for."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch

import memstore
from memstore.catalog import SEALED, key
from memstore.errors import FingerprintMismatchError, FingerprintWarning, MemoryExistsError
from tests import tiny
from tests.models import tokens

TEXT = "In the beginning was the Word. " * 8


def same(model):
    """A model of the same weights and configuration, loaded anew."""
    other = type(model)(copy.deepcopy(model.config))
    other.load_state_dict(model.state_dict())
    return other.eval()


def weight(model):
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] += 1e-3


def norm(model):
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight[3] += 1e-3


def embedding(model):
    with torch.no_grad():
        model.model.embed_tokens.weight[299, 31] += 1e-3


def epsilon(model):
    model.config.rms_norm_eps = 1e-3


def rope(model):
    model.model.rotary_emb.inv_freq.mul_(0.5)


def rope_configuration(model):
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 5e5}


def head(model):
    with torch.no_grad():
        model.lm_head.weight.add_(1)


def eager(model):
    model.set_attn_implementation("eager")


def version(model):
    model.config.transformers_version = "5.99.1"


def path(model):
    model.config._name_or_path = "elsewhere"


def cache(model):
    model.config.use_cache = False


def training(model):
    model.config.attention_dropout = 0.1
    model.train().eval()


REFUSED = {
    weight: "weights", norm: "weights", embedding: "weights", epsilon: "config.rms_norm_eps", rope: "rope",
    rope_configuration: "rope_theta"
}  # fmt: skip
ACCEPTED = [head, eager, version, path, cache, training]


@pytest.fixture
def memory(library):
    return library.encode(tiny.llama(), tiny.tokenizer(), TEXT, name="doc", window=64)


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: change.__name__)
def test_a_model_that_reads_otherwise_is_refused(memory, change):
    other = same(tiny.llama())
    change(other)
    with pytest.raises(FingerprintMismatchError, match=f"'doc'.*What differs: .*{REFUSED[change]}"):
        memstore.attach(other, memory)
    with pytest.warns(FingerprintWarning, match=REFUSED[change]):
        memstore.attach(other, memory, strict=False)


@pytest.mark.parametrize("change", ACCEPTED, ids=lambda change: change.__name__)
def test_what_changes_no_vector_is_accepted(memory, change):
    other = same(tiny.llama())
    change(other)
    with warnings.catch_warnings(), memstore.attach(other, memory):
        warnings.simplefilter("error", FingerprintWarning)


def test_the_device_that_wrote_it_is_accepted(library, memory):
    manifest = memory.manifest.model_copy(update={"device": "cuda:3"})
    library.records.commit({key(SEALED, "doc"): manifest.pack()})
    with memstore.attach(tiny.llama(), library["doc"]):
        assert library["doc"].manifest.device == "cuda:3"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_same_weights_in_another_dtype_are_read_only_when_asked(library, dtype):
    """Weights that both dtypes hold exactly: all that differs is what is computed in."""
    model = tiny.llama().to(dtype).float()
    memory = library.encode(model, input_ids=tokens(40), name="doc")
    other = same(model).to(dtype)
    assert all(torch.equal(a.float(), b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
    with pytest.raises(FingerprintMismatchError, match="compute_dtype"):
        memstore.attach(other, memory)
    with pytest.warns(FingerprintWarning, match="compute_dtype"):
        memstore.attach(other, memory, strict=False)


def longer_words(tokenizer):
    tokenizer.add_tokens(["beginning"])


def other_spaces(tokenizer):
    inner = tokenizer.backend_tokenizer
    inner.pre_tokenizer = type(inner.pre_tokenizer)(True)


@pytest.mark.parametrize("change", [longer_words, other_spaces], ids=lambda change: change.__name__)
def test_a_tokenizer_that_cuts_otherwise_is_refused(memory, change):
    other = tiny.tokenizer()
    change(other)
    with (
        memstore.attach(tiny.llama(), memory) as attached,
        pytest.raises(FingerprintMismatchError, match="What differs: tokenizer"),
    ):
        attached.generate("Who?", tokenizer=other, max_new_tokens=1)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"window": 32}, "rule"),
        ({"overlap": 16}, "rule"),
        ({"dtype": "float16"}, "dtype"),
        ({"batch_size": 2}, "batch"),
    ],
    ids=str,
)
def test_the_same_document_read_by_another_rule_is_another_memory(library, memory, options, named):
    with pytest.raises(MemoryExistsError, match=f"'doc' already; it differs in .*{named}"):
        library.encode(tiny.llama(), tiny.tokenizer(), TEXT, name="doc", **{"window": 64, **options})
    assert library["doc"].manifest == memory.manifest


def test_the_same_document_read_by_the_same_rule_is_the_same_memory(library, memory):
    again = library.encode(tiny.llama(), tiny.tokenizer(), TEXT, name="doc", window=64)
    assert again.manifest == memory.manifest
