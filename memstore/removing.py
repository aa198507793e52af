"""Removing memories, complete or not, and giving back the space of what is removed.

A removal puts a tombstone in the place of the manifest, which goes when the space has been given back.
"""

from __future__ import annotations

import contextlib
import logging

from memstore.catalog import INDEX, PENDING, TOMBSTONE, index_lock
from memstore.errors import DamagedMemoryError, StoreBusyError, StoreError
from memstore.interfaces import RecordStore
from memstore.manifest import id_of

logger = logging.getLogger(__name__)


def remove(records: RecordStore, manifest_key: bytes, value: bytes, memory_id: str) -> bool:
    """Remove a memory, complete or not; who does so holds its lock. False if the catalog no longer has this value."""
    tombstone = TOMBSTONE + memory_id.encode()
    records.drop_copy(memory_id)
    try:
        removed = records.commit({tombstone: b""}, [manifest_key], {manifest_key: value})
    except StoreError:
        with contextlib.suppress(StoreError):
            records.copy(memory_id, {manifest_key: value})
        raise
    if removed:
        bury(records, tombstone)
    return removed


def remove_unreadable(records: RecordStore, manifest_key: bytes) -> None:
    """Remove a memory, complete or not, whose manifest cannot be read. Its id, without which its space stays taken, is
    found where a copy of the manifest lies; and the copy must not bring it back. Raises StoreBusyError while it is
    being written."""
    ids = records.copied(manifest_key)
    tombstones = [TOMBSTONE + memory_id.encode() for memory_id in ids]
    with contextlib.ExitStack() as stack:
        for memory_id in ids:
            stack.callback(records.lock(memory_id, wait=False).release, discard=True)
        records.commit(dict.fromkeys(tombstones, b""), [manifest_key])
    for tombstone in tombstones:
        bury(records, tombstone)


def reclaim(records: RecordStore) -> None:
    """Give back the space of removals that were interrupted, and what other killed processes left.

    Only what a tombstone names is deleted, never what no manifest names: a catalog that was damaged, or restored from
    an older copy, must not cost a memory.
    """
    tombstones: list[tuple[bytes, bytes]] = []
    with contextlib.suppress(StoreError):
        tombstones = records.items(TOMBSTONE)
    for tombstone, _ in tombstones:
        logger.info("finishing an interrupted removal in %s", records.path)
        with contextlib.suppress(StoreError):  # the next opening tries again
            bury(records, tombstone)
    with contextlib.suppress(StoreError):
        _discard_locks(records)


def _discard_locks(records: RecordStore) -> None:
    """Remove the locks that nobody asks for any more: of memories that are no longer written, or no longer there."""
    names = records.lock_names()  # before the catalog is read: who locks an id has found it there
    if not names:
        return
    pending = {id_of(value) for _, value in records.items(PENDING)}
    there = set(records.memory_ids())
    for name in names:
        memory_id, _, kind = name.partition("-")
        if memory_id not in (there if kind else pending):
            with contextlib.suppress(StoreBusyError):  # by a process that is about to learn it
                records.lock(name, wait=False).release(discard=True)


def bury(records: RecordStore, tombstone: bytes) -> None:
    memory_id = tombstone[len(TOMBSTONE) :]
    records.delete(memory_id.decode())
    indexes: list[bytes] = []
    with contextlib.suppress(DamagedMemoryError):  # the record of an index: a few bytes stay
        indexes = [index for index, _ in records.items(INDEX + memory_id)]
    records.commit({}, [tombstone, *indexes])
    with contextlib.suppress(StoreError):  # held by who still builds an index, and learns that it is too late
        records.lock(index_lock(memory_id.decode()), wait=False).release(discard=True)
