"""Indexes are built once, kept with what was tuned, and found again."""

from __future__ import annotations

import weakref

import pytest
import torch

import memstore
from memstore.errors import (
    ConfigError,
    IndexBuildError,
    IndexNotice,
    MemoryNotFoundError,
    PluginError,
    ReadOnlyStoreError,
    StoreBusyError,
)
from memstore.indexes import open_index, remember
from memstore.slots import slots
from tests import kept
from tests.models import build
from tests.store.indexes.looking import KINDS, expect_built, files, folder, found, names, tune


def test_one_index_for_each_slot(memory):
    family = "bart" if memory.kind == "hidden" else "llama"
    assert names(memory) == KINDS[family]
    with memory.open() as opened:
        for slot in slots(memory.manifest):
            keys, values = torch.cat(slot.keys(opened)), torch.cat(slot.values(opened))
            assert keys.shape == values.shape == (300, 48 if memory.kind == "hidden" else 8)
            assert torch.equal(keys, values) == (memory.kind == "hidden")
            if slot.layer is not None:
                assert torch.equal(values, torch.cat(opened.blocks(f"values.{slot.layer}"))[:, slot.head])


def test_an_index_is_built_once_and_then_loaded(memory):
    expect_built(memory, "none was kept.*kept for the next time")
    (record,) = memory.store.indexes(memory.name)
    assert (record.backend, record.distribution, record.version) == ("kept", "kept", "1.0")
    assert record.options == {"scale": 1.0}
    assert set(record.files) == set(names(memory))
    assert record.nbytes == sum(path.stat().st_size for path in files(memory))


def test_reindex_builds_ahead_and_replaces(memory, recwarn):
    name, first = memory.store.reindex(memory.name, "kept")
    assert name == "kept" and first is not None and len(kept.built) == len(names(memory))
    _, second = memory.store.reindex(memory.name, "kept", {"scale": "2"})
    assert second.options == {"scale": 2.0}
    assert [path.name for path in folder(memory).iterdir()] == [second.folder]
    kept.built.clear()
    found(memory)
    assert kept.built == [] and not recwarn  # the options it was built with hold, as nothing else is configured


def test_reindex_holds_one_index_at_a_time(memory, monkeypatch):
    alive: weakref.WeakSet[kept.KeptIndex] = weakref.WeakSet()
    build_it, most = kept.KeptIndex.build, []

    def note(self, blocks):
        alive.add(self)
        most.append(len(alive))
        build_it(self, blocks)

    monkeypatch.setattr(kept.KeptIndex, "build", note)
    memory.store.reindex(memory.name, "kept")
    assert most == [1] * len(names(memory))


def test_an_index_that_keeps_nothing_is_only_tried(memory):
    assert memory.store.reindex(memory.name, "exact") == ("exact", None)
    assert memory.store.indexes(memory.name) == []


def test_other_options_are_another_index(memory, monkeypatch):
    memory.store.reindex(memory.name, "kept", {"scale": 2})
    tune(memory, {"step": 4}, {"mass": 0.5})  # which says nothing of the other
    monkeypatch.setenv("MEMSTORE__INDEX__BACKEND", "kept")
    monkeypatch.setenv("MEMSTORE__INDEX__OPTIONS__SCALE", "0.5")
    expect_built(memory, "built with scale = 2.0, and 0.5 is configured")


@pytest.mark.parametrize("option", [("STEP", "2"), ("DEVICE", "cuda:0")])
def test_options_that_are_not_in_the_file_need_no_building(memory, monkeypatch, recwarn, option):
    memory.store.reindex(memory.name, "kept")
    monkeypatch.setenv("MEMSTORE__INDEX__BACKEND", "kept")
    monkeypatch.setenv(f"MEMSTORE__INDEX__OPTIONS__{option[0]}", option[1])
    kept.built.clear()
    with memory.open() as opened:
        index = open_index(opened).indexes[names(memory)[0]]
    assert (kept.built, [str(each.message) for each in recwarn]) == ([], [])
    assert str(getattr(index.options, option[0].lower())) == option[1]


