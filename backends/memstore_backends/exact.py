"""Exact search with torch: one pass over the store's own blocks, without a copy of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memstore.errors import QueryError
from memstore.interfaces import VectorIndex
from memstore.vectors import checked_keys, checked_queries, padded

QUERIES = 1024  # scored at once, so that a long prompt never needs a matrix of all queries against all keys


class ExactIndex(VectorIndex):
    """Every key is scored, in the dtype it is stored in; on the CPU, bfloat16 keys halve the traffic that bounds it."""

    def build(self, blocks: Sequence[Tensor]) -> None:
        self.num_keys, self.width = checked_keys(blocks)
        self.blocks = list(blocks)

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        found = [self._search(chunk, k) for chunk in checked_queries(queries, self.width, k).split(QUERIES)]
        scores, ids = (torch.cat(each) for each in zip(*found, strict=True))
        if not scores.isfinite().all():  # looked for here, because building reads no key
            raise QueryError("The keys of this index are not finite numbers: some are NaN or infinite.")
        return padded(scores, ids, k)

    def block_maxima(self, queries: Tensor, size: int) -> Tensor:
        checked = checked_queries(queries, self.width, 1)
        best = checked.new_full((len(checked), -(-self.num_keys // size)), -torch.inf)
        start = 0
        for block in self.blocks:
            keys = block.to(queries.device, torch.float32).T
            first, last = start // size, -(-(start + len(block)) // size)
            for rows, chunk in zip(best.split(QUERIES), checked.split(QUERIES), strict=True):
                seen = rows[:, first:last]
                torch.maximum(seen, _maxima(chunk @ keys, start % size, size), out=seen)
            start += len(block)
        return best

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
            top = (scaled @ block.to(queries.device).T).topk(min(k, len(block)), dim=1)
            scores_both = torch.cat((best_scores, top.values.float() * scale), dim=1)
            ids_both = torch.cat((best_ids, top.indices + start), dim=1)
            best = scores_both.topk(min(k, scores_both.shape[1]), dim=1)
            best_scores, best_ids = best.values, ids_both.gather(1, best.indices)
            start += len(block)
        return best_scores, best_ids


def _maxima(scores: Tensor, skip: int, size: int) -> Tensor:
    """[m, n] -> [m, blocks]: the best of each block of ``size``; the first lacks ``skip`` scores, the last may too."""
    missing = (skip, -(skip + scores.shape[1]) % size)
    scores = torch.nn.functional.pad(scores, missing, value=-torch.inf) if any(missing) else scores
    return scores.view(len(scores), scores.shape[1] // size, size).amax(-1)
