"""Reading encoder states: the cross-attention of an encoder-decoder sees the prompt and the memories as one softmax."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from memstore.attachment import Attachment, Chat, TopK
from memstore.attention import Scoring, merge, normalise, ordinary_attention
from memstore.cross_attention import CrossAttention
from memstore.errors import AttachError, WindowExceededError
from memstore.hooks import AttentionFunction, base_attention, base_implementation, uncompiled
from memstore.indexes import check_backend, open_index
from memstore.memory import Memory
from memstore.open_memory import OpenMemory
from memstore.reading.passes import EncoderStates, checked_layers, device_of, find_cache, finish
from memstore.reading.shelves import Shelves, Source

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from memstore.families import EncoderDecoderAdapter


@dataclass
class EmptyPrompt(EncoderStates):
    """Encoder outputs that stand for no prompt.

    Most models fail on encoder outputs of length 0 and some pass no mask, so the one state in here is hidden by the
    type of this object, never by a mask.
    """


def _check_room(what: str, num_tokens: int, limit: int | None) -> None:
    if limit is not None and num_tokens > limit:
        raise WindowExceededError(f"{what} needs {num_tokens} positions, and the model has {limit}.")


class HiddenAttachment(Attachment):
    """Encoder states attached to every cross-attention layer.

    top_k: rows of the memories that each head reads at each step; None is the model's own window, "all" is exact
    attention over everything. layers: the decoder layers that read, None for all; others see only the prompt.
    index: the backend that searches, None for the configured one. explain: keep what was read for ``provenance()``.
    """

    adapter: EncoderDecoderAdapter

    def __init__(
        self,
        adapter: EncoderDecoderAdapter,
        rows: Sequence[Sequence[Memory]],
        *,
        top_k: TopK = None,
        layers: Collection[int] | None = None,
        index: str | None = None,
        explain: bool = False,
    ) -> None:
        super().__init__(adapter, rows, explain)
        if isinstance(top_k, bool) or (
            top_k is not None and top_k != "all" and (not isinstance(top_k, int) or top_k < 1)
        ):
            raise AttachError(f'top_k={top_k!r} must be a whole number of at least 1, "all", or None.')
        check_backend(index)  # also where nothing needs searching: what is wrong is told now
        self.top_k, self.index = adapter.native_window if top_k is None else top_k, index
        self.attentions = {attention.module: attention for attention in adapter.cross_attentions()}
        self.layers = checked_layers(layers, len(self.attentions))
        self._shelves = Shelves(None if self.top_k == "all" else self.top_k, self._source)
        self._unchecked: list[OpenMemory] = []
        self._no_prompt = False
        self._encoded: tuple[ReferenceType[Any], int] | None = None  # the last prompt's states, and how many rows
        self._noting: RemovableHandle | None = None

    def empty_prompt(self, batch_size: int = 1) -> EmptyPrompt:
        """Encoder outputs for ``model.generate(encoder_outputs=…)`` without a prompt: the memory alone is read.

        Make new ones for each call: beam search repeats the rows of its encoder outputs in place. Raises AttachError
        for a batch that cannot be shared out among the rows of memories.
        """
        self.check_batch(batch_size)
        shape = (batch_size, 1, self.adapter.width)
        return EmptyPrompt(last_hidden_state=torch.zeros(shape, dtype=self.model.dtype, device=self.model.device))

    def _prepare(self) -> None:
        if self._noting is None:
            self._noting = self.adapter.encoder.register_forward_hook(self._note_prompt)
        self._shelves.arrange(self.rows)

    def _source(self, memory: Memory, searched: bool) -> Source:
        device, opened = device_of(self.model), self.open_memory(memory)
        if device.type == "cpu":  # attaching reads nothing: the next step does, and verifies what it reads
            blocks = opened.mapped("hidden")
            self._unchecked.append(opened)
        else:
            blocks = [block.to(device) for block in opened.blocks("hidden")]
        if not searched:
            return Source(memory, blocks)
        found = open_index(opened, self.index, {"hidden": blocks}, str(device))
        return Source(memory, blocks, found.indexes["hidden"])

    def _release(self) -> None:
        if self._noting is not None:
            self._noting.remove()
        self._noting = self._encoded = None
        self._shelves.arrange([])
        self._unchecked.clear()

    def _readers(self) -> dict[nn.Module, AttentionFunction]:
        return {
            module: partial(
                self._read if attention.layer_idx in self.layers else self._read_prompt,
                attention,
            )
            for module, attention in self.attentions.items()
        }

    @uncompiled
    def _note_prompt(self, encoder: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """``generate`` repeats the rows of a prompt's states for beams, in the same object."""
        if isinstance(states := getattr(output, "last_hidden_state", None), Tensor):
            self._encoded = ref(output), len(states)

    def _stage(self) -> nn.Module:
        return self.model.base_model  # which runs too when the model with its head is called

    def _inputs(self, prompt: str | Chat | None, tokenizer: PreTrainedTokenizerBase | None) -> dict[str, Any]:
        if prompt is None:
            return {"encoder_outputs": self.empty_prompt(len(self.rows))}
        assert tokenizer is not None
        assert isinstance(prompt, str)
        return dict(tokenizer(prompt, return_tensors="pt").to(self.model.device))

    def _before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        given = (*args, *kwargs.values())
        cache = find_cache(given)
        past = 0 if cache is None else int(cache.get_seq_length())
        if self._ledger is not None:
            self._ledger.begin(past, start=0)
        if isinstance(tokens := kwargs.get("decoder_input_ids"), Tensor):
            _check_room("What is generated", past + tokens.shape[1], self.adapter.max_target)
        if self._encoded is not None and any(value is self._encoded[0]() for value in given if value is not None):
            self._check_prompt_rows(self._encoded[1])
        self._no_prompt = any(isinstance(value, EmptyPrompt) for value in given)
        return kwargs

    def _verify(self) -> None:
        """Raises DamagedMemoryError for what is read for the first time: here, where every way of reading passes."""
        while self._unchecked:
            if self._unchecked[-1] in self._opened.values():  # else it came and went
                self._unchecked[-1].check("hidden")
            self._unchecked.pop()

    def _check_prompt_rows(self, count: int) -> None:
        """``count``: before beams were made of them, which must not pass for further rows."""
        self.check_batch(count)
        # Whisper's loop leaves out the rows that have ended, and those left must not pass for others.
        if self._own_generate() and len(self.rows) > 1 and count != len(self.rows):
            raise AttachError(
                f"{type(self.model).__name__}.generate goes on with some rows of a batch where others have ended, so "
                f"{len(self.rows)} rows of memories are read by a batch of just as many, and this one has {count}. "
                "Give one input for each, and of one length; or attach and generate row by row."
            )

    def _check_length(self, num_tokens: int) -> None:
        super()._check_length(num_tokens)
        _check_room("The prompt", num_tokens, self.adapter.max_window)

    @uncompiled
    def _free(self, stage: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._no_prompt = False  # also after a step that failed: a decoder called by itself has what it is given
        super()._free(stage, args, output)

    def _read(
        self,
        attention: CrossAttention,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        scaling: float | None = None,
        position_bias: Tensor | None = None,
        **unused: Any,
    ) -> tuple[Tensor, None]:
        """The attention function of a hooked cross-attention: memories, and the prompt unless it is empty."""
        self._calls += 1
        self._verify()
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        self.check_batch(len(query))
        # Soft-capping needs the key bias in every score. Else it is the same for the whole memory, and added once, if
        # there is anything to merge the memory with.
        needless = attention.softcap is None and self._no_prompt
        bias = None if needless else attention.key_bias(query, scaling)
        inside = Scoring() if attention.softcap is None else Scoring(bias, attention.softcap)
        noted = 0
        if self._ledger is not None:
            rows, heads, length = query.shape[:3]
            noted = self._ledger.noted(length, rows * heads * self._shelves.num_passages * len(self.layers))
        memory, seen = self._shelves.read(attention.absorb(query, scaling), inside, noted)
        if bias is not None and attention.softcap is None:
            memory = memory._replace(m=memory.m + bias)
        memory = total = attention.values(memory)
        if not self._no_prompt:
            prompt = ordinary_attention(query, key, value, mask, scaling, position_bias, attention.softcap)
            total = merge([memory, prompt])
        if self._ledger is not None:
            self._ledger.note(attention.layer_idx, seen, memory, total)
        return finish(normalise(total), query), None

    def _read_prompt(
        self, attention: CrossAttention, module: nn.Module, query: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The attention function of a layer that sees only the prompt: nothing, if that is empty."""
        self._calls += 1
        if self._no_prompt:
            return finish(torch.zeros_like(query), query), None
        return base_attention(module, base_implementation(module))(module, query, *args, **kwargs)
