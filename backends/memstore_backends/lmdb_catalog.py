"""The catalog of a store: a small LMDB environment, shared by all that have it open in one process."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import lmdb
import lmdb.verify
import xxhash

from memstore.errors import DamagedMemoryError, FormatError, ReadOnlyStoreError, StoreError, StoreFullError
from memstore_backends import mounts

CATALOG_MAP = (
    4 << 30
)  # address space, not disk: the file grows as records come. Enough for a million memories, and a map
MAX_READERS = 1024  #    that is too small grows: in every process while its lock keeps others from reading.
_LOCK_BYTES = 64 * (MAX_READERS + 4)
_CHECKSUM = 16
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn errors of LMDB and of the file system into those of memstore."""
    try:
        yield
    except lmdb.MapFullError as error:
        raise StoreFullError(f"{path} has reached the size it was opened for ({error}).") from error
    except (lmdb.VersionMismatchError, lmdb.InvalidError) as error:
        raise FormatError(f"{path} is not in the format of LMDB 0.9 ({error}). Restore it from a copy.") from error
    except (lmdb.CorruptedError, lmdb.PageNotFoundError) as error:
        raise DamagedMemoryError(f"{path} is damaged ({error}). Restore it from a copy, or remove it.") from error
    except (lmdb.Error, OSError) as error:
        code = error.errno if isinstance(error, OSError) else getattr(error, "code", None)
        if code in _FULL or (code == errno.EIO and _is_full(path)):
            message = f"The disk that holds {path} is full. Free some space and repeat; nothing complete is lost."
            raise StoreFullError(message) from error
        if code in _READ_ONLY and _is_closed(Path(getattr(error, "filename", None) or path)):
            raise StoreError(f"{path} cannot be read ({error}). Ask its owner for the permission.") from error
        if code in _READ_ONLY or isinstance(error, lmdb.ReadonlyError):
            raise ReadOnlyStoreError(f'{path} cannot be written ({error}). Open the store with mode="r".') from error
        raise StoreError(f"{path}: {error}") from error


def _is_full(path: Path) -> bool:
    """LMDB reports EIO when the disk takes only a part of what it writes."""
    disk = os.statvfs(path)
    return disk.f_bavail * disk.f_frsize < 1 << 20


def _is_closed(path: Path) -> bool:
    """Whether permissions forbid even reading it."""
    try:
        path.stat()
    except PermissionError:  # a folder above it is closed
        return True
    except OSError:
        return False
    return not os.access(path, os.R_OK)


