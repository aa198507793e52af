"""What a decoder-only model reads of its memories: a sink and some spans, placed before its own tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memstore.attention import Partial, ordinary_attention
from memstore.memory import Memory
from memstore.open_memory import OpenMemory
from memstore.provenance.passages import PASSAGE, Layout, Run, by_passage
from memstore.reading.rotary import rotate
from memstore.reading.selection import Span

if TYPE_CHECKING:
    from memstore.families import DecoderOnlyAdapter


@dataclass
class Excerpt:
    """Keys, rotated to their positions [M], and values of some layers: a pair [G, M, c] for G key-value heads.

    The sink stands at position 0, and the spans end where the model's own tokens begin.
    """

    memories: Sequence[Memory]
    spans: Sequence[Span]
    sink: int
    positions: Tensor
    layers: dict[int, tuple[Tensor, Tensor]]

    @property
    def size(self) -> int:
        """M, the tokens of the sink and of all spans."""
        return self.sink + sum(span.stop - span.start for span in self.spans)

    @cached_property
    def layout(self) -> Layout:
        """The passages of the spans."""
        firsts = [span.start // PASSAGE for span in self.spans]
        stops = [-(-span.stop // PASSAGE) for span in self.spans]
        runs = [Run(s.memory, first, stop - first) for s, first, stop in zip(self.spans, firsts, stops, strict=True)]
        return Layout(self.memories, runs)

    def attend(
        self,
        layer: int,
        query: Tensor,
        scaling: float,
        mask: Tensor | None = None,
        sums: list[Tensor] | None = None,
        softcap: float | None = None,
    ) -> Partial:
        """Attention of query [b, H, T, c], rows that share this excerpt; mask [b, 1, T, M] or None.

        If asked for, ``sums`` gets the weights of every passage [b, H, T, P], relative to m.
        """
        keys, values = self.layers[layer]
        b, h, t, c = query.shape
        groups = keys.shape[0]
        noted: list[Tensor] = []
        note = None if sums is None else lambda weights: noted.append(self._by_passage(weights))
        if mask is not None:
            keys, values = keys.expand(b, -1, -1, -1), values.expand(b, -1, -1, -1)
            part = ordinary_attention(query, keys, values, mask, scaling, softcap=softcap, note=note)
            if sums is not None:
                sums.append(torch.cat(noted, dim=2))
            return part
        # Rows become further heads of their group, so that the keys are read once for all of them.
        folded = query.view(b, groups, -1, t, c).transpose(0, 1).reshape(1, -1, t, c)
        part = ordinary_attention(folded, keys[None], values[None], None, scaling, softcap=softcap, note=note)
        unfolded = [
            x.view(groups, b, h // groups, t, x.shape[-1]).transpose(0, 1).reshape(b, h, t, x.shape[-1])
            for x in (*part, *([] if sums is None else [torch.cat(noted, dim=2)]))
        ]
        if sums is not None:
            sums.append(unfolded.pop())
        return Partial(*unfolded)

    def _by_passage(self, weights: Tensor) -> Tensor:
        """[…, M] -> […, P]: the sums of the passages; the sink is none."""
        sizes = [span.stop - span.start for span in self.spans]
        parts = weights.detach().split([self.sink, *sizes], dim=-1)[1:]
        sums = [by_passage(part, span.start % PASSAGE) for part, span in zip(parts, self.spans, strict=True)]
        return torch.cat(sums, dim=-1) if sums else weights.new_zeros(*weights.shape[:-1], 0)


def sink_of(memories: Sequence[Memory]) -> tuple[int, int]:
    """Whose prefix serves as the sink, and its length; (0, 0) if no memory has one."""
    for i, memory in enumerate(memories):
        if memory.manifest.prefix_ids:
            return i, len(memory.manifest.prefix_ids)
    return 0, 0


def sink_ids(memories: Sequence[Memory]) -> tuple[int, ...]:
    """The tokens that the sink stands for."""
    return memories[sink_of(memories)[0]].manifest.prefix_ids


def closing_ids(memories: Sequence[Memory]) -> tuple[int, ...]:
    """The tokens that the chat template puts behind a prompt; none if no memory was read with a tokenizer."""
    return next((memory.manifest.closing_ids for memory in memories if memory.manifest.closing_ids), ())


def load_layer(
    part: str, opened: Sequence[OpenMemory], spans: Sequence[Span], sink: tuple[int, int], device: torch.device
) -> Tensor:
    """One part of the sink and the spans [G, M, c], float32, in reading order."""
    owner, length = sink
    pieces = [opened[owner].prefix(part)[:length]] if length else []
    pieces += [opened[span.memory].rows(part, span.start, span.stop) for span in spans]
    pieces = pieces or [opened[0].rows(part, 0, 0)]
    return torch.cat([piece.to(device, torch.float32) for piece in pieces]).transpose(0, 1)


def load_excerpt(
    adapter: DecoderOnlyAdapter,
    memories: Sequence[Memory],
    open_memory: Callable[[Memory], OpenMemory],
    spans: Sequence[Span],
    room: int,
    device: torch.device,
    layers: Iterable[int] | None = None,
) -> Excerpt:
    """Read the spans from the store, for some layers or all, and rotate their keys to where they are read.

    room: the position of the model's first own token, at least the number of tokens in the sink and the spans.
    """
    opened, sink = [open_memory(memory) for memory in memories], sink_of(memories)
    size = sum(span.stop - span.start for span in spans)
    positions = torch.cat((torch.arange(sink[1]), torch.arange(room - size, room))).to(device)
    excerpt = Excerpt(memories, spans, sink[1], positions, {})
    turns: dict[str | None, tuple[Tensor, Tensor]] = {}  # cos and sin, once for all layers that share them
    for layer in range(len(adapter.self_attentions)) if layers is None else layers:
        name = adapter.rope_of(layer)
        if name not in turns:
            turns[name] = adapter.rotary_at(layer, torch.empty(0, device=device), positions[None])
        keys = load_layer(f"keys.{layer}", opened, spans, sink, device)
        values = load_layer(f"values.{layer}", opened, spans, sink, device)
        excerpt.layers[layer] = rotate(keys[None], *turns[name])[0].contiguous(), values.contiguous()
    return excerpt
