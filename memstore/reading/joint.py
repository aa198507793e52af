"""One softmax over what a layer reads of memories and over the model's own tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from memstore.attention import MANY, Partial, fused_attention, merge, normalise, ordinary_attention, rows_of
from memstore.reading.reads import Reads


class Own(NamedTuple):
    """What a pass over the model's own tokens gives to one of its layers.

    query [B, H, T, c] and key and value [B, G, n, c] with their mask, as for
    :func:`memstore.attention.ordinary_attention`. asking: the query as it asks the memories, most often the same one.
    far [B, T]: where it stands as seen from the memories. window: of a sliding layer, how far it looks back.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scaling: float
    softcap: float | None
    window: int | None
    asking: Tensor
    far: Tensor

    def part(self, start: int, stop: int) -> Own:
        """The positions ``start`` to ``stop`` (excluded) of T, which see the same keys."""
        asking = self.asking[:, :, start:stop]
        query = asking if self.asking is self.query else self.query[:, :, start:stop]
        far, mask = self.far[:, start:stop], rows_of(self.mask, start, stop)
        return self._replace(query=query, asking=asking, far=far, mask=mask)

    def num_fused(self, noted: int) -> int:
        """How many of the first positions are best read by one kernel, if the weights of the last ``noted`` ones are
        asked for."""
        early = self.query.shape[2] - noted
        return early if self.softcap is None and self.asking is self.query and early >= MANY else 0

    def seen(self, reads: Reads) -> Tensor | None:
        """[b, 1, T, M] for a layer with a sliding window: which memory tokens are near enough; None: all are seen."""
        if self.window is None:
            return None
        distance = self.far[reads.rows][:, None, :, None] - reads.excerpts[self.layer].positions
        return distance < self.window


def fused(own: Own, reads: Sequence[Reads]) -> Tensor:
    """The attention output [B, H, T, c] of positions whose weights nobody asks for; no reads: the own tokens alone."""
    if not reads:
        return fused_attention(own.query, [(own.key, own.value, own.mask)], own.scaling)
    outputs = []
    for each in reads:
        keys, values = each.excerpts[own.layer].layers[own.layer]
        mask = own.mask if own.mask is None or len(own.mask) == 1 else own.mask[each.rows]
        sets = [(keys[None], values[None], own.seen(each)), (own.key[each.rows], own.value[each.rows], mask)]
        outputs.append(fused_attention(own.query[each.rows], sets, own.scaling))
    return torch.cat(outputs)


def merged(own: Own, reads: Sequence[Reads], sums: list[Tensor] | None = None) -> tuple[Partial, Partial]:
    """The memories' part of the attention, and all of it. If asked for, ``sums`` gets what the rows of each reads gave
    to its passages [b, H, T, P], relative to the memories' m."""
    parts = [
        each.excerpts[own.layer].attend(
            own.layer, own.asking[each.rows], own.scaling, own.seen(each), sums, own.softcap
        )
        for each in reads
    ]
    memory = Partial(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
    local = ordinary_attention(own.query, own.key, own.value, own.mask, own.scaling, softcap=own.softcap)
    return memory, merge([memory, local])


def alone(own: Own) -> Tensor:
    """The attention output [B, H, T, c] of a layer that reads no memory."""
    if own.num_fused(0):
        return fused(own, [])
    return normalise(ordinary_attention(own.query, own.key, own.value, own.mask, own.scaling, softcap=own.softcap))
