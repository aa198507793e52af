"""What does an index cost, and how much of the attention does it find?

    python bench/index.py --datasets smollm2/14.1 whisper/2 mixed/512 --n 10000 100000 1000000
    python bench/index.py --quick --device cuda

Every backend that is installed is built from the same keys (`bench/data.py` says which) and asked the same queries, 64
at a time, in turns, for every value of the option that its class calls tunable. CPU time is of all threads. Of what
was found: recall@k, and the attention mass, the share of the exact softmax over all keys that the found ones hold;
beside it the mass as a share of what the exact k best keys hold, which no search can exceed.

Keys are rounded to bfloat16 first, so that an index of float32 and one of bfloat16 hold the very same vectors. They lie
in a mapped file, as in a store: those of SmolLM2 token by token with all key-value heads side by side, so that an index
sees every third stretch. The peak of memory is what a build allocates beside that file, as a multiple of the vectors.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

THREADS = os.environ.setdefault("OMP_NUM_THREADS", "1")  # before any library counts the cores

import data  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from memstore import registry  # noqa: E402
from memstore.errors import MemstoreError  # noqa: E402
from memstore.interfaces import SavedIndex, VectorIndex  # noqa: E402

BATCH = 64
EXACT = "exact"  # is measured in both dtypes; the others bring their own
HNSW_KEYS = 200_000  # more take too long to build here
ALL = 0.9999  # of the mass: a sweep ends there
RESULTS = Path(__file__).parent / "results"


class Case(NamedTuple):
    """One way to search: an index, and the value of its tunable option."""

    backend: str
    dtype: str
    index: VectorIndex
    option: str
    value: int | None

    def tune(self) -> None:
        if self.option:
            self.index.options = self.index.options.model_copy(update={self.option: self.value})


def mapped(keys: Tensor, dtype: torch.dtype, folder: Path) -> Tensor:
    """The keys in a file that is mapped, not held: no build can count them as its own memory."""
    path = folder / f"{len(list(folder.iterdir()))}.bin"
    flat = torch.from_file(str(path), shared=True, size=keys.numel(), dtype=dtype)
    flat.view(keys.shape).copy_(keys)
    return flat.view(keys.shape)


class Watch:
    """CPU and wall time, and the peak of anonymous memory, of what runs inside ``with``."""

    def __enter__(self) -> Watch:
        ctypes.CDLL(None).malloc_trim(0)  # so that what was freed before is not taken for free
        self.before = self.peak = anonymous()
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._look)
        self.thread.start()
        self.wall, self.cpu = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *error: object) -> None:
        self.wall, self.cpu = time.perf_counter() - self.wall, time.process_time() - self.cpu
        self.done.set()
        self.thread.join()
        self.peak = max(self.peak, anonymous()) - self.before

    def _look(self) -> None:
        while not self.done.wait(0.003):
            self.peak = max(self.peak, anonymous())


def anonymous() -> int:
    """Bytes of this process that are in memory and in no file."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("RssAnon:")[2].split()[0])


def new_index(backend: str, device: str) -> VectorIndex:
    plugin = registry.load(registry.BACKENDS, backend, VectorIndex)
    wants_device = "device" in plugin.Options.model_fields and device != "cpu"
    return plugin(plugin.Options.model_validate({"device": f"{device}:0"} if wants_device else {}))


def installed() -> list[str]:
    """The index backends that can be used here, the exact one first."""
    names = []
    for plugin in registry.plugins(registry.BACKENDS):
        try:
            names.append((plugin.name != EXACT, plugin.name))
            registry.load(registry.BACKENDS, plugin.name, VectorIndex)
        except MemstoreError:
            names.pop()
    return [name for _, name in sorted(names)]


def built(
    backend: str, dtype: torch.dtype, blocks: Sequence[Tensor], folder: Path, device: str
) -> tuple[VectorIndex, dict]:
    """An index over the blocks, and what building and saving it cost."""
    index = new_index(backend, device)
    with Watch() as watch:
        index.build(blocks)
    saved = 0
    if isinstance(index, SavedIndex):
        path = folder / "saved"
        index.save(path)
        saved = path.stat().st_size
        path.unlink()
    vectors = sum(block.numel() * block.element_size() for block in blocks)
    return index, {
        "backend": backend,
        "dtype": _name(dtype),
        "cpu_s": round(watch.cpu, 3),
        "wall_s": round(watch.wall, 3),
        "peak_of_vectors": round(watch.peak / vectors, 3),
        "saved_bytes": saved,
        "saved_of_vectors": round(saved / vectors, 3),
    }


def cases(backend: str, dtype: torch.dtype, index: VectorIndex) -> Iterator[Case]:
    options = index.tunable.items()
    for option, values in options:
        for value in values:
            yield Case(backend, _name(dtype), index, option, value)
    if not options:
        yield Case(backend, _name(dtype), index, "", None)


