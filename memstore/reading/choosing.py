"""Choosing what a prompt reads of memories that are too long to be read whole.

One pass over the prompt behind the sink, with no memory, tells what every layer asks; a selector scores the blocks, and
the best grow into spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memstore.memory import Memory
from memstore.reading.excerpt import load_excerpt, sink_of
from memstore.reading.masks import equal_rows
from memstore.reading.reads import Reads
from memstore.reading.rotary import turned
from memstore.reading.selection import BLOCK, Span, choose_spans, num_blocks, span_width
from memstore.reading.selectors import Question
from memstore.reading.turns import Prompt

if TYPE_CHECKING:
    from memstore.reading.kv import KvAttachment

ASKING = 512  # of a longer prompt, the last tokens that ask: a question stands at the end
ENOUGH = 0.9  # of the best score of any block for a new question: so much of it, and what is read stays


class Chooser:
    """Chooses for one prompt. repeated: [B, T], which of its tokens the sink stands for."""

    def __init__(self, attachment: KvAttachment, prompt: Prompt, repeated: Tensor) -> None:
        self.attachment, self.adapter, self.prompt = attachment, attachment.adapter, prompt
        asks = ~(prompt.padding | repeated)
        asks &= asks.flip(1).cumsum(1).flip(1) <= (ASKING if prompt.asking is None else min(prompt.asking, ASKING))
        self._columns = asks.any(0).nonzero().flatten()
        self._asks = asks[:, self._columns]
        self._queries: dict[int, Tensor] = {}

    def before(self, memories: Sequence[Memory], rows: slice) -> Reads:
        """What these rows read in the pass over the prompt: the sink alone, so far before the prompt as it is going to
        stand."""
        return self._reads(memories, rows, [[]])

    def hear(self, layer: int, query: Tensor, positions: Tensor, scaling: float) -> None:
        """Note what a layer asks in that pass: query [B, H, T, c], rotated to positions [B, T]."""
        asking = query[:, :, self._columns]
        self._queries[layer] = turned(self.adapter, layer, asking, positions[:, self._columns]) * scaling

    def choose(self, memories: Sequence[Memory], rows: slice, before: Sequence[Reads] = ()) -> list[Reads]:
        """What these rows read, which have the same memories: rows of equal prompts together, unless they may differ
        in what was said before. before: what they have read up to now, which stays where it still answers."""
        prompt = self.prompt
        apart = [slice(row, row + 1) for row in range(rows.start, rows.stop)]
        runs = apart if prompt.past else equal_rows(prompt.tokens, prompt.padding, rows)
        firsts = [run.start for run in runs]
        question = Question(
            self.adapter,
            memories,
            [self.attachment.open_memory(memory) for memory in memories],
            self._asks[firsts],
            None if prompt.ids is None else prompt.ids[firsts][:, self._columns],
            {layer: query[firsts] for layer, query in self._queries.items()},
        )
        scores = self.attachment.selector.score(question)
        by_run = scores.unbind(-2) if scores.dim() == 3 else scores[:, None].unbind(0)
        reads = []
        for run, layers in zip(runs, by_run, strict=True):
            own = next((each for each in before if each.rows.start <= run.start < each.rows.stop), None)
            if own is not None and list(own.excerpts[0].memories) == list(memories) and worth(own, layers) >= ENOUGH:
                reads.append(replace(own, rows=run, scores=layers))
            else:
                reads.append(self._reads(memories, run, [self._spans(memories, layer) for layer in layers], layers))
        return reads

    def _spans(self, memories: Sequence[Memory], scores: Tensor) -> list[Span]:
        blocks = self.attachment.blocks
        lengths = [memory.num_tokens for memory in memories]
        return choose_spans(scores, lengths, blocks, span_width(scores, blocks))

    def room(self, memories: Sequence[Memory]) -> int:
        """The position of the first own token of rows that choose from these memories."""
        return sink_of(memories)[1] + self.attachment.blocks * BLOCK

    def _reads(
        self, memories: Sequence[Memory], rows: slice, spans: Sequence[Sequence[Span]], scores: Tensor | None = None
    ) -> Reads:
        """spans: those of every layer, or one list for all of them, by scores [len(spans), blocks]."""
        room = self.room(memories)
        depth = len(self.adapter.self_attentions)

        def load(of: Sequence[Span], layers: Sequence[int]) -> Any:
            return load_excerpt(
                self.adapter, memories, self.attachment.open_memory, of, room, self.prompt.own.device, layers
            )

        if len(spans) == 1:
            return Reads(rows, [load(spans[0], range(depth))] * depth, room, scores)
        return Reads(rows, [load(of, [layer]) for layer, of in enumerate(spans)], room, scores)


def worth(reads: Reads, scores: Tensor) -> float:
    """The best score among the blocks that are read, relative to that of any block: 0 to 1, the mean of the layers.

    scores: [layers, blocks], or [1, blocks] if all layers read the same.
    """
    shares = []
    for layer, each in enumerate(scores):
        excerpt = reads.excerpts[layer]
        starts = torch.tensor([0, *(num_blocks(memory.num_tokens) for memory in excerpt.memories)]).cumsum(0).tolist()
        read = [
            starts[span.memory] + block
            for span in excerpt.spans
            for block in range(span.start // BLOCK, num_blocks(span.stop))
        ]
        best = float(each.max())
        shares.append(float(each[read].max()) / best if best > 0 else 1.0)
    return sum(shares) / len(shares)
