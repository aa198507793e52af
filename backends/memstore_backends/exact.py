"""Exact search with torch: one pass over the store's own blocks, without a copy of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from pydantic import AfterValidator
from torch import Tensor

from memstore.errors import IndexBuildError, QueryError
from memstore.interfaces import Options, VectorIndex
from memstore.vectors import checked_keys, checked_queries, padded

QUERIES = 1024  # scored at once, so that a long prompt never needs a matrix of all queries against all keys


def _device(name: str | None) -> str | None:
    try:
        return name if name is None else str(torch.device(name))
    except RuntimeError as error:
        raise ValueError(
            "torch knows no such device; use 'cpu', 'cuda', or one of several GPUs, as 'cuda:1'"
        ) from error


class ExactOptions(Options):
    """``device``: where keys are brought to and searched, "cpu", "cuda" or "cuda:1"; None for where they are."""

    device: Annotated[str | None, AfterValidator(_device)] = None


class ExactIndex(VectorIndex):
    """Every key is scored, in the dtype it is stored in; on the CPU, bfloat16 keys halve the traffic that bounds it."""

    Options = ExactOptions
    options: ExactOptions

    def build(self, blocks: Sequence[Tensor]) -> None:
        self.num_keys, self.width = checked_keys(blocks)
        device = self.options.device or blocks[0].device
        try:
            self.blocks = [block.to(device) for block in blocks]
        except (AssertionError, RuntimeError) as error:  # the former where torch was built without such devices
            raise IndexBuildError(f"The keys cannot be brought to device {str(device)!r}: {error}.") from error

    def search(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        checked = checked_queries(queries, self.width, k).to(self.blocks[0].device)
        found = [self._search(chunk, k) for chunk in checked.split(QUERIES)]
        scores, ids = (torch.cat(each) for each in zip(*found, strict=True))
        if not scores.isfinite().all():  # looked for here, because building reads no key
            raise QueryError("The keys of this index are not finite numbers: some are NaN or infinite.")
        return padded(scores.to(queries.device), ids.to(queries.device), k)

    def block_maxima(self, queries: Tensor, size: int) -> Tensor:
        checked = checked_queries(queries, self.width, 1).to(self.blocks[0].device)
        best = checked.new_full((len(checked), -(-self.num_keys // size)), -torch.inf)
        start = 0
        for block in self.blocks:
            keys = block.float().T
            first, last = start // size, -(-(start + len(block)) // size)
            for rows, chunk in zip(best.split(QUERIES), checked.split(QUERIES), strict=True):
                seen = rows[:, first:last]
                torch.maximum(seen, _maxima(chunk @ keys, start % size, size), out=seen)
            start += len(block)
        return best.to(queries.device)

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
        return best_scores, best_ids


def _maxima(scores: Tensor, skip: int, size: int) -> Tensor:
    """[m, n] -> [m, blocks]: the best of each block of ``size``; the first lacks ``skip`` scores, the last may too."""
    missing = (skip, -(skip + scores.shape[1]) % size)
    scores = torch.nn.functional.pad(scores, missing, value=-torch.inf) if any(missing) else scores
    return scores.view(len(scores), scores.shape[1] // size, size).amax(-1)
