"""Harm to a memory whose place is known, and to the catalog."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from memstore.catalog import SEALED, key
from memstore.memory import Memory
from memstore.repair import mend_catalog
from memstore.store import MemoryStore
from memstore_backends.lmdb_pages import scan


def data_of(memory: Memory) -> Path:
    folder = memory.store.records.folder(memory.manifest.id)
    assert folder is not None
    return folder / "data.mdb"


def damage(memory: Memory, *keys: bytes) -> None:
    """Flip a bit in the middle of each of these values."""
    data = data_of(memory)
    with data.open("r+b") as file:
        layout = scan(file.fileno())
        for key in keys:
            start, size = layout.values[key]
            file.seek(start + size // 2)
            byte = file.read(1)[0]
            file.seek(start + size // 2)
            file.write(bytes([byte ^ 4]))


def catalog_of(library: MemoryStore) -> Path:
    return library.path / "catalog" / "data.mdb"


def lose(data: Path) -> None:
    data.unlink()


def fill_with_zeros(data: Path) -> None:
    data.write_bytes(bytes(data.stat().st_size))


def cut(data: Path) -> None:
    os.truncate(data, 8192)


def lose_the_folder(data: Path) -> None:
    shutil.rmtree(data.parent)


def forget_a_record(data: Path) -> None:
    whole = data.read_bytes()
    data.write_bytes(whole.replace(key(SEALED, "ruth"), b"l" + key(SEALED, "ruth")[1:]))


def change_a_manifest(data: Path) -> None:
    data.write_bytes(data.read_bytes().replace(b"esther", b"eskher"))


def copies(library: MemoryStore) -> list[Path]:
    return list(library.path.glob("memories/*/record"))


def lose_all(library: MemoryStore) -> None:
    """Lose the catalog and mend it, so that there is what copies say."""
    library.close()
    catalog_of(library).unlink()
    mend_catalog(library.path, "lmdb")


class KilledError(BaseException):
    """Stands for the end of the process."""


def kill(*_: Any) -> Any:
    raise KilledError
