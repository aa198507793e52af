"""Changing what is noted of a memory, its metadata, while what it holds stays as it is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from memstore.catalog import SEALED, key
from memstore.errors import MEND, DamagedMemoryError, StoreError
from memstore.manifest import FORMAT_MINOR, Manifest

if TYPE_CHECKING:
    from memstore.store import MemoryStore

logger = logging.getLogger(__name__)


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
                records.copy(before.id, {sealed_key: packed})
                done = records.commit({sealed_key: packed}, expect={sealed_key: value})
            except StoreError:
                if records.get(sealed_key) != value:  # it has been replaced or removed, and its folder with it
                    continue
                if records.persistent and records.folder(before.id) is None:
                    raise DamagedMemoryError(f"Memory {name!r} is damaged: its folder is missing. {MEND}") from None
                with suppress(StoreError):
                    records.copy(before.id, {sealed_key: value})
                raise
            if done:
                logger.info("noted other metadata of memory %r", name)
                return manifest
            records.drop_copy(before.id)  # it has been replaced or removed, and must not be brought back
        finally:
            lock.release(discard=True)


def with_notes(draft: Manifest, seen: Manifest, now: Manifest) -> Manifest:
    """The draft with what has been noted of the memory that it replaces since that was ``seen``."""
    was, is_now = seen.metadata, now.metadata
    noted = {key: value for key, value in is_now.items() if key not in was or was[key] != value}
    kept = {
        key: value
        for key, value in draft.metadata.items()
        if key in is_now or key not in was or was[key] != value  # else it has been taken away
    }
    return draft.model_copy(update={"metadata": kept | noted})
