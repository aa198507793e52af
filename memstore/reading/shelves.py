"""The memories that the rows of a batch read. Each is passed over once a step, for all rows that have it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from memstore.attention import Partial, Scoring, merge, read_all, read_rows
from memstore.bfloat16 import read_bfloat16, suits
from memstore.interfaces import VectorIndex
from memstore.memory import Memory
from memstore.vectors import Rows


@dataclass(frozen=True, eq=False)
class Source:
    """One memory: its encoder states in blocks [n_i, d], and what searches them; None if nothing has to."""

    memory: Memory
    blocks: Sequence[Tensor]
    index: VectorIndex | None = None


class Shelf:
    """The sources that some rows read, in one order of token ids. top_k: rows each head reads, None for all."""

    def __init__(self, sources: Sequence[Source], rows: Sequence[int], top_k: int | None) -> None:
        self.sources, self.rows, self.top_k = sources, rows, top_k
        self.gather = Rows([block for source in sources for block in source.blocks])  # rows [j, d] of ids [j]
        self.offsets = [0]
        for source in sources:
            self.offsets.append(self.offsets[-1] + source.memory.num_tokens)

    def best(self, results: Mapping[Source, tuple[Tensor, Tensor]]) -> Tensor:
        """Ids [m, k] of the best rows over all sources, of each of which ``results`` has scores and ids [m, k]."""
        found = [results[source] for source in self.sources]
        if len(found) == 1:
            return found[0][1]
        pairs = zip(found, self.offsets, strict=False)
        ids = torch.cat([torch.where(ids < 0, ids, ids + offset) for (_, ids), offset in pairs], dim=1)
        scores = torch.cat([scores for scores, _ in found], dim=1)
        return ids.gather(1, scores.topk(min(self.top_k or 0, scores.shape[1])).indices)


class Looked(NamedTuple):
    """What the rows of one shelf asked in one layer, and were given. [b, H, T, …] for their b batch rows.

    ids: [b, H, T, k] of the rows that were read, -1 for an empty slot; None if all were.
    """

    shelf: Shelf
    batch_rows: list[int]
    queries: Tensor
    scoring: Scoring
    ids: Tensor | None


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

    def read(self, queries: Tensor, scoring: Scoring) -> tuple[Partial, list[Looked]]:
        """Attend from scaled queries [B, H, T, d] to each row's memories; scoring.bias [B, H, T, 1] or None."""
        each = len(queries) // self.num_rows
        looked = []
        for shelf in self.shelves:
            rows = [row * each + i for row in shelf.rows for i in range(each)]
            some = scoring if scoring.bias is None else scoring._replace(bias=_take(scoring.bias, rows))
            looked.append(Looked(shelf, rows, _take(queries, rows), some, None))
        parts: list[list[Partial]] = [[] for _ in self.shelves]
        found: list[dict[Source, tuple[Tensor, Tensor]]] = [{} for _ in self.shelves]
        for source in self.sources.values():
            readers = [i for i, shelf in enumerate(self.shelves) if source in shelf.sources]
            whole = [i for i in readers if self.shelves[i].top_k is None]
            for i, part in zip(whole, _read_whole(source, [looked[i] for i in whole]), strict=True):
                parts[i].append(part)
            asking = [i for i in readers if self.shelves[i].top_k is not None]
            for i, result in zip(asking, _search(source, [looked[i] for i in asking]), strict=True):
                found[i][source] = result
        for i, (shelf, asked) in enumerate(zip(self.shelves, looked, strict=True)):
            shape = asked.queries.shape[:3]
            if shelf.top_k is not None:
                ids = shelf.best(found[i])
                parts[i] = [read_rows(asked.queries.flatten(0, 2), shelf.gather, ids, _flat(asked.scoring))]
                looked[i] = asked._replace(ids=ids.unflatten(0, shape))
            part = parts[i][0] if len(parts[i]) == 1 else merge(parts[i])
            parts[i] = [Partial(*(tensor.unflatten(0, shape) for tensor in part))]
        return _in_order([part for (part,) in parts], [asked.batch_rows for asked in looked]), looked


def _num_tokens(memories: Sequence[Memory]) -> int:
    return sum(memory.num_tokens for memory in memories)


def _take(tensor: Tensor, rows: list[int]) -> Tensor:
    return tensor if rows == list(range(len(tensor))) else tensor[rows]


def _flat(scoring: Scoring) -> Scoring:
    return scoring if scoring.bias is None else scoring._replace(bias=scoring.bias.flatten(0, 2))


def _read_whole(source: Source, asking: Sequence[Looked]) -> list[Partial]:
    """One pass over the source for all shelves that read it whole."""
    if not asking:
        return []
    flat = [asked.queries.flatten(0, 2) for asked in asking]
    biases = [_flat(asked.scoring).bias for asked in asking]
    bias = None if biases[0] is None else torch.cat([bias for bias in biases if bias is not None])
    queries, scoring = torch.cat(flat), Scoring(bias, asking[0].scoring.softcap)
    fast = suits(queries, source.blocks, scoring)
    part = read_bfloat16(queries, source.blocks) if fast else read_all(queries, source.blocks, scoring)
    pieces = [tensor.split([len(queries) for queries in flat]) for tensor in part]
    return [Partial(*each) for each in zip(*pieces, strict=True)]


def _search(source: Source, asking: Sequence[Looked]) -> list[tuple[Tensor, Tensor]]:
    """One search of the source for all shelves that read the best of it."""
    if not asking or source.index is None:
        return []
    flat = [asked.queries.flatten(0, 2) for asked in asking]
    scores, ids = source.index.search(torch.cat(flat), asking[0].shelf.top_k or 0)
    sizes = [len(queries) for queries in flat]
    return list(zip(scores.split(sizes), ids.split(sizes), strict=True))


def _in_order(parts: Sequence[Partial], batch_rows: Sequence[list[int]]) -> Partial:
    """The parts of some batch rows each as one of the whole batch."""
    if len(parts) == 1:
        return parts[0]
    order = torch.tensor([row for rows in batch_rows for row in rows]).argsort()
    return Partial(*(torch.cat(tensors)[order.to(tensors[0].device)] for tensors in zip(*parts, strict=True)))
