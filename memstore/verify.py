"""Check every record of a store's memories in another process: a failing disk may end the process that reads it.

python -m memstore.verify STORE RECORDS < ids     writes one JSON line {"id", "problems", "indexes"} per memory
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from memstore.errors import MEND, DamagedMemoryError, FormatError, MemstoreError, StoreError
from memstore.index_files import damaged_indexes
from memstore.memory_writer import content_digest, expected_keys
from memstore.values import describe

if TYPE_CHECKING:
    from memstore.memory import Memory
    from memstore.store import MemoryStore

logger = logging.getLogger(__name__)

Answer = tuple[list[str], dict[str, str]]  # what is wrong with a memory, and by backend with its indexes


@dataclass(frozen=True)
class VerifyResult:
    """Whether a memory's bytes are those that were written, and if not, what is wrong with each that differs.

    indexes: by backend, what is wrong with an index of it, which is built anew when it is needed. repaired, unrepaired:
    what a repair did, and what it could not do though the memory is whole.
    """

    name: str
    ok: bool
    problems: list[str] = field(default_factory=list)
    indexes: dict[str, str] = field(default_factory=dict)
    repaired: list[str] = field(default_factory=list)
    unrepaired: list[str] = field(default_factory=list)

    @property
    def notes(self) -> list[str]:
        """What a user of a whole memory should know, in sentences."""
        return [f"The index {backend!r}: {problem}." for backend, problem in self.indexes.items()] + self.unrepaired


def verify(store: MemoryStore, name: str | None) -> list[VerifyResult]:
    """See :meth:`memstore.store.MemoryStore.verify`."""
    return [result for _, result in verified(store, name)]


def verified(store: MemoryStore, name: str | None) -> list[tuple[Memory, VerifyResult]]:
    """The memories that are there once all have been read, each with its result: what another process removed or
    replaced meanwhile is not damaged."""
    found: dict[str, Answer] = {}
    while True:
        memories: list[Memory] = []
        unreadable: list[tuple[Memory, VerifyResult]] = []
        for memory in store.memories() if name is None else store.matching(name):
            try:
                memory.manifest  # noqa: B018
                memories.append(memory)
            except FormatError as error:  # the others can be checked all the same
                unreadable.append((memory, VerifyResult(memory.name, False, [str(error)])))
        waiting = [memory for memory in memories if memory.manifest.id not in found]
        if not waiting:
            break
        if not store.records.persistent:  # no other process sees them
            found.update({memory.manifest.id: (check(memory), {}) for memory in waiting})
            continue
        ids = [memory.manifest.id for memory in waiting]
        logger.info("checking every record of %d memories of %s", len(ids), store.path)
        answers, how_it_ended = _run(store, ids)
        found.update(answers)
        if how_it_ended and len(answers) < len(ids):  # it ended while it read the first one it did not answer for
            found[ids[len(answers)]] = ([how_it_ended], {})
    results = unreadable + [
        (memory, VerifyResult(memory.name, not problems, problems, indexes))
        for memory in memories
        for problems, indexes in [found[memory.manifest.id]]
    ]
    for memory, result in results:
        for problem in (*result.problems, *result.notes):
            logger.warning("memory %r: %s", memory.name, problem)
    return sorted(results, key=lambda each: each[0].name)


def _run(store: MemoryStore, ids: list[str]) -> tuple[dict[str, Answer], str | None]:
    """The answers of one child process, and what ended it early, if anything did."""
    # -P: not with modules of the folder that a user happens to be in.
    command = [sys.executable, "-P", "-m", "memstore.verify", str(store.path), store.backend]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
    child = subprocess.run(command, input="\n".join(ids), capture_output=True, text=True, env=environment)
    answers = {}
    for line in child.stdout.splitlines(keepends=True):
        if not line.endswith("\n"):  # the process was ended while it wrote this
            break
        answer = json.loads(line)
        answers[answer["id"]] = answer["problems"], answer["indexes"]
    if child.returncode < 0:
        return answers, f"The process that read it was ended by {signal.Signals(-child.returncode).name}."
    if child.returncode > 0 or len(answers) < len(ids):
        raise StoreError(f"The process that checks {store.path} failed: {child.stderr.strip()}")
    return answers, None


def check(memory: Memory) -> list[str]:
    """All that is wrong with the records of a memory, read in this process."""
    try:
        with memory.open(verify="off") as opened:
            missing = expected_keys(memory.manifest) - opened.keys
            if missing:
                return [f"It lacks {', '.join(map(describe, sorted(missing)))}."]
            problems = []
            for key in sorted(opened.keys):
                try:
                    opened.verified(key)
                except DamagedMemoryError:
                    problems.append(f"The bytes of {describe(key)} differ from those written.")
            if not problems and content_digest(opened.keys, opened.checksum) != memory.manifest.digest:
                problems.append("Its records are not those it was completed with.")
            return problems
    except StoreError as error:
        # Whose problem it is, and what to do, is told with all that is damaged.
        return [str(error).removeprefix(f"Memory {memory.name!r}: ").removesuffix(MEND).rstrip()]


def _main() -> None:
    from memstore import store

    path, records = sys.argv[1:]
    with store.open(path, "r", records=records) as opened:
        memories: dict[str, Memory] = {}
        for memory in opened.memories():
            with suppress(FormatError):
                memories[memory.manifest.id] = memory
        for line in sys.stdin.read().split():
            known = line in memories
            problems = check(memories[line]) if known else ["It was removed while it was checked."]
            indexes = damaged_indexes(memories[line]) if known else {}
            sys.stdout.write(json.dumps({"id": line, "problems": problems, "indexes": indexes}) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    try:
        _main()
    except MemstoreError as error:  # such as one that has been removed meanwhile
        sys.exit(str(error))
