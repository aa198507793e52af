"""Rebuilding what is damaged: the catalog from copies, a memory from its own text and the model that wrote it, an index
from the memory. What is rebuilt is made beside what is there, and takes its place in one step when it is whole.
"""

from __future__ import annotations

import logging
import shlex
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from memstore import catalog, registry
from memstore.errors import FormatError, MemstoreError, StoreError, StoreNotFoundError
from memstore.index_record import IndexRecord, all_records
from memstore.interfaces import RecordStore
from memstore.manifest import Manifest
from memstore.memory import Memory
from memstore.values import CHECKSUM, TEXT, TOKEN_IDS, checksum, describe
from memstore.verify import VerifyResult, verified

if TYPE_CHECKING:
    from memstore.store import MemoryStore

logger = logging.getLogger(__name__)


def mend_catalog(path: Path, backend: str) -> list[str]:
    """Make the catalog of a store whole that cannot be opened, or lists what it cannot read. Says what was done.

    Raises StoreBusyError or StoreInUseError while the store is in use.
    """
    plugin: type[RecordStore] = registry.load(registry.BACKENDS, backend, RecordStore)
    done = plugin.mend(path)
    with suppress(StoreNotFoundError), closing(plugin(path, "r")) as records:
        if catalog.is_unmarked(records):  # as after what was mended, also by a process that was killed then
            with closing(plugin(path, "a")) as writable:
                catalog.mark(writable)
            done = done or ["The catalog had lost its format record, which was written anew."]
    for what in done:
        logger.warning("%s", what)
    return done


def repair(store: MemoryStore, name: str | None = None, model: Any = None, tokenizer: Any = None) -> list[VerifyResult]:
    """Verify, and rebuild what is damaged and can be: see :meth:`memstore.store.MemoryStore.verify`."""
    store.check_writable()
    results = []
    for memory, result in verified(store, name):
        try:
            memory.manifest  # noqa: B018
        except FormatError:
            results.append(result)
            continue
        if not result.ok:
            results.append(_read_anew(memory, result, model, tokenizer))
            continue
        result = _with_copy(memory, result)
        kept = all_records(store.records, memory.manifest.id)
        results.append(_with_indexes(memory, result, [each for each in kept if each.backend in result.indexes]))
    return results


def _with_copy(memory: Memory, result: VerifyResult) -> VerifyResult:
    """Keep the catalog's record beside the memory, as older versions did not."""
    records, manifest, sealed_key = memory.store.records, memory.manifest, catalog.key(catalog.SEALED, memory.name)
    try:
        lock = records.lock(manifest.id, wait=False)
        try:
            value = records.get(sealed_key)
            if value is not None and Manifest.unpack(value).id == manifest.id:  # what is noted of it may have changed
                records.copy(manifest.id, {sealed_key: value})
        finally:
            lock.release(discard=True)
    except StoreError as error:  # removed by another process, or being repaired by one
        return replace(result, unrepaired=[*result.unrepaired, f"The copy of its record was not renewed: {error}"])
    return result


def _with_indexes(memory: Memory, result: VerifyResult, records: list[IndexRecord]) -> VerifyResult:
    """Build these indexes anew, as they were built and tuned before."""
    repaired, left = list(result.repaired), dict(result.indexes)
    for record in records:
        from memstore.indexes import reindex

        try:
            reindex(memory, record.backend, {**record.options, **record.tuned})
            repaired.append(f"The index {record.backend!r} was built anew.")
            left.pop(record.backend, None)
        except MemstoreError as error:
            left[record.backend] = f"it could not be built anew: {error}".rstrip(".")
    return replace(result, indexes=left, repaired=repaired)


def _read_anew(memory: Memory, result: VerifyResult, model: Any, tokenizer: Any) -> VerifyResult:
    """Encode the document again, and let what comes of it take the damaged memory's place, as an update does."""
    source, problem = _source(memory, model, tokenizer)
    if problem is not None:
        return replace(result, problems=[*result.problems, problem])
    manifest = memory.manifest
    indexes = all_records(memory.store.records, manifest.id)
    try:
        different = _what_differs(memory, model, source.get("tokenizer"))
        if different:
            raise StoreError(f"the model given is not the one that wrote it: {different}. Give that one.")
        from memstore.encode import encode_again

        fresh = encode_again(memory, model, **source)
    except MemstoreError as error:  # what is damaged stays as it is
        logger.warning("memory %r could not be read anew: %s", memory.name, error)
        return replace(result, problems=[*result.problems, f"It could not be read anew: {error}"])
    same = fresh.manifest.digest == manifest.digest
    how = "to the bytes it had" if same else "to other bytes than it had: libraries or the device differ"
    whole = replace(result, ok=True, problems=[], indexes={}, repaired=[f"It was read anew, {how}."])
    logger.warning("memory %r: %s", memory.name, whole.repaired[0])
    return _with_indexes(fresh, whole, indexes)


def _source(memory: Memory, model: Any, tokenizer: Any) -> tuple[dict[str, Any], str | None]:
    """What to encode, or why there is nothing."""
    manifest = memory.manifest
    if not manifest.has_text and not manifest.has_ids:
        what = "because its document, which was no text, is not kept"
        return {}, f"It cannot be rebuilt, {what}: remove the memory and encode its document again."
    key = TEXT if manifest.has_text else TOKEN_IDS
    value = memory.store.records.salvage(manifest.id, key)
    if value is None or checksum(value) != memory.store.records.salvage(manifest.id, CHECKSUM + key):
        what = f"because {describe(key)} cannot be read either"
        return {}, f"It cannot be rebuilt, {what}: {_way_out(memory)}"
    if model is None:
        return {}, (
            f"Its text is whole: `memstore verify --repair --model MODEL` reads it anew with the "
            f"{manifest.fingerprint.get('model_class')} that wrote it."
        )
    if manifest.has_text:
        return {"tokenizer": tokenizer, "text": value.decode()}, None
    return {"input_ids": np.frombuffer(value, "<i4").copy()}, None


def _way_out(memory: Memory) -> str:
    """What to do about a memory of which nothing is left to rebuild it from, by what it remembers of its file."""
    name, source, folder = memory.name, memory.metadata.get("source"), memory.metadata.get("folder")
    if not isinstance(source, str):
        return "remove the memory and encode its document again."
    command = ["index", source, *([] if Path(source).stem == name else ["--name", name])]
    if isinstance(folder, str):
        command = ["sync", folder]
    return f"remove the memory, and `{shlex.join(['memstore', *command])}` reads {source} again."


def _what_differs(memory: Memory, model: Any, tokenizer: Any) -> str:
    """Between the model and tokenizer given and those that wrote the memory. Raises UnsupportedModelError."""
    from memstore.fingerprint import fingerprint, mismatches

    facts = fingerprint(registry.adapter_for(model)(model), tokenizer)
    return "; ".join(mismatches(memory.manifest.fingerprint, facts))
