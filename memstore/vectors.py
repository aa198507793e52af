"""What keys and queries must be, for every index alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import pad

from memstore.errors import IndexBuildError, QueryError

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CHUNK = 1 << 20  # numbers in a chunk of keys: 4 MiB of float32


def checked_keys(blocks: Sequence[Tensor]) -> tuple[int, int]:
    """n and d of keys given in blocks [n_i, d]. Reads none of them.

    Raises IndexBuildError if there is no key, or they are not of one width and one dtype that a memory may have.
    """
    if not blocks or not all(len(block) for block in blocks):
        raise IndexBuildError("An index needs at least one key.")
    kinds = {(tuple(block.shape[1:]), block.dtype) for block in blocks}
    if len(kinds) > 1 or blocks[0].dim() != 2 or not blocks[0].shape[1] or blocks[0].dtype not in DTYPES:
        raise IndexBuildError(
            "Keys must be blocks [n, d] of one width and one dtype, float32, float16 or bfloat16; these are "
            f"{', '.join(f'[n, *{list(shape)}] {dtype}' for shape, dtype in sorted(kinds, key=str))}."
        )
    return sum(map(len, blocks)), blocks[0].shape[1]


def check_finite(block: Tensor) -> None:
    """Raises IndexBuildError if one of these keys is NaN or infinite."""
    if not block.isfinite().all():
        raise IndexBuildError("Keys must be finite numbers, and some of these are NaN or infinite.")


def float_chunks(blocks: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """The keys of blocks [n_i, d] as contiguous float32 [r, d] on the CPU, a few MiB at a time, each with the id of its
    first key. A chunk may be a view of its block, so it must not be written to.

    Raises IndexBuildError if a key is NaN or infinite.
    """
    start = 0
    for block in blocks:
        for chunk in block.split(max(1, CHUNK // block.shape[1])):
            check_finite(chunk)
            yield start, chunk.to("cpu", torch.float32).contiguous()
            start += len(chunk)


def largest(blocks: Sequence[Tensor]) -> float:
    """The size of the largest number in these keys. Raises IndexBuildError if one is NaN or infinite."""
    return max(float(chunk.abs().amax()) for _, chunk in float_chunks(blocks))


def sample(blocks: Sequence[Tensor], size: int, seed: int) -> Tensor:
    """At most ``size`` of the keys, float32 [s, d] on the CPU, in order: always the same ones for a seed."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(sum(map(len, blocks)), generator=generator)[:size].sort().values
    return Rows(blocks)(chosen).float()


def checked_queries(queries: Tensor, width: int, k: int) -> Tensor:
    """The queries [m, d] as float32, without a gradient: the choice of keys has none.

    Raises QueryError for a ``k`` that is no whole number of at least 1, another width than that of the keys, another
    dtype than float32, float16 or bfloat16, or values that are not finite.
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise QueryError(f"k={k!r} must be a whole number of at least 1.")
    if queries.dim() != 2 or queries.shape[1] != width:
        raise QueryError(f"Queries have shape {tuple(queries.shape)}; this index holds keys of width {width}.")
    if queries.dtype not in DTYPES or not queries.isfinite().all():
        raise QueryError(f"Queries must be finite float32, float16 or bfloat16 numbers (they are {queries.dtype}).")
    return queries.detach().float()


def padded(scores: Tensor, ids: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Results [m, j] widened to [m, k] by empty slots: score -inf, id -1.

    Raises QueryError if the score of a key is not finite, or so many slots do not fit into memory.
    """
    if not (scores.isfinite() | (ids < 0)).all():
        raise QueryError("Scores exceed what float32 holds: the numbers in these keys and queries are too large.")
    missing = max(0, k - scores.shape[1])
    try:
        return pad(scores, (0, missing), value=-torch.inf), pad(ids, (0, missing), value=-1)
    except (RuntimeError, TypeError) as error:  # the latter for a number beyond 64 bits
        raise QueryError(f"k={k}: {len(ids)} times so many results do not fit into memory. Use a smaller k.") from error


def best_so_far(before: tuple[Tensor, Tensor], scores: Tensor, start: int, k: int) -> tuple[Tensor, Tensor]:
    """Scores and ids [m, …] of the best k among those found before and the scores [m, n_i] of ids from ``start`` on, in
    no order."""
    width = before[1].shape[1]
    both = torch.cat((before[0], scores), dim=1)
    best = both.topk(min(k, both.shape[1]), dim=1, sorted=False)
    ids = best.indices - width + start
    if width:
        ids = torch.where(ids < start, before[1].gather(1, best.indices.clamp_max(width - 1)), ids)
    return best.values, ids


class Rows:
    """The rows of blocks [n_i, d], found by their ids 0 … n-1, in a dtype that holds those of all blocks."""

    def __init__(self, blocks: Sequence[Tensor]) -> None:
        self.blocks = blocks
        self._dtype = reduce(torch.promote_types, (block.dtype for block in blocks))
        self._starts = torch.tensor([0, *map(len, blocks)]).cumsum(0)
        self.num_rows = int(self._starts[-1])

    def __call__(self, ids: Tensor) -> Tensor:
        """Rows [j, d] of ids [j], on the device of the ids."""
        first = self.blocks[0]
        places = ids.to(first.device)
        if len(self.blocks) == 1:
            return first[places].to(ids.device)
        ordered, order = places.sort()
        cuts = torch.searchsorted(ordered.cpu(), self._starts).tolist()
        parts = [
            block[ordered[begin:end] - start].to(self._dtype)
            for block, start, begin, end in zip(self.blocks, self._starts.tolist(), cuts, cuts[1:], strict=False)
            if begin < end
        ]
        rows = first.new_empty(len(ids), first.shape[1], dtype=self._dtype)
        rows[order] = torch.cat(parts or [rows])
        return rows.to(ids.device)
