"""Exact search with faiss, on the CPU or a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from memstore.vectors import CHUNK, checked_keys
from memstore_backends.exact import ExactIndex
from memstore_backends.faiss_gpu import DeviceOptions, find_gpu
from memstore_backends.faiss_index import FaissIndex
from memstore_backends.faiss_keys import flat_index, keys_of


class FaissFlatIndex(FaissIndex):
    """Every key is scored. On the CPU keys keep their dtype, so that an index is as large as they are."""

    Options = DeviceOptions

    def build(self, blocks: Sequence[Tensor]) -> None:
        checked_keys(blocks)
        find_gpu(self.device)
        self.hold(flat_index(blocks, blocks[0].dtype))

    def block_maxima(self, queries: Tensor, size: int) -> Tensor:
        if self.device != "cpu":
            return super().block_maxima(queries, size)
        exact = ExactIndex()  # faiss has no search for the best of each block, and here lie the keys for one that has
        exact.build(keys_of(self.index).split(max(1, CHUNK // self.width)))
        return exact.block_maxima(queries, size)
