"""The words of the prompt: BM25 (Robertson and Zaragoza 2009) over token ids, with blocks for documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from memstore.errors import AttachError
from memstore.memory import Memory
from memstore.open_memory import OpenMemory
from memstore.reading.selection import BLOCK, num_blocks
from memstore.reading.selectors.interface import BlockSelector, Question

K1, B = 1.2, 0.75  # how fast a repeated token saturates, and how much a long block counts less

Ints = npt.NDArray[np.int64]


class Postings:
    """An inverted index of one memory: of every token id, the blocks that hold it, and how often they do.

    It is sorted out of the stored token ids where a memory is attached, a tenth of a second for a million of them.
    """

    def __init__(self, token_ids: npt.NDArray[np.int32]) -> None:
        blocks = np.arange(len(token_ids)) // BLOCK
        pairs, self.counts = np.unique(token_ids.astype(np.int64) << 32 | blocks, return_counts=True)
        self.blocks: Ints = pairs & 0xFFFFFFFF
        self._ids: Ints = pairs >> 32
        self.lengths = np.bincount(blocks)

    def of(self, token_id: int) -> tuple[Ints, Ints]:
        """The blocks that hold a token, and how often."""
        start, stop = np.searchsorted(self._ids, (token_id, token_id + 1))
        return self.blocks[start:stop], self.counts[start:stop]


_kept: WeakKeyDictionary[Memory, Postings] = WeakKeyDictionary()


def postings(memory: Memory) -> Postings:
    """Those of a memory with token ids, made once."""
    if memory not in _kept:
        assert memory.token_ids is not None
        _kept[memory] = Postings(memory.token_ids)
    return _kept[memory]


def rarity(blocks: int, holding: int) -> float:
    """The inverse document frequency of a token that ``holding`` of all blocks hold; never negative."""
    return float(np.log1p((blocks - holding + 0.5) / (holding + 0.5)))


class Lexical(BlockSelector):
    """A block's score is its BM25 for the asking tokens that are words. Raises AttachError for memories without token
    ids.

    Blank lines and signs are no words: they are rare enough in prose to point anywhere.
    """

    needs_queries: ClassVar[bool] = False

    def prepare(self, opened: Sequence[OpenMemory]) -> None:
        for memory in (each.memory for each in opened):
            if memory.token_ids is None:
                raise AttachError(f'Memory {memory.name!r} has no token ids to compare. Choose selector="scouting".')
            postings(memory)

    def score(self, question: Question) -> Tensor:
        if question.token_ids is None:
            raise AttachError('A prompt of embeddings has no words to compare. Choose selector="scouting".')
        rows = zip(question.token_ids, question.asks, strict=True)
        return torch.stack([self._row(question, Counter(ids[asks].tolist())) for ids, asks in rows])

    def _row(self, question: Question, asked: Counter[int]) -> Tensor:
        of_each = [postings(memory) for memory in question.memories]
        lengths = np.concatenate([each.lengths for each in of_each])
        starts = np.cumsum([0, *(num_blocks(memory.num_tokens) for memory in question.memories)])
        scores, norm = np.zeros(len(lengths)), K1 * (1 - B + B * lengths / lengths.mean())
        for token, times in asked.items():
            found = [each.of(token) for each in of_each]
            if not all(_may_be_word(*each, token) for each in zip(question.memories, found, strict=True)):
                continue
            blocks = np.concatenate([own + start for (own, _), start in zip(found, starts, strict=False)])
            counts = np.concatenate([own for _, own in found])
            weight = times * rarity(len(lengths), len(blocks))
            scores[blocks] += weight * counts * (K1 + 1) / (counts + norm[blocks])
        return torch.from_numpy(scores).to(question.asks.device, torch.float32)


def _may_be_word(memory: Memory, found: tuple[Ints, Ints], token_id: int) -> bool:
    """Whether a token has a letter or a digit, so far as a memory's text shows it."""
    blocks, ids, offsets, text = found[0], memory.token_ids, memory.offsets, memory.text
    if not len(blocks) or ids is None or offsets is None or text is None:
        return True
    start = BLOCK * int(blocks[0])
    first, stop = offsets[start + int(np.argmax(ids[start : start + BLOCK] == token_id))]
    return first == stop or any(character.isalnum() for character in text[first:stop])
