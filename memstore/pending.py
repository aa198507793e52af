"""Memories in progress: who may write one, how an interrupted one is resumed, and how it is given up.

A memory's pending manifest is committed before anything of it is on the disk, its lock included, and becomes its
sealed manifest in one commit. A removal puts a tombstone in the place of the manifest, which goes when the space has
been given back. So whatever a killed process leaves has an id of which the catalog says what to do with it, or nothing.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from memstore.catalog import PENDING, SEALED, check_name, is_name, key
from memstore.errors import (
    DamagedMemoryError,
    DocumentError,
    FormatError,
    MemoryBusyError,
    MemoryExistsError,
    StoreBusyError,
)
from memstore.interfaces import Lock, RecordStore
from memstore.manifest import Manifest, id_of
from memstore.memory import Document
from memstore.memory_writer import MemoryWriter
from memstore.noting import with_notes
from memstore.removing import remove, remove_unreadable
from memstore.sealing import open_writer

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
        ends = before is not None and before.id == manifest.id  # a mended catalog may know a memory in both states
        if ends or manifest.differing(due, "id", "created", "metadata"):
            drop(records, draft.name)
            continue
        lock = _acquire(records, manifest)
        try:
            manifest = manifest.model_copy(update={"metadata": due.metadata})
            packed = manifest.pack()
            puts = {} if packed == value else {pending_key: packed}
            # Inside a commit it is the newest.
            if records.commit(puts, expect={pending_key: value, sealed_key: current}):
                return open_writer(store, manifest, packed, document, lock, current)
        except BaseException:
            lock.release()
            raise
        # Another process was faster: look again. While it is there, its lock must stay the one that others wait for.
        now = records.get(pending_key)
        lock.release(discard=now is None or id_of(now) != manifest.id)


def manifest_of(records: RecordStore, name: str) -> Manifest | None:
    """The manifest of a memory in progress, if there is one that can be read."""
    with contextlib.suppress(DamagedMemoryError, FormatError):
        value = records.get(key(PENDING, name)) if is_name(name) else None
        return None if value is None else Manifest.unpack(value)
    return None


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
        with _busy(name):
            remove_unreadable(records, pending_key)
        return True
    if value is None or manifest is None:
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
    process is at it, or it cannot be read."""
    with contextlib.suppress(MemoryBusyError):
        if store.mode == "a" and manifest_of(store.records, name) is not None:
            drop(store.records, name)


def _may_be_complete(records: RecordStore, manifest: Manifest) -> bool:
    """Whether the complete memory of this name has the same records: a mended catalog may know it in both states."""
    try:
        value = records.get(key(SEALED, manifest.name))
        return value is not None and Manifest.unpack(value).id == manifest.id
    except (DamagedMemoryError, FormatError):
        return True


def remove_complete(records: RecordStore, name: str, wanted: Callable[[Manifest], bool]) -> bool:
    """Remove a complete memory if it is there, and ``wanted`` to be removed as it is at that moment."""
    sealed_key = key(SEALED, name)
    while (value := records.get(sealed_key)) is not None:
        manifest = Manifest.unpack(value)
        lock = records.lock(manifest.id, wait=True)
        try:
            if records.get(sealed_key) != value:
                continue
            if not wanted(manifest):
                return False
            removed = remove(records, sealed_key, value, manifest.id)
        finally:
            lock.release(discard=True)
        if removed:
            logger.info("removed memory %r from %s", name, records.path)
            with contextlib.suppress(MemoryBusyError):  # an update of it, which then finds nothing to replace
                drop(records, name)
            return True
    return False


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
    with _busy(manifest.name):
        return records.lock(manifest.id, wait=False)


@contextlib.contextmanager
def _busy(name: str) -> Iterator[None]:
    try:
        yield
    except StoreBusyError as error:
        raise MemoryBusyError(f"Another process is encoding {name!r}. Wait for it, or choose another name.") from error
