"""Indexes of memories that are removed, and several processes and threads that need one."""

from __future__ import annotations

import shutil
import threading
import warnings

import pytest
import torch

from memstore.catalog import SEALED, TOMBSTONE, key
from memstore.errors import IndexNotice, MemoryNotFoundError
from memstore.index_record import all_records
from memstore.indexes import open_index, reindex
from tests import kept
from tests.store.indexes.looking import expect_nothing_left, folder, names


def test_the_index_goes_with_its_memory(memory):
    memory.store.reindex(memory.name, "kept")
    place, records, id = folder(memory), memory.store.records, memory.manifest.id
    del memory.store[memory.name]
    assert not place.exists()
    assert all_records(records, id) == [] and records.items(b"i") == []


def test_a_memory_removed_while_attached_is_still_searched(hidden):
    with hidden.open() as opened:
        del hidden.store[hidden.name]
        with pytest.warns(IndexNotice, match="not on disk"):
            index = open_index(opened, "kept")
    assert index.indexes["hidden"].search(torch.ones(1, 48), 3)[1].min() >= 0
    assert hidden.store.records.items(b"i") == []


def test_a_memory_removed_while_its_index_is_built(hidden, monkeypatch):
    library = hidden.store
    save = kept.KeptIndex.save

    def remove_meanwhile(self, path):
        save(self, path)
        del library[hidden.name]

    monkeypatch.setattr(kept.KeptIndex, "save", remove_meanwhile)
    with pytest.raises(MemoryNotFoundError, match="removed while its index was built"):
        reindex(hidden, "kept")
    expect_nothing_left(library)


def test_a_memory_whose_folder_is_just_going_is_said_to_be_removed(hidden, monkeypatch):
    records = hidden.store.records

    def remove_meanwhile(self, path):
        gone = TOMBSTONE + hidden.manifest.id.encode()
        assert records.commit({gone: b""}, [key(SEALED, hidden.name)])
        shutil.rmtree(path.parent)  # which still lies in the memory's folder
        raise FileNotFoundError(path)

    monkeypatch.setattr(kept.KeptIndex, "save", remove_meanwhile)
    with pytest.raises(MemoryNotFoundError, match="removed while its index was built"):
        reindex(hidden, "kept")


@pytest.mark.parametrize("attached", [False, True], ids=["reindex", "open"])
def test_a_memory_removed_before_its_index_is_written(hidden, monkeypatch, attached):
    library, build_it = hidden.store, kept.KeptIndex.build

    def remove_meanwhile(self, blocks):
        build_it(self, blocks)
        del library[hidden.name]

    monkeypatch.setattr(kept.KeptIndex, "build", remove_meanwhile)
    if attached:
        with hidden.open() as opened, pytest.warns(IndexNotice, match="could not be kept: Memory .* was removed"):
            assert open_index(opened, "kept").indexes["hidden"].num_keys == 300
    else:
        with pytest.raises(MemoryNotFoundError, match="removed while its index was built"):
            reindex(hidden, "kept")
    expect_nothing_left(library)


def test_a_memory_removed_before_its_index_is_loaded(memory, monkeypatch):
    library, load_it = memory.store, kept.KeptIndex.__init__
    library.reindex(memory.name, "kept")

    def remove_meanwhile(self, options=None):
        load_it(self, options)
        if memory.name in library:
            del library[memory.name]

    monkeypatch.setattr(kept.KeptIndex, "__init__", remove_meanwhile)
    with memory.open() as opened, pytest.warns(IndexNotice, match="is missing"):
        assert open_index(opened, "kept").indexes.keys() == set(names(memory))


def test_a_memory_whose_index_is_being_written_can_be_removed(hidden, monkeypatch):
    """What another process writes into the folder meanwhile makes the first attempt fail."""
    library, rmtree, calls = hidden.store, shutil.rmtree, []

    def filled_again(folder, *args, **kwargs):
        calls.append(folder)
        if len(calls) == 1:
            raise OSError(39, "Directory not empty")
        rmtree(folder, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", filled_again)
    del library[hidden.name]
    assert library.records.folder(hidden.manifest.id) is None and library.records.items(b"t") == []


def test_nothing_of_an_index_stays_when_its_memory_goes(hidden):
    hidden.store.reindex(hidden.name, "kept")
    del hidden.store[hidden.name]
    assert list((hidden.store.path / "locks").iterdir()) == []


def test_what_a_killed_process_left_goes_with_the_next_index(hidden):
    left = folder(hidden) / ("0" * 32)
    left.mkdir(parents=True)
    (left / "hidden").write_bytes(b"half")
    hidden.store.reindex(hidden.name, "kept")
    assert not left.exists()


def test_two_that_need_an_index_build_it_once(hidden, monkeypatch):
    ready, count = threading.Barrier(2), []
    build_it = kept.KeptIndex.build

    def slow(self, blocks):
        count.append(1)
        build_it(self, blocks)

    monkeypatch.setattr(kept.KeptIndex, "build", slow)

    def use():
        warnings.simplefilter("ignore", IndexNotice)
        ready.wait()
        with hidden.open() as opened:
            open_index(opened, "kept")

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(count) == 1
