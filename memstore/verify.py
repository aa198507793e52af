"""Check every byte of a store's memories in another process, because a failing disk may end the process that reads it.

python -m memstore.verify STORE RECORDS < ids     writes one JSON line {"id", "problem"} per memory
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from memstore.errors import StoreError
from memstore.memory_writer import content_digest, expected_keys

if TYPE_CHECKING:
    from memstore.memory import Memory
    from memstore.store import MemoryStore


@dataclass(frozen=True)
class VerifyResult:
    """Whether a memory's bytes are those that were written, and if not, what is wrong."""

    name: str
    ok: bool
    problems: list[str] = field(default_factory=list)


def verify(store: MemoryStore, name: str | None) -> list[VerifyResult]:
    """See :meth:`memstore.store.MemoryStore.verify`."""
    memories = store.memories() if name is None else [store[name]]
    if not store.records.persistent:  # no other process sees them
        return [_result(memory, _check(memory)) for memory in memories]
    found: dict[str, str | None] = {}
    while waiting := [memory.manifest.id for memory in memories if memory.manifest.id not in found]:
        answers, how_it_ended = _run(store, waiting)
        found.update(answers)
        if how_it_ended and len(answers) < len(waiting):  # it ended while it read the first one it did not answer for
            found[waiting[len(answers)]] = how_it_ended
    return [_result(memory, found[memory.manifest.id]) for memory in memories]


def _result(memory: Memory, problem: str | None) -> VerifyResult:
    return VerifyResult(memory.name, problem is None, [] if problem is None else [problem])


def _run(store: MemoryStore, ids: list[str]) -> tuple[dict[str, str | None], str | None]:
    """The answers of one child process, and what ended it early, if anything did."""
    command = [sys.executable, "-m", "memstore.verify", str(store.path), store.backend]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
    child = subprocess.run(command, input="\n".join(ids), capture_output=True, text=True, env=environment)
    answers = {}
    for line in child.stdout.splitlines():
        answer = json.loads(line)
        answers[answer["id"]] = answer["problem"]
    if child.returncode < 0:
        return answers, f"The process that read it was ended by {signal.Signals(-child.returncode).name}."
    if child.returncode > 0 or len(answers) < len(ids):
        raise StoreError(f"The process that checks {store.path} failed:\n{child.stderr.strip()}")
    return answers, None


def _check(memory: Memory) -> str | None:
    try:
        with memory.open(verify="open") as opened:
            missing = expected_keys(memory.manifest) - opened.keys
            if missing:
                return f"It lacks the records {sorted(missing)}."
            if content_digest(opened.keys, opened.checksum) != memory.manifest.digest:
                return "Its records are not those it was completed with."
    except StoreError as error:
        return str(error)
    return None


def _main() -> None:
    from memstore import store

    path, records = sys.argv[1:]
    with store.open(path, "r", records=records) as opened:
        memories = {memory.manifest.id: memory for memory in opened.memories()}
        for line in sys.stdin.read().split():
            problem = _check(memories[line]) if line in memories else "It was removed while it was checked."
            sys.stdout.write(json.dumps({"id": line, "problem": problem}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    _main()
