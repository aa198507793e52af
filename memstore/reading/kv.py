"""Reading keys and values: a decoder-only model sees [sink | spans of the memories | its own tokens] as one softmax.

A document that was encoded as one window is read whole, exactly as if it stood before the prompt. Of longer ones a
selector chooses spans for the prompt, which are then read at every layer and step of that sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from memstore.attachment import Attachment, TopK
from memstore.attention import Partial, merge, normalise, ordinary_attention
from memstore.errors import AttachError, WindowExceededError
from memstore.hooks import AttentionFunction
from memstore.memory import Memory
from memstore.provenance import Seen
from memstore.reading.chat import BETWEEN, chat_frame
from memstore.reading.choosing import Chooser
from memstore.reading.excerpt import closing_ids, load_excerpt, sink_ids, sink_of
from memstore.reading.masks import leading, own_mask, own_positions, padding_mask, trailing
from memstore.reading.passes import checked_layers, device_of, find_cache, finish
from memstore.reading.reads import Reads
from memstore.reading.selection import BLOCK, Span, num_blocks
from memstore.reading.selectors import BlockSelector, chosen_selector

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from memstore.families import DecoderOnlyAdapter

BUDGET = 512  # tokens chosen for a prompt by default; more blocks bring distractors


@dataclass
class Context:
    """One sequence of forward passes, from its prompt on: what its rows read, in order.

    repeated: [B, T] marks the prompt's tokens that the sink stands for already; they are hidden.
    """

    reads: list[Reads]
    repeated: Tensor

    def shift(self) -> Tensor:
        """[B, 1]: how far each row's own tokens stand behind their usual positions."""
        rooms = [reads.room for reads in self.reads for _ in range(reads.rows.start, reads.rows.stop)]
        return torch.tensor(rooms, device=self.repeated.device)[:, None] - self.repeated.sum(1, keepdim=True)


