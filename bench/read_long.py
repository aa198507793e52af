"""How well the reader of `bench/train_reader.py` finds a key in a document far longer than its window.

    python bench/read_long.py        all lengths (about 20 minutes on two cores once the reader is trained)

Held-out prose of each length, one needle at a random depth, the whole key to be written greedily. *Plain* reads a
passage that fits the window, *truncated* the first 256 tokens of the document, *memory* all of it: stored in windows of
256 that overlap by one half, of which the middle half is kept, and attached with ``top_k="all"`` or the default, which
is 256. Short documents are encoded one by one. For longer ones the needle replaces tokens of a filler that is encoded
once, and only the windows that see it are encoded again, which gives the memory that a full encoding would.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch counts the cores

import numpy as np
import torch
from passkey import Reader
from reader_data import DIGITS, Document, Ids, Task
from splice import splice
from train_reader import WINDOW, digits, load_reader, read

import memstore
from memstore.memory import Memory
from memstore.registry import adapter_for
from memstore.store import MemoryStore

RESULT = Path(__file__).parent / "results" / "reader.json"
TRIALS = {256: 100, 512: 100, 1024: 100, 2048: 100, 4096: 100, 8192: 100, 16384: 100}
TRIALS |= {32768: 50, 65536: 50, 131072: 25, 262144: 20}
EXPLAINED = 20  # trials of which it is asked where the attention went
IN_WINDOW = 400  # trials of the plain model
ENCODED_WHOLE = 4096  # the longest documents that are not spliced
NEEDLE_DIGITS = 6  # tokens of a needle before its digits


class Answer(NamedTuple):
    """What was written, as ids [5], and the share of attention that the passages with the needle held, if asked."""

    ids: Ids
    mass: float | None = None


def from_memory(reader: Reader, memory: Memory, at: int, top_k: str | None, explain: bool) -> Answer:
    """What the reader writes with nothing but the memory, whose needle begins at token ``at``."""
    with memstore.attach(reader.model, memory, top_k=top_k, explain=explain) as attached:
        written = attached.generate(max_new_tokens=DIGITS + 1, do_sample=False, num_beams=1)
        if not explain:
            return Answer(digits(written)[0])
        held = sum(
            reading.mass
            for reading in attached.provenance()
            if reading.step < DIGITS
            and reading.start_token < at + NEEDLE_DIGITS + DIGITS  # the digits may stand in two passages
            and at + NEEDLE_DIGITS < reading.end_token
        )
    return Answer(digits(written)[0], held / (DIGITS * reader.model.config.decoder_layers))


def documents(
    store: MemoryStore, reader: Reader, task: Task, length: int, trials: int
) -> Iterator[tuple[Document, Memory]]:
    """Documents with a hidden key, and the memory of each, which is removed when the next one is asked for."""
    filler = None
    if length > ENCODED_WHOLE:
        filler = store.encode(reader.model, input_ids=task.excerpt(length), name="filler")
    for i in range(trials):
        hidden = task.hidden(task.excerpt(length) if filler is None else filler.token_ids)
        if filler is None:
            memory = store.encode(reader.model, input_ids=hidden.ids, name=f"trial-{i}")
            yield hidden, memory
            del store[memory.name]
        else:
            yield hidden, splice(adapter_for(reader.model)(reader.model), filler, hidden.ids, f"trial-{i}")
    if filler is not None:
        del store["filler"]


def interval(right: int, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share."""
    z = 1.96
    share, spread = right / trials, z * math.sqrt(right * (trials - right) / trials + z * z / 4) / trials
    centre, scale = share + z * z / (2 * trials), 1 + z * z / trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def summary(written: list[Ids], wanted: list[Ids]) -> dict[str, Any]:
    """How many keys are right as a whole, with what certainty, and which share of their digits."""
    same = np.stack(written) == np.stack(wanted)
    right, trials = int(same.all(1).sum()), len(same)
    return {
        "right": right,
        "accuracy": round(right / trials, 4),
        "interval": [round(end, 4) for end in interval(right, trials)],
        "digits": round(float(same.mean()), 4),
    }


def measure(store: MemoryStore, reader: Reader, length: int, trials: int) -> dict[str, Any]:
    """All ways of reading the same documents of one length."""
    task = Task(reader.tokenizer, held_out=True, seed=length)
    wanted, masses = [], []
    written: dict[str, list[Ids]] = {"truncated": [], "memory_all": [], "memory_256": []}
    for hidden, memory in documents(store, reader, task, length, trials):
        wanted.append(hidden.answer)
        written["truncated"].append(read(reader.model, torch.from_numpy(hidden.ids[None, :WINDOW]))[0])
        everything = from_memory(reader, memory, hidden.at, "all", explain=len(wanted) <= EXPLAINED)
        written["memory_all"].append(everything.ids)
        if everything.mass is not None:
            masses.append(everything.mass)
        written["memory_256"].append(from_memory(reader, memory, hidden.at, None, explain=False).ids)
    ways = {way: summary(answers, wanted) for way, answers in written.items()}
    return {"length": length, "trials": trials, **ways, "needle_mass": round(float(np.mean(masses)), 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--longest", type=int, default=max(TRIALS))
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    reader = Reader(*load_reader())
    passages = Task(reader.tokenizer, held_out=True, seed=1).passages(IN_WINDOW, WINDOW)
    plain = read(reader.model, torch.from_numpy(passages.ids))
    result = {
        "window": WINDOW,
        "plain": {"trials": IN_WINDOW, **summary(list(plain), list(passages.answers))},
        "lengths": [],
    }
    print(json.dumps(result["plain"]), flush=True)
    for length, trials in TRIALS.items():
        if length > args.longest:
            break
        with tempfile.TemporaryDirectory() as folder, memstore.open(Path(folder) / "store") as store:
            result["lengths"].append(measure(store, reader, length, trials))
        print(json.dumps(result["lengths"][-1]), flush=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
