"""A changed text is read again where it changed, and the memory is what a fresh encoding gives, byte for byte."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import BartConfig, BartForConditionalGeneration

import memstore
from memstore import describe, pending
from memstore.catalog import PENDING
from memstore.errors import MemoryExistsError, MemoryNotFoundError
from memstore.memory_writer import MemoryWriter
from tests import tiny
from tests.faults.harming import damage
from tests.models import build
from tests.store.making import contents

WINDOW = 64  # so a section has some 256 tokens, and 8 windows


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch, one_thread):
    monkeypatch.setattr(describe, "BLOCK_BYTES", 1)  # of 256 tokens


@pytest.fixture(scope="module")
def llama():
    return tiny.llama()


@pytest.fixture(scope="module")
def bart():
    """One whose vocabulary holds all bytes, so that the same tokenizer serves."""
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=300,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        max_position_embeddings=128,
    )
    return BartForConditionalGeneration(config).eval()


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.tokenizer()


def text(length: int = 1500, seed: int = 0) -> str:
    letters = np.random.default_rng(seed).choice(list("abcdefghijklmnopqrstuvwxyz ,."), length)
    return "".join(letters)


EDITS = {
    "a word longer": lambda old: old[:700] + "inserted" + old[700:],
    "a word shorter": lambda old: old[:700] + old[705:],
    "another word": lambda old: old[:700] + "WORD" + old[704:],
    "more at the end": lambda old: old + text(90, seed=1),
    "less at the end": lambda old: old[:-100],
    "less at the end, in whole blocks": lambda old: old[:1024],
    "more at the start": lambda old: text(33, seed=1) + old,
    "two places": lambda old: old[:300] + "x" + old[300:1200] + "y" + old[1201:],
    "parts exchanged": lambda old: old[800:] + old[:800],
    "all": lambda old: text(1500, seed=2),
    "to one window": lambda old: old[:50],
}


def check_same(memory, fresh):
    own = {"id", "created", "seal", "name"}
    assert memory.manifest.model_dump(exclude=own) == fresh.manifest.model_dump(exclude=own)
    assert contents(memory) == contents(fresh)


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_gives_what_a_fresh_encoding_gives(library, llama, tokenizer, edit):
    options = {"window": WINDOW, "metadata": {"n": 1}}
    first = library.update(llama, tokenizer, text(), name="doc", **options)
    assert first.num_read == first.num_windows > 40 and len(first.memory.manifest.anchors) > 2
    new = EDITS[edit](text())
    done = library.update(llama, tokenizer, new, name="doc", window=WINDOW)
    fresh = library.encode(llama, tokenizer, new, name="fresh", anchors=True, **options)
    check_same(done.memory, fresh)
    assert library["doc"].manifest == done.memory.manifest and done.memory.text == new
    assert len(library.records.memory_ids()) == 2 and library.verify("doc")[0].ok
    most = {"all": done.num_windows, "to one window": 1, "two places": 34, "parts exchanged": 36}.get(edit, 20)
    assert done.num_read <= most and done.num_reused == done.num_windows - done.num_read
    again = library.update(llama, tokenizer, new, name="doc", window=WINDOW)
    assert (again.num_read, again.memory.manifest) == (0, done.memory.manifest)


@pytest.mark.parametrize("dtype", ["float16", "int8", "int4"])
@pytest.mark.parametrize("edit", ["a word longer", "another word", "more at the end"])
def test_what_is_stored_otherwise_is_byte_identical_too(library, llama, tokenizer, edit, dtype):
    options = {"window": WINDOW, "dtype": dtype}
    library.update(llama, tokenizer, text(), name="doc", **options)
    new = EDITS[edit](text())
    done = library.update(llama, tokenizer, new, name="doc", **options)
    check_same(done.memory, library.encode(llama, tokenizer, new, name="fresh", anchors=True, **options))
    assert 0 < done.num_read < done.num_windows * (0.5 if dtype == "float16" else 0.8)


def test_encoder_states_too(library, tokenizer):
    model = build("bart")
    model.resize_token_embeddings(300)
    library.update(model, tokenizer, text(), name="doc", window=WINDOW)
    for edit in ("a word longer", "more at the start"):
        new = EDITS[edit](text())
        done = library.update(model, tokenizer, new, name="doc", window=WINDOW)
        fresh = library.encode(model, tokenizer, new, name=edit, window=WINDOW, anchors=True)
        check_same(done.memory, fresh)
        assert done.num_read <= 24


def test_a_memory_without_anchors_keeps_its_rule(library, llama, tokenizer):
    old = library.encode(llama, tokenizer, text(), name="doc", window=WINDOW)
    assert (old.manifest.rule.anchors, old.manifest.anchors) == (None, ())
    assert b"anchors" not in old.manifest.pack()  # so that a version that knows none reads it
    new = EDITS["a word longer"](text())
    done = library.update(llama, tokenizer, new, name="doc", window=WINDOW)
    check_same(done.memory, library.encode(llama, tokenizer, new, name="fresh", window=WINDOW))
    assert 0.3 * done.num_windows < done.num_reused < 0.6 * done.num_windows  # those before the edit


def test_encoding_the_text_of_an_updated_memory_changes_nothing(library, llama, tokenizer):
    memory = library.update(llama, tokenizer, text(), name="doc", window=WINDOW).memory
    assert library.encode(llama, tokenizer, text(), name="doc", window=WINDOW).manifest == memory.manifest
    with pytest.raises(MemoryExistsError, match="differs in rule, anchors"):
        library.encode(llama, tokenizer, text(), name="doc", window=WINDOW, anchors=False)


@pytest.mark.parametrize("stop", [0, 600, 1100])
def test_an_interrupted_update_leaves_the_old_memory_and_goes_on(library, llama, tokenizer, stop):
    old = library.update(llama, tokenizer, text(), name="doc", window=WINDOW).memory
    new = EDITS["two places"](text())

    def progress(done, total):
        if done >= stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        library.update(llama, tokenizer, new, name="doc", window=WINDOW, progress=progress)
    assert library["doc"].manifest == old.manifest and library["doc"].text == text()
    assert library.verify("doc")[0].ok
    done = library.update(llama, tokenizer, new, name="doc", window=WINDOW)
    check_same(done.memory, library.encode(llama, tokenizer, new, name="fresh", window=WINDOW, anchors=True))
    assert len(library.records.memory_ids()) == 2 and library.records.items(PENDING) == []


def test_an_update_that_goes_on_keeps_the_prefix_it_has_read(library, llama, tokenizer, monkeypatch):
    old = library.update(llama, tokenizer, text(), name="doc", window=WINDOW).memory
    assert old.manifest.prefix_ids
    new, put = EDITS["more at the start"](text()), []

    def progress(done, total):
        if done >= 600:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        library.update(llama, tokenizer, new, name="doc", window=WINDOW, progress=progress)
    with monkeypatch.context() as patched:
        patched.setattr(MemoryWriter, "put_prefix", lambda writer, parts: put.append(parts))
        done = library.update(llama, tokenizer, new, name="doc", window=WINDOW)
    assert put == []
    check_same(done.memory, library.encode(llama, tokenizer, new, name="fresh", window=WINDOW, anchors=True))


def test_an_interrupted_first_encoding_goes_on_with_its_rule(library, llama, tokenizer):
    def progress(done, total):
        if done >= 600:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        library.encode(llama, tokenizer, text(), name="doc", window=WINDOW, progress=progress)
    done = library.update(llama, tokenizer, text(), name="doc", window=WINDOW)
    assert done.memory.manifest.rule.anchors is None and 0 < done.num_read < done.num_windows


def test_who_has_the_old_memory_open_keeps_reading_it(library, llama, tokenizer):
    old = library.update(llama, tokenizer, text(), name="doc", window=WINDOW).memory
    before = contents(old)
    with old.open() as opened:
        library.update(llama, tokenizer, text(seed=3), name="doc", window=WINDOW)
        assert {key: opened.verified(key).tobytes() for key in opened.keys} == before
    with pytest.raises(MemoryNotFoundError, match="another version has taken its place"):
        old.open()


def test_what_an_interrupted_update_left_goes_with_the_memory(library, llama, tokenizer):
    library.update(llama, tokenizer, text(), name="doc", window=WINDOW)

    def progress(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        library.update(llama, tokenizer, text(seed=3), name="doc", window=WINDOW, progress=progress)
    assert len(library.records.memory_ids()) == 2
    del library["doc"]
    assert library.records.memory_ids() == [] and library.records.items(b"p") == []


def test_another_model_or_dtype_replaces_nothing(library, llama, tokenizer):
    old = library.update(llama, tokenizer, text(), name="doc", window=WINDOW).memory
    new = EDITS["another word"](text())
    for model, options, differing in (
        (tiny.llama(seed=1), {"window": WINDOW}, "fingerprint"),
        (llama, {"window": WINDOW, "dtype": "float16"}, "dtype"),
        (llama, {"window": 32}, "rule"),
    ):
        with pytest.raises(MemoryExistsError, match=f"differs in .*{differing}"):
            library.update(model, tokenizer, new, name="doc", **options)
    assert library["doc"].manifest == old.manifest


@pytest.mark.parametrize("edit", ["the same", "two places"])
@pytest.mark.parametrize("harm", ["cut", "lost"])
def test_a_text_is_read_whatever_became_of_the_old_memory(library, llama, tokenizer, harm, edit):
    old = library.update(llama, tokenizer, text(), name="doc", window=WINDOW).memory
    data = library.path / "memories" / old.manifest.id / "data.mdb"
    os.truncate(data, data.stat().st_size - 4096) if harm == "cut" else data.unlink()
    new = text() if edit == "the same" else EDITS[edit](text())
    done = library.update(llama, tokenizer, new, name="doc", window=WINDOW)
    assert done.num_reused == 0
    check_same(done.memory, library.encode(llama, tokenizer, new, name="fresh", window=WINDOW, anchors=True))
    assert len(library.records.memory_ids()) == 2


def test_a_damaged_prefix_is_read_again(library, llama):
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant", "assistant " * 8)  # too long for a leaf
    old = library.update(llama, tokenizer, text(), name="doc", window=WINDOW).memory
    damage(old, b"pkeys.0")
    new = EDITS["another word"](text())
    done = library.update(llama, tokenizer, new, name="doc", window=WINDOW)
    check_same(done.memory, library.encode(llama, tokenizer, new, name="fresh", window=WINDOW, anchors=True))


@pytest.mark.parametrize("change", ["removed", "replaced", "made the same"])
def test_another_process_may_be_faster(library, llama, tokenizer, monkeypatch, change):
    library.update(llama, tokenizer, text(), name="doc", window=WINDOW)
    new, start = EDITS["another word"](text()), pending.start

    def late(*arguments):
        monkeypatch.setattr(pending, "start", start)
        if change == "removed":
            del library["doc"]
        else:
            other = new if change == "made the same" else text(seed=3)
            library.update(llama, tokenizer, other, name="doc", window=WINDOW)
        return start(*arguments)

    monkeypatch.setattr(pending, "start", late)
    done = library.update(llama, tokenizer, new, name="doc", window=WINDOW)
    check_same(done.memory, library.encode(llama, tokenizer, new, name="fresh", window=WINDOW, anchors=True))
    assert len(library) == 2 == len(library.records.memory_ids())


edits = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 90), st.text("abcdefgh .", max_size=60), st.booleans()), max_size=4
)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    length=st.integers(1, 700),
    alphabet=st.sampled_from(["a", "ab", "abcdefghijklmnop .", "aé🙂"]),
    edits=edits,
    window=st.integers(1, 64),
    overlap=st.floats(0, 0.99),
    batch_size=st.integers(1, 6),
    dtype=st.sampled_from(["float32", "float16", "bfloat16", "int8", "int4"]),
    family=st.sampled_from(["llama", "bart"]),
)
@example(300, "abcdefghijklmnop .", [(0.5, 0, "x", False)], 16, 0.5, 4, "float32", "llama")
@example(200, "a", [(0.5, 0, "a", False)], 8, 0.5, 4, "bfloat16", "bart")
def test_any_edit_gives_what_a_fresh_encoding_gives(
    library, llama, bart, tokenizer, length, alphabet, edits, window, overlap, batch_size, dtype, family
):
    model = llama if family == "llama" else bart
    options = {"batch_size": batch_size, "dtype": dtype if family == "llama" or "int" not in dtype else "float32"}
    options |= {"window": window, "overlap": int(overlap * window)}
    length = min(length, 24 * (window - options["overlap"]))  # not too many windows to be read
    old = "".join(np.random.default_rng(length).choice(list(alphabet), length))
    new = old
    for place, deleted, inserted, moved in edits:
        at = int(place * len(new))
        new = new[:at] + inserted + new[at + deleted :]
        new = new[at:] + new[:at] if moved else new
    library.update(model, tokenizer, old, name="doc", **options)
    done = library.update(model, tokenizer, new or "x", name="doc", **options)
    check_same(done.memory, library.encode(model, tokenizer, new or "x", name="fresh", anchors=True, **options))
    assert done.num_read == 0 or new != old
    del library["doc"], library["fresh"]


def test_what_is_damaged_is_read_again(library, llama, tokenizer):
    old = library.update(llama, tokenizer, text(), name="doc", window=WINDOW).memory
    with old.open() as opened:
        value = opened.value(b"b\0\0\0\2keys.0").tobytes()
    library.close()
    data = library.path / "memories" / old.manifest.id / "data.mdb"
    data.write_bytes(data.read_bytes().replace(value[100:400], bytes(300)))
    new = EDITS["more at the end"](text())
    with memstore.open(library.path) as store:
        done = store.update(llama, tokenizer, new, name="doc", window=WINDOW)
        check_same(done.memory, store.encode(llama, tokenizer, new, name="fresh", window=WINDOW, anchors=True))
        assert done.num_read < done.num_windows
