"""Scouting: the model's own attention says where in the memories the answer to a prompt may stand.

At some layers each prompt token scores blocks of 64 memory tokens by attention. The bounds that are kept of every
block are scored first (Quest, Tang et al. 2024, bounds keys in this way), exact keys of the best blocks only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from memstore.open_memory import OpenMemory
from memstore.reading.excerpt import sink_of
from memstore.reading.selection import BLOCK, num_blocks
from memstore.reading.selectors.interface import BlockSelector, Question

SCORES = 1 << 20  # scores held at once, which the cache of a core holds
CANDIDATES = 32  # blocks whose keys are read: the best by their bounds, and as many that something else speaks for
LAYERS = 16  # that score at most, the last one among them: more find the same places
KEPT_BYTES = 1 << 28  # of bounds in float32, of all open memories: SmolLM2's of 262,144 tokens take 0.7 of it
LOWEST = -1e30  # the score of a sink where there is none: finite, so that a query that finds nothing gives no NaN


_keeping = threading.Lock()
_kept: WeakKeyDictionary[OpenMemory, dict[tuple[int, torch.device], Tensor]] = WeakKeyDictionary()


class Scouting(BlockSelector):
    """A block's score is the mean over layers, up to LAYERS, of its share of a softmax over the sink and all blocks,
    each standing for its best key; the maximum over heads and asking tokens. Layers disagree, and their mean finds the
    place."""

    def score(self, question: Question, prior: Tensor | None = None) -> Tensor:
        """prior: [b, blocks], scores of blocks that are worth a look whatever their bounds say. Bounds are far from
        what they bound, and lose many a block to which one head of a few layers would point."""
        every = sorted(question.queries)
        step = -(-len(every) // LAYERS)
        some = every[(len(every) - 1) % step :: step]
        asked = replace(question, queries={layer: question.queries[layer] for layer in some})
        return for_each_row(asked, partial(_scored, prior=prior)).mean(0)


class PerLayer(BlockSelector):
    """As scouting, but every layer reads the blocks that it finds best for itself."""

    def score(self, question: Question) -> Tensor:
        return for_each_row(question, _scored)


def for_each_row(question: Question, score: Callable[[Question, int, dict[int, Tensor]], Tensor]) -> Tensor:
    """[layers, b, blocks] of what ``score`` makes, [layers, blocks], of a row's number and queries {layer: [H, t, c]};
    0 where a row asks nothing."""
    rows = []
    for row, asks in enumerate(question.asks):
        asking = asks.nonzero().flatten()
        queries = {layer: query[row][:, asking] for layer, query in question.queries.items()}
        nothing = asks.new_zeros(len(queries), question.num_blocks, dtype=torch.float32)
        rows.append(score(question, row, queries) if len(asking) else nothing)
    return torch.stack(rows, dim=1)


def _scored(question: Question, row: int, queries: dict[int, Tensor], prior: Tensor | None = None) -> Tensor:
    """The shares of all blocks [layers, blocks]; 0 for those that are no candidates."""
    sinks = {layer: sink_scores(question, layer, query) for layer, query in queries.items()}
    first = torch.stack([shares(bound_scores(question, i, query), sinks[i]) for i, query in queries.items()])
    few = min(CANDIDATES, question.num_blocks)
    best = [scores.topk(few).indices for scores in (first.mean(0), *([] if prior is None else [prior[row]]))]
    candidates = torch.cat(best).unique()
    scores = torch.zeros_like(first)
    for place, (i, query) in enumerate(queries.items()):
        scores[place, candidates] = shares(key_scores(question, i, query, candidates), sinks[i])
    return scores


def bound_scores(question: Question, layer: int, query: Tensor) -> Iterator[Tensor]:
    """No key of a block can score more than these, for queries [H, t, c], some tokens at a time: [H, t, blocks + 1],
    with room for the sink.

    q k is the sum over channels of q_c k_c, and k_c lies between the least and the largest number of that channel; of
    coded keys by up to the rounding of both beyond.
    """
    bounds = _bounds(question, layer, query.device)
    for chunk in _chunks(query, bounds.shape[1]):
        folded = _by_group(chunk, len(bounds))
        scores = torch.cat((folded.clamp_max(0), folded.clamp_min(0)), dim=-1) @ bounds.transpose(1, 2)
        yield scores.view(len(chunk), chunk.shape[1], -1)


def key_scores(question: Question, layer: int, query: Tensor, blocks: Tensor) -> Iterator[Tensor]:
    """The best score of a key of each of these blocks [n], ascending, for queries [H, t, c], some tokens at a time:
    [H, t, n + 1], with room for the sink."""
    keys = _keys(question, layer, blocks.tolist(), query.device)  # [G, 64 n, c]
    for chunk in _chunks(query, keys.shape[1]):
        scores = _by_group(chunk, len(keys)) @ keys.transpose(1, 2)
        best = scores.unflatten(-1, (-1, BLOCK)).amax(-1).view(len(chunk), chunk.shape[1], -1)
        yield torch.nn.functional.pad(best, (0, 1))


def sink_scores(question: Question, layer: int, query: Tensor) -> Tensor:
    """[H, T]: the best score of a token of the sink, where a head looks that finds nothing."""
    owner, length = sink_of(question.memories)
    if not length:
        return query.new_full(query.shape[:2], LOWEST)
    keys = question.opened[owner].prefix(f"keys.{layer}").to(query.device, torch.float32).permute(1, 2, 0)
    return (_by_group(query, len(keys)) @ keys).amax(-1).view(query.shape[:2])


def shares(scores: Iterator[Tensor], sink: Tensor) -> Tensor:
    """[blocks]: the largest share that a block has of any query, of scores [H, t, blocks + 1], whose last one is made
    that of the sink [H, T]. A block in which an index found nothing, -inf, has none."""
    best: list[Tensor] = []
    start = 0
    for part in scores:
        part[..., -1] = sink[:, start : start + part.shape[1]]
        start += part.shape[1]
        best.append(part.softmax(-1).flatten(0, 1).amax(0)[:-1])
    return torch.stack(best).amax(0)


def _chunks(query: Tensor, n: int) -> Sequence[Tensor]:
    """Queries [H, T, c] in pieces of some tokens, so that few scores of n keys are held at once."""
    chunks: Sequence[Tensor] = query.split(max(1, SCORES // (len(query) * n)), dim=1)
    return chunks


def _by_group(query: Tensor, groups: int) -> Tensor:
    """[H, t, c] -> [G, H/G · t, c]: the heads of one group stand together."""
    grouped: Tensor = query.unflatten(0, (groups, -1)).flatten(1, 2)
    return grouped


def _bounds(question: Question, layer: int, device: torch.device) -> Tensor:
    """[G, blocks + 1, 2 c] float32: the least and then the largest number of every channel; the last row is zero."""
    each = [_bounds_of(opened, layer, device) for opened in question.opened]
    return each[0] if len(each) == 1 else torch.cat([*(some[:, :-1] for some in each[:-1]), each[-1]], dim=1)


def _bounds_of(opened: OpenMemory, layer: int, device: torch.device) -> Tensor:
    """Those of one memory, which are kept as long as it is used, so far as there is room."""
    with _keeping:
        kept = _kept.setdefault(opened, {})
        if (layer, device) in kept:
            return kept[layer, device]
    stored = torch.cat(opened.blocks(f"bounds.{layer}"))
    n, _, groups, width = stored.shape
    bounds = torch.zeros(groups, n + 1, 2, width, device=device)
    bounds[:, :n] = stored.permute(2, 0, 1, 3)  # [n, 2, G, c]
    with _keeping:
        if sum(some.nbytes for layers in _kept.values() for some in layers.values()) + bounds.nbytes <= KEPT_BYTES:
            kept[layer, device] = bounds.flatten(2)
    return bounds.flatten(2)


def _keys(question: Question, layer: int, blocks: list[int], device: torch.device) -> Tensor:
    """[G, 64 n, c] float32: the keys of these blocks, ascending; a short one is filled up with its last key."""
    found: list[Tensor] = []
    start = 0
    for memory, opened in zip(question.memories, question.opened, strict=True):
        stop, n = start + num_blocks(memory.num_tokens), memory.num_tokens
        own = [BLOCK * (block - start) for block in blocks if start <= block < stop]
        if own:
            rows = opened.gathered(f"keys.{layer}", [(first, min(first + BLOCK, n)) for first in own])
            missing = max(0, own[-1] + BLOCK - n)
            found += [rows, rows[-1:].expand(missing, -1, -1)] if missing else [rows]
        start = stop
    return torch.cat(found).to(device).transpose(0, 1).float()
