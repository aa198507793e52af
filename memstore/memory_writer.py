"""Writing a memory block by block, so that an interruption costs one block at most."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType

import xxhash

from memstore.errors import DocumentError, StoreError
from memstore.interfaces import Buffer, RecordWriter
from memstore.manifest import Manifest, PartSpec
from memstore.memory import Document, Memory
from memstore.values import (
    CHECKSUM,
    OFFSETS,
    PREFIX,
    TEXT,
    TOKEN_IDS,
    block_key,
    checksum,
    describe,
    is_value,
    prefix_key,
)

logger = logging.getLogger(__name__)


def block_keys(manifest: Manifest, i: int) -> set[bytes]:
    """The keys of block ``i`` of all parts."""
    return {block_key(part, i) for part in manifest.parts}


def token_parts(manifest: Manifest) -> dict[str, PartSpec]:
    """The parts that have a row for every token: all but summaries."""
    return {part: spec for part, spec in manifest.parts.items() if spec.every == 1}


def dtypes(manifest: Manifest) -> list[str]:
    """The dtypes that vectors of tokens are stored in, sorted; most often one."""
    return sorted({spec.dtype for spec in token_parts(manifest).values()})


def expected_keys(manifest: Manifest) -> set[bytes]:
    """The values that a complete memory holds at least."""
    keys = {key for i in range(manifest.num_blocks) for key in block_keys(manifest, i)}
    if manifest.prefix_ids:
        keys |= {prefix_key(part) for part in token_parts(manifest)}
    return keys | ({TEXT} if manifest.has_text else set()) | ({TOKEN_IDS} if manifest.has_ids else set())


def content_digest(keys: Iterable[bytes], checksum_of: Callable[[bytes], bytes | memoryview]) -> str:
    """A hash over all values, by way of their checksums: equal for equal content, however the file came about."""
    digest = xxhash.xxh3_128()
    for key in sorted(keys):
        digest.update(len(key).to_bytes(2, "big") + key + bytes(checksum_of(key)))
    return digest.hexdigest()


class MemoryWriter:
    """Receives the blocks of one memory in order. A context manager.

    Leaving it without :meth:`finish` keeps what was committed: creating the same memory again resumes after
    ``num_done`` tokens, up to the first block whose bytes are not those that were committed. Until :meth:`finish` no
    reader sees any of it.
    """

    def __init__(
        self,
        manifest: Manifest,
        records: RecordWriter,
        seal: Callable[[Manifest], Memory],
        release: Callable[[], None],
    ) -> None:
        self.manifest = manifest
        self._records, self._seal, self._release = records, seal, release
        self._blocks_done = 0
        prefix = [key for key in list(records.keys()) if key.startswith(PREFIX)]
        if all(map(self._is_whole, prefix)):  # else all is to be read anew
            while self._blocks_done < manifest.num_blocks and self._has_block(self._blocks_done):
                self._blocks_done += 1

    @property
    def num_blocks_done(self) -> int:
        """Blocks committed so far."""
        return self._blocks_done

    @property
    def num_done(self) -> int:
        """Tokens committed so far."""
        return min(self._blocks_done * self.manifest.block_tokens, self.manifest.num_tokens)

    def __enter__(self) -> MemoryWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            name, total = self.manifest.name, self.manifest.num_tokens
            logger.info("memory %r is left after %d of %d tokens (%s)", name, self.num_done, total, kind.__name__)
        self.close()

    def close(self) -> None:
        """End writing; what was committed stays for resuming."""
        self._records.close()
        self._release()

    def append(self, block: Mapping[str, Buffer]) -> None:
        """Commit the next block: for each part the bytes of its rows [rows, *shape], as
        :func:`memstore.coding.encoded` gives them.

        They stand for ``block_tokens`` tokens, or for what remains in the last block. Raises DocumentError for wrong
        parts or sizes, StoreFullError when the disk is full.
        """
        i, parts = self._blocks_done, self.manifest.parts
        if i == self.manifest.num_blocks:
            raise DocumentError(f"Memory {self.manifest.name!r} already holds all its {self.num_done} tokens.")
        record = _valid(block, parts, self.manifest.tokens_of(i))
        self._put({block_key(part, i): value for part, value in record.items()})
        self._blocks_done += 1
        logger.debug("memory %r: block %d of %d is committed", self.manifest.name, i + 1, self.manifest.num_blocks)

    def put_prefix(self, parts: Mapping[str, Buffer]) -> None:
        """Commit the vectors of the prefix: the bytes of [len(prefix_ids), *shape] for each part but summaries."""
        specs = {part: spec.prefix for part, spec in token_parts(self.manifest).items()}
        values = _valid(parts, specs, len(self.manifest.prefix_ids))
        self._put({prefix_key(part): value for part, value in values.items()})

    def put_document(self, document: Document) -> None:
        """Commit text, token ids and offsets."""
        values: dict[bytes, Buffer] = {}
        if document.text is not None:
            values[TEXT] = document.text.encode()
        if document.token_ids is not None:
            values[TOKEN_IDS] = document.token_ids.astype("<i4").tobytes()
        if document.offsets is not None:
            values[OFFSETS] = document.offsets.astype("<i4").tobytes()
        self._put({key: value for key, value in values.items() if self._stored(key) != value})

    def digest(self) -> str:
        """The hash over all that was committed, which a complete memory is known by."""
        return content_digest(filter(is_value, self._records.keys()), self._stored_checksum)

    def finish(self) -> Memory:
        """Seal the memory and make it visible. Raises StoreError if a block or the prefix is missing."""
        keys = set(filter(is_value, self._records.keys()))
        missing = sorted(expected_keys(self.manifest) - keys)
        if missing:
            raise StoreError(
                f"Memory {self.manifest.name!r} is not complete: it has {self.num_done} of {self.manifest.num_tokens} "
                f"tokens, and lacks {describe(missing[0])}."
            )
        memory = self._seal(self.manifest.model_copy(update={"digest": self.digest(), "seal": self._records.seal()}))
        self.close()
        return memory

    def _stored_checksum(self, key: bytes) -> bytes:
        return self._records.get(CHECKSUM + key) or b""

    def _stored(self, key: bytes) -> bytes | None:
        """A value that was committed, if its bytes are those that were."""
        value = self._records.get(key)
        return value if value is not None and checksum(value) == self._stored_checksum(key) else None

    def _is_whole(self, key: bytes) -> bool:
        return self._stored(key) is not None

    def _has_block(self, i: int) -> bool:
        return all(map(self._is_whole, block_keys(self.manifest, i)))

    def _put(self, values: Mapping[bytes, Buffer]) -> None:
        self._records.put({**values, **{CHECKSUM + key: checksum(value) for key, value in values.items()}})


def _valid(parts: Mapping[str, Buffer], specs: Mapping[str, PartSpec], tokens: int) -> dict[str, memoryview]:
    """The bytes of each part, if they are those of so many tokens."""
    if parts.keys() != specs.keys():
        raise DocumentError(f"Parts {sorted(parts)} were given instead of {sorted(specs)}.")
    views = {part: memoryview(value).cast("B") for part, value in parts.items()}
    for part, view in views.items():
        spec = specs[part]
        if view.nbytes != spec.num_bytes(tokens):
            raise DocumentError(
                f"Part {part!r} has {view.nbytes} bytes instead of {spec.num_bytes(tokens)} ({tokens} tokens of "
                f"{math.prod(spec.shape)} {spec.dtype} values)."
            )
    return views
