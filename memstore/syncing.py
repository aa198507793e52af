"""A folder of texts and its memories: what was added to it, what changed, and what is gone."""

from __future__ import annotations

import logging
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from memstore import documents, noting, pending
from memstore.errors import (
    DamagedMemoryError,
    DocumentError,
    MemoryBusyError,
    MemoryExistsError,
    MemoryNotFoundError,
    MemstoreError,
)
from memstore.manifest import Manifest
from memstore.memory import Memory
from memstore.memory_writer import dtypes
from memstore.sources import Folder, check_source, is_mine, is_of, origin
from memstore.store import MemoryStore

logger = logging.getLogger(__name__)


Failures = list[tuple[documents.Document, MemstoreError]]


@dataclass
class Comparison:
    """What there is to do so that a store holds what a folder does. ``failed``: documents that cannot be read, or whose
    memory is another one or may not be touched, each with what is wrong."""

    added: list[documents.Document] = field(default_factory=list)
    changed: list[documents.Document] = field(default_factory=list)
    unchanged: list[documents.Document] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    failed: Failures = field(default_factory=list)


def compare(store: MemoryStore | None, folder: Folder, dtype: str | None = None) -> Comparison:
    """Hold the texts of a folder against a store, None for an empty one. No model is needed, and nothing is changed.

    A memory whose file is not as long, or not built, as it was sealed counts as changed; its bytes are not read. dtype:
    what vectors are to be stored in; None for whatever they are stored in. Raises DocumentError if the folder is none,
    holds no text file, or cannot be read throughout: then nothing is known to be gone.
    """
    found = folder.texts()
    known = {} if store is None else {memory.name: memory for memory in store.memories()}
    comparison = Comparison()
    for document in found:
        memory = known.get(document.name)
        try:
            text = document.read()
            if memory is None:
                comparison.added.append(document)
                continue
            same = is_of(memory, text)
            if not same:
                check_source(memory, document, folder)
            _check_dtype(memory, dtype)
            (comparison.unchanged if same and _can_be_opened(memory) else comparison.changed).append(document)
        except MemstoreError as error:
            logger.info("%s is left as it is: %s", document.path, error)
            comparison.failed.append((document, error))
    for name in [] if store is None else _gone(store, folder, found):
        if doubt := _doubt(folder, name):
            stays = DocumentError(f"{doubt} Memory {name!r} stays as it is; `memstore remove` removes it.")
            comparison.failed.append((documents.Document(name, str(Path(folder.path, name))), stays))
        else:
            comparison.removed.append(name)
    logger.info("%s: %s", folder.path, ", ".join(f"{len(each)} {what}" for what, each in vars(comparison).items()))
    return comparison


def adopt(store: MemoryStore, folder: Folder, unchanged: list[documents.Document]) -> Failures:
    """Note of memories that are as their files are that they are of this folder: if they were made of these very files
    one by one, or of the folder where it was before. And give up what was begun of another version of them. Gives those
    of which it failed."""
    begun = {manifest.name: manifest for manifest in store.unfinished()}
    known = {memory.name: memory for memory in store.memories()}
    failed: Failures = []
    for document in unchanged:
        memory, update = known.get(document.name), begun.get(document.name)
        if memory is None or not is_mine(memory.metadata, document, folder):
            continue
        try:
            if update is not None and is_mine(update.metadata, document, folder):
                pending.give_up(store, document.name)
            if memory.metadata != memory.metadata | origin(document, folder):
                _adopt(store, folder, document, memory.manifest.document_digest)
        except MemoryNotFoundError:  # another process was faster
            continue
        except MemstoreError as error:
            failed.append((document, error))
    return failed


def _adopt(store: MemoryStore, folder: Folder, document: documents.Document, digest: str) -> None:
    def change(newest: Manifest) -> dict[str, Any] | None:
        same = newest.document_digest == digest and is_mine(newest.metadata, document, folder)
        return newest.metadata | origin(document, folder) if same else None

    noting.note(store, document.name, change)


def remove_gone(store: MemoryStore, folder: Folder) -> tuple[list[str], Failures]:
    """Remove the memories whose texts are no longer in a folder, finished or not. Gives the names of those that were
    removed, and of which it failed. Store and folder are looked at again: since they were compared, hours may have gone
    by.

    Raises DocumentError as :func:`compare` does.
    """
    removed: list[str] = []
    failed: Failures = []
    for name in _gone(store, folder, folder.texts()):
        try:
            if _doubt(folder, name) is None and _removed(store, folder, name):
                removed.append(name)
        except MemstoreError as error:
            failed.append((documents.Document(name, str(Path(folder.path, name))), error))
    return removed, failed


def _removed(store: MemoryStore, folder: Folder, name: str) -> bool:
    """Remove a memory if it is still one of the folder."""
    store.check_writable()
    if name in store:
        return pending.remove_complete(store.records, name, lambda manifest: folder.owns(manifest.metadata))
    with suppress(MemoryBusyError):
        return pending.drop(store.records, name)
    return False


def _gone(store: MemoryStore, folder: Folder, found: list[documents.Document]) -> list[str]:
    """The names of the memories that sync of this folder made, or began, of texts that are not there. What was begun in
    the place of a complete memory goes with that one."""
    there = {document.name for document in found}
    held: dict[str, Manifest | Memory] = {manifest.name: manifest for manifest in store.unfinished()}
    held.update({memory.name: memory for memory in store.memories()})
    return sorted(name for name, each in held.items() if name not in there and folder.owns(each.metadata))


def _doubt(folder: Folder, name: str) -> str | None:
    """Why a document that is not found may still be there: because of what is in the place of a folder it lay in."""
    for parent in list(PurePosixPath(name).parents)[:-1]:  # the last one is the folder itself
        path = Path(folder.path, parent)
        if path.is_symlink():
            return f"{path} has become a link, and what lies behind links to folders is not read."
        if path.is_dir() and not any(path.iterdir()):
            return f"{path} is empty, as a folder is while the disk that belongs there is not mounted."
    return None


def _can_be_opened(memory: Memory) -> bool:
    try:
        memory.open("off").close()
    except DamagedMemoryError as error:
        logger.warning("%s", error)
        return False
    return True


def _check_dtype(memory: Memory, dtype: str | None) -> None:
    """Raises MemoryExistsError for a memory that is stored in another dtype than asked for."""
    stored = dtypes(memory.manifest)
    if dtype is not None and stored != [dtype]:
        raise MemoryExistsError(
            f"Memory {memory.name!r} is stored as {' and '.join(stored)}, not {dtype}. Remove it first, and it is read "
            "anew."
        )
