"""What does it cost to choose what a prompt reads of long memories, and does a token cost more the longer they are?

    python bench/choose.py                                  # 6 GB of disk for a while
    python bench/choose.py --lengths 16384 --prompts 40 --rounds 1

SmolLM2-135M-Instruct, memories in float16. All memories repeat the keys and values of a text that is encoded once, so
that nothing but their length differs. For prompts of several lengths: the prefill of the plain model; the whole prefill
with a memory attached; what of it is choosing (the pass over the prompt's end, scores, and loading the chosen spans).
Each attachment reads one prompt of every length and then the first *again*, for which it has kept the bounds of blocks.
Then the time per token while an answer is written. Medians over rounds in which everything takes turns, seconds of CPU
time and of the clock; *first* is the very first prompt, which verifies checksums of what it touches.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

THREADS = os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch counts the cores

import numpy as np  # noqa: E402
import torch  # noqa: E402
from passkey import filler_ids  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: E402

import memstore  # noqa: E402
from memstore import assets  # noqa: E402
from memstore.fingerprint import tensor_bytes  # noqa: E402
from memstore.memory import Document, Memory  # noqa: E402
from memstore.memory_writer import token_parts  # noqa: E402
from memstore.reading.sequences import Sequences  # noqa: E402
from memstore.store import MemoryStore  # noqa: E402

RESULT = Path(__file__).parent / "results" / "choose.json"
ENCODED = 16_384  # tokens that are read, and repeated where a memory is longer
NEW_TOKENS = 16
CACHE = "cache" if "cache" in signature(LlamaForCausalLM.forward).parameters else "past_key_values"

Times = dict[str, list[tuple[float, float]]]  # CPU and clock, by what was timed


def repeated(store: MemoryStore, base: Memory, length: int) -> Memory:
    """A memory of ``length`` tokens, whose blocks are those of ``base`` again and again."""
    draft = base.manifest.model_copy(
        update={
            "id": random.Random(length).randbytes(16).hex(),
            "name": f"long-{length}",
            "num_tokens": length,
            "document_digest": f"long-{length}",
            "seal": None,
            "digest": None,
        }
    )
    assert length % draft.block_tokens == ENCODED % draft.block_tokens == 0
    with base.open() as old, store.create(draft, Document(None, np.resize(base.token_ids, length), None)) as writer:
        if draft.prefix_ids:
            writer.put_prefix({part: tensor_bytes(old.prefix(part)) for part in token_parts(draft)})
        for i in range(draft.num_blocks):
            block = {part: old.block(part, i % base.manifest.num_blocks) for part in draft.parts}
            writer.append({part: tensor_bytes(rows) for part, rows in block.items()})
        return writer.finish()


@contextmanager
def timed(times: Times, name: str) -> Iterator[None]:
    cpu, wall = time.process_time(), time.perf_counter()
    yield
    times[name].append((time.process_time() - cpu, time.perf_counter() - wall))


def step(model: Any, ids: torch.Tensor, cache: Any = None) -> tuple[torch.Tensor, Any]:
    """The next token [1, 1] and the cache."""
    known = {} if cache is None else {CACHE: cache}
    out = model(input_ids=ids, use_cache=True, logits_to_keep=1, **known)
    return out.logits[:, -1:].argmax(-1), out[CACHE]


@contextmanager
def choosing(times: Times, name: str) -> Iterator[None]:
    """Time what an attachment does before the model reads a prompt."""
    begin = Sequences.begin

    def timed_begin(self: Sequences, *args: Any) -> Any:
        with timed(times, name):
            return begin(self, *args)

    Sequences.begin = timed_begin
    try:
        yield
    finally:
        Sequences.begin = begin


def measure(model: Any, memories: dict[int, Memory], prompts: list[torch.Tensor], rounds: int, options: Any) -> Times:
    times: Times = defaultdict(list)
    for length, memory in memories.items():
        with memstore.attach(model, memory, **options), timed(times, f"first/{length}"):
            step(model, prompts[0])
    for i in range(rounds):
        for prompt in prompts:
            with timed(times, f"plain/{prompt.shape[1]}"):
                step(model, prompt)
        for length, memory in memories.items():
            with memstore.attach(model, memory, **options):
                for number, prompt in enumerate((*prompts, prompts[0])):
                    name = f"{length}/{prompt.shape[1]}" + ("/again" if number == len(prompts) else "")
                    with choosing(times, f"choose/{name}"), timed(times, f"prefill/{name}"):
                        token, cache = step(model, prompt)
                    for _ in range(0 if number else NEW_TOKENS):
                        with timed(times, f"token/{length}"):
                            token, cache = step(model, token, cache)
        print(f"round {i + 1} of {rounds}", flush=True)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[16_384, 65_536, 262_144])
    parser.add_argument("--prompts", type=int, nargs="+", default=[40, 1000, 4000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--selector")
    parser.add_argument("--dtype", default="bfloat16", help="what the model computes in")
    parser.add_argument("--store", type=Path, help="where a memory 'filler-16384' of this model may be already")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    path = assets.smollm2()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, args.dtype)).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = filler_ids(tokenizer, ENCODED + max(args.prompts))
    prompts = [torch.from_numpy(ids[ENCODED : ENCODED + size]).long()[None] for size in args.prompts]
    with tempfile.TemporaryDirectory() as folder, memstore.open(args.store or Path(folder) / "store") as store:
        name = f"filler-{ENCODED}"
        if name not in store:
            store.encode(model, tokenizer, input_ids=ids[:ENCODED], name=name, dtype="float16")
        for old in store.select("long-*"):
            del store[old.name]
        memories = {length: repeated(store, store[name], length) for length in args.lengths}
        print("memories are ready", flush=True)
        times = measure(
            model, memories, prompts, args.rounds, {} if args.selector is None else {"selector": args.selector}
        )
        for memory in memories.values():
            del store[memory.name]
    result = {
        "model": f"SmolLM2-135M-Instruct in {args.dtype}, memories in float16",
        "threads": torch.get_num_threads(),
        "rounds": args.rounds,
        "selector": args.selector,
        "cpu_and_wall_seconds": {
            name: [round(statistics.median(each[i] for each in measured), 4) for i in (0, 1)]
            for name, measured in sorted(times.items())
        },
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
