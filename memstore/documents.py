"""Text files as documents: which files an argument stands for, the name each gets, and reading them."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from memstore.errors import DocumentError
from memstore.files import reason

logger = logging.getLogger(__name__)

STDIN = "-"
SUFFIXES = (".md", ".rst", ".text", ".txt")


@dataclass(frozen=True)
class Document:
    """A text to be read: its name in the store, and its path, or ``-`` for standard input."""

    name: str
    path: str
    inside: bool = field(default=False, compare=False)
    """Found in a folder, where only plain files are read: a pipe that nobody writes to would keep others waiting."""

    def read(self) -> str:
        """The text exactly as it stands in the file, line ends included.

        Raises DocumentError when it cannot be read, or is not UTF-8.
        """
        if self.path == STDIN and sys.stdin is None:
            raise DocumentError("- cannot be read: standard input is closed.")
        if self.inside and Path(self.path).exists() and not Path(self.path).is_file():
            raise DocumentError(
                f"{self.path} is no plain file, and of a folder only those are read. Name it by itself."
            )
        try:
            data = sys.stdin.buffer.read() if self.path == STDIN else Path(self.path).read_bytes()
        except (OSError, ValueError) as error:  # a path may itself be impossible
            raise _unreadable(self.path, error) from error
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DocumentError(
                f"{self.path} is not UTF-8: byte 0x{data[error.start]:02x} at offset {error.start} ({error.reason}). "
                "Convert it first, for example with iconv."
            ) from error


def find(paths: list[str]) -> list[Document]:
    """The documents that these arguments stand for.

    A file is named by its name without suffix. A folder stands for the text files in it and below it, except hidden
    ones and what lies behind links to other folders, each named by its path inside the folder without suffix
    (``gospels/john``).
    Raises DocumentError when a folder holds no text file or cannot be read throughout, or two documents would get one
    name.
    """
    if "" in paths:
        raise DocumentError("An empty argument names no file. Is a variable not set?")
    found: dict[str, Document] = {}
    for document in (document for path in paths for document in _expand(path)):
        other = found.setdefault(document.name, document)
        if other != document:
            raise DocumentError(
                f"{other.path} and {document.path} would both be named {document.name!r}. "
                "Rename one of them, or index them one by one, each with --name."
            )
    return list(found.values())


def _expand(path: str) -> Iterator[Document]:
    if path == STDIN:
        yield Document("stdin", STDIN)
        return
    try:
        texts = _texts(Path(path)) if Path(path).is_dir() else None
    except (OSError, ValueError) as error:
        raise _unreadable(getattr(error, "filename", None) or path, error) from error
    if texts is None:
        yield Document(Path(path).stem, path)
    elif not texts:
        raise DocumentError(f"{path} holds no text file ({', '.join(SUFFIXES)}).")
    else:
        yield from (Document(file.with_suffix("").as_posix(), str(path / file), inside=True) for path, file in texts)


def _texts(folder: Path) -> list[tuple[Path, Path]]:
    """The text files in a folder and below it, as the folder and the path inside it. Raises OSError for a folder that
    cannot be read, which would else be left out without a word."""

    def fail(error: OSError) -> None:
        raise error

    texts = []
    passed = {"files": 0, "folders": 0}
    for parent, folders, files in os.walk(folder, onerror=fail):
        passed["folders"] += sum(name.startswith(".") or Path(parent, name).is_symlink() for name in folders)
        folders[:] = [name for name in folders if not name.startswith(".")]
        paths = [Path(parent, name) for name in files if not name.startswith(".")]
        some = [path for path in paths if path.suffix.lower() in SUFFIXES]  # links that lead nowhere, too
        passed["files"] += len(files) - len(some)
        texts += some
    if any(passed.values()):
        logger.info(
            "%s: passed over %d files that are hidden or have other suffixes, and %d folders that are hidden or links",
            folder,
            *passed.values(),
        )
    return [(folder, path.relative_to(folder)) for path in sorted(texts)]


def _unreadable(path: str, error: OSError | ValueError) -> DocumentError:
    return DocumentError(f"{path} cannot be read: {reason(error)}.")
