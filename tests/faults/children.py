"""What forked children do: see server.py."""

from __future__ import annotations

import functools
import gc
import io
import re
import shlex
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import xxhash
from typer.main import get_command

import memstore
from memstore import describe, models, registry
from memstore.catalog import FORMAT, INDEX, PENDING, SEALED
from memstore.cli import app
from memstore.errors import MemoryNotFoundError
from memstore.manifest import Manifest
from memstore.memory import Memory
from memstore.store import MemoryStore
from tests import tiny
from tests.faults.server import shim, tell

State = dict[str, Any]

COMMANDS = get_command(app)  # as main makes it at every call
KEPT_WITH_A_MEMORY = {"data.mdb", "record", "queries.safetensors"}


def prepare(model: str) -> None:
    """In the parent: load what children need, so that they need not."""
    import torch
    import transformers  # noqa: F401

    torch.set_num_threads(1)
    loaded: Any
    tokenizer: Any
    describe.BLOCK_BYTES = 1  # blocks of 256 tokens
    if model == "stub":
        loaded, tokenizer = tiny.llama(positions=256), tiny.tokenizer()
    else:
        from memstore import assets

        loaded, tokenizer = models.load(str(assets.smollm2()))
    models.load = lambda name, dtype="float32": (loaded, tokenizer)
    registry.entries = functools.cache(registry.entries)
    Path("warm.txt").write_text("In the beginning.")
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # which imports what it needs
        for command in ("index warm.txt --model stub", "reindex warm --backend hnsw", "check warm --model stub"):
            assert run(f"{command} --store warm") == 0
        assert state("warm")["left"] == []
    gc.freeze()


def run(command: str) -> int:
    """The exit status of a command line."""
    try:
        COMMANDS.main(shlex.split(command), prog_name="memstore")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def attempt(
    command: str, store: str, strike: int = 0, error: int = 0, torn: bool = False, seconds: float = 0
) -> dict[str, Any]:
    """Run a command, and tell what the store holds before and after.

    strike: the call at which the process is killed, or, with ``error``, from which on calls that need space fail with
    it. torn: a write is done in part. seconds: when it is killed.
    """
    tell(state(store))
    begun, faults = time.perf_counter(), shim()
    faults.faults_arm(strike, error, torn)
    if seconds:
        assert faults.faults_kill_after(seconds) == 0
    code = run(command)
    calls = faults.faults_count()
    faults.faults_arm(0, 0, 0)
    return {"code": code, "calls": calls, "seconds": time.perf_counter() - begun, "state": state(store)}


def state(path: str) -> State:
    """What a reader finds in a store: the bytes of every memory and of its indexes, and what is there beyond them."""
    if not Path(path, "catalog", "data.mdb").exists():
        return {"memories": {}, "pending": [], "left": []}
    with memstore.open(path, "r") as store:
        memories = {memory.name: contents(memory) for memory in store.memories()}
        pending = [Manifest.unpack(value) for _, value in store.records.items(PENDING)]
        return {
            "memories": memories,
            "pending": sorted(manifest.name for manifest in pending),
            "left": left(store, [manifest.id for manifest in pending]),
        }


def contents(memory: Memory) -> dict[str, Any]:
    """A hash of all that a memory holds, and the checksums of its indexes, which are compared with their files."""
    digest = xxhash.xxh3_128()
    with memory.open("open") as opened:
        for key in sorted(opened.keys):
            digest.update(key + opened.value(key).tobytes())
    indexes = {}
    folder = memory.store.records.folder(memory.manifest.id)
    assert folder is not None
    for record in memory.store.indexes(memory.name):
        for slot, file in record.files.items():
            data = (folder / "indexes" / record.folder / slot).read_bytes()
            assert xxhash.xxh3_128_hexdigest(data) == file.checksum, f"the index {record.backend} is damaged"
        indexes[record.backend] = {slot: file.checksum for slot, file in sorted(record.files.items())}
    queries = folder / "queries.safetensors"
    kept = xxhash.xxh3_128_hexdigest(queries.read_bytes()) if queries.exists() else None
    known = {"id", "created", "seal"}
    return {
        "values": digest.hexdigest(),
        "manifest": memory.manifest.model_dump(mode="json", exclude=known),
        "indexes": indexes,
        "queries": kept,
    }


def left(store: MemoryStore, pending: list[str]) -> list[str]:
    """Files of a store and records of its catalog that belong to no memory."""
    sealed = {memory.manifest.id: memory for memory in store.memories()}
    found = [key.hex() for key, _ in store.records.items(b"") if not _belongs(key, {*sealed, *pending})]
    for path in sorted(store.path.rglob("*")):
        parts = path.relative_to(store.path).parts
        if path.is_dir() and parts[0] in ("catalog", "memories", "locks") and len(parts) == 1:
            continue
        if parts[0] == "catalog" and parts[1] in ("data.mdb", "lock.mdb"):
            continue
        if parts[0] == "locks":
            if re.sub(r"(-index)?\.lock$", "", parts[1]) in pending:
                continue
            if parts[1].endswith("-index.lock") and parts[1][:32] in sealed:
                continue
        if parts[0] == "memories":
            if parts[1] in pending:
                continue
            if parts[1] in sealed:
                used = {record.folder for record in store.indexes(sealed[parts[1]].name)}
                if len(parts) == 2 or parts[2] in KEPT_WITH_A_MEMORY:
                    continue
                if parts[2] == "indexes" and (len(parts) == 3 or parts[3] in used):
                    continue
        found.append("/".join(parts))
    return found


def write_for_ever(store: str, folders: list[str], stop: str) -> int:
    """Add, index and remove the memories of these folders, which share their names, until the file ``stop`` exists.

    Returns how often. Another process may do the same.
    """
    rounds = 0
    while not Path(stop).exists():
        for folder in folders:
            for command in ("index {folder} --model stub", "reindex jonah --backend hnsw", "remove jonah joel"):
                run(f"{command.format(folder=folder)} --store {store}")
        rounds += 1
    return rounds


def read_again_and_again(store: str, texts: dict[str, list[str]], times: int) -> int:
    """Attach what is there, generate, and compare with what the same text gave alone. Returns how often it was read.

    What is found must be one of these texts, whole, until it is detached, removed meanwhile or not.
    """
    model, tokenizer = models.load("stub")
    read = 0
    with memstore.open(store, "r") as opened:
        while read < times:
            for name in opened.names():
                assert name in texts
                try:
                    memory = opened[name]
                    with memory.open("open") as vectors, memstore.attach(model, memory) as attached:
                        answers = [attached.generate("Who?", tokenizer=tokenizer, max_new_tokens=2) for _ in range(2)]
                        for key in vectors.keys:
                            vectors.verified(key)
                    assert memory.text in texts[name]
                    assert answers[0] == answers[1]
                except MemoryNotFoundError:
                    continue  # removed before it was open
                read += 1
    return read


def _belongs(key: bytes, ids: set[str]) -> bool:
    if key.startswith(INDEX):
        return key[1:33].decode() in ids
    return key == FORMAT or key[:1] in (SEALED, PENDING)
