"""Keys and values in int8 and int4: what the bytes are, how wrong they may be, and that they are read right."""

from __future__ import annotations

import uuid
from math import prod

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

import memstore
from memstore import describe, open_memory
from memstore.coding import LARGEST, Stretch, decoded, encoded
from memstore.errors import ConfigError, EncodingError, FormatError
from memstore.fingerprint import tensor_bytes
from memstore.indexes import open_index
from memstore.manifest import Manifest, PartSpec
from memstore.memory import Document
from memstore.memory_writer import token_parts
from memstore.slots import slots
from memstore.values import checksum
from memstore_adapters.llama import LlamaAdapter
from tests import tiny
from tests.models import build, clone, tokens

CODED = ("int8", "int4")
LINE = "In the beginning was the Word, and the Word was with God.\n"

each_dtype = pytest.mark.parametrize("dtype", CODED)
each_sharing = pytest.mark.parametrize("scales", ["channel", "token"])


def by_hand(record: bytes, spec: PartSpec, n: int) -> np.ndarray:
    """The rows [n, *shape] of a record, decoded as docs/how-it-works.md says, in numpy and float64."""
    values, heads = prod(spec.shape), prod(spec.shape[:-1])
    count = n * heads if spec.scales == "token" else -(-n // 64) * values
    tables = np.frombuffer(record, "<u2", (1 if spec.dtype == "int8" else 2) * count)
    floats = (tables.astype("<u4") << 16).view("<f4").astype(np.float64).reshape(-1, count)  # bfloat16
    at = 2 * tables.size
    if spec.dtype == "int8":
        codes = np.frombuffer(record, np.int8, offset=at).reshape(n, values).astype(np.float64)
    else:
        pairs = np.frombuffer(record, np.uint8, offset=at).reshape(n, -(-values // 2))
        codes = np.concatenate((pairs & 15, pairs >> 4), axis=1)[:, :values].astype(np.float64)
    shape = (n, heads, 1) if spec.scales == "token" else (-1, heads, spec.shape[-1])
    each = [table.reshape(shape) for table in floats]
    if spec.scales == "channel":
        each = [np.repeat(table, 64, axis=0)[:n] for table in each]
    rows = codes.reshape(n, heads, -1) * each[0] + (each[1] if len(each) > 1 else 0)
    return rows.reshape(n, *spec.shape)


def half_a_step(rows: torch.Tensor, spec: PartSpec) -> np.ndarray:
    """The largest error that is allowed for each of rows [n, *shape]: half of the step between two codes, and what
    rounding to bfloat16 adds."""
    whole = rows.double().numpy().reshape(len(rows), -1, spec.shape[-1])
    if spec.scales == "token":
        low, high = whole.min(-1, keepdims=True), whole.max(-1, keepdims=True)
    else:
        groups = [whole[i : i + 64] for i in range(0, len(whole), 64)]
        ends = [np.broadcast_to([[g.min(0)], [g.max(0)]], (2, *g.shape)) for g in groups]
        low, high = np.concatenate(ends, axis=1)
    size = np.maximum(-low, high)
    step = size / 127 if spec.dtype == "int8" else (high - low + size / 256) / 15
    return np.broadcast_to(step * 0.51 + (size / 256 if spec.dtype == "int4" else 0) + 1e-37, whole.shape)


@settings(deadline=None, max_examples=60)
@given(
    dtype=st.sampled_from(CODED),
    scales=st.sampled_from(["channel", "token"]),
    n=st.sampled_from([1, 2, 63, 64, 65, 130, 256]),
    shape=st.sampled_from([(1,), (7,), (2, 3), (2, 4), (3, 5)]),
    size=st.sampled_from([1e-42, 1e-20, 1e-5, 1.0, 3e4, 1e20, LARGEST / 10]),
    offset=st.sampled_from([0.0, 1.0, -50.0]),
    seed=st.integers(0, 9),
)
def test_a_record_holds_what_it_should_within_half_a_step(dtype, scales, n, shape, size, offset, seed):
    spec = PartSpec(shape=shape, dtype=dtype, scales=scales)
    rows = torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed))
    rows[:, ..., 0] = 0  # a channel of zeros
    rows[0] *= 50  # one token unlike the others
    rows = ((rows + offset) * size).clamp(-LARGEST, LARGEST)
    record = encoded(rows, spec)
    assert record.nbytes == spec.num_bytes(n)
    raw = torch.frombuffer(bytearray(record), dtype=torch.uint8)
    read = decoded([Stretch(raw, n, 0, n)], spec)
    expected = by_hand(bytes(record), spec, n)
    np.testing.assert_allclose(read.numpy(), expected, rtol=1e-6, atol=1e-37)
    error = np.abs(read.double().numpy() - rows.double().numpy()).reshape(n, -1, shape[-1])
    assert (error <= half_a_step(rows, spec)).all()
    for start, stop in ((0, 1), (n // 2, n), (n - 1, n), (n, n), (min(60, n), min(70, n))):
        assert torch.equal(decoded([Stretch(raw, n, start, stop)], spec), read[start:stop])
    several = [(0, n), (n // 2, n), (0, min(n, 64)), (n - 1, n)]
    read = torch.cat([read[start:stop] for start, stop in several])
    assert torch.equal(decoded([Stretch(raw, n, *each) for each in several], spec), read)


@each_dtype
@each_sharing
def test_zeros_stay_zeros_and_what_is_constant_stays_itself(dtype, scales):
    spec = PartSpec(shape=(2, 4), dtype=dtype, scales=scales)
    for number in (0.0, 1.5, -3.0):  # which a bfloat16 holds
        rows = torch.full((70, 2, 4), number)
        raw = torch.frombuffer(bytearray(encoded(rows, spec)), dtype=torch.uint8)
        torch.testing.assert_close(decoded([Stretch(raw, 70, 0, 70)], spec), rows, rtol=2**-8, atol=0)


def test_the_last_group_is_no_worse_for_being_short():
    """An outlier in the group before it changes nothing there."""
    spec = PartSpec(shape=(3,), dtype="int8", scales="channel")
    rows = torch.randn(70, 3, generator=torch.Generator().manual_seed(0))
    rows[:64] *= 1e6
    raw = torch.frombuffer(bytearray(encoded(rows, spec)), dtype=torch.uint8)
    assert (decoded([Stretch(raw, 70, 64, 70)], spec) - rows[64:]).abs().max() <= 0.51 * rows[64:].abs().max() / 127


@pytest.mark.parametrize(
    ("dtype", "per_value"), [("int8", 1 + 2 / 64), ("int4", 0.5 + 4 / 64), ("float16", 2.0), ("bfloat16", 2.0)]
)
def test_bytes_a_value(dtype, per_value):
    """In the geometry of SmolLM2-135M, with the bounds of blocks: 262,144 tokens stay below 3.4 GB in int8."""
    made = LlamaConfig(num_hidden_layers=30, num_key_value_heads=3, head_dim=64, hidden_size=9, num_attention_heads=9)
    with torch.device("meta"):
        parts = LlamaAdapter(LlamaForCausalLM(made)).parts(dtype)
    total = sum(part.num_bytes(4096) for part in parts.values()) * 64
    bounds = 2 * 2 / 64 / 2  # two halves for 64 keys of one channel, and none for values
    assert total == (per_value + bounds) * 262_144 * 60 * 3 * 64
    assert dtype != "int8" or (per_value + bounds < 1.1 and total < 3.4e9)


def as_float32(library, memory, name):
    """A memory in float32 of what ``memory`` decodes to."""
    manifest = memory.manifest
    parts = {
        part: PartSpec(shape=spec.shape, dtype="float32", every=spec.every) for part, spec in manifest.parts.items()
    }
    changes = {"id": uuid.uuid4().hex, "name": name, "parts": parts, "seal": None, "digest": None}
    draft = manifest.model_copy(update=changes)
    document = Document(memory.text, memory.token_ids, memory.offsets)
    with memory.open() as opened, library.create(draft, document) as writer:
        if draft.prefix_ids:
            writer.put_prefix({part: tensor_bytes(opened.prefix(part).float()) for part in token_parts(draft)})
        for i in range(draft.num_blocks):
            writer.append({part: tensor_bytes(opened.block(part, i).float()) for part in parts})
        return writer.finish()


@pytest.fixture(scope="module")
def llama():
    return tiny.llama()


@each_dtype
@pytest.mark.parametrize("length", [60, 1500])
def test_a_coded_memory_is_read_as_what_it_decodes_to(library, monkeypatch, llama, dtype, length):
    """Whole, and by the passages that are chosen, to the bit."""
    monkeypatch.setattr(describe, "BLOCK_BYTES", 1)
    tokenizer, text = tiny.tokenizer(), (LINE * 30)[:length]
    keywords = {"window": 64} if length > 64 else {}
    memory = library.encode(llama, tokenizer, text, name="coded", dtype=dtype, **keywords)
    plain = library.encode(llama, tokenizer, text, name="plain", **keywords)
    same = as_float32(library, memory, "same")
    assert {spec.dtype for spec in token_parts(memory.manifest).values()} == {dtype}
    logits = []
    for each in (memory, same, plain):
        with memstore.attach(llama, each, budget=128), torch.no_grad():
            logits.append(llama(input_ids=tokens(20)[None]).logits)
    assert torch.equal(logits[0], logits[1])
    if length == 60:  # else other passages may be chosen
        assert (logits[0] - logits[2]).abs().max() <= (2e-3 if dtype == "int8" else 5e-2) * logits[2].abs().max()
    with memory.open("open") as opened, plain.open() as exact:
        for part, spec in token_parts(memory.manifest).items():
            rows, wanted = opened.rows(part, 0, length), exact.rows(part, 0, length)
            assert rows.dtype == torch.float32 and opened.prefix(part).dtype == torch.bfloat16
            assert torch.equal(opened.prefix(part), exact.prefix(part).bfloat16())
            blocks = [wanted[i : i + 256] for i in range(0, length, 256)]
            allowed = np.concatenate([half_a_step(block, spec) for block in blocks])
            assert ((rows - wanted).abs().numpy() <= allowed).all()
            for start, stop in ((0, 1), (length - 1, length), (length // 2, length // 2), (length // 3, length)):
                assert torch.equal(opened.rows(part, start, stop), rows[start:stop])


def test_only_the_records_that_are_asked_for_are_verified(library, monkeypatch, llama):
    """And rows of two records copy neither as a whole."""
    monkeypatch.setattr(describe, "BLOCK_BYTES", 1)
    memory = library.encode(llama, input_ids=tokens(1500), name="doc", window=64, dtype="int8")
    sizes, real = [], checksum

    def noting(value):
        sizes.append(len(value))
        return real(value)

    monkeypatch.setattr(open_memory, "checksum", noting)
    monkeypatch.setattr(open_memory, "_checked", {})
    with memory.open() as opened:
        assert sizes == []
        opened.rows("keys.0", 300, 310)
        assert sizes == [memory.manifest.parts["keys.0"].num_bytes(256)]
        rows = opened.rows("keys.0", 500, 520)  # of that record and the next
        assert len(sizes) == 2 and rows.untyped_storage().nbytes() == rows.nbytes


@each_dtype
@pytest.mark.parametrize("backend", ["exact", "faiss-flat", "faiss-ivf"])
def test_every_index_searches_what_is_coded(library, llama, dtype, backend):
    if backend != "exact":
        pytest.importorskip("faiss", reason="the extra faiss is not installed")
    memory = library.encode(llama, input_ids=tokens(700), name="doc", window=64, dtype=dtype)
    library.reindex("doc", backend)
    query = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    with memory.open() as opened:
        indexes = open_index(opened, backend).indexes
        for slot in slots(memory.manifest):
            keys = opened.rows(f"keys.{slot.layer}", 0, 700)[:, slot.head]
            best = (query @ keys.T).amax(1)
            scores, ids = indexes[slot.name].search(query, 1)
            if backend != "faiss-ivf":  # which may miss it
                torch.testing.assert_close(scores[:, 0], best, rtol=2e-3, atol=2e-3)
            torch.testing.assert_close(scores[:, 0], (query * keys[ids[:, 0]]).sum(1), rtol=2e-3, atol=2e-3)
            assert slot.keys(opened)[0].dtype == torch.float16


@pytest.mark.parametrize(("factor", "dtype"), [(1e7, torch.float32), (1.0, torch.float16)])
def test_keys_beyond_half_precision_are_searched_in_float32(library, llama, factor, dtype):
    model = clone(llama)
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight.mul_(factor)
    memory = library.encode(model, input_ids=tokens(40), name="doc", dtype="int8")
    with memory.open() as opened:
        (last,) = [slot for slot in slots(memory.manifest) if slot.name == "keys.1.1"]
        (keys,) = last.keys(opened)
        assert keys.dtype == dtype and keys.isfinite().all()
        open_index(opened, "exact").indexes["keys.1.1"].search(torch.ones(1, 8), 3)


@each_dtype
@pytest.mark.parametrize("factor", [float("nan"), 1e39])
def test_what_is_no_number_is_refused(library, llama, dtype, factor):
    model = clone(llama)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.mul_(factor)
    with pytest.raises(EncodingError, match=f"window at token 0, stored as {dtype}"):
        library.encode(model, input_ids=tokens(40), name="doc", dtype=dtype)
    assert library.names() == []


@each_dtype
@pytest.mark.parametrize("family", ["bart", "t5"])
def test_encoder_states_are_not_coded(library, family, dtype):
    with pytest.raises(
        ConfigError, match=f"'{dtype}': memories of kind 'hidden' are stored as float32, float16, bfloat16"
    ):
        library.encode(build(family), input_ids=tokens(40), name="doc", dtype=dtype)
    assert library.names() == []


def test_something_unknown_of_a_newer_minor_format_is_refused_by_name(library, llama):
    memory = library.encode(llama, input_ids=tokens(40), name="doc", dtype="int8")
    newer = memory.manifest.model_dump() | {"format_minor": 99}
    assert Manifest.unpack(msgpack.packb(newer)).name == "doc"  # nothing in it is unknown
    parts, keys = newer["parts"], newer["parts"]["keys.0"]
    of_a_part = [{"parts": parts | {"keys.0": keys | new}} for new in ({"dtype": "int2"}, {"turned": True})]
    for unknown in (*of_a_part, {"order": "backwards"}):
        with pytest.raises(FormatError, match="'doc' has format 1.99, and something in it .* Install the version"):
            Manifest.unpack(msgpack.packb(newer | unknown))
