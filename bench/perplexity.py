"""Does a memory of all that came before make the next 1,024 tokens likelier?

    python bench/perplexity.py            # 5 places in the Bible, memories of 8,192 to 262,144 tokens; see below
    python bench/perplexity.py --resume   # goes on with what an interrupted run has written
    python bench/perplexity.py --quick    # one place and 8,192 tokens, written nowhere

SmolLM2-135M-Instruct, the King James Bible from Genesis on. At each place 128 tokens are the prompt, and the loss is
that of the 1,024 tokens behind them, in nats a token. These 1,152 are read behind the chat template's header:

- ``local``: alone, by the plain model;
- ``tail``: by the plain model, with the last tokens before them as text, as many as the budget;
- ``memory``: with a memory of the tokens before them, as many as a row says, of which the budget is read;
- ``full``: by the plain model with all of 6,912 tokens before them, which fit into its window. Beside it stand memories
  of the same tokens: encoded as one window, and so read as if they stood there, and in windows of 1,024.

The tokens are fed with one cache, as ``generate`` does, in pieces of --chunk tokens, so that what is read can be chosen
anew as the text goes on. The prompt is not scored, because it chooses what it reads itself; for the same reason a
prompt of all 1,152 tokens would give no honest loss. Before anything is measured it is tested that the pieces do not do
so: that no loss changes when a later token of its piece does. Where one does, only --chunk 1 is honest.

The text is encoded once, as memories of 8,192 tokens that follow each other; more tokens are several of them, attached
together. So all places and lengths share one encoding, and the first 512 tokens of each memory were read with less
before them than they would be in a single one. The memories are kept in the cache folder: 393,216 tokens in int8 take
5 GB, and 10 minutes of one thread with AMX to make.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

THREADS = os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch counts the cores

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaForCausalLM  # noqa: E402

import memstore  # noqa: E402
from memstore import assets  # noqa: E402
from memstore.errors import MemoryExistsError  # noqa: E402
from memstore.reading.chat import chat_frame  # noqa: E402
from memstore.reading.kv import BUDGET  # noqa: E402

RESULT = Path(__file__).parent / "results" / "perplexity.json"
PART = 8192  # tokens of a memory, of which longer ones are made up
LENGTHS = [PART << i for i in range(6)]  # to 262,144
PROMPT, SCORED = 128, 1024
FITS = 6912  # tokens that the model's window holds beside the header, the prompt and what is scored
PLACES = 5
BETWEEN_PLACES = 32768

CACHE = "cache" if "cache" in signature(LlamaForCausalLM.forward).parameters else "past_key_values"

Json = dict[str, Any]


def bible_ids(tokenizer: Any, length: int) -> tuple[np.ndarray, list[str]]:
    """The first tokens of the Bible, and the book of each."""
    ids: list[int] = []
    owners: list[str] = []
    for book in assets.bible():
        mine = tokenizer(assets.book_text(book)[0] + "\n\n")["input_ids"]
        ids += mine
        owners += [book] * len(mine)
        if len(ids) >= length:
            return np.asarray(ids[:length], dtype=np.int32), owners[:length]
    raise ValueError(f"The Bible has {len(ids)} tokens, not {length}.")


def encoded(store: Any, model: Any, tokenizer: Any, name: str, ids: np.ndarray, dtype: str, **options: Any) -> Any:
    """The memory of these tokens; an interrupted one goes on, and one of another state of this library is replaced."""
    try:
        return store.encode(model, tokenizer, input_ids=ids, name=name, dtype=dtype, **options)
    except MemoryExistsError:
        del store[name]
        return store.encode(model, tokenizer, input_ids=ids, name=name, dtype=dtype, **options)


def losses(model: Any, before: Sequence[int], own: Tensor, chunk: int) -> Tensor:
    """Nats of each token behind the prompt: own [PROMPT + n] gives [n], fed in pieces with one cache.

    before: tokens that the model reads as text, at once with the prompt.
    """
    cache = DynamicCache(config=model.config)
    ids = torch.cat((torch.tensor(before, dtype=torch.long), own[:PROMPT]))
    last = model(ids[None], use_cache=True, **{CACHE: cache}, logits_to_keep=1).logits[0]
    nats = []
    for piece in own[PROMPT:].split(chunk):
        logits = model(piece[None], use_cache=True, **{CACHE: cache}).logits[0]
        nats.append(torch.nn.functional.cross_entropy(torch.cat((last, logits[:-1])).float(), piece, reduction="none"))
        last = logits[-1:]
    return torch.cat(nats)


def peeks(model: Any, own: Tensor, chunk: int) -> bool:
    """Whether losses in the first half of a piece change with its second half, by more than rounding: 8 pieces."""
    scored, half = len(own) - PROMPT, chunk // 2
    if half == 0:
        return False
    given = losses(model, [], own, chunk)
    for stop in range(chunk, scored + 1, chunk * max(1, scored // chunk // 8)):
        other = own[: PROMPT + stop].clone()
        other[-half:] = (other[-half:] + 1) % model.config.vocab_size
        if not torch.allclose(losses(model, [], other, chunk)[:-half], given[: stop - half], atol=1e-2):
            return True
    return False


class Bench:
    """The model, the text and its memories, and the places that are measured."""

    def __init__(self, model: Any, tokenizer: Any, store: Any, args: argparse.Namespace) -> None:
        self.model, self.tokenizer, self.store, self.args = model, tokenizer, store, args
        self.header = chat_frame(tokenizer).header
        self.places = [max(args.lengths) + i * BETWEEN_PLACES for i in range(args.places)]  # where a prompt begins
        self.ids, self.books = bible_ids(tokenizer, self.places[-1] + PROMPT + SCORED)
        self.options: Json = {} if args.selector is None else {"selector": args.selector}

    def own(self, place: int) -> Tensor:
        return torch.from_numpy(self.ids[place : place + PROMPT + SCORED]).long()

    def memories(self, place: int, length: int) -> list[Any]:
        """Memories that hold the ``length`` tokens before a place."""
        return [self._part(start) for start in range(place - length, place, PART)]

    def _part(self, start: int) -> Any:
        began, name = time.perf_counter(), f"from-{start}"
        fresh = name not in self.store
        ids = self.ids[start : start + PART]
        memory = encoded(self.store, self.model, self.tokenizer, name, ids, self.args.stored)
        if fresh:
            print(f"{name} read in {time.perf_counter() - began:.0f} s", flush=True)
        return memory

    def read(self, place: int, memories: Sequence[Any], **options: Any) -> float:
        with memstore.attach(self.model, *memories, **self.options, **options):
            return float(losses(self.model, [], self.own(place), self.args.chunk).mean())

    def plain(self, place: int, tokens: int) -> float:
        """With the last ``tokens`` before the place as text."""
        before = self.header + self.ids[place - tokens : place].tolist()
        return float(losses(self.model, before, self.own(place), SCORED).mean())

    def fits(self, place: int, measure: Callable[[str, Callable[[], float]], None]) -> None:
        """A document that fits into the window: read in full, as one window, and in windows."""
        ids, stored = self.ids[place - FITS : place], self.args.stored
        measure("full", lambda: self.plain(place, FITS))
        one = encoded(self.store, self.model, self.tokenizer, f"one-{place}", ids, stored, window=FITS)
        measure("one window", lambda: self.read(place, [one]))
        cut = encoded(self.store, self.model, self.tokenizer, f"windows-{place}", ids, stored)
        for budget in self.args.budgets:
            measure(f"windows, {budget}", lambda budget=budget: self.read(place, [cut], budget=budget))

    def check(self) -> None:
        """Raises SystemExit if what is read is chosen by tokens whose loss is measured."""
        place = self.places[0]
        with memstore.attach(self.model, *self.memories(place, min(self.args.lengths)), **self.options):
            if peeks(self.model, self.own(place), self.args.chunk):
                raise SystemExit("A piece chooses what it reads by its own later tokens: measure with --chunk 1.")


def run(bench: Bench, result: Json, save: Callable[[], None]) -> None:
    """Fill in what the result lacks, and save after each figure."""
    for place in bench.places:
        row = result["places"].setdefault(str(place), {"book": bench.books[place + PROMPT]})

        def measure(name: str, work: Callable[[], float], row: Json = row, place: int = place) -> None:
            if name in row:
                return
            began = time.perf_counter()
            row[name] = round(work(), 4)
            print(f"{row['book']}, {place}: {name}: {row[name]} ({time.perf_counter() - began:.0f} s)", flush=True)
            save()

        measure("local", lambda place=place: bench.plain(place, 0))
        for budget in bench.args.budgets:
            measure(f"tail, {budget}", lambda place=place, budget=budget: bench.plain(place, budget))
        for length in bench.args.lengths:
            for budget in bench.args.budgets:
                measure(
                    f"memory, {length}, {budget}",
                    lambda place=place, length=length, budget=budget: bench.read(
                        place, bench.memories(place, length), budget=budget
                    ),
                )
        bench.fits(place, measure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help=f"multiples of {PART}")
    parser.add_argument("--budgets", type=int, nargs="+", default=[BUDGET, 4 * BUDGET])
    parser.add_argument("--places", type=int, default=PLACES)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--selector", help="as memstore.attach takes it; by default the configured one")
    parser.add_argument("--dtype", default="bfloat16", help="what the model computes in")
    parser.add_argument("--stored", default="int8", help="the dtype of the memories")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.quick:
        args.lengths, args.places, args.budgets = [PART], 1, [BUDGET]
    torch.set_grad_enabled(False)
    settings = {
        "model": "SmolLM2-135M-Instruct",
        "threads": torch.get_num_threads(),
        "fits": FITS,
        **{key: getattr(args, key) for key in ("dtype", "stored", "chunk", "selector", "lengths", "budgets")},
    }
    out = args.out or (None if args.quick else RESULT)
    result: Json = {"settings": settings, "places": {}}
    if args.resume and out is not None and out.exists():
        result = json.loads(out.read_text())
        if result["settings"] != settings:
            raise SystemExit(f"{out} was measured with other settings: {result['settings']}")

    def save() -> None:
        if out is not None:
            out.write_text(json.dumps(result, indent=1) + "\n")

    path = assets.smollm2()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, args.dtype)).eval()
    with memstore.open(assets.cache_dir() / "bench" / f"perplexity-{args.dtype}-{args.stored}") as store:
        bench = Bench(model, AutoTokenizer.from_pretrained(path), store, args)
        bench.check()
        run(bench, result, save)


if __name__ == "__main__":
    main()
