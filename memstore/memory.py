"""A memory: what one model holds of one document."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from memstore.errors import DamagedMemoryError, FormatError, StoreError
from memstore.interfaces import Buffer, RecordReader
from memstore.manifest import Facts, Manifest, PartSpec

if TYPE_CHECKING:
    from types import TracebackType

    import torch
    from transformers import DynamicCache, PreTrainedModel

    from memstore.store import MemoryStore

Verify = Literal["open", "lazy", "anew", "off"]
Int32 = npt.NDArray[np.int32]

TEXT, TOKEN_IDS, OFFSETS = b"dtext", b"dids", b"doffsets"
MEND = "Run `memstore verify --repair`, or remove the memory and encode the document again."
PREFIX = b"p"  # + a part: its vectors of the prefix
CHECKSUM = b"c"  # + the key of a value: its xxh3_128, a record so small that it lies in the structure

_checked: dict[tuple[str, str], set[bytes]] = {}  # values that this process has verified, by store and memory


def block_key(part: str, i: int) -> bytes:
    """The key of block ``i`` of a part."""
    return b"b" + i.to_bytes(4, "big") + part.encode()


def prefix_key(part: str) -> bytes:
    """The key of a part's vectors of the prefix."""
    return PREFIX + part.encode()


@contextmanager
def named(name: str) -> Iterator[None]:
    """Let what is damaged inside say which memory it belongs to."""
    try:
        yield
    except (DamagedMemoryError, FormatError) as error:
        if repr(name) in str(error):
            raise
        raise type(error)(f"Memory {name!r}: {error}") from error


def is_value(key: bytes) -> bool:
    """Whether the record of this key is a value, not the checksum of one."""
    return not key.startswith(CHECKSUM)


def checksum(value: Buffer) -> bytes:
    """What is stored beside a value: its xxh3_128, 16 bytes."""
    return xxhash.xxh3_128_digest(value)


def text_digest(text: str) -> str:
    """What a manifest knows a text by, its ``document_digest``."""
    return xxhash.xxh3_128_hexdigest(text.encode())


@dataclass(frozen=True)
class Document:
    """What is kept of a document beside its vectors.

    token_ids: int32 [n]; offsets: int32 [n, 2], the half-open character span of each token in ``text``.
    """

    text: str | None = None
    token_ids: Int32 | None = None
    offsets: Int32 | None = None


class Memory:
    """A memory of a store: cheap to have, it opens its file only when asked for text, tokens or vectors."""

    def __init__(self, store: MemoryStore, manifest: Manifest | bytes) -> None:
        """``manifest``: may be packed, so that a list of thousands reads no more of it than it needs."""
        self.store = store
        self._facts: Manifest | Facts
        if isinstance(manifest, bytes):
            self._packed, self._facts = manifest, Facts.unpack(manifest)
        else:
            self.manifest = self._facts = manifest

    @cached_property
    def manifest(self) -> Manifest:
        """All that is known of it. Raises FormatError for one that a newer version wrote."""
        return Manifest.unpack(self._packed)

    def __repr__(self) -> str:
        return f"<Memory {self.name!r}: {self.num_tokens} tokens, {self.kind}, {self.nbytes} bytes>"

    def __reduce__(self) -> str:
        raise StoreError("A memory cannot be copied or pickled. Another process opens the store for itself.")

    @property
    def name(self) -> str:
        return self._facts.name

    @property
    def num_tokens(self) -> int:
        return self._facts.num_tokens

    @property
    def nbytes(self) -> int:
        """Bytes that its records take, on disk where they are kept there."""
        return int((self._facts.seal or {})["nbytes"])

    @property
    def kind(self) -> str:
        return self._facts.kind

    @property
    def created(self) -> float:
        """When its writing began, in seconds since 1970."""
        return self._facts.created

    @property
    def fingerprint(self) -> dict[str, Any]:
        return dict(self._facts.fingerprint)

    @property
    def metadata(self) -> dict[str, Any]:
        return dict(self._facts.metadata)

    def open(self, verify: Verify = "lazy") -> OpenMemory:
        """Open the vectors for reading. ``verify``: check all checksums now ("open"), each value's at its first touch
        in this process ("lazy") or after this opening ("anew", for who writes it elsewhere), or none ("off").

        Raises DamagedMemoryError if the file is not as it was sealed, MemoryNotFoundError if it has been removed.
        """
        return OpenMemory(self, verify)

    def to_cache(self, model: PreTrainedModel) -> DynamicCache:
        """The document as a cache of one row of the plain model that wrote it, as if it had just read it.

        So ``model.generate(input_ids=…, past_key_values=memory.to_cache(model))``, with ids of the document and then of
        a prompt, computes no more than the prompt. For several rows: ``cache.batch_repeat_interleave(rows)``. A cache
        is changed by its use; make one for each talk.

        Raises AttachError unless the memory is one of a decoder-only model, and of a document that was encoded as one
        window, FingerprintMismatchError for another model, DamagedMemoryError and MemoryNotFoundError.
        """
        from memstore.reading.prefix import cache_of

        return cache_of(self, model)

    @cached_property
    def text(self) -> str | None:
        """The document, or None where only token ids or features were given."""
        if not self.manifest.has_text:
            return None
        try:
            return self._verified(TEXT).decode()
        except UnicodeDecodeError as error:
            raise DamagedMemoryError(f"Memory {self.name!r} is damaged: its text is not UTF-8. {MEND}") from error

    @cached_property
    def token_ids(self) -> Int32 | None:
        """int32 [num_tokens], or None where the document has no tokens."""
        return self._numbers(TOKEN_IDS, 1) if self.manifest.has_ids else None

    @cached_property
    def offsets(self) -> Int32 | None:
        """int32 [num_tokens, 2]: the half-open character span of each token, or None where they are not known."""
        with self.open() as opened:
            if OFFSETS not in opened.keys:
                return None
        return self._numbers(OFFSETS, 2).reshape(-1, 2)

    def _verified(self, key: bytes) -> bytes:
        with self.open() as opened:
            return opened.verified(key).tobytes()

    def _numbers(self, key: bytes, of_each: int) -> Int32:
        """So many int32 of each token."""
        data = self._verified(key)
        if len(data) != 4 * of_each * self.num_tokens:
            raise DamagedMemoryError(
                f"Memory {self.name!r} is damaged: {key!r} has {len(data)} bytes for {self.num_tokens} tokens. {MEND}"
            )
        return np.frombuffer(data, "<i4")

    def chars(self, start_token: int, end_token: int) -> tuple[int, int]:
        """The character span of tokens ``start_token`` to ``end_token`` (excluded).

        Special tokens, whose span is empty, do not count; if there are only such, the span is (0, 0).
        """
        if self.offsets is None:
            raise StoreError(f"Memory {self.name!r} has no character offsets: it was written without a text.")
        if not 0 <= start_token <= end_token <= self.num_tokens:
            raise IndexError(f"Tokens {start_token} to {end_token} are not within 0 to {self.num_tokens}.")
        spans = self.offsets[start_token:end_token]
        spans = spans[spans[:, 0] < spans[:, 1]]
        return (int(spans[:, 0].min()), int(spans[:, 1].max())) if len(spans) else (0, 0)

    def passage(self, start_token: int, end_token: int) -> str:
        """The text of tokens ``start_token`` to ``end_token`` (excluded)."""
        start, end = self.chars(start_token, end_token)
        return (self.text or "")[start:end]


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
            raise self._damaged(f"the bytes of {key!r} differ from those written")
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
