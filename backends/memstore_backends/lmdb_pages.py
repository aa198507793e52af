"""The pages of an LMDB file, read without liblmdb, and the layout of one that nobody writes to any more.

A damaged file makes liblmdb end the process (SIGBUS, SIGABRT), so a sealed memory is never given to it. Its structure
(meta, branch and leaf pages, the header of each overflow run) is walked here with every offset checked, and hashed; the
hash is compared with the one taken when the memory was sealed. Values of half a page and more lie in overflow runs,
16 bytes after the start of a page, and are not read by the walk.

This is the file format of LMDB 0.9 on 64-bit little-endian machines; that of LMDB 1.0 has larger page headers, which
would leave values unaligned.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import xxhash

HEADER = struct.Struct("<QHHHH")  # page number, pad, flags, lower, upper
_META = struct.Struct("<II16x")  # magic, version, then address and map size
_TREE = struct.Struct("<IHHQQQQQ")  # pad, flags, depth, branch, leaf and overflow pages, entries, root
_LAST = struct.Struct("<QQ")  # last page, transaction
_NODE = struct.Struct("<HHHH")  # size or page (two halves), flags, key size

_MAGIC, _VERSION = 0xBEEFC0DE, 1
_NEWER_HEADER = 24  # bytes of a page's header in LMDB 1.0
_BRANCH, _LEAF, _OVERFLOW, _META_PAGE, _KINDS = 0x01, 0x02, 0x04, 0x08, 0x6F
_IN_OVERFLOW = 0x01
NO_ROOT = 2**64 - 1


class PageError(ValueError):
    """The file is no LMDB file of the expected format, or its structure is damaged."""


@dataclass(frozen=True)
class Layout:
    """Where each value lies (offset and size in bytes, keys in byte order), and the hash of the structure."""

    values: dict[bytes, tuple[int, int]]
    digest: str


def scan(fd: int) -> Layout:
    """Walk the newest tree of the LMDB file open as ``fd``. Raises PageError, or OSError if the disk fails."""
    try:
        return _Walk(fd).layout()
    except (struct.error, IndexError) as error:
        raise PageError(f"a page is cut short ({error})") from error


class _Walk:
    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.size = os.fstat(fd).st_size
        self.hash = xxhash.xxh3_128()
        self.values: dict[bytes, tuple[int, int]] = {}
        self.seen: set[int] = set()

    def layout(self) -> Layout:
        self.page_size = page_size(self.fd)
        trees = [self._meta(number) for number in (0, 1)]
        _, self.num_pages, entries, root = max(trees)
        if self.num_pages * self.page_size > self.size:
            raise PageError(f"{self.num_pages} pages do not fit into {self.size} bytes")
        if root != NO_ROOT:
            self._tree(root)
        if len(self.values) != entries:
            raise PageError(f"{len(self.values)} records found, {entries} expected")
        return Layout(self.values, self.hash.hexdigest())

    def _meta(self, number: int) -> Meta:
        page = os.pread(self.fd, self.page_size, number * self.page_size)
        self.hash.update(page)
        return meta(page, number)

    def _claim(self, number: int) -> None:
        if not 2 <= number < self.num_pages or number in self.seen:
            raise PageError(f"page {number} is out of range or used twice")
        self.seen.add(number)

    def _tree(self, root: int) -> None:
        waiting = [root]
        while waiting:
            number = waiting.pop()
            self._claim(number)
            page = os.pread(self.fd, self.page_size, number * self.page_size)
            self.hash.update(page)
            is_leaf, nodes = tree_page(page, number)
            if is_leaf:
                for node in nodes:
                    self._record(page, number, node)
            else:
                waiting.extend(child(page, node) for node in reversed(nodes))

    def _record(self, page: bytes, number: int, node: int) -> None:
        key, run, start, size = record(page, number, node)
        if run is None:
            self.values[key] = number * self.page_size + start, size
            return
        self._claim(run)
        header = os.pread(self.fd, HEADER.size, run * self.page_size)
        self.hash.update(header)
        check_run(header, run, size, self.page_size, self.num_pages)
        self.values[key] = run * self.page_size + HEADER.size, size


class Meta(NamedTuple):
    """What one of the two meta pages says: the newest is that of the higher transaction."""

    transaction: int
    num_pages: int
    entries: int
    root: int


def page_size(fd: int) -> int:
    """The bytes of a page of the file. Raises PageError."""
    first = os.pread(fd, 256, 0)
    size: int = _TREE.unpack_from(first, HEADER.size + _META.size)[0]
    if not 512 <= size <= 32768 or size & (size - 1):
        raise PageError(f"{size} is no page size")
    return size


def is_newer(path: Path) -> bool:
    """Whether a file is one of LMDB 1.0."""
    with path.open("rb") as file:
        head = file.read(_NEWER_HEADER + _META.size)
    return len(head) == _NEWER_HEADER + _META.size and _META.unpack_from(head, _NEWER_HEADER)[0] == _MAGIC


def meta(page: bytes, number: int) -> Meta:
    """The meta page ``number``. Raises PageError."""
    _, _, flags, _, _ = HEADER.unpack_from(page)
    magic, version = _META.unpack_from(page, HEADER.size)
    if not flags & _META_PAGE or magic != _MAGIC or version != _VERSION:
        raise PageError(f"page {number} is no meta page of LMDB 0.9")
    main = HEADER.size + _META.size + _TREE.size
    *_, entries, root = _TREE.unpack_from(page, main)
    last_page, transaction = _LAST.unpack_from(page, main + _TREE.size)
    return Meta(transaction, last_page + 1, entries, root)


def tree_page(page: bytes, number: int) -> tuple[bool, tuple[int, ...]]:
    """Whether a page of a tree is a leaf, and where in it its nodes begin. Raises PageError for any other page."""
    own_number, _, flags, lower, upper = HEADER.unpack_from(page)
    kind = flags & _KINDS
    if own_number != number or kind not in (_BRANCH, _LEAF) or not HEADER.size <= lower <= upper <= len(page):
        raise PageError(f"page {number} is no page of a tree")
    return kind == _LEAF, struct.unpack_from(f"<{(lower - HEADER.size) // 2}H", page, HEADER.size)


def child(page: bytes, node: int) -> int:
    """The page that a node of a branch leads to."""
    low, high, top, _ = _NODE.unpack_from(page, node)
    return int(low | high << 16 | top << 32)


def node_key(page: bytes, node: int) -> bytes:
    """The key of a node; that of the first node of a branch is empty and stands for all before the second."""
    key_size = _NODE.unpack_from(page, node)[3]
    return page[node + _NODE.size : node + _NODE.size + key_size]


def record(page: bytes, number: int, node: int) -> tuple[bytes, int | None, int, int]:
    """Key, first page of the overflow run or None, where in this page the value begins if not, and its size."""
    low, high, flags, key_size = _NODE.unpack_from(page, node)
    start = node + _NODE.size + key_size
    size = low | high << 16
    key = page[node + _NODE.size : start]
    if flags == _IN_OVERFLOW:
        return key, int.from_bytes(page[start : start + 8], "little"), 0, size
    if flags == 0 and start + size <= len(page):
        return key, None, start, size
    raise PageError(f"a record of page {number} is damaged")


def check_run(header: bytes | memoryview, number: int, size: int, page_size: int, num_pages: int) -> None:
    """Raises PageError unless this is the header of an overflow run that holds a value of so many bytes."""
    own_number, _, flags, low, high = HEADER.unpack_from(header)
    needed = (HEADER.size - 1 + size) // page_size + 1
    if own_number != number or flags & _KINDS != _OVERFLOW or low | high << 16 < needed:
        raise PageError(f"page {number} does not start a value of {size} bytes")
    if number + needed > num_pages:
        raise PageError(f"the value at page {number} ends outside the file")
