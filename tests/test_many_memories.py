"""Many memories as one attention, and how they come and go while a model is attached."""

from __future__ import annotations

import random
from inspect import signature
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM
from transformers.modeling_outputs import BaseModelOutput

import memstore
from memstore.errors import (
    AttachError,
    DamagedMemoryError,
    FingerprintMismatchError,
    FingerprintWarning,
    MemoryNotFoundError,
    WindowExceededError,
)
from memstore.open_memory import OpenMemory
from memstore.reading.passes import find_cache
from memstore_backends.exact import ExactIndex
from tests.models import build, read, run, tokens

SEQ2SEQ = ["bart", "t5"]
FAMILIES = [*SEQ2SEQ, "llama"]
ORDER = 1e-5
CACHE = "cache" if "cache" in signature(LlamaForCausalLM.forward).parameters else "past_key_values"


@pytest.fixture(params=FAMILIES)
def model(request):
    return build(request.param)


def answer(model, memories, **options):
    with memstore.attach(model, *memories, **options):
        return run(model)


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_tens_of_documents_are_one_attention_in_any_order(library, family):
    model = build(family)
    memories = [read(library, model, "m" * (i + 1), length=5 + i) for i in range(40)]
    states = [model.get_encoder()(input_ids=tokens(9, seed=1, rows=1)).last_hidden_state[0]]
    for memory in memories:
        with memory.open() as opened:
            states += opened.blocks("hidden")
    joined = BaseModelOutput(last_hidden_state=torch.cat(states)[None])
    with torch.no_grad():
        expected = model(encoder_outputs=joined, decoder_input_ids=tokens(5, seed=2, rows=1)).logits
    for top_k in ("all", 50):
        read_in_order = answer(model, memories, top_k=top_k)
        if top_k == "all":
            torch.testing.assert_close(read_in_order, expected, atol=1e-4, rtol=0)
        for seed in range(3):
            shuffled = random.Random(seed).sample(memories, len(memories))
            assert (answer(model, shuffled, top_k=top_k) - read_in_order).abs().max() < ORDER


@pytest.mark.parametrize("options", [{}, {"top_k": "all"}, {"top_k": 70}, {"budget": 64}], ids=str)
def test_added_and_removed_is_as_if_attached_so(library, model, options):
    if not model.config.is_encoder_decoder and options.get("top_k") == 70:
        options = {"layers": [1]}
    elif model.config.is_encoder_decoder and "budget" in options:
        options = {"top_k": 20, "layers": [1]}
    one, two, three = (read(library, model, name, window=64, length=100) for name in ("a", "bb", "ccc"))
    with memstore.attach(model, one, **options) as attached:
        attached.add(two, three)
        assert torch.equal(run(model), answer_elsewhere(model, [one, two, three], attached, options))
        attached.remove(library["bb"])  # the same memory, looked up once more
        assert torch.equal(run(model), answer_elsewhere(model, [one, three], attached, options))
        attached.remove(one)
        attached.add(two, one)
        expected = answer_elsewhere(model, [three, two, one], attached, options)
        assert torch.equal(run(model), expected)
    with attached:  # it stays with what was attached last
        assert torch.equal(run(model), expected)
    library.close()


def answer_elsewhere(model, memories, attached, options):
    """What a new attachment gives, while the other one is left for a moment."""
    attached.__exit__(None, None, None)
    expected = answer(model, memories, **options)
    attached.__enter__()
    return expected


def test_rows_change_apart(library, model):
    a, b, c = (read(library, model, name) for name in ("a", "bb", "ccc"))
    with memstore.attach(model, rows=[[a], [a, b], [c]], top_k="all") as attached:
        before = run(model, rows=3)
        attached.add(c, rows=[0, 1])
        attached.remove(a, rows=[1])
        changed = run(model, rows=3)
        attached.remove(c, rows={0, 1})
        attached.add(a, rows=(1,))
        back = run(model, rows=3)
        assert attached.rows == [[a], [b, a], [c]]
    assert torch.equal(changed[2], before[2]) and not torch.equal(changed[:2], before[:2])
    if model.config.is_encoder_decoder:  # else each memory stands before the next
        torch.testing.assert_close(back, before, atol=ORDER, rtol=0)
    with memstore.attach(model, rows=[[a, c], [b, c], [c]], top_k="all"):
        torch.testing.assert_close(run(model, rows=3), changed, atol=ORDER, rtol=0)


