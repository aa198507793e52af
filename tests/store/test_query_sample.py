"""The sample of queries is made once and kept with the memory, and nothing that is wrong is ever used."""

from __future__ import annotations

import errno
import os
import warnings

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import memstore
from memstore import query_sample
from memstore.errors import IndexNotice
from memstore.query_sample import FILE
from memstore.registry import adapter_for
from tests.models import build, read

FAMILIES = ["bart", "llama"]


@pytest.fixture(params=FAMILIES)
def model(request):
    return build(request.param)


class Counted:
    """An adapter's model, and how often it was asked."""

    def __init__(self, model):
        self.adapter, self.times = adapter_for(model)(model), 0
        ask = self.adapter.queries

        def counting(opened):
            self.times += 1
            return ask(opened)

        self.adapter.queries = counting

    def __call__(self, memory):
        with memory.open() as opened:
            return query_sample.query_sample(opened, self.adapter)


def file(memory):
    return memory.store.path / "memories" / memory.manifest.id / FILE


def equal(some, others):
    return some.keys() == others.keys() and all(torch.equal(some[layer], others[layer]) for layer in some)


def silently(counted, memory):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return counted(memory)


def test_a_later_process_reads_what_an_earlier_one_made(library, model):
    memory, asked = read(library, model), Counted(model)
    first = silently(asked, memory)
    assert asked.times == 1
    path = library.path
    library.close()
    with memstore.open(path, "r") as again:
        assert equal(silently(asked, again["doc"]), first)
        assert asked.times == 1
    raw = load_file(path / "memories" / memory.manifest.id / FILE)
    assert equal({int(name): tensor for name, tensor in raw.items()}, first)


def test_each_memory_has_its_own_sample_which_goes_with_it(library, model):
    memories, asked = [read(library, model, name) for name in ("doc", "other")], Counted(model)
    one, other = (silently(asked, memory) for memory in memories)
    assert asked.times == 2 and not equal(one, other)
    del library["doc"]
    assert not file(memories[0]).parent.exists() and file(memories[1]).exists()


def _cut(data):
    return data[:-5]


def _flip(place):
    def flip(data):
        at = int(place * len(data))
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    return flip


DAMAGES = {
    "empty": lambda data: b"",
    "garbage": lambda data: b"\xff" * len(data),
    "cut": _cut,
    "longer": lambda data: data + b"\0",
    **{f"flipped at {place}": _flip(place) for place in (0, 0.01, 0.3, 0.7, 0.999)},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_sample_is_made_anew(library, damage):
    model = build("bart")
    memory, asked = read(library, model), Counted(model)
    first = asked(memory)
    sound = file(memory).read_bytes()
    file(memory).write_bytes(DAMAGES[damage](sound))
    with pytest.warns(IndexNotice, match=r"The sample of queries of memory 'doc' .*; it is made anew"):
        assert equal(asked(memory), first)
    assert asked.times == 2 and equal(silently(asked, memory), first) and asked.times == 2


def test_a_sample_that_was_exchanged_is_not_used(library):
    """A sound file with other queries in it: its checksum is that of the queries it was written with."""
    model = build("bart")
    memory, asked = read(library, model), Counted(model)
    first = asked(memory)
    with safe_open(file(memory), framework="pt") as opened:
        metadata = opened.metadata()
    save_file({str(layer): queries * 2 for layer, queries in first.items()}, file(memory), metadata)
    with pytest.warns(IndexNotice, match="is damaged"):
        assert equal(asked(memory), first)
    save_file({str(layer): queries for layer, queries in first.items()}, file(memory), metadata | {"format": "2"})
    with pytest.warns(IndexNotice, match="written by another version"):
        assert equal(asked(memory), first)


def test_a_decoder_that_was_trained_further_is_asked_itself(library):
    """The encoder's states fit both decoders, the queries do not."""
    model = build("bart")
    memory = read(library, model)
    first = Counted(model)(memory)
    with torch.no_grad():
        model.get_decoder().layers[0].encoder_attn.q_proj.weight.mul_(1.5)
    asked = Counted(model)
    with pytest.warns(IndexNotice, match="is that of a model with other weights"):
        second = asked(memory)
    assert asked.times == 1 and not equal(first, second)
    assert equal(silently(asked, memory), second) and asked.times == 1


def test_where_nothing_may_be_written_it_lasts_for_the_process(library, model):
    memory = read(library, model)
    path = library.path
    library.close()
    asked = Counted(model)
    with memstore.open(path, "r") as store:
        first = silently(asked, store["doc"])
        assert equal(silently(asked, store["doc"]), first) and asked.times == 1
    assert not (path / "memories" / memory.manifest.id / FILE).exists()
    with memstore.open(path, "r") as store:  # another opening is another process as far as this is concerned
        assert equal(silently(asked, store["doc"]), first) and asked.times == 2


def test_where_nothing_is_kept_on_disk_it_lasts_for_the_process(library, monkeypatch):
    model = build("bart")
    memory, asked = read(library, model), Counted(model)
    monkeypatch.setattr(library.records, "folder", lambda memory_id: None)
    first = silently(asked, memory)
    assert equal(silently(asked, memory), first) and asked.times == 1 and not file(memory).exists()


def test_a_full_disk_costs_nothing_but_the_file(library, monkeypatch):
    model = build("bart")
    memory, asked = read(library, model), Counted(model)
    before = set(file(memory).parent.iterdir())

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.warns(IndexNotice, match="cannot be written .No space left on device.: it lasts as long"):
            first = asked(memory)
    assert set(file(memory).parent.iterdir()) == before
    assert equal(silently(asked, memory), first) and asked.times == 1
