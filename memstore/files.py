"""Files that outlast a power cut, and are there whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memstore.interfaces import Buffer

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""What the system says where a disk, a quota or the size of a file is exhausted."""


def reason(error: Exception) -> str:
    """What went wrong with a file, in the words of the system: who asks knows its path."""
    return getattr(error, "strerror", None) or str(error)


def write_synced(path: Path, chunks: Iterable[Buffer]) -> None:
    """Write a file and wait until it is on the disk. What is left of an earlier try is written over."""
    with path.open("wb") as file:
        for chunk in chunks:
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def replace_by(path: Path, chunks: Iterable[Buffer], temporary: Path) -> None:
    """Let a file hold these bytes in one step, by way of another file of the same folder."""
    try:
        write_synced(temporary, chunks)
        temporary.replace(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Make a file, or the entries of a folder, survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
