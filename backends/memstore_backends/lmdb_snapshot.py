"""One committed state of an LMDB file that others may be writing to, read without liblmdb.

liblmdb ends the process when it meets a damaged page, so a catalog is read by this code, which checks every offset. A
read transaction of liblmdb keeps the pages of that state from being used again; it touches none of them.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from memstore_backends import lmdb_pages as pages
from memstore_backends.lmdb_pages import HEADER, PageError

STRETCH, MOST_STRETCHES = 64 << 10, 64  # bytes that are read at once, and how many such are held


class Snapshot:
    """The records as transaction ``transaction`` left them. Raises PageError, here and later, for what is damaged."""

    def __init__(self, fd: int, transaction: int) -> None:
        self._fd, self._size = fd, os.fstat(fd).st_size
        self._stretches: dict[int, bytes] = {}
        with _cut_short():
            self._page_size = pages.page_size(fd)
            number = transaction & 1  # transactions take turns
            self._meta = pages.meta(self._page(number), number)
        if self._meta.transaction != transaction:
            raise PageError(f"meta page {number} is of transaction {self._meta.transaction}, not of {transaction}")

    def get(self, key: bytes) -> memoryview | None:
        return next((value for found, value in self.items(key) if found == key), None)

    def items(self, prefix: bytes) -> Iterator[tuple[bytes, memoryview]]:
        """Records whose key starts with ``prefix``, in the order in which they lie in the file."""
        with _cut_short():
            found = [(pages.record(page, number, node), page) for _, page, number, node in self._nodes(prefix)]
            for (key, run, start, size), page in sorted(found, key=lambda each: each[0][1] or 0):
                yield key, self._value(page, run, start, size)

    def keys(self, prefix: bytes) -> Iterator[bytes]:
        for key, *_ in self._nodes(prefix):
            yield key

    def _nodes(self, prefix: bytes) -> Iterator[tuple[bytes, bytes, int, int]]:
        """Key, leaf page, its number and the place of the node in it, of each record that starts with ``prefix``."""
        waiting = [] if self._meta.root == pages.NO_ROOT else [self._meta.root]
        seen: set[int] = set()
        with _cut_short():
            while waiting:
                number = waiting.pop()
                if number in seen or not 2 <= number < self._meta.num_pages:
                    raise PageError(f"page {number} is out of range or used twice")
                seen.add(number)
                page = self._page(number)
                is_leaf, nodes = pages.tree_page(page, number)
                keys = [pages.node_key(page, node) for node in nodes]
                in_order = keys if is_leaf else keys[1:]
                if in_order != sorted(set(in_order)):
                    raise PageError(f"the keys of page {number} are out of order")
                if is_leaf:
                    yield from (
                        (key, page, number, node)
                        for key, node in zip(keys, nodes, strict=True)
                        if key.startswith(prefix)
                    )
                    continue
                # A child holds the keys from its own, the first one from the least, to that of the next.
                ends = [*keys[1:], None]
                for node, start, end in reversed(list(zip(nodes, [b"", *keys[1:]], ends, strict=True))):
                    if (end is None or end > prefix) and (start <= prefix or start.startswith(prefix)):
                        waiting.append(pages.child(page, node))

    def _value(self, page: bytes, run: int | None, start: int, size: int) -> memoryview:
        if run is None:
            return memoryview(page)[start : start + size]
        where = run * self._page_size
        if where + HEADER.size + size > self._size:
            raise PageError(f"the value at page {run} ends outside the file")
        data = self._bytes(where, HEADER.size + size)
        pages.check_run(data, run, size, self._page_size, self._meta.num_pages)
        return data[HEADER.size :]

    def _bytes(self, start: int, size: int) -> memoryview:
        """Bytes of the file, of which a stretch is read at once: in a list of thousands, neighbours are wanted too."""
        stretch, at = divmod(start, STRETCH)
        if at + size > STRETCH:
            return memoryview(os.pread(self._fd, size, start))
        if stretch not in self._stretches:
            if len(self._stretches) == MOST_STRETCHES:
                self._stretches.clear()
            self._stretches[stretch] = os.pread(self._fd, STRETCH, stretch * STRETCH)
        return memoryview(self._stretches[stretch])[at : at + size]

    def _page(self, number: int) -> bytes:
        page = bytes(self._bytes(number * self._page_size, self._page_size))
        if len(page) < self._page_size:
            raise PageError(f"page {number} lies outside the file")
        return page


@contextmanager
def _cut_short() -> Iterator[None]:
    """Turn what unpacking says of offsets outside a page into a PageError."""
    try:
        yield
    except (struct.error, IndexError) as error:
        raise PageError(f"a page is cut short ({error})") from error
