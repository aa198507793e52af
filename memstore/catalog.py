"""The records of a store's catalog: its format, a manifest per memory, complete or in progress, tombstones, indexes."""

from __future__ import annotations

import hashlib
from typing import TypeGuard

import msgpack

from memstore.errors import DamagedMemoryError, DocumentError, FormatError, StoreNotFoundError
from memstore.interfaces import RecordStore
from memstore.manifest import FORMAT_MAJOR, FORMAT_MINOR, id_of

FORMAT = b"format"
SEALED, PENDING = b"m", b"p"  # + a hash of the name: a manifest
TOMBSTONE = b"t"  # + an id whose space is to be given back
INDEX = b"i"  # + an id and a hash of a backend's name: an index of that memory


def is_name(name: object) -> TypeGuard[str]:
    """Any text but the empty one, without NUL and without halves of surrogate pairs. A name never becomes a path."""
    return isinstance(name, str) and name != "" and not any(c == "\0" or "\ud800" <= c <= "\udfff" for c in name)


def check_name(name: object) -> None:
    """Raises DocumentError for what cannot be a name."""
    if not is_name(name):
        raise DocumentError(
            f"{name!r} cannot be a name: it must be a text of at least one character, with no NUL and no half of a "
            "surrogate pair."
        )


def key(kind: bytes, name: str) -> bytes:
    """The key of a memory's manifest: of fixed length, because a name may be longer than any key."""
    return kind + hashlib.blake2b(name.encode(), digest_size=16).digest()


def index_lock(memory_id: str) -> str:
    """The lock of whoever changes the indexes of a memory."""
    return f"{memory_id}-index"


def strays(records: RecordStore) -> list[str]:
    """Ids that occupy space and of which the catalog says nothing: their records are lost. None where a manifest cannot
    be read, because it may be the one that names them."""
    ids = records.memory_ids()  # before the catalog: what is begun meanwhile is none
    try:
        found = records.items(b"")  # at one moment: a manifest moves from one key to another
        known = {id_of(value) for name, value in found if name[:1] in (SEALED, PENDING)}
    except (DamagedMemoryError, FormatError):
        return []
    known |= {name[1:].decode() for name, _ in found if name[:1] == TOMBSTONE}
    there = set(records.memory_ids())  # again: what was removed meanwhile is none either
    return [each for each in ids if each in there and each not in known]


def mark(records: RecordStore) -> None:
    """Say that this is a store of this version's format, unless something is said already."""
    record = {"format": "memstore", "major": FORMAT_MAJOR, "minor": FORMAT_MINOR}
    records.commit({FORMAT: msgpack.packb(record)}, expect={FORMAT: None})


def is_unmarked(records: RecordStore) -> bool:
    """Whether there is something in a store that does not say of which format it is."""
    if records.get(FORMAT) is not None or not (records.memory_ids() or records.items(b"")):
        return False
    return records.get(FORMAT) is None  # again: another process may just have created the store


def check_format(records: RecordStore) -> None:
    """Raises FormatError for a store that this version cannot read; marks an empty one as a store."""
    if is_unmarked(records):
        raise FormatError(
            f"The catalog of {records.path} has lost its format record. Run `memstore verify --repair`, or restore the "
            "store from a copy."
        )
    value = records.get(FORMAT)
    if value is None and records.mode == "r":
        raise StoreNotFoundError(
            f'{records.path} holds no store yet; `memstore index` and memstore.open(…, mode="a") create one.'
        )
    if value is None:
        mark(records)
        return
    try:
        record = msgpack.unpackb(value)
        name, major, minor = record["format"], record["major"], record["minor"]
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise FormatError(f"{records.path} is no memstore store: its format record cannot be read.") from error
    if name != "memstore" or major != FORMAT_MAJOR:
        raise FormatError(
            f"{records.path} has format {name} {major}.{minor}; this version of memstore reads format "
            f"{FORMAT_MAJOR}. Install the version that wrote it, or encode its documents again in another folder."
        )
