"""What the rows of one sequence read, from its prompt on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from memstore.reading.reads import Reads


@dataclass(frozen=True)
class Context:
    """One sequence of forward passes: what its rows read, in order.

    repeated: [B, T] marks the first prompt's tokens that the sink stands for already; they are hidden. places:
    [B, n], the positions of the own tokens so far, if somebody wants to know.
    """

    reads: list[Reads]
    repeated: Tensor
    places: Tensor | None = None

    @cached_property
    def shift(self) -> Tensor:
        """[B, 1]: how far each row's own tokens stand behind their usual positions."""
        return self.rooms - self.repeated.sum(1, keepdim=True)

    @cached_property
    def rooms(self) -> Tensor:
        """[B, 1]: the position of each row's first own token."""
        rooms = [reads.room for reads in self.reads for _ in range(reads.rows.start, reads.rows.stop)]
        return torch.tensor(rooms, device=self.repeated.device)[:, None]

    def with_places(self, past: int, positions: Tensor) -> Context:
        """The context after own tokens at positions [B, T] have come behind the first ``past`` ones."""
        before = positions[:, :0] if self.places is None else self.places[:, :past]
        return replace(self, places=torch.cat((before, positions), dim=1))

    def picked(self, rows: Sequence[int]) -> Context:
        """The context of these rows, in their order."""
        if list(rows) == list(range(len(self.repeated))):
            return self
        owner = {row: reads for reads in self.reads for row in range(reads.rows.start, reads.rows.stop)}
        reads, start = [], 0
        for own, run in groupby(rows, owner.__getitem__):
            stop = start + len(list(run))
            reads.append(replace(own, rows=slice(start, stop)))
            start = stop
        some = list(rows)
        return Context(reads, self.repeated[some], None if self.places is None else self.places[some])
