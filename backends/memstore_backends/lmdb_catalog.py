"""The catalog of a store: a small LMDB environment, shared by all that have it open in one process."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, TypeVar

import lmdb

from memstore.errors import DamagedMemoryError, FormatError, StoreError, StoreFullError
from memstore.interfaces import Buffer
from memstore_backends import mounts
from memstore_backends.lmdb_errors import translated
from memstore_backends.lmdb_lock import prepare
from memstore_backends.lmdb_pages import PageError, is_newer
from memstore_backends.lmdb_problems import problem_of, problem_of_metas
from memstore_backends.lmdb_snapshot import Snapshot
from memstore_backends.lmdb_summary import SUMMARY, Summary, damaged_catalog, opened, sealed

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Address space, not disk: the file grows as records come. It is enough for a million memories; a map that is too small
# grows, in every process while its lock keeps others from reading.
CATALOG_MAP = 4 << 30
MAX_READERS = 1024
_PAUSES = (0, 0.01, 0.04, 0)  # seconds


class Catalog:
    """Small records, each kept with a checksum over key and value, and with them a summary, by which a record that is
    lost, or an older state of the file that shows up again, is noticed.

    LMDB forbids to open a file twice in one process, so instances are shared: get one with :meth:`acquire` and give it
    back with :meth:`release`. After a fork the child opens the file anew at its first use.
    """

    _shared: ClassVar[dict[tuple[int, int], Catalog]] = {}
    _guard: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, folder: Path, writable: bool) -> None:
        self._folder, self._data, self._writable = folder, folder / "data.mdb", writable
        self._lock = threading.RLock()
        self._users = self._size = self._process = 0
        self._env: lmdb.Environment | None = None
        self._fd = -1
        self._walked = False  # whether every page has been found sound, as liblmdb takes for granted when it writes
        self._open()

    @classmethod
    def acquire(cls, folder: Path, writable: bool) -> Catalog:
        """The catalog in ``folder``, which is created if ``writable``."""
        with cls._guard, translated(folder):
            catalog = cls._shared.get(_identity(folder))
            if catalog is None:
                catalog = cls(folder, writable)
                cls._shared[_identity(folder)] = catalog
            catalog._users += 1
            try:
                if writable:
                    catalog._make_writable()
                    # Where a process was killed just after its last commit, readers do not see that commit until a
                    # writer comes. An empty transaction writes nothing.
                    with catalog._transaction(write=True):
                        pass
            except BaseException:
                catalog._leave()
                raise
            return catalog

    @classmethod
    def is_open(cls, folder: Path) -> bool:
        """Whether this process has the catalog in ``folder`` open, even one whose file is no longer there."""
        with cls._guard:
            return _identity(folder) in cls._shared or any(each._folder == folder for each in cls._shared.values())

    @classmethod
    @contextmanager
    def all_waiting(cls) -> Iterator[None]:
        """Inside, no other thread of this process opens or closes a catalog."""
        with cls._guard:
            yield

    def _make_writable(self) -> None:
        with self._lock:
            if self._writable:
                return
            self._close()
            try:
                self._writable = True
                self._open()
            except BaseException:
                self._writable = False
                self._open()
                raise

    def release(self) -> None:
        with self._guard:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._close()
                for key in [key for key, catalog in self._shared.items() if catalog is self]:
                    del self._shared[key]

    def get(self, key: bytes) -> bytes | None:
        def ask(snapshot: Snapshot, number: int) -> bytes | None:
            summary = self._summary(snapshot.get(SUMMARY), number)
            value = opened(self._data, key, snapshot.get(key))
            if value is None and summary is not None:  # rather than that a bit of its key has changed
                summary.check(Summary.of_keys(snapshot.keys(key[:1])), key[:1])
            return value

        return self._read(ask)

    def items(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        def ask(snapshot: Snapshot, number: int) -> list[tuple[bytes, bytes]]:
            summary = self._summary(snapshot.get(SUMMARY), number)
            found = sorted(
                (key, opened(self._data, key, value) or b"") for key, value in snapshot.items(prefix) if key != SUMMARY
            )
            if summary is not None and len(prefix) < 2:  # whole kinds
                summary.check(Summary.of_keys(key for key, _ in found), prefix or summary.kinds)
            return found

        return self._read(ask)

    def commit(
        self, puts: Mapping[bytes, bytes], deletes: Iterable[bytes], expect: Mapping[bytes, bytes | None]
    ) -> bool:
        deletes = list(deletes)
        while True:
            try:
                return self._commit(puts, deletes, expect)
            except StoreFullError as error:
                if not isinstance(error.__cause__, lmdb.MapFullError):
                    raise
                with self._lock, translated(self._folder):
                    env = self._opened()
                    env.set_mapsize(2 * env.info()["map_size"])
                logger.info("the map of %s was full and has been doubled", self._folder)

    def _commit(self, puts: Mapping[bytes, bytes], deletes: list[bytes], expect: Mapping[bytes, bytes | None]) -> bool:
        with self._transaction(write=True) as transaction:
            if not self._walked:  # only here, where nobody else writes
                if problem := problem_of(self._data):
                    raise damaged_catalog(self._data, problem)
                self._walked = True
            if any(opened(self._data, key, transaction.get(key)) != value for key, value in expect.items()):
                return False
            if not puts and not deletes:
                return True
            try:
                summary = self._summary(transaction.get(SUMMARY), transaction.id() - 1)
            except PageError as error:
                raise damaged_catalog(self._data, str(error)) from error
            if summary is None:
                summary = Summary.of_keys(transaction.cursor().iternext(values=False))
            for key in deletes:
                if transaction.delete(key):
                    summary.drop(key)
            for key, value in puts.items():
                if transaction.get(key) is None:
                    summary.add(key)
                transaction.put(key, sealed(key, value))
            transaction.put(SUMMARY, sealed(SUMMARY, summary.pack(transaction.id())))
        return True

    def _summary(self, value: Buffer | None, number: int) -> Summary | None:
        """None where no commit has written one yet. Raises PageError unless transaction ``number`` wrote it."""
        found = opened(self._data, SUMMARY, value)
        return None if found is None else Summary.unpack(found, number)

    def _read(self, ask: Callable[[Snapshot, int], T]) -> T:
        """What ``ask`` finds in the newest state, in which liblmdb itself touches no page of a tree."""
        for pause in _PAUSES:
            try:
                with self._transaction() as transaction:
                    number = transaction.id()
                    return ask(Snapshot(self._fd, number), number)
            except PageError as error:
                problem = damaged_catalog(self._data, str(error))
            except DamagedMemoryError as error:
                problem = error
            time.sleep(pause)  # another process may have committed twice meanwhile, or be writing without the lock file
        raise problem

    @contextmanager
    def _transaction(self, write: bool = False) -> Iterator[lmdb.Transaction[bytes]]:
        with self._lock, translated(self._folder), self._begin(write) as transaction:
            yield transaction

    def _begin(self, write: bool) -> lmdb.Transaction[bytes]:
        env = self._opened()
        status = os.fstat(self._fd)
        if (status.st_dev, status.st_ino) != _identity(self._folder):  # what is written to it now would be lost
            raise StoreError(
                f"{self._data} is not the file that was opened: it has been moved or replaced. Open it anew."
            )
        size = status.st_size
        if size < self._size:  # LMDB never shortens it, and would die of touching what is gone
            raise damaged_catalog(self._data, f"it has been cut to {size} bytes")
        self._size = size
        if write:  # a reader that was killed would hold back the pages it read, and the file would grow for ever
            cleared = env.reader_check()
            if cleared:
                logger.info("cleared %d readers of %s, which were killed", cleared, self._folder)
        try:
            return env.begin(write=write)
        except lmdb.MapResizedError as error:  # by another process, or a damaged meta page only says so
            if problem := problem_of_metas(self._data):
                raise damaged_catalog(self._data, problem) from error
            env.set_mapsize(max(CATALOG_MAP, 2 * size))
        except lmdb.ReadersFullError:
            env.reader_check()
        return env.begin(write=write)

    def _opened(self) -> lmdb.Environment:
        """The environment of this process, opened anew after a fork."""
        if self._env is None or self._process != os.getpid():
            self._close()
            self._open()
        assert self._env is not None
        return self._env

    def _close(self) -> None:
        """A second call does nothing: another file may have the number of the closed descriptor by then."""
        env, self._env = self._env, None
        fd, self._fd = self._fd, -1
        if env is not None:
            env.close()
        if fd >= 0:
            os.close(fd)

    def _open(self) -> None:
        self._check()
        # Without the lock file a reader does not hold back the pages it reads: a commit of another process during a
        # read may then show as damage. It is given up only where it cannot be had.
        lock_file = self._folder / "lock.mdb"
        lock = self._writable or os.access(lock_file if lock_file.exists() else self._folder, os.W_OK)
        lock = lock and not mounts.is_apart(self._folder)  # where nobody may write
        if lock:
            prepare(lock_file, MAX_READERS)
        try:
            self._env = self._environment(lock)
        except lmdb.InvalidError:  # the metas are sound: it waited for the lock file while another process mended
            if lock:
                prepare(lock_file, MAX_READERS)
            self._env = self._environment(lock)
        self._process = os.getpid()
        try:
            self._fd = os.open(self._data, os.O_RDONLY | os.O_CLOEXEC)
            self._size = os.fstat(self._fd).st_size
        except BaseException:
            self._close()
            raise

    def _environment(self, lock: bool) -> lmdb.Environment:
        return lmdb.open(
            os.fsencode(self._folder),  # which may be no text
            map_size=CATALOG_MAP,
            max_readers=MAX_READERS,
            readonly=not self._writable,
            create=self._writable,
            max_spare_txns=0,  # a forked child that closes it takes the slots of its parent's idle transactions away
            lock=lock,
            lib_version=0,
        )

    def _check(self) -> None:
        """Raises FormatError for a file of LMDB 1.0, and DamagedMemoryError for meta pages that could crash liblmdb: it
        reads no others before it writes."""
        problem: str | None = None
        for pause in _PAUSES:
            if self._writable and (not self._data.exists() or self._data.stat().st_size == 0):
                return  # a store that is being created
            problem = problem_of_metas(self._data)
            if problem is None:
                return
            if is_newer(self._data):
                raise FormatError(
                    f"{self._data} is of LMDB 1.0, not in the format of LMDB 0.9. Restore it from a copy."
                )
            time.sleep(pause)  # perhaps another process was writing
        raise damaged_catalog(self._data, problem or "")


def _before_fork() -> None:
    """Let no other thread be inside a catalog: the child would wait for it for ever."""
    Catalog._guard.acquire()
    for catalog in Catalog._shared.values():
        catalog._lock.acquire()


def _after_fork() -> None:
    for catalog in Catalog._shared.values():
        catalog._lock.release()
    Catalog._guard.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


def _identity(folder: Path) -> tuple[int, int]:
    try:
        status = (folder / "data.mdb").stat()
    except FileNotFoundError:
        return (0, 0)
    return status.st_dev, status.st_ino
