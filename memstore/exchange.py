"""Exported memories: safetensors files and JSON, one folder a memory, that other programs read without memstore.

    manifest.json                what is known of the memory, but for its id and seal, which belong to one store
    text.txt                     the document, if it was given as text
    document.safetensors         token_ids I32 [n], offsets I32 [n, 2]
    prefix.safetensors           the vectors of the prefix, a tensor for each part
    block-00000.safetensors      the vectors of a block of tokens, a tensor for each part

A part in int8 or int4 is two or three tensors: ``<part>.scales`` and ``<part>.offsets``, and ``<part>.codes``, which is
U8 with two codes a byte where they are of 4 bits. A record of the store is the bytes of its tensors one after another,
so nothing is lost either way. No file says where another one lies: all names are those above.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from xxhash import xxh3_128

from memstore.manifest import GROUP, Manifest, PartSpec
from memstore.memory_writer import token_parts
from memstore.values import OFFSETS, TOKEN_IDS, block_key, prefix_key

FORMAT, MAJOR, MINOR = "memstore-export", 1, 0
MANIFEST, TEXT_FILE, DOCUMENT, PREFIX = "manifest.json", "text.txt", "document.safetensors", "prefix.safetensors"
OWN = {"id", "seal"}  # of a manifest, which are those of one store
JSON_LIMIT = 64 << 20  # bytes of a manifest, or of the header of a safetensors file
RECORD_LIMIT = (1 << 32) - 1  # bytes of a value that LMDB can hold
_WIDTHS = {"F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1}
_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class Piece(NamedTuple):
    """A tensor of an exported file, with a dtype as safetensors names it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return _WIDTHS[self.dtype] * math.prod(self.shape)


Layout = dict[bytes, list[Piece]]  # by the key of the record that the pieces make up


def folder_name(name: str) -> str:
    """The folder of a memory among others: readable, and its own for every name, whatever characters that has."""
    readable = re.sub(r"[^A-Za-z0-9]+", "-", name)[:40].strip("-").lower()
    return f"{readable or 'memory'}-{hashlib.blake2b(name.encode(), digest_size=8).hexdigest()}"


def files(manifest: Manifest, has_offsets: bool) -> Iterator[tuple[str, Layout]]:
    """The safetensors files of a memory, and what is in each."""
    if manifest.has_ids:
        n = manifest.num_tokens
        layout = {TOKEN_IDS: [Piece("token_ids", "I32", (n,))]}
        yield DOCUMENT, layout | ({OFFSETS: [Piece("offsets", "I32", (n, 2))]} if has_offsets else {})
    if manifest.prefix_ids:
        length = len(manifest.prefix_ids)
        yield (
            PREFIX,
            {prefix_key(part): pieces(part, spec.prefix, length) for part, spec in token_parts(manifest).items()},
        )
    for i in range(manifest.num_blocks):
        yield block_file(i), block_layout(manifest, i)


def block_file(i: int) -> str:
    """The file of block ``i``."""
    return f"block-{i:05}.safetensors"


def block_layout(manifest: Manifest, i: int) -> Layout:
    """What is in the file of block ``i``."""
    tokens = manifest.tokens_of(i)
    return {block_key(part, i): pieces(part, spec, spec.num_rows(tokens)) for part, spec in manifest.parts.items()}


def pieces(part: str, spec: PartSpec, rows: int) -> list[Piece]:
    """The tensors that a record of so many rows consists of, in the order of its bytes."""
    if not spec.is_coded:
        return [Piece(part, _NAMES[spec.dtype], (rows, *spec.shape))]
    shared = (rows, *spec.shape[:-1]) if spec.scales == "token" else (-(-rows // GROUP), *spec.shape)
    tables = ["scales"] if spec.dtype == "int8" else ["scales", "offsets"]
    values = math.prod(spec.shape)
    codes = ("I8", (rows, *spec.shape)) if spec.dtype == "int8" else ("U8", (rows, -(-values // 2)))
    return [*(Piece(f"{part}.{table}", "BF16", shared) for table in tables), Piece(f"{part}.codes", *codes)]


def header(layout: Layout) -> bytes:
    """What a safetensors file of these pieces begins with. Their bytes follow in the order of :func:`in_file`."""
    entries, start = {}, 0
    for piece in in_file(layout):
        span = [start, start + piece.nbytes]
        entries[piece.name] = {"dtype": piece.dtype, "shape": list(piece.shape), "data_offsets": span}
        start += piece.nbytes
    packed = json.dumps(entries, separators=(",", ":")).encode()
    packed += b" " * (-len(packed) % 8)
    return len(packed).to_bytes(8, "little") + packed


def in_file(layout: Layout) -> list[Piece]:
    """The pieces in the order of a file: the widest numbers first, so that each tensor is aligned to its own."""
    every = [piece for mine in layout.values() for piece in mine]
    return sorted(every, key=lambda piece: -_WIDTHS[piece.dtype])


def data_bytes(layout: Layout) -> int:
    """Bytes of all pieces."""
    return sum(piece.nbytes for mine in layout.values() for piece in mine)


def json_checksum(value: Any) -> str:
    """A hash of what this JSON value says, however it is laid out."""
    return xxh3_128(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
