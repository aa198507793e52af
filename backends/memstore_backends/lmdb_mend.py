"""Making a damaged catalog whole again, of its records that can be read and of copies that lie with the memories."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgpack
import xxhash

from memstore.errors import DamagedMemoryError, StoreInUseError
from memstore.files import replace_by, sync
from memstore_backends import lmdb_pages as pages
from memstore_backends.lmdb_catalog import Catalog
from memstore_backends.lmdb_lock import alone
from memstore_backends.lmdb_pages import PageError
from memstore_backends.lmdb_snapshot import Snapshot
from memstore_backends.lmdb_summary import SUMMARY, Summary, opened

COPY = "record"  # beside a memory's data.mdb: a checksum, then its catalog record, and what was committed with it
NEW = "new"  # beside the catalog: the folder in which its successor is made
MOST = 64 << 20  # bytes of a copy that are read
_CHECKSUM = 16
_IDS = re.compile(rb"[0-9a-f]{32}")


def write_copy(folder: Path, records: Mapping[bytes, bytes]) -> None:
    """Keep records in a memory's folder, whole or not at all. Only who holds the memory's lock may."""
    packed: bytes = msgpack.packb([each for record in records.items() for each in record])
    replace_by(folder / COPY, [xxhash.xxh3_128_digest(packed), packed], folder / f".{COPY}")


def copied(memories: Path, key: bytes) -> list[str]:
    """Ids of the memories beside which a copy of the record ``key`` lies."""
    return [memory_id for memory_id, records in _copies(memories) if key in records]


def mend(path: Path) -> list[str]:
    """See :meth:`memstore.interfaces.RecordStore.mend`. The new file is made beside the damaged one, which it replaces
    in one step."""
    folder = path / "catalog"
    with Catalog.all_waiting():
        if Catalog.is_open(folder):
            raise StoreInUseError(f"The store {path} is open in this process. Close it first.")
        found = _found(path)
        if found.problem is None or not (found.copies or folder.is_dir()):
            return []
        folder.mkdir(exist_ok=True)
        return _mend(path)


def _mend(path: Path) -> list[str]:
    folder = path / "catalog"
    data, new = folder / "data.mdb", folder / NEW
    with alone(folder / "lock.mdb"):
        found = _found(path)  # again: what looked like damage may have been another's commit
        if found.problem is None:
            return []
        tidy(folder)
        new.mkdir()
        catalog = Catalog.acquire(new, writable=True)
        try:
            restored = {key: value for records in found.copies for key, value in records.items()}
            catalog.commit(found.kept | restored, (), {})
        finally:
            catalog.release()
        said = f"The catalog was damaged ({found.problem}). {len(found.kept)} of its records could be read, and "
        said += f"{len(found.copies)} were restored from copies beside the memories."
        if found.is_older:
            said += " Its last state could not be read, but the one before: what was done last may have to be repeated."
        if data.exists():
            said += f" What was there is kept as {_keep(data, new)}."
        (new / "data.mdb").replace(data)
        tidy(folder)
    return [said]


def tidy(folder: Path) -> None:
    """Remove what a mending that was killed left in the folder of a catalog: while this process has the catalog open,
    or is :func:`alone` with it, nobody is mending it."""
    shutil.rmtree(folder / NEW, ignore_errors=True)


def _keep(data: Path, new: Path) -> Path:
    """Keep a damaged file under a name that follows from its bytes, so that it is kept once."""
    with data.open("rb") as file:
        kept = data.with_name(f"damaged-{hashlib.file_digest(file, 'blake2b').hexdigest()[:8]}.mdb")
    if not kept.exists():
        try:
            os.link(data, kept)
        except OSError:  # a file system without hard links
            shutil.copyfile(data, new / kept.name)
            sync(new / kept.name)
            (new / kept.name).replace(kept)
    return kept


class _Found(NamedTuple):
    """The records of a catalog that can be read (is_older: in its state before the last), those that copies add, and
    what is wrong with the catalog."""

    kept: dict[bytes, bytes]
    is_older: bool
    copies: list[dict[bytes, bytes]]
    problem: str | None


def _found(path: Path) -> _Found:
    memories = path / "memories"
    kept, problem, is_older = _readable(path / "catalog" / "data.mdb")
    if is_older:  # what was removed since is gone
        there = {folder.name.encode() for folder in memories.glob("*")}
        kept = {key: value for key, value in kept.items() if not (ids := _IDS.findall(key + value)) or there & {*ids}}
    # A copy tells what the catalog does not; where that is of the state before the last, a copy is newer.
    told = [(each, records) for each, records in _copies(memories) if is_older or next(iter(records)) not in kept]
    ends = {key[-32:] for records in (kept, *(records for _, records in told)) for key in records if len(key) == 33}
    # What a tombstone names is to go.
    copies = [records for memory_id, records in told if memory_id.encode() not in ends]
    if copies and not kept:
        problem = problem or "it is empty"
    return _Found(kept, is_older, copies, problem)


def _readable(data: Path) -> tuple[dict[bytes, bytes], str | None, bool]:
    """The records of the newest state that can be read, what is wrong, and whether it is the state before the last."""
    problem: str | None = None
    is_older = False
    try:
        fd = os.open(data, os.O_RDONLY)
    except FileNotFoundError:
        return {}, "it is missing", False
    try:
        for transaction in _transactions(fd):
            try:
                snapshot = Snapshot(fd, transaction)
                found = list(snapshot.items(b""))
            except PageError as error:
                problem, is_older = problem or str(error), True
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
            return kept, wrong, is_older
    finally:
        os.close(fd)
    return {}, problem or "it holds no state that can be read", False


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


def _copies(memories: Path) -> Iterator[tuple[str, dict[bytes, bytes]]]:
    """The copies that are whole, each with the id of the memory it lies beside."""
    for file in sorted(memories.glob(f"*/{COPY}")):
        try:
            status = file.lstat()
            packed = file.read_bytes() if stat.S_ISREG(status.st_mode) and status.st_size <= MOST else b""
        except FileNotFoundError:  # removed just now
            continue
        if packed[:_CHECKSUM] != xxhash.xxh3_128_digest(packed[_CHECKSUM:]):
            continue
        with suppress(ValueError, TypeError, msgpack.UnpackException):
            flat = [bytes(memoryview(each)) for each in msgpack.unpackb(packed[_CHECKSUM:])]
            if records := dict(zip(flat[::2], flat[1::2], strict=True)):
                yield file.parent.name, records
