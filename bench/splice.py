"""Memories that differ from a stored one in a few windows: only these are encoded, and nothing is copied.

Windows are independent, so the first n tokens of a long memory are the memory of n tokens (but for its last window,
which an encoding of its own would begin earlier), and a changed token changes only what the windows that see it keep.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from memstore.coding import encoded
from memstore.interfaces import ModelAdapter, RecordReader
from memstore.manifest import Manifest
from memstore.memory import Memory
from memstore.memory_writer import token_parts
from memstore.values import CHECKSUM, TOKEN_IDS, block_key, checksum
from memstore.windows import plan


class Reader(RecordReader):
    """Some records, and for all others those of another reader."""

    def __init__(self, base: RecordReader, changed: dict[bytes, bytes]) -> None:
        self._base, self._changed = base, changed

    def get(self, key: bytes) -> memoryview:
        return memoryview(self._changed[key]) if key in self._changed else self._base.get(key)

    def keys(self) -> Iterator[bytes]:
        return self._base.keys()

    def close(self) -> None:
        self._base.close()


class Spliced:
    """Stands in the place of the store that a memory is read from."""

    def __init__(self, base: Memory, changed: dict[bytes, bytes]) -> None:
        self.base, self.path, self.records = base, base.store.path, base.store.records
        self._changed = changed | {CHECKSUM + key: checksum(value) for key, value in changed.items()}

    def reader(self, manifest: Manifest) -> RecordReader:
        return Reader(self.base.store.reader(self.base.manifest), self._changed)


def splice(adapter: ModelAdapter, base: Memory, ids: np.ndarray, name: str) -> Memory:
    """The memory of ``ids`` [n], which differ from those of ``base`` in some places. Raises ValueError if n is neither
    the length of ``base`` nor a multiple of its blocks."""
    manifest = base.manifest
    if len(ids) != base.num_tokens and len(ids) % manifest.block_tokens:
        raise ValueError(f"{len(ids)} tokens end inside a block of {manifest.block_tokens}.")
    assert base.token_ids is not None
    changed = np.flatnonzero(ids != base.token_ids[: len(ids)])
    draft = manifest.model_copy(
        update={
            "id": checksum(name.encode() + ids.tobytes()).hex(),
            "name": name,
            "num_tokens": len(ids),
            "document_digest": name,
        }
    )
    records: dict[bytes, bytes] = {TOKEN_IDS: ids.astype("<i4").tobytes()}
    fresh = [] if not len(changed) else list(_encoded_windows(adapter, manifest, ids, changed))
    with base.open() as opened:
        size = manifest.block_tokens
        for i in sorted({at // size for start, rows in fresh for at in (start, start + _length(rows) - 1)}):
            block = {part: opened.block(part, i).float().clone() for part in token_parts(draft)}
            for start, rows in fresh:
                low, high = max(start, i * size), min(start + _length(rows), (i + 1) * size)
                for part in block if low < high else ():
                    block[part][low - i * size : high - i * size] = rows[part][low - start : high - start]
            block |= adapter.summaries(block)
            records |= {block_key(part, i): bytes(encoded(rows, manifest.parts[part])) for part, rows in block.items()}
    stand_in: Any = Spliced(base, records)
    return Memory(stand_in, draft)


def _length(rows: dict[str, torch.Tensor]) -> int:
    return len(next(iter(rows.values())))


def _encoded_windows(
    adapter: ModelAdapter, manifest: Manifest, ids: np.ndarray, changed: np.ndarray
) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
    """What each window that sees a changed token keeps, float32, and the token it begins with."""
    causal, before = manifest.rule.context == "left", list(manifest.prefix_ids)
    for window in plan(len(ids), manifest.rule, manifest.anchors):
        sees = ((changed >= window.start) & (changed < window.stop)).any()
        if not sees or (causal and window.keep_stop <= changed[0]):  # earlier tokens are as they were
            continue
        lead = list(manifest.lead_ids) if window.start == 0 else []
        inputs = torch.tensor([before + lead + ids[window.start : window.stop].tolist()])
        with torch.inference_mode():
            read = adapter.encode(inputs)
        skip = len(before) + len(lead) - window.start
        kept = slice(skip + window.keep_start, skip + window.keep_stop)
        yield window.keep_start, {part: rows[0, kept].float() for part, rows in read.items()}
