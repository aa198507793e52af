"""Product quantization with faiss on the CPU: 2 bits a number are scanned, and the best are scored again in 16 bits."""

from __future__ import annotations

from collections.abc import Sequence

import faiss
import torch
from pydantic import Field
from torch import Tensor

from memstore.interfaces import Options
from memstore.vectors import checked_keys, float_chunks, sample
from memstore_backends.faiss_index import FaissRefinedIndex
from memstore_backends.faiss_keys import check_sizes, flat_index

TRAINABLE = 1024  # keys; of fewer nothing is learned, and all are scored exactly
TRAINING = 16384  # keys that k-means sees
HALF_RANGE = (2**-12, 65504)  # where the largest number must lie for its float16 to be wrong by 1 in 4,096 at most


class FaissPqOptions(Options):
    """``k_factor``: how many times k keys are scored again. ``seed``: decides what is learned."""

    k_factor: int = Field(8, gt=0, lt=2**31)
    seed: int = Field(0, ge=0, lt=2**31)


class FaissPqIndex(FaissRefinedIndex):
    """Fast-scan codes of 4 bits for each pair of numbers (for each number, if d is odd), and the keys in 16 bits.

    Those are float16, or bfloat16 where the keys are bfloat16 or of a size that float16 does not hold.
    """

    Options = FaissPqOptions
    options: FaissPqOptions
    fewest = 256  # codes of few numbers have many ties

    def build(self, blocks: Sequence[Tensor]) -> None:
        n, d = checked_keys(blocks)
        dtype, (low, high) = blocks[0].dtype, HALF_RANGE
        fits = low <= check_sizes(blocks) <= high
        if n < TRAINABLE:
            self.hold(flat_index(blocks, dtype))
            return
        if dtype == torch.float32:
            dtype = torch.float16 if fits else torch.bfloat16
        coded = faiss.IndexPQFastScan(d, d if d % 2 else d // 2, 4, faiss.METRIC_INNER_PRODUCT)
        coded.pq.cp.seed = self.options.seed
        coded.pq.cp.max_points_per_centroid = TRAINING // 16
        coded.train(sample(blocks, TRAINING, self.options.seed).numpy())
        for _, chunk in float_chunks(blocks):
            coded.add(chunk.numpy())
        self.hold(faiss.IndexRefine(coded, flat_index(blocks, dtype)))

    def find(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        scores, ids = super().find(queries, k)
        lost = (ids < 0).any(1)  # of a query to which all codes are alike, such as zeros, faiss finds nothing
        if lost.any():
            every = faiss.downcast_index(self.index.refine_index)
            found = every.search(queries[lost].numpy(), k)
            scores[lost], ids[lost] = (torch.from_numpy(each) for each in found)
        return scores, ids
