"""Scouting: one pass of the prompt that finds where in the memories its answer may stand.

At every layer each prompt token scores blocks of 64 memory tokens by attention, with the query turned to a fixed
distance from keys that are not rotated. Layers disagree, and their mean finds the place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from memstore.memory import Memory, OpenMemory
from memstore.reading.excerpt import sink_of
from memstore.reading.rotary import rotate, unrotate
from memstore.reading.selection import BLOCK

if TYPE_CHECKING:
    from memstore.families import DecoderOnlyAdapter

DISTANCE = (
    4096  # between query and keys, at most half the native window; at distance 0 near-by habits drown the content
)
QUERIES = 128  # prompt tokens scored at once


class Scout:
    """Block scores of one list of memories for some rows of a batch, summed over layers.

    asks: [b, T] boolean, the prompt tokens that count: no padding, no template header.
    """

    def __init__(
        self,
        adapter: DecoderOnlyAdapter,
        memories: Sequence[Memory],
        open_memory: Callable[[Memory], OpenMemory],
        asks: Tensor,
    ) -> None:
        self.adapter, self.memories, self.open_memory, self.asks = adapter, memories, open_memory, asks
        self.total: Tensor | None = None
        self.layers = 0

    def score(self, layer: int, query: Tensor, positions: Tensor, scaling: float) -> Tensor:
        """Score all blocks at one layer; returns [b, blocks] and adds it to the total.

        query: [b, H, T, c], rotated to positions [b, T]. A block's score is its share of a softmax over the sink and
        all blocks, each standing for its best key; the maximum over heads and asking tokens.
        """
        far = self._turned(query, positions)
        keys = [
            block.to(query.device, torch.float32).permute(1, 2, 0)
            for memory in self.memories
            for block in self.open_memory(memory).blocks(f"keys.{layer}")
        ]
        owner, sink = sink_of(self.memories)
        if sink:  # where a head looks that finds nothing
            prefix = self.open_memory(self.memories[owner]).prefix(f"keys.{layer}")
            keys.append(prefix.to(query.device, torch.float32).permute(1, 2, 0))
        best = torch.cat(
            [
                self._shares(chunk, keys, scaling, bool(sink))
                .masked_fill(~asks[:, None, :, None], 0)
                .amax((1, 2))[None]
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

    def _turned(self, query: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self.adapter.rotary(query, positions)
        plain = unrotate(query, cos, sin)
        distance = min(DISTANCE, self.adapter.native_window // 2)
        cos, sin = self.adapter.rotary(plain, torch.full_like(positions, distance))
        return rotate(plain, cos, sin)

    def _shares(self, query: Tensor, keys: Sequence[Tensor], scaling: float, sink: bool) -> Tensor:
        """Shares of blocks [b, H, t, blocks] for query [b, H, t, c] and keys [G, c, n_i], of which the last may be the
        sink's."""
        b, h, t, c = query.shape
        groups = keys[0].shape[0]
        folded = query.view(b, groups, -1, t, c).transpose(0, 1).reshape(groups, -1, c)
        best = [_block_maxima(folded @ block) for block in keys[: len(keys) - sink]]
        best += [(folded @ block).amax(-1, keepdim=True) for block in keys[len(keys) - sink :]]
        shares = (torch.cat(best, dim=-1) * scaling).softmax(-1)[..., : -1 if sink else None]
        return shares.view(groups, b, -1, t, shares.shape[-1]).transpose(0, 1).reshape(b, h, t, -1)


def _block_maxima(scores: Tensor) -> Tensor:
    """[…, n] -> […, ceil(n / 64)]: the best score of each block; the last block may be shorter."""
    missing = -scores.shape[-1] % BLOCK
    padded = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf) if missing else scores
    return padded.view(*padded.shape[:-1], -1, BLOCK).amax(-1)