@pytest.fixture
def touched(monkeypatch):
    """What is done to the bytes of memories: the names of those opened, read, indexed and closed."""
    done: list[tuple[str, str]] = []

    def noting(cls, method, what, name):
        original = getattr(cls, method)

        def noted(self, *args, **keywords):
            done.append((what, name(self, *args)))
            return original(self, *args, **keywords)

        monkeypatch.setattr(cls, method, noted)

    noting(OpenMemory, "__init__", "open", lambda self, memory, *rest: memory.name)
    noting(OpenMemory, "block", "read", lambda self, *rest: self.memory.name)
    noting(OpenMemory, "check", "check", lambda self, *rest: self.memory.name)
    noting(OpenMemory, "close", "close", lambda self: self.memory.name)
    noting(ExactIndex, "build", "index", lambda self, blocks: f"{sum(map(len, blocks))} keys")
    return done


@pytest.mark.parametrize("top_k", ["all", 50])
def test_only_what_comes_and_goes_is_touched(library, touched, top_k):
    model = build("bart")
    memories = [read(library, model, "m" * (i + 1), length=20 + i) for i in range(10)]
    new = read(library, model, "new", length=33)
    with memstore.attach(model, *memories, top_k=top_k) as attached:
        run(model)
        touched.clear()
        attached.add(new)
        assert touched == [("open", "new"), *([("index", "33 keys")] if top_k == 50 else [])]
        touched.clear()
        run(model)
        assert touched == [("check", "new")]  # its bytes, at the first step that reads them
        touched.clear()
        attached.remove(memories[3])
        assert touched == [("close", "mmmm")]
        touched.clear()
        run(model)
        assert not touched
    assert sorted(touched) == sorted(("close", memory.name) for memory in (*memories, new) if memory != memories[3])


def test_what_was_read_whole_is_indexed_once_it_must_be_searched(library, touched):
    """Which takes no more than ``top_k`` tokens, because that many were read whole."""
    model = build("bart")
    small, other, large = (read(library, model, name, length=n) for name, n in (("a", 20), ("bb", 25), ("ccc", 60)))
    with memstore.attach(model, small, other, top_k=50) as attached:
        assert not [what for what, _ in touched if what == "index"]
        for again in range(2):
            touched.clear()
            attached.add(large)
            indexed = [keys for what, keys in touched if what == "index"]
            assert indexed == (["20 keys", "25 keys", "60 keys"] if not again else ["60 keys"])
            attached.remove(large)
            expected = run(model)
    assert torch.equal(answer(model, [small, other], top_k=50), expected)


def test_a_sequence_that_is_written_goes_on_with_its_excerpt(library):
    model, prompt = build("llama"), tokens(9, seed=1, rows=1)
    memories = [read(library, model, name, length=200, window=64) for name in ("a", "bb")]
    answers = []
    for add in (False, True):
        with memstore.attach(model, memories[0], budget=128) as attached, torch.no_grad():
            begun = model(input_ids=prompt, use_cache=True)
            if add:
                attached.add(memories[1])
                attached.remove(memories[0])
            going_on = {CACHE: find_cache(begun.values())}
            answers.append(model(input_ids=prompt[:, :1], **going_on).logits)
            new = run(model)
    assert torch.equal(*answers)
    assert torch.equal(new, answer(model, memories[1:], budget=128))


def test_no_memory_changes_in_the_middle_of_a_step(library, model):
    one, two = read(library, model), read(library, model, "other")
    refused: list[Any] = []

    def change(*unused):
        for method in (attached.add, attached.remove):
            with pytest.raises(AttachError, match="between steps") as error:
                method(two if method == attached.add else one)
            refused.append(error)

    with memstore.attach(model, one) as attached:
        expected = run(model)
        inside = next(iter(attached._readers())).register_forward_hook(change)
        assert torch.equal(run(model), expected)
        inside.remove()
        assert refused
        attached.add(two)
        assert not torch.equal(run(model), expected)


