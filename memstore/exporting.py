"""Exporting a memory: see :mod:`memstore.exchange` for what is written.

It is written into a folder of another name, which gets its own in one step, so that half an export is never seen.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import filelock

from memstore.errors import MEND, DamagedMemoryError, ExportError, FormatError, StoreBusyError, StoreFullError
from memstore.exchange import (
    FORMAT,
    JSON_LIMIT,
    MAJOR,
    MANIFEST,
    MINOR,
    OWN,
    TEXT_FILE,
    Layout,
    data_bytes,
    files,
    folder_name,
    header,
    in_file,
    json_checksum,
)
from memstore.files import FULL, reason, sync, write_synced
from memstore.memory import Memory
from memstore.memory_writer import content_digest
from memstore.open_memory import OpenMemory
from memstore.values import OFFSETS, TEXT, describe

logger = logging.getLogger(__name__)


def export_memory(memory: Memory, folder: Path) -> Path:
    """Write a memory into a folder of its own in ``folder``, which is created, and return that. The same again changes
    nothing.

    Every byte is verified before it is written. Raises DamagedMemoryError, MemoryNotFoundError, FormatError for records
    that this version does not know, StoreFullError, StoreBusyError while another process exports it to the same place,
    or ExportError if something else is there, or nothing can be written.
    """
    target = folder / folder_name(memory.name)
    try:
        inside = memory.store.records.persistent and folder.resolve().is_relative_to(memory.store.path)
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, or no possible path
        raise ExportError(
            f"{str(folder)!r} cannot be the path of a folder: {reason(error)}. Name another one."
        ) from error
    if inside:
        raise ExportError(f"{folder} lies in the store itself, which is no place for other files. Name another folder.")
    with memory.open("off") as opened, _explained(folder):
        _check(opened)
        described = json.dumps(_described(opened), indent=1).encode()
        if len(described) > JSON_LIMIT:
            raise ExportError(f"The metadata of {memory.name!r} is too large: an export holds {JSON_LIMIT >> 20} MiB.")
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(folder / f".{target.name}.lock"):
            if target.exists():
                if (target / MANIFEST).is_file() and (target / MANIFEST).read_bytes() == described:
                    _check_sizes(opened, target)
                    logger.info("memory %r is in %s already", memory.name, target)
                    return target
                raise ExportError(f"{target} already exists and is no export of this memory. Name another folder.")
            partial = folder / f".{target.name}.partial"
            if partial.exists():  # what a killed process left
                shutil.rmtree(partial)
            partial.mkdir()
            try:
                _write(opened, partial, described)
                partial.rename(target)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            sync(folder)
    logger.info("exported memory %r to %s", memory.name, target)
    return target


def _check(opened: OpenMemory) -> None:
    """That the memory holds what it was completed with, and nothing that would be left out."""
    manifest = opened.manifest
    if content_digest(opened.keys, opened.checksum) != manifest.digest:
        raise DamagedMemoryError(
            f"Memory {manifest.name!r} is damaged: its records are not those it was completed with. {MEND}"
        )
    known = {key for _, layout in _files(opened) for key in layout}
    unknown = opened.keys - known - ({TEXT} if manifest.has_text else set())
    if unknown:
        raise FormatError(
            f"Memory {manifest.name!r} has records that this version of memstore does not know: "
            f"{', '.join(map(describe, sorted(unknown)))}. Install the version that wrote it."
        )


def _check_sizes(opened: OpenMemory, folder: Path) -> None:
    """That the files of an export are there, and as long as they were. Their bytes are verified when they are
    imported."""
    sizes = {name: len(header(layout)) + data_bytes(layout) for name, layout in _files(opened)}
    if opened.manifest.has_text:
        sizes[TEXT_FILE] = opened.verified(TEXT).nbytes
    for name, size in sizes.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != size:
            raise ExportError(
                f"{folder / name} is not as it was exported. Remove {folder}, and export the memory again."
            )


def _files(opened: OpenMemory) -> Iterator[tuple[str, Layout]]:
    return files(opened.manifest, OFFSETS in opened.keys)


def _described(opened: OpenMemory) -> dict[str, Any]:
    manifest = {key: value for key, value in opened.manifest.fields().items() if key not in OWN}
    return {
        "format": FORMAT,
        "major": MAJOR,
        "minor": MINOR,
        "checksum": json_checksum(manifest),
        "has_offsets": OFFSETS in opened.keys,
        "manifest": manifest,
    }


def _write(opened: OpenMemory, folder: Path, described: bytes) -> None:
    if opened.manifest.has_text:
        write_synced(folder / TEXT_FILE, [opened.verified(TEXT)])
    for name, layout in _files(opened):
        write_synced(folder / name, [header(layout), *_bytes(opened, layout)])
    write_synced(folder / MANIFEST, [described])
    sync(folder)


def _bytes(opened: OpenMemory, layout: Layout) -> Iterator[memoryview]:
    """The bytes of all pieces of a file, in its order."""
    views: dict[str, memoryview] = {}
    for key, mine in layout.items():
        record, start = opened.verified(key), 0
        for piece in mine:
            views[piece.name] = record[start : start + piece.nbytes]
            start += piece.nbytes
    for piece in in_file(layout):
        yield views[piece.name]


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """A lock that ends with its process, and whose file goes with it."""
    lock = filelock.FileLock(path, timeout=0)
    try:
        lock.acquire()
    except filelock.Timeout as error:
        raise StoreBusyError(f"Another process exports to {path.parent}. Wait for it and repeat.") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.release()


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            message = f"The disk that holds {folder} is full. Free some space and repeat; nothing is lost."
            raise StoreFullError(message) from error
        raise ExportError(f"{folder} cannot be written: {reason(error)}. Name another folder.") from error
