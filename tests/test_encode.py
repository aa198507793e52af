"""Reading a document once: any document is kept as it was given, and what cannot be kept is refused in words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import normalizers
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from memstore.errors import ConfigError, DamagedMemoryError, DocumentError, EncodingError, MemoryExistsError
from memstore.reading.passes import find_cache
from memstore.windows import plan
from tests import tiny
from tests.models import build, clone, tokens

LINE = "In the beginning was the Word, and the Word was with God.\n"


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def llama():
    return tiny.llama()


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.tokenizer()


@pytest.mark.parametrize("length", [1, 31, 32, 33, 96, 1000])
def test_a_document_of_any_length(library, llama, tokenizer, length):
    text = (LINE * 20)[:length]
    memory = library.encode(llama, tokenizer, text, name="doc", window=32, metadata={"author": "John", "pages": [1, 2]})
    memory = library["doc"]
    assert (memory.text, memory.num_tokens, memory.kind) == (text, length, "kv")
    assert memory.metadata == {"author": "John", "pages": [1, 2]}
    assert memory.token_ids.tolist() == tokenizer(text)["input_ids"]
    for i, (start, end) in enumerate(memory.offsets.tolist()):
        assert (start, end) == (i, i + 1) and memory.passage(i, i + 1) == text[i]
    assert bool(memory.manifest.prefix_ids) == (length > 32)
    with memory.open() as opened:
        for part in memory.manifest.parts:
            kind = part.partition(".")[0]
            if kind != "bounds":
                assert opened.rows(part, 0, length).shape == (length, 2, 8)
                continue
            blocks, keys = opened.rows(part, 0, -(-length // 64)), opened.rows(part.replace(kind, "keys"), 0, length)
            for i, (least, most) in enumerate(blocks):
                block = keys[64 * i : 64 * (i + 1)]
                assert torch.equal(least, block.min(0).values) and torch.equal(most, block.max(0).values)


@pytest.mark.parametrize("length", [20, 150])
def test_keys_and_values_are_those_of_the_models_own_cache(library, llama, tokenizer, length):
    """Rotated again at their positions in the window, they are what transformers itself caches."""
    text = (LINE * 20)[:length]
    memory = library.encode(llama, tokenizer, text, name="doc", window=64)
    prefix, lead, ids = memory.manifest.prefix_ids, memory.manifest.lead_ids, memory.token_ids.tolist()
    for window in plan(length, memory.manifest.rule):
        before = [*prefix, *(lead if window.start == 0 else ())]
        with torch.no_grad():
            cache = find_cache(llama(input_ids=torch.tensor([before + ids[window.start : window.stop]])).values())
        skip = len(before) - window.start
        kept = slice(skip + window.keep_start, skip + window.keep_stop)
        with memory.open() as opened:
            assert cache is not None
            for i, layer in enumerate(cache.layers):
                values = opened.rows(f"values.{i}", window.keep_start, window.keep_stop).transpose(0, 1)
                torch.testing.assert_close(values, layer.values[0, :, kept], atol=1e-6, rtol=1e-5)
                keys = opened.rows(f"keys.{i}", window.keep_start, window.keep_stop).transpose(0, 1)[None]
                cos, sin = llama.model.rotary_emb(keys, torch.arange(kept.start, kept.stop)[None])
                rotated = apply_rotary_pos_emb(keys, keys, cos, sin)[1]
                torch.testing.assert_close(rotated, layer.keys[:, :, kept], atol=1e-5, rtol=1e-5)


def test_a_hundred_thousand_tokens(library, llama, tokenizer):
    text = LINE * (100_000 // len(LINE) + 1)
    memory = library.encode(llama, tokenizer, text, name="doc", window=256, overlap=0, batch_size=64)
    assert memory.num_tokens == len(text) >= 100_000 and memory.text == text
    assert memory.chars(99_000, 99_001) == (99_000, 99_001)
    with memory.open("open") as opened:
        assert opened.rows("keys.1", 99_990, 100_000).isfinite().all()


def test_a_million_tokens(library):
    torch.manual_seed(0)
    config = T5Config(vocab_size=32, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_decoder_layers=1, num_heads=1)
    calls = []
    memory = library.encode(
        T5ForConditionalGeneration(config),
        input_ids=torch.arange(1_000_000) % 32,
        name="doc",
        window=128,
        overlap=0,
        batch_size=128,
        progress=lambda done, total: calls.append(done / total),
    )
    assert (memory.num_tokens, memory.manifest.num_blocks) == (1_000_000, 62)
    assert calls == sorted(calls) and (calls[0], calls[-1], len(calls)) == (0, 1, 63)
    with memory.open() as opened:  # windows begin alike wherever they stand: 128 is a multiple of 32
        assert torch.equal(opened.rows("hidden", 0, 128), opened.rows("hidden", 999_936 - 1280, 999_936 - 1152))


@pytest.mark.parametrize(
    "text",
    [
        "é",
        "e\u0301",
        "🙂👩\u200d👩\u200d👧",
        "one\r\ntwo\r\n",
        "a\0b",
        "\ufeffשלום עולם",
        "\U0010ffff\u2028",
        "ﬁﬃ ½",
        "\n",
    ],
    ids=ascii,
)
def test_any_unicode(library, llama, tokenizer, text):
    memory = library.encode(llama, tokenizer, text, name="doc")
    assert memory.text == text == tokenizer.decode(memory.token_ids)
    covered = {place for start, end in memory.offsets.tolist() for place in range(start, end)}
    assert covered >= {i for i, character in enumerate(text) if not character.isspace()}
    owners = [i for i, character in enumerate(text) for _ in character.encode()]  # one token a byte
    assert all(start <= i < end for i, (start, end) in zip(owners, memory.offsets.tolist(), strict=True))


def test_special_tokens_have_no_text_and_every_other_token_has(library, llama):
    """A tokenizer that drops what surrounds a text, and a text of nothing else."""
    trimming = tiny.tokenizer()
    trimming.backend_tokenizer.normalizer = normalizers.Strip()
    memory = library.encode(llama, trimming, "  word ", name="doc")
    assert [memory.passage(i, i + 1) for i in range(4)] == list("word")
    with pytest.raises(DocumentError, match="no tokens"):
        library.encode(llama, trimming, "  \n ", name="blank")
    assert library.names() == ["doc"]


TEXT = {"text": "word", "input_ids": None}
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {**TEXT, "text": "long" * 600, "window": 2043},
        ConfigError,
        "window=2043 leaves no room for the 6 tokens of the chat",
    ),
    ({**TEXT, "text": ""}, DocumentError, "empty"),
    ({**TEXT, "text": "half \ud83d of one"}, DocumentError, "character 5 is the lone surrogate U\\+D83D"),
    ({**TEXT, "tokenizer": None}, DocumentError, "needs its tokenizer"),
    ({"text": "word"}, DocumentError, "exactly one of"),
    ({"input_ids": None}, DocumentError, "exactly one of"),
    ({"input_ids": None, "input_features": torch.zeros(1, 8, 40)}, DocumentError, "not input_features"),
    ({"input_ids": []}, DocumentError, "n > 0"),
    ({"input_ids": 5}, DocumentError, "shape \\[\\]"),
    ({"input_ids": [[1, 2], [3, 4]]}, DocumentError, "shape \\[2, 2\\]"),
    ({"input_ids": [[1, 2], [3]]}, DocumentError, "whole numbers"),
    ({"input_ids": "word"}, DocumentError, "whole numbers"),
    ({"input_ids": [1.0]}, DocumentError, "float32"),
    ({"input_ids": [True]}, DocumentError, "bool"),
    ({"input_ids": [5, 300]}, DocumentError, "Token 1 has id 300, and the model knows ids 0 to 299"),
    ({"input_ids": [-1]}, DocumentError, "id -1"),
    ({"input_ids": [2**32 + 5]}, DocumentError, "id 4294967301"),
    ({"window": 2049}, ConfigError, "window=2049.*1 to 2048"),
    ({"window": 0}, ConfigError, "window=0"),
    ({"window": 3.5}, ConfigError, "window=3.5 must be a whole number"),
    ({"window": 32, "overlap": 32}, ConfigError, "overlap=32 .* less than the window of 32"),
    ({"overlap": -1}, ConfigError, "overlap=-1"),
    ({"overlap": "half"}, ConfigError, "overlap='half'"),
    ({"batch_size": 0}, ConfigError, "batch_size=0"),
    ({"batch_size": -4}, ConfigError, "batch_size=-4"),
    ({"batch_size": True}, ConfigError, "batch_size=True"),
    (
        {"dtype": "int16"},
        ConfigError,
        "'int16': memories of kind 'kv' are stored as float32, float16, bfloat16, int8, int4",
    ),
    ({"dtype": torch.float64}, ConfigError, "'float64'"),
    ({"metadata": {"tags": {1, 2}}}, DocumentError, "metadata.tags"),
    ({"name": ""}, DocumentError, "cannot be a name"),
    ({"name": 7}, DocumentError, "cannot be a name"),
    ({"name": b"doc"}, DocumentError, "cannot be a name"),
    ({**TEXT, "text": b"word"}, DocumentError, "a str, not a bytes"),
    ({"metadata": "author"}, DocumentError, "must be a mapping"),
    ({"metadata": 7}, DocumentError, "must be a mapping"),
]


@pytest.mark.parametrize(("keywords", "error", "message"), WRONG, ids=[" ".join(keywords) for keywords, *_ in WRONG])
def test_what_cannot_be_encoded_is_refused_in_words(library, llama, tokenizer, keywords, error, message):
    good = {"tokenizer": tokenizer, "text": None, "input_ids": [5, 6, 7], "name": "doc"}
    with pytest.raises(error, match=message):
        library.encode(llama, **{**good, **keywords})
    assert library.names() == [] and library.records.memory_ids() == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.0, 1, True])
def test_metadata_of_any_number_is_equal_to_itself(library, llama, tmp_path, value):
    memory = library.encode(llama, input_ids=[5, 6, 7], name="doc", metadata={"x": value})
    again = library.encode(llama, input_ids=[5, 6, 7], name="doc", metadata={"x": value})
    assert again.manifest.id == memory.manifest.id
    library.export(tmp_path / "out")
    assert [each.manifest.id for each in library.import_from(tmp_path / "out")] == [memory.manifest.id]


def test_features_are_for_models_that_read_them(library):
    model, features = build("whisper"), torch.randn(3, 8, 40)
    memory = library.encode(model, input_features=features, name="sound")
    assert (memory.num_tokens, memory.text, memory.token_ids, memory.offsets) == (60, None, None, None)
    with torch.no_grad(), memory.open() as opened:
        expected = model.get_encoder()(features).last_hidden_state.flatten(0, 1)
        torch.testing.assert_close(opened.rows("hidden", 0, 60), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(DocumentError, match="\\[windows, 8, 40\\]"):
        library.encode(model, input_features=features[:, :, :39], name="short")
    with pytest.raises(DocumentError, match="reads input_features"):
        library.encode(model, input_ids=[5], name="ids")
    with pytest.raises(MemoryExistsError, match="document_digest"):
        library.encode(model, input_features=features + 1, name="sound")


@pytest.mark.parametrize("shape", [(20,), (1, 20)])
@pytest.mark.parametrize("make", [torch.Tensor.int, torch.Tensor.long, torch.Tensor.tolist, torch.Tensor.numpy])
def test_token_ids_in_any_form_are_the_same_document(library, llama, shape, make):
    first = library.encode(llama, input_ids=tokens(20), name="doc")
    again = library.encode(llama, input_ids=make(tokens(20).view(shape)), name="doc")
    assert again.manifest == first.manifest and first.token_ids.tolist() == tokens(20).tolist()
    assert (first.text, first.offsets) == (None, None) and first.token_ids.dtype == np.int32


@pytest.mark.parametrize("dtype", ["float32", torch.float16, torch.bfloat16])
def test_vectors_are_stored_in_the_dtype_asked_for(library, llama, dtype):
    full = library.encode(llama, input_ids=tokens(40), name="full")
    memory = library.encode(llama, input_ids=tokens(40), name="doc", dtype=dtype)
    wanted = getattr(torch, str(dtype).removeprefix("torch."))
    with full.open() as expected, memory.open() as opened:
        assert torch.equal(opened.block("keys.1", 0), expected.block("keys.1", 0).to(wanted))


@pytest.mark.parametrize("fault", ["nan", "too large for a half"])
def test_values_that_are_no_numbers_are_never_stored(library, llama, fault):
    model = clone(llama)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.mul_(float("nan") if fault == "nan" else 1e8)
    dtype = None if fault == "nan" else "float16"
    with pytest.raises(EncodingError, match=f"window at token 0, stored as {dtype or 'float32'}"):
        library.encode(model, input_ids=tokens(40), name="doc", dtype=dtype)
    assert library.names() == []
    library.encode(llama, input_ids=tokens(40), name="doc")  # nothing of it is in the way


def test_the_same_again_is_a_no_op_and_anything_else_is_refused(library, llama, tokenizer):
    first = library.encode(llama, tokenizer, LINE, name="doc", metadata={"year": 90})
    calls = []
    again = library.encode(
        llama, tokenizer, LINE, name="doc", metadata={"year": 90}, progress=lambda *x: calls.append(x)
    )
    assert (again.manifest, calls) == (first.manifest, [])
    good: dict[str, Any] = {"tokenizer": tokenizer, "text": LINE, "metadata": {"year": 90}}
    other: Any = {"text": LINE + "x"}, {"metadata": None}, {"window": 64}, {"dtype": "float16"}, {"batch_size": 2}
    names = ("num_tokens, document_digest", "metadata", "rule", "dtype", "batch_size")
    for change, differing in zip(other, names, strict=True):
        with pytest.raises(MemoryExistsError, match=f"'doc' already; it differs in {differing}"):
            library.encode(llama, name="doc", **{**good, **change})
    with pytest.raises(MemoryExistsError, match="fingerprint"):
        library.encode(tiny.llama(seed=1), name="doc", **good)
    assert library["doc"].manifest == first.manifest


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(library, llama, fails):
    model = clone(llama).train()
    model.model.layers[0].eval()  # a frozen part
    modes = [module.training for module in model.modules()]
    with torch.no_grad():
        model.model.norm.weight.mul_(1)
        model.model.layers[1].self_attn.v_proj.weight.mul_(float("nan") if fails else 1)
    try:
        library.encode(model, input_ids=tokens(40), name="doc")
    except EncodingError:
        assert fails
    assert [module.training for module in model.modules()] == modes
    assert torch.is_grad_enabled() and ("doc" in library) is not fails


def test_autocast_outside_does_not_change_what_is_stored(library, llama):
    plain = library.encode(llama, input_ids=tokens(40), name="plain")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = library.encode(llama, input_ids=tokens(40), name="cast")
        assert torch.is_autocast_enabled("cpu")
    assert cast.manifest.digest == plain.manifest.digest


def test_a_damaged_memory_does_not_pass_for_the_same_document(library, llama):
    memory = library.encode(llama, input_ids=tokens(40), name="doc")
    data = library.path / "memories" / memory.manifest.id / "data.mdb"
    data.write_bytes(data.read_bytes()[:5000])
    with pytest.raises(DamagedMemoryError, match="read its document again"):
        library.encode(llama, input_ids=tokens(40), name="doc")
