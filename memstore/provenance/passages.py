"""Attention summed by passage: stretches of 64 tokens, counted from the beginning of each document."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

if TYPE_CHECKING:
    from memstore.memory import Memory

PASSAGE = 64  # tokens reported as one


def num_passages(num_tokens: int) -> int:
    """Passages of a document; the last one may be shorter."""
    return -(-num_tokens // PASSAGE)


def by_passage(weights: Tensor, skip: int = 0) -> Tensor:
    """[…, n] -> […, passages] float32: the sum of each passage; the first lacks ``skip`` tokens, the last may too."""
    missing = -(skip + weights.shape[-1]) % PASSAGE
    if skip or missing:
        weights = pad(weights, (skip, missing))
    return weights.view(*weights.shape[:-1], -1, PASSAGE).sum(-1, dtype=torch.float32)


class Tally:
    """What queries give to the passages of one document while it is read piece by piece.

    noted: of the queries that read, the places [r] of those that count, in ascending order; None for all. sums_all:
    whether the sums add up to those of all weights; not where a gradient needs these.
    """

    def __init__(self, noted: Tensor | None = None) -> None:
        self.noted = noted
        self.sums_all = noted is None and not torch.is_grad_enabled()
        self._runs: list[tuple[Tensor, list[Tensor]]] = []  # [r, passages] of pieces that are relative to one [r, 1]
        self._starts = [0]  # the first token of each piece, and of the next one
        self._chunks: Sequence[Tally] = [self]

    def split(self, size: int, total: int) -> Sequence[Tally]:
        """Those of the ``total`` queries cut into chunks of ``size``; their sums become a part of this one's."""
        if total > size:
            chunks = [None if self.noted is None else self.noted.sub(i) for i in range(0, total, size)]
            self._chunks = [Tally(None if c is None else c[(c >= 0) & (c < size)]) for c in chunks]
        return self._chunks

    def add(self, weights: Tensor, m: Tensor) -> None:
        """Sum the weights exp(s_i - m) [q, n] of the next n tokens; m: [q, 1]."""
        if weights.requires_grad:
            weights = weights.detach()
        if self.noted is not None:
            weights = weights[self.noted]
        if not self._runs or self._runs[-1][0] is not m:
            self._runs.append((m, []))
        self._runs[-1][1].append(by_passage(weights, self._starts[-1] % PASSAGE))
        self._starts.append(self._starts[-1] + weights.shape[1])

    @cached_property
    def sums(self) -> Tensor:
        """[r, P]: the weight of every passage, relative to the last ``m`` that was given."""
        return torch.cat([chunk._own_sums() for chunk in self._chunks])

    @torch.no_grad()
    def _own_sums(self) -> Tensor:
        runs = [
            (m if self.noted is None else m[self.noted], torch.cat(sums, dim=1) if len(sums) > 1 else sums[0])
            for m, sums in self._runs
        ]
        last = runs[-1][0]
        pieces = torch.cat([sums if m is last else sums * torch.exp(m - last) for m, sums in runs], dim=1)
        total = num_passages(self._starts[-1])
        if pieces.shape[1] == total:  # no passage lies in two pieces
            return pieces
        ends = zip(self._starts, self._starts[1:], strict=False)
        places = torch.cat([torch.arange(start // PASSAGE, num_passages(end)) for start, end in ends])
        places = places.to(pieces.device).expand_as(pieces)
        return pieces.new_zeros(len(pieces), total).scatter_add_(1, places, pieces)


class Run(NamedTuple):
    """``size`` successive passages of the document at place ``document`` of a list."""

    document: int
    first: int
    size: int


class Layout:
    """Which passages some masses [..., P] belong to: runs of passages of documents, one after another."""

    def __init__(self, memories: Sequence[Memory], runs: Sequence[Run]) -> None:
        self.memories, self.runs = memories, runs
        self._stops = list(accumulate(run.size for run in runs))

    @property
    def size(self) -> int:
        """P, the number of passages."""
        return self._stops[-1]

    def locate(self, place: int) -> tuple[Memory, int]:
        """The document of the passage at ``place``, and the passage's number in it."""
        which = bisect_right(self._stops, place)
        run = self.runs[which]
        return self.memories[run.document], run.first + place - (self._stops[which] - run.size)

    def place(self, document: int, passage: int) -> int:
        """Where a passage of the document at this place of the list stands, the other way around of :meth:`locate`."""
        for run, stop in zip(self.runs, self._stops, strict=True):
            if run.document == document and run.first <= passage < run.first + run.size:
                return stop - run.size + passage - run.first
        raise KeyError(f"Passage {passage} of document {document} is in none of these runs.")

    def by_document(self, masses: Tensor) -> Tensor:
        """[…, P] -> […, D]: the sums of each document."""
        totals = [masses.new_zeros(masses.shape[:-1]) for _ in self.memories]
        for run, part in zip(self.runs, masses.split([run.size for run in self.runs], dim=-1), strict=True):
            totals[run.document] = totals[run.document] + part.sum(-1)
        return torch.stack(totals, dim=-1)
