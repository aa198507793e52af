"""Records in LMDB: one environment for the catalog, one write-once environment per memory.

    <store>/catalog/data.mdb            names, manifests; see lmdb_catalog
    <store>/memories/<id>/data.mdb      the records of one memory; its indexes lie beside it
    <store>/memories/<id>/record        a copy of its catalog record
    <store>/locks/                      who is writing what

**No view can outlive its memory map.** liblmdb unmaps a closed environment whatever still points into it, and it ends
the process when it meets a damaged page. So it only writes a memory; a sealed one is mapped by Python's own ``mmap``,
whose views hold the map by reference counting: a tensor made from a view stays valid after ``close`` of the reader, of
the store, and after the removal of the file. The map is read-only: writing through such a tensor ends the process.
Length and structure are compared with the seal before a view is given out (see ``lmdb_pages``). A file that another
program cuts short while it is mapped still raises SIGBUS, as for every mapped file.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import shutil
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock
import lmdb

from memstore.errors import (
    MEND,
    DamagedMemoryError,
    StoreBusyError,
    StoreError,
    StoreInUseError,
    StoreNotFoundError,
)
from memstore.files import sync
from memstore.interfaces import Buffer, Lock, Mode, Options, RecordReader, RecordStore, RecordWriter
from memstore.values import describe
from memstore_backends import mounts
from memstore_backends.lmdb_catalog import Catalog
from memstore_backends.lmdb_errors import translated
from memstore_backends.lmdb_mend import COPY, copied, mend, tidy, write_copy
from memstore_backends.lmdb_pages import Layout, PageError, scan
from memstore_backends.lmdb_problems import problem_of
from memstore_backends.lmdb_summary import damaged_catalog

_ID = re.compile(r"[0-9a-f]{32}")
_OWN_FOLDERS = {"catalog", "memories", "locks"}


class LmdbRecords(RecordStore):
    """The records of the store at ``path``, which is created if ``mode`` is "a"."""

    def __init__(self, path: Path, mode: Mode, options: Options | None = None) -> None:
        super().__init__(path, mode, options)
        self._memories = path / "memories"
        self._users: weakref.WeakSet[_Reader | _Writer] = weakref.WeakSet()
        catalog = path / "catalog"
        with translated(path):
            data = catalog / "data.mdb"
            if not (data.is_file() and data.stat().st_size) and self.memory_ids():  # LMDB would make an empty one
                raise damaged_catalog(data, "it is missing or empty")
            if path.exists() and not path.is_dir():
                raise StoreError(f"{path} is no folder, and so no store. Choose another path.")
            if not data.is_file():
                if mode == "r":
                    raise StoreNotFoundError(
                        f"There is no store at {path}. Check the path; `memstore index` and memstore.open(…, "
                        'mode="a") create one.'
                    )
                if path.exists() and not {entry.name for entry in path.iterdir()} <= _OWN_FOLDERS:
                    raise StoreError(f"{path} is a folder with other files in it, no store. Choose another path.")
            if mode == "a":
                mounts.check_writable(path)
                for folder in (catalog, self._memories):
                    folder.mkdir(parents=True, exist_ok=True)
                sync(path)
        self._catalog: Catalog | None = Catalog.acquire(catalog, writable=mode == "a")
        if mode == "a":
            tidy(catalog)

    def get(self, key: bytes) -> bytes | None:
        return self._opened().get(key)

    def items(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        return self._opened().items(prefix)

    def commit(
        self,
        puts: Mapping[bytes, bytes],
        deletes: Iterable[bytes] = (),
        expect: Mapping[bytes, bytes | None] | None = None,
    ) -> bool:
        return self._writable().commit(puts, deletes, expect or {})

    def writer(self, memory_id: str, capacity: int) -> RecordWriter:
        self._writable()
        writer = _Writer(self._memories / memory_id, capacity)
        self._users.add(writer)
        return writer

    def reader(self, memory_id: str, seal: Mapping[str, Any]) -> RecordReader:
        self._opened()
        reader = _Reader(self._memories / memory_id / "data.mdb", seal)
        self._users.add(reader)
        return reader

    def delete(self, memory_id: str) -> None:
        self._writable()
        folder = self._memories / memory_id
        with translated(folder):
            while folder.exists():
                try:
                    shutil.rmtree(folder)
                except OSError as error:  # another process is removing it too, or writes an index into it
                    if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                        raise

    def folder(self, memory_id: str) -> Path | None:
        folder = self._memories / memory_id
        return folder if folder.is_dir() else None

    def copy(self, memory_id: str, records: Mapping[bytes, bytes]) -> None:
        self._writable()
        with translated(self._memories):
            write_copy(self._memories / memory_id, records)

    def drop_copy(self, memory_id: str) -> None:
        self._writable()
        with translated(self._memories):
            (self._memories / memory_id / COPY).unlink(missing_ok=True)

    def copied(self, key: bytes) -> list[str]:
        self._opened()
        with translated(self._memories):
            return copied(self._memories, key)

    def salvage(self, memory_id: str, key: bytes) -> bytes | None:
        self._opened()
        data = self._memories / memory_id / "data.mdb"
        try:
            with _file(data) as fd:
                found = _layout(data, fd).values.get(key)
                return None if found is None else os.pread(fd, found[1], found[0])
        except StoreError:
            return None

    @classmethod
    def mend(cls, path: Path) -> list[str]:
        with translated(path):
            return mend(path)

    def lock(self, name: str, wait: bool) -> Lock:
        return FileLock(self.path / "locks" / f"{name}.lock", wait)

    def lock_names(self) -> list[str]:
        folder = self.path / "locks"
        with translated(folder):
            return sorted(path.stem for path in folder.iterdir()) if folder.exists() else []

    def memory_ids(self) -> list[str]:
        with translated(self._memories):
            folders = self._memories.iterdir() if self._memories.exists() else []
            return sorted(folder.name for folder in folders if _ID.fullmatch(folder.name))

    def close(self) -> None:
        if any(user.is_open for user in self._users):
            raise StoreInUseError(f"A memory of {self.path} is open. Leave its attachment, or close it, first.")
        if self._catalog is not None:
            self._catalog.release()
            self._catalog = None

    def _opened(self) -> Catalog:
        if self._catalog is None:
            raise StoreError(f"The store {self.path} has been closed. Open it again with memstore.open().")
        return self._catalog

    def _writable(self) -> Catalog:
        self.check_writable()
        return self._opened()


class FileLock(Lock):
    """A lock that the system releases when the process ends, in whatever way."""

    def __init__(self, path: Path, wait: bool) -> None:
        self._lock = filelock.FileLock(path, timeout=-1 if wait else 0, thread_local=False)
        with translated(path):
            path.parent.mkdir(exist_ok=True)
            try:
                self._lock.acquire()
            except filelock.Timeout as error:
                raise StoreBusyError(f"Another process holds {path}. Wait for it and repeat.") from error

    def release(self, discard: bool = False) -> None:
        if discard:  # while it is held: who waits for this file finds, once it holds it, that all is done
            Path(self._lock.lock_file).unlink(missing_ok=True)
        self._lock.release()


class _Writer(RecordWriter):
    def __init__(self, folder: Path, capacity: int) -> None:
        self._folder, self._data = folder, folder / "data.mdb"
        with translated(folder):
            folder.mkdir(exist_ok=True)
            if self._data.exists() and self._data.stat().st_size and (problem := problem_of(self._data)):
                raise _damaged(self._data, problem)
            self._env: lmdb.Environment | None = lmdb.open(
                os.fsencode(folder),  # which may be no text
                # A value takes up to twice its size where it barely fails to fit into a leaf; unused map costs nothing.
                map_size=2 * capacity + (64 << 20),
                lock=False,  # the store lets one writer in, and readers only after the seal
                meminit=False,
                lib_version=0,  # LMDB 0.9, whose values are 16-byte aligned
            )
            sync(folder)
            sync(folder.parent)

    @property
    def is_open(self) -> bool:
        return self._env is not None

    def get(self, key: bytes) -> bytes | None:
        with translated(self._folder), self._opened().begin() as transaction:
            return transaction.get(key)

    def keys(self) -> Iterator[bytes]:
        with translated(self._folder), self._opened().begin() as transaction, transaction.cursor() as cursor:
            return iter(list(cursor.iternext(values=False)))

    def put(self, records: Mapping[bytes, Buffer]) -> None:
        with translated(self._folder), self._opened().begin(write=True) as transaction:
            for key, value in records.items():
                transaction.put(key, value)

    def seal(self) -> dict[str, Any]:
        self._opened()
        self.close()
        with translated(self._data):
            sync(self._data)
        return {"nbytes": self._data.stat().st_size, "structure": self._layout().digest}

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    def _layout(self) -> Layout:
        with _file(self._data) as fd:
            return _layout(self._data, fd)

    def _opened(self) -> lmdb.Environment:
        if self._env is None:
            raise StoreError(f"The records in {self._folder} are no longer open for writing.")
        return self._env


class _Reader(RecordReader):
    def __init__(self, data: Path, seal: Mapping[str, Any]) -> None:
        self._data = data
        layout, mapped = _mapped(data, seal)
        self._map: mmap.mmap | None = mapped
        self._view = memoryview(mapped)
        self._values = layout.values

    @property
    def is_open(self) -> bool:
        return self._map is not None

    def get(self, key: bytes) -> memoryview:
        if self._map is None:
            raise StoreError(f"{self._data} is no longer open for reading.")
        if key not in self._values:
            raise _damaged(self._data, f"it lacks {describe(key)}")
        start, size = self._values[key]
        if start + size > self._map.size():  # cut since it was opened: touching what is gone would end the process
            raise _damaged(self._data, f"it has been cut to {self._map.size()} bytes")
        view = self._view[start : start + size]
        return view if start % 16 == 0 else memoryview(bytes(view))  # small values lie unaligned inside a leaf page

    def keys(self) -> Iterator[bytes]:
        return iter(self._values)

    def close(self) -> None:
        self._map, self._view = None, memoryview(b"")  # unmapped when the last view of it is gone


def _mapped(data: Path, seal: Mapping[str, Any]) -> tuple[Layout, mmap.mmap]:
    """The layout of a sealed file and a read-only map of it, once its length and structure are those of the seal."""
    with _file(data) as fd:
        size = os.fstat(fd).st_size
        if size != seal["nbytes"]:
            raise _damaged(data, f"it has {size} bytes instead of {seal['nbytes']}")
        layout = _layout(data, fd)
        if layout.digest != seal.get("structure"):
            raise _damaged(data, "its structure has changed")
        return layout, mmap.mmap(fd, size, access=mmap.ACCESS_READ)


def _layout(data: Path, fd: int) -> Layout:
    try:
        return scan(fd)
    except PageError as error:
        raise _damaged(data, str(error)) from error


@contextmanager
def _file(path: Path) -> Iterator[int]:
    with translated(path):
        try:
            fd = os.open(path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise _damaged(path, "it is missing") from error
        try:
            yield fd
        finally:
            os.close(fd)


def _damaged(data: Path, what: str) -> DamagedMemoryError:
    return DamagedMemoryError(f"{data} is damaged: {what}. {MEND}")
