"""What the kit of record stores does in other threads and processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from memstore.errors import StoreBusyError
from memstore.interfaces import Mode, RecordStore

ID, OTHER = "0123456789abcdef" * 2, "f" * 32  # of memories
CAPACITY = 1 << 20
SIZES = [0, 1, 15, 16, 500, 1999, 2000, 4080, 4081, 100_000]
VALUES = {b"value %d" % size: bytes(i % 251 for i in range(size)) for size in SIZES}

Result = TypeVar("Result")
Opener = tuple[type[RecordStore], Mapping[str, Any], Path]  # what another process opens a store by


def together(*functions: Callable[[], Result]) -> list[Result]:
    """What they return, each in a thread of its own. Raises what the first that failed raised."""
    with ThreadPoolExecutor(len(functions)) as threads:
        return [future.result() for future in [threads.submit(function) for function in functions]]


def open_store(opener: Opener, mode: Mode) -> RecordStore:
    records, options, path = opener
    return records(path, mode, records.Options.model_validate(options))


def count(store: RecordStore) -> None:
    """Add one 30 times, each time to what it was."""
    for _ in range(30):
        while True:
            value = store.get(b"n")
            if store.commit({b"n": b"%d" % (int(value or 0) + 1)}, expect={b"n": value}):
                break


def open_and_count(opener: Opener) -> None:
    store = open_store(opener, "a")
    count(store)
    store.close()


def is_busy(opener: Opener, name: str) -> bool:
    store = open_store(opener, "a")
    try:
        store.lock(name, wait=False).release()
    except StoreBusyError:
        return True
    finally:
        store.close()
    return False


def read_all(opener: Opener, seal: Mapping[str, Any]) -> tuple[list[tuple[bytes, bytes]], dict[bytes, bytes]]:
    store = open_store(opener, "r")
    reader = store.reader(ID, seal)
    read = store.items(b""), {key: bytes(reader.get(key)) for key in list(reader.keys())}
    reader.close()
    store.close()
    return read


def begin(opener: Opener) -> Any:
    store = open_store(opener, "a")
    store.commit({b"a": b"1"})
    lock, writer = store.lock("writing", wait=False), store.writer(ID, CAPACITY)
    writer.put(VALUES)
    return store, lock, writer
