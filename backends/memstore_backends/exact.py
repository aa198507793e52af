"""Exact search with torch: one pass over the store's own blocks, without a copy of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Annotated

import torch
from pydantic import AfterValidator
from torch import Tensor

from memstore.errors import IndexBuildError, QueryError
from memstore.interfaces import Options, VectorIndex
from memstore.vectors import checked_keys, checked_queries, padded

QUERIES = 128  # scored at once, so that a long prompt never needs a matrix of all queries against all keys
PIECE = 1 << 16  # scores whose exponentials are summed at once, which the cache of a core holds
SCORES = 1 << 24  # of some queries and some keys, held at once


def _device(name: str | None) -> str | None:
    try:
        if name is None or torch.device(name).type != "meta":  # which holds no numbers
            return name if name is None else str(torch.device(name))
    except RuntimeError:
        pass
    raise ValueError("keys cannot be brought to such a device; use 'cpu', 'cuda', or one of several GPUs, as 'cuda:1'")


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
        return self._found(queries, k, summed=False)[:2]

    def search_and_sum(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
        return self._found(queries, k, summed=True)

    def _found(self, queries: Tensor, k: int, summed: bool) -> tuple[Tensor, Tensor, Tensor]:
        checked = checked_queries(queries, self.width, k).to(self.blocks[0].device)
        found = [self._search(chunk, k, summed) for chunk in checked.split(QUERIES)]
        scores, ids, log_sums = (torch.cat(each) for each in zip(*found, strict=True))
        if not scores.isfinite().all():  # looked for here, because building reads no key
            raise QueryError("The keys of this index are not finite numbers: some are NaN or infinite.")
        return *padded(scores.to(queries.device), ids.to(queries.device), k), log_sums.to(queries.device)

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

    def _search(self, queries: Tensor, k: int, summed: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Scores and ids [m, j] of the best keys, and the log of the sum of exp(score) over all [m], -inf unless it is
        asked for."""
        dtype, m = self.blocks[0].dtype, len(queries)
        # A half ends at 65,504, so queries are made so small that no score exceeds the largest number in a key.
        largest = queries.abs().amax(1, keepdim=True).clamp_min(1e-30)
        scale = largest * self.width if dtype == torch.float16 else torch.ones_like(largest)
        scaled = (queries / scale).to(dtype).T
        best_scores = queries.new_empty((m, 0))
        best_ids = torch.empty((m, 0), dtype=torch.int64, device=queries.device)
        total = queries.new_full((m,), -torch.inf)
        start = 0
        for blocks in _runs(self.blocks, SCORES // max(m, 1)):
            sizes = [len(block) for block in blocks]
            scores = scaled.new_empty((sum(sizes), m))
            for block, part in zip(blocks, scores.split(sizes), strict=True):
                torch.mm(block, scaled, out=part)
            top, ids = _best(scores, min(k, len(scores)))
            if summed:
                highest = (top[:, :1].float() * scale).T
                sums = _sums_of_exp(scores, scale.T if dtype == torch.float16 else None, highest)
                total = torch.logaddexp(total, sums.log() + highest[0])
            scores_both = torch.cat((best_scores, top.float() * scale), dim=1)
            ids_both = torch.cat((best_ids, ids + start), dim=1)
            best = scores_both.topk(min(k, scores_both.shape[1]), dim=1)
            best_scores, best_ids = best.values, ids_both.gather(1, best.indices)
            start += len(scores)
        return best_scores, best_ids, total


def _runs(blocks: Sequence[Tensor], rows: int) -> Iterator[list[Tensor]]:
    """The blocks in order, cut or taken together so that each run has about ``rows`` rows."""
    run: list[Tensor] = []
    held = 0
    for block in blocks:
        for piece in block.split(max(rows, 1)):
            if run and held + len(piece) > rows:
                yield run
                run, held = [], 0
            run.append(piece)
            held += len(piece)
    yield run


def _best(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of scores [n, m] for each column: scores and rows [m, k].

    Sorting out the best of everything would cost more than the scores do. So rows are dealt out into groups: the k best
    are in the k groups whose best scores are best.
    """
    n, m = scores.shape
    size = math.isqrt(n // k)  # which makes the groups about as many as the scores in the k best groups
    count = n // size
    groups = scores[: size * count].view(size, count, m)  # group j holds rows j, j + count, j + 2 count, ...
    chosen = groups.amax(0).T.topk(k).indices
    rows = chosen + count * torch.arange(size, device=scores.device)[:, None, None]  # [size, m, k]
    over = torch.arange(size * count, n, device=scores.device).expand(m, -1)  # those that no group has room for
    rows = torch.cat((rows.transpose(0, 1).flatten(1), over), dim=1)
    best = scores.T.gather(1, rows).topk(k)
    return best.values, rows.gather(1, best.indices)


def _sums_of_exp(scores: Tensor, scale: Tensor | None, highest: Tensor) -> Tensor:
    """[m]: the sums over scores [n, m], times scale [1, m], of exp(score - highest), highest [1, m]."""
    sums = torch.zeros_like(highest[0])
    for piece in scores.split(max(1, PIECE // max(scores.shape[1], 1))):
        floats = torch.sub(piece if scale is None else piece * scale, highest)
        sums += floats.exp_().sum(0)
    return sums


def _maxima(scores: Tensor, skip: int, size: int) -> Tensor:
    """[m, n] -> [m, blocks]: the best of each block of ``size``; the first lacks ``skip`` scores, the last may too."""
    missing = (skip, -(skip + scores.shape[1]) % size)
    scores = torch.nn.functional.pad(scores, missing, value=-torch.inf) if any(missing) else scores
    return scores.view(len(scores), scores.shape[1] // size, size).amax(-1)
