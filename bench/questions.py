"""30 questions over six books of the Bible: is a memory read as well as text found by words, and how soon?

    python bench/questions.py                     # all 30; 12 minutes more when the books are read for the first time
    python bench/questions.py --set development   # those that may be looked at while reading is worked on
    python bench/questions.py --quick             # two questions over the two shortest books, written nowhere

SmolLM2-135M-Instruct has each book in a memory; all of them are attached together. `bench/questions.json` has the
questions, their verses and what is accepted as an answer, and was written before any of them was asked. An answer is
right if it contains an accepted one as words of their own. Each question is asked in five ways, greedily and through
the chat template:

- ``memory``: nothing but the question in the prompt, and a budget of tokens that are read from the memories;
- ``nothing``: the plain model, which may know or guess;
- ``first``: the plain model behind as many first tokens of the books as fit into its window;
- ``chunks``: the plain model behind the best chunks of 64 tokens by BM25, as many as the budget holds, in the order of
  the books (words in lower case, k1 = 1.2, b = 0.75);
- ``verse``: the plain model behind the verse that answers, with what stands around it where it is shorter than 64
  tokens: what it could do at best. With more around it this model reads worse: of the ten questions for development it
  answers 3 with 64 tokens, and 1, none and 1 with 128, 256 and 512 (in bfloat16).

The time to the first token is that from the question in words to the first token of the answer. Outside of it is what
serves all questions: attaching and verifying the memories, and cutting and counting chunks. In ``first`` the tokens of
the books are read once and their time is counted for every question, as it would pass without a cache of them.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

THREADS = os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch counts the cores

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, StoppingCriteria  # noqa: E402

import memstore  # noqa: E402
from memstore import assets  # noqa: E402
from memstore.errors import MemoryExistsError  # noqa: E402
from memstore.reading.chat import BETWEEN, chat_frame  # noqa: E402
from memstore.reading.kv import BUDGET  # noqa: E402

FILE = Path(__file__).parent / "questions.json"
RESULT = Path(__file__).parent / "results" / "questions.json"
SETS = ("development", "held-out")
CHUNK = 64
NEW_TOKENS = 24
QUICK_BOOKS = ("Esther", "Daniel")

CACHE = "cache" if "cache" in signature(LlamaForCausalLM.forward).parameters else "past_key_values"

Json = dict[str, Any]


class Question(NamedTuple):
    """A question, the verse that answers it ("Judges 3:31"), and what counts as the answer.

    The first of ``answers`` stands literally in the verse; the others are other spellings of it.
    """

    set: str
    verse: str
    text: str
    answers: tuple[str, ...]

    @property
    def book(self) -> str:
        return self.verse.rpartition(" ")[0]


def books() -> list[str]:
    """The books that are asked about, in the order of the Bible."""
    return list(json.loads(FILE.read_text())["books"])


def questions() -> list[Question]:
    rows = json.loads(FILE.read_text())["questions"]
    return [Question(row["set"], row["verse"], row["question"], tuple(row["answers"])) for row in rows]


def books_without(question: Question) -> list[str]:
    """The books that do not answer a question: a memory of these has no answer."""
    return [book for book in books() if book != question.book]


def right(answer: str, accepted: Sequence[str]) -> bool:
    """Whether an answer contains an accepted one, in any case, and as words or a number of its own: "thirty-five" does
    not contain "five", nor "1,300" "300"."""
    found = (
        re.search(rf"(?<![\w-])(?<!\d,){re.escape(each)}(?![\w-])(?!,\d)", answer, re.IGNORECASE) for each in accepted
    )
    return any(found)


class Chunk(NamedTuple):
    """A stretch of a book's tokens."""

    book: str
    start: int
    ids: list[int]


