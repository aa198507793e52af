"""Which copy of a record counts, and which does not, after kills and removals. Nothing here loads torch."""

from __future__ import annotations

import msgpack
import pytest

import memstore
from memstore import catalog, pending
from memstore.catalog import PENDING, SEALED, key
from memstore.errors import (
    DamagedMemoryError,
    MemoryBusyError,
    StoreError,
    StoreFullError,
)
from memstore.manifest import FORMAT_MINOR
from memstore.repair import mend_catalog
from memstore.store import MemoryStore
from memstore_backends.lmdb_pages import meta
from tests.faults.harming import (
    KilledError,
    catalog_of,
    change_a_manifest,
    copies,
    forget_a_record,
    kill,
    lose_all,
)
from tests.store import making


def test_what_was_being_encoded_when_the_catalog_was_lost_goes_on(library: MemoryStore) -> None:
    making.write(library)
    draft = making.manifest("ruth")
    with library.create(draft, making.document()) as writer:
        making.append(writer)
        making.append(writer)
    lose_all(library)
    with memstore.open(library.path) as store:
        assert (store.names(), store.unfinished()) == (["esther"], [draft])
        with store.create(making.manifest("ruth"), making.document()) as writer:
            assert (writer.manifest.id, writer.num_done) == (draft.id, 2 * making.BLOCK)
            making.check(making.fill(writer))
        assert store.unfinished() == []
        del store["ruth"]
        store.create(draft, making.document()).close()
        del store["ruth"]
        lose_all(store)
    with memstore.open(library.path) as store:
        assert (store.names(), store.unfinished()) == (["esther"], [])


