"""Exact search with torch: one pass over the store's own blocks, without a copy of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memstore.errors import QueryError
from memstore.interfaces import VectorIndex

QUERIES = 1024  # scored at once, so that a long prompt never needs a matrix of all queries against all keys
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class ExactIndex(VectorIndex):
    """Every key is scored, in the dtype it is stored in; on the CPU, bfloat16 keys halve the traffic that bounds it."""

    def build(self, blocks: Sequence[Tensor]) -> None:
        if not blocks or not all(len(block) for block in blocks):
            raise QueryError("An index needs at least one key.")
        self.blocks = list(blocks)
        self.width = self.blocks[0].shape[1]

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise QueryError(f"k={k!r} must be a whole number of at least 1.")
        if queries.dim() != 2 or queries.shape[1] != self.width:
            raise QueryError(f"Queries have shape {tuple(queries.shape)}; this index holds keys of width {self.width}.")
        if queries.dtype not in DTYPES or not queries.isfinite().all():
            raise QueryError(f"Queries must be finite float32, float16 or bfloat16 numbers (they are {queries.dtype}).")
        found = [self._search(chunk.float(), k) for chunk in queries.split(QUERIES)]
        scores, ids = (torch.cat(each) for each in zip(*found, strict=True))
        return scores, ids

    def _search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        dtype = self.blocks[0].dtype
        # A half ends at 65,504, so queries are made so small that no score exceeds the largest number in a key.
        largest = queries.abs().amax(1, keepdim=True).clamp_min(1e-30)
        scale = largest * self.width if dtype == torch.float16 else 1
        scaled = (queries / scale).to(dtype)
        best_scores = queries.new_empty((len(queries), 0))
        best_ids = torch.empty((len(queries), 0), dtype=torch.int64, device=queries.device)
        start = 0
        for block in self.blocks:
            top = (scaled @ block.T).topk(min(k, len(block)), dim=1)
            scores_both = torch.cat((best_scores, top.values.float() * scale), dim=1)
            ids_both = torch.cat((best_ids, top.indices + start), dim=1)
            best = scores_both.topk(min(k, scores_both.shape[1]), dim=1)
            best_scores, best_ids = best.values, ids_both.gather(1, best.indices)
            start += len(block)
        missing = k - best_scores.shape[1]
        if missing > 0:
            best_scores = torch.nn.functional.pad(best_scores, (0, missing), value=-torch.inf)
            best_ids = torch.nn.functional.pad(best_ids, (0, missing), value=-1)
        return best_scores, best_ids
