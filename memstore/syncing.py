"""A folder of texts and its memories: what was added to it, what changed, and what is gone.

A memory remembers in its metadata the file it was made of ("source"), and the folder it was synchronised with
("folder"). Only a memory of the same file is ever replaced, and only one of the same folder is ever removed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from memstore import documents
from memstore.documents import STDIN
from memstore.errors import DocumentError, MemoryExistsError, MemoryNotFoundError, MemstoreError
from memstore.memory import Memory, text_digest
from memstore.store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from memstore.updating import Update

logger = logging.getLogger(__name__)


@dataclass
class Comparison:
    """What there is to do so that a store holds what a folder does. ``failed``: documents that cannot be read, or whose
    name another memory has, each with what is wrong."""

    added: list[documents.Document] = field(default_factory=list)
    changed: list[documents.Document] = field(default_factory=list)
    unchanged: list[documents.Document] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    failed: list[tuple[documents.Document, MemstoreError]] = field(default_factory=list)


def compare(store: MemoryStore | None, folder: str) -> Comparison:
    """Hold the texts of a folder against a store, None for an empty one. No model is needed, and nothing is changed.

    Raises DocumentError if the folder is none, holds no text file, or cannot be read throughout: then nothing is known
    to be gone.
    """
    if not Path(folder).is_dir():
        raise DocumentError(f"{folder} is no folder that can be read. Name the one that holds the texts.")
    found = documents.find([folder])
    known = {} if store is None else {memory.name: memory for memory in store.memories()}
    comparison = Comparison()
    for document in found:
        memory = known.get(document.name)
        try:
            digest = text_digest(document.read())
            if memory is None:
                comparison.added.append(document)
            elif memory.manifest.has_text and memory.manifest.document_digest == digest:
                comparison.unchanged.append(document)
            else:
                check_source(memory, document, folder)
                comparison.changed.append(document)
        except MemstoreError as error:
            logger.info("%s is left as it is: %s", document.path, error)
            comparison.failed.append((document, error))
    for name in _gone(known, folder, found):
        if link := _link_above(folder, name):
            behind = DocumentError(
                f"{link} has become a link, and what lies behind links to folders is not read. Memory {name!r} stays "
                "as it is; `memstore remove` removes it."
            )
            comparison.failed.append((documents.Document(name, str(Path(folder, name))), behind))
        else:
            comparison.removed.append(name)
    logger.info("%s: %s", folder, ", ".join(f"{len(each)} {what}" for what, each in vars(comparison).items()))
    return comparison


def remove_gone(store: MemoryStore, folder: str) -> list[str]:
    """Remove the memories whose texts are no longer in a folder, and say which. Store and folder are looked at again:
    since they were compared, hours may have gone by.

    Raises DocumentError as :func:`compare` does.
    """
    known = {memory.name: memory for memory in store.memories()}
    removed = [name for name in _gone(known, folder, documents.find([folder])) if not _link_above(folder, name)]
    for name in removed:
        with suppress(MemoryNotFoundError):  # another process was faster
            del store[name]
    return removed


def _gone(known: Mapping[str, Memory], folder: str, found: list[documents.Document]) -> list[str]:
    """The names of the memories that sync of this folder made of texts that are not there."""
    names, whole = {document.name for document in found}, _text(folder)
    return [name for name, memory in known.items() if name not in names and memory.metadata.get("folder") == whole]


def _link_above(folder: str, name: str) -> Path | None:
    """The link in the place of a folder that a document of this name lay in, if there is one."""
    above = [Path(folder, parent) for parent in PurePosixPath(name).parents][:-1]  # the last one is the folder itself
    return next((path for path in above if path.is_symlink()), None)


def refresh(
    store: MemoryStore,
    model: Any,
    tokenizer: Any,
    document: documents.Document,
    text: str,
    *,
    folder: str | None = None,
    dtype: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Update:
    """Read a document, or what changed of it if the store holds an earlier version of the same file.

    Raises MemoryExistsError if the memory of this name is of another file, and what
    :meth:`memstore.store.MemoryStore.update` raises.
    """
    metadata = _origin(document, folder)
    before = store.get(document.name)
    if before is not None:
        same = before.manifest.has_text and before.manifest.document_digest == text_digest(text)
        if not same:
            check_source(before, document, folder)
        # A memory that is as the file is stays as it is, whatever it was made of.
        metadata = before.metadata | ({} if same else metadata)
    return store.update(model, tokenizer, text, name=document.name, metadata=metadata, dtype=dtype, progress=progress)


def check_source(memory: Memory, document: documents.Document, folder: str | None) -> None:
    """Raises MemoryExistsError unless a memory was made of this file, or of one of this folder."""
    origin = _origin(document, folder)
    mine = [key for key, value in origin.items() if memory.metadata.get(key) == value]
    if not mine:
        made = memory.metadata.get("source")
        raise MemoryExistsError(
            f"{document.path}: the store holds another memory named {memory.name!r} already, which was made of "
            f"{made or 'no file that it names'}. Remove it first, or choose another name."
        )


def _origin(document: documents.Document, folder: str | None) -> dict[str, Any]:
    """What a memory remembers of where its text came from."""
    if document.path == STDIN:
        return {}
    return {"source": _text(document.path)} | ({} if folder is None else {"folder": _text(folder)})


def _text(path: str) -> str:
    """The whole path, with bytes that are no text written as escapes."""
    return os.fsencode(Path(path).resolve()).decode("utf-8", "backslashreplace")
