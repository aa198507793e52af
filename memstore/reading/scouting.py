"""Scouting: one pass of the prompt that finds where in the memories its answer may stand.

At every layer each prompt token scores blocks of 64 memory tokens by attention, with the query turned to a fixed
distance from keys that are not rotated. Layers disagree, and their mean finds the place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memstore.interfaces import VectorIndex
from memstore.memory import Memory, OpenMemory
from memstore.reading.excerpt import sink_of
from memstore.reading.rotary import rotate, unrotate
from memstore.reading.selection import BLOCK
from memstore.slots import slot_name

if TYPE_CHECKING:
    from memstore.families import DecoderOnlyAdapter

DISTANCE = (
    4096  # between query and keys, at most half the native window; at distance 0 near-by habits drown the content
)
QUERIES = 512  # prompt tokens scored at once


class Scout:
    """Block scores of one list of memories for some rows of a batch, summed over layers.

    asks: [b, T] boolean, the prompt tokens that count: no padding, no template header.
    """

    def __init__(
        self,
        adapter: DecoderOnlyAdapter,
        memories: Sequence[Memory],
        indexes: Sequence[Mapping[str, VectorIndex]],
        open_memory: Callable[[Memory], OpenMemory],
        asks: Tensor,
    ) -> None:
        self.adapter, self.memories, self.indexes, self.asks = adapter, memories, indexes, asks
        self.open_memory = open_memory
        self.total: Tensor | None = None
        self.layers = 0

    def score(self, layer: int, query: Tensor, positions: Tensor, scaling: float) -> Tensor:
        """Score all blocks at one layer; returns [b, blocks] and adds it to the total.

        query: [b, H, T, c], rotated to positions [b, T]. A block's score is its share of a softmax over the sink and
        all blocks, each standing for its best key; the maximum over heads and asking tokens.
        """
        far = turned(self.adapter, query, positions)
        owner, length = sink_of(self.memories)
        sink: Tensor | None = None  # keys [G, c, length] of where a head looks that finds nothing
        if length:
            prefix = self.open_memory(self.memories[owner]).prefix(f"keys.{layer}")
            sink = prefix.to(query.device, torch.float32).permute(1, 2, 0)
        best = torch.cat(
            [
                self._shares(layer, chunk, sink, scaling).masked_fill(~asks[:, None, :, None], 0).amax((1, 2))[None]
                for chunk, asks in zip(far.split(QUERIES, dim=2), self.asks.split(QUERIES, dim=1), strict=True)
            ]
        ).amax(0)
        self.total = best if self.total is None else self.total + best
        self.layers += 1
        return best

    def mean(self) -> Tensor:
        """[b, blocks]: the mean over the layers that were scored."""
        assert self.total is not None
        return self.total / self.layers

    def _shares(self, layer: int, query: Tensor, sink: Tensor | None, scaling: float) -> Tensor:
        """Shares of blocks [b, H, t, blocks] for query [b, H, t, c]; a block that the index does not find has none, and
        where it finds none at all, none has."""
        b, h, t, c = query.shape
        groups = self.adapter.num_kv_heads
        folded = query.float().view(b, groups, -1, t, c).transpose(0, 1).reshape(groups, -1, c)
        best = torch.stack(
            [
                torch.cat([index[slot_name(layer, g)].block_maxima(folded[g], BLOCK) for index in self.indexes], dim=1)
                for g in range(groups)
            ]
        )
        blocks = best.shape[-1]
        if sink is not None:
            best = torch.cat((best, (folded @ sink).amax(-1, keepdim=True)), dim=-1)
        shares = (best * scaling).softmax(-1)[..., :blocks].masked_fill(best[..., :blocks] == -torch.inf, 0)
        return shares.view(groups, b, -1, t, blocks).transpose(0, 1).reshape(b, h, t, blocks)


def turned(adapter: DecoderOnlyAdapter, query: Tensor, positions: Tensor) -> Tensor:
    """The query [b, H, T, c], rotated to positions [b, T], as it asks keys that are not rotated: float32."""
    cos, sin = adapter.rotary(query, positions)
    plain = unrotate(query, cos, sin)
    distance = min(DISTANCE, adapter.native_window // 2)
    cos, sin = adapter.rotary(plain, torch.full_like(positions, distance))
    return rotate(plain, cos, sin)
