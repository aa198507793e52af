"""How long does it take to open and list a store of thousands of memories?

    python bench/many.py                       # 10,000 memories, some minutes to write them
    python bench/many.py --memories 1000

Memories as SmolLM2-135M writes them (keys, values and bounds of 30 layers, so that a manifest is as long as theirs), of
two tokens each. Every round is a new process: medians of nine, in seconds of the clock, which includes reading the
catalog but not the start of Python and its imports.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import numpy as np

import memstore
from memstore.manifest import Manifest, PartSpec, WindowRule
from memstore.memory import Document
from memstore.store import MemoryStore

RESULT = Path(__file__).parent / "results" / "many.json"
LAYERS, ROUNDS = 30, 9
TIMED = """
import json, sys, time
import memstore
import memstore.config, memstore.store, memstore_backends.lmdb_records  # which is not what is measured
begun = time.perf_counter()
with memstore.open(sys.argv[1], "r") as store:
    opened = time.perf_counter()
    memories = store.memories()
    listed = time.perf_counter()
    facts = [(memory.num_tokens, memory.nbytes, memory.kind, memory.created) for memory in memories]
    told = time.perf_counter()
    one = store[memories[len(memories) // 2].name]
    found = time.perf_counter()
    assert "no such name" not in store
    print(json.dumps([opened - begun, listed - opened, told - listed, found - told, time.perf_counter() - found]))
"""


def manifest(number: int) -> Manifest:
    parts = {}
    for layer in range(LAYERS):
        shape = (3, 64)
        parts[f"keys.{layer}"] = PartSpec(shape=shape, dtype="int8", scales="channel")
        parts[f"values.{layer}"] = PartSpec(shape=shape, dtype="int8", scales="token")
        parts[f"bounds.{layer}"] = PartSpec(shape=(2, *shape), dtype="bfloat16", every=64)
    return Manifest(
        id=uuid.uuid4().hex,
        name=f"document-{number:06}",
        created=1.5,
        kind="kv",
        adapter="LlamaAdapter",
        num_tokens=2,
        block_tokens=256,
        parts=parts,
        rule=WindowRule(window=2048, overlap=1024, context="left"),
        batch_size=1,
        device="cpu",
        fingerprint={f"config.{i}": "a fact of a configuration" for i in range(30)},
        document_digest=str(number),
        has_text=True,
        has_ids=True,
        metadata={"source": f"/documents/{number:06}.txt"},
    )


def write(store: MemoryStore, number: int) -> None:
    draft = manifest(number)
    document = Document("Amen", np.arange(2, dtype=np.int32), np.array([[0, 2], [2, 4]], dtype=np.int32))
    with store.create(draft, document) as writer:
        writer.append({part: bytes(spec.num_bytes(2)) for part, spec in draft.parts.items()})
        writer.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memories", type=int, default=10_000)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        with memstore.open(path) as store:
            for number in range(args.memories):
                write(store, number)
        rounds = [
            json.loads(subprocess.run([sys.executable, "-c", TIMED, str(path)], capture_output=True, check=True).stdout)
            for _ in range(ROUNDS)
        ]
        nbytes = (path / "catalog" / "data.mdb").stat().st_size
    result = {
        "memories": args.memories,
        "catalog_bytes": nbytes,
        "seconds": {
            what: round(statistics.median(each[i] for each in rounds), 4)
            for i, what in enumerate(("open", "list", "tell of each", "find one", "miss one"))
        },
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