class KvAttachment(Attachment):
    """Keys and values attached to every self-attention layer.

    top_k: "all" reads every memory whole; None reads a single memory of one window whole and chooses from all others.
    budget: tokens chosen for each prompt, by default 512, or a quarter of a small native window. layers: the layers
    that read, None for all. selector: what chooses blocks, by name or a BlockSelector of your own. index: the backend
    that ranks blocks for a prompt, which is ``selector="index"``. explain: keep what was read for ``provenance()``.
    """

    adapter: DecoderOnlyAdapter

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
        explain: bool = False,
    ) -> None:
        super().__init__(adapter, rows, explain)
        if top_k not in (None, "all"):
            raise AttachError(f'top_k={top_k!r}: a decoder-only memory is read by budget= in tokens, or top_k="all".')
        self.selector = chosen_selector(selector, index)
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int) or budget < BLOCK):
            raise AttachError(f"budget={budget!r} must be a whole number of at least {BLOCK} tokens, a block's size.")
        self.layers = checked_layers(layers, len(adapter.self_attentions))
        default = min(BUDGET, adapter.native_window // 4)
        self.blocks = max(1, (default if budget is None else budget) // BLOCK)
        self.everything = top_k == "all"
        _check_blocks(self.rows)
        self._whole: dict[int, Reads] = {}
        self._contexts: WeakKeyDictionary[Any, Context] = WeakKeyDictionary()
        self._chooser: Chooser | None = None  # while it passes over a prompt
        self._context = Context([], torch.empty(0, 0))
        self._positions = torch.empty(0, 0)
        self._seen = 0

    def _reads_whole(self, row: Sequence[Memory]) -> bool:
        single_window = len(row) == 1 and row[0].num_tokens <= row[0].manifest.rule.window
        return self.everything or single_window or sum(num_blocks(memory.num_tokens) for memory in row) <= self.blocks

    def _prepare(self) -> None:
        _check_blocks(self.rows)
        whole: dict[int, Reads] = {}
        for i, row in enumerate(self.rows):
            if self._reads_whole(row):
                known = self._whole.get(i)
                whole[i] = known if known is not None and known.excerpts[0].memories == row else self._load_whole(row)
            else:
                self.selector.prepare([self.open_memory(memory) for memory in row])
        self._whole = whole

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
        self._whole.clear()
        self._contexts.clear()
        self._context = Context([], torch.empty(0, 0))

    def _readers(self) -> dict[nn.Module, AttentionFunction]:
        modules = enumerate(self.adapter.self_attentions)
        return {module: partial(self._read, layer) for layer, module in modules if layer in self.layers}

    def _stage(self) -> nn.Module:
        return self.adapter.decoder

    def _inputs(self, prompt: str | None, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
        """The words after the memory. With a sink, the memory has the template's header before it already."""
        if prompt is None or tokenizer is None:
            raise AttachError("A decoder-only model needs a prompt: words and tokenizer=, or input_ids=.")
        frame = chat_frame(tokenizer)
        before = BETWEEN if sink_of(self.rows[0])[1] else frame.before
        inputs = tokenizer(before + prompt + frame.after, add_special_tokens=False, return_tensors="pt")
        return dict(inputs.to(self.model.device))

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        if self._chooser is not None:  # its own pass over the prompt
            return kwargs
        if args:
            raise AttachError("Call the model with keyword arguments while memories are attached.")
        cache = find_cache(kwargs.values())
        past = 0 if cache is None else int(cache.get_seq_length())
        own = own_positions(kwargs, past)
        if past == 0:
            self._context = self._begin(kwargs, own)
        elif cache in self._contexts:
            self._context = self._contexts[cache]
        else:
            raise AttachError("This cache was filled outside the attachment; start from the prompt while attached.")
        self._seen = past + own.shape[1]
        if self._ledger is not None:  # what makes the first new token is the prompt's last one
            self._ledger.begin(past, start=(self._prompt_length or self._seen) - 1)
        self._positions = own + self._context.shift()
        longest = int(self._positions.max()) + 1
        if longest > self.adapter.native_window:
            raise WindowExceededError(
                f"Memory, prompt and generated tokens need {longest} positions, and the model has "
                f"{self.adapter.native_window}. Use a smaller budget=, a shorter prompt or fewer new tokens."
            )
        return kwargs | {"position_ids": self._positions}

    def _nested(self) -> bool:
        return self._chooser is not None

    def _after(self, output: Any) -> None:
        cache = find_cache(output.values())
        if cache is not None and self._chooser is None:
            self._contexts[cache] = self._context

    def _begin(self, kwargs: dict[str, Any], own: Tensor) -> Context:
        """Choose what each row of a new prompt reads."""
        groups = self._groups(len(own))
        padding = padding_mask(kwargs, own)
        repeated, closing = torch.zeros_like(padding), torch.zeros_like(padding)
        for memories, rows in groups if kwargs.get("input_ids") is not None else []:
            repeated[rows] = leading(kwargs["input_ids"][rows], padding[rows], sink_ids(memories))
            closing[rows] = trailing(kwargs["input_ids"][rows], padding[rows], closing_ids(memories))
        reads = [replace(whole, rows=groups[i][1]) for i, whole in self._whole.items()]
        wanting = [group for i, group in enumerate(groups) if i not in self._whole]
        if wanting:
            chooser = Chooser(self, kwargs, own, padding, repeated, closing)
            if self.selector.needs_queries:
                self._pass_over(chooser, reads + [chooser.before(*group) for group in wanting])
            reads += [each for group in wanting for each in chooser.choose(*group)]
        return Context(sorted(reads, key=lambda each: each.rows.start), repeated)

    def _groups(self, batch: int) -> list[tuple[list[Memory], slice]]:
        """Each row's memories and its rows in a batch: beams and return sequences of one row stand together."""
        self._check_batch(batch)
        each = batch // len(self.rows)
        return [(list(row), slice(i * each, (i + 1) * each)) for i, row in enumerate(self.rows)]

    def _pass_over(self, chooser: Chooser, reads: list[Reads]) -> None:
        """Let the chooser hear what the prompt's end asks at every layer, before anything is chosen."""
        reads, start = sorted(reads, key=lambda each: each.rows.start), chooser.start
        self._positions = (chooser.own + Context(reads, chooser.repeated).shift())[:, start:]
        self._context, self._seen = Context(reads, chooser.repeated[:, start:]), self._positions.shape[1]
        self._chooser = chooser
        try:
            with torch.no_grad():
                self.adapter.decoder(**chooser.inputs, position_ids=self._positions, use_cache=False)
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
        **unused: Any,
    ) -> tuple[Tensor, None]:
        """The attention function of a hooked layer."""
        self._calls += 1
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        local_mask, n = own_mask(mask, query, key.shape[2])
        local_mask = self._hide_repeated(local_mask, n)
        local = ordinary_attention(query, key[:, :, :n], value[:, :, :n], local_mask, scaling)
        if self._chooser is not None:
            self._chooser.hear(layer, query, self._positions, scaling)
        sums: list[Tensor] | None = None if self._ledger is None or self._chooser is not None else []
        parts = [
            each.excerpts[layer].attend(
                layer, query[each.rows], scaling, self._far_mask(sliding_window, each, layer), sums
            )
            for each in self._context.reads
        ]
        memory = Partial(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
        total = merge([memory, local])
        if sums is not None:
            self._note(layer, sums, memory, total)
        return finish(normalise(total), query), None

    def _far_mask(self, window: int | None, reads: Reads, layer: int) -> Tensor | None:
        """[b, 1, T, M] for a layer with a sliding window: which memory tokens are near enough; None: all are seen."""
        if window is None:
            return None
        distance = self._positions[reads.rows][:, None, :, None] - reads.excerpts[layer].positions
        return distance < window

    def _hide_repeated(self, mask: Tensor | None, n: int) -> Tensor | None:
        """Take the prompt's repeated header out of the last n own tokens' mask."""
        repeated = self._context.repeated[:, max(0, self._seen - n) :]
        if not repeated.any():
            return mask
        hidden = torch.nn.functional.pad(repeated, (0, n - repeated.shape[1]))[:, None, None]
        if mask is None:
            return ~hidden
        if mask.dtype == torch.bool:
            return mask & ~hidden
        return mask.masked_fill(hidden, torch.finfo(mask.dtype).min)

    def _note(self, layer: int, sums: Sequence[Tensor], memory: Partial, total: Partial) -> None:
        """Keep what the rows of every excerpt gave to its passages [b, H, T, P]."""
        assert self._ledger is not None
        rows, heads, length = total.m.shape[:3]
        most = max(reads.layout.size for reads in self._context.reads)
        noted = self._ledger.noted(length, rows * heads * most * len(self.layers))
        seen = []
        for reads, each in zip(self._context.reads, sums, strict=True):
            last = reads.widened(layer, each[:, :, length - noted :])
            tail: Literal["whole"] | None = "whole" if self._is_whole(reads) else None
            seen.append(Seen(reads.layout, list(range(reads.rows.start, reads.rows.stop)), last, tail))
        if noted:
            self._ledger.note(layer, seen, memory, total)

    def _is_whole(self, reads: Reads) -> bool:
        return any(reads.excerpts is whole.excerpts for whole in self._whole.values())


def _check_blocks(rows: Sequence[Sequence[Memory]]) -> None:
    for memory in (memory for row in rows for memory in row):
        if memory.manifest.block_tokens % BLOCK:
            raise AttachError(
                f"Memory {memory.name!r} is stored in blocks of {memory.manifest.block_tokens} tokens, which is no "
                f"multiple of {BLOCK}. Encode the document with store.encode, which sees to that."
            )
