"""A folder of texts and its memories: what was added to it, what changed, and what is gone.

A memory remembers in its metadata the file it was made of ("source"), and the folder it was synchronised with
("folder"). Only a memory of the same file, or of the same folder, is ever replaced, and only one of the folder is ever
removed.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from memstore import documents, noting, pending
from memstore.documents import STDIN
from memstore.errors import (
    DamagedMemoryError,
    DocumentError,
    MemoryBusyError,
    MemoryExistsError,
    MemoryNotFoundError,
    MemstoreError,
)
from memstore.manifest import Manifest
from memstore.memory import Memory, text_digest
from memstore.memory_writer import token_parts
from memstore.store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from memstore.updating import Update

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Folder:
    """A folder of texts: its path, and the one it had when its memories were made, if it has been moved since."""

    path: str
    before: str | None = None

    def owns(self, metadata: Mapping[str, Any]) -> bool:
        """Whether a memory with this metadata is one of the folder."""
        paths = [_text(self.path)]
        if self.before is not None:  # a link to where it is now may be in its place
            paths += [_text(self.before), _escaped(str(Path(self.before).absolute()))]
        return metadata.get("folder") in paths

    def texts(self) -> list[documents.Document]:
        """The text files in it. Raises DocumentError if it is none, holds no text file, or cannot be read throughout;
        and if it is said to have been where there is another folder now."""
        if not Path(self.path).is_dir():
            raise DocumentError(f"{self.path} is no folder that can be read. Name the one that holds the texts.")
        if self.before is not None and Path(self.before).is_dir() and not Path(self.before).samefile(self.path):
            raise DocumentError(
                f"{self.before} is still there, so {self.path} is another folder, and what was made of that one stays. "
                "Say where a folder was before only once it has moved."
            )
        try:
            return documents.find([f"./{STDIN}" if self.path == STDIN else self.path])
        except DocumentError as error:
            hint = "Nothing is removed; `memstore remove` removes what is gone for good."
            raise DocumentError(f"{error} {hint}") from error


@dataclass
class Comparison:
    """What there is to do so that a store holds what a folder does. ``failed``: documents that cannot be read, or whose
    name another memory has, each with what is wrong."""

    added: list[documents.Document] = field(default_factory=list)
    changed: list[documents.Document] = field(default_factory=list)
    unchanged: list[documents.Document] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    failed: list[tuple[documents.Document, MemstoreError]] = field(default_factory=list)


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
            same = _is_of(memory, text)
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


def adopt(store: MemoryStore, folder: Folder, unchanged: list[documents.Document]) -> None:
    """Note of memories that are as their files are that they are of this folder: if they were made of these very files
    one by one, or of the folder where it was before. And give up what was begun of another version of them."""
    begun = {manifest.name for manifest in store.unfinished()}
    known = {memory.name: memory for memory in store.memories()}
    for document in unchanged:
        memory = known.get(document.name)
        if memory is None:
            continue
        if document.name in begun:
            pending.give_up(store, document.name)
        origin, digest = _origin(document, folder), memory.manifest.document_digest

        def change(newest: Manifest, document: documents.Document = document, digest: str = digest) -> Any:
            mine = newest.document_digest == digest and _is_mine(newest.metadata, document, folder)
            return newest.metadata | _origin(document, folder) if mine else None

        if memory.metadata != memory.metadata | origin and _is_mine(memory.metadata, document, folder):
            with suppress(MemoryNotFoundError):  # another process was faster
                noting.note(store, document.name, change)


def remove_gone(store: MemoryStore, folder: Folder) -> list[str]:
    """Remove the memories whose texts are no longer in a folder, finished or not, and say which. Store and folder are
    looked at again: since they were compared, hours may have gone by.

    Raises DocumentError as :func:`compare` does.
    """
    gone = _gone(store, folder, folder.texts())
    return [name for name in gone if _doubt(folder, name) is None and _removed(store, folder, name)]


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


def _is_of(memory: Memory, text: str) -> bool:
    return memory.manifest.has_text and memory.manifest.document_digest == text_digest(text)


def _can_be_opened(memory: Memory) -> bool:
    try:
        memory.open("off").close()
    except DamagedMemoryError as error:
        logger.warning("%s", error)
        return False
    return True


def _check_dtype(memory: Memory, dtype: str | None) -> None:
    """Raises MemoryExistsError for a memory that is stored in another dtype than asked for."""
    stored = {spec.dtype for spec in token_parts(memory.manifest).values()}
    if dtype is not None and stored != {dtype}:
        raise MemoryExistsError(
            f"Memory {memory.name!r} is stored as {' and '.join(sorted(stored))}, not {dtype}. Remove it first, and it "
            "is read anew."
        )


def refresh(
    store: MemoryStore,
    model: Any,
    tokenizer: Any,
    document: documents.Document,
    text: str,
    *,
    folder: Folder | None = None,
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
        dtype = dtype or min(spec.dtype for spec in token_parts(before.manifest).values())
        same = _is_of(before, text)
        if not same:
            check_source(before, document, folder)
        # A memory that is as the file is stays as it is, whatever it was made of.
        metadata = before.metadata | ({} if same else metadata)
    return store.update(model, tokenizer, text, name=document.name, metadata=metadata, dtype=dtype, progress=progress)


def check_source(memory: Memory, document: documents.Document, folder: Folder | None) -> None:
    """Raises MemoryExistsError unless a memory was made of this file, or of one of this folder."""
    if _is_mine(memory.metadata, document, folder):
        return
    made, place = memory.metadata.get("source"), memory.metadata.get("folder")
    moved = ""
    if folder is not None and isinstance(place, str) and not Path(place).exists():
        moved = f" If {folder.path} is the folder that was {place}: --moved-from {shlex.quote(place)}."
    raise MemoryExistsError(
        f"{document.path}: the store holds another memory named {memory.name!r} already, which was made of "
        f"{made or 'no file that it names'}. Remove it first, or choose another name.{moved}"
    )


def _is_mine(metadata: Mapping[str, Any], document: documents.Document, folder: Folder | None) -> bool:
    """Whether a memory with this metadata was made of this file by itself, or of one of this folder."""
    if folder is not None and (folder.owns(metadata) or "folder" in metadata):
        return folder.owns(metadata)
    source = _origin(document, None).get("source")
    return source is not None and metadata.get("source") == source


def _origin(document: documents.Document, folder: Folder | None) -> dict[str, Any]:
    """What a memory remembers of where its text came from."""
    if document.path == STDIN:
        return {}
    return {"source": _text(document.path)} | ({} if folder is None else {"folder": _text(folder.path)})


def _text(path: str) -> str:
    """The whole path. Raises DocumentError for one that leads round in a circle."""
    try:
        return _escaped(str(Path(path).resolve()))
    except (OSError, RuntimeError, ValueError) as error:
        raise DocumentError(f"{path!r} cannot be the path of a folder: {error}.") from error


def _escaped(path: str) -> str:
    """With bytes that are no text written as escapes, and so backslashes, too."""
    return os.fsencode(path).replace(b"\\", b"\\\\").decode("utf-8", "backslashreplace")
