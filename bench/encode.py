"""How fast is reading a document into a store, beside the bare forward passes that it takes?

    python bench/encode.py

SmolLM2-135M reads a stretch of the Bible in windows of 1,024 tokens. *Bare* are the model's own forward passes, without
its head and without a cache, over the very batches that the encoding gives it; the others are `store.encode` as a
whole, into a store on disk: windows, keys with their rotation undone, checks, coding, checksums, commits. All take
turns in one run, warmed up; medians of CPU time and of the clock, and of the ratios within each round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

THREADS = os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch counts the cores

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

import memstore  # noqa: E402
from memstore import assets  # noqa: E402
from memstore.families import DecoderOnlyAdapter  # noqa: E402
from memstore.store import MemoryStore  # noqa: E402

RESULT = Path(__file__).parent / "results" / "encode.json"
DTYPES = ("float16", "int8")
WINDOW = 1024


def in_turns(works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, float]]:
    """Medians of each work's seconds, and of its ratio to the first one's in the same round."""
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            cpu, wall = time.process_time(), time.perf_counter()
            work()
            seconds[name].append((time.process_time() - cpu, time.perf_counter() - wall))
    bare = seconds[next(iter(works))]
    found = {}
    for name, runs in seconds.items():
        ratios = [
            [mine / theirs for mine, theirs in zip(run, base, strict=True)]
            for run, base in zip(runs, bare, strict=True)
        ]
        figures = (*zip(*runs, strict=True), *zip(*ratios, strict=True))
        names = ("cpu_s", "wall_s", "cpu_ratio", "wall_ratio")
        found[name] = {key: round(statistics.median(each), 3) for key, each in zip(names, figures, strict=True)}
    return found


def batches_of(encode: Callable[[], object]) -> list[Tensor]:
    """The ids that an encoding gives to the model, batch by batch."""
    seen: list[Tensor] = []
    real = DecoderOnlyAdapter.encode

    def noting(self: DecoderOnlyAdapter, windows: Tensor) -> dict[str, Tensor]:
        seen.append(windows)
        return real(self, windows)

    DecoderOnlyAdapter.encode = noting  # type: ignore[method-assign]
    try:
        encode()
    finally:
        DecoderOnlyAdapter.encode = real  # type: ignore[method-assign]
    return seen


def measure(store: MemoryStore, windows: int, batch: int, rounds: int) -> dict[str, Any]:
    path = assets.smollm2()
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    num_tokens = WINDOW + (windows - 1) * WINDOW // 2
    ids = torch.tensor(tokenizer(assets.book_text("Genesis")[0][: 8 * num_tokens])["input_ids"][:num_tokens])
    sizes: dict[str, int] = {}

    def encode(dtype: str) -> None:
        memory = store.encode(model, tokenizer, input_ids=ids, name=dtype, dtype=dtype, window=WINDOW, batch_size=batch)
        sizes[dtype] = memory.nbytes
        del store[dtype]

    batches = batches_of(lambda: encode(DTYPES[0]))  # which warms up

    def bare() -> None:
        for each in batches:
            model.model(input_ids=each, use_cache=False)

    bare()
    works = {"bare": bare} | {dtype: lambda dtype=dtype: encode(dtype) for dtype in DTYPES}
    times = in_turns(works, rounds)
    values = num_tokens * 2 * len(model.model.layers) * model.config.num_key_value_heads * model.config.head_dim
    for dtype, size in sizes.items():
        times[dtype] |= {"bytes_a_value": round(size / values, 3)}
    read = sum(each.numel() for each in batches)
    return {
        "tokens": num_tokens,
        "tokens_read": read,
        "windows": windows,
        "batch": batch,
        "rounds": rounds,
        "ways": times,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the memories are written, and removed")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder, memstore.open(Path(folder) / "store") as store:
        result = measure(store, args.windows, args.batch, args.rounds)
    result |= {"threads": int(THREADS), "torch": torch.__version__, "amx": torch.cpu._is_amx_tile_supported()}
    print(json.dumps(result, indent=1))
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
