"""Which selector finds the block that answers a question, and is the answer right?

    python bench/selecting.py                       # every set of questions, every selector
    python bench/selecting.py --sets passkey-16384 --selectors hybrid --trials 4

For development: keys and places follow from seeds from 1,000 on, and questions are those that may be looked at.
SmolLM2-135M-Instruct in bfloat16, memories in float16, greedy answers through the chat template. The sets:

- ``passkey-16384``, ``passkey-65536``: a key hidden in so many tokens of the Bible, as in ``passkey.py``;
- ``genesis``: the questions of ``questions_more.json`` about the same 65,536 tokens, Genesis and the first of Exodus;
- ``books``: the ten development questions of ``questions.json``, six books as six memories.

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
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

THREADS = os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch counts the cores

import numpy as np  # noqa: E402
import passkey  # noqa: E402
import questions  # noqa: E402
import torch  # noqa: E402
from spliced import Spliced  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

import memstore  # noqa: E402
from memstore import assets  # noqa: E402
from memstore.memory import OpenMemory  # noqa: E402
from memstore.reading.selection import BLOCK, num_blocks  # noqa: E402
from memstore.reading.selectors import SELECTORS, BlockSelector, Question  # noqa: E402
from memstore.reading.selectors.by_index import ByIndex  # noqa: E402
from memstore.registry import adapter_for  # noqa: E402

FOLDER = Path(__file__).parent
RESULT = FOLDER / "results" / "selecting.json"
SEED = 1000
NEW_TOKENS = 24
SETS = ("passkey-16384", "passkey-65536", "genesis", "books")


class Asked(NamedTuple):
    """A question over memories, the blocks that answer it, counted through all memories, and what is accepted."""

    text: str
    memories: Sequence[Any]
    blocks: Sequence[int]
    right: Callable[[str], bool]


class Noted(BlockSelector):
    """Another selector, whose scores are noted."""

    def __init__(self, inner: BlockSelector) -> None:
        self.inner, self.scores = inner, torch.empty(0)
        self.needs_queries = inner.needs_queries  # type: ignore[misc]

    def prepare(self, opened: Sequence[OpenMemory]) -> None:
        self.inner.prepare(opened)

    def score(self, question: Question) -> Tensor:
        scores = self.inner.score(question)
        self.scores = (scores.mean(0) if scores.dim() == 3 else scores)[0]
        return scores


class Oracle(BlockSelector):
    """Knows which blocks answer."""

    needs_queries = False

    def __init__(self, blocks: Sequence[int]) -> None:
        self.blocks = list(blocks)

    def score(self, question: Question) -> Tensor:
        scores = torch.zeros(len(question.asks), question.num_blocks)
        scores[:, self.blocks] = 1
        return scores


class Reader(NamedTuple):
    model: Any
    tokenizer: Any


def encoded(reader: Reader, store: Any, name: str, **document: Any) -> Any:
    if name not in store:
        print(f"{name} is being read", flush=True)
        text = document.pop("text", None)
        store.encode(reader.model, reader.tokenizer, text, name=name, dtype="float16", **document)
    return store[name]


def passkeys(reader: Reader, store: Any, length: int, trials: int) -> Iterator[Asked]:
    ids = passkey.filler_ids(reader.tokenizer, length)
    filler = encoded(reader, store, f"filler-{length}", input_ids=ids)
    adapter, rng = adapter_for(reader.model)(reader.model), random.Random(SEED)
    for _ in range(trials):
        key, at, hidden = passkey.hide(rng, reader.tokenizer, ids)
        memory = Spliced(adapter, filler, hidden)
        yield Asked(passkey.QUESTION, [memory], [(at + 5) // BLOCK], lambda answer, key=key: key in answer)


def genesis(reader: Reader, store: Any) -> Iterator[Asked]:
    length = 65_536
    memory = encoded(reader, store, f"filler-{length}", input_ids=passkey.filler_ids(reader.tokenizer, length))
    rows = json.loads((FOLDER / "questions_more.json").read_text())
    text, starts = "", {}
    for book in rows["books"]:
        starts[book] = len(text)
        text += assets.book_text(book)[0] + "\n\n"
    offsets = np.asarray(reader.tokenizer(text, return_offsets_mapping=True)["offset_mapping"])
    for row in rows["questions"]:
        book = row["verse"].rpartition(" ")[0]
        low, high = next(mark[:2] for mark in assets.book_text(book)[1] if mark[2] == row["verse"])
        low, high = low + starts[book], high + starts[book]
        inside = np.flatnonzero((offsets[:, 0] < high) & (low < offsets[:, 1]))
        blocks = sorted({int(token) // BLOCK for token in inside})
        yield Asked(row["question"], [memory], blocks, lambda answer, row=row: questions.right(answer, row["answers"]))


def books(reader: Reader, store: Any) -> Iterator[Asked]:
    names = questions.books()
    memories = [encoded(reader, store, name, text=assets.book_text(name)[0]) for name in names]
    ends = np.cumsum([num_blocks(memory.num_tokens) for memory in memories])
    known = questions.Reader(reader.model, reader.tokenizer, names)
    for each in questions.questions():
        if each.set == "development":
            first, stop = known.verse_tokens(each.verse)
            i = names.index(each.book)
            start = int(ends[i]) - num_blocks(memories[i].num_tokens)
            blocks = range(start + first // BLOCK, start + (stop - 1) // BLOCK + 1)
            yield Asked(each.text, memories, blocks, lambda answer, each=each: questions.right(answer, each.answers))


def trial(reader: Reader, asked: Asked, name: str, budget: int | None) -> dict[str, Any]:
    inner = Oracle(asked.blocks) if name == "oracle" else ByIndex("exact") if name == "index" else SELECTORS[name]()
    noted = Noted(inner)
    with memstore.attach(reader.model, *asked.memories, selector=noted, budget=budget, explain=True) as attached:
        answer = attached.generate(asked.text, tokenizer=reader.tokenizer, max_new_tokens=NEW_TOKENS, do_sample=False)
        starts, start = {}, 0
        for memory in asked.memories:
            starts[memory.name] = start
            start += num_blocks(memory.num_tokens)
        read = {starts[each.document] + each.start_token // BLOCK for each in attached.provenance(layers="mean")}
    rank = min(int((noted.scores > noted.scores[block]).sum()) for block in asked.blocks)
    return {
        "question": asked.text,
        "rank": rank,
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
    parser.add_argument("--store", type=Path, help="a store that holds the memories, or is going to")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    path = assets.smollm2()
    reader = Reader(
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval(), AutoTokenizer.from_pretrained(path)
    )
    result: dict[str, Any] = {"budget": args.budget, "seed": SEED, "trials": {}}
    with closing(memstore.open(args.store or assets.cache_dir() / "bench" / "selecting")) as store:
        for kind in args.sets:
            by_selector: dict[str, list[Any]] = {name: [] for name in args.selectors}
            result["trials"][kind] = by_selector
            asking = {"genesis": genesis, "books": books}
            length = int(kind.partition("-")[2] or 0)
            of_kind = asking[kind](reader, store) if kind in asking else passkeys(reader, store, length, args.trials)
            for asked in of_kind:
                for name, trials in by_selector.items():
                    trials.append(trial(reader, asked, name, args.budget))
                    print(kind, name, trials[-1], flush=True)
                args.out.write_text(json.dumps(result, indent=1) + "\n")
            for name, trials in by_selector.items():
                counts = {key: sum(each[key] for each in trials) for key in ("read", "right")}
                counts["first"] = sum(each["rank"] == 0 for each in trials)
                print(kind, name, len(trials), counts, "rank", statistics.median(each["rank"] for each in trials))


if __name__ == "__main__":
    main()
