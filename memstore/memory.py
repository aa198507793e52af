"""A memory: what one model holds of one document."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from memstore.errors import MEND, DamagedMemoryError, StoreError
from memstore.manifest import Facts, Manifest, name_of
from memstore.open_memory import OpenMemory, Verify
from memstore.values import OFFSETS, TEXT, TOKEN_IDS, describe

if TYPE_CHECKING:
    from transformers import DynamicCache, PreTrainedModel

    from memstore.store import MemoryStore

Int32 = npt.NDArray[np.int32]


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
        if isinstance(manifest, bytes):
            self._packed, self.name = manifest, name_of(manifest)
        else:
            self.manifest = self._facts = manifest
            self.name = manifest.name

    @cached_property
    def _facts(self) -> Manifest | Facts:
        return Facts.unpack(self._packed)

    @cached_property
    def manifest(self) -> Manifest:
        """All that is known of it. Raises FormatError for one that a newer version wrote."""
        return Manifest.unpack(self._packed)

    def __repr__(self) -> str:
        return f"<Memory {self.name!r}: {self.num_tokens} tokens, {self.kind}, {self.nbytes} bytes>"

    def __reduce__(self) -> str:
        raise StoreError("A memory cannot be copied or pickled. Another process opens the store for itself.")

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
            what = f"{describe(key)} have {len(data)} bytes for {self.num_tokens} tokens"
            raise DamagedMemoryError(f"Memory {self.name!r} is damaged: {what}. {MEND}")
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
