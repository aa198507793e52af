"""One softmax over what a layer reads of memories and over the model's own tokens.

Where somebody asks for the weights, and where positions are few, the parts are merged; else one kernel reads them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from memstore.attention import Partial, fused_attention, merge, normalise, ordinary_attention, rows_of
from memstore.reading.reads import Reads

FUSED_FROM = 32  # positions; of fewer, merging costs less than to put all keys side by side

# What is noted of the last positions: what the rows of each reads gave to its passages [b, H, T', P], relative to the
# memories' m, then the memories' part of the attention and all of it.
Note = Callable[[list[Tensor], Partial, Partial], None]


class Own(NamedTuple):
    """What a pass over the model's own tokens gives to one of its layers.

    query [B, H, T, c] and key and value [B, G, n, c] with their mask, as for
    :func:`memstore.attention.ordinary_attention`. window: of a sliding layer, how far it looks back. asking: the query
    as it asks the memories; None: query itself. far [B, T]: where it stands as seen from the memories. near: how many
    of the first positions ask the memories by query itself in any case.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    scaling: float
    softcap: float | None
    window: int | None
    asking: Tensor | None
    far: Tensor
    near: int

    def between(self, start: int, stop: int) -> Own:
        """The positions from ``start`` to ``stop`` (excluded), which see the same keys."""
        return self._replace(
            query=self.query[:, :, start:stop],
            mask=rows_of(self.mask, start, stop),
            asking=None if self.asking is None else self.asking[:, :, start:stop],
            far=self.far[:, start:stop],
            near=max(0, min(self.near, stop) - start),
        )

    def num_fused(self, noted: int) -> int:
        """How many of the first positions one kernel reads, if the weights of the last ``noted`` ones are asked for:
        it neither caps scores nor asks the memories by another query."""
        early = self.query.shape[2] - noted
        early = early if self.asking is None else min(early, self.near)
        return early if self.softcap is None and early >= FUSED_FROM else 0

    def seen(self, reads: Reads) -> Tensor | None:
        """[b, 1, T, M] for a layer with a sliding window: which memory tokens are near enough; None: all are seen."""
        if self.window is None:
            return None
        distance = self.far[reads.rows][:, None, :, None] - reads.excerpts[self.layer].positions
        return distance < self.window


def together(own: Own, reads: Sequence[Reads], noted: int, note: Note) -> Tensor:
    """The attention output [B, H, T, c]; ``note`` is called if the weights of the last ``noted`` positions, 1 or more,
    are asked for."""
    length, early = own.query.shape[2], own.num_fused(noted)
    outputs = [_fused(own.between(0, early), reads)] if early else []
    if early < length:
        sums: list[Tensor] | None = [] if noted else None
        memory, total = _merged(own.between(early, length), reads, sums)
        if sums is not None:
            note([each[:, :, -noted:] for each in sums], memory, total)
        outputs.append(normalise(total))
    return torch.cat(outputs, dim=2)


def alone(own: Own) -> Tensor:
    """The attention output [B, H, T, c] of a layer that reads no memory."""
    if own.num_fused(0):
        return fused_attention(own.query, [(own.key, own.value, own.mask)], own.scaling)
    return normalise(ordinary_attention(own.query, own.key, own.value, own.mask, own.scaling, softcap=own.softcap))


def _fused(own: Own, reads: Sequence[Reads]) -> Tensor:
    outputs = []
    for each in reads:
        keys, values = each.excerpts[own.layer].layers[own.layer]
        mask = own.mask if own.mask is None or len(own.mask) == 1 else own.mask[each.rows]
        sets = [(keys[None], values[None], own.seen(each)), (own.key[each.rows], own.value[each.rows], mask)]
        outputs.append(fused_attention(own.query[each.rows], sets, own.scaling))
    return torch.cat(outputs)


def _merged(own: Own, reads: Sequence[Reads], sums: list[Tensor] | None) -> tuple[Partial, Partial]:
    """The memories' part of the attention, and all of it; ``sums`` gets what :data:`Note` tells of."""
    asking = own.query if own.asking is None else own.asking
    parts = [
        each.excerpts[own.layer].attend(own.layer, asking[each.rows], own.scaling, own.seen(each), sums, own.softcap)
        for each in reads
    ]
    memory = Partial(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))
    local = ordinary_attention(own.query, own.key, own.value, own.mask, own.scaling, softcap=own.softcap)
    return memory, merge([memory, local])
