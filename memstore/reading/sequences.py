"""What the rows of sequences read: chosen at a prompt, kept with its cache, renewed in a later turn."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from memstore.errors import AttachError
from memstore.memory import Memory
from memstore.reading.choosing import Chooser
from memstore.reading.context import Context
from memstore.reading.excerpt import closing_ids, sink_ids
from memstore.reading.masks import leading, trailing
from memstore.reading.moving import Sequence, mark_of, put_mark
from memstore.reading.reads import in_order
from memstore.reading.turns import Prompt, Turn

if TYPE_CHECKING:
    from memstore.reading.kv import KvAttachment


class Sequences:
    """The sequences that an attachment has seen, each known by the mark on its cache."""

    def __init__(self, attachment: KvAttachment) -> None:
        self.attachment = attachment
        self._contexts: WeakKeyDictionary[Sequence, Context] = WeakKeyDictionary()

    def keep(self, cache: Any, context: Context) -> None:
        """Let the cache, and copies of it, go on with this context."""
        mark = mark_of(cache)
        if mark is None or self._contexts.get(mark.sequence) is not context:
            self._contexts[put_mark(cache, len(context.repeated))] = context

    def context(self, prompt: Prompt | None, cache: Any, past: int, batch: int, turn: Turn | None) -> Context:
        """What is read from this pass on. prompt: None for a pass that goes on with what was chosen.

        Raises AttachError for a cache that was not filled by this attachment, or whose rows do not fit.
        """
        if past == 0 and prompt is not None:
            return self.begin(prompt)
        mark = mark_of(cache)
        known = None if mark is None else self._contexts.get(mark.sequence)
        if mark is None or known is None:
            if prompt is None and turn is not None and turn.context is not None:
                return turn.context
            raise AttachError(
                "This cache was filled outside the attachment, or its rows were moved by other means than its methods; "
                "start from the prompt while attached."
            )
        known = self._picked(known, mark.rows, batch)
        return known if prompt is None else self._renewed(known, prompt, cache)

    def _picked(self, known: Context, rows: tuple[int, ...], batch: int) -> Context:
        """What the rows of a cache read, where they may have been moved. Raises AttachError for another number of rows
        than the batch has, and for a row that was moved to where other memories are read."""
        if len(rows) != batch:
            raise AttachError(
                f"A batch of {batch} rows goes on with a cache of {len(rows)}. Give the rows that it holds."
            )
        self.attachment.check_batch(batch)
        now, before = (count // len(self.attachment.rows) for count in (batch, len(known.repeated)))
        if any(row // before != place // now for place, row in enumerate(rows)):
            raise AttachError(
                "Rows of this cache were moved to where the attachment has other memories. Attach once more with the "
                "memories in the order of the rows, or move rows among those of the same memories only."
            )
        return known.picked(rows)

    def begin(self, prompt: Prompt) -> Context:
        """Choose what each row of a new prompt reads."""
        groups = self._groups(len(prompt.own))
        repeated = torch.zeros_like(prompt.padding)
        if (ids := prompt.ids) is not None:
            for memories, rows in groups:
                repeated[rows] = leading(ids[rows], prompt.padding[rows], sink_ids(memories))
        reads = [replace(whole, rows=groups[i][1]) for i, whole in self.attachment.whole.items()]
        wanting = [group for i, group in enumerate(groups) if i not in self.attachment.whole]
        if not wanting:
            return Context(in_order(reads), repeated)
        chooser = Chooser(self.attachment, prompt, repeated, self._closing(prompt))
        if self.attachment.selector.needs_queries:
            before = [chooser.before(*group) for group in wanting]
            self.attachment.pass_over(chooser, Context(in_order(reads + before), repeated))
        reads += [each for group in wanting for each in chooser.choose(*group)]
        return Context(in_order(reads), repeated)

    def _renewed(self, context: Context, prompt: Prompt, cache: Any) -> Context:
        """The context of a talk for a new turn: rows for which other blocks are worth more now choose anew. The room
        stays the same, so that no token moves that was read before."""
        chooser = Chooser(self.attachment, prompt, torch.zeros_like(prompt.padding), self._closing(prompt))
        wanting = []
        for i, (memories, rows) in enumerate(self._groups(len(prompt.own))):
            own = [each for each in context.reads if rows.start <= each.rows.start < rows.stop]
            whole = i in self.attachment.whole or any(map(self.attachment.is_whole, own))
            if not whole and own[0].room == chooser.room(memories):
                wanting.append((memories, rows, own))
        if not wanting:
            return context
        if self.attachment.selector.needs_queries:
            before = [chooser.before(memories, rows) for memories, rows, _ in wanting]
            chosen = {id(each) for _, _, own in wanting for each in own}
            kept = [each for each in context.reads if id(each) not in chosen]
            self.attachment.pass_over(chooser, replace(context, reads=in_order(kept + before)), cache)
        reads = list(context.reads)
        for memories, rows, own in wanting:
            reads = [each for each in reads if each not in own] + chooser.choose(memories, rows, own)
        return replace(context, reads=in_order(reads))

    def _closing(self, prompt: Prompt) -> Tensor:
        """[B, T]: the tokens that the chat template puts behind the words of a prompt."""
        closing = torch.zeros_like(prompt.padding)
        if (ids := prompt.ids) is not None:
            for memories, rows in self._groups(len(prompt.own)):
                closing[rows] = trailing(ids[rows], prompt.padding[rows], closing_ids(memories))
        return closing

    def _groups(self, batch: int) -> list[tuple[list[Memory], slice]]:
        """Each row's memories and its rows in a batch: beams and return sequences of one row stand together."""
        self.attachment.check_batch(batch)
        each = batch // len(self.attachment.rows)
        return [(list(row), slice(i * each, (i + 1) * each)) for i, row in enumerate(self.attachment.rows)]
