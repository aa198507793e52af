"""Keeping what was read: after every step a few small tensors, of which a report is made only when asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from memstore.attention import Partial, shifted_exp
from memstore.provenance.passages import Layout
from memstore.provenance.tail import Tail, shares

HEAVIEST = 32  # passages kept of a token by their mean over layers and heads, and as many by their maximum
HELD = 1 << 26  # masses held during a step: 256 MiB


class Seen(NamedTuple):
    """What some batch rows gave to the passages of their documents in one layer, at the last T' positions of a pass.

    sums: [b, H, T', P] weights exp(s - m), where m is that of those rows' memories. tail: what is known of attention
    on all keys beside those that were read; "whole" if there are none, None if nothing is.
    """

    layout: Layout
    rows: list[int]
    sums: Tensor
    tail: Tail | Literal["whole"] | None


class Record(NamedTuple):
    """What some batch rows read at one position, as shares of all their attention there, the prompt's included.

    layers: L of them. places: [b, K] of the heaviest passages in the layout, -1 for none, and masses: [L, b, H, K] what
    they held. documents: [L, b, H, D] and passages: [b, P], mean over layers and heads: the totals, of all passages.
    low, high: [L, b, H], bounds of the share that what was read holds of the attention over all of the memories; None
    where none are known.
    """

    layout: Layout
    rows: list[int]
    layers: list[int]
    places: Tensor
    masses: Tensor
    documents: Tensor
    passages: Tensor
    low: Tensor | None
    high: Tensor | None


class Ledger:
    """The records of one sequence, by position: how many tokens stand before the token that read.

    A position that is read again, because a candidate was rejected there, is overwritten. start: the position of step
    0. first: the position that made the first new token, the last one of the first pass.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget everything: a new prompt begins."""
        self.records: dict[int, list[Record]] = {}  # in ascending order
        self.start = self.first = 0
        self.sequences: Tensor | None = None
        self.beam_indices: Tensor | None = None
        self.prompt = 0  # columns of the sequences before the token of step 0
        self._past = self._tokens = 0
        self._open: dict[int, tuple[Sequence[Seen], Sequence[Tensor]]] = {}  # by layer

    def begin(self, past: int, start: int, new: bool | None = None) -> None:
        """A pass begins, after ``past`` tokens. new: whether it is the first one of a prompt, of which position
        ``start`` is step 0; None for every pass that nothing stands before."""
        if new or (new is None and past == 0):
            self.clear()
            self.start = start
        self._past, self._open = past, {}

    def noted(self, tokens: int, numbers: int) -> int:
        """How many of the last positions of a pass over ``tokens`` tokens to note, where each takes ``numbers`` masses:
        all from ``start`` on, or the last ones that fit into 256 MiB."""
        self._tokens = tokens
        return max(0, min(self._tokens - max(0, self.start - self._past), max(1, HELD // numbers)))

    def note(self, layer: int, seen: Sequence[Seen], memory: Partial, total: Partial) -> None:
        """What a layer read, where memory and total [B, H, T, …] are the memory's part of its attention, and all."""
        length = seen[0].sums.shape[2]
        self._open[layer] = seen, [x[:, :, -length:].detach() for x in (memory.m, total.m, total.l)]

    @torch.no_grad()
    def close(self) -> None:
        """The pass is over: keep what counts of it. All layers are reckoned together: few operations cost least."""
        if not self.records:
            self.first = self._past + self._tokens - 1
        while self.records and next(reversed(self.records)) >= self._past:
            self.records.popitem()
        if not self._open:
            return
        layers = sorted(self._open)
        m, total_m, total_l = (torch.stack(each) for each in zip(*(self._open[i][1] for i in layers), strict=True))
        share = shifted_exp(m, total_m) / total_l.clamp_min(torch.finfo(total_l.dtype).tiny)  # [L, B, H, T', 1]
        for seen in zip(*(self._open[layer][0] for layer in layers), strict=True):
            self._keep(layers, seen, share if len(seen[0].rows) == share.shape[1] else share[:, seen[0].rows])
        self._open = {}

    def _keep(self, layers: list[int], seen: Sequence[Seen], share: Tensor) -> None:
        """Records of what some rows read in each of the layers, with the share [L, b, H, T', 1] of all attention that
        a weight of 1 is."""
        layout, rows, _, tail = seen[0]
        masses = torch.stack([each.sums for each in seen]) * share
        low = high = None
        if tail == "whole":
            low = high = masses.new_ones(masses.shape[:-1])
        elif tail is not None:
            low, high = shares([each.tail for each in seen if isinstance(each.tail, Tail)])
        mean = masses.mean((0, 2))  # [b, T', P]
        places = _heaviest(mean, masses.amax((0, 2)))
        kept = masses.gather(-1, places.clamp_min(0)[None, :, None].expand(*masses.shape[:3], -1, -1))
        documents = layout.by_document(masses)
        count = masses.shape[3]
        for t in range(count):
            record = Record(
                layout,
                rows,
                layers,
                places[:, t],
                kept[:, :, :, t],
                documents[:, :, :, t],
                mean[:, t],
                None if low is None else low[..., t],
                None if high is None else high[..., t],
            )
            self.records.setdefault(self._past + self._tokens - count + t, []).append(record)


def _heaviest(*criteria: Tensor) -> Tensor:
    """Places [..., K] of the passages that a criterion [..., P] finds among the heaviest, each once; -1 for none."""
    size = criteria[0].shape[-1]
    if size <= HEAVIEST * len(criteria):
        return torch.arange(size, device=criteria[0].device).expand(criteria[0].shape)
    places = torch.cat([criterion.topk(HEAVIEST).indices for criterion in criteria], dim=-1).sort(-1).values
    again = places[..., 1:] == places[..., :-1]
    return torch.cat([places[..., :1], places[..., 1:].masked_fill(again, -1)], dim=-1)
