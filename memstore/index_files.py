"""Whether the files of an index are those that were written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from memstore.index_record import IndexFile, all_records

if TYPE_CHECKING:
    from memstore.memory import Memory


class UnusableError(Exception):
    """Why an index cannot be used as it lies in the store."""


def check_file(path: Path, file: IndexFile) -> None:
    """Raises UnusableError unless the file holds the bytes that were written. It is read in pieces, and not at all if
    its length is another."""
    try:
        same = path.stat().st_size == file.nbytes and checksum_of(path) == file.checksum
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UnusableError(f"{path} is missing") from error
    if not same:
        raise UnusableError(f"{path} is damaged: its bytes are not those that were written")


def checksum_of(path: Path) -> str:
    """The xxh3_128 of a file, in hexadecimal digits."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def damaged_indexes(memory: Memory) -> dict[str, str]:
    """By backend, what is wrong with an index that is kept of a memory."""
    folder, problems = memory.store.records.folder(memory.manifest.id), dict[str, str]()
    for record in all_records(memory.store.records, memory.manifest.id):
        if folder is None or not record.files:
            continue
        try:
            for name, file in record.files.items():
                check_file(folder / "indexes" / record.folder / name, file)
        except (UnusableError, OSError) as error:
            problems[record.backend] = str(error)
    return problems