@pytest.mark.parametrize("step", ["commit", "delete"])
def test_no_copy_brings_back_what_a_killed_removal_or_update_replaced(
    library: MemoryStore, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    making.write(library, "gone")
    old = making.write(library, "esther").manifest
    new = making.manifest("esther", document_digest="1")
    with library.create(new, making.document(), old) as writer, monkeypatch.context() as patched:
        place, what = (writer, "_seal") if step == "commit" else (library.records, "delete")
        patched.setattr(place, what, kill)
        with pytest.raises(KilledError):
            making.fill(writer)
    with monkeypatch.context() as patched, pytest.raises(KilledError):
        patched.setattr(library.records, step, kill)
        del library["gone"]
    current = library["esther"].manifest
    assert current.document_digest == ("1" if step == "delete" else "0")
    lose_all(library)
    with memstore.open(library.path) as store:
        assert store.names() == ["esther"]
        assert store["esther"].manifest == current


@pytest.mark.parametrize("step", ["before the commit", "after the commit", "given up"])
def test_of_two_copies_of_one_record_the_newer_one_counts(
    library: MemoryStore, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ids they have: an update is killed once its copy is there, and the catalog lost."""
    for number in range(6):
        old = making.write(library, f"doc-{number}").manifest
        draft = making.manifest(f"doc-{number}", document_digest="1")
        with library.create(draft, making.document(), old) as writer, monkeypatch.context() as patched:
            patched.setattr(library.records, "delete" if step == "after the commit" else "commit", kill)
            with pytest.raises(KilledError):
                making.fill(writer)
        if step == "given up":
            pending.give_up(library, draft.name)
    lose_all(library)
    with memstore.open(library.path) as store:
        digest = "0" if step == "given up" else "1"
        assert [memory.manifest.document_digest for memory in store.memories()] == [digest] * 6
        assert (store.unfinished(), catalog.strays(store.records)) == ([], [])
        assert len(store.records.memory_ids()) == 6
        for memory in store.memories():
            making.check(memory, "open")


def test_a_copy_does_not_say_what_is_to_go_where_the_catalog_knows_better(
    library: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    making.write(library, "ruth")
    old = making.write(library).manifest
    with library.create(making.manifest(document_digest="1"), making.document(), old) as writer:
        monkeypatch.setattr(library.records, "commit", kill)
        with pytest.raises(KilledError):
            making.fill(writer)
    monkeypatch.undo()
    library.close()
    forget_a_record(catalog_of(library))
    mend_catalog(library.path, "lmdb")
    with memstore.open(library.path) as store:
        assert store.names() == ["esther", "ruth"] and store["esther"].manifest == old
        making.check(store["esther"], "open")


@pytest.mark.parametrize("last", ["a note", "a removal", "an update"])
def test_where_only_the_state_before_the_last_can_be_read_copies_are_newer(library: MemoryStore, last: str) -> None:
    making.write(library, "ruth")
    old = making.write(library).manifest
    if last == "a note":
        library.set_metadata("esther", {"year": 1})
    elif last == "a removal":
        del library["esther"]
    else:
        with library.create(making.manifest(document_digest="1"), making.document(), old) as writer:
            making.fill(writer)
    library.close()
    data = bytearray(catalog_of(library).read_bytes())
    newest = max((meta(bytes(data[i * 4096 : (i + 1) * 4096]), i) for i in (0, 1)), key=lambda each: each.transaction)
    data[newest.root * 4096 : (newest.root + 1) * 4096] = bytes(4096)
    catalog_of(library).write_bytes(data)
    (said,) = mend_catalog(library.path, "lmdb")
    assert "Its last state could not be read, but the one before" in said
    with memstore.open(library.path) as store:
        assert catalog.strays(store.records) == []
        assert all(result.ok for result in store.verify())
        if last == "a removal":
            assert store.names() == ["ruth"]
        else:
            esther = store["esther"].manifest
            assert (esther.metadata == {"year": 1}) if last == "a note" else (esther.document_digest == "1")


def test_a_memory_known_in_both_states_is_not_written_over(library: MemoryStore) -> None:
    memory = making.write(library)
    draft = memory.manifest.model_copy(update={"digest": None, "seal": None})
    library.records.commit({key(PENDING, "esther"): draft.pack()})
    new = making.manifest(metadata={"year": 1})
    with library.create(new, making.document(), memory.manifest) as writer:
        assert (writer.manifest.id, writer.num_done) == (new.id, 0)
        making.check(making.fill(writer), "open")
    assert library.records.memory_ids() == [new.id]


def test_what_is_unfinished_and_cannot_be_read_is_left_to_its_writer(library: MemoryStore) -> None:
    old = making.write(library).manifest
    with library.create(making.manifest(document_digest="1"), making.document(), old) as writer:
        making.append(writer)
        value = library.records.get(key(PENDING, "esther"))
        assert value is not None
        library.records.commit({key(PENDING, "esther"): b"\xc1"})
        pending.give_up(library, "esther")
        assert writer.manifest.id in library.records.memory_ids()
        with pytest.raises(MemoryBusyError):
            pending.drop(library.records, "esther")
        library.records.commit({key(PENDING, "esther"): value})
        making.check(making.fill(writer), "open")


def test_a_record_of_a_newer_version_does_not_keep_locks_from_going(library: MemoryStore) -> None:
    fields = {**making.manifest("newer").fields(), "format_minor": FORMAT_MINOR + 1, "more": True}
    library.records.commit({key(PENDING, "newer"): msgpack.packb(fields)})
    library.close()
    (library.path / "locks").mkdir(exist_ok=True)
    for memory_id in ("0" * 32, fields["id"]):  # as killed processes leave them
        (library.path / "locks" / f"{memory_id}.lock").touch()
    with memstore.open(library.path) as store:
        assert store.records.lock_names() == [fields["id"]]


def test_an_unfinished_update_goes_with_a_memory_that_cannot_be_read(library: MemoryStore) -> None:
    old = making.write(library).manifest
    library.create(making.manifest(document_digest="1"), making.document(), old).close()
    fields = {**old.fields(), "format_minor": FORMAT_MINOR + 1, "more": True}
    library.records.commit({key(SEALED, "esther"): msgpack.packb(fields)})
    del library["esther"]
    assert (library.records.memory_ids(), library.unfinished()) == ([], [])


def test_a_memory_that_a_mended_catalog_knows_as_begun_too_outlives_the_draft(library: MemoryStore) -> None:
    memory = making.write(library)
    packed = memory.manifest.model_copy(update={"digest": None, "seal": None}).pack()
    library.records.commit({key(PENDING, "esther"): packed})
    before = making.contents(memory)
    new = making.manifest("esther", document_digest="1")
    library.create(new, making.document(), memory.manifest).close()
    assert making.contents(library["esther"]) == before
    del library["esther"]
    assert (library.names(), list(library.path.glob("memories/*"))) == ([], [])


def test_what_was_removed_unread_stays_away_and_gives_its_space_back(library: MemoryStore) -> None:
    making.write(library)
    making.write(library, "ruth")
    library.close()
    change_a_manifest(catalog_of(library))
    with memstore.open(library.path) as store:
        with pytest.raises(DamagedMemoryError):
            store["esther"]
        del store["esther"]
        assert len(list(store.path.glob("memories/*"))) == 1
        lose_all(store)
    with memstore.open(library.path) as store:
        assert store.names() == ["ruth"]


def test_a_writer_that_finds_its_memory_removed_leaves_no_copy(library: MemoryStore) -> None:
    with library.create(making.manifest(), making.document()) as writer:
        library.records.commit({}, [key(PENDING, "esther")])
        with pytest.raises(StoreError, match="was removed while"):
            making.fill(writer)
    assert copies(library) == []


def test_a_memory_whose_copy_cannot_be_written_is_finished_by_the_next_writer(
    library: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(memory_id: str, records: dict[bytes, bytes]) -> None:
        if key(SEALED, "esther") in records:
            raise StoreFullError("no space")

    monkeypatch.setattr(library.records, "copy", fail)
    with pytest.raises(StoreFullError):
        making.write(library)
    assert (library.names(), copies(library)) == ([], [])
    monkeypatch.undo()
    with library.create(making.manifest(), making.document()) as writer:
        assert writer.num_done == making.TOKENS
        making.check(making.fill(writer))
    (copy,) = copies(library)
    copy.unlink()
    library.verify(repair=True)
    assert copies(library) == [copy]
