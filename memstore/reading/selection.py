"""Which stretches of a long memory are worth reading: contiguous spans around the best-scored blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 64  # tokens scored as one


WIDTH = 4  # blocks of a span, unless one place stands out
NEAR = 2  # blocks beside the best one that show the same place
CLEAR = 1.2  # times the score of any other place: then one place is read at full width


class Span(NamedTuple):
    """Tokens start … stop-1 of the memory at place ``memory`` of a row's list."""

    memory: int
    start: int
    stop: int


class Chosen(NamedTuple):
    """A block that is read for a prompt, and its score by the selector: little for one that only stands beside a better
    one. layer: the layer that reads it; None where all read the same."""

    document: str
    start_token: int
    end_token: int
    score: float
    layer: int | None


def num_blocks(num_tokens: int) -> int:
    """Blocks of a memory; the last one may be shorter."""
    return -(-num_tokens // BLOCK)


def bounds(keys: Tensor) -> Tensor:
    """[n, …] -> [blocks, 2, …]: the least and the largest number of every channel of a block's keys."""
    rows = keys.split(BLOCK)
    return torch.stack([torch.stack((block.amin(0), block.amax(0))) for block in rows])


def span_width(scores: Tensor, blocks: int) -> int:
    """How many blocks a span has: all that may be read if one place of scores [total blocks] stands out, else WIDTH.

    A fact that is found for certain is best read in its context; where several places come into question, each gets a
    span of its own.
    """
    best = int(scores.argmax())
    others = torch.cat((scores[: max(0, best - NEAR)], scores[best + NEAR + 1 :]))
    stands_out = not len(others) or bool(scores[best] > CLEAR * others.max())
    return blocks if stands_out else min(WIDTH, blocks)


def choose_spans(scores: Tensor, lengths: Sequence[int], blocks: int, width: int) -> list[Span]:
    """Grow the best blocks into spans of ``width`` blocks until ``blocks`` blocks are chosen.

    scores: [total blocks], the blocks of all memories one after another; lengths: tokens of each memory. A span stays
    inside its memory. Returns the spans of each memory in document order, touching ones joined: contiguous text reads
    better than scattered blocks, and more blocks bring distractors. The memory with the best block comes last, nearest
    to the question, so that the order in which memories were attached matters only where scores are equal.
    """
    owners = [(memory, block) for memory, n in enumerate(lengths) for block in range(num_blocks(n))]
    counts = [num_blocks(n) for n in lengths]
    chosen: set[tuple[int, int]] = set()
    found: dict[int, int] = {}  # memories by when their first block was chosen
    for best in scores.argsort(descending=True, stable=True).tolist():
        if len(chosen) >= blocks:
            break
        memory, block = owners[best]
        found.setdefault(memory, -len(found))
        if (memory, block) in chosen:
            continue
        first = max(0, min(block - (width - 1) // 2, counts[memory] - width))
        around = sorted(range(first, min(first + width, counts[memory])), key=lambda b: (abs(b - block), b))
        fresh = [(memory, b) for b in around if (memory, b) not in chosen]
        chosen.update(fresh[: blocks - len(chosen)])
    return _joined(sorted(chosen, key=lambda at: (found[at[0]], at)), lengths)


def _joined(chosen: Sequence[tuple[int, int]], lengths: Sequence[int]) -> list[Span]:
    spans: list[Span] = []
    for memory, block in chosen:
        start, stop = block * BLOCK, min((block + 1) * BLOCK, lengths[memory])
        if spans and spans[-1].memory == memory and spans[-1].stop == start:
            spans[-1] = spans[-1]._replace(stop=stop)
        else:
            spans.append(Span(memory, start, stop))
    return spans
