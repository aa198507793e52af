"""What LMDB and the file system have to say, as errors of memstore."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import lmdb

from memstore.errors import DamagedMemoryError, FormatError, ReadOnlyStoreError, StoreError, StoreFullError
from memstore.files import FULL, reason

_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn what goes wrong with ``path`` inside into a StoreError, of a kind that says what to do."""
    try:
        yield
    except lmdb.MapFullError as error:
        raise StoreFullError(f"{path} has reached the size it was opened for ({error}).") from error
    except (lmdb.VersionMismatchError, lmdb.InvalidError) as error:
        raise FormatError(f"{path} is not in the format of LMDB 0.9 ({error}). Restore it from a copy.") from error
    except (lmdb.CorruptedError, lmdb.PageNotFoundError) as error:
        raise DamagedMemoryError(f"{path} is damaged ({error}). Restore it from a copy, or remove it.") from error
    except (lmdb.Error, OSError) as error:
        code = error.errno if isinstance(error, OSError) else getattr(error, "code", None)
        named = getattr(error, "filename", None)
        place = os.fsdecode(named) if isinstance(named, str | bytes) and named else path
        if code in FULL or (code == errno.EIO and _is_full(path)):
            message = f"The disk that holds {path} is full. Free some space and repeat; nothing complete is lost."
            raise StoreFullError(message) from error
        if code in _READ_ONLY and _is_closed(Path(place)):
            raise StoreError(f"{place} cannot be read: {reason(error)}. Ask its owner for the permission.") from error
        if code in _READ_ONLY or isinstance(error, lmdb.ReadonlyError):
            raise ReadOnlyStoreError(
                f'{place} cannot be written: {reason(error)}. The store can be read (mode="r"); to write, ask its '
                "owner for the permission, or copy it."
            ) from error
        raise StoreError(f"{place}: {reason(error)}") from error


def _is_full(path: Path) -> bool:
    """LMDB reports EIO when the disk takes only a part of what it writes."""
    try:
        disk = os.statvfs(path)
    except OSError:
        return False
    return disk.f_bavail * disk.f_frsize < 64 << 20


def _is_closed(path: Path) -> bool:
    """Whether permissions forbid even reading it."""
    try:
        path.stat()
    except PermissionError:  # a folder above it is closed
        return True
    except OSError:
        return False
    return not os.access(path, os.R_OK)
