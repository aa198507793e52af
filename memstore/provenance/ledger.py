"""Keeping what was read: after every step a few small tensors, of which a report is made only when asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from memstore.attention import Partial, shifted_exp
from memstore.provenance.passages import Layout

HEAVIEST = 32  # passages kept of a token by their mean over layers and heads, and as many by their maximum
HELD = 1 << 26  # masses held during a step: 256 MiB


class Seen(NamedTuple):
    """What some batch rows gave to the passages of their documents in one layer, at the last T' positions of a pass.

    sums: [b, H, T', P] weights exp(s - m), where m is the highest score of those rows' memories. low, high: [b, H, T'],
    bounds of the share that what was read holds of the attention over all of the memories; None where none are known.
    """

    layout: Layout
    rows: list[int]
    sums: Tensor
    low: Tensor | None = None
    high: Tensor | None = None


class Record(NamedTuple):
    """What some batch rows read at one position, as shares of all their attention there, the prompt's included.

    layers: L of them. places: [b, K] of the heaviest passages in the layout, -1 for none, and masses: [L, b, H, K] what
    they held. documents: [L, b, H, D] and passages: [b, P], mean over layers and heads: the totals, of all passages.
    low, high: [L, b, H], as in :class:`Seen`.
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
        self._open: dict[int, dict[int, tuple[Seen, Tensor]]] = {}

    def begin(self, past: int, start: int) -> None:
        """A pass begins, after ``past`` tokens; with none, a new prompt, of which position ``start`` is step 0."""
        if past == 0:
            self.clear()
            self.start = start
        self._past, self._open = past, {}

    def noted(self, tokens: int, numbers: int) -> int:
        """How many of the last positions of a pass over ``tokens`` tokens to note, where each takes ``numbers`` masses:
        all from ``start`` on, or the last ones that fit into 256 MiB."""
        self._tokens = tokens
        return max(0, min(self._tokens - max(0, self.start - self._past), max(1, HELD // numbers)))

    @torch.no_grad()
    def note(self, layer: int, seen: Sequence[Seen], memory: Partial, total: Partial) -> None:
        """What a layer read, where memory and total [B, H, T, …] are the memory's part of its attention, and all."""
        share = shifted_exp(memory.m, total.m) / total.l.clamp_min(torch.finfo(total.l.dtype).tiny)
        for i, each in enumerate(seen):
            own = share if len(seen) == 1 else share[each.rows]
            masses = each.sums * own[:, :, -each.sums.shape[2] :]
            self._open.setdefault(i, {})[layer] = each, masses

    @torch.no_grad()
    def close(self) -> None:
        """The pass is over: keep what counts of it."""
        if self._past == 0:
            self.first = self._tokens - 1
        while self.records and next(reversed(self.records)) >= self._past:
            self.records.popitem()
        for noted in self._open.values():
            layers = sorted(noted)
            seen, masses = noted[layers[0]][0], torch.stack([noted[layer][1] for layer in layers])
            low, high = (
                None
                if getattr(seen, name) is None
                else torch.stack([getattr(noted[layer][0], name) for layer in layers])
                for name in ("low", "high")
            )
            mean = masses.mean((0, 2))  # [b, T', P]
            places = _heaviest(mean, masses.amax((0, 2)))
            kept = masses.gather(-1, places.clamp_min(0)[None, :, None].expand(*masses.shape[:3], -1, -1))
            documents = seen.layout.by_document(masses)
            for t in range(masses.shape[3]):
                record = Record(
                    seen.layout,
                    seen.rows,
                    layers,
                    places[:, t],
                    kept[:, :, :, t],
                    documents[:, :, :, t],
                    mean[:, t],
                    None if low is None else low[..., t],
                    None if high is None else high[..., t],
                )
                position = self._past + self._tokens - masses.shape[3] + t
                self.records.setdefault(position, []).append(record)
        self._open = {}


def _heaviest(*criteria: Tensor) -> Tensor:
    """Places [..., K] of the passages that a criterion [..., P] finds among the heaviest, each once; -1 for none."""
    size = criteria[0].shape[-1]
    if size <= HEAVIEST * len(criteria):
        return torch.arange(size, device=criteria[0].device).expand(criteria[0].shape)
    places = torch.cat([criterion.topk(HEAVIEST).indices for criterion in criteria], dim=-1).sort(-1).values
    again = places[..., 1:] == places[..., :-1]
    return torch.cat([places[..., :1], places[..., 1:].masked_fill(again, -1)], dim=-1)