class Truth:
    """Exact scores of one batch of queries, and what they say of any answer."""

    def __init__(self, queries: Tensor, blocks: Sequence[Tensor], k: int) -> None:
        self.scores = torch.cat([queries @ block.T for block in blocks], 1)
        self.total = self.scores.logsumexp(1, keepdim=True)
        self.best = self.scores.topk(min(k, self.scores.shape[1])).indices

    def judge(self, ids: Tensor, k: int) -> dict[str, Tensor]:
        """recall, mass and share of it, each [m], of found ids [m, k]."""
        best = self.best[:, :k]
        found = torch.zeros_like(self.scores, dtype=torch.bool).scatter_(1, ids.clamp_min(0), ids >= 0)
        mass, most = self.mass(ids), self.mass(best)
        return {"recall": found.gather(1, best).float().mean(1), "mass": mass, "share": mass / most}

    def mass(self, ids: Tensor) -> Tensor:
        weights = (self.scores.gather(1, ids.clamp_min(0)) - self.total).exp()
        return weights.masked_fill(ids < 0, 0).sum(1)


def searched(case: Case, queries: Tensor, k: int) -> tuple[Tensor, float, float]:
    """The ids found, and the CPU and wall time in milliseconds."""
    case.tune()
    synchronise(queries)
    wall, cpu = time.perf_counter(), time.process_time()
    ids = case.index.search(queries, k)[1]
    synchronise(queries)
    return ids, 1e3 * (time.process_time() - cpu), 1e3 * (time.perf_counter() - wall)


def synchronise(queries: Tensor) -> None:
    if queries.is_cuda:
        torch.cuda.synchronize()


def measure(
    vectors: data.Vectors, backends: Sequence[str], ks: Sequence[int], rounds: int, device: str
) -> dict[str, Any]:
    """Build all, then search with all in turns. Returns what goes into the file."""
    n, width = len(vectors.keys), vectors.keys.shape[-1]
    builds, rows = [], list[Case]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kept = {}
        for dtype in (torch.float32, torch.bfloat16):
            keys = mapped(vectors.keys.bfloat16(), dtype, folder)
            kept[dtype] = [block[:, vectors.head].to(device) for block in keys.split(vectors.block_rows)]
        for backend in backends:
            if backend == "hnsw" and n > HNSW_KEYS:
                continue
            for dtype in kept if backend == EXACT else (torch.float32,):
                index, cost = built(backend, dtype, kept[dtype], folder, device)
                builds.append(cost)
                rows += cases(backend, dtype, index)
                print(cost, flush=True)
        found: dict[tuple[int, int], list[dict[str, float]]] = {}
        for queries in vectors.queries.to(device).split(BATCH)[:rounds]:
            truth = Truth(queries, kept[torch.float32], max(ks))
            for k in ks:
                for i, case in enumerate(rows):
                    if not worthwhile(found, rows, i, k):
                        continue
                    ids, cpu, wall = searched(case, queries, k)
                    judged = {key: float(value.mean()) for key, value in truth.judge(ids, k).items()}
                    found.setdefault((i, k), []).append({"cpu_ms": cpu, "wall_ms": wall, **judged})
        searches = [
            {
                "backend": rows[i].backend,
                "dtype": rows[i].dtype,
                "option": rows[i].option,
                "value": rows[i].value,
                "k": k,
            }
            | summary(each)
            for (i, k), each in found.items()
        ]
    for row in searches:
        print(row, flush=True)
    return {"n": n, "d": width, "builds": builds, "searches": searches}


def worthwhile(found: Mapping[tuple[int, int], list[dict[str, float]]], rows: Sequence[Case], i: int, k: int) -> bool:
    """Whether a case is measured: not if the value before it already found all there is, in the first batch."""
    if i == 0 or rows[i - 1].index is not rows[i].index:
        return True
    before = found.get((i - 1, k))
    return before is not None and before[0]["share"] < ALL


def summary(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Medians of the times and means of what was found."""
    times = {key: round(statistics.median(each[key] for each in rounds), 2) for key in ("cpu_ms", "wall_ms")}
    return times | {key: round(statistics.mean(each[key] for each in rounds), 5) for key in ("recall", "mass", "share")}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", nargs="+", default=["smollm2/4.0", "smollm2/14.1", "smollm2/24.2", "whisper/2"])
    parser.add_argument("--n", nargs="+", type=int, default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--k", nargs="+", type=int, default=[64, 256, 1024])
    parser.add_argument("--backends", nargs="+", default=installed())
    parser.add_argument("--rounds", type=int, default=7, help=f"batches of {BATCH} queries, at most 16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="synthetic keys made on the spot, few of everything")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    if args.quick:
        args.datasets, args.n, args.k, args.rounds = ["mixed/512"], [100_000], [256], 5
    for name in args.datasets:
        sizes = []
        for n in args.n:
            vectors = data.load(name, n)
            if len(vectors.keys) not in [size["n"] for size in sizes]:
                print(f"{name}: {len(vectors.keys):,} keys", flush=True)
                sizes.append(measure(vectors, args.backends, args.k, args.rounds, args.device))
        result = {
            "dataset": name,
            "device": args.device if args.device == "cpu" else torch.cuda.get_device_name(),
            "threads": int(THREADS),
            "amx": torch.cpu._is_amx_tile_supported(),
            "torch": torch.__version__,
            "queries": BATCH * args.rounds,
            "encode_cpu_s_per_token": data.encoding_cost(name),
            "sizes": sizes,
        }
        slug = f"index-{name.replace('/', '-')}{'-quick' * args.quick}{f'-{args.device}' * (args.device != 'cpu')}"
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"{slug}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
