"""The memories that the rows of a batch read. Each is passed over once a step, for all rows that have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from memstore.attention import Partial, Scoring, merge, read_all, read_rows, shifted_exp
from memstore.bfloat16 import read_bfloat16, suits
from memstore.interfaces import VectorIndex
from memstore.memory import Memory
from memstore.provenance.ledger import Seen
from memstore.provenance.passages import PASSAGE, Layout, Run, Tally, num_passages
from memstore.provenance.tail import Outline, Tail
from memstore.vectors import Rows


@dataclass(frozen=True, eq=False)
class Source:
    """One memory: its encoder states in blocks [n_i, d], and what searches them; None if nothing has to."""

    memory: Memory
    blocks: Sequence[Tensor]
    index: VectorIndex | None = None

    @cached_property
    def outline(self) -> Outline:
        """Of its states: read in full once, when first asked for."""
        return Outline(self.blocks)


class Shelf:
    """The sources that some rows read, in one order of token ids. top_k: rows each head reads, None for all."""

    def __init__(self, sources: Sequence[Source], rows: Sequence[int], top_k: int | None) -> None:
        self.sources, self.rows, self.top_k = sources, rows, top_k
        self.gather = Rows([block for source in sources for block in source.blocks])  # rows [j, d] of ids [j]
        self.offsets = [0]
        for source in sources:
            self.offsets.append(self.offsets[-1] + source.memory.num_tokens)

    @cached_property
    def layout(self) -> Layout:
        """The passages of its documents, one after another."""
        runs = [Run(i, 0, num_passages(source.memory.num_tokens)) for i, source in enumerate(self.sources)]
        return Layout([source.memory for source in self.sources], runs)

    def passages_of(self, ids: Tensor) -> Tensor:
        """The places in the layout of the passages of token ids."""
        if len(self.sources) == 1:
            return ids // PASSAGE
        offsets = torch.tensor(self.offsets, device=ids.device)
        firsts = torch.tensor([0, *(run.size for run in self.layout.runs)], device=ids.device).cumsum(0)
        owners = torch.searchsorted(offsets, ids, right=True) - 1
        return firsts[owners] + (ids - offsets[owners]) // PASSAGE

    def best(self, results: Mapping[Source, Found]) -> tuple[Tensor, Tensor]:
        """Scores and ids [m, k] of the best rows over all sources."""
        found = [results[source] for source in self.sources]
        if len(found) == 1:
            return found[0].scores, found[0].ids
        pairs = zip(found, self.offsets, strict=False)
        ids = torch.cat([torch.where(each.ids < 0, each.ids, each.ids + offset) for each, offset in pairs], dim=1)
        best = torch.cat([each.scores for each in found], dim=1).topk(min(self.top_k or 0, ids.shape[1]))
        return best.values, ids.gather(1, best.indices)


class Found(NamedTuple):
    """What a search of one source found: scores and ids [m, k]; log_sum: [m] over all its keys, None if not known."""

    scores: Tensor
    ids: Tensor
    log_sum: Tensor | None


class Asked(NamedTuple):
    """What the b batch rows of one shelf ask in one layer: queries [b, H, T, d]."""

    shelf: Shelf
    rows: list[int]
    queries: Tensor
    scoring: Scoring
    noted: int  # of the last positions: what they read is of interest

    @property
    def flat(self) -> Tensor:
        return self.queries.flatten(0, 2)

    @property
    def shape(self) -> tuple[int, int, int]:
        b, heads, length, _ = self.queries.shape
        return b, heads, length

    def last(self, tensor: Tensor) -> Tensor:
        """[b * H * T, …] -> [b, H, T', …]: the positions that are noted."""
        return tensor.view(*self.shape, *tensor.shape[1:])[:, :, -self.noted :]


class Shelves:
    """All rows' memories. Rows with the same memories share a shelf."""

    def __init__(self, top_k: int | None, source: Callable[[Memory, bool], Source]) -> None:
        """``source(memory, searched)`` opens a memory; top_k: None for all."""
        self.top_k, self._source = top_k, source
        self.num_rows = 0
        self.sources: dict[int, Source] = {}
        self.shelves: list[Shelf] = []

    def arrange(self, rows: Sequence[Sequence[Memory]]) -> None:
        """Let each row read these memories from now on. If one cannot be opened, nothing has changed.

        A memory is opened when it is new, and again when it has to be searched for the first time, which needs no more
        than ``top_k`` tokens of those that were read whole. All others stay as they are.
        """
        lists: dict[tuple[int, ...], list[int]] = {}
        for i, row in enumerate(rows):
            lists.setdefault(tuple(id(memory) for memory in row), []).append(i)
        limits = [
            self.top_k if self.top_k is not None and self.top_k < _num_tokens(rows[members[0]]) else None
            for members in lists.values()
        ]
        searched = {key for keys, limit in zip(lists, limits, strict=True) if limit is not None for key in keys}
        sources: dict[int, Source] = {}
        for key, memory in {id(memory): memory for row in rows for memory in row}.items():
            known = self.sources.get(key)
            fits = known is not None and (key not in searched or known.index is not None)
            sources[key] = known if known is not None and fits else self._source(memory, key in searched)
        self.num_rows, self.sources = len(rows), sources
        self.shelves = [
            Shelf([sources[key] for key in keys], members, limit)
            for (keys, members), limit in zip(lists.items(), limits, strict=True)
        ]

    @property
    def num_passages(self) -> int:
        """Of the longest shelf."""
        return max(shelf.layout.size for shelf in self.shelves)

    def read(self, queries: Tensor, scoring: Scoring, noted: int = 0) -> tuple[Partial, list[Seen]]:
        """Attend from scaled queries [B, H, T, d] to each row's memories; scoring.bias [B, H, T, 1] or None.

        What the last ``noted`` positions read is returned too, for each shelf.
        """
        each = len(queries) // self.num_rows
        asked = []
        for shelf in self.shelves:
            rows = [row * each + i for row in shelf.rows for i in range(each)]
            some = scoring if scoring.bias is None else scoring._replace(bias=_take(scoring.bias, rows))
            asked.append(Asked(shelf, rows, _take(queries, rows), some, noted))
        whole: list[dict[Source, tuple[Partial, Tensor | None]]] = [{} for _ in self.shelves]
        found: list[dict[Source, Found]] = [{} for _ in self.shelves]
        for source in self.sources.values():
            readers = [i for i, shelf in enumerate(self.shelves) if source in shelf.sources]
            reading = [i for i in readers if self.shelves[i].top_k is None]
            for i, part in zip(reading, _read_whole(source, [asked[i] for i in reading]), strict=True):
                whole[i][source] = part
            asking = [i for i in readers if self.shelves[i].top_k is not None]
            for i, result in zip(asking, _search(source, [asked[i] for i in asking]), strict=True):
                found[i][source] = result
        read = [
            _joined(one, whole[i]) if one.shelf.top_k is None else _read_best(one, found[i])
            for i, one in enumerate(asked)
        ]
        seen = [each for _, each in read if each is not None]
        return _in_order([part for part, _ in read], [one.rows for one in asked]), seen


def _num_tokens(memories: Sequence[Memory]) -> int:
    return sum(memory.num_tokens for memory in memories)


def _take(tensor: Tensor, rows: list[int]) -> Tensor:
    return tensor if rows == list(range(len(tensor))) else tensor[rows]


def _flat(scoring: Scoring) -> Scoring:
    return scoring if scoring.bias is None else scoring._replace(bias=scoring.bias.flatten(0, 2))


def _read_whole(source: Source, asking: Sequence[Asked]) -> list[tuple[Partial, Tensor | None]]:
    """One pass over the source for all shelves that read it whole; with the sums [b, H, T', P] of its passages."""
    if not asking:
        return []
    biases = [_flat(asked.scoring).bias for asked in asking]
    bias = None if biases[0] is None else torch.cat([bias for bias in biases if bias is not None])
    queries, scoring = torch.cat([asked.flat for asked in asking]), Scoring(bias, asking[0].scoring.softcap)
    tally = _tally(asking, queries.device) if asking[0].noted else None
    if suits(queries, source.blocks, scoring):
        part = read_bfloat16(queries, source.blocks, tally)
    else:
        part = read_all(queries, source.blocks, scoring, tally)
    pieces = [tensor.split([len(asked.flat) for asked in asking]) for tensor in part]
    parts = [Partial(*each) for each in zip(*pieces, strict=True)]
    if tally is None:
        return [(part, None) for part in parts]
    shapes = [(*asked.shape[:2], asked.noted) for asked in asking]
    sums = tally.sums.split([b * h * t for b, h, t in shapes])
    return [(part, each.unflatten(0, shape)) for part, each, shape in zip(parts, sums, shapes, strict=True)]


def _tally(asking: Sequence[Asked], device: torch.device) -> Tally:
    """Of the positions that are noted."""
    if asking[0].noted >= asking[0].shape[2]:
        return Tally()
    places = torch.arange(sum(len(asked.flat) for asked in asking), device=device)
    counts = [len(asked.flat) for asked in asking]
    return Tally(
        torch.cat([asked.last(own).flatten() for asked, own in zip(asking, places.split(counts), strict=True)])
    )


def _joined(asked: Asked, read: Mapping[Source, tuple[Partial, Tensor | None]]) -> tuple[Partial, Seen | None]:
    """The parts of all sources of a shelf that is read whole as one."""
    parts = [read[source][0] for source in asked.shelf.sources]
    part = parts[0] if len(parts) == 1 else merge(parts)
    sums = [
        tensor if len(parts) == 1 else tensor * asked.last(shifted_exp(each.m, part.m).detach())
        for each, tensor in (read[source] for source in asked.shelf.sources)
        if tensor is not None
    ]
    if not sums:
        return _shaped(asked, part), None
    total = sums[0] if len(sums) == 1 else torch.cat(sums, dim=-1)
    return _shaped(asked, part), Seen(asked.shelf.layout, asked.rows, total, "whole")


def _search(source: Source, asking: Sequence[Asked]) -> list[Found]:
    """One search of the source for all shelves that read the best of it."""
    if not asking or source.index is None:
        return []
    queries, k = torch.cat([asked.flat for asked in asking]), asking[0].shelf.top_k or 0
    if asking[0].noted:
        scores, ids, log_sum = source.index.search_and_sum(queries, k)
    else:
        (scores, ids), log_sum = source.index.search(queries, k), None
    sizes = [len(asked.flat) for asked in asking]
    sums = [None] * len(sizes) if log_sum is None else log_sum.split(sizes)
    return [Found(*each) for each in zip(scores.split(sizes), ids.split(sizes), sums, strict=True)]


def _read_best(asked: Asked, found: Mapping[Source, Found]) -> tuple[Partial, Seen | None]:
    """Attend to the best rows over all sources."""
    shelf, scoring = asked.shelf, _flat(asked.scoring)
    scores, ids = shelf.best(found)
    weights: list[Tensor] = []
    part = read_rows(asked.flat, shelf.gather, ids, scoring, weights.append if asked.noted else None)
    if not asked.noted:
        return _shaped(asked, part), None
    with torch.no_grad():
        given, chosen = asked.last(torch.cat(weights)), asked.last(ids)
        sums = given.new_zeros(*given.shape[:3], shelf.layout.size)
        sums.scatter_add_(-1, shelf.passages_of(chosen.clamp_min(0)), given)
        return _shaped(asked, part), Seen(shelf.layout, asked.rows, sums, _tail(asked, part, scores, found))


def _tail(asked: Asked, part: Partial, scores: Tensor, found: Mapping[Source, Found]) -> Tail:
    """What is known beside the best rows; scores [b * H * T, k]: theirs in the index."""
    log_sums = [each.log_sum for each in found.values() if each.log_sum is not None]
    if len(log_sums) == len(found) and asked.scoring.softcap is None:  # an index knows of no soft cap
        log_read = torch.logsumexp(scores, dim=1)
        log_sum = log_sums[0] if len(found) == 1 else torch.logsumexp(torch.stack(log_sums), dim=0)
        return Tail(asked.last(log_read), asked.last(log_sum), [], asked.queries, asked.scoring)
    log_read, noted = (part.m + part.l.log()).squeeze(1), slice(-asked.noted, None)
    bias = asked.scoring.bias
    scoring = asked.scoring if bias is None else asked.scoring._replace(bias=bias[:, :, noted])
    outlines = [source.outline for source in asked.shelf.sources]
    return Tail(asked.last(log_read), None, outlines, asked.queries[:, :, noted], scoring)


def _shaped(asked: Asked, part: Partial) -> Partial:
    return Partial(*(tensor.unflatten(0, asked.shape) for tensor in part))


def _in_order(parts: Sequence[Partial], batch_rows: Sequence[list[int]]) -> Partial:
    """The parts of some batch rows each as one of the whole batch."""
    if len(parts) == 1:
        return parts[0]
    order = torch.tensor([row for rows in batch_rows for row in rows]).argsort()
    return Partial(*(torch.cat(tensors)[order.to(tensors[0].device)] for tensors in zip(*parts, strict=True)))
