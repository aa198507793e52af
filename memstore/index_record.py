"""What the catalog knows of an index of a memory."""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgpack
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from memstore.catalog import INDEX, SEALED, key
from memstore.errors import DamagedMemoryError, IndexBuildError, MemoryNotFoundError
from memstore.interfaces import RecordStore
from memstore.manifest import Manifest


class IndexFile(BaseModel):
    """One file of an index; ``checksum`` is its xxh3_128 in hexadecimal digits."""

    model_config = ConfigDict(frozen=True)

    nbytes: int = Field(ge=0)
    checksum: str = Field(pattern=r"^[0-9a-f]{32}$")


class IndexRecord(BaseModel):
    """An index of a memory: what built it, how it is searched and what that was measured to give.

    options: those that it was built with, without the tunable ones. tuned: values found by tuning. quality: what was
    measured with these. files: one for each slot, in ``folder``; none for a backend that keeps nothing on disk.
    """

    model_config = ConfigDict(frozen=True)

    backend: str
    distribution: str
    version: str
    created: float
    seconds: float
    digest: str | None
    options: dict[str, JsonValue]
    tuned: dict[str, int] = {}
    quality: dict[str, JsonValue] | None = None
    folder: str = Field(pattern=r"^([0-9a-f]{32})?$")  # it becomes a path, and so do the names of the files
    files: dict[Annotated[str, Field(pattern=r"^[a-z]+(\.[0-9]+)*$")], IndexFile]

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(file.nbytes for file in self.files.values())


def index_key(memory_id: str, backend: str) -> bytes:
    """The catalog key of a memory's index: of fixed length, whatever the backend's name."""
    return INDEX + memory_id.encode() + hashlib.blake2b(backend.encode(), digest_size=16).digest()


def all_records(records: RecordStore, memory_id: str) -> list[IndexRecord]:
    """The indexes of a memory, by backend. One whose record cannot be read does not exist: it can be built again."""
    try:
        return _records(records, memory_id)
    except DamagedMemoryError:  # which does not tell which of them it is: the others are still found by their backend
        return []


def used_folders(records: RecordStore, memory_id: str) -> set[str]:
    """Where the files of a memory's indexes are. Raises DamagedMemoryError if that cannot be told of all."""
    return {record.folder for record in _records(records, memory_id)}


def read_record(records: RecordStore, memory_id: str, backend: str) -> IndexRecord | None:
    """The index of a memory for a backend, if there is one."""
    try:
        value = records.get(index_key(memory_id, backend))
    except DamagedMemoryError:
        return None
    return None if value is None else _unpack(value)


def write_record(records: RecordStore, manifest: Manifest, record: IndexRecord) -> None:
    """Make an index known.

    Raises MemoryNotFoundError if the memory has been removed, IndexBuildError for an option that cannot be kept.
    """
    sealed_key = key(SEALED, manifest.name)
    sealed = records.get(sealed_key)
    try:
        packed = msgpack.packb(record.model_dump())
    except (OverflowError, ValueError) as error:  # a number of more than 64 bits, or half of a surrogate pair
        raise IndexBuildError(f"The options of {record.backend!r} cannot be kept: {error}. Use others.") from error
    puts = {index_key(manifest.id, record.backend): packed}
    if not _is_of(sealed, manifest) or not records.commit(puts, expect={sealed_key: sealed}):
        raise removed(manifest)


def is_removed(records: RecordStore, manifest: Manifest) -> bool:
    """Whether the memory is no longer in the store."""
    return not _is_of(records.get(key(SEALED, manifest.name)), manifest)


def removed(manifest: Manifest) -> MemoryNotFoundError:
    """What to raise where the memory of an index is no longer there."""
    return MemoryNotFoundError(f"Memory {manifest.name!r} was removed while its index was built.")


def _is_of(sealed: bytes | None, manifest: Manifest) -> bool:
    return sealed is not None and Manifest.unpack(sealed).id == manifest.id


def _records(records: RecordStore, memory_id: str) -> list[IndexRecord]:
    found = [_unpack(value) for _, value in records.items(INDEX + memory_id.encode())]
    return sorted((record for record in found if record is not None), key=lambda record: record.backend)


def _unpack(value: bytes) -> IndexRecord | None:
    try:
        return IndexRecord.model_validate(msgpack.unpackb(value))
    except (ValueError, TypeError, msgpack.UnpackException, ValidationError):
        return None
