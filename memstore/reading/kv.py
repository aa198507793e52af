"""Reading keys and values: a decoder-only model sees [sink | spans of the memories | its own tokens] as one softmax.

A document that was encoded as one window is read whole, exactly as if it stood before the prompt. Of longer ones a
selector chooses spans for the prompt, which are then read at every layer and step of that sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from memstore.attachment import Attachment, Chat, TopK
from memstore.attention import Partial
from memstore.errors import AttachError, WindowExceededError
from memstore.hooks import AttentionFunction
from memstore.memory import Memory
from memstore.provenance import Seen
from memstore.reading.chat import BETWEEN, chat_frame, chat_text
from memstore.reading.choosing import Chooser
from memstore.reading.context import Context
from memstore.reading.excerpt import load_excerpt, sink_of
from memstore.reading.joint import Own, alone, together
from memstore.reading.masks import checked, own_mask, own_positions, without
from memstore.reading.moving import follow_moves, mark_of
from memstore.reading.passes import cache_name, checked_layers, device_of, find_cache, finish
from memstore.reading.reads import Reads
from memstore.reading.rotary import moved
from memstore.reading.selection import BLOCK, Chosen, Span, num_blocks
from memstore.reading.selectors import BlockSelector, chosen_selector
from memstore.reading.sequences import Sequences
from memstore.reading.turns import ASKING, Turns, noting, prompt_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from memstore.families import DecoderOnlyAdapter

BUDGET = 1024  # tokens chosen for a prompt by default: more bring distractors, fewer too little of what stands around


class KvAttachment(Attachment):
    """Keys and values attached to every self-attention layer.

    top_k: "all" reads every memory whole; None reads a single memory of one window whole and chooses from all others.
    budget: tokens chosen for each prompt, by default 1,024, or a quarter of a small native window. layers: the layers
    that read, None for all. selector: what chooses blocks, by name or a BlockSelector of your own. index: the backend
    that finds blocks for it, None for the configured one. when_full: what becomes of a text that needs more
    than the native window beside the memories; "error" stops it, "drop" lets go of the oldest own tokens: every token
    sees as many of the last ones as there is room for. explain: keep what was read for ``provenance()``.
    """

    adapter: DecoderOnlyAdapter
    chats = True

    def __init__(
        self,
        adapter: DecoderOnlyAdapter,
        rows: Sequence[Sequence[Memory]],
        *,
        top_k: TopK = None,
        budget: int | None = None,
        layers: Collection[int] | None = None,
        selector: str | BlockSelector | None = None,
        index: str | None = None,
        when_full: Literal["error", "drop"] = "error",
        explain: bool = False,
    ) -> None:
        super().__init__(adapter, rows, explain)
        if top_k not in (None, "all"):
            raise AttachError(f'top_k={top_k!r}: a decoder-only memory is read by budget= in tokens, or top_k="all".')
        if when_full not in ("error", "drop"):
            raise AttachError(f'when_full={when_full!r} must be "error" or "drop".')
        if when_full == "drop" and adapter.rotary is None:
            raise AttachError(
                f'when_full="drop": {type(adapter.model).__name__} has a table of positions, and none beyond it.'
            )
        self.selector, self.when_full = chosen_selector(selector, index), when_full
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < BLOCK):
            raise AttachError(f"budget={budget!r} must be a whole number of at least {BLOCK} tokens, a block's size.")
        self.layers = checked_layers(layers, len(adapter.self_attentions))
        default = min(BUDGET, adapter.native_window // 4)
        self.blocks = max(1, (default if budget is None else budget) // BLOCK)
        self.everything = top_k == "all"
        _check_readable(adapter, self.rows)
        self.whole: dict[int, Reads] = {}
        self._sequences = Sequences(self)
        self._turns = Turns()
        self._chooser: Chooser | None = None  # while it passes over a prompt
        self._context = Context([], torch.empty(0, 0))
        self._positions = self._far = torch.empty(0, 0)
        self._seen = self._near = 0

    def selection(self) -> list[list[Chosen]]:
        self._check_entered()
        return [reads.chosen() for reads in self._context.reads for _ in range(reads.rows.start, reads.rows.stop)]

    def _reads_whole(self, row: Sequence[Memory]) -> bool:
        single_window = len(row) == 1 and row[0].num_tokens <= row[0].manifest.rule.window
        return self.everything or single_window or sum(num_blocks(memory.num_tokens) for memory in row) <= self.blocks

    def _prepare(self) -> None:
        _check_readable(self.adapter, self.rows)
        whole: dict[int, Reads] = {}
        for i, row in enumerate(self.rows):
            if self._reads_whole(row):
                known = self.whole.get(i)
                whole[i] = known if known is not None and known.excerpts[0].memories == row else self._load_whole(row)
            else:
                self.selector.prepare([self.open_memory(memory) for memory in row])
        self.whole = whole

    def _load_whole(self, row: Sequence[Memory]) -> Reads:
        size = sum(memory.num_tokens for memory in row) + sink_of(row)[1]
        if size >= self.adapter.native_window:
            raise WindowExceededError(
                f"Read whole, the memories need {size} positions; the model has {self.adapter.native_window}. "
                "Let the prompt choose from them: leave top_k out, or give budget=."
            )
        everything = [Span(j, 0, memory.num_tokens) for j, memory in enumerate(row)]
        excerpt = load_excerpt(self.adapter, row, self.open_memory, everything, size, device_of(self.model))
        return Reads(slice(0, 0), [excerpt] * len(self.adapter.self_attentions), size)

    def _release(self) -> None:
        self.whole.clear()
        self._sequences = Sequences(self)
        self._context = Context([], torch.empty(0, 0))

    def _readers(self) -> dict[nn.Module, AttentionFunction]:
        modules = enumerate(self.adapter.self_attentions)
        every = self.when_full == "drop"  # also where memories are not read, the oldest tokens are let go
        return {module: partial(self._read, layer) for layer, module in modules if every or layer in self.layers}

    def _watched(self) -> Callable[[], None]:
        with ExitStack() as watching:
            watching.callback(follow_moves())
            watching.callback(noting(self.model, self._turns))
            return watching.pop_all().close

    def _stage(self) -> nn.Module:
        return self.adapter.decoder

    def _inputs(self, prompt: str | Chat | None, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
        """The words after the memory. With a sink, the memory has the template's header before it already."""
        if prompt is None or tokenizer is None:
            raise AttachError("A decoder-only model needs a prompt: words and tokenizer=, or input_ids=.")
        frame, question = chat_frame(tokenizer), None
        if isinstance(prompt, str):
            text = frame.before + prompt + frame.after
        else:
            text, question = chat_text(tokenizer, prompt)
        if sink_of(self.rows[0])[1] and text.startswith(frame.before):
            text = BETWEEN + text.removeprefix(frame.before)
        inputs = dict(tokenizer(text, add_special_tokens=False, return_tensors="pt").to(self.model.device))
        return inputs if question is None else inputs | {ASKING: len(tokenizer.tokenize(question))}

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        if self._chooser is not None:  # its own pass over the prompt
            return kwargs
        cache, turn = find_cache(kwargs.values()), self._turns.current
        past = 0 if cache is None else int(cache.get_seq_length())
        kwargs = checked(kwargs, past)
        own = own_positions(kwargs, past)
        first = past == 0 if turn is None else turn.context is None
        if first and self._turns.batch is not None:  # whose beams could be taken for further rows
            self.check_batch(self._turns.batch)
        prompt = prompt_of(kwargs, past, turn) if first else None
        mark = mark_of(cache)
        by_hand = turn is None and mark is not None and mark.is_moved  # and what was noted belongs to other rows
        self._stand(self._sequences.context(prompt, cache, past, len(own), turn), own, past)
        if turn is not None:
            turn.context = self._context
        if self._ledger is not None and self._is_noted():  # what makes the first new token is the prompt's last one
            stop = self._seen if prompt is None else past + prompt.own.shape[1]
            self._ledger.begin(past, (self._prompt_length or stop) - 1, first or by_hand)
        return kwargs | {"position_ids": self._positions}

    def _stand(self, context: Context, own: Tensor, past: int) -> None:
        """Let this pass read what the context says, with its own tokens at their usual positions own [B, T].

        Raises WindowExceededError if they need more positions than there are.
        """
        self._positions, self._seen = own + context.shift, past + own.shape[1]
        window, longest, room = self.adapter.native_window, int(self._positions.max()) + 1, int(context.rooms.max())
        if longest > window and (self.when_full == "error" or room >= window):
            raise WindowExceededError(
                f"Memories ({room} tokens), prompt and generated tokens need {longest} positions, and the model has "
                f"{window}. Use a smaller budget=, a shorter prompt or fewer new tokens; "
                'when_full="drop" lets go of the oldest tokens of the prompt and the answer.'
            )
        self._context = context.with_places(past, self._positions) if self.when_full == "drop" else context
        self._far, self._near = self._positions, own.shape[1]
        if longest > window:
            self._far = self._positions.clamp_max(window - 1)
            self._near = int((self._far == self._positions).all(0).long().cumprod(0).sum())

    def _nested(self) -> bool:
        return self._chooser is not None

    def _is_noted(self) -> bool:
        return super()._is_noted() and not self._turns.aside

    def _after(self, output: Any) -> None:
        cache = find_cache(output.values() if isinstance(output, Mapping) else output)
        if cache is not None and self._chooser is None:
            self._sequences.keep(cache, self._context)

    def pass_over(self, chooser: Chooser, context: Context, cache: Any = None) -> None:
        """Let the chooser hear what the prompt's end asks at every layer, before anything is chosen. What was said
        before is read from a copy of the cache, which so stays as it is."""
        prompt, start = chooser.prompt, chooser.start
        end = replace(context, repeated=context.repeated[:, start:] if start else context.repeated)
        self._stand(end, prompt.own[:, start:] + context.shift - end.shift, prompt.past)
        inputs: dict[str, Any] = {prompt.name: prompt.tokens[:, start:], "position_ids": self._positions}
        if cache is None:
            inputs |= {"attention_mask": (~prompt.padding[:, start:]).long(), "use_cache": False}
        else:
            inputs |= {"attention_mask": prompt.mask, cache_name(self.adapter.decoder): deepcopy(cache)}
        self._chooser = chooser
        try:
            with torch.no_grad():
                self.adapter.decoder(**inputs)
        finally:
            self._chooser = None

    def _read(
        self,
        layer: int,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        """The attention function of a hooked layer."""
        repeats = torch.is_grad_enabled() and bool(self._context.reads)  # of a step, for its gradient
        if self._thread is None and not repeats:
            raise AttachError(
                f"A layer of this {type(self.model).__name__} runs outside of {type(self._stage()).__name__}, to which "
                "memories are attached: by itself, or as a part of another model. Leave the attachment first."
            )
        self._calls += 1
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        mask, n = own_mask(mask, query, key.shape[2])
        key, value = key[:, :, :n], value[:, :, :n]
        reads = self._context.reads if layer in self.layers else []
        mask = self._hide_dropped(self._hide_repeated(mask, n) if reads else mask, n)
        asking = None
        if reads and self._far is not self._positions:  # tokens were dropped, so the memories stand that much nearer
            asking = moved(self.adapter, layer, query, self._positions, self._far)
        own = Own(layer, query, key, value, mask, scaling, softcap, sliding_window, asking, self._far, self._near)
        if not reads:
            return finish(alone(own), query), None
        if self._chooser is not None:
            self._chooser.hear(layer, query, self._positions, scaling)
        noted = 0
        if self._ledger is not None and self._is_noted():
            most = max(each.layout.size for each in reads)
            noted = self._ledger.noted(query.shape[2], query.shape[0] * query.shape[1] * most * len(self.layers))
        return finish(together(own, reads, noted, partial(self._note, layer)), query), None

    def _hide_repeated(self, mask: Tensor | None, n: int) -> Tensor | None:
        """Take the prompt's repeated header out of the last n own tokens' mask."""
        repeated = self._context.repeated[:, max(0, self._seen - n) :]
        if not repeated.any():
            return mask
        return without(mask, pad(repeated, (0, n - repeated.shape[1]))[:, None, None])

    def _hide_dropped(self, mask: Tensor | None, n: int) -> Tensor | None:
        """Of the last n own tokens, let every token see only as many as there is room for behind the memories."""
        if self._far is self._positions:
            return mask
        assert self._context.places is not None
        places = self._context.places[:, max(0, self._seen - n) :]
        places = pad(places, (0, n - places.shape[1]))[:, None, None]
        kept = self.adapter.native_window - self._context.rooms
        return without(mask, places <= (self._positions - kept)[:, None, :, None])

    def _note(self, layer: int, sums: Sequence[Tensor], memory: Partial, total: Partial) -> None:
        """Keep what the rows of every excerpt gave to its passages [b, H, T, P]."""
        assert self._ledger is not None
        seen = []
        for reads, each in zip(self._context.reads, sums, strict=True):
            tail: Literal["whole"] | None = "whole" if self.is_whole(reads) else None
            rows = list(range(reads.rows.start, reads.rows.stop))
            seen.append(Seen(reads.layout, rows, reads.widened(layer, each), tail))
        self._ledger.note(layer, seen, memory, total)

    def is_whole(self, reads: Reads) -> bool:
        """Whether these are memories that are read whole."""
        return any(reads.excerpts is whole.excerpts for whole in self.whole.values())


def _check_readable(adapter: DecoderOnlyAdapter, rows: Sequence[Sequence[Memory]]) -> None:
    for row in rows:
        if adapter.whole_only and (len(row) > 1 or row[0].num_tokens > row[0].manifest.rule.window):
            raise AttachError(
                f"{type(adapter.model).__name__} reads one memory of one window at a time: {adapter.whole_only}."
            )
    for memory in (memory for row in rows for memory in row):
        if memory.manifest.block_tokens % BLOCK:
            raise AttachError(
                f"Memory {memory.name!r} is stored in blocks of {memory.manifest.block_tokens} tokens, which is no "
                f"multiple of {BLOCK}. Encode the document with store.encode, which sees to that."
            )
