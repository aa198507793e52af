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
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memstore.attention import LOWEST, PLAIN, Partial, Scoring, normalise, nothing_read, read_all

if TYPE_CHECKING:
    from memstore.provenance.passages import Tally

FEWEST = 4096  # rows of a memory: fewer are read as fast in float32
NARROW = 128  # numbers in a row: of narrower ones, or for many queries, weights cost more than the products do
FIRST = 512  # rows that are read in float32 before all others, for what to expect of these
SCORES = 1 << 20  # held at once, about
NUMBERS = 1 << 25  # of a memory that are scored before they are summed: 64 MiB, which a cache shared by all cores holds
JUMP = 2.0  # by which a score may exceed the highest so far and still be taken as it is
NEAR = 10.0  # below the highest score, where weights still count
FAR = 1024.0  # bfloat16 holds greater numbers only to 4 or more: then scores are computed in float32
NOTHING = 2.0**-24  # of all weights: rows that weigh no more together are left out of the sum
TILE = 16  # rows of a tile: a product of fewer rows takes longer than one of as many
FEW = 64  # columns of a product that is turned over
TALL, FLAT = 4096, 1024  # rows of a batch with so few columns, and with more


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


def read_bfloat16(queries: Tensor, blocks: Sequence[Tensor], tally: Tally | None = None) -> Partial:
    """Attend from scaled queries [m, d] to every row of the bfloat16 blocks [n_i, d], which are both keys and values.

    The part's ``m`` is near the highest score of each query, which is all that merging asks for. A ``tally`` sums the
    weights by passage, relative to it.
    """
    reading = _Reading(queries.float(), blocks[0][:FIRST], tally)
    for run in _runs(blocks, min(SCORES // len(queries), NUMBERS // queries.shape[1])):
        reading.add(run)
    return reading.part


class _Reading:
    """What queries [m, d] have read so far: ``part``, whose m is a bfloat16 number, unless that is beyond ``FAR``, and
    what to ``expect`` of more."""

    def __init__(self, queries: Tensor, some: Tensor, tally: Tally | None) -> None:
        self.queries, self.tally = queries, tally
        high = queries.bfloat16()
        self.both = torch.cat((high, (queries - high).bfloat16()))
        self.offset = high.new_zeros(len(self.both))  # the part's m, and for the low parts of queries 0
        self.part = nothing_read(queries, queries.shape[1])
        first = read_all(queries, [some])
        self.expect = normalise(first)
        self._move(first.m)

    def add(self, blocks: Sequence[Tensor]) -> None:
        """Read more rows, in blocks [n_i, d]."""
        m, d = self.queries.shape
        ends = list(accumulate(map(len, blocks)))
        scores = self.queries.new_empty((m, ends[-1]))
        for block, end in zip(blocks, ends, strict=True):
            self._score(block, scores[:, end - len(block) : end], scores[:, : end - len(block)])
        weights = self.offset.new_zeros((-(-m // TILE) * TILE, ends[-1]))
        weights[:m] = scores.clamp_min_(LOWEST).exp_()
        if self.tally is not None:
            self.tally.add(weights[:m], self.part.m)
        parts = [weights[:, end - len(block) : end] for block, end in zip(blocks, ends, strict=True)]
        sums = torch.stack([part[:m].sum(-1, keepdim=True, dtype=torch.float32) for part in parts])
        counting = (sums > NOTHING * (self.part.l + sums.sum(0))).flatten(1).any(1).tolist()
        expected = self.offset.new_zeros((len(weights), d))
        for block, part, more, counts in zip(blocks, parts, sums, counting, strict=True):
            if counts:
                expected[:m] = self.expect * more
                self.part.o.add_(torch.addmm(expected, part, block, beta=-1)[:m]).add_(expected[:m])
                self.part.l.add_(more)
                self.expect = normalise(self.part)

    def _score(self, block: Tensor, scores: Tensor, before: Tensor) -> None:
        """Write the scores [m, p] of a block [p, d], less the offset. Where that moves, those ``before`` do too."""
        size = TALL if len(self.both) <= FEW else FLAT
        batched = len(block) // size * size
        for rows, out in ((block[:batched], scores[:, :batched]), (block[batched:], scores[:, batched:])):
            if len(rows):
                self._multiply(rows.unflatten(0, (-1, min(size, len(rows)))), out)
        top = scores.amax(-1, keepdim=True)
        if not (self.part.m.abs() + top.clamp_min(0) <= FAR).all():  # also where one is NaN
            scores[:] = self.queries @ block.float().T
            moved = self._move(torch.maximum(self.part.m, scores.amax(-1, keepdim=True)))
            before.sub_(moved)
            scores.sub_(self.part.m)
        elif (top > JUMP).any():
            large = ((scores > JUMP) & (scores > top - NEAR)).any(0).nonzero()[:, 0]
            moved = self._move(self.part.m + top.clamp_min(0))
            before.sub_(moved)
            scores.sub_(moved)
            scores[:, large] = self.queries @ block[large].float().T - self.part.m

    def _multiply(self, rows: Tensor, out: Tensor) -> None:
        """Write the scores [m, b · p] of rows [b, p, d], less the offset.

        A batch takes no more time than one long matrix, and a third less where rows are not aligned to 64 bytes.
        """
        b, p, _ = rows.shape
        both, m = self.both.expand(b, -1, -1), len(self.queries)
        if len(self.both) <= FEW:
            turned = torch.baddbmm(self.offset.expand(1, 1, -1), rows, both.transpose(1, 2), beta=-1).flatten(0, 1).T
            high, low = turned.to(torch.float32, memory_format=torch.contiguous_format).chunk(2)
            torch.add(high, low, out=out)
        else:
            products = torch.baddbmm(self.offset[None, :, None], both, rows.transpose(1, 2), beta=-1).transpose(0, 1)
            out.unflatten(1, (b, p)).copy_(products[:m]).add_(products[m:])

    def _move(self, m: Tensor) -> Tensor:
        """Let the part stand about another ``m`` [m, 1], as bfloat16 holds it unless it is too large for that. Returns
        by how much it is more."""
        self.offset[: len(m)] = m[:, 0]
        rounded = torch.where(m.abs() <= FAR, self.offset[: len(m), None].float(), m)
        moved = rounded - self.part.m
        scale = (-moved).exp()
        self.part = Partial(rounded, scale * self.part.l, scale * self.part.o)
        return moved


def _runs(blocks: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
    """The blocks in order, in pieces that have together about ``size`` rows at most."""
    run: list[Tensor] = []
    for block in blocks:
        for piece in block.split(max(FLAT, size)):
            if run and sum(map(len, run)) + len(piece) > size:
                yield run
                run = []
            run.append(piece)
    yield run
