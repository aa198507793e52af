"""LMDB's lock file, made fit for use before LMDB maps it.

It says which transaction is the newest and who is reading. LMDB makes it anew when nobody else has it open, and else
believes it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from memstore.errors import StoreBusyError, StoreError

logger = logging.getLogger(__name__)

_BODY = struct.Struct("<IIQI")  # magic, format, transaction, readers
_MAGIC = 0xBEEFC0DE


def prepare(lock_file: Path, max_readers: int) -> None:
    """Give the lock file its blocks: LMDB writes to it through a map, which on a full disk would raise SIGBUS.

    Only while this process does not have it open: closing a file drops all POSIX locks that the process has on it.
    Raises StoreError if it is damaged while another process uses it; what nobody uses is emptied.
    """
    size = 64 * (max_readers + 4)
    fd = os.open(lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        head = os.pread(fd, _BODY.size, 0)
        if any(head) and not _is_sound(head, max_readers):
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)  # as LMDB does to find out whether it is alone
            except OSError as error:
                raise StoreError(
                    f"{lock_file} is damaged, and another process uses the store. End all that use it, and repeat; no "
                    "memory is lost."
                ) from error
            os.ftruncate(fd, 0)
            logger.info("%s was damaged, and is made anew: nobody used it", lock_file)
        if os.fstat(fd).st_blocks * 512 < size:
            os.posix_fallocate(fd, 0, size)
    finally:
        os.close(fd)


@contextmanager
def alone(lock_file: Path) -> Iterator[None]:
    """Inside, no process has the environment open, and what the lock file says of it is forgotten: another file may be
    in its place afterwards. Raises StoreBusyError if one has.

    Only while this process does not have it open, as :func:`prepare`.
    """
    fd = os.open(lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        except OSError as error:
            raise StoreBusyError(f"Another process uses {lock_file.parent}. End all that do, and repeat.") from error
        os.pwrite(fd, bytes(_BODY.size), 0)  # not cut: a child that was forked by a process that is gone may map it
        yield
    finally:
        os.close(fd)


def _is_sound(head: bytes, max_readers: int) -> bool:
    if len(head) < _BODY.size:
        return False
    magic, _, _, readers = _BODY.unpack(head)
    return bool(magic == _MAGIC and readers <= max_readers)
