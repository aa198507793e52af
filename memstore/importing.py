"""Importing what was exported: see :mod:`memstore.exchange` for what is read.

Nothing in these files is trusted: their sizes are held against what the manifest makes them before anything of that
size is read, and the memory becomes visible only if its content has the digest it had.
"""

from __future__ import annotations

import json
import logging
import stat
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize

from memstore import pending
from memstore.errors import DamagedMemoryError, DocumentError, ExportError, FormatError, MemoryExistsError
from memstore.exchange import (
    DOCUMENT,
    FORMAT,
    JSON_LIMIT,
    MAJOR,
    MANIFEST,
    OWN,
    RECORD_LIMIT,
    TEXT_FILE,
    Layout,
    block_file,
    block_layout,
    data_bytes,
    files,
    json_checksum,
)
from memstore.exchange import PREFIX as PREFIX_FILE
from memstore.files import reason
from memstore.manifest import Manifest
from memstore.memory import Document, Memory
from memstore.memory_writer import MemoryWriter, token_parts
from memstore.store import MemoryStore
from memstore.values import OFFSETS, TOKEN_IDS, block_key, prefix_key

logger = logging.getLogger(__name__)


def exported(folder: Path) -> list[Path]:
    """The folders of the memories that were exported to ``folder``, or itself if it is that of one.

    Raises ExportError if there is none.
    """
    try:
        inside = sorted(folder.iterdir())
        found = [path for path in inside if not path.name.startswith(".") and (path / MANIFEST).is_file()]
        found = [folder] if (folder / MANIFEST).is_file() else found
    except (OSError, ValueError) as error:
        raise ExportError(
            f"{folder} cannot be read: {reason(error)}. Name the folder that `memstore export` wrote to, or one of the "
            "folders in it."
        ) from error
    if not found:
        raise ExportError(
            f"{folder} holds no exported memory: neither it nor a folder in it has a {MANIFEST}. Name the folder that "
            "`memstore export` wrote to."
        )
    return found


def import_memory(store: MemoryStore, folder: Path) -> Memory:
    """Bring one exported memory into a store, under the name it had. A memory that is already there is left as it is;
    an interrupted import goes on where it stopped.

    Raises FormatError (another format, or a manifest that is none), DamagedMemoryError (bytes that differ from those
    exported), ExportError (files that cannot be read), MemoryExistsError (another memory has this name),
    MemoryBusyError, StoreFullError, ReadOnlyStoreError.
    """
    store.check_writable()
    manifest, has_offsets = _manifest(folder)
    if manifest.name in store:
        memory = _same_or_raise(store[manifest.name], manifest)
        logger.info("memory %r is in %s already", memory.name, store.path)
        return memory
    for name, layout in files(manifest, has_offsets):  # before anything is written
        _check_size(folder / name, layout)
    draft = manifest.model_copy(update={"digest": None})
    document = _document(folder, manifest, has_offsets)
    try:
        with store.create(draft, document) as writer:
            # An interrupted writer of the same memory began it at another time.
            writer.manifest = draft.model_copy(update={"id": writer.manifest.id})
            resumed = writer.num_blocks_done > 0
            _fill(writer, folder, has_offsets)
            if writer.digest() == manifest.digest:
                memory = writer.finish()
                logger.info("imported memory %r from %s", memory.name, folder)
                return memory
    except (DamagedMemoryError, ExportError):  # of these files nothing will come
        pending.drop(store.records, manifest.name)
        raise
    pending.drop(store.records, manifest.name)
    if resumed:  # what was there already may be what differs
        return import_memory(store, folder)
    raise _damaged(folder, "its content is not what was exported")


