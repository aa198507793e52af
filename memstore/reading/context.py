"""What the rows of one sequence read, from its prompt on, and how a cache tells of which sequence it is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any, Self

import torch
from torch import Tensor

from memstore.reading.reads import Reads

MARK = "_memstore_sequence"
ROWS = "_memstore_rows"
MOVING = ("reorder_cache", "batch_select_indices", "batch_repeat_interleave")  # a cache's ways to move its rows


class Mark:
    """Names a sequence. It stands on its cache, and on every copy of that, beside the rows that the cache holds."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def mark_of(cache: Any) -> Mark:
    """The mark of a cache, or one that names nothing."""
    mark: Mark = getattr(cache, MARK, None) or Mark()
    return mark


def new_mark(cache: Any, batch: int) -> Mark:
    """The mark that stands on a cache of ``batch`` rows from now on. The cache notes when its rows are moved."""
    mark = Mark()
    setattr(cache, MARK, mark)
    setattr(cache, ROWS, torch.arange(batch))
    for name in MOVING:
        setattr(cache, name, partial(_move, cache, name))
    return mark


def _move(cache: Any, name: str, *args: Any, **kwargs: Any) -> None:
    """Move the rows of a marked cache, and note it: given are their indices, or how often each is repeated."""
    getattr(type(cache), name)(cache, *args, **kwargs)
    rows, (change,) = rows_of(cache), (*args, *kwargs.values())
    moved = rows.repeat_interleave(change) if name == MOVING[-1] else rows[torch.as_tensor(change).cpu()]
    setattr(cache, ROWS, moved)


def rows_of(cache: Any) -> Tensor:
    """[rows now]: which row of its sequence each row of a marked cache is."""
    rows: Tensor = getattr(cache, ROWS)
    return rows


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

    def picked(self, rows: Tensor) -> Context:
        """The context of these rows [n], in their order."""
        if torch.equal(rows, torch.arange(len(self.repeated))):
            return self
        owner = {row: reads for reads in self.reads for row in range(reads.rows.start, reads.rows.stop)}
        reads, start = [], 0
        for own, run in groupby(rows.tolist(), owner.__getitem__):
            stop = start + len(list(run))
            reads.append(replace(own, rows=slice(start, stop)))
            start = stop
        rows = rows.to(self.repeated.device)
        return Context(reads, self.repeated[rows], None if self.places is None else self.places[rows])
