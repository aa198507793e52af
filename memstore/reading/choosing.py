"""Choosing what a prompt reads of memories that are too long to be read whole.

One pass over the prompt's end behind the sink, with no memory, tells what every layer asks; a selector scores the
blocks, and the best grow into spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from memstore.errors import AttachError
from memstore.evaluating import without_autocast
from memstore.memory import Memory
from memstore.reading.excerpt import Excerpt, load_excerpt, sink_of
from memstore.reading.masks import equal_rows
from memstore.reading.reads import Reads, Scored
from memstore.reading.rotary import turned
from memstore.reading.selection import BLOCK, choose_spans, num_blocks, span_width
from memstore.reading.selectors import BlockSelector, Question
from memstore.reading.turns import Prompt

if TYPE_CHECKING:
    from memstore.reading.kv import KvAttachment

ASKING = 256  # of a longer prompt, the last tokens that ask: a question stands at the end, and is read behind as many
ENOUGH = 0.9  # of the best score of any block for a new question: so much of it, and what is read stays


class Chooser:
    """Chooses for one prompt. repeated, closing: [B, T], which of its tokens the sink stands for, and which the chat
    template puts behind the words."""

    def __init__(self, attachment: KvAttachment, prompt: Prompt, repeated: Tensor, closing: Tensor) -> None:
        self.attachment, self.adapter, self.prompt = attachment, attachment.adapter, prompt
        asks = ~(prompt.padding | repeated | closing)
        if prompt.asking is not None:
            asks &= (~prompt.padding).flip(1).cumsum(1).flip(1) <= prompt.asking
        asks &= asks.flip(1).cumsum(1).flip(1) <= ASKING
        self._columns = asks.any(0).nonzero().flatten()
        self._asks = asks[:, self._columns]
        first = int(self._columns[0]) if len(self._columns) else prompt.own.shape[1]
        self.start = 0 if prompt.past else max(0, first - ASKING)  # the first token of the pass
        self._queries: dict[int, Tensor] = {}

    def before(self, memories: Sequence[Memory], rows: slice) -> Reads:
        """What these rows read in the pass over the prompt: the sink alone, so far before the prompt as it is going to
        stand."""
        return self._reads(memories, rows, None)

    def hear(self, layer: int, query: Tensor, positions: Tensor, scaling: float) -> None:
        """Note what a layer asks in that pass: query [B, H, T, c], rotated to positions [B, T]."""
        columns = self._columns - self.start
        asking, stand = query[:, :, columns], positions[:, columns]
        self._queries[layer] = turned(self.adapter, layer, asking, stand) * scaling

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
            sorted(self.attachment.layers),
            self._asks[firsts],
            None if prompt.ids is None else prompt.ids[firsts][:, self._columns],
            {layer: query[firsts] for layer, query in self._queries.items()},
        )
        scores = checked_scores(self.attachment.selector, question)
        reads = []
        for place, run in enumerate(runs):
            of_run: Scored = {None: scores[place]} if scores.dim() == 2 else self._by_layer(scores[:, place])
            own = next((each for each in before if each.rows.start <= run.start < each.rows.stop), None)
            if own is not None and list(own.excerpts[0].memories) == list(memories) and worth(own, of_run) >= ENOUGH:
                reads.append(replace(own, rows=run, scores=of_run))
            else:
                reads.append(self._reads(memories, run, of_run))
        return reads

    def _by_layer(self, scores: Tensor) -> Scored:
        return dict(zip(sorted(self.attachment.layers), scores, strict=True))

    def room(self, memories: Sequence[Memory]) -> int:
        """The position of the first own token of rows that choose from these memories."""
        return sink_of(memories)[1] + self.attachment.blocks * BLOCK

    def _reads(self, memories: Sequence[Memory], rows: slice, scored: Scored | None) -> Reads:
        """The sink and the spans that are best by their scores, or the sink alone."""
        room, depth, blocks = self.room(memories), len(self.adapter.self_attentions), self.attachment.blocks
        lengths = [memory.num_tokens for memory in memories]

        def load(scores: Tensor | None, layers: Sequence[int]) -> Excerpt:
            spans = [] if scores is None else choose_spans(scores, lengths, blocks, span_width(scores, blocks))
            device = self.prompt.own.device
            return load_excerpt(self.adapter, memories, self.attachment.open_memory, spans, room, device, layers)

        if scored is None or None in scored:
            scores = None if scored is None else scored[None]
            return Reads(rows, [load(scores, range(depth))] * depth, room, scored)
        nothing = load(None, [])  # stands for layers that do not read
        return Reads(rows, [load(scored[i], [i]) if i in scored else nothing for i in range(depth)], room, scored)


def checked_scores(selector: BlockSelector, question: Question) -> Tensor:
    """What the selector answers. Raises AttachError for other shapes than it should have, and for what are no numbers
    of at least 0."""
    with without_autocast(question.asks.device.type):  # half precision would call different blocks equally good
        scores: Any = selector.score(question)
    due = (len(question.asks), question.num_blocks)
    shapes = due, (len(question.layers), *due)
    name = type(selector).__name__
    if not isinstance(scores, Tensor) or tuple(scores.shape) not in shapes:
        given = f"a tensor {list(scores.shape)}" if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
        raise AttachError(f"{name}.score returned {given}; due are scores {list(due)}, or {list(shapes[1])} by layer.")
    if scores.layout != torch.strided or scores.is_meta or scores.is_complex() or scores.dtype == torch.bool:
        raise AttachError(
            f"{name}.score returned {scores.dtype} on {scores.device} as {scores.layout}; due is a dense tensor of "
            "real numbers."
        )
    if scores.isnan().any():
        raise AttachError(f"{name}.score returned NaN, which no block can be ranked by.")
    if not 0 <= float(scores.min()) <= float(scores.max()) < torch.inf:
        raise AttachError(
            f"{name}.score returned numbers from {float(scores.min())} to {float(scores.max())}; due are finite ones, "
            "at least 0, with 0 for a block that nothing speaks for."
        )
    return scores.detach()


def worth(reads: Reads, scored: Scored) -> float:
    """The best score among the blocks that are read, relative to that of any block: 0 to 1, the mean of the layers."""
    shares = []
    for layer, scores in scored.items():
        excerpt = reads.excerpts[layer or 0]
        starts = list(accumulate((num_blocks(memory.num_tokens) for memory in excerpt.memories), initial=0))
        read = [
            starts[span.memory] + block
            for span in excerpt.spans
            for block in range(span.start // BLOCK, num_blocks(span.stop))
        ]
        best = float(scores.max())
        shares.append(float(scores[read].max()) / best if best > 0 else 1.0)
    return sum(shares) / len(shares)
