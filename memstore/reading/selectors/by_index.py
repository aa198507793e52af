"""A configured index for every layer and key-value head ranks the blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from memstore.indexes import check_backend, open_index
from memstore.interfaces import VectorIndex
from memstore.memory import OpenMemory
from memstore.reading.selection import BLOCK
from memstore.reading.selectors.interface import BlockSelector, Question
from memstore.reading.selectors.scouting import QUERIES, for_each_row, shares, sink_scores
from memstore.slots import slot_name


class ByIndex(BlockSelector):
    """As scouting, by whatever keys an index finds. backend: None for the configured one."""

    def __init__(self, backend: str | None = None) -> None:
        check_backend(backend)  # also where nothing needs searching: what is wrong is told now
        self.backend = backend
        self._indexes: WeakKeyDictionary[OpenMemory, dict[str, VectorIndex]] = WeakKeyDictionary()

    def prepare(self, opened: Sequence[OpenMemory]) -> None:
        for each in opened:
            if each not in self._indexes:
                self._indexes[each] = open_index(each, self.backend).indexes

    def score(self, question: Question) -> Tensor:
        return for_each_row(question, self._scored).mean(0)

    def _scored(self, question: Question, queries: dict[int, Tensor]) -> Tensor:
        return torch.stack(
            [shares(self._best(question, i, query), sink_scores(question, i, query)) for i, query in queries.items()]
        )

    def _best(self, question: Question, layer: int, query: Tensor) -> Iterator[Tensor]:
        """[H, t, blocks]: the best score that the indexes found in each block for queries [H, t, c]."""
        groups = question.adapter.num_kv_heads
        for chunk in query.split(QUERIES, dim=1):
            folded = chunk.unflatten(0, (groups, -1)).flatten(1, 2)
            found = [
                torch.cat(
                    [
                        self._indexes[opened][slot_name(layer, g)].block_maxima(folded[g], BLOCK)
                        for opened in question.opened
                    ],
                    dim=1,
                )
                for g in range(groups)
            ]
            yield torch.stack(found).view(len(chunk), chunk.shape[1], -1)
