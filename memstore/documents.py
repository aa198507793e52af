"""Text files as documents: which files an argument stands for, the name each gets, and reading them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from memstore.errors import DocumentError

STDIN = "-"
SUFFIXES = (".md", ".rst", ".text", ".txt")


@dataclass(frozen=True)
class Document:
    """A text to be read: its name in the store, and its path, or ``-`` for standard input."""

    name: str
    path: str

    def read(self) -> str:
        """The text exactly as it stands in the file, line ends included.

        Raises DocumentError when it cannot be read, or is not UTF-8.
        """
        try:
            data = sys.stdin.buffer.read() if self.path == STDIN else Path(self.path).read_bytes()
        except OSError as error:
            raise DocumentError(f"{self.path} cannot be read: {error.strerror}.") from error
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
    ones, each named by its path inside the folder without suffix (``gospels/john``).
    Raises DocumentError when a folder holds no text file, or two documents would get one name.
    """
    found: dict[str, Document] = {}
    for document in (document for path in paths for document in _expand(path)):
        other = found.setdefault(document.name, document)
        if other != document:
            raise DocumentError(
                f"{other.path} and {document.path} would both be named {document.name!r}. "
                "Index them one by one, each with --name."
            )
    return list(found.values())


def _expand(path: str) -> Iterator[Document]:
    if path == STDIN:
        yield Document("stdin", STDIN)
    elif Path(path).is_dir():
        folder = Path(path)
        relative = [file.relative_to(folder) for file in sorted(folder.rglob("*")) if file.is_file()]
        texts = [
            file
            for file in relative
            if file.suffix.lower() in SUFFIXES and not any(part.startswith(".") for part in file.parts)
        ]
        if not texts:
            raise DocumentError(f"{path} holds no text file ({', '.join(SUFFIXES)}).")
        yield from (Document(file.with_suffix("").as_posix(), str(folder / file)) for file in texts)
    else:
        yield Document(Path(path).stem, path)