def test_what_was_tuned_is_used_unless_something_else_is_configured(memory, monkeypatch):
    memory.store.reindex(memory.name, "kept")
    tune(memory, {"step": 4}, {"mass": 0.5})
    assert all(id % 4 == 0 for _, ids in found(memory).values() for id in ids.flatten().tolist())
    (record,) = memory.store.indexes(memory.name)
    assert (record.tuned, record.quality) == ({"step": 4}, {"mass": 0.5})
    monkeypatch.setenv("MEMSTORE__INDEX__BACKEND", "kept")
    monkeypatch.setenv("MEMSTORE__INDEX__OPTIONS__STEP", "1")
    assert any(id % 4 for _, ids in found(memory).values() for id in ids.flatten().tolist())
    memory.store.reindex(memory.name, "kept")  # tuned for what is no longer there
    assert memory.store.indexes(memory.name)[0].tuned == {}
    assert memory.store.reindex(memory.name, "kept", {"step": 2})[1].tuned == {"step": 2}


def test_what_was_measured_of_one_index_is_not_kept_with_another(memory):
    memory.store.reindex(memory.name, "kept")
    with memory.open() as opened:
        index = open_index(opened, "kept")
        memory.store.reindex(memory.name, "kept")
        with pytest.raises(StoreBusyError, match="was built anew by another process"):
            remember(memory, index, {"step": 4}, {"mass": 0.5})
    assert memory.store.indexes(memory.name)[0].tuned == {}


def test_indexes_of_several_backends_lie_beside_each_other(memory, tmp_path, monkeypatch):
    kept.install(tmp_path / "more", monkeypatch, "more")
    memory.store.reindex(memory.name, "kept")
    memory.store.reindex(memory.name, "more")
    assert [record.backend for record in memory.store.indexes(memory.name)] == ["kept", "more"]
    assert len(files(memory)) == 2 * len(names(memory))
    kept.built.clear()
    found(memory)
    assert kept.built == []


def test_a_store_opened_for_reading_builds_and_keeps_nothing(hidden):
    with memstore.open(hidden.store.path, "r") as store:
        with pytest.warns(IndexNotice, match="not kept, because the store was opened read-only"):
            first = found(store[hidden.name])
        assert store.indexes(hidden.name) == []
        with pytest.raises(ReadOnlyStoreError):
            store.reindex(hidden.name, "kept")
    hidden.store.reindex(hidden.name, "kept")
    kept.built.clear()
    with memstore.open(hidden.store.path, "r") as store:
        assert torch.equal(found(store[hidden.name])["hidden"][1], first["hidden"][1])
    assert kept.built == []


def test_wrong_backends_and_options_are_refused_before_anything_is_built(hidden):
    with pytest.raises(PluginError, match="Did you mean 'kept'"):
        hidden.store.reindex(hidden.name, "kepp")
    with pytest.raises(PluginError, match="no VectorIndex"):
        hidden.store.reindex(hidden.name, "lmdb")
    with pytest.raises(ConfigError, match="nprobe"):
        hidden.store.reindex(hidden.name, "kept", {"nprobe": 3})
    with pytest.raises(ConfigError, match="step"):
        hidden.store.reindex(hidden.name, "kept", {"step": "many"})
    with pytest.raises(PluginError, match="named 5"):
        hidden.store.reindex(hidden.name, 5)
    with pytest.raises(MemoryNotFoundError):
        hidden.store.reindex("nobody", "kept")
    assert hidden.store.indexes(hidden.name) == [] and kept.built == []


def test_an_option_that_cannot_be_kept_is_told(hidden):
    with pytest.raises(IndexBuildError, match="options of 'kept' cannot be kept"):
        hidden.store.reindex(hidden.name, "kept", {"step": 2**64})
    assert hidden.store.indexes(hidden.name) == [] and files(hidden) == []


def test_every_kind_of_model_reads_through_it(memory, recwarn):
    model = build("bart" if memory.kind == "hidden" else "llama")
    memory.store.reindex(memory.name, "kept")
    kept.loaded.clear()
    options = {"top_k": 5} if memory.kind == "hidden" else {"budget": 64}
    ids = torch.arange(5, 13)[None]
    outputs = []
    for backend in ("exact", "kept"):
        with memstore.attach(model, memory, index=backend, **options) as attached:
            outputs.append(attached.generate(input_ids=ids, max_new_tokens=6, do_sample=False))
    assert kept.loaded == [300] * len(names(memory))
    assert torch.equal(*outputs)