class Chunks:
    """The books in chunks, and BM25 over their words."""

    def __init__(self, chunks: Sequence[Chunk], texts: Sequence[str], k1: float = 1.2, b: float = 0.75) -> None:
        self.chunks, self.k1, self.b = chunks, k1, b
        self.counts = [Counter(words(text)) for text in texts]
        self.lengths = [count.total() for count in self.counts]
        self.mean_length = sum(self.lengths) / len(self.lengths)
        self.holding = Counter(word for count in self.counts for word in count)

    def scores(self, query: str) -> list[float]:
        """BM25 of every chunk, with the inverse document frequency that is never negative."""
        n, totals = len(self.chunks), [0.0] * len(self.chunks)
        for word in set(words(query)) & self.holding.keys():
            rarity = math.log(1 + (n - self.holding[word] + 0.5) / (self.holding[word] + 0.5))
            for i, (count, length) in enumerate(zip(self.counts, self.lengths, strict=True)):
                if times := count[word]:
                    norm = self.k1 * (1 - self.b + self.b * length / self.mean_length)
                    totals[i] += rarity * times * (self.k1 + 1) / (times + norm)
        return totals

    def best(self, query: str, budget: int) -> list[Chunk]:
        """The best chunks that hold ``budget`` tokens at most, in document order."""
        scores = self.scores(query)
        ranked = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
        return [self.chunks[i] for i in sorted(ranked[: budget // CHUNK])]


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


class Clock(StoppingCriteria):
    """Notes when the first token is there: seconds of the clock and of CPU time, those spent ``before`` included."""

    def __init__(self, before: tuple[float, float] = (0.0, 0.0)) -> None:
        self.began = time.perf_counter() - before[0], time.process_time() - before[1]
        self.first: tuple[float, float] | None = None

    def now(self) -> tuple[float, float]:
        return time.perf_counter() - self.began[0], time.process_time() - self.began[1]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        self.first = self.first or self.now()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class Reader:
    """The model, and the books as tokens."""

    def __init__(self, model: Any, tokenizer: Any, names: Sequence[str]) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.frame = chat_frame(self.tokenizer)
        self.between = self.ids(BETWEEN)
        encoded = {name: self.tokenizer(assets.book_text(name)[0], return_offsets_mapping=True) for name in names}
        self.books: dict[str, list[int]] = {name: each["input_ids"] for name, each in encoded.items()}
        self.offsets: dict[str, list[tuple[int, int]]] = {
            name: each["offset_mapping"] for name, each in encoded.items()
        }

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def verse_tokens(self, verse: str) -> tuple[int, int]:
        """The tokens of its book that hold a verse, the end excluded."""
        book = verse.rpartition(" ")[0]
        start, end = next(mark[:2] for mark in assets.book_text(book)[1] if mark[2] == verse)
        inside = [i for i, (low, high) in enumerate(self.offsets[book]) if low < end and start < high]
        return inside[0], inside[-1] + 1

    def around(self, verse: str, width: int) -> tuple[int, list[int]]:
        """``width`` tokens with a verse in their middle, or a verse that has more, and where in its book they begin."""
        ids = self.books[verse.rpartition(" ")[0]]
        first, stop = self.verse_tokens(verse)
        width = max(width, stop - first)
        start = max(0, min((first + stop - width) // 2, len(ids) - width))
        return start, ids[start : start + width]

    def chunks(self) -> Chunks:
        cut = [
            Chunk(book, start, ids[start : start + CHUNK])
            for book, ids in self.books.items()
            for start in range(0, len(ids), CHUNK)
        ]
        return Chunks(cut, self.tokenizer.batch_decode([chunk.ids for chunk in cut]))

    def joined(self, chunks: Sequence[Chunk]) -> list[int]:
        """Chunks as one text: what does not follow on what came before is set apart."""
        ids: list[int] = []
        last: Chunk | None = None
        for chunk in chunks:
            follows = last is not None and (last.book, last.start + CHUNK) == (chunk.book, chunk.start)
            ids += (self.between if ids and not follows else []) + chunk.ids
            last = chunk
        return ids

    def prompt(self, context: Sequence[int], question: str) -> list[int]:
        """The chat with a context before the question, or with none."""
        return [*self.frame.header, *context, *self.ids((BETWEEN if context else "") + question + self.frame.after)]

    def answer(self, ids: Sequence[int], clock: Clock, cache: Any = None) -> str:
        given = torch.tensor([ids])
        known = {} if cache is None else {CACHE: cache}
        out = self.model.generate(
            given,
            attention_mask=torch.ones_like(given),
            stopping_criteria=[clock],
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            **known,
        )
        return str(self.tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True)).strip()


def read_books(reader: Reader, store: Any, stored: str) -> list[Any]:
    """The memories of all books: those that the store lacks are read, and an interrupted one from where it was."""
    for book in reader.books:
        began, text = time.perf_counter(), assets.book_text(book)[0]
        known = book in store
        try:
            store.encode(reader.model, reader.tokenizer, text, name=book, dtype=stored)
        except MemoryExistsError:  # of another state of this library
            del store[book]
            known = False
            store.encode(reader.model, reader.tokenizer, text, name=book, dtype=stored)
        if not known:
            print(f"{book}: {store[book].num_tokens:,} tokens read in {time.perf_counter() - began:.0f} s", flush=True)
    return [store[book] for book in reader.books]


class Asked(NamedTuple):
    """An answer, its time, and the stretches of books that were read for it: book, first token, end."""

    answer: str
    clock: Clock
    read: Sequence[tuple[str, int, int]]


class Memories:
    """Asks with the memories attached: once for answer and time, and once for what is read."""

    def __init__(self, reader: Reader, memories: Sequence[Any], **options: Any) -> None:
        self.reader, self.memories, self.options = reader, memories, options

    def __call__(self, wanted: Sequence[Question]) -> Iterator[Asked]:
        tokenizer, answers = self.reader.tokenizer, []
        for memory in self.memories:
            memory.open("open").close()  # verified once a process, as is attaching done once
        with memstore.attach(self.reader.model, *self.memories, **self.options) as attached:
            for i, question in enumerate((wanted[0], *wanted)):  # the first time is not counted
                clock = Clock()
                answer = attached.generate(
                    question.text,
                    tokenizer=tokenizer,
                    stopping_criteria=[clock],
                    max_new_tokens=NEW_TOKENS if i else 1,
                    do_sample=False,
                )
                answers.append((answer, clock))
        with memstore.attach(self.reader.model, *self.memories, explain=True, **self.options) as attached:
            for question, (answer, clock) in zip(wanted, answers[1:], strict=True):
                attached.generate(question.text, tokenizer=tokenizer, max_new_tokens=1, do_sample=False)
                read = {(each.document, each.start_token, each.end_token) for each in attached.provenance()}
                yield Asked(answer, clock, sorted(read))


class Nothing:
    """Asks the plain model without any text."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def __call__(self, wanted: Sequence[Question]) -> Iterator[Asked]:
        for question in wanted:
            clock = Clock()
            yield Asked(self.reader.answer(self.reader.prompt([], question.text), clock), clock, [])


class First:
    """Asks behind the first tokens of the books, which are read once."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def __call__(self, wanted: Sequence[Question]) -> Iterator[Asked]:
        reader = self.reader
        longest = max(len(reader.ids(BETWEEN + each.text + reader.frame.after)) for each in questions())
        everything = [token for ids in reader.books.values() for token in (*ids, *reader.between)]
        head = (reader.frame.header + everything)[: reader.model.config.max_position_embeddings - longest - NEW_TOKENS]
        read, left = [], len(head) - len(reader.frame.header)
        for book, ids in reader.books.items():
            read.append((book, 0, max(0, min(len(ids), left))))
            left -= len(ids) + len(reader.between)
        prefill = Clock()
        cache = reader.model(torch.tensor([head]), use_cache=True, logits_to_keep=1)[CACHE]
        seconds = prefill.now()
        for question in wanted:
            mine, clock = copy.deepcopy(cache), Clock(seconds)
            answer = reader.answer(head + reader.ids(BETWEEN + question.text + reader.frame.after), clock, mine)
            yield Asked(answer, clock, read)


class Pasted:
    """Asks behind the chunks that BM25 finds."""

    def __init__(self, reader: Reader, budget: int) -> None:
        self.reader, self.budget = reader, budget

    def __call__(self, wanted: Sequence[Question]) -> Iterator[Asked]:
        chunks = self.reader.chunks()
        for question in wanted:
            clock = Clock()
            found = chunks.best(question.text, self.budget)
            answer = self.reader.answer(self.reader.prompt(self.reader.joined(found), question.text), clock)
            yield Asked(answer, clock, [(chunk.book, chunk.start, chunk.start + len(chunk.ids)) for chunk in found])


class Given:
    """Asks behind the verse that answers, and what stands around it."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def __call__(self, wanted: Sequence[Question]) -> Iterator[Asked]:
        for question in wanted:
            clock = Clock()
            start, context = self.reader.around(question.verse, CHUNK)
            answer = self.reader.answer(self.reader.prompt(context, question.text), clock)
            yield Asked(answer, clock, [(question.book, start, start + len(context))])


def judged(reader: Reader, question: Question, asked: Asked) -> Json:
    """``verse_read``: whether the whole verse is in what was read."""
    first, stop = reader.verse_tokens(question.verse)
    mine = [(low, high) for book, low, high in asked.read if book == question.book]
    assert asked.clock.first is not None
    return {
        "answer": asked.answer,
        "right": right(asked.answer, question.answers),
        "verse_read": all(any(low <= i < high for low, high in mine) for i in range(first, stop)),
        "wall_s": round(asked.clock.first[0], 3),
        "cpu_s": round(asked.clock.first[1], 3),
    }


def ways(reader: Reader, memories: Sequence[Any], budget: int, **options: Any) -> dict[str, Any]:
    """What gives answers to questions, by name. options: further ones of ``memstore.attach``."""
    return {
        "memory": Memories(reader, memories, budget=budget, **options),
        "nothing": Nothing(reader),
        "first": First(reader),
        "chunks": Pasted(reader, budget),
        "verse": Given(reader),
    }


NAMES = ("memory", "nothing", "first", "chunks", "verse")


def wanted(args: argparse.Namespace) -> list[Question]:
    if args.quick:
        return [each for each in questions() if each.book in QUICK_BOOKS and each.set == "development"]
    return [each for each in questions() if args.set in ("all", each.set)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=("all", *SETS), default="all")
    parser.add_argument("--ways", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--budget", type=int, default=BUDGET)
    parser.add_argument("--selector", help="as memstore.attach takes it; by default the configured one")
    parser.add_argument("--model", type=Path, help="the folder of another chat model")
    parser.add_argument("--dtype", default="bfloat16", help="what the model computes in")
    parser.add_argument("--stored", default="int8", help="the dtype of the memories")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    path = args.model or assets.smollm2()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, args.dtype)).eval()
    reader = Reader(model, AutoTokenizer.from_pretrained(path), QUICK_BOOKS if args.quick else books())
    result: Json = {
        "model": path.name,
        "threads": torch.get_num_threads(),
        "dtype": args.dtype,
        "stored": args.stored,
        "budget": args.budget,
        "selector": args.selector,
        "books": {book: len(ids) for book, ids in reader.books.items()},
        "questions": [each._asdict() | {"ways": {}} for each in wanted(args)],
    }
    options = {} if args.selector is None else {"selector": args.selector}
    out = args.out or (None if args.quick else RESULT)
    with memstore.open(assets.cache_dir() / "bench" / f"questions-{path.name}-{args.dtype}-{args.stored}") as store:
        each_way = ways(reader, read_books(reader, store, args.stored), args.budget, **options)
        for name in args.ways:
            rows = result["questions"]
            for question, row, asked in zip(wanted(args), rows, each_way[name](wanted(args)), strict=True):
                row["ways"][name] = judged(reader, question, asked)
                print(name, question.text, question.answers[0], row["ways"][name], flush=True)
            if out is not None:
                out.write_text(json.dumps(result, indent=1) + "\n")
    for kind in SETS:
        mine = [row["ways"] for row in result["questions"] if row["set"] == kind]
        print(kind, len(mine), {name: sum(row[name]["right"] for row in mine) for name in args.ways})


if __name__ == "__main__":
    main()
