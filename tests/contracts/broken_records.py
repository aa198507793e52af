"""Record stores that each break one promise: the test of the kit that must fail, and what it must say."""

from __future__ import annotations

import contextlib

from memstore.errors import StoreBusyError, StoreInUseError
from memstore.interfaces import Lock, RecordReader
from memstore.testing import RecordStoreContract
from memstore_backends import in_memory
from memstore_backends.in_memory import InMemoryRecords
from memstore_backends.lmdb_records import LmdbRecords

VIEWS = "test_views_are_aligned_and_outlive_reader_removal_and_store"
LOCK = "test_a_lock_lets_one_in"
READ_ONLY = "test_reading_needs_a_store_and_changes_nothing"


class Kit(RecordStoreContract):
    fails: str
    says: str


class Reader(RecordReader):
    """Another reader's records, seen through a function."""

    def __init__(self, inner, see):
        self.inner, self.see, self.given = inner, see, []

    def get(self, key):
        self.given.append(self.see(self.inner.get(key)))
        return self.given[-1]

    def keys(self):
        return self.inner.keys()

    def close(self):
        self.inner.close()


class FileLock(Lock):
    """A file that nobody removes when its process is killed."""

    def __init__(self, path):
        self.path, self.held = path, True
        path.parent.mkdir(exist_ok=True)
        try:
            path.touch(exist_ok=False)
        except FileExistsError as error:
            raise StoreBusyError from error

    def release(self, discard=False):
        if self.held:
            self.path.unlink()
        self.held = False


class TestHopeful(Kit):
    fails, says = "test_a_commit_that_expects_other_values_changes_nothing", "must return False"

    class records(InMemoryRecords):
        def commit(self, puts, deletes=(), expect=None):
            return super().commit(puts, deletes)


class TestHalfHearted(Kit):
    fails, says = "test_a_commit_that_expects_other_values_changes_nothing", "A commit that returned False changed"

    class records(InMemoryRecords):
        def commit(self, puts, deletes=(), expect=None):
            super().commit({}, deletes)
            return super().commit(puts, (), expect)


class TestUnordered(Kit):
    fails, says = "test_items_are_those_of_a_prefix_in_byte_order", "items(b'm') gave"

    class records(InMemoryRecords):
        def items(self, prefix):
            return super().items(prefix)[::-1]


class TestFresh(Kit):
    fails, says = "test_what_was_put_is_there_for_the_next_writer", "What one writer put must be there for the next"

    class records(InMemoryRecords):
        def writer(self, memory_id, capacity):
            self.delete(memory_id)
            return super().writer(memory_id, capacity)


class TestTrusting(Kit):
    fails, says = "test_a_seal_can_be_kept_and_shows_damage", "another size than was sealed: DamagedMemoryError is due"

    class records(InMemoryRecords):
        def reader(self, memory_id, seal):
            records = self._opened().memories[memory_id]
            return super().reader(memory_id, {"nbytes": in_memory._size(records)})


class TestUnaligned(Kit):
    fails, says = VIEWS, "bytes does not begin at a multiple of 16"

    class records(InMemoryRecords):
        def reader(self, memory_id, seal):
            return Reader(super().reader(memory_id, seal), lambda view: memoryview(b"-" + view)[1:])


class TestWritable(Kit):
    fails, says = VIEWS, "A view must be read-only"

    class records(InMemoryRecords):
        def reader(self, memory_id, seal):
            return Reader(super().reader(memory_id, seal), lambda view: memoryview(bytearray(view)))


class TestCopies(Kit):
    fails, says = VIEWS, "get returned bytes, and must return a memoryview"

    class records(InMemoryRecords):
        def reader(self, memory_id, seal):
            return Reader(super().reader(memory_id, seal), bytes)


class TestAbrupt(Kit):
    fails, says = "test_a_store_in_use_is_not_closed", "close while a writer is open: StoreInUseError is due, but noth"

    class records(InMemoryRecords):
        def close(self):
            with contextlib.suppress(StoreInUseError):
                super().close()


class TestHoarding(Kit):
    fails, says = "test_memories_are_listed_and_deleted", "memory_ids must not list what was deleted"

    class records(InMemoryRecords):
        def delete(self, memory_id):
            pass


class TestOpenDoor(Kit):
    fails, says = LOCK, "A lock that is held: StoreBusyError is due, but nothing was raised"

    class records(InMemoryRecords):
        def lock(self, name, wait):
            return in_memory._Lock(in_memory._Locks(), name, wait)


class TestReleasedByAnother(Kit):
    fails, says = LOCK, "when one that held it before is released twice: StoreBusyError is due"

    class records(InMemoryRecords):
        def lock(self, name, wait):
            class Again(in_memory._Lock):
                def release(self, discard=False):
                    self._held = name in self._locks.held
                    super().release()

            return Again(self._opened().locks, name, wait)


class TestLocalLock(Kit):
    fails, says = LOCK, "Another process took a lock that is held"
    locks = in_memory._Locks()

    class records(LmdbRecords):
        def lock(self, name, wait):
            return in_memory._Lock(TestLocalLock.locks, name, wait)


class TestStaleLock(Kit):
    fails, says = "test_a_process_that_is_killed_keeps_what_it_put_and_holds_no_lock", "StoreBusyError"

    class records(LmdbRecords):
        def lock(self, name, wait):
            return FileLock(self.path / "locks" / name)


class TestCreating(Kit):
    fails, says = READ_ONLY, 'Opening with mode="r" must create nothing'

    class records(LmdbRecords):
        def __init__(self, path, mode, options=None):
            path.mkdir(exist_ok=True)
            super().__init__(path, mode, options)


class TestWriting(Kit):
    fails, says = READ_ONLY, 'commit of a store opened with mode="r": ReadOnlyStoreError is due, but nothing was raised'

    class records(InMemoryRecords):
        def __init__(self, path, mode, options=None):
            super().__init__(path, mode, options)
            self.mode = "a"


class TestForgetting(Kit):
    fails, says = "test_another_process_reads_what_was_written", "StoreNotFoundError"

    class records(InMemoryRecords):
        persistent = True


class TestKeptFolder(Kit):
    fails, says = "test_a_folder_goes_with_its_memory", "delete must remove what was put into the folder"

    class records(LmdbRecords):
        def folder(self, memory_id):
            folder = self.path / "locks" / memory_id
            if memory_id in self.memory_ids():
                folder.mkdir(exist_ok=True, parents=True)
                return folder
            return None
