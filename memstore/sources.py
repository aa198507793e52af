"""Where the text of a memory came from.

A memory remembers in its metadata the file it was made of ("source"), and the folder it was synchronised with
("folder"). Only a memory of the same file, or of the same folder, is ever replaced, and only one of the folder is ever
removed.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memstore import documents
from memstore.documents import STDIN
from memstore.errors import DocumentError, MemoryExistsError
from memstore.files import reason
from memstore.memory import Memory, text_digest
from memstore.memory_writer import dtypes
from memstore.store import MemoryStore

if TYPE_CHECKING:
    from memstore.updating import Update


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


def is_of(memory: Memory, text: str) -> bool:
    """Whether a memory holds this text."""
    return memory.manifest.has_text and memory.manifest.document_digest == text_digest(text)


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
    metadata = origin(document, folder)
    before = store.get(document.name)
    if before is not None:
        dtype = dtype or dtypes(before.manifest)[0]
        same = is_of(before, text)
        if not same:
            check_source(before, document, folder)
        # A memory that is as the file is stays as it is, whatever it was made of.
        metadata = before.metadata | ({} if same else metadata)
    return store.update(model, tokenizer, text, name=document.name, metadata=metadata, dtype=dtype, progress=progress)


def check_source(memory: Memory, document: documents.Document, folder: Folder | None) -> None:
    """Raises MemoryExistsError unless a memory was made of this file, or of one of this folder."""
    if is_mine(memory.metadata, document, folder):
        return
    made, place = memory.metadata.get("source"), memory.metadata.get("folder")
    moved = ""
    if folder is not None and isinstance(place, str) and not Path(place).exists():
        moved = f" If {folder.path} is the folder that was {place}: --moved-from {shlex.quote(place)}."
    raise MemoryExistsError(
        f"{document.path}: the store holds another memory named {memory.name!r} already, which was made of "
        f"{made or 'no file that it names'}. Remove it first, or choose another name.{moved}"
    )


def is_mine(metadata: Mapping[str, Any], document: documents.Document, folder: Folder | None) -> bool:
    """Whether a memory with this metadata was made of this file by itself, or of one of this folder."""
    if folder is not None and (folder.owns(metadata) or "folder" in metadata):
        return folder.owns(metadata)
    source = origin(document, None).get("source")
    return source is not None and metadata.get("source") == source


def origin(document: documents.Document, folder: Folder | None) -> dict[str, Any]:
    """What a memory remembers of where its text came from."""
    if document.path == STDIN:
        return {}
    return {"source": _text(document.path)} | ({} if folder is None else {"folder": _text(folder.path)})


def _text(path: str) -> str:
    """The whole path. Raises DocumentError for one that leads round in a circle."""
    try:
        return _escaped(str(Path(path).resolve()))
    except (OSError, RuntimeError, ValueError) as error:
        raise DocumentError(f"{path!r} cannot be the path of a text or a folder: {reason(error)}.") from error


def _escaped(path: str) -> str:
    """With bytes that are no text written as escapes, and so backslashes, too."""
    return os.fsencode(path).replace(b"\\", b"\\\\").decode("utf-8", "backslashreplace")
