"""The indexes of a memory: caches, which are built from its vectors where they are missing, stale or damaged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from memstore.auto import choose
from memstore.config import load as load_config
from memstore.config.settings import AUTO
from memstore.errors import StoreBusyError, StoreError
from memstore.index_cache import IndexCache, Keys, MemoryIndex
from memstore.index_files import UnusableError
from memstore.index_record import IndexRecord, all_records, is_removed, read_record, removed, write_record
from memstore.interfaces import VectorIndex
from memstore.memory import Memory
from memstore.open_memory import OpenMemory


def check_backend(backend: str | None) -> None:
    """Raises ConfigError or PluginError if the backend named here, or the configured one, cannot be used."""
    config = load_config()
    chosen = config.settings.index
    if AUTO in (backend, chosen.backend if backend is None else None):
        backend = chosen.auto.small
    config.index_plugin(backend)


def configured_to_scan() -> bool:
    """Whether the configured backend scores every key, so that whoever has something better need not ask it."""
    chosen = load_config().settings.index
    return chosen.backend in (AUTO, chosen.auto.small)


def open_index(
    opened: OpenMemory, backend: str | None = None, keys: Keys | None = None, device: str = "cpu"
) -> MemoryIndex:
    """The index of an open memory for the backend named here, or for the configured one.

    device: where the queries are, on which the choice of "auto" depends. keys: the blocks [n_i, d] of slots, by name,
    where they are not to be read from the store. What has to be built is kept for the next time if the store can be
    written, and an IndexNotice says why.

    Raises ConfigError, PluginError, IndexBuildError, DamagedMemoryError.
    """
    cache = IndexCache(opened, keys, *_plugin(opened.memory, backend, device=device))
    if not cache.saved:
        return cache.build(cache.current_record())
    try:
        return cache.load()
    except UnusableError as error:
        return cache.build_and_keep(str(error))


def reindex(
    memory: Memory, backend: str | None = None, options: Mapping[str, Any] | None = None
) -> tuple[str, IndexRecord | None]:
    """Build the index anew, from the memory's vectors, and keep it. What was tuned is forgotten.

    options: the backend's own, over those configured. Returns the backend's name and the record, which is None for a
    backend that keeps nothing. Raises what :func:`open_index` raises, ReadOnlyStoreError, StoreFullError.
    """
    name, plugin, chosen = _plugin(memory, backend, options)
    with memory.open() as opened:
        cache = IndexCache(opened, None, name, plugin, chosen)
        if not cache.saved:
            cache.build(None)  # what does not fit is told now, not when it is attached
            return name, None
        if cache.folder is None and is_removed(cache.records, cache.manifest):
            raise removed(cache.manifest)
        if cache.folder is None:
            raise StoreError(f"The store {memory.store.path} keeps nothing on disk, so it cannot keep an index either.")
        with cache.locked():
            tuned = {key: getattr(chosen, key) for key in options or {} if key in plugin.tunable}
            before = cache.record("", {}, None).model_copy(update={"tuned": tuned})
            return name, cache.keep(cache.built(None), before)


def remember(memory: Memory, index: MemoryIndex, tuned: Mapping[str, int], quality: Mapping[str, Any]) -> None:
    """Keep with an index which values of its tunable options to search with, and what they were measured to give.

    Raises ReadOnlyStoreError, MemoryNotFoundError, StoreBusyError if it was built anew since it was opened.
    """
    _, plugin, options = load_config().index_plugin(index.backend)
    with memory.open() as opened:
        cache = IndexCache(opened, None, index.backend, plugin, options)
        with cache.locked():
            record = read_record(cache.records, memory.manifest.id, index.backend)
            if (record and record.folder) != (index.record and index.record.folder):
                raise StoreBusyError(
                    f"The index {index.backend!r} of memory {memory.name!r} was built anew by another process while it "
                    "was measured. Repeat the check."
                )
            fresh = (record or cache.record("", {}, None)).model_copy(
                update={"tuned": dict(tuned), "quality": dict(quality)}
            )
            write_record(cache.records, memory.manifest, fresh)


def _plugin(
    memory: Memory, backend: str | None, options: Mapping[str, Any] | None = None, device: str = "cpu"
) -> tuple[str, type[VectorIndex], BaseModel]:
    config = load_config()
    records = all_records(memory.store.records, memory.manifest.id)
    chosen = choose(config, backend, memory.manifest, records, device).backend
    is_configured = backend is None and chosen == config.settings.index.backend
    return config.index_plugin(None if is_configured else chosen, options)
