"""Changing what is noted of a memory, alone and beside others that write it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

import pytest

import memstore
from memstore import noting, removing
from memstore.catalog import PENDING, SEALED, key
from memstore.errors import (
    DamagedMemoryError,
    DocumentError,
    MemoryNotFoundError,
    ReadOnlyStoreError,
    StoreError,
    StoreFullError,
)
from memstore.manifest import MOST_BYTES, Manifest
from memstore.repair import mend_catalog
from memstore.store import MemoryStore
from tests.store import making


def copies(library: MemoryStore) -> dict[str, bytes]:
    """The copies of records beside memories, by id."""
    return {path.parent.name: path.read_bytes() for path in library.path.glob("memories/*/record")}


def mended(library: MemoryStore) -> MemoryStore:
    """The store after its catalog was lost, so that there is what copies say."""
    library.close()
    (library.path / "catalog" / "data.mdb").unlink()
    mend_catalog(library.path, "lmdb")
    return memstore.open(library.path)


def test_metadata_can_be_changed_while_the_memory_is_open(library: MemoryStore) -> None:
    memory = making.write(library)
    copy = library.path / "memories" / memory.manifest.id / "record"
    before = copy.read_bytes()
    with memory.open() as opened:
        changed = library.set_metadata("esther", {"author": "Mordecai"})
        assert (changed.metadata, library["esther"].metadata) == ({"author": "Mordecai"},) * 2
        assert [each.name for each in library.select(where={"author": "Mordecai"})] == ["esther"]
        assert opened.rows("large", 0, 1).shape == (1, 40)
    assert memory.manifest.differing(changed.manifest) == ["metadata"]
    assert copy.read_bytes() != before
    making.check(changed, "open")


@pytest.mark.parametrize("metadata", [["author"], {1: "one"}, {"set": {1}}, {"large": 1 << 70}], ids=str)
def test_metadata_that_cannot_be_kept_changes_nothing(library: MemoryStore, metadata: Any) -> None:
    before = making.write(library).metadata
    with pytest.raises(DocumentError, match="metadata"):
        library.set_metadata("esther", metadata)
    assert library["esther"].metadata == before
    with pytest.raises(MemoryNotFoundError):
        library.set_metadata("ruth", {})
    with memstore.open(library.path, "r") as reading, pytest.raises(ReadOnlyStoreError):
        reading.set_metadata("esther", {})


def test_metadata_of_a_memory_that_is_replaced_meanwhile_is_that_of_the_new_one(
    library: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = making.write(library).manifest
    described = Manifest.described

    def late(fields: Any) -> Manifest:
        monkeypatch.undo()
        with library.create(making.manifest(document_digest="1"), making.document(), old) as writer:
            making.fill(writer)
        return described(fields)

    monkeypatch.setattr(Manifest, "described", late)
    changed = library.set_metadata("esther", {"year": 1})
    assert (changed.manifest.document_digest, changed.metadata) == ("1", {"year": 1})
    making.check(library["esther"], "open")


def test_metadata_has_a_limit_that_a_list_can_read(library: MemoryStore) -> None:
    making.write(library)
    with pytest.raises(DocumentError, match="metadata of 'esther' is too large"):
        library.set_metadata("esther", {"text": "x" * MOST_BYTES})
    with pytest.raises(DocumentError, match="metadata of 'ruth' is too large"):
        library.create(making.manifest("ruth", metadata={"text": "x" * MOST_BYTES}), making.document())
    library.set_metadata("esther", {"text": "x" * (MOST_BYTES - 4096)})
    with mended(library) as store:
        assert len(store["esther"].metadata["text"]) == MOST_BYTES - 4096


def test_what_is_noted_during_an_update_is_noted_of_the_new_version(library: MemoryStore) -> None:
    old = making.write(library, metadata={"a": 1, "b": 1}).manifest
    library.set_metadata("esther", {"a": 2, "b": 1})  # after the update looked the memory up
    new = making.manifest(document_digest="1", metadata={"a": 1, "b": 3})
    with library.create(new, making.document(), old) as writer:
        making.append(writer)
        library.set_metadata("esther", {"a": 2, "b": 1, "c": [4]})
        memory = making.fill(writer)
    assert memory.metadata == library["esther"].metadata == {"a": 2, "b": 3, "c": [4]}
    assert library["esther"].manifest.document_digest == "1"
    assert list(copies(library)) == [memory.manifest.id] and library.records.lock_names() == []
    with mended(library) as store:
        assert store["esther"].manifest == memory.manifest
        making.check(store["esther"], "open")


@pytest.mark.parametrize("update", [False, True], ids=["new", "update"])
def test_an_interrupted_encoding_goes_on_under_other_metadata(library: MemoryStore, update: bool) -> None:
    old = making.write(library).manifest if update else None
    fields = {"document_digest": "1"}
    with library.create(making.manifest(metadata={"folder": "/before"}, **fields), making.document(), old) as writer:
        making.append(writer)
    begun = writer.manifest.id
    with library.create(making.manifest(metadata={"folder": "/now"}, **fields), making.document(), old) as writer:
        assert (writer.manifest.id, writer.num_done) == (begun, making.BLOCK)
        assert [each.metadata for each in library.unfinished()] == [{"folder": "/now"}]
        making.check(making.fill(writer), "open")
    assert library["esther"].metadata == {"folder": "/now"}


@pytest.mark.parametrize("times", [1, 2], ids=["there is room for one copy", "there is room for none"])
def test_a_full_disk_at_the_end_of_an_update_costs_neither_version_its_copy(
    library: MemoryStore, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = making.write(library).manifest
    draft = making.manifest(document_digest="1")
    copy, failed = library.records.copy, list[str]()

    def full(memory_id: str, records: Mapping[bytes, bytes]) -> None:
        if key(SEALED, "esther") in records and len(failed) < times:
            failed.append(memory_id)
            raise StoreFullError("no space")
        copy(memory_id, records)

    monkeypatch.setattr(library.records, "copy", full)
    with library.create(draft, making.document(), old) as writer:
        if times == 1:
            new = making.fill(writer).manifest
            assert list(copies(library)) == [new.id]
            return
        with pytest.raises(StoreFullError):
            making.fill(writer)
    assert copies(library).keys() == {old.id, draft.id}
    with mended(library) as store:
        assert (store["esther"].manifest, store.unfinished()) == (old, [draft])


def test_an_update_whose_memory_is_removed_leaves_the_copy_of_what_it_read(library: MemoryStore) -> None:
    old = making.write(library).manifest
    with library.create(making.manifest(document_digest="1"), making.document(), old) as writer:
        del library["esther"]
        with pytest.raises(StoreError, match="was removed while it was being written"):
            making.fill(writer)
    assert [each.id for each in library.unfinished()] == list(copies(library)) == [writer.manifest.id]
    with library.create(making.manifest(document_digest="1"), making.document()) as writer:
        assert writer.num_done == making.TOKENS
        making.check(making.fill(writer), "open")


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_what_is_noted_of_a_memory_that_is_going_does_not_bring_it_back(
    library: MemoryStore, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = making.write(library).manifest
    making.write(library, "ruth")
    commit = library.records.commit

    def late(puts: Any, *arguments: Any, **options: Any) -> bool:
        monkeypatch.undo()
        if how == "removed":  # by a process that does not wait for this one
            removing.remove(library.records, key(SEALED, "esther"), old.pack(), old.id)
        else:
            with library.create(making.manifest(document_digest="1"), making.document(), old) as writer:
                making.fill(writer)
        return commit(puts, *arguments, **options)

    monkeypatch.setattr(library.records, "commit", late)
    if how == "removed":
        with pytest.raises(MemoryNotFoundError):
            library.set_metadata("esther", {"year": 1})
    else:
        assert library.set_metadata("esther", {"year": 1}).manifest.document_digest == "1"
    with mended(library) as store:
        assert store.names() == (["ruth"] if how == "removed" else ["esther", "ruth"])
        assert how == "removed" or store["esther"].manifest.document_digest == "1"


NOTE = """
import sys, memstore
with memstore.open(sys.argv[1]) as store:
    for i in range(60):
        store.set_metadata("esther", {"by": sys.argv[2], "round": i})
