"""What of a catalog is checked as it is read: each record by its checksum, and all of them by a summary.

A checksum cannot tell that a record is missing, because a bit of its key changed, nor that all records are those of an
older state, because a bit of a meta page did. The summary is a record that every commit renews: the number of its
transaction, and for each kind of key (its first byte) how many there are and a hash over them. A catalog of an earlier
version has none until its first commit.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgpack
import xxhash

from memstore.errors import DamagedMemoryError
from memstore.interfaces import Buffer
from memstore_backends.lmdb_pages import PageError

SUMMARY = b"\0summary"
_CHECKSUM = 16


def sealed(key: bytes, value: bytes) -> bytes:
    """The value as it is stored, behind its checksum."""
    return xxhash.xxh3_128_digest(key + value) + value


def opened(data: Path, key: bytes, value: Buffer | None) -> bytes | None:
    """The value that was stored in the catalog at ``data``. Raises DamagedMemoryError."""
    if value is None:
        return None
    view = memoryview(value)
    digest = xxhash.xxh3_128(key)
    digest.update(view[_CHECKSUM:])
    if view[:_CHECKSUM] != digest.digest():
        raise DamagedMemoryError(
            f"A record of the catalog {data} is damaged ({key.hex()}). Run `memstore verify --repair`; or remove the "
            "memory it belongs to and encode its document again, or restore the store from a copy."
        )
    return bytes(view[_CHECKSUM:])


def damaged_catalog(data: Path, what: str) -> DamagedMemoryError:
    return DamagedMemoryError(
        f"The catalog {data} is damaged ({what}). Run `memstore verify --repair`, or restore the store from a copy."
    )


class Summary:
    """For each kind of key, how many there are and the exclusive or of their hashes."""

    def __init__(self, kinds: dict[int, tuple[int, int]]) -> None:
        self.kinds = kinds

    @classmethod
    def of_keys(cls, keys: Iterable[bytes]) -> Summary:
        summary = cls({})
        for key in keys:
            summary.add(key)
        return summary

    @classmethod
    def unpack(cls, value: bytes, number: int) -> Summary:
        """Raises PageError unless transaction ``number`` wrote it."""
        try:
            wrote, kinds = msgpack.unpackb(value, strict_map_key=False)
            summary = cls({int(kind): (int(count), int(hash_)) for kind, (count, hash_) in kinds.items()})
        except (ValueError, TypeError, AttributeError, msgpack.UnpackException) as error:
            raise PageError(f"its summary cannot be read: {error}") from error
        if wrote != number:
            raise PageError(f"it shows the state of transaction {wrote} instead of {number}")
        return summary

    def pack(self, number: int) -> bytes:
        packed: bytes = msgpack.packb((number, self.kinds))
        return packed

    def add(self, key: bytes) -> None:
        self._change(key, 1)

    def drop(self, key: bytes) -> None:
        self._change(key, -1)

    def _change(self, key: bytes, by: int) -> None:
        if key == SUMMARY:
            return
        count, hash_ = self.kinds.get(key[0], (0, 0))
        self.kinds[key[0]] = count + by, hash_ ^ xxhash.xxh3_64_intdigest(key)

    def check(self, found: Summary, kinds: Iterable[int]) -> None:
        """Raises PageError if the keys found of these kinds are not those that were written."""
        for kind in kinds:
            wanted, have = self.kinds.get(kind, (0, 0)), found.kinds.get(kind, (0, 0))
            if wanted != have:
                raise PageError(f"{wanted[0]} records of kind {kind} were written, and these are not they")
