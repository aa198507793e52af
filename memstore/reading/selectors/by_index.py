"""A configured index for every layer and key-value head ranks the blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from memstore.indexes import check_backend, open_index
from memstore.interfaces import VectorIndex
from memstore.open_memory import OpenMemory
from memstore.reading.selection import BLOCK
from memstore.reading.selectors.interface import BlockSelector, Question
from memstore.reading.selectors.scouting import for_each_row, shares, sink_scores
from memstore.slots import slot_name

QUERIES = 64  # prompt tokens scored at once


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

    def _scored(self, question: Question, row: int, queries: dict[int, Tensor]) -> Tensor:
        return torch.stack(
            [shares(self._best(question, i, query), sink_scores(question, i, query)) for i, query in queries.items()]
        )

    def _best(self, question: Question, layer: int, query: Tensor) -> Iterator[Tensor]:
        """The best score that the indexes found in each block for queries [H, t, c], some tokens at a time: [H, t,
        blocks + 1], with room for the sink."""
        groups = question.adapter.num_kv_heads
        for chunk in query.split(QUERIES, dim=1):
            folded = chunk.unflatten(0, (groups, -1)).flatten(1, 2)
            found = torch.stack(
                [torch.cat([*self._maxima(question, slot_name(layer, g), folded[g])], 1) for g in range(groups)]
            )
            yield torch.nn.functional.pad(found.view(len(chunk), chunk.shape[1], -1), (0, 1))

    def _maxima(self, question: Question, slot: str, queries: Tensor) -> Iterator[Tensor]:
        for opened in question.opened:
            yield self._indexes[opened][slot].block_maxima(queries, BLOCK)
