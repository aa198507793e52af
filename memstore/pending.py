"""Memories in progress: who may write one, how an interrupted one is resumed, and how its space is given back.

A memory's pending manifest is committed before anything of it is on the disk, its lock included, and becomes its
sealed manifest in one commit. A removal puts a tombstone in the place of the manifest, which goes when the space has
been given back. So whatever a killed process leaves has an id of which the catalog says what to do with it, or nothing.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from memstore.catalog import INDEX, PENDING, SEALED, TOMBSTONE, check_name, index_lock, is_name, key
from memstore.errors import (
    DamagedMemoryError,
    DocumentError,
    FormatError,
    MemoryBusyError,
    MemoryExistsError,
    StoreBusyError,
    StoreError,
    StoreFullError,
)
from memstore.interfaces import Lock, RecordStore
from memstore.manifest import FORMAT_MINOR, Manifest
from memstore.memory import Document, Memory
from memstore.memory_writer import MemoryWriter

if TYPE_CHECKING:
    from memstore.store import MemoryStore

logger = logging.getLogger(__name__)


def start(store: MemoryStore, draft: Manifest, document: Document, replacing: Manifest | None = None) -> MemoryWriter:
    """A writer for ``draft``, or for what an interrupted writer of a manifest left that is equal but for its metadata.

    replacing: a memory of this name, which stays as it is until the new one takes its place. What is noted of it from
    now on is noted of the new one, too.
    """
    records = store.records
    pending_key, sealed_key = key(PENDING, draft.name), key(SEALED, draft.name)
    _check(draft, document)
    while True:
        current = records.get(sealed_key)
        before = None if current is None else Manifest.unpack(current)
        if before is not None and (replacing is None or before.id != replacing.id):
            raise MemoryExistsError(
                f"{records.path} already holds a memory named {draft.name!r}. Remove it, or choose another name."
            )
        due = draft if before is None or replacing is None else with_notes(draft, replacing, before)
        value = records.get(pending_key)
        if value is None:
            records.commit({pending_key: due.pack()}, expect={pending_key: None, sealed_key: current})
            continue
        manifest = Manifest.unpack(value)
        if manifest.differing(due, "id", "created", "metadata"):
            drop(records, draft.name)
            continue
        lock = _acquire(records, manifest)
        try:
            manifest = manifest.model_copy(update={"metadata": due.metadata})
            packed = manifest.pack()
            # Inside a commit it is the newest.
            if records.commit({pending_key: packed}, expect={pending_key: value, sealed_key: current}):
                return _writer(store, manifest, packed, document, lock, current)
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


def with_notes(draft: Manifest, seen: Manifest, now: Manifest) -> Manifest:
    """The draft with what has been noted of the memory that it replaces since that was ``seen``."""
    was = seen.metadata
    noted = {key: value for key, value in now.metadata.items() if key not in was or was[key] != value}
    return draft.model_copy(update={"metadata": draft.metadata | noted}) if noted else draft


def manifests(records: RecordStore) -> list[Manifest]:
    """The manifests of all memories in progress, sorted by name, but for those that cannot be read."""
    found = []
    try:
        for _, value in records.items(PENDING):
            with contextlib.suppress(FormatError):
                found.append(Manifest.unpack(value))
    except DamagedMemoryError as error:
        logger.warning("what is unfinished in %s cannot be told: %s", records.path, error)
    return sorted(found, key=lambda manifest: manifest.name)


def drop(records: RecordStore, name: str) -> bool:
    """Give back the space of a memory in progress. False if there is none of this name.

    Raises MemoryBusyError while it is being written.
    """
    pending_key = key(PENDING, name)
    try:
        value = records.get(pending_key)
        manifest = None if value is None else Manifest.unpack(value)
    except (DamagedMemoryError, FormatError):
        remove_unreadable(records, pending_key)
        return True
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


def give_up(store: MemoryStore, name: str) -> None:
    """Give back what an interrupted update left under the name of a memory that is to stay as it is, unless another
    process is at it."""
    with contextlib.suppress(MemoryBusyError):
        if store.mode == "a" and drop(store.records, name):
            logger.info("memory %r stays as it is", name)


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


def remove_complete(records: RecordStore, name: str, wanted: Callable[[Manifest], bool]) -> bool:
    """Remove a complete memory if it is there, and ``wanted`` to be removed as it is at that moment."""
    sealed_key = key(SEALED, name)
    while (value := records.get(sealed_key)) is not None:
        manifest = Manifest.unpack(value)
        if not wanted(manifest):
            return False
        if remove(records, sealed_key, value, manifest.id):
            logger.info("removed memory %r from %s", name, records.path)
            with contextlib.suppress(MemoryBusyError):  # an update of it, which then finds nothing to replace
                drop(records, name)
            return True
    return False


def remove_unreadable(records: RecordStore, manifest_key: bytes) -> None:
    """Remove a memory, complete or not, whose manifest cannot be read. Its id, without which its space stays taken, is
    found where a copy of the manifest lies; and the copy must not bring it back."""
    tombstones = [TOMBSTONE + memory_id.encode() for memory_id in records.copied(manifest_key)]
    records.commit(dict.fromkeys(tombstones, b""), [manifest_key])
    for tombstone in tombstones:
        _bury(records, tombstone)


def note(store: MemoryStore, name: str, change: Callable[[Manifest], Mapping[str, Any] | None]) -> Manifest:
    """Let the newest manifest of a complete memory have the metadata that ``change`` makes of it; None: as it is.

    The copy comes first: whoever is killed between, or repeats the command, leaves what the next one puts right.
    """
    records, sealed_key = store.records, key(SEALED, name)
    while True:
        value = store.sealed(name)
        before = Manifest.unpack(value)
        lock = records.lock(before.id, wait=True)
        try:
            if records.get(sealed_key) != value:
                continue
            metadata = change(before)
            if metadata is None:
                return before
            manifest = Manifest.described(
                {**before.model_dump(), "metadata": dict(metadata), "format_minor": FORMAT_MINOR}
            )
            packed = manifest.pack()
            try:
                records.copy(before.id, sealed_key, packed)
            except StoreError:
                if records.get(sealed_key) != value:  # it has been replaced or removed, and its folder with it
                    continue
                raise
            if records.commit({sealed_key: packed}, expect={sealed_key: value}):
                logger.info("noted other metadata of memory %r", name)
                return manifest
            now = records.get(sealed_key)
            if now is None or Manifest.unpack(now).id != before.id:  # it must not be brought back
                records.drop_copy(before.id)
        finally:
            lock.release(discard=True)


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
        current, tombstones = replaced, list[bytes]()
        while True:
            value = sealed.pack()
            _copy_instead(records, manifest.id, (sealed_key, value), (pending_key, packed))
            if current is not None:
                old = Manifest.unpack(current)
                tombstones = [TOMBSTONE + old.id.encode()]
                records.drop_copy(old.id)  # from here on the new one is as good as complete
            puts = {sealed_key: value, **dict.fromkeys(tombstones, b"")}
            if records.commit(puts, [pending_key], {pending_key: packed, sealed_key: current}):
                break
            now = records.get(sealed_key)
            same = now is not None and current is not None and Manifest.unpack(now).id == old.id
            if now is None or not same or records.get(pending_key) != packed:
                _copy_anew(records, manifest, packed)
                raise StoreError(
                    f"Memory {manifest.name!r} was removed while it was being written, or another took its place. "
                    "Repeat the command; what has been read is kept where it can be."
                )
            sealed, current = with_notes(sealed, old, Manifest.unpack(now)), now
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


def _copy_instead(records: RecordStore, memory_id: str, new: tuple[bytes, bytes], old: tuple[bytes, bytes]) -> None:
    """Keep a copy of another record of a memory. Raises StoreError, and then the old copy is there."""
    try:
        records.copy(memory_id, *new)
    except StoreFullError:  # there may be room for one of them
        records.drop_copy(memory_id)
        try:
            records.copy(memory_id, *new)
        except StoreError:
            records.copy(memory_id, *old)
            raise


def _copy_anew(records: RecordStore, manifest: Manifest, packed: bytes) -> None:
    """Let the copies be those of what the catalog says, after a memory could not be completed."""
    pending_key, sealed_key = key(PENDING, manifest.name), key(SEALED, manifest.name)
    with contextlib.suppress(StoreError):
        records.drop_copy(manifest.id)
        if records.get(pending_key) == packed:
            records.copy(manifest.id, pending_key, packed)
        now = records.get(sealed_key)
        if now is not None:
            records.copy(Manifest.unpack(now).id, sealed_key, now)


def _check(draft: Manifest, document: Document) -> None:
    """Raises DocumentError if the draft or the document cannot be kept as it is."""
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
    draft.pack()


def _acquire(records: RecordStore, manifest: Manifest) -> Lock:
    """The lock of a memory's one writer."""
    try:
        return records.lock(manifest.id, wait=False)
    except StoreBusyError as error:
        raise MemoryBusyError(
            f"Another process is encoding {manifest.name!r}. Wait for it, or choose another name."
        ) from error
