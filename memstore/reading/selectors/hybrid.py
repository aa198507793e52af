"""Attention and words together."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from memstore.open_memory import OpenMemory
from memstore.reading.selectors.by_index import ByIndex
from memstore.reading.selectors.interface import BlockSelector, Question
from memstore.reading.selectors.lexical import Lexical
from memstore.reading.selectors.scouting import Scouting

WORDS = 2.0  # what the best block by words weighs beside the best one by attention, which disagrees more often


class Hybrid(BlockSelector):
    """The sum of what attention and BM25 find, each relative to its best block; scouting also looks at the blocks that
    words speak for. Where there are no token ids, attention alone. index: what finds blocks by attention, None for
    scouting."""

    def __init__(self, index: ByIndex | None = None) -> None:
        self._scouting, self._index, self._lexical = Scouting(), index, Lexical()

    def prepare(self, opened: Sequence[OpenMemory]) -> None:
        if self._index is not None:
            self._index.prepare(opened)
        self._lexical.prepare([each for each in opened if each.memory.manifest.has_ids])

    def score(self, question: Question) -> Tensor:
        if question.token_ids is None or not all(memory.manifest.has_ids for memory in question.memories):
            return self._attention(question)
        words = self._lexical.score(question)
        return _relative(self._attention(question, words)) + WORDS * _relative(words)

    def _attention(self, question: Question, prior: Tensor | None = None) -> Tensor:
        return self._scouting.score(question, prior) if self._index is None else self._index.score(question)


def _relative(scores: Tensor) -> Tensor:
    return scores / scores.amax(-1, keepdim=True).clamp_min(1e-30)