class Catalog:
    """Small records, each kept with a checksum over key and value.

    LMDB forbids to open a file twice in one process, so instances are shared: get one with :meth:`acquire` and give it
    back with :meth:`release`. After a fork the child opens the file anew at its first use.
    """

    _shared: ClassVar[dict[tuple[int, int], Catalog]] = {}
    _guard: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, folder: Path, writable: bool) -> None:
        self._folder, self._writable = folder, writable
        self._lock = threading.RLock()
        self._users = 0
        self._check()
        self._open()

    @classmethod
    def acquire(cls, folder: Path, writable: bool) -> Catalog:
        """The catalog in ``folder``, which is created if ``writable``."""
        with cls._guard, translated(folder):
            catalog = cls._shared.get(_identity(folder))
            if catalog is None:
                catalog = cls(folder, writable)
                cls._shared[_identity(folder)] = catalog
            elif writable and not catalog._writable:
                catalog._make_writable()
            if writable:
                # Where a process was killed just after its last commit, readers do not see that commit until a writer
                # comes. An empty transaction writes nothing.
                with catalog._transaction(write=True):
                    pass
            catalog._users += 1
            return catalog

    def _make_writable(self) -> None:
        with self._lock:
            self._env.close()
            try:
                self._writable = True
                self._open()
            except BaseException:
                self._writable = False
                self._open()
                raise

    def release(self) -> None:
        with self._guard, self._lock:
            self._users -= 1
            if self._users == 0:
                self._env.close()
                for key in [key for key, catalog in self._shared.items() if catalog is self]:
                    del self._shared[key]

    def get(self, key: bytes) -> bytes | None:
        with self._transaction() as transaction:
            return _opened(key, transaction.get(key))

    def items(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        found = []
        with self._transaction() as transaction, transaction.cursor() as cursor:
            if cursor.set_range(prefix):
                for key, value in cursor:
                    if not key.startswith(prefix):
                        break
                    found.append((key, _opened(key, value) or b""))
        return found

    def commit(
        self, puts: Mapping[bytes, bytes], deletes: Iterable[bytes], expect: Mapping[bytes, bytes | None]
    ) -> bool:
        deletes = list(deletes)
        while True:
            try:
                with self._transaction(write=True) as transaction:
                    if any(_opened(key, transaction.get(key)) != value for key, value in expect.items()):
                        return False
                    for key in deletes:
                        transaction.delete(key)
                    for key, value in puts.items():
                        transaction.put(key, xxhash.xxh3_128_digest(key + value) + value)
                return True
            except StoreFullError as error:
                if not isinstance(error.__cause__, lmdb.MapFullError):
                    raise
                with self._lock, translated(self._folder):
                    self._env.set_mapsize(2 * self._env.info()["map_size"])

    @contextmanager
    def _transaction(self, write: bool = False) -> Iterator[lmdb.Transaction[bytes]]:
        with self._lock, translated(self._folder), self._begin(write) as transaction:
            yield transaction

    def _begin(self, write: bool) -> lmdb.Transaction[bytes]:
        if self._process != os.getpid():
            self._env.close()
            self._open()
        if write:  # a reader that was killed would hold back the pages it read, and the file would grow for ever
            self._env.reader_check()
        try:
            return self._env.begin(write=write)
        except lmdb.MapResizedError:  # by another process
            self._env.set_mapsize(0)
        except lmdb.ReadersFullError:
            self._env.reader_check()
        return self._env.begin(write=write)

    def _open(self) -> None:
        # Without the lock file a reader does not hold back the pages it reads: a commit of another process during a
        # read may then show as damage. It is given up only where it cannot be had.
        lock_file = self._folder / "lock.mdb"
        lock = self._writable or os.access(lock_file if lock_file.exists() else self._folder, os.W_OK)
        lock = lock and not mounts.is_apart(self._folder)  # where nobody may write
        if lock:
            _allocate(lock_file)
        self._env = lmdb.open(
            str(self._folder),
            map_size=CATALOG_MAP,
            max_readers=MAX_READERS,
            readonly=not self._writable,
            create=self._writable,
            lock=lock,
            lib_version=0,
        )
        self._process = os.getpid()

    def _check(self) -> None:
        """Walk the file without liblmdb, which a damaged page can crash."""
        data = self._folder / "data.mdb"
        for pause in (0.01, 0.04, 0):
            try:
                if self._writable and (not data.exists() or data.stat().st_size == 0):
                    return  # a store that is being created
                problems = lmdb.verify.verify(str(data))
            except lmdb.verify.VerifyError as error:
                problems = [str(error)]
            if not problems:
                return
            time.sleep(pause)  # perhaps another process was writing
        raise DamagedMemoryError(
            f"The catalog {data} is damaged ({problems[0]}). Restore the store from a copy, or remove it and encode "
            "its documents again."
        )


def _allocate(lock_file: Path) -> None:
    """Give the lock file its blocks: LMDB writes to it through a map, which on a full disk would raise SIGBUS.

    Only while this process does not have it open: closing a file drops all POSIX locks that the process has on it.
    """
    fd = os.open(lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        if os.fstat(fd).st_blocks * 512 < _LOCK_BYTES:
            os.posix_fallocate(fd, 0, _LOCK_BYTES)
    finally:
        os.close(fd)


def _identity(folder: Path) -> tuple[int, int]:
    try:
        status = (folder / "data.mdb").stat()
    except FileNotFoundError:
        return (0, 0)
    return status.st_dev, status.st_ino


def _opened(key: bytes, value: bytes | None) -> bytes | None:
    if value is None:
        return None
    if value[:_CHECKSUM] != xxhash.xxh3_128_digest(key + value[_CHECKSUM:]):
        raise DamagedMemoryError(
            f"The catalog record {key.hex()} is damaged. Remove the memory it belongs to and encode its document "
            "again, or restore the store from a copy."
        )
    return value[_CHECKSUM:]
