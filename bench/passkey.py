"""A five-digit key hidden in real prose: does a stored memory find it, and does the model read it?

    python bench/passkey.py --length 16384 --trials 20

SmolLM2-135M-Instruct, the King James Bible as filler, the needle at a random depth, a natural question through the
chat template. Beside the memory's answer stands that of the plain model with the very blocks that the memory chose
pasted into its prompt as text. A trial costs little: the needle replaces tokens of a filler memory that is stored
once, and only the windows that see the needle are encoded again, which gives the memory that a full encoding would.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import memstore
from memstore import assets
from memstore.fingerprint import tensor_bytes
from memstore.memory import Document, Memory
from memstore.memory_writer import token_parts
from memstore.reading.chat import BETWEEN, chat_frame
from memstore.registry import adapter_for
from memstore.windows import plan

QUESTION = "What is the pass key?"
NEW_TOKENS = 14


class Reader(NamedTuple):
    """A chat model and its tokenizer."""

    model: torch.nn.Module
    tokenizer: object


class Trial(NamedTuple):
    """One hidden key and what came of it. depth: the needle's place in the document, 0 to 1."""

    key: str
    depth: float
    chosen: bool
    memory: str
    pasted: str


def smollm2() -> Reader:
    path = assets.smollm2()
    return Reader(
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(path)
    )


def filler_ids(tokenizer, length: int) -> np.ndarray:
    """The first ``length`` tokens of the Bible, from Genesis on."""
    text, ids = "", []
    for book in assets.bible():
        text += assets.book_text(book)[0] + "\n\n"
        if len(text) > 6 * length:
            break
    ids = tokenizer(text)["input_ids"]
    return np.asarray(ids[:length], dtype=np.int32)


def splice(store: memstore.store.MemoryStore, reader: Reader, filler: Memory, ids: np.ndarray, name: str) -> Memory:
    """The memory of ``ids``, which differ from the filler's in some places: only windows that see one are encoded."""
    adapter = adapter_for(reader.model)(reader.model)
    changed = np.flatnonzero(ids != filler.token_ids)
    causal = filler.manifest.rule.context == "left"  # then tokens before the first change are as they were
    fresh: dict[str, torch.Tensor] = {}
    first = last = 0
    for window in plan(len(ids), filler.manifest.rule):
        if not ((changed >= window.start) & (changed < window.stop)).any() or (
            causal and window.keep_stop <= changed[0]
        ):
            continue
        prefix = list(filler.manifest.prefix_ids)
        inputs = torch.tensor([prefix + ids[window.start : window.stop].tolist()])
        with torch.no_grad():
            encoded = adapter.encode(inputs)
        for part, rows in encoded.items():
            kept = rows[
                0, len(prefix) + window.keep_start - window.start : len(prefix) + window.keep_stop - window.start
            ]
            kept = kept.to(getattr(torch, filler.manifest.parts[part].dtype))
            fresh[part] = torch.cat((fresh[part], kept)) if part in fresh else kept
        first, last = (first or window.keep_start) if last else window.keep_start, window.keep_stop
    draft = filler.manifest.model_copy(
        update={
            "id": random.Random(name).randbytes(16).hex(),
            "name": name,
            "document_digest": name,
            "seal": None,
            "digest": None,
        }
    )
    with filler.open() as old, store.create(draft, Document(None, ids, None)) as writer:
        if draft.prefix_ids:
            writer.put_prefix({part: tensor_bytes(old.prefix(part)) for part in token_parts(draft)})
        for i in range(draft.num_blocks):
            start = i * draft.block_tokens
            block = {}
            for part in token_parts(draft):
                rows = old.block(part, i)
                stop = start + len(rows)
                low, high = max(start, first), min(stop, last)
                if low < high:
                    rows = rows.clone()
                    rows[low - start : high - start] = fresh[part][low - first : high - first]
                block[part] = rows
            block |= adapter.summaries(block)
            writer.append({part: tensor_bytes(rows) for part, rows in block.items()})
        return writer.finish()


def hide(rng: random.Random, tokenizer, ids: np.ndarray) -> tuple[str, int, np.ndarray]:
    """A key, where its needle begins, and the ids with the needle in place of as many tokens of filler."""
    key = str(rng.randint(10000, 99999))
    needle = tokenizer(f"{BETWEEN}The pass key is {key}. Remember it. {key} is the pass key.{BETWEEN}")["input_ids"]
    at = rng.randint(1024, len(ids) - 1024)
    hidden = ids.copy()
    hidden[at : at + len(needle)] = needle
    return key, at, hidden


def trial(store, reader: Reader, filler: Memory, rng: random.Random, name: str) -> Trial:
    key, at, ids = hide(rng, reader.tokenizer, filler.token_ids)
    memory = splice(store, reader, filler, ids, name)
    with memstore.attach(reader.model, memory, explain=True) as attached:
        answer = attached.generate(QUESTION, tokenizer=reader.tokenizer, max_new_tokens=NEW_TOKENS, do_sample=False)
        passages = sorted({(r.start_token, r.end_token) for r in attached.provenance()})
    del store[name]
    frame = chat_frame(reader.tokenizer)
    tail = reader.tokenizer(BETWEEN + QUESTION + frame.after, add_special_tokens=False)["input_ids"]
    pasted = frame.header + [token for start, end in passages for token in ids[start:end].tolist()] + tail
    out = reader.model.generate(torch.tensor([pasted]), max_new_tokens=NEW_TOKENS, do_sample=False)
    key_at = at + 5  # the key's own tokens, behind "The pass key is"
    chosen = any(start <= key_at < end for start, end in passages)
    plain = reader.tokenizer.decode(out[0, len(pasted) :], skip_special_tokens=True).strip()
    return Trial(key, round(at / len(ids), 3), chosen, answer, plain)


def run(length: int, trials: int, seed: int, folder: Path, report=print) -> dict:
    """All trials of one length. Keys and places follow from the seed alone."""
    reader = smollm2()
    ids = filler_ids(reader.tokenizer, length)
    with memstore.open(folder) as store:
        began = time.perf_counter()
        filler = store.encode(reader.model, reader.tokenizer, input_ids=ids, name="filler", dtype="float16")
        seconds = time.perf_counter() - began
        report(f"{length} tokens encoded in {seconds:.0f} s")
        rng, results = random.Random(seed), []
        for i in range(trials):
            results.append(trial(store, reader, filler, rng, f"trial-{i}"))
            report(results[-1])
    return {
        "length": length,
        "trials": trials,
        "seed": seed,
        "chosen": sum(t.chosen for t in results),
        "right_from_memory": sum(t.key in t.memory for t in results),
        "right_from_pasted_text": sum(t.key in t.pasted for t in results),
        "encode_seconds": round(seconds, 1),
        "results": [t._asdict() for t in results],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=16384)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = run(args.length, args.trials, args.seed, Path(folder) / "store")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"passkey-{args.length}-seed{args.seed}.json").write_text(json.dumps(result, indent=1) + "\n")
    print({key: value for key, value in result.items() if key != "results"})


if __name__ == "__main__":
    main()
