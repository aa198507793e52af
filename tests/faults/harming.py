"""Harm to a memory whose place is known."""

from __future__ import annotations

from pathlib import Path

from memstore.memory import Memory
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
