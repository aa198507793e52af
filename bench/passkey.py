"""A five-digit key hidden in real prose: does a stored memory find it, and does the model read it?

    python bench/passkey.py --length 65536 --trials 40 --seed 1

SmolLM2-135M-Instruct in float32, or another chat model (`--model FOLDER`); the King James Bible as filler, kept in
int8, the needle in place of as many of its tokens at a random depth, a natural question through the chat template,
and no beginning of the answer. Beside the memory's answer stand those of the plain model with the very spans that
the memory chose pasted into its prompt as text, of the plain model with 3,000 tokens of the document around the
needle, which is what it can do at best, and of the memory where the needle's block is named (oracle): the memory's
own where it read the same spans. The filler is encoded once for all lengths. Seeds from 1,000 on are for
development: no figure that is published comes from one.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from splice import splice
from transformers import AutoModelForCausalLM, AutoTokenizer

import memstore
from memstore import assets
from memstore.memory import Memory
from memstore.reading.chat import BETWEEN, chat_frame
from memstore.reading.kv import BUDGET
from memstore.reading.selection import BLOCK, choose_spans, num_blocks, span_width
from memstore.reading.selectors import DEFAULT, SELECTORS, BlockSelector, Question
from memstore.registry import adapter_for

QUESTION = "What is the pass key?"
NEW_TOKENS = 14
FILLER = 262_144  # tokens encoded, of which a shorter document is the beginning
AROUND = 3_000  # tokens of coherent text around the needle: the ceiling
KEY_AT = 5  # tokens of the needle before the key itself


class Reader(NamedTuple):
    """A chat model and its tokenizer."""

    model: Any
    tokenizer: Any


class Trial(NamedTuple):
    """One hidden key and what came of it. depth: the needle's place in the document, 0 to 1; rank: how many blocks the
    selector scored above the needle's."""

    key: str
    depth: float
    rank: int
    chosen: bool
    memory: str
    pasted: str
    ceiling: str
    oracle: str


class Noting(BlockSelector):
    """A selector whose last scores are kept."""

    def __init__(self, selector: BlockSelector) -> None:
        self.selector, self.needs_queries = selector, selector.needs_queries  # type: ignore[misc]
        self.prepare = selector.prepare  # type: ignore[method-assign]
        self.scores = torch.empty(0)

    def score(self, question: Question) -> torch.Tensor:
        self.scores = self.selector.score(question)
        return self.scores


class Oracle(BlockSelector):
    """Knows the block."""

    needs_queries = False

    def __init__(self, block: int) -> None:
        self.block = block

    def score(self, question: Question) -> torch.Tensor:
        scores = torch.zeros(len(question.asks), question.num_blocks)
        scores[:, self.block] = 1
        return scores


def load(path: Path | None = None, dtype: torch.dtype = torch.float32) -> Reader:
    """The chat model in this folder; without one SmolLM2."""
    path = path or assets.smollm2()
    return Reader(AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval(), AutoTokenizer.from_pretrained(path))


def name_of(reader: Reader) -> str:
    return Path(reader.model.name_or_path).name


def dtype_of(reader: Reader) -> str:
    return str(reader.model.dtype).removeprefix("torch.")


def filler_ids(tokenizer: Any, length: int) -> np.ndarray:
    """The first ``length`` tokens of the Bible, from Genesis on."""
    text, ids = "", []
    for book in assets.bible():
        text += assets.book_text(book)[0] + "\n\n"
        if len(text) > 6 * length:
            break
    ids = tokenizer(text)["input_ids"]
    return np.asarray(ids[:length], dtype=np.int32)


def filler(reader: Reader, length: int = FILLER) -> Memory:
    """The memory of the filler, encoded once and kept in the cache folder."""

    def encode(folder: Path) -> None:
        with memstore.open(folder) as store:
            began = time.perf_counter()
            ids = filler_ids(reader.tokenizer, length)
            store.encode(reader.model, reader.tokenizer, input_ids=ids, name="filler", dtype="int8")
            print(f"{length} tokens encoded in {time.perf_counter() - began:.0f} s", flush=True)

    name = f"filler-{name_of(reader)}-{dtype_of(reader)}-{length}"
    folder = assets.build_once(assets.cache_dir() / "bench" / name, encode)
    return memstore.open(folder, "r")["filler"]


def hide(rng: random.Random, tokenizer: Any, ids: np.ndarray) -> tuple[str, int, np.ndarray]:
    """A key, where its needle begins, and the ids with the needle in place of as many tokens of filler."""
    key = str(rng.randint(10000, 99999))
    needle = tokenizer(f"{BETWEEN}The pass key is {key}. Remember it. {key} is the pass key.{BETWEEN}")["input_ids"]
    at = rng.randint(1024, len(ids) - 1024)
    hidden = ids.copy()
    hidden[at : at + len(needle)] = needle
    return key, at, hidden


