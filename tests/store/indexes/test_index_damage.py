"""An index that is missing, stale or damaged, or that cannot be written, costs nothing but the building."""

from __future__ import annotations

import shutil

import pytest

import memstore
from memstore.errors import (
    IndexNotice,
    StoreError,
    StoreFullError,
)
from memstore.index_record import index_key, write_record
from memstore_backends import lmdb_catalog
from memstore_backends.lmdb_summary import sealed
from tests import kept
from tests.models import build, read
from tests.store.indexes.looking import expect_built, files, folder, found, names, tune


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda file: file.unlink(), "is missing"),
        (lambda file: shutil.rmtree(file.parent), "is missing"),
        (lambda file: shutil.rmtree(file.parents[1]), "is missing"),
        (lambda file: file.write_bytes(file.read_bytes()[:-1]), "is damaged"),
        (lambda file: file.write_bytes(file.read_bytes() + b"\0"), "is damaged"),
        (lambda file: file.write_bytes(b""), "is damaged"),
        (lambda file: file.write_bytes(bytes([*file.read_bytes()[:-1], file.read_bytes()[-1] ^ 1])), "is damaged"),
    ],
    ids=["file", "folder", "all", "cut", "longer", "empty", "bit"],
)
def test_a_damaged_file_is_never_read(memory, monkeypatch, damage, reason):
    memory.store.reindex(memory.name, "kept")
    damaged = files(memory)[-1]
    damage(damaged)
    load, read_files = kept.KeptIndex.load, []

    def note(self, path):
        read_files.append(path)
        load(self, path)

    monkeypatch.setattr(kept.KeptIndex, "load", note)
    expect_built(memory, reason)
    assert damaged not in read_files
    assert len(files(memory)) == len(names(memory))


def test_what_a_library_cannot_read_is_built_anew(memory, monkeypatch):
    memory.store.reindex(memory.name, "kept")
    load, calls = kept.KeptIndex.load, []

    def fail_first(self, path):
        calls.append(path)
        if len(calls) <= 2:
            raise RuntimeError("version 9")
        load(self, path)

    monkeypatch.setattr(kept.KeptIndex, "load", fail_first)
    expect_built(memory, "cannot be read \\(version 9\\)")


def test_files_of_another_memory_are_not_taken_for_its_own(library, hidden):
    other = read(library, build("bart"), name="other", length=301)
    _, record = library.reindex("other", "kept")
    shutil.copytree(folder(other), folder(hidden))
    write_record(library.records, hidden.manifest, record)
    expect_built(hidden, "other vectors")
    shutil.copytree(folder(other) / record.folder, folder(hidden) / record.folder)
    write_record(library.records, hidden.manifest, record.model_copy(update={"digest": hidden.manifest.digest}))
    expect_built(hidden, "holds 301 keys instead of 300")


def test_a_damaged_index_is_built_again_as_it_was(memory):
    memory.store.reindex(memory.name, "kept", {"scale": 2})
    tune(memory, {"step": 4}, {"mass": 0.5})
    files(memory)[0].unlink()
    with pytest.warns(IndexNotice, match="is missing"):
        assert all(id % 4 == 0 for _, ids in found(memory).values() for id in ids.flatten().tolist())
    (record,) = memory.store.indexes(memory.name)
    assert (record.options, record.tuned, record.quality) == ({"scale": 2.0}, {"step": 4}, {"mass": 0.5})


def full(self, path):
    raise OSError(28, "No space left on device")


def test_a_full_disk_costs_the_file_and_not_the_search(memory, monkeypatch):
    memory.store.reindex(memory.name, "kept")
    before = [record.model_dump() for record in memory.store.indexes(memory.name)]
    monkeypatch.setattr(kept.KeptIndex, "save", full)
    with pytest.raises(StoreFullError, match="full. Free some space"):
        memory.store.reindex(memory.name, "kept", {"scale": 3})
    assert [record.model_dump() for record in memory.store.indexes(memory.name)] == before
    assert len(files(memory)) == len(names(memory))
    files(memory)[0].unlink()
    with pytest.warns(IndexNotice, match="could not be kept: The disk .* is full"):
        found(memory)


def test_a_disk_too_full_for_a_lock_costs_nothing_but_the_file(hidden, monkeypatch):
    def full(name, wait):
        raise StoreFullError("The disk is full.")

    monkeypatch.setattr(hidden.store.records, "lock", full)
    with pytest.warns(IndexNotice, match="could not be kept: The disk is full"):
        assert found(hidden)["hidden"][1].shape == (2, 5)


@pytest.mark.parametrize("other", [lambda path: path.write_text("no folder"), lambda path: path.symlink_to("nowhere")])
def test_what_stands_in_the_place_of_the_folder_gives_way(hidden, other):
    other(folder(hidden))
    expect_built(hidden, "none was kept.*kept for the next time")


def test_whatever_a_library_fails_with_while_saving_is_told_in_words(hidden, monkeypatch):
    def fail(self, path):
        raise RuntimeError("no such format")

    monkeypatch.setattr(kept.KeptIndex, "save", fail)
    with pytest.raises(StoreError, match="'kept' could not write .*: no such format"):
        hidden.store.reindex(hidden.name, "kept")
    with pytest.warns(IndexNotice, match="could not be kept: .*no such format"):
        found(hidden)


def test_a_record_that_cannot_be_read_is_no_index(hidden):
    hidden.store.reindex(hidden.name, "kept")
    hidden.store.records.commit({index_key(hidden.manifest.id, "kept"): b"\xc1"})
    assert hidden.store.indexes(hidden.name) == []
    expect_built(hidden, "none was kept")


def test_a_damaged_record_of_an_index_harms_nothing_else(hidden):
    """The catalog tells the damage of any record; an index can be built again, so its own stops nobody."""
    library = hidden.store
    library.reindex(hidden.name, "kept")

    def damage(backend):
        damaged = index_key(hidden.manifest.id, backend)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lmdb_catalog, "sealed", lambda key, value: value if key == damaged else sealed(key, value))
            library.records.commit({damaged: b"no checksum of it"})

    damage("kept")
    with memstore.attach(build("bart"), hidden, top_k=5, index="exact"):
        pass
    assert library.indexes(hidden.name) == []
    expect_built(hidden, "none was kept")
    damage("other")
    library.reindex(hidden.name, "kept")
    kept.built.clear()
    assert found(hidden)["hidden"][1].min() >= 0 and kept.built == []
    del library[hidden.name]
    assert library.records.folder(hidden.manifest.id) is None and library.records.items(b"t") == []


def test_files_of_another_distribution_are_not_read(hidden):
    hidden.store.reindex(hidden.name, "kept")
    (record,) = hidden.store.indexes(hidden.name)
    write_record(hidden.store.records, hidden.manifest, record.model_copy(update={"distribution": "other"}))
    expect_built(hidden, "built by other, and kept is installed")
