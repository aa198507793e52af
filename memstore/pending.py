"""Memories in progress: who may write one, how an interrupted one is resumed, and how its space is given back.

A memory's pending manifest is committed before anything of it is on the disk, its lock included, and becomes its
sealed manifest in one commit. A removal puts a tombstone in the place of the manifest, which goes when the space has
been given back. So whatever a killed process leaves has an id of which the catalog says what to do with it, or nothing.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

from memstore.catalog import INDEX, PENDING, SEALED, TOMBSTONE, check_name, index_lock, is_name, key
from memstore.errors import (
    DamagedMemoryError,
    DocumentError,
    FormatError,
    MemoryBusyError,
    MemoryExistsError,
    StoreBusyError,
    StoreError,
)
from memstore.interfaces import Lock, RecordStore
from memstore.manifest import Manifest
from memstore.memory import Document, Memory
from memstore.memory_writer import MemoryWriter

if TYPE_CHECKING:
    from memstore.store import MemoryStore

logger = logging.getLogger(__name__)


def start(store: MemoryStore, draft: Manifest, document: Document, replacing: Manifest | None = None) -> MemoryWriter:
    """A writer for ``draft``, or for what an interrupted writer of an equal manifest left.

    replacing: a memory of this name, which stays as it is until the new one takes its place.
    """
    records = store.records
    packed = _pack(draft, document)
    pending_key, sealed_key = key(PENDING, draft.name), key(SEALED, draft.name)
    while True:
        current = records.get(sealed_key)
        if current is not None and (replacing is None or Manifest.unpack(current).id != replacing.id):
            raise MemoryExistsError(
                f"{records.path} already holds a memory named {draft.name!r}. Remove it, or choose another name."
            )
        value = records.get(pending_key)
        if value is None:
            records.commit({pending_key: packed}, expect={pending_key: None, sealed_key: current})
            continue
        manifest = Manifest.unpack(value)
        if manifest.differing(draft, "id", "created"):
            drop(records, draft.name)
            continue
        lock = _acquire(records, manifest)
        try:
            if records.commit({}, expect={pending_key: value, sealed_key: current}):  # inside a commit it is the newest
                return _writer(store, manifest, value, document, lock, current)
        except BaseException:
            lock.release()
            raise
        # Another process was faster: look again. While it is there, its lock must stay the one that others wait for.
        lock.release(discard=records.get(pending_key) != value)


def manifest_of(records: RecordStore, name: str) -> Manifest | None:
    """The manifest of a memory in progress, if there is one that can be read."""
    with contextlib.suppress(DamagedMemoryError, FormatError):
        value = records.get(key(PENDING, name)) if is_name(name) else None
        return None if value is None else Manifest.unpack(value)
    return None


def manifests(records: RecordStore) -> list[Manifest]:
    """The manifests of all memories in progress, sorted by name, but for those that cannot be read."""
    values, found = [value for _, value in records.items(PENDING)], []
    for value in values:
        with contextlib.suppress(DamagedMemoryError, FormatError):
            found.append(Manifest.unpack(value))
    return sorted(found, key=lambda manifest: manifest.name)


def drop(records: RecordStore, name: str) -> bool:
    """Give back the space of a memory in progress. False if there is none of this name.

    Raises MemoryBusyError while it is being written.
    """
    pending_key = key(PENDING, name)
    try:
        value = records.get(pending_key)
        manifest = None if value is None else Manifest.unpack(value)
    except (DamagedMemoryError, FormatError):  # its id cannot be read, so its space stays taken
        return records.commit({}, [pending_key])
    if manifest is None:
        return False
    lock = _acquire(records, manifest)
    try:
        if _may_be_complete(records, manifest):
            dropped = records.commit({}, [pending_key], {pending_key: value})
        else:
            dropped = remove(records, pending_key, value, manifest.id)
    except BaseException:
        lock.release()
        raise
    lock.release(discard=True)
    if dropped:
        logger.info("gave up the unfinished memory %r in %s", name, records.path)
    return dropped or drop(records, name)  # if another process was faster: look again


def _may_be_complete(records: RecordStore, manifest: Manifest) -> bool:
    """Whether the complete memory of this name has the same records: a mended catalog may know it in both states."""
    try:
        value = records.get(key(SEALED, manifest.name))
        return value is not None and Manifest.unpack(value).id == manifest.id
    except (DamagedMemoryError, FormatError):
        return True


def remove(records: RecordStore, manifest_key: bytes, value: bytes | None, memory_id: str) -> bool:
    """Remove a memory, complete or not. False if the catalog no longer has this value for it."""
    tombstone = TOMBSTONE + memory_id.encode()
    records.drop_copy(memory_id)
    removed = records.commit({tombstone: b""}, [manifest_key], {manifest_key: value})
    if removed:
        _bury(records, tombstone)
    return removed


def remove_unreadable(records: RecordStore, manifest_key: bytes) -> None:
    """Remove a complete memory whose manifest cannot be read. Its id, without which its space stays taken, is found
    where a copy of the manifest lies; and the copy must not bring it back."""
    tombstones = [TOMBSTONE + memory_id.encode() for memory_id in records.copied(manifest_key)]
    records.commit(dict.fromkeys(tombstones, b""), [manifest_key])
    for tombstone in tombstones:
        _bury(records, tombstone)


def copy(records: RecordStore, manifest: Manifest, sealed_key: bytes, value: bytes) -> None:
    """Keep a copy of a manifest beside its memory, which is complete and whole without it."""
    try:
        records.copy(manifest.id, sealed_key, value)
    except StoreError as error:
        logger.warning("memory %r: its manifest could not be copied: %s", manifest.name, error)


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
            _bury(records, tombstone)
    with contextlib.suppress(StoreError):
        _discard_locks(records)


def _discard_locks(records: RecordStore) -> None:
    """Remove the locks that nobody asks for any more: of memories that are no longer written, or no longer there."""
    names = records.lock_names()  # before the catalog is read: who locks an id has found it there
    if not names:
        return
    pending = {Manifest.unpack(value).id for _, value in records.items(PENDING)}
    there = set(records.memory_ids())
    for name in names:
        memory_id, _, kind = name.partition("-")
        if memory_id not in (there if kind else pending):
            with contextlib.suppress(StoreBusyError):  # by a process that is about to learn it
                records.lock(name, wait=False).release(discard=True)


def _bury(records: RecordStore, tombstone: bytes) -> None:
    memory_id = tombstone[len(TOMBSTONE) :]
    records.delete(memory_id.decode())
    indexes: list[bytes] = []
    with contextlib.suppress(DamagedMemoryError):  # the record of an index: a few bytes stay
        indexes = [index for index, _ in records.items(INDEX + memory_id)]
    records.commit({}, [tombstone, *indexes])
    with contextlib.suppress(StoreError):  # held by who still builds an index, and learns that it is too late
        records.lock(index_lock(memory_id.decode()), wait=False).release(discard=True)


def _writer(
    store: MemoryStore, manifest: Manifest, packed: bytes, document: Document, lock: Lock, replaced: bytes | None
) -> MemoryWriter:
    records = store.records
    capacity = manifest.vector_bytes + 128 * (manifest.num_blocks + 1) * len(manifest.parts)
    capacity += 4 * len(document.text or "") + 12 * manifest.num_tokens + 4096

    def seal(sealed: Manifest) -> Memory:
        pending_key, sealed_key = key(PENDING, manifest.name), key(SEALED, manifest.name)
        tombstones = [] if replaced is None else [TOMBSTONE + Manifest.unpack(replaced).id.encode()]
        value = sealed.pack()
        if replaced is not None:
            records.drop_copy(Manifest.unpack(replaced).id)
        records.drop_copy(manifest.id)  # of the draft: on a full disk there is no room for two
        records.copy(manifest.id, sealed_key, value)  # from here on it is as good as complete
        puts = {sealed_key: value, **dict.fromkeys(tombstones, b"")}
        if not records.commit(puts, [pending_key], {pending_key: packed, sealed_key: replaced}):
            records.drop_copy(manifest.id)
            raise StoreError(
                f"Memory {manifest.name!r} was removed while it was being written, or another took its place. "
                "Repeat the command; what has been read is kept where it can be."
            )
        lock.release(discard=True)
        for tombstone in tombstones:
            with contextlib.suppress(StoreError):  # the next opening tries again
                _bury(records, tombstone)
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
        records.copy(manifest.id, key(PENDING, manifest.name), packed)  # days of work outlive the catalog
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


def _pack(draft: Manifest, document: Document) -> bytes:
    """The draft's bytes. Raises DocumentError if it or the document cannot be kept as it is."""
    check_name(draft.name)
    if draft.seal is not None or draft.digest is not None:
        raise DocumentError(f"The manifest of {draft.name!r} is that of a complete memory, not a draft.")
    if draft.has_text != (document.text is not None) or draft.has_ids != (document.token_ids is not None):
        raise DocumentError(f"The manifest of {draft.name!r} and its document differ in having a text or token ids.")
    for array, shape in ((document.token_ids, (draft.num_tokens,)), (document.offsets, (draft.num_tokens, 2))):
        if array is not None and array.shape != shape:
            raise DocumentError(f"The document {draft.name!r} has an array of shape {array.shape}, not {shape}.")
    try:
        (document.text or "").encode()
    except ValueError as error:
        raise DocumentError(f"The text of {draft.name!r} cannot be kept: {error}.") from error
    return draft.pack()


def _acquire(records: RecordStore, manifest: Manifest) -> Lock:
    """The lock of a memory's one writer."""
    try:
        return records.lock(manifest.id, wait=False)
    except StoreBusyError as error:
        raise MemoryBusyError(
            f"Another process is encoding {manifest.name!r}. Wait for it, or choose another name."
        ) from error
