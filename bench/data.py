"""What the index benchmark searches: keys of a memory, and queries that a decoder really asks of them.

    python bench/data.py        makes and caches everything (15 minutes on two cores with AMX)

- ``smollm2/L.G``: SmolLM2-135M-Instruct over the whole King James Bible, read as ``store.encode`` reads it (windows of
  1,024 tokens behind the chat header, overlapping by one half, in bfloat16): the keys of layer L and key-value head G,
  before rotation, one per token. Queries: that layer's three query heads over G at every token of a user's words and of
  the generation prompt, turned to the fixed distance at which scouting asks, and divided by the root of the head's
  width. The prompts are questions about the Bible, and verses to be explained, through the chat template.
- ``whisper/L``: encoder states of Whisper tiny.en, 1,500 for each window of 30 seconds. There is no speech at hand, so
  each window is a scene of beeps, sweeps, knocks and noises that no other window repeats. Queries: those of all heads
  of decoder layer L while it writes what it hears in some of the windows, absorbed into the space of the states.
- ``mixed/D``: synthetic, d = D. Keys: a common mean, and a mixture of 1,000 clusters of unequal size. Queries: other
  points of the same mixture, sent through a random linear map and so away from the keys, with some of the key they
  came from left in: decoder queries are no keys, and yet find some.

No vector is ever repeated to reach a size: a smaller n is the first n keys.
"""

from __future__ import annotations

import argparse
import time
from typing import NamedTuple

import data_mixed
import data_smollm2
import data_whisper
import numpy as np
import torch
from torch import Tensor

from memstore.registry import adapter_for

KINDS = {"smollm2": data_smollm2.folder, "whisper": data_whisper.folder, "mixed": data_mixed.folder}


class Vectors(NamedTuple):
    """One benchmark's vectors: keys [n, G, d] of which head G is searched, and queries [m, d], float32.

    Queries are scaled: the softmax of their scores is the attention over the memory. A store
    keeps such keys in blocks of ``block_rows``.
    """

    name: str
    keys: Tensor
    head: int
    queries: Tensor
    block_rows: int


def load(name: str, n: int) -> Vectors:
    """The first n keys, or all if there are fewer, of ``smollm2/L.G``, ``whisper/L`` or ``mixed/D``."""
    kind, _, which = name.partition("/")
    folder = KINDS[kind](which)
    keys, queries = (np.load(folder / f"{part}.npy", mmap_mode="r") for part in ("keys", "queries"))
    head, block_rows = 0, 16384
    if kind == "smollm2":
        head, block_rows = int(which.split(".")[1]), 2048  # as all layers of a token go into one block
        keys, queries = keys.transpose(1, 0, 2), queries[head]
    elif kind == "whisper":
        keys, queries = keys[:, None], queries[int(which)]
    else:
        keys = keys[:, None]
    keys, queries = (torch.from_numpy(np.array(array, dtype=np.float32)) for array in (keys[:n], queries))
    return Vectors(name, keys, head, queries, block_rows)


def encoding_cost(name: str, windows: int = 4) -> float | None:
    """CPU seconds for each token that a memory keeps, of the whole model in the dtype that `bench/data.py` names."""
    kind = {"smollm2": data_smollm2, "whisper": data_whisper}.get(name.partition("/")[0])
    if kind is None:
        return None
    model, inputs, kept = kind.some_windows(windows)
    adapter = adapter_for(model)(model)
    with torch.inference_mode():
        adapter.encode(inputs)
        began = time.process_time()
        adapter.encode(inputs)
    return (time.process_time() - began) / kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    for kind, which in (("smollm2", "4.0"), ("whisper", "2"), ("mixed", "512"), ("mixed", "768")):
        print(KINDS[kind](which), flush=True)


if __name__ == "__main__":
    main()
