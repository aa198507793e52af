"""Which selector finds the block that answers a question, and is the answer right?

    python bench/selecting.py                       # every set of questions, every selector
    python bench/selecting.py --sets passkey-16384 --selectors hybrid --trials 4

For development: keys and places follow from seeds from 1,000 on, and questions are those that may be looked at.
SmolLM2-135M-Instruct and the filler of `passkey.py`, greedy answers through the chat template. The sets:

- ``passkey-16384``, ``passkey-65536``: a key hidden in so many tokens, as in ``passkey.py``;
- ``genesis``: the questions of ``questions_more.json`` about the first 65,536 tokens, Genesis and the first of Exodus.

*first* counts the questions whose block has the best score, *read* those of which every block with the verse or the key
is among the chosen spans. ``oracle`` is told the blocks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

THREADS = os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch counts the cores

import numpy as np  # noqa: E402
import passkey  # noqa: E402
import questions  # noqa: E402
import torch  # noqa: E402
from splice import splice  # noqa: E402

import memstore  # noqa: E402
from memstore import assets  # noqa: E402
from memstore.memory import Memory  # noqa: E402
from memstore.reading.selection import BLOCK  # noqa: E402
from memstore.reading.selectors import SELECTORS, chosen_selector  # noqa: E402
from memstore.reading.selectors.by_index import ByIndex  # noqa: E402
from memstore.registry import adapter_for  # noqa: E402

FOLDER = Path(__file__).parent
RESULT = FOLDER / "results" / "selecting.json"
SEED = 1000
LENGTH = 65_536  # of the text that is asked about
NEW_TOKENS = 24
SETS = ("passkey-16384", "passkey-65536", "genesis")


class Asked(NamedTuple):
    """A question about a memory, the blocks that answer it, and what says whether an answer is right."""

    text: str
    memory: Memory
    blocks: Sequence[int]
    right: Callable[[str], bool]


def passkeys(reader: passkey.Reader, base: Any, length: int, trials: int) -> Iterator[Asked]:
    adapter, rng = adapter_for(reader.model)(reader.model), random.Random(SEED)
    for i in range(trials):
        key, at, hidden = passkey.hide(rng, reader.tokenizer, base.token_ids[:length])
        memory = splice(adapter, base, hidden, f"trial-{i}")
        yield Asked(passkey.QUESTION, memory, [(at + passkey.KEY_AT) // BLOCK], partial(holds, key=key))


def genesis(reader: passkey.Reader, base: Any) -> Iterator[Asked]:
    adapter = adapter_for(reader.model)(reader.model)
    memory = splice(adapter, base, base.token_ids[:LENGTH], "genesis")
    rows = json.loads((FOLDER / "questions_more.json").read_text())
    text, starts = "", {}
    for book in rows["books"]:
        starts[book] = len(text)
        text += assets.book_text(book)[0] + "\n\n"
    offsets = np.asarray(reader.tokenizer(text, return_offsets_mapping=True)["offset_mapping"])
    # What the memory would have if it had been encoded as a text.
    memory.__dict__ |= {"text": text, "offsets": offsets[:LENGTH].astype(np.int32)}
    for row in rows["questions"]:
        book = row["verse"].rpartition(" ")[0]
        low, high = next(mark[:2] for mark in assets.book_text(book)[1] if mark[2] == row["verse"])
        low, high = low + starts[book], high + starts[book]
        inside = np.flatnonzero((offsets[:, 0] < high) & (low < offsets[:, 1]))
        blocks = sorted({int(token) // BLOCK for token in inside})
        yield Asked(row["question"], memory, blocks, partial(questions.right, accepted=row["answers"]))


def holds(answer: str, key: str) -> bool:
    return key in answer


def trial(reader: passkey.Reader, asked: Asked, name: str, budget: int | None) -> dict[str, Any]:
    oracle: Any = list(asked.blocks)
    inner = passkey.Oracle(oracle) if name == "oracle" else chosen_selector(name, None)
    noted = passkey.Noting(ByIndex("exact") if name == "index" else inner)
    with memstore.attach(reader.model, asked.memory, selector=noted, budget=budget, explain=True) as attached:
        answer = attached.generate(asked.text, tokenizer=reader.tokenizer, max_new_tokens=NEW_TOKENS, do_sample=False)
        read = {passage.start_token // BLOCK for passage in attached.provenance().passages()}
    scores = noted.scores[0] if noted.scores.dim() == 2 else noted.scores[:, 0].mean(0)
    return {
        "question": asked.text,
        "rank": min(int((scores > scores[block]).sum()) for block in asked.blocks),
        "read": set(asked.blocks) <= read,
        "right": asked.right(answer),
        "answer": answer,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--selectors", nargs="+", default=[*SELECTORS, "oracle"])
    parser.add_argument("--trials", type=int, default=20, help="hidden keys of one length")
    parser.add_argument("--budget", type=int)
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16"], help="what the model computes in"
    )
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    reader = passkey.load(dtype=getattr(torch, args.dtype))
    base = passkey.filler(reader)
    result: dict[str, Any] = {"dtype": args.dtype, "budget": args.budget, "seed": SEED, "counts": {}, "trials": {}}
    for kind in args.sets:
        by_selector: dict[str, list[dict[str, Any]]] = {name: [] for name in args.selectors}
        result["trials"][kind], length = by_selector, int(kind.partition("-")[2] or 0)
        for asked in passkeys(reader, base, length, args.trials) if length else genesis(reader, base):
            for name, trials in by_selector.items():
                trials.append(trial(reader, asked, name, args.budget))
                print(kind, name, trials[-1], flush=True)
            result["counts"][kind] = {
                name: {
                    "trials": len(trials),
                    "first": sum(each["rank"] == 0 for each in trials),
                    "read": sum(each["read"] for each in trials),
                    "right": sum(each["right"] for each in trials),
                    "median rank": statistics.median(each["rank"] for each in trials),
                }
                for name, trials in by_selector.items()
            }
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["counts"], indent=1))


if __name__ == "__main__":
    main()
