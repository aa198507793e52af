"""Writing a memory in progress, and the one commit in which it becomes complete."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from memstore.catalog import PENDING, SEALED, TOMBSTONE, key
from memstore.errors import DamagedMemoryError, StoreError, StoreFullError
from memstore.interfaces import Lock, RecordStore
from memstore.manifest import Manifest
from memstore.memory import Document, Memory
from memstore.memory_writer import MemoryWriter
from memstore.noting import with_notes
from memstore.removing import bury

if TYPE_CHECKING:
    from memstore.store import MemoryStore

logger = logging.getLogger(__name__)


def open_writer(
    store: MemoryStore, manifest: Manifest, packed: bytes, document: Document, lock: Lock, replaced: bytes | None
) -> MemoryWriter:
    records = store.records
    capacity = manifest.vector_bytes + 128 * (manifest.num_blocks + 1) * len(manifest.parts)
    capacity += 4 * len(document.text or "") + 12 * manifest.num_tokens + 4096

    def seal(sealed: Manifest) -> Memory:
        pending_key, sealed_key = key(PENDING, manifest.name), key(SEALED, manifest.name)
        current, tombstones = replaced, dict[bytes, bytes]()
        while True:
            if current is not None:
                old = Manifest.unpack(current)
                tombstones = {TOMBSTONE + old.id.encode(): b""}
            puts = {sealed_key: sealed.pack(), **tombstones}
            try:
                _copy_instead(records, manifest.id, puts)
                done = records.commit(puts, [pending_key], {pending_key: packed, sealed_key: current})
            except StoreError:
                _copy_anew(records, manifest.id, pending_key, packed)
                raise
            if done:
                break
            now = records.get(sealed_key)
            same = now is not None and current is not None and Manifest.unpack(now).id == old.id
            if now is None or not same or records.get(pending_key) != packed:
                _copy_anew(records, manifest.id, pending_key, packed)
                raise StoreError(
                    f"Memory {manifest.name!r} was removed while it was being written, or another took its place. "
                    "Repeat the command; what has been read is kept where it can be."
                )
            sealed, current = with_notes(sealed, old, Manifest.unpack(now)), now
        lock.release(discard=True)
        for tombstone in tombstones:
            with contextlib.suppress(StoreError):  # the next opening tries again
                bury(records, tombstone)
        instead = " in the place of an earlier version" if tombstones else ""
        logger.info(
            "wrote memory %r: %d tokens in %d blocks%s", sealed.name, sealed.num_tokens, sealed.num_blocks, instead
        )
        return Memory(store, sealed)

    try:
        opened = records.writer(manifest.id, capacity)
    except DamagedMemoryError as error:  # it was never complete, so nothing is lost by starting again
        logger.warning("memory %r is begun again: %s", manifest.name, error)
        records.delete(manifest.id)
        opened = records.writer(manifest.id, capacity)
    try:
        records.copy(manifest.id, {key(PENDING, manifest.name): packed})  # days of work outlive the catalog
        writer = MemoryWriter(manifest, opened, seal, lock.release)
        writer.put_document(document)
        if writer.num_done:
            logger.info("memory %r goes on after %d of %d tokens", manifest.name, writer.num_done, manifest.num_tokens)
        else:
            logger.info("memory %r is begun: %d tokens in %s", manifest.name, manifest.num_tokens, records.path)
    except BaseException:
        opened.close()
        raise
    return writer


def _copy_instead(records: RecordStore, memory_id: str, new: Mapping[bytes, bytes]) -> None:
    """Keep a copy of what becomes of a memory, in place of that of its draft."""
    try:
        records.copy(memory_id, new)
    except StoreFullError:  # there may be room for one of them
        records.drop_copy(memory_id)
        records.copy(memory_id, new)


def _copy_anew(records: RecordStore, memory_id: str, pending_key: bytes, packed: bytes) -> None:
    """Let the copy of a memory that could not be completed be that of its draft again, if it is still one."""
    with contextlib.suppress(StoreError):
        records.drop_copy(memory_id)
        if records.get(pending_key) == packed:
            records.copy(memory_id, {pending_key: packed})
