"""What a selector of blocks is, and what it may know of a prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from memstore.memory import Memory
from memstore.open_memory import OpenMemory
from memstore.reading.selection import num_blocks

if TYPE_CHECKING:
    from memstore.families import DecoderOnlyAdapter


@dataclass(frozen=True)
class Question:
    """What some rows of a batch, which have the same memories, ask of them.

    layers: those that read memories, ascending. asks: [b, T] boolean, the tokens that count: no padding, nothing of the
    chat template, and of a long prompt the last ones. token_ids: [b, T], None where the model was given embeddings.
    queries: {layer: [b, H, T, c]} float32, times the attention's scaling, as they ask keys that are not rotated; empty
    for a selector that does not need them.
    """

    adapter: DecoderOnlyAdapter
    memories: Sequence[Memory]
    opened: Sequence[OpenMemory]
    layers: Sequence[int]
    asks: Tensor
    token_ids: Tensor | None
    queries: Mapping[int, Tensor]

    @property
    def num_blocks(self) -> int:
        """Blocks of all memories together."""
        return sum(num_blocks(memory.num_tokens) for memory in self.memories)


class BlockSelector(ABC):
    """Scores the blocks of memories that are too long to be read whole. One object may serve several attachments."""

    needs_queries: ClassVar[bool] = True
    """Whether it looks at what the model's attention asks, which takes a pass over the prompt."""

    def prepare(self, opened: Sequence[OpenMemory]) -> None:  # noqa: B027  (most need nothing of it)
        """Make ready for these memories, of which some may be known: when they are attached, so that what is wrong with
        one is told there."""

    @abstractmethod
    def score(self, question: Question) -> Tensor:
        """Scores, at least 0, of the blocks of all memories one after another, [b, blocks]; or [layers, b, blocks]
        where every layer that reads is to have blocks of its own.

        The best blocks are read with their surroundings. A score of 0 is that of a block which nothing speaks for.
        """
