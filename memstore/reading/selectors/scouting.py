"""Scouting: the model's own attention says where in the memories the answer to a prompt may stand.

At every layer each prompt token scores blocks of 64 memory tokens by attention. The bounds that are kept of every
block are scored first (Quest, Tang et al. 2024, bounds keys in this way), exact keys of the best blocks only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from memstore.reading.excerpt import sink_of
from memstore.reading.selection import BLOCK, num_blocks
from memstore.reading.selectors.interface import BlockSelector, Question

QUERIES = 256  # prompt tokens scored at once
CANDIDATES = 256  # blocks whose keys are read


class Scouting(BlockSelector):
    """A block's score is the mean over layers of its share of a softmax over the sink and all blocks, each standing for
    its best key; the maximum over heads and asking tokens. Layers disagree, and their mean finds the place."""

    def score(self, question: Question) -> Tensor:
        return for_each_row(question, _scored).mean(0)


class PerLayer(BlockSelector):
    """As scouting, but every layer reads the blocks that it finds best for itself."""

    def score(self, question: Question) -> Tensor:
        return for_each_row(question, _scored)


def for_each_row(question: Question, score: Callable[[Question, dict[int, Tensor]], Tensor]) -> Tensor:
    """[layers, b, blocks] of what ``score`` makes, [layers, blocks], of a row's queries {layer: [H, t, c]}; 0 where a
    row asks nothing."""
    rows = []
    for row, asks in enumerate(question.asks):
        asking = asks.nonzero().flatten()
        queries = {layer: query[row][:, asking] for layer, query in question.queries.items()}
        nothing = asks.new_zeros(len(queries), question.num_blocks, dtype=torch.float32)
        rows.append(score(question, queries) if len(asking) else nothing)
    return torch.stack(rows, dim=1)


def _scored(question: Question, queries: dict[int, Tensor]) -> Tensor:
    """The shares of all blocks [layers, blocks]; 0 for those that are no candidates."""
    sinks = {layer: sink_scores(question, layer, query) for layer, query in queries.items()}
    first = torch.stack([shares(bound_scores(question, i, query), sinks[i]) for i, query in queries.items()])
    candidates = first.mean(0).topk(min(CANDIDATES, question.num_blocks)).indices.sort().values
    scores = torch.zeros_like(first)
    for place, (i, query) in enumerate(queries.items()):
        scores[place, candidates] = shares(key_scores(question, i, query, candidates), sinks[i])
    return scores


def bound_scores(question: Question, layer: int, query: Tensor) -> Iterator[Tensor]:
    """No key of a block can score more than these, [H, t, blocks], for queries [H, t, c], some tokens at a time.

    q k is the sum over channels of q_c k_c, and k_c lies between the least and the largest number of that channel.
    """
    least, most = _bounds(question, layer, query.device)
    for chunk in query.split(QUERIES, dim=1):
        folded = chunk.unflatten(0, (len(least), -1)).flatten(1, 2)  # heads of one group stand together: [G, H/G·t, c]
        scores = folded.clamp_min(0) @ most
        scores.baddbmm_(folded.clamp_max(0), least)
        yield scores.view(len(chunk), chunk.shape[1], -1)


def key_scores(question: Question, layer: int, query: Tensor, blocks: Tensor) -> Iterator[Tensor]:
    """The best score of a key of each of these blocks [n], ascending: [H, t, n] for queries [H, t, c], some tokens at a
    time."""
    keys = _keys(question, layer, blocks.tolist(), query.device)  # [n, 64, G, c]; a short block is filled up
    keys = keys.permute(2, 3, 0, 1).flatten(2)
    for chunk in query.split(QUERIES, dim=1):
        folded = chunk.unflatten(0, (len(keys), -1)).flatten(1, 2)
        best = (folded @ keys).unflatten(-1, (-1, BLOCK)).amax(-1)
        yield best.view(len(chunk), chunk.shape[1], -1)


def sink_scores(question: Question, layer: int, query: Tensor) -> Tensor | None:
    """Scores [H, T, n] of the tokens of the sink, where a head looks that finds nothing; None if there is none."""
    owner, length = sink_of(question.memories)
    if not length:
        return None
    keys = question.opened[owner].prefix(f"keys.{layer}").to(query.device, torch.float32).permute(1, 2, 0)
    scores: Tensor = query.unflatten(0, (len(keys), -1)).flatten(1, 2) @ keys
    return scores.view(*query.shape[:2], -1)


def shares(scores: Iterator[Tensor], sink: Tensor | None) -> Tensor:
    """[blocks]: the largest share that a block has of any query, of scores [H, t, blocks] and sink [H, T, n]."""
    best: Tensor | None = None
    start = 0
    for part in scores:
        if sink is None:
            each = part.softmax(-1)
        else:
            own = sink[:, start : start + part.shape[1]].amax(-1, keepdim=True)
            each = torch.cat((part, own), dim=-1).softmax(-1)[..., :-1]
        start += part.shape[1]
        # An index may find nothing in a block, or, without a sink, nothing at all.
        highest = each.masked_fill(part == -torch.inf, 0).amax((0, 1))
        best = highest if best is None else torch.maximum(best, highest)
    assert best is not None
    return best


def _bounds(question: Question, layer: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """[G, c, blocks] each: the least and the largest number in every channel of all blocks."""
    part = f"bounds.{layer}"
    pieces = [block for opened in question.opened for block in opened.blocks(part)]
    both = torch.cat([piece.to(device, torch.float32) for piece in pieces]).permute(1, 2, 3, 0)
    return both[0].contiguous(), both[1].contiguous()


def _keys(question: Question, layer: int, blocks: list[int], device: torch.device) -> Tensor:
    """[n, 64, G, c] float32: the keys of these blocks; a shorter one is filled up with its last key."""
    found: list[Tensor] = []
    start = 0
    for memory, opened in zip(question.memories, question.opened, strict=True):
        stop = start + num_blocks(memory.num_tokens)
        for block in (block - start for block in blocks if start <= block < stop):
            rows = opened.rows(f"keys.{layer}", BLOCK * block, min(BLOCK * (block + 1), memory.num_tokens))
            rows = rows.to(device, torch.float32)
            missing = BLOCK - len(rows)
            found.append(torch.cat((rows, rows[-1:].expand(missing, -1, -1))) if missing else rows)
        start = stop
    return torch.stack(found)
