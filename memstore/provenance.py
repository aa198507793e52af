"""What was read: for each generated token the passages that held its attention."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    from memstore.memory import Memory

PASSAGE = 64  # tokens reported as one
MOST = 8  # passages kept of one step and layer


class Reading(NamedTuple):
    """One passage that one layer attended to while it made one token; characters are None for a memory without text.

    ``mass`` is the share of that layer's attention, mean over heads, 0 to 1; what the passages of a step and layer do
    not add up to went to the prompt, to the generated tokens, or to passages too small to be kept.
    """

    step: int
    row: int
    layer: int
    document: str
    start_token: int
    end_token: int
    start_char: int | None
    end_char: int | None
    mass: float


def readings(step: int, row: int, layer: int, memory: Memory, token_ids: Tensor, masses: Tensor) -> Iterable[Reading]:
    """The heaviest passages of one memory. token_ids [j] ascending and masses [j]: what each token weighed."""
    passages = token_ids // PASSAGE
    total = masses.new_zeros(-(-memory.num_tokens // PASSAGE)).index_add_(0, passages, masses)
    best = total.topk(min(MOST, len(total)))
    for mass, passage in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        if mass > 0:
            start, end = passage * PASSAGE, min((passage + 1) * PASSAGE, memory.num_tokens)
            chars = (None, None) if memory.offsets is None else memory.chars(start, end)
            yield Reading(step, row, layer, memory.name, start, end, chars[0], chars[1], mass)


class Passage(NamedTuple):
    """A passage and its share of all attention, as a mean over steps, rows and layers, 0 to 1."""

    document: str
    start_token: int
    end_token: int
    share: float


def heaviest(readings: Iterable[Reading], most: int) -> list[Passage]:
    """The passages that held most attention while a text was generated, heaviest first."""
    masses: dict[tuple[str, int, int], float] = defaultdict(float)
    moments = set()
    for reading in readings:
        masses[reading.document, reading.start_token, reading.end_token] += reading.mass
        moments.add((reading.step, reading.row, reading.layer))
    ranked = sorted(masses.items(), key=lambda item: -item[1])[:most]
    return [Passage(*place, mass / len(moments)) for place, mass in ranked]
