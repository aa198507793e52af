"""Records in the memory of this process: nothing touches the disk, and all is gone when the last store is closed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import BaseModel

from memstore.errors import (
    DamagedMemoryError,
    StoreBusyError,
    StoreError,
    StoreFullError,
    StoreInUseError,
    StoreNotFoundError,
)
from memstore.interfaces import Buffer, Lock, Mode, RecordReader, RecordStore, RecordWriter
from memstore.values import describe

ALIGNMENT = 16

Records = dict[bytes, memoryview]  # values are read-only and aligned, and never change


class InMemoryRecords(RecordStore):
    """The records of all stores that this process has open at ``path``."""

    persistent = False

    def __init__(self, path: Path, mode: Mode, options: BaseModel | None = None) -> None:
        super().__init__(path, mode, options)
        self._users: weakref.WeakSet[_Reader | _Writer] = weakref.WeakSet()
        self._content: _Content | None = _Content.acquire(path.resolve(), mode)
        self._release = weakref.finalize(self, self._content.release)  # also for a store that nobody closed

    def get(self, key: bytes) -> bytes | None:
        return self._opened().catalog.get(key)

    def items(self, prefix: bytes) -> list[tuple[bytes, bytes]]:
        content = self._opened()
        with content.guard:
            return sorted(item for item in content.catalog.items() if item[0].startswith(prefix))

    def commit(
        self,
        puts: Mapping[bytes, bytes],
        deletes: Iterable[bytes] = (),
        expect: Mapping[bytes, bytes | None] | None = None,
    ) -> bool:
        content = self._writable()
        copies = {key: bytes(value) for key, value in puts.items()}
        with content.guard:
            if any(content.catalog.get(key) != value for key, value in (expect or {}).items()):
                return False
            for key in deletes:
                content.catalog.pop(key, None)
            content.catalog.update(copies)
        return True

    def writer(self, memory_id: str, capacity: int) -> RecordWriter:
        writer = _Writer(memory_id, self._writable().memories.setdefault(memory_id, {}))
        self._users.add(writer)
        return writer

    def reader(self, memory_id: str, seal: Mapping[str, Any]) -> RecordReader:
        records = self._opened().memories.get(memory_id)
        if records is None or _size(records) != seal["nbytes"]:
            raise DamagedMemoryError(
                f"The records of {memory_id} in {self.path} are not those that were sealed. Remove the memory and "
                "encode its document again."
            )
        reader = _Reader(memory_id, records)
        self._users.add(reader)
        return reader

    def delete(self, memory_id: str) -> None:
        self._writable().memories.pop(memory_id, None)

    def folder(self, memory_id: str) -> Path | None:
        return None

    def lock(self, name: str, wait: bool) -> Lock:
        return _Lock(self._opened().locks, name, wait)

    def memory_ids(self) -> list[str]:
        return sorted(self._opened().memories)

    def close(self) -> None:
        if any(user.is_open for user in self._users):
            raise StoreInUseError(f"A memory of {self.path} is open. Leave its attachment, or close it, first.")
        self._content = None
        self._release()

    def _opened(self) -> _Content:
        if self._content is None:
            raise StoreError(f"The store {self.path} has been closed, and what it held in memory may be gone.")
        return self._content

    def _writable(self) -> _Content:
        self.check_writable()
        return self._opened()


class _Content:
    """What the stores of one path share, for as long as one of them is open."""

    _shared: ClassVar[dict[Path, _Content]] = {}
    _sharing: ClassVar[threading.RLock] = threading.RLock()  # a forgotten store may be collected while it is held

    def __init__(self, path: Path) -> None:
        self.path, self.stores = path, 0
        self.guard = threading.Lock()
        self.catalog: dict[bytes, bytes] = {}
        self.memories: dict[str, Records] = {}
        self.locks = _Locks()

    @classmethod
    def acquire(cls, path: Path, mode: Mode) -> _Content:
        with cls._sharing:
            if mode == "r" and path not in cls._shared:
                raise StoreNotFoundError(
                    f'This process has no store open in memory at {path}. Open it with mode="a", or name the record '
                    "backend that keeps it."
                )
            content = cls._shared.setdefault(path, cls(path))
            content.stores += 1
            return content

    def release(self) -> None:
        with self._sharing:
            self.stores -= 1
            if not self.stores:
                del self._shared[self.path]


class _Locks:
    """The names that are locked, and who waits for a change of them."""

    def __init__(self) -> None:
        self.held: set[str] = set()
        self.changed = threading.Condition()


class _Lock(Lock):
    def __init__(self, locks: _Locks, name: str, wait: bool) -> None:
        with locks.changed:
            while name in locks.held:
                if not wait:
                    raise StoreBusyError(f"This process holds the lock {name} already. Wait for it and repeat.")
                locks.changed.wait()
            locks.held.add(name)
        self._locks, self._name, self._held = locks, name, True

    def release(self, discard: bool = False) -> None:
        with self._locks.changed:
            if self._held:
                self._held = False
                self._locks.held.remove(self._name)
                self._locks.changed.notify_all()


class _Writer(RecordWriter):
    def __init__(self, memory_id: str, records: Records) -> None:
        self._memory_id = memory_id
        self._records: Records | None = records

    @property
    def is_open(self) -> bool:
        return self._records is not None

    def get(self, key: bytes) -> bytes | None:
        value = self._opened().get(key)
        return None if value is None else bytes(value)

    def keys(self) -> Iterator[bytes]:
        return iter(sorted(self._opened()))

    def put(self, records: Mapping[bytes, Buffer]) -> None:
        opened = self._opened()
        try:
            copies = {key: _copied(value) for key, value in records.items()}
        except MemoryError as error:
            raise StoreFullError(
                f"There is no memory left for the records of {self._memory_id}. Free some and repeat, or keep the "
                "store on disk."
            ) from error
        opened.update(copies)

    def seal(self) -> dict[str, Any]:
        nbytes = _size(self._opened())
        self.close()
        return {"nbytes": nbytes}

    def close(self) -> None:
        self._records = None

    def _opened(self) -> Records:
        if self._records is None:
            raise StoreError(f"The records of {self._memory_id} are no longer open for writing.")
        return self._records


class _Reader(RecordReader):
    def __init__(self, memory_id: str, records: Records) -> None:
        self._memory_id = memory_id
        self._records: Records | None = dict(sorted(records.items()))  # not what a later writer changes

    @property
    def is_open(self) -> bool:
        return self._records is not None

    def get(self, key: bytes) -> memoryview:
        records = self._opened()
        if key not in records:
            raise DamagedMemoryError(f"Memory {self._memory_id} lacks {describe(key)}.")
        return records[key]

    def keys(self) -> Iterator[bytes]:
        return iter(self._opened())

    def close(self) -> None:
        self._records = None

    def _opened(self) -> Records:
        if self._records is None:
            raise StoreError(f"Memory {self._memory_id} is no longer open for reading.")
        return self._records


def _copied(value: Buffer) -> memoryview:
    """A copy that begins at a multiple of ALIGNMENT and cannot be written."""
    source = memoryview(value)
    room = np.empty(source.nbytes + ALIGNMENT, dtype=np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    copy = room.data[start : start + source.nbytes]
    if source.nbytes:
        copy[:] = source.cast("B")
    return copy.toreadonly()


def _size(records: Records) -> int:
    return sum(len(key) + value.nbytes for key, value in records.items())