def _manifest(folder: Path) -> tuple[Manifest, bool]:
    """The manifest under a new id, and whether there are offsets."""
    path = folder / MANIFEST
    try:
        raw = json.loads(_read(path, JSON_LIMIT))
        name, major, minor = raw["format"], raw["major"], raw["minor"]
        known = name == FORMAT and major == MAJOR
        described, has_offsets = raw["manifest"], raw["has_offsets"] is True
        same = json_checksum(described) == raw["checksum"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FormatError(f"{path} is not the manifest of an exported memory ({error!r}). Export it again.") from error
    if not known:
        raise FormatError(
            f"{path} has format {name} {major}.{minor}; this version of memstore reads format {FORMAT} {MAJOR}. "
            "Install the version that wrote it, or export the memory again."
        )
    if not isinstance(described, dict) or OWN & described.keys() or not same:
        raise _damaged(folder, "its manifest is not what was exported")
    manifest = Manifest.checked({**described, "id": uuid.uuid4().hex})
    try:
        manifest.pack()
    except DocumentError as error:
        raise FormatError(f"{path} holds what no manifest can: {error}") from error
    return manifest, has_offsets


def _same_or_raise(memory: Memory, manifest: Manifest) -> Memory:
    differing = memory.manifest.differing(manifest, *OWN)
    if not differing:
        return memory
    raise MemoryExistsError(
        f"The store holds another memory named {manifest.name!r} already; it differs in {', '.join(differing)}. "
        "Remove it first."
    )


def _document(folder: Path, manifest: Manifest, has_offsets: bool) -> Document:
    text, ids, offsets = None, None, None
    if manifest.has_text:
        try:
            text = _read(folder / TEXT_FILE, RECORD_LIMIT).decode()
        except UnicodeDecodeError as error:
            raise _damaged(folder, f"its text is not UTF-8 ({error})") from error
    if manifest.has_ids:
        ((_, layout),) = (each for each in files(manifest, has_offsets) if each[0] == DOCUMENT)
        records = _records(folder / DOCUMENT, layout)
        ids = np.frombuffer(records[TOKEN_IDS], "<i4").astype(np.int32)
        if has_offsets:
            offsets = np.frombuffer(records[OFFSETS], "<i4").astype(np.int32).reshape(-1, 2)
    return Document(text, ids, offsets)


def _fill(writer: MemoryWriter, folder: Path, has_offsets: bool) -> None:
    manifest = writer.manifest
    if manifest.prefix_ids:
        ((_, layout),) = (each for each in files(manifest, has_offsets) if each[0] == PREFIX_FILE)
        records = _records(folder / PREFIX_FILE, layout)
        writer.put_prefix({part: records[prefix_key(part)] for part in token_parts(manifest)})
    for i in range(writer.num_blocks_done, manifest.num_blocks):
        records = _records(folder / block_file(i), block_layout(manifest, i))
        writer.append({part: records[block_key(part, i)] for part in manifest.parts})


def _records(path: Path, layout: Layout) -> dict[bytes, bytes]:
    """The records that the tensors of a file make up, each of the bytes that the layout gives it."""
    _check_size(path, layout)
    load: Any = deserialize  # which has no types
    try:
        found: dict[str, dict[str, Any]] = dict(load(_read(path, data_bytes(layout) + JSON_LIMIT)))
    except (SafetensorError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    wanted = {piece.name: piece for mine in layout.values() for piece in mine}
    if found.keys() != wanted.keys():
        raise _damaged(path, f"it holds the tensors {sorted(found)} instead of {sorted(wanted)}")
    for name, piece in wanted.items():
        if (found[name]["dtype"], tuple(found[name]["shape"])) != (piece.dtype, piece.shape):
            raise _damaged(path, f"{name} is not {piece.dtype} {list(piece.shape)}")
    return {key: b"".join(found[piece.name]["data"] for piece in mine) for key, mine in layout.items()}


def _check_size(path: Path, layout: Layout) -> None:
    """That a file has the size of what is to be in it, and each record one that a store can hold."""
    if any(sum(piece.nbytes for piece in mine) > RECORD_LIMIT for mine in layout.values()):
        raise FormatError(f"The manifest of {path.parent} describes records that no store can hold. Export it again.")
    size, least = _size(path), data_bytes(layout) + 8
    if not least <= size <= least + JSON_LIMIT:
        raise _damaged(path, f"it has {size} bytes, and its tensors have {data_bytes(layout)}")


def _size(path: Path) -> int:
    """The size of a file. What is no plain file, such as a link out of the folder, is refused."""
    try:
        status = path.lstat()
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {reason(error)}. Export the memory again.") from error
    if not stat.S_ISREG(status.st_mode):
        raise ExportError(f"{path} is not a plain file, as exported ones are. Export the memory again.")
    return status.st_size


def _read(path: Path, limit: int) -> bytes:
    size = _size(path)
    if size > limit:
        raise ExportError(f"{path} has {size} bytes, more than the {limit} that such a file may have.")
    try:
        with path.open("rb") as file:
            return file.read(size)
    except OSError as error:
        raise ExportError(f"{path} cannot be read: {reason(error)}.") from error


def _damaged(path: Path, what: str) -> DamagedMemoryError:
    return DamagedMemoryError(f"{path} is damaged: {what}. Export the memory again; nothing was imported.")
