"""What the rows of one sequence read, from its prompt on, and how a cache tells of which sequence it is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from memstore.errors import AttachError
from memstore.reading.reads import Reads

MARK = "_memstore_sequence"


class Mark:
    """Names a sequence. It stands on its cache, and on every copy of that."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def mark_of(cache: Any) -> Mark:
    """The mark of a cache, or one that names nothing."""
    mark: Mark = getattr(cache, MARK, None) or Mark()
    return mark


def new_mark(cache: Any) -> Mark:
    """The mark that stands on the cache from now on."""
    mark = Mark()
    setattr(cache, MARK, mark)
    return mark


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

    def for_batch(self, batch: int) -> Context:
        """The context of a cache whose rows were repeated. Raises AttachError for another number of rows."""
        times, rest = divmod(batch, len(self.repeated))
        if rest or not times:
            raise AttachError(
                f"A batch of {batch} rows goes on with a cache of {len(self.repeated)}. Give the rows that it holds."
            )
        if times == 1:
            return self
        rows = [slice(reads.rows.start * times, reads.rows.stop * times) for reads in self.reads]
        return Context(
            [replace(reads, rows=each) for reads, each in zip(self.reads, rows, strict=True)],
            self.repeated.repeat_interleave(times, 0),
            None if self.places is None else self.places.repeat_interleave(times, 0),
        )
