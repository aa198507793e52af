"""Making a damaged catalog whole again, of its records that can be read and of copies that lie with the memories."""

from __future__ import annotations

import os
import shutil
import stat
import struct
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgpack
import xxhash

from memstore.errors import DamagedMemoryError, StoreInUseError
from memstore.files import replace_by
from memstore_backends import lmdb_pages as pages
from memstore_backends.lmdb_catalog import Catalog
from memstore_backends.lmdb_lock import alone
from memstore_backends.lmdb_pages import PageError
from memstore_backends.lmdb_snapshot import Snapshot
from memstore_backends.lmdb_summary import SUMMARY, Summary, opened

COPY = "record"  # beside a memory's data.mdb: a checksum, then key and value of its catalog record
NEW = "new"  # beside the catalog: the folder in which its successor is made
MOST = 64 << 20  # bytes of a copy that are read
_CHECKSUM = 16


def write_copy(folder: Path, key: bytes, value: bytes) -> None:
    """Keep a record in a memory's folder, whole or not at all. Only who holds the memory's lock may."""
    packed: bytes = msgpack.packb((key, value))
    replace_by(folder / COPY, [xxhash.xxh3_128_digest(packed), packed], folder / f".{COPY}")


def copied(memories: Path, key: bytes) -> list[str]:
    """Ids of the memories beside which a copy of the record ``key`` lies."""
    return [memory_id for memory_id, found, _ in _copies(memories) if found == key]


def mend(path: Path) -> list[str]:
    """See :meth:`memstore.interfaces.RecordStore.mend`. The new file is made beside the damaged one, which it replaces
    in one step."""
    folder = path / "catalog"
    data, new = folder / "data.mdb", folder / NEW
    if Catalog.is_open(folder):
        raise StoreInUseError(f"The store {path} is open in this process. Close it first.")
    _, copies, problem = _found(path)
    if problem is None or not (copies or folder.is_dir()):
        return []
    folder.mkdir(exist_ok=True)
    with Catalog.all_waiting(), alone(folder / "lock.mdb"):
        kept, copies, problem = _found(path)  # again: what looked like damage may have been another's commit
        if problem is None:
            return []
        tidy(folder)
        new.mkdir()
        catalog = Catalog.acquire(new, writable=True)
        try:
            catalog.commit({**copies, **kept}, (), {})
        finally:
            catalog.release()
        said = f"The catalog was damaged ({problem}). {len(kept)} of its records could be read, and {len(copies)} were "
        said += "restored from copies beside the memories."
        if data.exists():
            before = folder / f"damaged-{uuid.uuid4().hex[:8]}.mdb"
            shutil.copyfile(data, new / before.name)
            (new / before.name).replace(before)
            said += f" What was there is kept as {before}."
        (new / "data.mdb").replace(data)
        tidy(folder)
    return [said]


def tidy(folder: Path) -> None:
    """Remove what a mending that was killed left in the folder of a catalog: while this process has the catalog open,
    or is :func:`alone` with it, nobody is mending it."""
    shutil.rmtree(folder / NEW, ignore_errors=True)


def _found(path: Path) -> tuple[dict[bytes, bytes], dict[bytes, bytes], str | None]:
    """The records of the catalog that can be read, copies of others, and what is wrong with the catalog."""
    kept, problem = _readable(path / "catalog" / "data.mdb")
    ends = {key[-32:] for key in kept}  # of tombstones: what they name is to go
    copies = {
        key: value
        for memory_id, key, value in _copies(path / "memories")
        if key not in kept and memory_id.encode() not in ends
    }
    if copies and not kept:
        problem = problem or "it is empty"
    return kept, copies, problem


def _readable(data: Path) -> tuple[dict[bytes, bytes], str | None]:
    """The records that can be read, of the newest state that has any, and what is wrong."""
    problem: str | None = None
    try:
        fd = os.open(data, os.O_RDONLY)
    except FileNotFoundError:
        return {}, "it is missing"
    try:
        for transaction in _transactions(fd):
            try:
                snapshot = Snapshot(fd, transaction)
                found = list(snapshot.items(b""))
            except PageError as error:
                problem = problem or str(error)
                continue
            kept, wrong = {}, problem
            for key, value in found:
                try:
                    kept[key] = opened(data, key, value) or b""
                except DamagedMemoryError:
                    wrong = wrong or "a record of it differs from the one written"
            try:
                summary = kept.pop(SUMMARY, None)
                if summary is not None and wrong is None:
                    written = Summary.unpack(summary, transaction)
                    written.check(Summary.of_keys(kept), written.kinds)
            except PageError as error:
                wrong = str(error)
            return kept, wrong
    finally:
        os.close(fd)
    return {}, problem or "it holds no state that can be read"


def _transactions(fd: int) -> list[int]:
    """Those whose meta pages can be read, the newest first."""
    found = []
    for number in (0, 1):
        try:
            size = pages.page_size(fd)
            found.append(pages.meta(os.pread(fd, size, number * size), number).transaction)
        except (PageError, struct.error):
            continue
    return sorted(set(found), reverse=True)


def _copies(memories: Path) -> Iterator[tuple[str, bytes, bytes]]:
    """Id, key and value of the copies that are whole."""
    for file in sorted(memories.glob(f"*/{COPY}")):
        try:
            status = file.lstat()
            packed = file.read_bytes() if stat.S_ISREG(status.st_mode) and status.st_size <= MOST else b""
        except FileNotFoundError:  # removed just now
            continue
        if packed[:_CHECKSUM] != xxhash.xxh3_128_digest(packed[_CHECKSUM:]):
            continue
        with suppress(ValueError, TypeError, msgpack.UnpackException):
            key, value = msgpack.unpackb(packed[_CHECKSUM:])
            yield file.parent.name, bytes(memoryview(key)), bytes(memoryview(value))
