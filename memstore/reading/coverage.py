"""Whether memories speak of what is asked at all: how much of a question stands together at one place of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from memstore.errors import AttachError
from memstore.memory import Memory
from memstore.reading.selection import num_blocks
from memstore.reading.selectors.lexical import postings, rarity


def coverage(memories: Sequence[Memory], asked: Iterable[int]) -> float:
    """The largest share of the asked tokens, 0 to 1, that two neighbouring blocks of 64 tokens hold of any memory.

    Each distinct token counts by its inverse document frequency among all blocks: names and rare words decide. 0 where
    nothing is asked. Raises AttachError for a memory without token ids.
    """
    for memory in memories:
        if memory.token_ids is None:
            raise AttachError(f"Memory {memory.name!r} has no token ids, with which a question could be compared.")
    places = [np.zeros(num_blocks(memory.num_tokens)) for memory in memories]
    total = sum(map(len, places))
    everything = 0.0
    for token in set(asked):
        found = [postings(memory).of(token)[0] for memory in memories]
        weight = rarity(total, sum(map(len, found)))
        everything += weight
        for place, blocks in zip(places, found, strict=True):
            place[np.union1d(blocks, blocks[blocks > 0] - 1)] += weight  # place i: block i and the one behind it
    return max(float(place.max()) for place in places) / everything if everything else 0.0
