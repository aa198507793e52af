"""A stored memory with other tokens in some places, as encoding it anew would give it, and nothing of it written."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from memstore.interfaces import ModelAdapter
from memstore.memory import Memory, OpenMemory, Verify
from memstore.windows import plan


class Spliced(Memory):
    """``filler`` with the token ids ``ids`` [num_tokens]: only the windows that see a change are read by the model.

    It can be attached beside others, not beside its filler.
    """

    def __init__(self, adapter: ModelAdapter, filler: Memory, ids: np.ndarray) -> None:
        super().__init__(filler.store, filler.manifest)
        self.__dict__["token_ids"] = ids  # what the cached property holds
        self.adapter = adapter
        self.fresh: dict[str, list[tuple[int, Tensor]]] = {}  # of a part: where rows begin, and they
        changed = np.flatnonzero(ids != filler.token_ids)
        prefix = list(self.manifest.prefix_ids)
        for window in plan(len(ids), self.manifest.rule):
            inside = changed[(changed >= window.start) & (changed < window.stop)]
            if not len(inside) or (self.manifest.rule.context == "left" and window.keep_stop <= inside[0]):
                continue  # in a causal model what comes before the first change is as it was
            before = prefix + (list(self.manifest.lead_ids) if window.start == 0 else [])
            with torch.no_grad():
                encoded = adapter.encode(torch.tensor([before + ids[window.start : window.stop].tolist()]))
            keep = slice(*(len(before) + at - window.start for at in (window.keep_start, window.keep_stop)))
            for part, rows in encoded.items():
                stored = rows[0, keep].to(getattr(torch, self.manifest.parts[part].dtype))
                self.fresh.setdefault(part, []).append((window.keep_start, stored))

    def open(self, verify: Verify = "lazy") -> OpenMemory:
        return OpenSpliced(self, verify)


class OpenSpliced(OpenMemory):
    memory: Spliced

    def __init__(self, memory: Spliced, verify: Verify) -> None:
        super().__init__(memory, verify)
        self._changed: dict[tuple[str, int], Tensor] = {}

    def block(self, part: str, i: int) -> Tensor:
        if (part, i) not in self._changed:
            rows = super().block(part, i)
            changed = self._spliced(part, i, rows)
            if changed is None:
                return rows
            self._changed[part, i] = changed
        return self._changed[part, i]

    def rows(self, part: str, start: int, stop: int) -> Tensor:
        rows = super().rows(part, start, stop)
        changed = self._fresh(part, start, rows)
        return rows if changed is None else changed

    def _spliced(self, part: str, i: int, rows: Tensor) -> Tensor | None:
        """Block ``i`` with its fresh rows, None if it has none."""
        if self.manifest.parts[part].every > 1:  # a summary, made of what it sums up
            keys = part.replace("bounds", "keys")
            block = self.block(keys, i)
            return self.memory.adapter.summaries({keys: block})[part] if (keys, i) in self._changed else None
        return self._fresh(part, i * self.manifest.block_tokens, rows)

    def _fresh(self, part: str, start: int, rows: Tensor) -> Tensor | None:
        """``rows``, of which the first is that of token ``start``, with the fresh ones among them, None if none is."""
        changed = None
        for at, fresh in self.memory.fresh[part]:
            low, high = max(at, start), min(at + len(fresh), start + len(rows))
            if low < high:
                changed = rows.clone() if changed is None else changed
                changed[low - start : high - start] = fresh[low - at : high - at]
        return changed
