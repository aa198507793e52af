"""Attention over a memory that is stored in bfloat16, by the matrix instructions of a CPU (AMX).

They multiply bfloat16 numbers as they lie in the memory and add the products up in float32; only what comes out is
rounded to bfloat16. A small number loses little by that, so differences from a known number are asked for: scores less
the highest so far, which are small where weights are large, and sums less what the rows before let expect. Queries are
given as the sum of two bfloat16 numbers, and weights are summed as they were rounded. What remains is about the error
that storing states in bfloat16 makes by itself (tests/test_bfloat16.py holds one against the other).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from memstore.attention import PLAIN, Partial, Scoring, normalise, read_all

FEWEST = 4096  # rows of a memory: fewer are read as fast in float32
NARROW = 128  # numbers in a row: of narrower ones, or for many queries, weights cost more than the products do
FIRST = 1024  # rows that are read in float32, for what to expect of the others
SCORES = 1 << 18  # held at once, about
JUMP = 2.0  # by which a score may exceed the highest so far before all scores at hand are computed anew
FEW = 128  # columns: the product of a piece with so few is faster than the other way round, and turning it over cheap
TILE = 16  # rows of a tile: a product of fewer rows takes longer than one of as many


@cache
def has_tiles() -> bool:
    """Whether this CPU multiplies bfloat16 matrices by itself."""
    return bool(torch.cpu._is_amx_tile_supported())


def suits(queries: Tensor, blocks: Sequence[Tensor], scoring: Scoring) -> bool:
    """Whether :func:`read_bfloat16` can read these blocks for these queries, and is worth it."""
    m, d = queries.shape
    return (
        blocks[0].dtype == torch.bfloat16
        and queries.device.type == blocks[0].device.type == "cpu"
        and scoring == PLAIN
        and max(NARROW, 2 * m) <= d
        and not queries.requires_grad
        and has_tiles()
        and sum(map(len, blocks)) >= FEWEST
    )


def read_bfloat16(queries: Tensor, blocks: Sequence[Tensor]) -> Partial:
    """Attend from scaled queries [m, d] to every row of the bfloat16 blocks [n_i, d], which are both keys and values.

    The part's ``m`` is near the highest score of each query, which is all that merging asks for.
    """
    m, d = queries.shape
    queries, size = queries.float(), max(FIRST, SCORES // m)
    high = queries.bfloat16()
    both = torch.cat((high, (queries - high).bfloat16()))
    weights = high.new_zeros((-(-m // TILE) * TILE, min(size, max(map(len, blocks)))))
    expected = high.new_zeros((len(weights), d))
    offset = high.new_zeros(2 * m)  # taken from all scores; those of the low parts of queries have none
    part = read_all(queries, [blocks[0][:FIRST]])
    part = _moved(part, part.m, offset)
    for piece in _pieces(blocks, size):
        scores = _scores(piece, both, offset)
        top = scores.amax(-1, keepdim=True)
        if (top > JUMP).any():
            part = _moved(part, part.m + top.clamp_min(0), offset)
            scores = _scores(piece, both, offset)
        here = weights[:, : len(piece)]
        here[:m] = scores.exp_()
        more = here[:m].sum(-1, keepdim=True, dtype=torch.float32)
        expected[:m] = normalise(part) * more
        part.o.add_(torch.addmm(expected, here, piece, beta=-1)[:m]).add_(expected[:m])
        part.l.add_(more)
    return part


def _moved(part: Partial, m: Tensor, offset: Tensor) -> Partial:
    """The same part about another ``m`` [m, 1], of which as much as bfloat16 holds becomes the offset."""
    offset[: len(m)] = m[:, 0]
    rounded = offset[: len(m), None].float()
    scale = (part.m - rounded).exp()
    return Partial(rounded, scale * part.l, scale * part.o)


def _scores(piece: Tensor, both: Tensor, offset: Tensor) -> Tensor:
    """Scores [m, p] of the rows of a piece [p, d], float32, less the offset."""
    if len(both) < FEW:
        products = torch.addmm(offset, piece, both.T, beta=-1).T
    else:
        products = torch.addmm(offset[:, None], both, piece.T, beta=-1)
    high, low = products.to(torch.float32, memory_format=torch.contiguous_format).chunk(2)
    return high.add_(low)


def _pieces(blocks: Sequence[Tensor], size: int) -> Iterator[Tensor]:
    """All but the first rows of the blocks, in order, in pieces of at most ``size`` rows."""
    for i, block in enumerate(blocks):
        yield from (piece for piece in block[0 if i else FIRST :].split(size) if len(piece))
