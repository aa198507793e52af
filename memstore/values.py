"""The values of a memory: by which keys its records are found, and what is stored beside each."""

from __future__ import annotations

import xxhash

from memstore.interfaces import Buffer

TEXT, TOKEN_IDS, OFFSETS = b"dtext", b"dids", b"doffsets"
BLOCK = b"b"  # + four bytes of a number, and a part
PREFIX = b"p"  # + a part: its vectors of the prefix
CHECKSUM = b"c"  # + the key of a value: its xxh3_128, a record so small that it lies in the structure


def block_key(part: str, i: int) -> bytes:
    """The key of block ``i`` of a part."""
    return BLOCK + i.to_bytes(4, "big") + part.encode()


def prefix_key(part: str) -> bytes:
    """The key of a part's vectors of the prefix."""
    return PREFIX + part.encode()


def is_value(key: bytes) -> bool:
    """Whether the record of this key is a value, not the checksum of one."""
    return not key.startswith(CHECKSUM)


def describe(key: bytes) -> str:
    """What a record holds, in words."""
    words = {TEXT: "the text", TOKEN_IDS: "the token ids", OFFSETS: "the offsets"}
    if key in words:
        return words[key]
    if not is_value(key):
        return f"the checksum of {describe(key[len(CHECKSUM) :])}"
    if key.startswith(BLOCK) and len(key) >= 5:
        return f"block {int.from_bytes(key[1:5], 'big')} of {_text(key[5:])}"
    return f"the prefix of {_text(key[1:])}" if key.startswith(PREFIX) else f"the record {_text(key)}"


def _text(name: bytes) -> str:
    return repr(name.decode("utf-8", "replace"))


def checksum(value: Buffer) -> bytes:
    """What is stored beside a value: its xxh3_128, 16 bytes."""
    return xxhash.xxh3_128_digest(value)
