"""An index backend of memstore in numpy: every key is compared with every query."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor

from memstore.interfaces import Options, VectorIndex
from memstore.vectors import check_finite, checked_keys, checked_queries, padded


class NumpyOptions(Options):
    """The options of the backend, as they stand under ``[index.options]``."""

    chunk: int = Field(256, gt=0, lt=2**31)  # queries compared at once


class NumpyIndex(VectorIndex):
    """Exact. It keeps a copy of the keys in float32, which also holds what numpy lacks: bfloat16."""

    Options = NumpyOptions
    options: NumpyOptions

    def build(self, blocks: Sequence[Tensor]) -> None:
        self.num_keys, self.width = checked_keys(blocks)
        self.keys = np.empty((self.num_keys, self.width), np.float32)
        start = 0
        for block in blocks:
            check_finite(block)
            self.keys[start : start + len(block)] = block.float().cpu().numpy()
            start += len(block)

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        checked = checked_queries(queries, self.width, k)
        found = [self._search(chunk.cpu().numpy(), k) for chunk in checked.split(self.options.chunk)]
        scores, ids = (torch.cat(each).to(queries.device) for each in zip(*found, strict=True))
        return padded(scores, ids, k)

    def _search(self, queries: npt.NDArray[np.float32], k: int) -> tuple[Tensor, Tensor]:
        scores = queries @ self.keys.T
        best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return torch.from_numpy(np.take_along_axis(scores, best, axis=1)), torch.from_numpy(best)