"""


def test_two_processes_that_note_leave_the_copy_of_what_the_catalog_says(library: MemoryStore) -> None:
    making.write(library)
    both = [making.child(NOTE, library.path, name) for name in ("one", "other")]
    assert [process.wait(timeout=300) for process in both] == [0, 0]
    metadata = library["esther"].metadata
    assert metadata["round"] == 59
    files = {path.name for path in (library.path / "memories" / library["esther"].manifest.id).iterdir()}
    assert files == {"data.mdb", "record"}
    with mended(library) as store:
        assert store["esther"].metadata == metadata


def test_a_damaged_record_of_something_unfinished_stops_nobody_and_can_be_removed(library: MemoryStore) -> None:
    making.write(library)
    library.create(making.manifest("ruth", metadata={"marker": "here"}), making.document()).close()
    library.close()
    data = library.path / "catalog" / "data.mdb"
    data.write_bytes(data.read_bytes().replace(b"marker", b"markes"))
    with memstore.open(library.path) as store:
        assert (store.names(), store.unfinished()) == (["esther"], [])
        del store["ruth"]
        assert len(store.records.memory_ids()) == 1
        assert store.records.get(key(PENDING, "ruth")) is None
        with mended(store) as again:
            assert (again.names(), again.unfinished()) == (["esther"], [])


def test_a_memory_of_an_older_format_says_that_it_is_of_this_one(library: MemoryStore) -> None:
    making.write(library, format_minor=0)
    noting.note(library, "esther", lambda manifest: None)
    assert library["esther"].manifest.format_minor == 0
    library.set_metadata("esther", {})
    assert library["esther"].manifest.format_minor == making.manifest().format_minor


def test_what_is_taken_away_during_an_update_stays_away(library: MemoryStore) -> None:
    old = making.write(library, metadata={"a": 1, "b": 1, "c": 1}).manifest
    draft = making.manifest(document_digest="1", metadata={"a": 1, "b": 2, "c": 1})
    with library.create(draft, making.document(), old) as writer:
        library.set_metadata("esther", {"c": 1})
        assert making.fill(writer).metadata == {"b": 2, "c": 1}


def test_a_note_that_cannot_be_committed_leaves_the_copy_of_what_there_is(
    library: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = making.write(library).manifest

    def full(*_: Any, **options: Any) -> bool:
        raise StoreFullError("no space")

    with monkeypatch.context() as patched, pytest.raises(StoreFullError):
        patched.setattr(library.records, "commit", full)
        library.set_metadata("esther", {"year": 1})
    with monkeypatch.context() as patched, pytest.raises(StoreFullError):
        patched.setattr(library.records, "commit", full)
        del library["esther"]
    with mended(library) as store:
        assert store["esther"].manifest == before


def test_a_memory_whose_folder_is_gone_is_damaged(library: MemoryStore) -> None:
    memory = making.write(library)
    shutil.rmtree(library.path / "memories" / memory.manifest.id)
    with pytest.raises(DamagedMemoryError, match="Memory 'esther' is damaged: its folder is missing"):
        library.set_metadata("esther", {"year": 1})
