"""``verify`` finds every damaged block, and a damaged catalog is made whole. Nothing here loads torch."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import lmdb
import msgpack
import pytest

import memstore
from memstore import catalog, pending, verify
from memstore.catalog import PENDING, SEALED, key, strays
from memstore.errors import (
    DamagedMemoryError,
    FormatError,
    MemoryBusyError,
    StoreBusyError,
    StoreError,
    StoreFullError,
    StoreInUseError,
)
from memstore.manifest import FORMAT_MINOR
from memstore.memory import Document
from memstore.repair import mend_catalog
from memstore.store import MemoryStore
from memstore.values import block_key
from memstore_backends import lmdb_mend
from memstore_backends.lmdb_pages import meta
from tests.faults.harming import damage, data_of
from tests.store import making


def test_verify_finds_every_damaged_block(library: MemoryStore) -> None:
    memory = making.write(library)
    making.write(library, "ruth")
    damage(memory, *(block_key("large", i) for i in (1, 3, 4)))  # smaller values lie in the structure
    esther, ruth = library.verify()
    assert (esther.ok, ruth.ok, ruth.problems) == (False, True, [])
    found = [f"block {i} of 'large'" for i in (1, 3, 4)]
    assert esther.problems == [f"The bytes of {what} differ from those written." for what in found]


def test_what_is_removed_or_replaced_while_it_is_verified_is_not_damaged(
    library: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("esther", "gone", "ruth"):
        making.write(library, name)

    def late(store: MemoryStore, ids: list[str]) -> Any:
        if "gone" in library:
            del library["gone"]
            old = library["esther"].manifest
            with library.create(making.manifest(document_digest="1"), making.document(), old) as writer:
                making.fill(writer)
        return run(store, ids)

    run = verify._run
    monkeypatch.setattr(verify, "_run", late)
    assert [(result.name, result.ok) for result in library.verify()] == [("esther", True), ("ruth", True)]


def test_a_memory_of_a_newer_version_is_told_and_the_others_are_verified_and_mended(library: MemoryStore) -> None:
    making.write(library)
    manifest = making.write(library, "newer").manifest
    fields = {**manifest.fields(), "format_minor": FORMAT_MINOR + 1, "more": True}
    library.records.commit({key(SEALED, "newer"): msgpack.packb(fields)})
    for repair in (False, True):
        esther, newer = library.verify(repair=repair)
        assert (esther.ok, newer.ok) == (True, False)
        assert "Install the version that wrote it" in newer.problems[0]
    del library["newer"]
    assert len(list(library.path.glob("memories/*"))) == 1


@pytest.mark.parametrize(
    ("metadata", "way_out"),
    [
        ({}, "remove the memory and encode its document again."),
        ({"source": 3}, "remove the memory and encode its document again."),
        (
            {"source": "/a b/esther.txt"},
            "remove the memory, and `memstore index '/a b/esther.txt'` reads /a b/esther.txt again.",
        ),
        (
            {"source": "/b/x.txt"},
            "remove the memory, and `memstore index /b/x.txt --name esther` reads /b/x.txt again.",
        ),
        (
            {"source": "/b/esther.txt", "folder": "/b"},
            "remove the memory, and `memstore sync /b` reads /b/esther.txt again.",
        ),
    ],
    ids=str,
)
def test_a_memory_whose_text_is_damaged_too_is_left_and_says_so(
    library: MemoryStore, metadata: dict[str, Any], way_out: str
) -> None:
    memory = making.write(library, metadata=metadata)
    damage(memory, block_key("large", 0), b"dtext")
    harms = [
        ("its structure has changed", lambda: None),
        ("it has 100 bytes", lambda: os.truncate(data_of(memory), 100)),
    ]
    for what, harm in (*harms, ("it is missing", data_of(memory).unlink)):
        harm()
        (result,) = library.verify(repair=True)
        damaged, last = result.problems
        assert damaged.startswith(f"{data_of(memory)} is damaged: {what}") and damaged.endswith(".")
        assert "`" not in damaged and "emove" not in damaged  # no other advice than what can be done
        assert last == f"It cannot be rebuilt, because the text cannot be read either: {way_out}"
    assert library.names() == ["esther"]


def test_what_is_damaged_beyond_rebuilding_is_told_by_name_where_it_was_no_text(library: MemoryStore) -> None:
    ids = making.manifest("ids", has_text=False)
    with library.create(ids, Document(None, making.document().token_ids)) as writer:
        damage(making.fill(writer), block_key("large", 0), b"dids")
    features = making.manifest("features", has_text=False, has_ids=False)
    with library.create(features, Document()) as writer:
        damage(making.fill(writer), block_key("large", 0))
    why = ("its document, which was no text, is not kept", "the token ids cannot be read either")
    for result, reason in zip(library.verify(repair=True), why, strict=True):
        way_out = "remove the memory and encode its document again."
        assert result.problems[-1] == f"It cannot be rebuilt, because {reason}: {way_out}"


def catalog_of(library: MemoryStore) -> Path:
    return library.path / "catalog" / "data.mdb"


def lose(data: Path) -> None:
    data.unlink()


def fill_with_zeros(data: Path) -> None:
    data.write_bytes(bytes(data.stat().st_size))


def cut(data: Path) -> None:
    os.truncate(data, 8192)


def lose_the_folder(data: Path) -> None:
    shutil.rmtree(data.parent)


def forget_a_record(data: Path) -> None:
    whole = data.read_bytes()
    data.write_bytes(whole.replace(key(SEALED, "ruth"), b"l" + key(SEALED, "ruth")[1:]))


def change_a_manifest(data: Path) -> None:
    data.write_bytes(data.read_bytes().replace(b"esther", b"eskher"))


@pytest.mark.parametrize("harm", [lose, lose_the_folder, fill_with_zeros, cut, forget_a_record, change_a_manifest])
def test_a_damaged_catalog_is_made_whole_from_copies(library: MemoryStore, harm: Any) -> None:
    for name in ("esther", "gone", "ruth"):
        making.write(library, name)
    before = {name: library[name].manifest for name in ("esther", "ruth")}
    values = {name: making.contents(library[name]) for name in before}
    del library["gone"]
    library.close()
    harm(catalog_of(library))
    with (
        pytest.raises((DamagedMemoryError, FormatError), match="verify --repair"),
        memstore.open(library.path) as store,
    ):
        store.names()
    (done,) = mend_catalog(library.path, "lmdb")
    assert "restored from copies" in done
    assert mend_catalog(library.path, "lmdb") == []
    with memstore.open(library.path) as store:
        assert store.names() == ["esther", "ruth"]
        for name, manifest in before.items():
            assert store[name].manifest == manifest
            assert making.contents(store[name]) == values[name]
        making.write(store, "job")
    kept = list(catalog_of(library).parent.glob("damaged-*.mdb"))
    assert len(kept) == (harm not in (lose, lose_the_folder)) == ("is kept as" in done)


def test_a_catalog_that_another_process_was_just_writing_is_not_replaced(
    library: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    making.write(library)
    library.close()
    readable = lmdb_mend._readable

    def torn(data: Path) -> Any:
        monkeypatch.setattr(lmdb_mend, "_readable", readable)
        before = readable(data)
        with memstore.open(library.path) as store:
            making.write(store, "ruth")
        return before[0], "a page was being written", False

    monkeypatch.setattr(lmdb_mend, "_readable", torn)
    assert mend_catalog(library.path, "lmdb") == []
    with memstore.open(library.path) as store:
        assert store.names() == ["esther", "ruth"]


def test_what_is_no_copy_is_passed_over(library: MemoryStore) -> None:
    records = [making.write(library, name) for name in ("esther", "ruth", "tobit")]
    copies = [data_of(memory).with_name("record") for memory in records]
    for copy in copies[:2]:
        copy.unlink()
    copies[0].mkdir()
    os.mkfifo(copies[1])  # which nobody writes to
    results = {result.name: result for result in library.verify(repair=True)}
    assert all(result.ok for result in results.values())
    assert "The copy of its record was not renewed" in results["esther"].unrepaired[0] and copies[1].is_file()
    copies[1].unlink()
    os.mkfifo(copies[1])
    library.close()
    lose(library.path / "catalog" / "data.mdb")
    (done,) = mend_catalog(library.path, "lmdb")
    assert "1 were restored" in done
    with memstore.open(library.path) as store:
        assert store.names() == ["tobit"]


def test_nothing_is_mended_where_there_is_no_store(tmp_path: Path) -> None:
    assert mend_catalog(tmp_path / "missing", "lmdb") == [] == mend_catalog(tmp_path, "lmdb")
    assert list(tmp_path.iterdir()) == []


def test_a_catalog_is_not_mended_while_it_is_in_use(library: MemoryStore) -> None:
    making.write(library)
    with pytest.raises(StoreInUseError):
        mend_catalog(library.path, "lmdb")
    library.close()
    holder = making.child(
        "import sys, memstore\nstore = memstore.open(sys.argv[1])\nprint('open', flush=True)\nsys.stdin.read()",
        library.path,
        stdin=-1,
    )
    assert holder.stdout is not None and holder.stdout.readline() == "open\n"
    forget = catalog_of(library).read_bytes()
    fill_with_zeros(catalog_of(library))
    try:
        with pytest.raises(StoreBusyError, match="End all"):
            mend_catalog(library.path, "lmdb")
        assert not any(catalog_of(library).read_bytes())
    finally:
        holder.communicate()
    catalog_of(library).write_bytes(forget)
    with memstore.open(library.path) as store:
        assert store.names() == ["esther"]


def copies(library: MemoryStore) -> list[Path]:
    return list(library.path.glob("memories/*/record"))


def lose_all(library: MemoryStore) -> None:
    """Lose the catalog and mend it, so that there is what copies say."""
    library.close()
    catalog_of(library).unlink()
    mend_catalog(library.path, "lmdb")


def test_who_opens_a_store_while_it_is_mended_waits_for_it(
    library: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """liblmdb finds no lock file that it knows where the one that mends has just forgotten it."""
    making.write(library)
    library.close()
    tried, opened = [], lmdb.open

    def late(*arguments: Any, **options: Any) -> Any:
        tried.append(options["lock"])
        if len(tried) == 1:
            raise lmdb.InvalidError("MDB_INVALID: File is not an LMDB file")
        return opened(*arguments, **options)

    monkeypatch.setattr(lmdb, "open", late)
    with memstore.open(library.path) as store:
        assert store.names() == ["esther"] and tried[:2] == [True, True]


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


@pytest.mark.parametrize("step", ["the old file is kept", "all is done"])
def test_what_a_killed_mending_left_goes_when_the_store_is_opened(
    library: MemoryStore, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    making.write(library)
    library.close()
    cut(catalog_of(library))
    left = library.path / "catalog" / "new"
    tidy = lmdb_mend.tidy
    with monkeypatch.context() as patched, pytest.raises(KilledError):
        if step == "all is done":
            patched.setattr(lmdb_mend, "tidy", lambda folder: kill() if left.exists() else tidy(folder))
        else:
            patched.setattr(lmdb_mend, "_keep", kill)
        lmdb_mend.mend(library.path)
    assert left.is_dir()
    mend_catalog(library.path, "lmdb")
    with memstore.open(library.path) as store:
        assert store.names() == ["esther"] and not left.exists()


class KilledError(BaseException):
    """Stands for the end of the process."""


def kill(*_: Any) -> Any:
    raise KilledError


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


def test_a_catalog_that_is_whole_once_it_is_alone_is_left(
    library: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    making.write(library)
    library.close()
    before = catalog_of(library).read_bytes()

    def seen(data: Path) -> Any:
        first.append(data)
        return ({}, "another process was writing", False) if len(first) == 1 else readable(data)

    first: list[Path] = []
    readable = lmdb_mend._readable
    monkeypatch.setattr(lmdb_mend, "_readable", seen)
    assert mend_catalog(library.path, "lmdb") == []
    assert len(first) == 2
    assert catalog_of(library).read_bytes() == before


def test_who_waited_to_open_a_catalog_does_not_go_by_the_lock_file_of_the_one_before(library: MemoryStore) -> None:
    making.write(library)
    library.close()
    lose(catalog_of(library))
    lmdb_mend.mend(library.path)
    assert not any((library.path / "catalog" / "lock.mdb").read_bytes()[:20])
    assert mend_catalog(library.path, "lmdb") == ["The catalog had lost its format record, which was written anew."]
    with memstore.open(library.path) as store:
        assert store.names() == ["esther"]


def test_what_the_catalog_says_nothing_of_is_a_stray(library: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("esther", "gone", "lost"):
        making.write(library, name)
    library.create(making.manifest("begun"), making.document()).close()
    with monkeypatch.context() as patched, pytest.raises(KilledError):
        patched.setattr(library.records, "delete", kill)
        del library["gone"]
    assert len(library.records.memory_ids()) == 4 and strays(library.records) == []
    lost = library["lost"].manifest
    library.records.commit({}, [key(SEALED, "lost")])
    assert strays(library.records) == [lost.id]
    library.records.commit({key(PENDING, "begun"): b"no manifest"})
    assert strays(library.records) == []  # it might be the one


@pytest.mark.parametrize("change", ["begun", "removed"])
def test_what_is_begun_or_removed_meanwhile_is_no_stray(
    library: MemoryStore, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    making.write(library)
    items = library.records.items

    def late(prefix: bytes) -> list[tuple[bytes, bytes]]:
        before = items(prefix)
        monkeypatch.setattr(library.records, "items", items)
        if change == "begun":
            making.write(library, "ruth")
            return before
        del library["esther"]
        return items(prefix)

    monkeypatch.setattr(library.records, "items", late)
    assert strays(library.records) == []
    assert library.names() == (["esther", "ruth"] if change == "begun" else [])