def test_a_memory_that_cannot_be_added_changes_nothing(library, model):
    one, two, gone = (read(library, model, name) for name in ("a", "bb", "ccc"))
    stranger = build("bart" if model.config.model_type != "bart" else "t5")
    strange, other = read(library, stranger, "strange"), read(library, build(model.config.model_type, seed=1), "seed")
    damaged = read(library, model, "damaged")
    data = library.path / "memories" / damaged.manifest.id / "data.mdb"
    data.write_bytes(data.read_bytes()[:-4096])
    del library["ccc"]
    wrong: list[tuple[list[Any], Any, type[Exception], str]] = [
        ([gone], None, MemoryNotFoundError, "'ccc' has been removed"),
        ([two, gone], None, MemoryNotFoundError, "'ccc' has been removed"),
        ([damaged], None, DamagedMemoryError, "is damaged: it has"),
        ([strange], None, FingerprintMismatchError, "geometry|written by"),
        ([other], None, FingerprintMismatchError, "weights"),
        ([one], None, AttachError, "attached twice to one row: a, a"),
        ([two, two], None, AttachError, "attached twice"),
        ([two], [1], AttachError, r"rows=\[1\] must list some of the attached rows, which are 0 to 0"),
        ([two], [], AttachError, "must list some"),
        ([two], [True], AttachError, "must list some"),
        ([two], 0, AttachError, "must list some"),
        ([], None, AttachError, "at least one"),
        (["bb"], None, AttachError, r"store\['name'\]"),
    ]
    attached = memstore.attach(model, one)
    with pytest.raises(AttachError, match="Nothing is attached yet"):
        attached.add(two)
    with attached:
        expected = run(model)
        for memories, rows, error, message in wrong:
            with pytest.raises(error, match=message):
                attached.add(*memories, rows=rows)
            assert attached.rows == [[one]]
            assert torch.equal(run(model), expected)
        for memories, rows, message in (
            ([one], None, "Row 0 would have no memory left"),
            ([two], None, "'bb' is not attached to any row"),
            ([one], [1], "must list some"),
            ([], None, "at least one"),
        ):
            with pytest.raises(AttachError, match=message):
                attached.remove(*memories, rows=rows)
        assert torch.equal(run(model), expected)
    library.close()


def test_a_memory_is_removed_from_the_rows_that_have_it(library):
    model = build("bart")
    one, two = read(library, model, "a"), read(library, model, "bb")
    with memstore.attach(model, rows=[[one, two], [two]]) as attached:
        with pytest.raises(AttachError, match="Row 1 would have no memory left"):
            attached.remove(two)
        with pytest.raises(AttachError, match="'a' is not attached to row 1"):
            attached.remove(one, rows=[0, 1])
        del library["a"]
        attached.remove(one)
        assert attached.rows == [[two], [two]]


def test_what_does_not_fit_whole_is_not_added(library):
    model = build("llama")
    memories = [read(library, model, name, length=300) for name in ("a", "bb")]
    with memstore.attach(model, memories[0], top_k="all") as attached:
        expected = run(model)
        with pytest.raises(WindowExceededError, match="need 600 positions"):
            attached.add(memories[1])
        assert torch.equal(run(model), expected)


def test_a_memory_of_another_model_is_added_with_a_warning_where_that_was_asked_for(library):
    model = build("bart")
    other = read(library, build("bart", seed=1), "seed")
    with memstore.attach(model, read(library, model), strict=False) as attached:
        expected = run(model)
        with pytest.warns(FingerprintWarning, match="weights") as caught:
            attached.add(other)
        assert caught[0].filename == __file__
        assert not torch.equal(run(model), expected)


def test_provenance_names_what_was_added(library):
    model = build("bart")
    one, two = read(library, model, "a"), read(library, model, "bb")
    with memstore.attach(model, one, explain=True) as attached:
        named = []
        for change in (lambda: attached.add(two), lambda: attached.remove(one), lambda: None):
            attached.generate(max_new_tokens=2, do_sample=False)
            named.append({reading.document for reading in attached.provenance()})
            change()
    assert named == [{"a"}, {"a", "bb"}, {"bb"}]
