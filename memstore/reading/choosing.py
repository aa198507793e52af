"""Choosing what a prompt reads of memories that are too long to be read whole.

One pass over the prompt's end behind the sink, with no memory, tells what every layer asks; a selector scores the
blocks, and the best grow into spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from memstore.errors import AttachError
from memstore.memory import Memory
from memstore.reading.excerpt import load_excerpt, sink_of
from memstore.reading.masks import equal_prompts
from memstore.reading.reads import Reads
from memstore.reading.rotary import turned
from memstore.reading.selection import BLOCK, Span, choose_spans, span_width
from memstore.reading.selectors import BlockSelector, Question

if TYPE_CHECKING:
    from memstore.reading.kv import KvAttachment

ASKING = 256  # of a longer prompt, the last tokens that ask: a question stands at the end, and is read behind as many


class Chooser:
    """Chooses for one prompt. own: [B, T], its tokens' usual positions; padding, repeated, closing: [B, T], which of
    them are padding, which the sink stands for, and which the chat template puts behind the words."""

    def __init__(
        self,
        attachment: KvAttachment,
        kwargs: dict[str, Any],
        own: Tensor,
        padding: Tensor,
        repeated: Tensor,
        closing: Tensor,
    ) -> None:
        self.attachment, self.adapter, self.own, self.repeated = attachment, attachment.adapter, own, repeated
        self._kwargs, self._padding = kwargs, padding
        asks = ~(padding | repeated | closing)
        asks &= asks.flip(1).cumsum(1).flip(1) <= ASKING
        self._columns = asks.any(0).nonzero().flatten()
        self._asks = asks[:, self._columns]
        first = int(self._columns[0]) if len(self._columns) else own.shape[1]
        self.start = max(0, first - ASKING)  # the first token of the pass
        self._queries: dict[int, Tensor] = {}

    @property
    def inputs(self) -> dict[str, Any]:
        """Of the model's pass over the prompt."""
        given = {key: self._kwargs.get(key) for key in ("input_ids", "inputs_embeds")}
        inputs: dict[str, Any] = {key: tensor[:, self.start :] for key, tensor in given.items() if tensor is not None}
        return inputs | {"attention_mask": (~self._padding[:, self.start :]).long()}

    def before(self, memories: Sequence[Memory], rows: slice) -> Reads:
        """What these rows read in that pass: the sink alone, so far before the prompt as it is going to stand."""
        return self._reads(memories, rows, [[]])

    def hear(self, layer: int, query: Tensor, positions: Tensor, scaling: float) -> None:
        """Note what a layer asks in that pass: query [B, H, T, c], rotated to positions [B, T]."""
        columns = self._columns - self.start
        self._queries[layer] = turned(self.adapter, query[:, :, columns], positions[:, columns]) * scaling

    def choose(self, memories: Sequence[Memory], rows: slice) -> list[Reads]:
        """What these rows read, which have the same memories: rows of equal prompts together."""
        runs = equal_prompts(self._kwargs, self._padding, rows)
        firsts = [run.start for run in runs]
        ids = self._kwargs.get("input_ids")
        question = Question(
            self.adapter,
            memories,
            [self.attachment.open_memory(memory) for memory in memories],
            sorted(self.attachment.layers),
            self._asks[firsts],
            None if ids is None else ids[firsts][:, self._columns],
            {layer: query[firsts] for layer, query in self._queries.items()},
        )
        scores = checked_scores(self.attachment.selector, question)
        by_run = scores.unbind(-2) if scores.dim() == 3 else scores[:, None].unbind(0)
        return [
            self._reads(memories, run, [self._spans(memories, layer) for layer in layers])
            for run, layers in zip(runs, by_run, strict=True)
        ]

    def _spans(self, memories: Sequence[Memory], scores: Tensor) -> list[Span]:
        blocks = self.attachment.blocks
        lengths = [memory.num_tokens for memory in memories]
        return choose_spans(scores, lengths, blocks, span_width(scores, blocks))

    def _reads(self, memories: Sequence[Memory], rows: slice, spans: Sequence[Sequence[Span]]) -> Reads:
        """spans: those of every layer that reads, or one list for all layers."""
        room = sink_of(memories)[1] + self.attachment.blocks * BLOCK
        depth = len(self.adapter.self_attentions)

        def load(of: Sequence[Span], layers: Sequence[int]) -> Any:
            return load_excerpt(self.adapter, memories, self.attachment.open_memory, of, room, self.own.device, layers)

        if len(spans) == 1:
            return Reads(rows, [load(spans[0], range(depth))] * depth, room)
        own = dict(zip(sorted(self.attachment.layers), spans, strict=True))
        nothing = load([], [])  # stands for layers that do not read
        return Reads(rows, [load(own[i], [i]) if i in own else nothing for i in range(depth)], room)


def checked_scores(selector: BlockSelector, question: Question) -> Tensor:
    """What the selector answers. Raises AttachError for other shapes than it should have, and for NaN."""
    scores: Any = selector.score(question)
    due = (len(question.asks), question.num_blocks)
    shapes = due, (len(question.layers), *due)
    name = type(selector).__name__
    if not isinstance(scores, Tensor) or tuple(scores.shape) not in shapes:
        given = f"a tensor {list(scores.shape)}" if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
        raise AttachError(f"{name}.score returned {given}; due are scores {list(due)}, or {list(shapes[1])} by layer.")
    if scores.isnan().any():
        raise AttachError(f"{name}.score returned NaN, which no block can be ranked by.")
    return scores
