"""How fast is attention over everything: the fused read beside a plain sum over the same memory.

    python bench/reading.py

`memstore.attention.read_all` scores every row of a memory, takes the softmax and adds the rows up by it, in one pass;
where a CPU has AMX, `memstore.bfloat16` does so for memories in bfloat16. A sum reads the same bytes and does almost
nothing with them, so its bandwidth is what a read could reach at best. All are timed in turns in one run: CPU time,
medians. The rows of queries are the heads of one decoding step, times beams.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

THREADS = os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch counts the cores

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from memstore.attention import PLAIN, Partial, read_all  # noqa: E402
from memstore.bfloat16 import read_bfloat16, suits  # noqa: E402

BLOCK_ROWS = 16384  # of a store's blocks
RESULT = Path(__file__).parent / "results" / "reading.json"


def medians(works: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of CPU time of each work, in turns."""
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds + 1):  # of which the first warms up
        for name, work in works.items():
            began = time.process_time()
            work()
            seconds[name].append(time.process_time() - began)
    return {name: statistics.median(each[1:]) for name, each in seconds.items()}


def read(queries: Tensor, blocks: Sequence[Tensor]) -> Partial:
    """As an attached model reads these blocks."""
    return read_bfloat16(queries, blocks) if suits(queries, blocks, PLAIN) else read_all(queries, blocks)


def twice(queries: Tensor, memory: Tensor) -> Tensor:
    """The same attention as two products over the whole memory, which is read twice."""
    return (queries @ memory.T).softmax(-1) @ memory


def measure(n: int, width: int, dtype: torch.dtype, queries: list[int], rounds: int) -> dict:
    memory = torch.randn(n, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    blocks = memory.split(BLOCK_ROWS)
    asked = {m: torch.randn(m, width) / width**0.5 for m in queries}
    works: dict[str, Callable[[], object]] = {"sum": memory.sum}
    for m, rows in asked.items():
        works[f"read {m}"] = lambda rows=rows: read(rows, blocks)
        if dtype == torch.float32:
            works[f"twice {m}"] = lambda rows=rows: twice(rows, memory)
    seconds = medians(works, rounds)
    bandwidth = {name: memory.numel() * memory.element_size() / each / 1e9 for name, each in seconds.items()}
    result = {
        "n": n,
        "d": width,
        "dtype": str(dtype).removeprefix("torch."),
        "sum_gb_s": round(bandwidth["sum"], 2),
        "reads": [
            {
                "queries": m,
                "read_gb_s": round(bandwidth[f"read {m}"], 2),
                "share": round(bandwidth[f"read {m}"] / bandwidth["sum"], 3),
            }
            | ({"twice_gb_s": round(bandwidth[f"twice {m}"], 2)} if f"twice {m}" in bandwidth else {})
            for m in queries
        ],
    }
    print(json.dumps(result), flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=200_000)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    cases = [
        measure(args.n, args.width, dtype, args.queries, args.rounds)
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    ]
    result = {"threads": int(THREADS), "torch": torch.__version__, "rounds": args.rounds, "cases": cases}
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
