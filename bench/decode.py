"""What does one decoding step cost, with a memory and without, and what does attaching a memory cost?

    python bench/decode.py                      everything (the trained reader is needed, and 2 GB of disk)
    python bench/decode.py --parts base attach  without the reader

All figures are CPU time of one thread; a step is what lies between two calls of a logits processor inside `generate`,
and medians are over all steps of all rounds, in which the ways of reading take turns. The *plain* model reads 1,024
tokens of encoder states, as if they were a prompt.

- `reader`: the trained reader of `bench/train_reader.py`, which has the geometry of the published comparison (d_model
  256, 4 + 4 layers, 4 heads), over 65,536 tokens, greedy, while it writes the key. Retrieval is judged by the share of
  the exact attention that the chosen rows hold, per layer, head and step.
- `base`: random weights and random states in the geometry of BART-base (d_model 768, 6 + 6 layers, 12 heads, 50,265
  tokens of vocabulary), stored in bfloat16, for several lengths, batches and beams.
- `attach`: memories of the same geometry attached in a new process each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

THREADS = os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch counts the cores

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import BartConfig, BartForConditionalGeneration, LogitsProcessor  # noqa: E402
from transformers.modeling_outputs import BaseModelOutput  # noqa: E402

import memstore  # noqa: E402
from memstore.describe import describe  # noqa: E402
from memstore.fingerprint import fingerprint, tensor_bytes  # noqa: E402
from memstore.memory import Memory  # noqa: E402
from memstore.registry import adapter_for  # noqa: E402
from memstore.store import MemoryStore  # noqa: E402

RESULT = Path(__file__).parent / "results" / "decode.json"
PROMPT = 1024  # tokens that the plain model reads
LENGTHS = (10_000, 100_000, 1_000_000)
SHAPES = ((1, 1), (1, 4), (8, 1), (8, 4))  # batch, beams
READER_LENGTH = 65_536
DOCUMENTS = 3  # of which the first is timed
KS = (4, 16, 64, 256)
SWEEP: Mapping[str, tuple[dict[str, int], ...]] = {  # of each index: what it is told
    "exact": ({},),
    "faiss-ivf": tuple({"nprobe": value} for value in (1, 8, 64, 512)),
    "faiss-pca": tuple({"k_factor": value} for value in (1, 4, 16)),
    "faiss-pq": tuple({"k_factor": value} for value in (8, 64)),
    "hnsw": tuple({"ef_search": value} for value in (64, 512)),
}


class Seconds(NamedTuple):
    cpu: float
    wall: float


class Clock(LogitsProcessor):
    """Takes the time of every step, and changes nothing."""

    def __init__(self) -> None:
        self.calls: list[Seconds] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls.append(Seconds(time.process_time(), time.perf_counter()))
        return scores

    @property
    def steps(self) -> list[Seconds]:
        pairs = zip(self.calls, self.calls[1:], strict=False)
        return [Seconds(after.cpu - before.cpu, after.wall - before.wall) for before, after in pairs]


Work = Callable[[], list[Seconds]]


def generated(model: Any, encoder_outputs: BaseModelOutput, beams: int, tokens: int) -> list[Seconds]:
    """The time of each step but the first."""
    clock = Clock()
    model.generate(
        encoder_outputs=encoder_outputs,
        attention_mask=torch.ones(encoder_outputs.last_hidden_state.shape[:2], dtype=torch.long),
        logits_processor=[clock],
        num_beams=beams,
        do_sample=False,
        min_new_tokens=tokens,
        max_new_tokens=tokens,
    )
    return clock.steps


def plain(model: Any, states: Tensor, beams: int, tokens: int) -> Work:
    """The model over encoder states [batch, n, d] alone."""
    return lambda: generated(model, BaseModelOutput(last_hidden_state=states.clone()), beams, tokens)


def remembering(model: Any, memory: Memory, batch: int, beams: int, tokens: int, **options: Any) -> Work:
    """The model over a memory alone. ``told``: options of the search, beside those of attaching."""
    told = options.pop("told", {})

    def work() -> list[Seconds]:
        with memstore.attach(model, memory, **options) as attached:
            tell(attached, told)
            return generated(model, attached.empty_prompt(batch), beams, tokens)

    return work


def tell(attached: Any, options: Mapping[str, int]) -> None:
    """Search with these options from now on."""
    for source in attached._shelves.sources.values():
        if options:
            source.index.options = source.index.options.model_copy(update=options)


def in_turns(works: Mapping[str, Work], rounds: int) -> dict[str, dict[str, float]]:
    """Medians of all steps of each work, in milliseconds, and the ratio of its CPU time to that of "plain"."""
    steps: dict[str, list[Seconds]] = {name: [] for name in works}
    for work in works.values():  # warms up: each way of reading verifies and allocates at its first step
        work()
    for _ in range(rounds):
        for name, work in works.items():
            steps[name] += work()
    result = {}
    for name, each in steps.items():
        cpu, wall = (1e3 * statistics.median(times) for times in zip(*each, strict=True))
        result[name] = {"cpu_ms": round(cpu, 2), "wall_ms": round(wall, 2), "steps": len(each)}
    for row in result.values():
        row["ratio"] = round(row["cpu_ms"] / result["plain"]["cpu_ms"], 2)
    return result


def random_model() -> BartForConditionalGeneration:
    """The geometry of BART-base with random weights: the same ones in every process."""
    torch.manual_seed(0)
    config = BartConfig(
        d_model=768,
        **dict.fromkeys(("encoder_layers", "decoder_layers"), 6),
        **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 12),
        **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 3072),
        forced_eos_token_id=None,
    )
    return BartForConditionalGeneration(config).eval()


def random_memory(store: MemoryStore, model: Any, num_tokens: int) -> Memory:
    """A memory of random states in bfloat16, as if the model had encoded so many tokens."""
    adapter = adapter_for(model)(model)
    options = dict.fromkeys(("window", "overlap", "batch_size", "metadata"))
    ids = torch.zeros(num_tokens, dtype=torch.long)
    draft, document, _ = describe(
        adapter, None, None, ids, None, dtype="bfloat16", name=f"random-{num_tokens}", **options
    )
    generator = torch.Generator().manual_seed(num_tokens)
    with store.create(draft, document) as writer:
        while missing := num_tokens - writer.num_done:
            rows = torch.randn(min(missing, draft.block_tokens), model.config.d_model, generator=generator)
            writer.append({"hidden": tensor_bytes(rows.bfloat16())})
        return writer.finish()


@contextmanager
def temporary_store(folder: Path | None) -> Iterator[MemoryStore]:
    with tempfile.TemporaryDirectory(dir=folder) as name, memstore.open(Path(name) / "store") as store:
        yield store


def measure_base(store: MemoryStore, lengths: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    model = random_model()
    rows = []
    for n in lengths:
        memory = random_memory(store, model, n)
        for batch, beams in SHAPES:
            states = torch.randn(batch, PROMPT, model.config.d_model, generator=torch.Generator().manual_seed(1))
            tokens = 5 if n < 1_000_000 else 4
            works = {
                "plain": plain(model, states, beams, tokens),
                "exact": remembering(model, memory, batch, beams, tokens, top_k="all"),
            }
            times = in_turns(works, rounds if n < 1_000_000 else 2)
            rows.append({"tokens": n, "batch": batch, "beams": beams, **times})
            print(json.dumps(rows[-1]), flush=True)
        del store[memory.name]
    return rows


def asked(model: Any, memory: Memory, tokens: int) -> list[Tensor]:
    """What each layer asks of a memory at each step, layer by layer in turn: scaled queries [H, d]."""
    queries = []
    with memstore.attach(model, memory, top_k="all") as attached:
        read = attached._shelves.read

        def noting(rows: Tensor, *others: Any) -> Any:
            queries.append(rows[0, :, -1].clone())
            return read(rows, *others)

        attached._shelves.read = noting
        model.generate(encoder_outputs=attached.empty_prompt(), max_new_tokens=tokens, do_sample=False, num_beams=1)
    return queries


def masses(attached: Any, queries: Sequence[Tensor], states: Tensor, k: int) -> Tensor:
    """[steps * layers, H]: the share of the exact attention that the rows hold which a search for k finds."""
    (source,) = attached._shelves.sources.values()
    found = []
    for rows in queries:
        weights = (rows @ states.T).softmax(-1)
        ids = source.index.search(rows, k)[1]
        found.append(weights.gather(1, ids.clamp_min(0)).masked_fill(ids < 0, 0).sum(1))
    return torch.stack(found)


def measure_reader(store: MemoryStore, rounds: int) -> dict[str, Any]:
    from train_reader import DIGITS, load_reader, long_memory

    with torch.enable_grad():  # it may have to be trained
        model, _ = load_reader()
    memories = [
        long_memory(store, READER_LENGTH, name=f"document {seed}", seed=seed, dtype="bfloat16").memory
        for seed in range(DOCUMENTS)
    ]
    wide = long_memory(store, READER_LENGTH, name="in float32", dtype="float32").memory
    tokens = DIGITS + 1
    with memories[0].open() as opened:
        works = {
            "plain": plain(model, opened.rows("hidden", 0, PROMPT).float()[None], 1, tokens),
            "all, bfloat16": remembering(model, memories[0], 1, 1, tokens, top_k="all"),
            "all, float32": remembering(model, wide, 1, 1, tokens, top_k="all"),
        }
    curve = {}
    for backend, sweep in SWEEP.items():
        found = [quality(model, memory, backend, tokens) for memory in memories]
        for i, (k, told) in enumerate(product(KS, sweep)):
            mass = torch.stack([each[i] for each in found])  # [documents, steps, layers, H]
            by_head = mass.mean((0, 1))
            figures = {"mass": mass.mean(), "worst_head": by_head.min(), "worst": mass.min()}
            name = f"{backend}, k={k}, {told}"
            curve[name] = {"index": backend, "k": k, **told}
            curve[name] |= {key: round(min(1.0, float(value)), 4) for key, value in figures.items()}
            works[name] = remembering(model, memories[0], 1, 1, tokens, top_k=k, index=backend, told=told)
    times = in_turns(works, rounds)
    for name, row in curve.items():
        row |= times.pop(name)
        print(json.dumps(row), flush=True)
    print(json.dumps(times), flush=True)
    return {"tokens": READER_LENGTH, "documents": DOCUMENTS, "steps": times, "retrieval": list(curve.values())}


def quality(model: Any, memory: Memory, backend: str, tokens: int) -> list[Tensor]:
    """For each k and setting of an index the share of attention it finds, [steps, layers, H]."""
    queries = asked(model, memory, tokens)
    with memory.open() as opened, memstore.attach(model, memory, index=backend, top_k=1) as attached:
        states = torch.cat(opened.blocks("hidden")).float()
        found = []
        for k, told in product(KS, SWEEP[backend]):
            tell(attached, told)
            found.append(masses(attached, queries, states, k).unflatten(0, (-1, model.config.decoder_layers)))
        return found


def measure_attach(store: MemoryStore, lengths: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """Medians over new processes."""
    model = random_model()
    rows = []
    for n in lengths:
        memory = random_memory(store, model, n)
        command = [sys.executable, __file__, "--attach", str(store.path), memory.name]
        runs = [json.loads(subprocess.check_output(command).splitlines()[-1]) for _ in range(rounds)]
        rows.append({"tokens": n} | {key: round(statistics.median(run[key] for run in runs), 4) for key in runs[0]})
        print(json.dumps(rows[-1]), flush=True)
        del store[memory.name]
    return rows


def attach_once(path: str, name: str) -> None:
    """In a new process: seconds of CPU time, and of the clock, of each step on the way to the first token."""
    seconds: dict[str, float] = {}
    last = [Seconds(time.process_time(), time.perf_counter())]

    def passed(what: str) -> None:
        last.append(Seconds(time.process_time(), time.perf_counter()))
        seconds[f"{what}_cpu"] = last[-1].cpu - last[-2].cpu
        seconds[f"{what}_wall"] = last[-1].wall - last[-2].wall

    model = random_model()
    passed("model")
    fingerprint(adapter_for(model)(model))
    passed("fingerprint")
    memory = memstore.open(path, mode="r")[name]
    attached = memstore.attach(model, memory, top_k="all")
    attached.__enter__()
    passed("attach")
    generated(model, attached.empty_prompt(), 1, 1)
    passed("first_step")
    generated(model, attached.empty_prompt(), 1, 1)
    passed("second_step")
    print(json.dumps(seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--parts", nargs="+", choices=("reader", "base", "attach"), default=["reader", "base", "attach"]
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the memories are written, and removed")
    parser.add_argument("--attach", nargs=2, metavar=("STORE", "NAME"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    if args.attach:
        attach_once(*args.attach)
        return
    result = json.loads(args.out.read_text()) if args.out.exists() else {}
    result |= {"threads": int(THREADS), "torch": torch.__version__, "amx": torch.cpu._is_amx_tile_supported()}
    for part in args.parts:
        with temporary_store(args.folder) as store:
            if part == "reader":
                result[part] = measure_reader(store, args.rounds)
            else:
                measure = measure_base if part == "base" else measure_attach
                result[part] = measure(store, args.lengths, args.rounds)
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
