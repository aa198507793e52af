"""The vectors of a memory, read where they lie."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

from memstore.errors import MEND, DamagedMemoryError, FormatError, StoreError
from memstore.interfaces import RecordReader
from memstore.manifest import PartSpec
from memstore.values import CHECKSUM, block_key, checksum, describe, is_value, prefix_key

if TYPE_CHECKING:
    from types import TracebackType

    import torch

    from memstore.memory import Memory

Verify = Literal["open", "lazy", "anew", "off"]

_checked: dict[tuple[str, str], set[bytes]] = {}  # values that this process has verified, by store and memory


@contextmanager
def named(name: str) -> Iterator[None]:
    """Let what is damaged inside say which memory it belongs to."""
    try:
        yield
    except (DamagedMemoryError, FormatError) as error:
        if repr(name) in str(error):
            raise
        raise type(error)(f"Memory {name!r}: {error}") from error


class OpenMemory:
    """The vectors of a memory, mapped from disk. A context manager.

    Tensors are read-only views of the map: writing to one in place ends the process. They hold the map themselves, so
    they stay valid after :meth:`close`, and after the memory's removal.
    """

    def __init__(self, memory: Memory, verify: Verify) -> None:
        self.memory, self.manifest = memory, memory.manifest
        self._verify = verify
        self._reader: RecordReader = memory.store.reader(self.manifest)
        self.keys = frozenset(filter(is_value, self._reader.keys()))
        blocks = self.manifest.num_blocks * len(self.manifest.parts)
        if blocks > len(self.keys):  # before anything is counted or made by what the manifest says
            self.close()
            raise self._damaged(f"it has {len(self.keys)} records, and its manifest speaks of {blocks} blocks")
        known = _checked.setdefault((str(memory.store.path), self.manifest.id), set())
        self._checked = set() if verify == "anew" else known
        if verify == "open":
            try:
                for key in sorted(self.keys):
                    self.verified(key)
            except BaseException:
                self.close()
                raise
            self._checked.update(self.keys)

    def __enter__(self) -> OpenMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> str:
        raise StoreError("An open memory cannot be copied or pickled. Another process opens the store for itself.")

    def close(self) -> None:
        self._reader.close()

    def value(self, key: bytes) -> memoryview:
        """A record's bytes, verified at its first touch in this process unless verification is off."""
        if self._verify == "off" or key in self._checked:
            return self._get(key)
        view = self.verified(key)
        self._checked.add(key)
        return view

    def verified(self, key: bytes) -> memoryview:
        """A record's bytes, verified now. Raises DamagedMemoryError."""
        view = self._get(key)
        if checksum(view) != self.checksum(key):
            raise self._damaged(f"the bytes of {describe(key)} differ from those written")
        return view

    def checksum(self, key: bytes) -> memoryview:
        """The checksum stored beside a record, 16 bytes; it is verified as a part of the structure."""
        return self._get(CHECKSUM + key)

    def block(self, part: str, i: int) -> torch.Tensor:
        """Block ``i`` of a part: [rows, *shape]; all but the last stand for ``block_tokens`` tokens.

        A view of the map in the dtype that is stored; rows that are stored in int8 or int4 are decoded to float32.
        """
        spec = self._part(part)
        if not 0 <= i < self.manifest.num_blocks:
            raise IndexError(f"Memory {self.memory.name!r} has blocks 0 to {self.manifest.num_blocks - 1}, no {i}.")
        return self._some(part, [(i, 0, spec.num_rows(self.manifest.tokens_of(i)))])

    def blocks(self, part: str) -> list[torch.Tensor]:
        """All blocks of a part, in order."""
        return [self.block(part, i) for i in range(self.manifest.num_blocks)]

    def mapped(self, part: str) -> list[torch.Tensor]:
        """All blocks of a part that is not coded, as they lie on disk: none of them is read. Call :meth:`check` before
        using one."""
        spec = self._part(part)
        return [
            _tensor(
                self._sized(self._get(block_key(part, i)), spec, self.manifest.tokens_of(i)), spec.dtype, spec.shape
            )
            for i in range(self.manifest.num_blocks)
        ]

    def check(self, part: str) -> None:
        """Verify the blocks of a part, unless this process has done so, or verification is off. Raises
        DamagedMemoryError."""
        for i in range(self.manifest.num_blocks):
            self.value(block_key(part, i))

    def rows(self, part: str, start: int, stop: int) -> torch.Tensor:
        """Rows ``start`` to ``stop`` (excluded) of a part: [stop - start, *shape], of :meth:`block`'s dtype.

        Only the records they lie in are verified, and only these rows are copied or decoded; what lies in one record is
        a view of it.
        """
        return self.gathered(part, [(start, stop)])

    def gathered(self, part: str, stretches: Sequence[tuple[int, int]]) -> torch.Tensor:
        """As :meth:`rows`, of at least one stretch, one after another: many short ones are read faster together."""
        spec = self._part(part)
        size, n = self.manifest.block_tokens // spec.every, spec.num_rows(self.manifest.num_tokens)
        some: list[tuple[int, int, int]] = []
        for start, stop in stretches:
            if not 0 <= start <= stop <= n:
                raise IndexError(f"Rows {start} to {stop} are not within 0 to {n}.")
            first, last = start // size, max(start, stop - 1) // size
            if first == self.manifest.num_blocks:  # an empty stretch at the very end
                first = last = first - 1
            some += [(i, max(start - i * size, 0), min(stop - i * size, size)) for i in range(first, last + 1)]
        return self._some(part, some)

    def prefix(self, part: str) -> torch.Tensor:
        """The vectors of the prefix that was encoded before the document: [len(prefix_ids), *shape].

        bfloat16 where rows are stored in int8 or int4, else the dtype that is stored.
        """
        spec = self._part(part).prefix
        view = self.value(prefix_key(part)) if self.manifest.prefix_ids else memoryview(b"")
        return _tensor(self._sized(view, spec, len(self.manifest.prefix_ids)), spec.dtype, spec.shape)

    def _some(self, part: str, stretches: Sequence[tuple[int, int, int]]) -> torch.Tensor:
        """Of each (block, start, stop) these rows of the block, one after another."""
        import torch

        spec = self.manifest.parts[part]
        views = [self._sized(self.value(block_key(part, i)), spec, self.manifest.tokens_of(i)) for i, _, _ in stretches]
        if spec.is_coded:
            from memstore.coding import Stretch, decoded

            return decoded(
                [
                    Stretch(_tensor(view, "uint8"), spec.num_rows(self.manifest.tokens_of(i)), start, stop)
                    for view, (i, start, stop) in zip(views, stretches, strict=True)
                ],
                spec,
            )
        some = [
            _tensor(view, spec.dtype, spec.shape)[start:stop]
            for view, (_, start, stop) in zip(views, stretches, strict=True)
        ]
        return some[0] if len(some) == 1 else torch.cat(some)

    def _get(self, key: bytes) -> memoryview:
        with named(self.memory.name):
            return self._reader.get(key)

    def _sized(self, view: memoryview, spec: PartSpec, tokens: int) -> memoryview:
        """The bytes of a record, if they are as many as its manifest says: what is read of them follows from that."""
        if view.nbytes != spec.num_bytes(tokens):
            raise self._damaged(f"a record has {view.nbytes} bytes, where its manifest says {spec.num_bytes(tokens)}")
        return view

    def _damaged(self, what: str) -> DamagedMemoryError:
        return DamagedMemoryError(f"Memory {self.memory.name!r} is damaged: {what}. {MEND}")

    def _part(self, part: str) -> PartSpec:
        if part not in self.manifest.parts:
            raise KeyError(f"Memory {self.memory.name!r} has the parts {sorted(self.manifest.parts)}, no {part!r}.")
        return self.manifest.parts[part]


_warned = threading.Lock()
_silenced = False


def _tensor(view: memoryview, dtype: str, shape: tuple[int, ...] = ()) -> torch.Tensor:
    """A tensor [rows, *shape] over the bytes, which it keeps alive."""
    global _silenced
    import torch

    if not view:
        return torch.empty((0, *shape), dtype=getattr(torch, dtype))
    if not _silenced:
        with _warned, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns once per process that a read-only buffer must not be written
            torch.frombuffer(b"\0", dtype=torch.uint8)
            _silenced = True
    return torch.frombuffer(view, dtype=getattr(torch, dtype)).view(-1, *shape)