def from_memory(reader: Reader, memory: Memory, selector: BlockSelector) -> tuple[str, list[tuple[int, int]]]:
    """The answer, and the passages that were read, in order."""
    with memstore.attach(reader.model, memory, selector=selector, explain=True) as attached:
        answer = attached.generate(QUESTION, tokenizer=reader.tokenizer, max_new_tokens=NEW_TOKENS, do_sample=False)
        passages = attached.provenance().passages()
    return answer, sorted((passage.start_token, passage.end_token) for passage in passages)


def told(block: int, length: int) -> list[tuple[int, int]]:
    """The passages that are read where the block is named."""
    scores, blocks = torch.zeros(num_blocks(length)), BUDGET // BLOCK
    scores[block] = 1
    spans = choose_spans(scores, [length], blocks, span_width(scores, blocks))
    return [(at, min(at + BLOCK, span.stop)) for span in spans for at in range(span.start, span.stop, BLOCK)]


def from_text(reader: Reader, ids: list[int]) -> str:
    """The plain model's answer with these tokens in its prompt, where the memory stands."""
    frame = chat_frame(reader.tokenizer)
    tail = reader.tokenizer(BETWEEN + QUESTION + frame.after, add_special_tokens=False)["input_ids"]
    prompt = torch.tensor([frame.header + ids + tail])
    out = reader.model.generate(prompt, max_new_tokens=NEW_TOKENS, do_sample=False)
    return str(reader.tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True)).strip()


def trial(
    reader: Reader, base: Memory, length: int, hidden: tuple[str, int, np.ndarray], name: str, selector: str = DEFAULT
) -> Trial:
    """Ask for a key that is hidden in the first ``length`` tokens of the filler."""
    key, at, ids = hidden
    memory = splice(adapter_for(reader.model)(reader.model), base, ids, name)
    noting = Noting(SELECTORS[selector]())
    answer, passages = from_memory(reader, memory, noting)
    block = (at + KEY_AT) // BLOCK
    scores = noting.scores[0] if noting.scores.dim() == 2 else noting.scores[:, 0].mean(0)
    start = max(0, min(at - AROUND // 2, length - AROUND))
    oracle = answer if passages == told(block, length) else from_memory(reader, memory, Oracle(block))[0]
    return Trial(
        key=key,
        depth=round(at / length, 3),
        rank=int((scores > scores[block]).sum()),
        chosen=any(start <= at + KEY_AT < end for start, end in passages),
        memory=answer,
        pasted=from_text(reader, [token for start, end in passages for token in ids[start:end].tolist()]),
        ceiling=from_text(reader, ids[start : start + AROUND].tolist()),
        oracle=oracle,
    )


def called(reader: Reader) -> str:
    return f"{name_of(reader)} in {dtype_of(reader)}"


def summary(reader: Reader, length: int, seed: int, results: list[Trial]) -> dict[str, Any]:
    """The counts of one length, and every trial."""
    right = {
        f"right_{way}": sum(t.key in getattr(t, way) for t in results)
        for way in ("memory", "pasted", "ceiling", "oracle")
    }
    ranks = [t.rank for t in results]
    return {
        "model": called(reader),
        "length": length,
        "seed": seed,
        "trials": len(results),
        "rank_0": sum(rank == 0 for rank in ranks),
        "rank_median": statistics.median(ranks),
        "rank_worst": max(ranks),
        "chosen": sum(t.chosen for t in results),
        **right,
        "results": [t._asdict() for t in results],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, nargs="+", default=[16384])
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16"], help="what the model computes in"
    )
    parser.add_argument("--model", type=Path, help="the folder of another chat model")
    parser.add_argument("--selector", default=DEFAULT, choices=list(SELECTORS))
    parser.add_argument("--resume", action="store_true", help="go on with the trials of an interrupted run")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    reader = load(args.model, getattr(torch, args.dtype))
    base = filler(reader, FILLER if args.model is None else max(args.length))
    args.out.mkdir(parents=True, exist_ok=True)
    assert base.token_ids is not None
    own = "" if args.model is None else f"{name_of(reader)}-"
    own += "" if args.selector == DEFAULT else f"{args.selector}-"
    for length in args.length:
        rng, results = random.Random(f"{args.seed} {length}"), []
        out = args.out / f"passkey-{own}{length}-seed{args.seed}.json"
        before = json.loads(out.read_text()) if args.resume and out.exists() else None
        if before is not None and before["model"] != called(reader):
            parser.error(f"{out} was made by {before['model']}; leave --resume out.")
        done = [] if before is None else before["results"]
        for i in range(args.trials):
            hidden = hide(rng, reader.tokenizer, base.token_ids[:length])
            known = i < len(done)
            results.append(
                Trial(**done[i]) if known else trial(reader, base, length, hidden, f"trial-{i}", args.selector)
            )
            assert results[-1].key == hidden[0]
            print(length, i, results[-1], flush=True)
            found = summary(reader, length, args.seed, results)
            if len(results) >= len(done):
                out.write_text(json.dumps(found, indent=1) + "\n")
        print({key: value for key, value in found.items() if key != "results"}, flush=True)


if __name__ == "__main__":
    main()
