"""The contract of a record store: :class:`memstore.interfaces.RecordStore`."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgpack
import numpy as np
import pytest

from memstore.errors import (
    DamagedMemoryError,
    ReadOnlyStoreError,
    StoreBusyError,
    StoreError,
    StoreInUseError,
    StoreNotFoundError,
)
from memstore.interfaces import Buffer, Mode, RecordStore
from memstore.testing.checks import refused
from memstore.testing.processes import in_a_killed_process, in_another_process
from memstore.testing.record_steps import (
    CAPACITY,
    ID,
    OTHER,
    VALUES,
    begin,
    count,
    is_busy,
    open_and_count,
    open_store,
    read_all,
    together,
)

Result = TypeVar("Result")


class RecordStoreContract:
    """All that :class:`memstore.interfaces.RecordStore` promises. Set ``records``, in a class whose name begins Test.

    options: of the record store.
    """

    records: ClassVar[type[RecordStore]]
    options: ClassVar[Mapping[str, Any]] = {}

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        """Where the store is."""
        return tmp_path / "store"

    @pytest.fixture
    def store(self, path: Path) -> Iterator[RecordStore]:
        """An empty store."""
        store = self.open(path)
        yield store
        store.close()

    def test_the_catalog_keeps_what_is_committed(self, store: RecordStore, path: Path) -> None:
        assert store.get(b"a") is None, "A key that was never put has a value."
        assert store.commit({b"a": b"1", b"b": b"", b"c": bytes(3000)}), "A commit that expects nothing failed."
        assert store.get(b"a") == b"1", "get does not return what was committed."
        assert isinstance(store.get(b"a"), bytes), "get must return bytes."
        assert store.get(b"b") == b"", "An empty value must be kept as one, not as None."
        assert store.commit({b"a": b"2"}, [b"b", b"missing"]), "Deleting a key that is missing must do nothing."
        assert store.items(b"") == [(b"a", b"2"), (b"c", bytes(3000))], "A commit must put and delete what it says."
        second = self.open(path)
        assert second.get(b"a") == b"2", "The same path opened again must show what was committed."
        second.close()
        assert store.get(b"a") == b"2", "Closing one of two stores of a path must not close the other."

    def test_items_are_those_of_a_prefix_in_byte_order(self, store: RecordStore) -> None:
        keys = [b"m2", b"m", b"n", b"m\xff", b"l", b"m\0", b"m10"]
        store.commit({key: b"of " + key for key in keys})
        due = [(key, b"of " + key) for key in (b"m", b"m\0", b"m10", b"m2", b"m\xff")]
        assert store.items(b"m") == due, f"items(b'm') gave {store.items(b'm')}, and should give {due}."
        assert [key for key, _ in store.items(b"")] == sorted(keys), "items(b'') must give all keys in byte order."
        assert store.items(b"o") == [], "items of a prefix that no key has must be none."

    def test_a_commit_that_expects_other_values_changes_nothing(self, store: RecordStore) -> None:
        store.commit({b"a": b"1", b"b": b""})
        for expect in ({b"a": b"0"}, {b"a": None}, {b"a": b"1", b"c": b"0"}, {b"b": None}):
            changed = store.commit({b"a": b"2", b"c": b"3"}, [b"b"], expect)
            assert not changed, f"A commit that expects {expect} must return False."
            assert store.items(b"") == [(b"a", b"1"), (b"b", b"")], "A commit that returned False changed something."
        assert store.commit({b"a": b"2"}, [b"b"], {b"a": b"1", b"c": None, b"b": b""}), "All was as expected."
        assert store.items(b"") == [(b"a", b"2")], "A commit whose expectations hold must be carried out."

    def test_commits_of_threads_and_processes_lose_nothing(self, store: RecordStore, path: Path) -> None:
        store.commit({b"n": b"0"})
        together(lambda: count(store), lambda: count(store), lambda: self.elsewhere(open_and_count, path))
        assert store.get(b"n") == b"90", f"90 steps that each expect the one before counted {store.get(b'n')!r}."

    def test_no_reader_sees_half_of_a_commit(self, store: RecordStore) -> None:
        store.commit({b"a": b"0", b"b": b"0"})
        seen: list[list[tuple[bytes, bytes]]] = []

        def look() -> None:
            while len(seen) < 50:
                seen.append(store.items(b""))

        together(look, lambda: [store.commit({b"a": b"%d" % i, b"b": b"%d" % i}) for i in range(50)])
        assert all(a == b for (_, a), (_, b) in seen), "items returned a part of a commit."

    def test_records_are_read_as_they_were_written(self, store: RecordStore) -> None:
        writer = store.writer(ID, CAPACITY)
        writer.put(VALUES)
        floats = array("f", [1.5, 2.5])
        kinds: dict[bytes, Buffer] = {b"1": bytearray(b"x"), b"2": memoryview(b"xyz")[1:], b"3": memoryview(floats)}
        writer.put(kinds)
        writer.put({b"1": b"replaced"})
        due = {**VALUES, b"1": b"replaced", b"2": b"yz", b"3": floats.tobytes()}
        assert list(writer.keys()) == sorted(due), "A writer's keys must be all that were put, in byte order."
        assert {key: writer.get(key) for key in due} == due, "A writer must return what was put, as bytes."
        assert writer.get(b"missing") is None, "A writer's get of a key that is missing must be None."
        reader = store.reader(ID, writer.seal())
        assert list(reader.keys()) == sorted(due), "A reader's keys must be all that were put, in byte order."
        for key, value in due.items():
            assert reader.get(key) == value, f"The record of {len(value)} bytes at {key!r} is not read as written."
        with refused(DamagedMemoryError, "get of a key that is missing"):
            reader.get(b"missing")
        reader.close()

    def test_what_was_put_is_there_for_the_next_writer(self, store: RecordStore, path: Path) -> None:
        for part in (b"a", b"b"):
            writer = store.writer(ID, CAPACITY)
            writer.put({part: part})
            writer.close()
            with refused(StoreError, "put after close"):
                writer.put({b"c": b"c"})
        writer = self.open(path).writer(ID, CAPACITY)
        assert list(writer.keys()) == [b"a", b"b"], "What one writer put must be there for the next."
        reader = store.reader(ID, writer.seal())
        assert bytes(reader.get(b"a")) == b"a", "What the first writer put is not read."
        reader.close()
        with refused(StoreError, "put after seal"):
            writer.put({b"c": b"c"})

    def test_a_seal_can_be_kept_and_shows_damage(self, store: RecordStore) -> None:
        seal = self.sealed(store)
        assert isinstance(seal["nbytes"], int), 'A seal must give the space taken, as "nbytes".'
        kept = msgpack.unpackb(msgpack.packb(seal))
        store.reader(ID, kept).close()
        with refused(DamagedMemoryError, "A reader of records that have another size than was sealed"):
            store.reader(ID, {**kept, "nbytes": kept["nbytes"] + 1})
        with refused(DamagedMemoryError, "A reader of records that are missing"):
            store.reader(OTHER, kept)

    def test_views_are_aligned_and_outlive_reader_removal_and_store(self, path: Path) -> None:
        store = self.open(path)
        reader = store.reader(ID, self.sealed(store))
        views = {key: reader.get(key) for key in VALUES}
        for view in views.values():
            assert isinstance(view, memoryview), f"get returned {type(view).__name__}, and must return a memoryview."
            assert view.readonly, "A view must be read-only: nothing that was sealed may change."
            address = np.frombuffer(view, np.uint8).ctypes.data if len(view) else 0
            assert address % 16 == 0, f"The record of {len(view)} bytes does not begin at a multiple of 16."
        store.delete(ID)
        assert reader.get(b"value 500") == VALUES[b"value 500"], "A reader must go on reading after delete."
        reader.close()
        reader.close()
        with refused(StoreError, "get after close"):
            reader.get(b"value 500")
        store.close()
        del reader, store
        assert views == VALUES, "Views must keep their bytes after close and delete."

    def test_memories_are_listed_and_deleted(self, store: RecordStore) -> None:
        assert store.memory_ids() == [], "An empty store has memory_ids."
        self.sealed(store)
        store.writer(OTHER, CAPACITY).close()
        assert sorted(store.memory_ids()) == [ID, OTHER], "memory_ids must list memories, sealed or not."
        for memory_id in (OTHER, ID, ID):
            store.delete(memory_id)
            assert memory_id not in store.memory_ids(), "memory_ids must not list what was deleted."
        seal = self.sealed(store, {b"a": b"new"})
        reader = store.reader(ID, seal)
        assert list(reader.keys()) == [b"a"], "What was deleted must not come back when its id is used again."
        reader.close()

    def test_a_store_in_use_is_not_closed(self, store: RecordStore) -> None:
        writer = store.writer(ID, CAPACITY)
        with refused(StoreInUseError, "close while a writer is open"):
            store.close()
        writer.put(VALUES)
        reader = store.reader(ID, writer.seal())
        with refused(StoreInUseError, "close while a reader is open"):
            store.close()
        assert reader.get(b"value 1") == VALUES[b"value 1"], "A close that was refused must change nothing."
        reader.close()
        store.close()
        store.close()
        with refused(StoreError, "get after close"):
            store.get(b"a")

    def test_a_lock_lets_one_in(self, store: RecordStore, path: Path) -> None:
        lock, other = store.lock("some-name-1", wait=False), store.lock("some-name-2", wait=False)
        with refused(StoreBusyError, "A lock that is held"):
            store.lock("some-name-1", wait=False)
        assert self.elsewhere(is_busy, path, "some-name-1"), "Another process took a lock that is held."
        done: list[str] = []

        def wait() -> None:
            waited = store.lock("some-name-1", wait=True)
            done.append("taken")
            waited.release(discard=True)

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        done.append("released")
        lock.release()
        waiting.join(60)
        assert done == ["released", "taken"], "A thread that waits must take the lock once it is released, not before."
        again = store.lock("some-name-1", wait=False)
        lock.release()
        with refused(StoreBusyError, "A lock that is held, when one that held it before is released twice"):
            store.lock("some-name-1", wait=False)
        again.release()
        other.release(discard=True)
        store.lock("some-name-2", wait=False).release()

    def test_a_folder_goes_with_its_memory(self, store: RecordStore) -> None:
        assert store.folder(ID) is None, "A memory that does not exist has no folder."
        seal = self.sealed(store)
        folder = store.folder(ID)
        if folder is None:  # where nothing is kept on disk
            return
        assert folder.is_dir(), "folder must return a folder that exists."
        (folder / "index").write_bytes(b"1")
        self.sealed(store, memory_id=OTHER)
        assert store.folder(OTHER) != folder, "Each memory must have a folder of its own."
        store.reader(ID, seal).close()
        store.delete(ID)
        assert not folder.exists(), "delete must remove what was put into the folder."

    def test_reading_needs_a_store_and_changes_nothing(self, path: Path) -> None:
        with refused(StoreNotFoundError, 'Opening with mode="r" where there is no store'):
            self.open(path, "r")
        assert not path.exists(), 'Opening with mode="r" must create nothing.'
        store = self.open(path)
        store.commit({b"a": b"1"})
        seal = self.sealed(store)
        reading = self.open(path, "r")
        reader = reading.reader(ID, seal)
        assert reading.get(b"a") == b"1", 'mode="r" must read the catalog.'
        assert reader.get(b"value 500") == VALUES[b"value 500"], 'mode="r" must read records.'
        reader.close()
        changes: dict[str, Callable[[], Any]] = {
            "commit": lambda: reading.commit({b"a": b"2"}),
            "writer": lambda: reading.writer(OTHER, CAPACITY),
            "delete": lambda: reading.delete(ID),
        }
        for name, change in changes.items():
            with refused(ReadOnlyStoreError, f'{name} of a store opened with mode="r"'):
                change()
        assert (store.get(b"a"), store.memory_ids()) == (b"1", [ID]), 'A store opened with mode="r" changed something.'
        reading.close()
        store.close()

    def test_another_process_reads_what_was_written(self, path: Path) -> None:
        self.need_persistent()
        store = self.open(path)
        store.commit({b"a": b"1"})
        seal = self.sealed(store)
        read = self.elsewhere(read_all, path, seal)
        assert read == ([(b"a", b"1")], VALUES), "Another process does not read what was written, while it is open."
        store.close()
        assert self.elsewhere(read_all, path, seal) == read, (
            "Another process does not read what was written and closed."
        )

    def test_a_process_that_is_killed_keeps_what_it_put_and_holds_no_lock(self, path: Path) -> None:
        self.need_persistent()
        in_a_killed_process(begin, (self.records, self.options, path))
        store = self.open(path)
        store.lock("writing", wait=False).release()
        assert store.get(b"a") == b"1", "What a process committed before it was killed is lost."
        writer = store.writer(ID, CAPACITY)
        assert {key: writer.get(key) for key in list(writer.keys())} == VALUES, "What a killed process put is lost."
        writer.close()
        store.close()

    def open(self, path: Path, mode: Mode = "a") -> RecordStore:
        """The store at ``path``."""
        return open_store((self.records, self.options, path), mode)

    def sealed(
        self, store: RecordStore, values: Mapping[bytes, Buffer] = VALUES, memory_id: str = ID
    ) -> Mapping[str, Any]:
        """The seal of a memory that is written with these values."""
        writer = store.writer(memory_id, CAPACITY)
        writer.put(values)
        return writer.seal()

    def elsewhere(self, function: Callable[..., Result], path: Path, *arguments: Any) -> Result:
        """Call a function in another process, or in another thread where no other process can see the store."""
        opener = (self.records, self.options, path)
        if self.records.persistent:
            return in_another_process(function, opener, *arguments)
        return together(lambda: function(opener, *arguments))[0]

    def need_persistent(self) -> None:
        """Skip a test of what is promised for later processes."""
        if not self.records.persistent:
            pytest.skip(f"{self.records.__name__} is not persistent")
