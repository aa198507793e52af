"""What some rows of a batch read of their memories: an excerpt for every layer, most often the same one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from memstore.provenance.passages import PASSAGE, Layout, Run
from memstore.reading.excerpt import Excerpt
from memstore.reading.selection import BLOCK, Chosen, num_blocks

# Scores [blocks] of the blocks of all memories one after another, by the layer that reads them, or None for all layers.
Scored = Mapping[int | None, Tensor]


@dataclass(frozen=True, eq=False)
class Reads:
    """The excerpts of these rows, layer by layer. room: the position of the first own token behind them.

    scores: those that the spans were chosen by; None where nothing was chosen.
    """

    rows: slice
    excerpts: Sequence[Excerpt]
    room: int
    scores: Scored | None = None

    def chosen(self) -> list[Chosen]:
        """The blocks that are read, by layer and in reading order; none where everything is."""
        if self.scores is None:
            return []
        memories = self.excerpts[0].memories
        firsts = list(accumulate((num_blocks(memory.num_tokens) for memory in memories), initial=0))
        found = []
        for layer, scores in self.scores.items():
            for span in self.excerpts[layer or 0].spans:
                name = memories[span.memory].name
                for start in range(span.start, span.stop, BLOCK):
                    score = float(scores[firsts[span.memory] + start // BLOCK])
                    found.append(Chosen(name, start, min(start + BLOCK, span.stop), score, layer))
        return found

    @cached_property
    def layout(self) -> Layout:
        """The passages of all layers' spans together."""
        first = self.excerpts[0]
        if all(excerpt is first for excerpt in self.excerpts):
            return first.layout
        passages = {
            (span.memory, passage)
            for excerpt in self.excerpts
            for span in excerpt.spans
            for passage in range(span.start // PASSAGE, -(-span.stop // PASSAGE))
        }
        return Layout(first.memories, [Run(document, passage, 1) for document, passage in sorted(passages)])

    def widened(self, layer: int, sums: Tensor) -> Tensor:
        """[…, passages of one layer's excerpt] -> […, passages of all]."""
        own = self.excerpts[layer].layout
        if own is self.layout:
            return sums
        places = [self.layout.place(run.document, run.first + i) for run in own.runs for i in range(run.size)]
        wide = sums.new_zeros(*sums.shape[:-1], self.layout.size)
        return wide.index_copy_(-1, torch.tensor(places, device=sums.device), sums)


def in_order(reads: Sequence[Reads]) -> list[Reads]:
    """By their rows."""
    return sorted(reads, key=lambda each: each.rows.start)
