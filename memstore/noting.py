"""Changing what is noted of a memory, its metadata, while what it holds stays as it is."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from memstore.catalog import SEALED, key
from memstore.errors import StoreError
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


def with_notes(draft: Manifest, seen: Manifest, now: Manifest) -> Manifest:
    """The draft with what has been noted of the memory that it replaces since that was ``seen``."""
    was = seen.metadata
    noted = {key: value for key, value in now.metadata.items() if key not in was or was[key] != value}
    return draft.model_copy(update={"metadata": draft.metadata | noted}) if noted else draft
